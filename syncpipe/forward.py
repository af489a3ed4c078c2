"""The forward driver: ``pipe(x)``.

    x -> scatter -> [ for each action: receive inputs -> stage -> send outputs ] -> gather -> y

It leaves one true autograd graph behind; how that goes back is drawn in ``runtime/transfer.py``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import forward_ad

from syncpipe.microbatch import gather, scatter
from syncpipe.runtime.engine import Message
from syncpipe.runtime.recorder import Recorder
from syncpipe.runtime.rematerialization.checkpoint import Frame
from syncpipe.runtime.streams import Lane
from syncpipe.schedules.schedule import Action, forward_program
from syncpipe.stages.inplace import sent
from syncpipe.stages.pipeline import Call, Pipeline
from syncpipe.stages.transfer import early, gate
from syncpipe.tree import map_tensors, tensors_in

__all__ = ["forward"]


_OWN = (0,)


class _Parcel(NamedTuple):
    """What travels over an edge.

    Attributes:
        value: a tree.
        event: tells when it is there.
        tokens: start the recomputations of the last micro-batch.
        marks: for each tensor of the value, who else it belongs to (see ``runtime.inplace``).
    """

    value: Any
    event: Any
    tokens: tuple[Tensor, ...]
    marks: Sequence[int]


def forward(
    pipeline: Pipeline,
    input: Any,
    *,
    chunks: int,
    checkpoint: Sequence[str],
    inline: bool,
    recorder: Recorder | None,
) -> Any:
    """Runs a mini-batch through a pipeline.

    Args:
        pipeline: the pipeline.
        input: a tree of tensors and other values, on the first device.
        chunks: at most so many micro-batches.
        checkpoint: for each stage ``"always"``, ``"except_last"`` or ``"never"``.
        inline: run on the calling thread.
        recorder: writes down what runs when, for a trace.
    """
    micro_batches = scatter(input, chunks)
    call = Call(
        pipeline, len(micro_batches), checkpoint=checkpoint, inline=inline, recorder=recorder
    )
    first = micro_batches[0]
    run = _Forward(call, micro_batches)
    call.run(forward_program(call.batch.m, pipeline.worker_of), run, first)
    call.hand_over(-1, run.outputs)
    return gather(run.outputs)


class _Forward:
    """The forward of one mini-batch, as a task for the engine."""

    def __init__(self, call: Call, micro_batches: list[Any]) -> None:
        self._call = call
        self._pipeline = call.pipeline
        self._batch = call.batch
        self._lanes = call.lanes
        self._inputs: list[Any] = micro_batches
        self._rematerialized = call.rematerialized
        self._recorder = call.recorder
        # Forward-mode AD has nothing that goes back, and does not pass a gate.
        self._gated = (
            call.batch.state.grad and len(call.lanes) > 1 and forward_ad._current_level < 0
        )
        self._tokens: list[Tensor | None] = [None for _ in call.pipeline.stages]
        self.outputs: list[Any] = [None for _ in micro_batches]

    def needs(self, action: Action) -> Sequence[Hashable]:
        i = action.i
        return [(edge.number, i) for edge in self._pipeline.incoming[action.j]]

    def perform(self, action: Action, received: list[Any]) -> Iterable[Message]:
        _, i, j = action
        lane = self._lanes[self._pipeline.worker_of[j]]
        with lane.active():
            inputs, tokens, marks = self._unpacked(i, j, lane, received)
            stage, rematerialize = self._pipeline.stages[j], i < self._rematerialized[j]
            with self._call.span(action):
                outputs, frame = stage.forward(
                    i, inputs, self._batch, rematerialize=rematerialize, marks=marks
                )
                lent: Sequence[int] = ()
                if j == 0 or rematerialize or any(marks):
                    lent = stage.handed_on(
                        inputs, marks, outputs, self._batch, rematerialize=rematerialize
                    )
                if self._recorder is not None and self._batch.state.grad:
                    self._recorder.backward(i, j, tensors_in(outputs), tensors_in(inputs))
                del inputs
                if self._gated:
                    outputs, tokens = self._gate(i, j, outputs, frame, tokens)
                return self._packed(i, j, outputs, tokens, lent)

    def _unpacked(
        self, i: int, j: int, lane: Lane, received: list[_Parcel]
    ) -> tuple[tuple[Any, tuple[Any, ...]], tuple[Tensor, ...], list[int]]:
        """The inputs of the stage, the tokens that came along, and the marks of the inputs."""
        if j == 0:  # which nothing can send to
            value, self._inputs[i] = self._inputs[i], None
            return (value, ()), (), []
        values: list[Any] = []
        tokens: tuple[Tensor, ...] = ()
        marks: list[int] = []
        for parcel in received:
            if parcel.event is not None:
                lane.receive(parcel.event, tensors_in(parcel.value))
            values.append(parcel.value)
            tokens += parcel.tokens
            marks += parcel.marks
        received.clear()
        return (values[0], tuple(values[1:])), tokens, marks

    def _gate(
        self, i: int, j: int, outputs: Any, frame: Frame | None, tokens: tuple[Tensor, ...]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Orders the backward of this cell; returns its outputs, and tokens for the next stage."""
        batch, last = self._batch, len(self._pipeline.stages) - 1
        follow = [token] if (token := self._tokens[j]) is not None else []
        own: list[Tensor] = []

        def ordered(tensors: list[Tensor]) -> list[Tensor]:
            differentiable = [t for t in tensors if t.requires_grad]
            if not differentiable:
                return tensors
            # The tokens of the last micro-batch start its recomputations as soon as backward does.
            extra = list(tokens) if j == last else []
            token, passed = gate(follow + extra, differentiable)
            own.append(token)
            following = iter(passed)
            return [next(following) if t.requires_grad else t for t in tensors]

        outputs = map_tensors(ordered, outputs)
        if own:
            token = own[0]
            self._tokens[j] = token if frame is None else early(frame, token)
            if frame is not None and i == batch.m - 1 and j < last:
                start = token.detach().requires_grad_()
                tokens = (*tokens, early(frame, start))
        return outputs, tokens

    def _packed(
        self, i: int, j: int, outputs: Any, tokens: tuple[Tensor, ...], lent: Sequence[int]
    ) -> list[Message]:
        """The outputs as messages to the stages that need them."""
        output, skips = outputs
        marks: list[Sequence[int]] = [_OWN]
        if lent or skips or not isinstance(output, Tensor):
            marks = sent(outputs, lent)
        messages: list[Message] = []
        for edge in self._pipeline.outgoing[j]:
            value = output if edge.skip is None else skips[edge.skip]
            w = self._pipeline.worker_of[edge.target]
            along = tokens if edge.skip is None else ()
            value, event = self._call.over(edge, i, value, graph=True)
            parcel = _Parcel(value, event, along, marks[0 if edge.skip is None else 1 + edge.skip])
            messages.append((w, (edge.number, i), parcel))
        if j == len(self._pipeline.stages) - 1:
            self.outputs[i] = output
        return messages
