"""A stage: one partition as a function of its inputs and of the skips that it pops.

    (input, skips in)  -->  layer, layer, layer  -->  (output, skips out)

Each of its runs is a *cell* (micro-batch ``i``, stage ``j``). Here is all that makes a cell more
than a loop over layers: the random numbers of each layer, the skips on their way, statistics of
deferred BatchNorm, re-materialization, and the notes on exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from syncpipe.batchnorm import DeferredBatchNorm, MiniBatchStatistics, collect
from syncpipe.runtime.buffers import Buffers, Exclusive
from syncpipe.runtime.checkpoint import Frame, _Stop, versions
from syncpipe.runtime.errors import annotate, annotate_backward
from syncpipe.runtime.random import Generators, Seeded, never_draws
from syncpipe.runtime.state import CallerState
from syncpipe.skip.namespace import SkipKey
from syncpipe.skip.store import use_store
from syncpipe.tree import map_tensors, tensors_in

__all__ = ["MiniBatch", "Partition", "Stage"]

_Range = torch._C._profiler._RecordFunctionFast


class Partition(nn.Sequential):
    """The layers of one stage; called by hand it is an ordinary ``nn.Sequential``."""

    def forward(self, input: Any) -> Any:
        cell = _current_cell.get()
        if cell is None or cell.stage.partition is not self:
            return super().forward(input)  # type: ignore[no-untyped-call]
        return cell.layers(input)


@dataclass(slots=True)
class MiniBatch:
    """What all cells of one call have in common.

    Attributes:
        m: number of micro-batches.
        seed: of the call's random numbers.
        state: the caller's.
        threads: intra-op threads of the CPU workers (0: the calling thread's own).
        statistics: accumulators of deferred BatchNorm, one for each stage.
    """

    m: int
    seed: int
    state: CallerState
    threads: int
    statistics: list[MiniBatchStatistics]


class Stage:
    """One partition on one device.

    Args:
        j: the stage's index.
        partition: its layers.
        names: for each layer its name in the wrapped module.
        first: index of the first layer in the wrapped module.
        device: where the layers are.
        pops: the skips that come from other stages.
        stashes: the skips that go to other stages.
    """

    def __init__(
        self,
        j: int,
        partition: Partition,
        names: Sequence[str],
        first: int,
        device: torch.device,
        pops: Sequence[SkipKey],
        stashes: Sequence[SkipKey],
    ) -> None:
        self.j = j
        self.partition = partition
        self.names = list(names)
        self.first = first
        self.pops = list(pops)
        self.stashes = list(stashes)
        self.buffers = Buffers(partition)
        self.defers = any(isinstance(child, DeferredBatchNorm) for child in partition.modules())
        self.generators = Generators(device)
        self.draws = [0] * len(self.names)  # for each layer: the generators it ever drew from
        self._mutates_inputs: bool | None = None  # not known yet
        self._has_python_nodes = False

    def forward(
        self, i: int, inputs: tuple[Any, tuple[Any, ...]], batch: MiniBatch, *, rematerialize: bool
    ) -> tuple[tuple[Any, tuple[Any, ...]], Frame | None]:
        """Computes cell ``(i, j)``.

        Args:
            i: the micro-batch.
            inputs: the input of the first layer, and the skips that this stage pops.
            batch: what the cells of this call share.
            rematerialize: store nothing for backward, compute the cell again then.

        Returns:
            The output of the last layer with the skips for other stages; and the frame that
            recomputes the cell, if there is anything to recompute.
        """
        grad = batch.state.grad
        shared = self.j == 0 and batch.m > 1  # micro-batches share their memory there
        watch = grad and (rematerialize or shared)
        copy = watch and self._mutates_inputs is not False
        stop = [t.grad_fn for t in tensors_in(inputs) if t.grad_fn is not None] if grad else []
        cell = _Cell(self, i, batch)
        given = inputs
        with Exclusive(self.buffers.lock) if self.buffers.any else nullcontext():
            frame = None
            if rematerialize:
                buffers = self.buffers.watch()
                frame = Frame(
                    cell.again,
                    inputs,
                    mutates_inputs=copy,
                    sandbox=buffers.sandbox,
                    lock=self.buffers.lock if self.buffers.any else None,
                    state=batch.state,
                    threads=batch.threads,
                    where=cell.where,
                )
            if copy:
                given = map_tensors(lambda ts: [t.clone() for t in ts], inputs)
            before = versions(given) if watch else []
            outputs = cell.run(given) if frame is None else frame.forward(cell.run, given)
            if watch:
                self._learn_inputs(before != versions(given), copied=copy, where=cell.where)
            if rematerialize:
                buffers.learn()
            if self.defers and i == batch.m - 1:
                batch.statistics[self.j].commit()
        if grad and (i == 0 or self._has_python_nodes):
            self._has_python_nodes |= annotate_backward(
                tensors_in(outputs), stop, f"in backward of {cell.where}"
            )
        return outputs, frame if frame is not None and frame.stores else None

    def _learn_inputs(self, mutated: bool, *, copied: bool, where: str) -> None:
        self._mutates_inputs = mutated or bool(self._mutates_inputs)
        if mutated and not copied:
            raise RuntimeError(
                f"{where} modified its input in place, which it did not do for earlier "
                "micro-batches, so that its input is lost. It is known from the next call on."
            )


class _Cell:
    """One run of a stage for one micro-batch."""

    __slots__ = ("batch", "i", "recomputing", "stage")

    def __init__(self, stage: Stage, i: int, batch: MiniBatch) -> None:
        self.stage = stage
        self.i = i
        self.batch = batch
        self.recomputing = False

    @property
    def where(self) -> str:
        """The cell in words."""
        stage = self.stage
        first, last = stage.first, stage.first + len(stage.names) - 1
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        return f"stage {stage.j} ({layers}), micro-batch {self.i}"

    def again(self, inputs: tuple[Any, tuple[Any, ...]]) -> Any:
        """The recomputation of this cell."""
        again = _Cell(self.stage, self.i, self.batch)
        again.recomputing = True
        return again.run(inputs)

    def run(self, inputs: tuple[Any, tuple[Any, ...]]) -> tuple[Any, tuple[Any, ...]]:
        """From inputs to outputs, through the partition."""
        stage = self.stage
        value, skips = inputs
        store: dict[SkipKey, Any] = dict(zip(stage.pops, skips, strict=True))
        kind = "recompute" if self.recomputing else "forward"
        token = _current_cell.set(self)
        try:
            with _Range(f"syncpipe {kind} stage {stage.j} micro-batch {self.i}"), use_store(store):
                if not stage.defers:
                    output = stage.partition(value)
                else:
                    with collect(None if self.recomputing else self.batch.statistics[stage.j]):
                        output = stage.partition(value)
        finally:
            _current_cell.reset(token)
        return output, tuple([store.pop(key) for key in stage.stashes])

    def layers(self, value: Any) -> Any:
        """The layers of the partition, one after another."""
        stage, i, seed = self.stage, self.i, self.batch.seed
        outer = _current_cell.set(None)  # so that a partition used as a layer is just a layer
        index = stage.first
        try:
            for k, layer in enumerate(stage.partition):
                index = stage.first + k
                learn = i == 0 and not self.recomputing and not never_draws(layer)
                which = stage.generators.all if learn else stage.draws[k]
                if not which:
                    value = layer(value)
                    continue
                seeded = Seeded(stage.generators, which, (seed, index, i), observe=learn)
                with seeded:
                    value = layer(value)
                stage.draws[k] |= seeded.drew
        except _Stop:
            raise
        except BaseException as error:
            name = stage.names[index - stage.first]
            kind = type(stage.partition[index - stage.first]).__name__
            annotate(error, f"in layer {index} ({name!r}: {kind}) of {self.where}")
            raise
        finally:
            _current_cell.reset(outer)
        return value


_current_cell: ContextVar[_Cell | None] = ContextVar("syncpipe_cell", default=None)
