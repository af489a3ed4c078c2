"""A stage: one partition as a function of its inputs and of the skips that it pops.

    (input, skips in)  -->  layer, layer, layer  -->  (output, skips out)

Each of its runs is a *cell* (micro-batch ``i``, stage ``j``). Here is all that makes a cell more
than a loop over layers: the random numbers of each layer, the skips on their way, statistics of
deferred BatchNorm, re-materialization, and the notes on exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from syncpipe.batchnorm import DeferredBatchNorm, MiniBatchStatistics, collect
from syncpipe.runtime.again import Again, forgotten
from syncpipe.runtime.buffers import OUTERMOST, Buffers
from syncpipe.runtime.checkpoint import Frame, versions
from syncpipe.runtime.errors import annotate, annotate_backward
from syncpipe.runtime.random import Generators, Undisturbed, never_draws, run_seeded
from syncpipe.runtime.recorder import Recorder
from syncpipe.runtime.state import CallerState
from syncpipe.skip.namespace import SkipKey
from syncpipe.skip.skippable import is_skippable
from syncpipe.skip.store import use_store
from syncpipe.tree import map_tensors, tensors_in

__all__ = ["MiniBatch", "Partition", "Stage"]

#: The value that travels along the layers, and skips.
_Inputs = tuple[Any, tuple[Any, ...]]
_T = TypeVar("_T")
_Range = torch._C._profiler._RecordFunctionFast


class Partition(nn.Sequential):
    """The layers of one stage; called by hand it is an ordinary ``nn.Sequential``."""

    def forward(self, input: Any) -> Any:
        cell = _current_cell.get()
        if cell is None or cell.stage.partition is not self:  # called by hand, or by a layer
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
        forwards: for each stage the number of cells that went forward so far.
        statistics: accumulators of deferred BatchNorm, for each stage that has any.
        parameters: for each stage those that a recomputation needs as they are.
        recorder: writes down what runs when, for a trace.
    """

    m: int
    seed: int
    state: CallerState
    threads: int
    forwards: list[int]
    statistics: dict[int, MiniBatchStatistics]
    parameters: list[list[nn.Parameter]]
    recorder: Recorder | None


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
        self.has_skips = any(is_skippable(child) for child in partition.modules())
        self.defers = any(isinstance(child, DeferredBatchNorm) for child in partition.modules())
        self.generators = Generators(device)
        self.draws = [0] * len(self.names)  # for each layer: the generators it ever drew from
        self._mutates_inputs: bool | None = None  # not known yet
        self._has_python_nodes: bool | None = None  # not known yet

    def forward(
        self, i: int, inputs: _Inputs, batch: MiniBatch, *, rematerialize: bool, alias: list[bool]
    ) -> tuple[_Inputs, Frame | None]:
        """Computes cell ``(i, j)``.

        Args:
            i: the micro-batch.
            inputs: the input of the first layer, and the skips that this stage pops.
            batch: what the cells of this call share.
            rematerialize: store nothing for backward, compute the cell again then.
            alias: for each tensor of the inputs (nothing for the mini-batch's own) whether it
                shares its memory with something that was sent, too.

        Returns:
            The output of the last layer with the skips for other stages; and the frame that
            recomputes the cell, if there is anything to recompute.
        """
        cell = _Cell(self, i, batch)

        def run() -> tuple[_Inputs, Frame | None]:
            outputs, frame = self._run(cell, inputs, rematerialize, alias)
            self._count(batch)
            return outputs, frame

        outputs, frame = self._alone(run)
        self._annotate(cell, inputs, outputs)
        return outputs, frame

    def forget(
        self, i: int, inputs: _Inputs, batch: MiniBatch, *, kept: _Inputs, alias: list[bool]
    ) -> tuple[_Inputs, Again]:
        """Computes cell ``(i, j)``, to be forgotten and computed again by :meth:`again`.

        Args:
            i: the micro-batch.
            inputs: as for :meth:`forward`.
            batch: what the cells of this call share.
            kept: the inputs without their graph.
            alias: as for :meth:`forward`.

        Returns:
            The outputs, and how to compute them again.
        """
        cell = _Cell(self, i, batch)

        def run() -> tuple[_Inputs, Again]:
            buffers = self.buffers.watch()
            again = Again(
                cell.again,
                kept,
                batch.parameters[self.j],
                mutates_inputs=self._mutates_inputs is not False,
                buffers=buffers,
                where=cell.where,
            )
            outputs = self._watched(cell, inputs, lambda given: forgotten(cell.run, given), alias)
            buffers.learn()
            self._count(batch)
            return outputs, again

        outputs, again = self._alone(run)
        self._annotate(cell, inputs, outputs)
        return outputs, again

    def again(self, again: Again, inputs: _Inputs) -> _Inputs:
        """The outputs of a forgotten cell once more."""
        outputs: _Inputs = self._alone(lambda: again(inputs))
        return outputs

    def beyond(
        self,
        i: int,
        batch: MiniBatch,
        function: Callable[[Any], Any],
        given: Any,
        draws: int | None,
    ) -> tuple[Any, int]:
        """Calls a function (the loss) as if it were one more layer after those of this stage.

        Args:
            i: the micro-batch.
            batch: what the cells of this call share.
            function: the function.
            given: its argument.
            draws: bit mask of the generators that it draws from; None if that is not known yet.

        Returns:
            What the function returns, and the bit mask.
        """
        if draws == 0:
            return function(given), 0
        which = self.generators.all if draws is None else draws
        cell = (batch.seed, self.first + len(self.names), i)
        result, drew = run_seeded(
            self.generators, which, cell, function, given, observe=draws is None
        )
        return result, draws or drew

    def describe(self, i: int) -> str:
        """Cell ``(i, j)`` in words."""
        first, last = self.first, self.first + len(self.names) - 1
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        return f"stage {self.j} ({layers}), micro-batch {i}"

    def _alone(self, run: Callable[[], _T]) -> _T:
        """Runs something that may touch the buffers of this stage."""
        lock = self.buffers.lock if self.buffers.any and OUTERMOST.get() is None else None
        if lock is None:
            return run()
        with lock:
            token = OUTERMOST.set(lock)
            try:
                return run()
            finally:
                OUTERMOST.reset(token)

    def _count(self, batch: MiniBatch) -> None:
        batch.forwards[self.j] += 1
        if self.defers and batch.forwards[self.j] == batch.m:
            batch.statistics[self.j].commit()

    def _annotate(self, cell: _Cell, inputs: _Inputs, outputs: _Inputs) -> None:
        if self._has_python_nodes is not False and cell.batch.state.grad:
            self._has_python_nodes = annotate_backward(
                tensors_in(outputs), tensors_in(inputs), f"in backward of {cell.where}"
            )

    def _run(
        self, cell: _Cell, inputs: _Inputs, rematerialize: bool, alias: list[bool]
    ) -> tuple[_Inputs, Frame | None]:
        if rematerialize:
            return self._rematerialized(cell, inputs, alias)
        if True in alias or (self._shares_inputs(cell.batch) and cell.batch.state.grad):
            return self._watched(cell, inputs, cell.run, alias), None
        return cell.run(inputs), None

    def _rematerialized(
        self, cell: _Cell, inputs: _Inputs, alias: list[bool]
    ) -> tuple[_Inputs, Frame | None]:
        """Runs a cell that stores nothing, and returns with its outputs what recomputes it."""
        buffers = self.buffers.watch()
        frame = Frame(
            self._recorded(cell),
            inputs,
            cell.batch.parameters[self.j],
            mutates_inputs=self._mutates_inputs is not False,
            sandboxed=buffers.sandboxed,
            lock=OUTERMOST.get(),
            state=cell.batch.state,
            threads=cell.batch.threads,
            where=cell.where,
        )
        outputs = self._watched(cell, inputs, lambda given: frame.forward(cell.run, given), alias)
        buffers.learn()
        return outputs, frame if frame.stores else None

    def _recorded(self, cell: _Cell) -> Callable[[_Inputs], _Inputs]:
        """The recomputation of a cell, for the trace if there is one."""
        recorder = cell.batch.recorder
        if recorder is None:
            return cell.again

        def again(inputs: _Inputs) -> _Inputs:
            with recorder.span("recompute", cell.i, self.j):
                return cell.again(inputs)

        return again

    def _shares_inputs(self, batch: MiniBatch) -> bool:
        """Whether writing into an input would show in that of another micro-batch."""
        return self.j == 0 and batch.m > 1 and self._mutates_inputs is not False

    def _watched(
        self, cell: _Cell, inputs: _Inputs, run: Callable[[_Inputs], _Inputs], alias: list[bool]
    ) -> _Inputs:
        """Runs a cell whose inputs must stay as they are: on copies, if it writes into them."""
        copy = self._mutates_inputs is not False
        if copy:
            inputs = map_tensors(lambda ts: [t.clone() for t in ts], inputs)
        before = versions(inputs)
        outputs = run(inputs)
        after = versions(inputs)
        mutated = before != after
        self._mutates_inputs = mutated or bool(self._mutates_inputs)
        if mutated and any(
            flag and then != now for flag, then, now in zip(alias, before, after, strict=False)
        ):
            raise RuntimeError(
                f"{cell.where} modified in place a tensor that went over the partition border "
                "more than once (stashed as a skip as well, or twice in one output): the others "
                "would not see it. Let the layer work on a copy (for an activation: inplace=False)"
            )
        if mutated and not copy:
            raise RuntimeError(
                f"{cell.where} modified its input in place, which it did not do for earlier "
                "micro-batches, so that its input is lost. It is known from the next call on."
            )
        return outputs


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
        return self.stage.describe(self.i)

    def again(self, inputs: _Inputs) -> _Inputs:
        """The recomputation of this cell."""
        again = _Cell(self.stage, self.i, self.batch)
        again.recomputing = True
        return again.run(inputs)

    def run(self, inputs: _Inputs) -> _Inputs:
        """From inputs to outputs, through the partition."""
        stage = self.stage
        kind = "recompute" if self.recomputing else "forward"
        with _Range(f"syncpipe {kind} stage {stage.j} micro-batch {self.i}"):
            if not stage.defers:
                return self._with_skips(inputs)
            with collect(None if self.recomputing else self.batch.statistics[stage.j]):
                return self._with_skips(inputs)

    def _with_skips(self, inputs: _Inputs) -> _Inputs:
        stage = self.stage
        value, skips = inputs
        if not stage.has_skips:
            return self._partition(value), ()
        store: dict[SkipKey, Any] = dict(zip(stage.pops, skips, strict=True))
        with use_store(store):
            output = self._partition(value)
        return output, tuple([store.pop(key) for key in stage.stashes])

    def _partition(self, value: Any) -> Any:
        partition = self.stage.partition
        if not partition._forward_hooks and not partition._forward_pre_hooks:
            return self.layers(value)
        token = _current_cell.set(self)
        try:
            return partition(value)
        finally:
            _current_cell.reset(token)

    def layers(self, value: Any) -> Any:
        """The layers of the partition, one after another."""
        stage, i, seed = self.stage, self.i, self.batch.seed
        first = not self.recomputing and not self.batch.forwards[stage.j]
        draws = stage.draws
        k = 0
        try:
            for k, layer in enumerate(stage.partition._modules.values()):
                learn = first and not never_draws(layer)
                if learn or draws[k]:
                    which = stage.generators.all if learn else draws[k]
                    cell = (seed, stage.first + k, i)
                    value, drew = run_seeded(
                        stage.generators, which, cell, layer, value, observe=learn
                    )
                    draws[k] |= drew
                elif self.recomputing and not never_draws(layer):
                    watch = Undisturbed(stage.generators, self._layer(k))
                    try:
                        with watch:
                            value = layer(value)
                    finally:
                        draws[k] |= watch.drew
                else:
                    value = layer(value)
        except BaseException as error:
            annotate(error, f"in {self._layer(k)} of {self.where}")
            raise
        return value

    def _layer(self, k: int) -> str:
        kind = type(self.stage.partition[k]).__name__
        return f"layer {self.stage.first + k} ({self.stage.names[k]!r}: {kind})"


_current_cell: ContextVar[_Cell | None] = ContextVar("syncpipe_cell", default=None)
