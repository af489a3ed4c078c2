"""The forward driver: ``pipe(x)``.

    x -> scatter -> [ for each action: receive inputs -> stage -> send outputs ] -> gather -> y

It leaves one true autograd graph behind; how that goes back is drawn in ``runtime/transfer.py``.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import forward_ad

from syncpipe.batchnorm import MiniBatchStatistics
from syncpipe.microbatch import gather, scatter
from syncpipe.runtime.checkpoint import Frame, is_checkpointing, is_recomputing
from syncpipe.runtime.engine import RUNNING, Engine, Message
from syncpipe.runtime.random import draw_seed
from syncpipe.runtime.state import CallerState
from syncpipe.runtime.streams import Lane
from syncpipe.runtime.transfer import early, gate, send
from syncpipe.runtime.worker import Worker, same_memory
from syncpipe.schedule import Action, forward_program
from syncpipe.skip.layout import inspect_layout
from syncpipe.stage import MiniBatch, Partition, Stage
from syncpipe.tree import aliased, map_tensors, tensors_in

__all__ = ["Pipeline"]


_ALONE = (False,)


class _Edge(NamedTuple):
    """A way from one stage to another: of the activation, or of one of the source's skips."""

    number: int
    source: int
    target: int
    skip: int | None


class _Parcel(NamedTuple):
    """What travels over an edge.

    Attributes:
        value: a tree.
        event: tells when it is there.
        tokens: start the recomputations of the last micro-batch.
        alias: for each tensor of the value, whether it shares memory with another one that the
            source sends; nothing where none does.
    """

    value: Any
    event: Any
    tokens: tuple[Tensor, ...]
    alias: Sequence[bool]


class Pipeline:
    """Partitions on their workers, ready to run.

    Args:
        partitions: the partitions, already on their devices.
        names: for each layer its name in the wrapped module.
        workers: for each partition the worker that serves it.
    """

    def __init__(
        self, partitions: Sequence[Partition], names: Sequence[str], workers: Sequence[Worker]
    ) -> None:
        layout = inspect_layout(partitions)
        self.stages: list[Stage] = []
        first = 0
        for j, partition in enumerate(partitions):
            last = first + len(partition)
            self.stages.append(
                Stage(
                    j,
                    partition,
                    names[first:last],
                    first,
                    workers[j].device,
                    list(layout.incoming[j]),
                    list(layout.outgoing[j]),
                )
            )
            first = last
        self.workers = list(dict.fromkeys(workers))
        self.worker_of = tuple(self.workers.index(worker) for worker in workers)
        self.engine = Engine(self.workers)
        self.process = os.getpid()
        n = len(partitions)
        ways: list[tuple[int, int, int | None]] = [(j, j + 1, None) for j in range(n - 1)]
        for j, stage in enumerate(self.stages):
            for key in stage.pops:
                source = layout.incoming[j][key]
                ways.append((source, j, self.stages[source].stashes.index(key)))
        edges = [_Edge(number, *way) for number, way in enumerate(ways)]
        self.incoming = [[edge for edge in edges if edge.target == j] for j in range(n)]
        self.outgoing = [[edge for edge in edges if edge.source == j] for j in range(n)]

    def __call__(self, input: Any, *, chunks: int, checkpoint: str, inline: bool) -> Any:
        """Runs a mini-batch.

        Args:
            input: a tree of tensors and other values, on the first device.
            chunks: at most so many micro-batches.
            checkpoint: ``"always"``, ``"except_last"`` or ``"never"``.
            inline: run on the calling thread.
        """
        state = CallerState()
        micro_batches = scatter(input, chunks)
        m = len(micro_batches)
        inline = inline or state.needs_inline or RUNNING.get() or len(self.workers) == 1
        # Inside of a re-materialized cell of another pipe everything is dropped anyway.
        nested = is_checkpointing() or is_recomputing()
        rematerialized = 0
        if state.grad and not nested:
            rematerialized = {"always": m, "except_last": m - 1, "never": 0}[checkpoint]
        batch = MiniBatch(
            m,
            draw_seed(),
            state,
            threads=0 if inline or not self._on_cpu() else self.engine.share(),
            statistics={stage.j: MiniBatchStatistics() for stage in self.stages if stage.defers},
            parameters=[
                list(s.partition.parameters()) if rematerialized else [] for s in self.stages
            ],
        )
        lanes = [worker.lane() for worker in self.workers]
        callers = [worker.caller_lane() for worker in self.workers]
        first, last = lanes[self.worker_of[0]], lanes[self.worker_of[-1]]
        for lane, caller in zip(lanes, callers, strict=True):
            lane.follow(caller, tensors_in(micro_batches[0]) if lane is first else ())
        run = _Forward(self, batch, lanes, micro_batches, rematerialized)
        try:
            self.engine.run(forward_program(m, self.worker_of), run, state, inline=inline)
        finally:
            for lane, caller in zip(lanes, callers, strict=True):
                caller.follow(lane, tensors_in(run.outputs) if lane is last else ())
        return gather(run.outputs)

    def _on_cpu(self) -> bool:
        return all(worker.device.type == "cpu" for worker in self.workers)


class _Forward:
    """The forward of one mini-batch, as a task for the engine."""

    def __init__(
        self,
        pipeline: Pipeline,
        batch: MiniBatch,
        lanes: list[Lane],
        micro_batches: list[Any],
        rematerialized: int,
    ) -> None:
        self._pipeline = pipeline
        self._batch = batch
        self._lanes = lanes
        self._inputs: list[Any] = micro_batches
        self._rematerialized = rematerialized
        # Forward-mode AD has nothing that goes back, and does not pass a gate.
        self._gated = batch.state.grad and len(lanes) > 1 and forward_ad._current_level < 0
        self._tokens: list[Tensor | None] = [None for _ in pipeline.stages]
        self.outputs: list[Any] = [None for _ in micro_batches]

    def needs(self, action: Action) -> Sequence[Hashable]:
        i = action.i
        return [(edge.number, i) for edge in self._pipeline.incoming[action.j]]

    def perform(self, action: Action, received: list[Any]) -> Iterable[Message]:
        _, i, j = action
        lane = self._lanes[self._pipeline.worker_of[j]]
        if lane.streams is None:
            return self._cell(i, j, lane, received)
        with lane.active():
            return self._cell(i, j, lane, received)

    def _cell(self, i: int, j: int, lane: Lane, received: list[_Parcel]) -> list[Message]:
        inputs, tokens, alias = self._unpacked(i, j, lane, received)
        outputs, frame = self._pipeline.stages[j].forward(
            i, inputs, self._batch, rematerialize=i < self._rematerialized, alias=alias
        )
        del inputs
        if self._gated:
            outputs, tokens = self._gate(i, j, outputs, frame, tokens)
        return self._packed(i, j, lane, outputs, tokens)

    def _unpacked(
        self, i: int, j: int, lane: Lane, received: list[_Parcel]
    ) -> tuple[tuple[Any, tuple[Any, ...]], tuple[Tensor, ...], list[bool]]:
        """The inputs of the stage, the tokens that came along, and what has an alias."""
        if j == 0:  # which nothing can send to
            value, self._inputs[i] = self._inputs[i], None
            return (value, ()), (), []
        values: list[Any] = []
        tokens: tuple[Tensor, ...] = ()
        alias: list[bool] = []
        for parcel in received:
            if parcel.event is not None:
                lane.receive(parcel.event, tensors_in(parcel.value))
            values.append(parcel.value)
            tokens += parcel.tokens
            alias += parcel.alias
        received.clear()
        return (values[0], tuple(values[1:])), tokens, alias

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
        self, i: int, j: int, lane: Lane, outputs: Any, tokens: tuple[Tensor, ...]
    ) -> list[Message]:
        """The outputs as messages to the stages that need them."""
        output, skips = outputs
        flags: list[Sequence[bool]] = [_ALONE]
        if skips or not isinstance(output, Tensor):
            alias = iter(aliased(outputs))
            flags = [list(islice(alias, len(tensors_in(part)))) for part in (output, *skips)]
        messages: list[Message] = []
        for edge in self._pipeline.outgoing[j]:
            value = output if edge.skip is None else skips[edge.skip]
            w = self._pipeline.worker_of[edge.target]
            along = tokens if edge.skip is None else ()
            value, event = self._sent(value, lane, self._lanes[w])
            parcel = _Parcel(value, event, along, flags[0 if edge.skip is None else 1 + edge.skip])
            messages.append((w, (edge.number, i), parcel))
        if j == len(self._pipeline.stages) - 1:
            self.outputs[i] = output
        return messages

    def _sent(self, value: Any, source: Lane, target: Lane) -> tuple[Any, Any]:
        """The value where ``target`` is, and the event to wait for there."""
        if source is target or (
            source.streams is None and same_memory(source.device, target.device)
        ):
            return value, None
        events: list[Any] = []

        def moved(tensors: list[Tensor]) -> list[Tensor]:
            sent, event = send(source, target, tensors)
            events.append(event)
            return sent

        value = map_tensors(moved, value)
        return value, events[0] if events else None
