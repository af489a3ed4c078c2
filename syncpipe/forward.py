"""The forward driver: ``pipe(x)``.

    x -> scatter -> [ for each action: receive inputs -> stage -> send outputs ] -> gather -> y

It leaves one true autograd graph behind; how that goes back is drawn in ``stages/transfer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from syncpipe.microbatch import gather, scatter
from syncpipe.options import StageMode
from syncpipe.runtime.engine import Run
from syncpipe.runtime.errors import annotate_backward
from syncpipe.runtime.recorder import Recorder
from syncpipe.runtime.rematerialization.checkpoint import CheckpointFrame
from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.steps import Edge, forward_steps
from syncpipe.stages.call import Call
from syncpipe.stages.dealing import collected, deal
from syncpipe.stages.parcel import Parcel, packed, unpacked
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.transfer import early, gate
from syncpipe.tree import map_tensors, tensors_in

__all__ = ["forward"]


def forward(
    pipeline: Pipeline,
    input: Any,
    *,
    chunks: int,
    checkpoint: Sequence[StageMode],
    inline: bool,
    recorder: Recorder | None,
) -> Any:
    """Runs a mini-batch through a pipeline.

    Args:
        pipeline: the pipeline.
        input: a tree of tensors and other values, on the first device.
        chunks: at most so many micro-batches.
        checkpoint: for each stage its mode.
        inline: run on the calling thread.
        recorder: writes down what runs when, for a trace.
    """
    micro_batches = scatter(input, chunks)
    call = Call(
        pipeline,
        len(micro_batches),
        checkpoint=checkpoint,
        inline=inline,
        recorder=recorder,
        graph=True,
    )
    first = micro_batches[0]
    run = _Forward(call, micro_batches)
    steps = forward_steps(pipeline.edges, call.context.m, pipeline.placement)
    call.run(steps, run, first)
    return gather(collected(call, run.outputs, graph=call.context.state.grad))


class _Forward:
    """The forward of one mini-batch, as a task for the engine."""

    def __init__(self, call: Call, micro_batches: list[Any]) -> None:
        self._call = call
        self._pipeline = call.pipeline
        self._context = call.context
        self._inputs: list[Any] = micro_batches
        self._entered = deal(call, micro_batches)
        self._rematerialized = call.rematerialized
        self._recorder = call.recorder
        # Forward-mode AD has nothing that goes back, and does not pass a gate.
        self._gated = (
            call.context.state.grad and len(call.lanes) > 1 and forward_ad._current_level < 0
        )
        self._tokens: list[Tensor | None] = [None for _ in call.pipeline.stages]
        self.outputs: list[Any] = [None for _ in micro_batches]

    def bind(self, kind: Kind, j: int) -> Run:
        return self._call.bound(partial(self._cell, j), kind, j)

    def _cell(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        alongs: Sequence[Sequence[Tensor]] = ()
        stage, rematerialize = self._pipeline.stages[j], i < self._rematerialized[j]
        if stage.j == 0:
            inputs, self._inputs[i] = (self._inputs[i], ()), None
            marks: Sequence[int] = ()
            if j > 0:
                self._call.lane_of(j).receive(self._entered[i], tensors_in(inputs))
        else:
            inputs, marks, alongs = unpacked(parcels)
        if self._call.ties is not None:
            inputs, marks = self._call.ties.joined(i, j, inputs, marks)
        outputs, frame = stage.forward(
            i, inputs, self._context, rematerialize=rematerialize, marks=marks
        )
        if stage.has_python_nodes is not False and self._context.state.grad:
            note = f"in backward of {stage.describe(i)}"
            stage.has_python_nodes = annotate_backward(
                tensors_in(outputs), tensors_in(inputs), note
            )
        lent = stage.handed_on(inputs, marks, outputs, self._context, rematerialize=rematerialize)
        if self._recorder is not None and self._context.state.grad:
            self._recorder.backward(i, stage.j, tensors_in(outputs), tensors_in(inputs))
        del inputs
        tokens: tuple[Tensor, ...] = ()
        if self._gated:
            outputs, tokens = self._gate(i, j, outputs, frame, tuple(chain.from_iterable(alongs)))
        if stage.j == self._pipeline.n - 1:
            self.outputs[i] = outputs[0]
        # Tokens start the recomputations of the last micro-batch.
        prepare = partial(_with, tokens) if tokens else None
        return packed(self._call, i, j, outputs, lent, prepare, graph=True)

    def _gate(
        self,
        i: int,
        j: int,
        outputs: Any,
        frame: CheckpointFrame | None,
        tokens: tuple[Tensor, ...],
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Orders the backward of this cell; returns its outputs, and tokens for the next stage."""
        context, last = self._context, self._pipeline.stages[j].j == self._pipeline.n - 1
        follow = [token] if (token := self._tokens[j]) is not None else []
        own: list[Tensor] = []

        def ordered(tensors: list[Tensor]) -> list[Tensor]:
            differentiable = [t for t in tensors if t.requires_grad]
            if not differentiable:
                return tensors
            # The tokens of the last micro-batch start its recomputations as soon as backward does.
            extra = list(tokens) if last else []
            token, passed = gate(follow + extra, differentiable)
            own.append(token)
            following = iter(passed)
            return [next(following) if t.requires_grad else t for t in tensors]

        outputs = map_tensors(ordered, outputs)
        if own:
            token = own[0]
            self._tokens[j] = token if frame is None else early(frame, token)
            if frame is not None and i == context.m - 1 and not last:
                start = token.detach().requires_grad_()
                tokens = (*tokens, early(frame, start))
        return outputs, tokens


def _with(tokens: Sequence[Tensor], edge: Edge, value: Any) -> tuple[Any, Sequence[Tensor]]:
    return value, tokens if edge.skip is None else ()
