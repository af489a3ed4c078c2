"""A stage: one partition as a function of its inputs and of the skips that it pops.

Here is how a cell runs so that it can go back: its inputs stay as they are, buffers are looked
after, and where it is re-materialized it is told how to be computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncpipe.data import map_tensors, storage_of, tensors_in
from syncpipe.runtime.module_state import OUTERMOST, CellState, ModuleState
from syncpipe.runtime.random_numbers import run_seeded
from syncpipe.runtime.recomputation import (
    Recomputation,
    UnchangedObjects,
    stored_by,
    without_storing,
)
from syncpipe.stages.inplace import TIED, Given, entering, handed_on, may_write
from syncpipe.stages.run import CallContext, Inputs, StageLayers, StageRun
from syncpipe.stages.selective import SelectiveRun

__all__ = ["Stage"]

_T = TypeVar("_T")
_BACKWARD = 0x9E3779B9  # sets what a backward draws apart from what its layers draw


class Stage(StageLayers):
    """One partition on one device, ready to go forward and back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.commits = self.defers  #: moves running statistics; where there are replicas, none does
        self._new_script = any(
            isinstance(m, torch.jit.ScriptModule) for m in self.partition.modules()
        )
        self._compared = 0  # the last cell of a call whose recomputation may be compared

    def forward(
        self,
        i: int,
        inputs: Inputs,
        context: CallContext,
        *,
        marks: Sequence[int],
        target: Any = None,
    ) -> Inputs:
        """Computes cell ``(i, j)``.

        Args:
            i: the micro-batch.
            inputs: the input of the first layer, and the skips that this stage pops.
            context: what the cells of this call share.
            marks: for each tensor of the inputs (nothing for what comes from the caller) who else
                it belongs to.
            target: what came with the inputs from the caller.

        Returns:
            The output of the last layer with the skips for other stages.
        """
        cell = StageRun(self, i, context)
        return self._locked(self._run, cell, inputs, marks, target)

    def checkpointed(
        self, i: int, inputs: Inputs, context: CallContext, *, marks: Sequence[int]
    ) -> Inputs:
        """Computes cell ``(i, j)`` as a part of a graph that stores nothing of it.

        Args:
            i: the micro-batch.
            inputs: as for :meth:`forward`.
            context: what the cells of this call share.
            marks: as for :meth:`forward`.
        """
        again: Recomputation | None = None
        flags = [tensor.requires_grad for tensor in tensors_in(inputs)]

        def run(_: Tensor) -> Inputs:
            nonlocal again, inputs
            if again is None:
                detached = map_tensors(lambda tensors: [t.detach() for t in tensors], inputs)
                outputs, again = self.forward_without_storing(
                    i, inputs, context, detached=detached, marks=marks
                )
                inputs = detached
                return outputs
            following = iter(flags)
            given = map_tensors(
                lambda tensors: [t.detach().requires_grad_(next(following)) for t in tensors],
                again.inputs,
            )
            moment = context.moment or torch._C._current_graph_task_id()
            return self.recompute(again, given, moment, keep=True)

        like = torch.empty(0, device=self.device)  # tells what kind of device it is
        outputs: Inputs = checkpoint(
            run, like, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )
        return outputs

    def forward_without_storing(
        self,
        i: int,
        inputs: Inputs,
        context: CallContext,
        *,
        detached: Inputs,
        marks: Sequence[int],
        target: Any = None,
    ) -> tuple[Inputs, Recomputation]:
        """Computes cell ``(i, j)``, whose graph is dropped; it comes again by :meth:`recompute`.

        Args:
            i: the micro-batch.
            inputs: as for :meth:`forward`.
            context: what the cells of this call share.
            detached: the inputs without their graph.
            marks: as for :meth:`forward`.
            target: as for :meth:`forward`.

        Returns:
            The outputs, and how to compute them again.
        """
        cell = self._cell(i, context)
        self._modules(context)
        return self._locked(self._run_without_storing, cell, inputs, detached, marks, target)

    def recompute(
        self, recomputation: Recomputation, inputs: Inputs, moment: object, *, keep: bool = False
    ) -> Inputs:
        """The outputs of a cell whose graph was dropped once more, with a new graph.

        Args:
            recomputation: of the cell.
            inputs: its inputs, as the begin of the graph.
            moment: the same as long as the user's code cannot have changed any module.
            keep: let it be done again.
        """
        outputs: Inputs = self._locked(recomputation, inputs, moment, keep)
        return outputs

    def run_loss(
        self,
        i: int,
        context: CallContext,
        function: Callable[[Any], Any],
        given: Any,
        draws: int | None,
    ) -> tuple[Any, int]:
        """Calls a function (the loss) as if it were one more layer after those of this stage.

        Args:
            i: the micro-batch.
            context: what the cells of this call share.
            function: the function.
            given: its argument.
            draws: bit mask of the generators that it draws from; None if that is not known yet.

        Returns:
            What the function returns, and the bit mask.
        """
        if draws == 0:
            return function(given), 0
        which = self.generators.all if draws is None else draws
        cell = (context.seed, self.first + len(self.names), i)
        if draws is not None:
            result, seen = run_seeded(self.generators, which, cell, function, given, observe=False)
            if seen.nests:
                self.learn(seen)
            return result, draws
        result, seen = run_seeded(self.generators, which, cell, function, given, observe=True)
        self.learn(seen)
        return result, seen.draws

    def backward(self, i: int, context: CallContext, run: Callable[..., None], *args: Any) -> None:
        """Runs the backward of cell ``(i, j)``: seeded, as layers are, where it may draw.

        Args:
            i: the micro-batch.
            context: what the cells of this call share.
            run: runs it.
            args: what that is given.
        """
        draws = context.backward_draws.get(self.number)
        first = draws is None and not (self._nests or _quiet_backward(self.partition))
        if first:
            draws = self.generators.all
        elif draws is None:
            draws = context.backward_draws[self.number] = self.backward_draws
        if not draws:
            run(*args)
            return
        cell = (context.seed + _BACKWARD, self.first, i)

        def seeded() -> None:
            _, seen = run_seeded(
                self.generators, draws, cell, lambda _: run(*args), None, observe=first
            )
            if first:
                self.backward_draws |= 0 if self._nests else seen.draws
                context.backward_draws[self.number] = self.backward_draws

        self._locked(seeded)  # the order of locks is: stage before random state

    def _cell(self, i: int, context: CallContext) -> StageRun:
        """A run that will be computed again."""
        policy = context.selective.get(self)
        if policy is None:
            return StageRun(self, i, context)
        return SelectiveRun(self, i, context, policy)

    def _locked(self, run: Callable[..., _T], *args: Any) -> _T:
        """Runs something that may touch the buffers of this stage."""
        lock = self.changes.lock if self.changes.any and OUTERMOST.get() is None else None
        if lock is None:
            return run(*args)
        with lock:
            token = OUTERMOST.set(lock)
            try:
                return run(*args)
            finally:
                OUTERMOST.reset(token)

    def _count(self, context: CallContext) -> None:
        context.forwards[self.number] += 1
        if self.commits and context.forwards[self.number] == context.m:
            context.statistics[self.number].commit()

    def handed_on(
        self,
        inputs: Inputs,
        marks: Sequence[int],
        outputs: Inputs,
        context: CallContext,
        *,
        rematerialize: bool,
    ) -> list[int]:
        """The marks of the outputs; empty unless one is an input that somebody else still needs."""
        if self.j > 0 and not rematerialize:
            return handed_on(inputs, marks, outputs) if any(marks) else []
        given, made = inputs[0], outputs[0]
        if type(given) is type(made) is Tensor and not (inputs[1] or outputs[1]):
            if not context.state.grad and made is not given and not made._is_view():
                return []
            if storage_of(given) != storage_of(made):  # mostly it is so
                return []
        return [] if torch.is_inference_mode_enabled() else handed_on(inputs, (), outputs)

    def _run(self, cell: StageRun, inputs: Inputs, marks: Sequence[int], target: Any) -> Inputs:
        if self.j == 0:
            marks = self._marked(cell, inputs, marks, target)
        if any(marks):
            outputs, _ = self._written(cell, self._given(cell, inputs, marks), cell.run)
        else:
            outputs = cell.run(inputs)
        self._count(cell.context)
        return outputs

    def _run_without_storing(
        self, cell: StageRun, inputs: Inputs, detached: Inputs, marks: Sequence[int], target: Any
    ) -> tuple[Inputs, Recomputation]:
        state, cell.drawn = self._state(cell), {}
        given = self._given(cell, inputs, self._marked(cell, inputs, marks, target), detached)
        unchanged = UnchangedObjects(inputs)
        begins = [tensor.grad_fn for tensor in tensors_in(inputs)]
        outputs, written = self._written(cell, given, lambda tree: without_storing(cell.run, tree))
        unchanged.check(cell)
        self._learn(state, cell.context)
        self._count(cell.context)
        recomputation = Recomputation(
            cell.recomputed,
            given.settle(written),
            mutates_inputs=True in written,
            state=state,
            where=cell,
            stored=None if True in written else self._stored(cell, outputs, begins),
        )
        return outputs, recomputation

    def _stored(self, cell: StageRun, outputs: Inputs, begins: list[Any]) -> Counter[Any] | None:
        """What the first cell of a call stored, to be compared; in the first call with shapes."""
        if self._new_script:  # it compiles itself in its second run, and stores other tensors then
            self._new_script, self._compared = False, 1
            return None
        if cell.i > self._compared:
            return None
        self._compared = 0
        return stored_by(outputs, begins, shapes=self.look(("stored", self.partition.training)))

    def _marked(
        self, cell: StageRun, inputs: Inputs, marks: Sequence[int], target: Any
    ) -> Sequence[int]:
        """The marks of the inputs; stage 0, which gets the caller's tensors, finds theirs here."""
        if self.j > 0:
            return marks
        if not self._may_write(cell.context):
            return [*[0] * (len(tensors_in(inputs)) - len(marks)), *marks]
        return [*entering(inputs[0], target), *marks]

    def _may_write(self, context: CallContext) -> bool:
        """Whether the layers may write into inputs as they are in this call."""
        found = context.writes.get(self)
        if found is None:
            found = context.writes[self] = may_write(self.partition, pops=bool(self.pops))
        return found

    def _state(self, cell: StageRun) -> CellState:
        """What a recomputation of the cell starts from, besides the inputs."""
        return CellState(self._modules(cell.context), cell)

    def _learn(self, state: CellState, context: CallContext) -> None:
        state.learn()
        if state.modules.lazy or self._new:  # it may have made its parameters only now
            self._new = False
            after = ModuleState(self.partition, self.changes)
            if state.modules.lazy or not after.like(state.modules):
                state.modules = context.modules[self] = after

    def _modules(self, context: CallContext) -> ModuleState:
        """The modules as they are in this call; looked at before its first cell."""
        if self not in context.modules:
            context.modules[self] = ModuleState(self.partition, self.changes)
        return context.modules[self]

    def _given(
        self, cell: StageRun, inputs: Inputs, marks: Sequence[int], kept: Inputs | None = None
    ) -> Given:
        return Given(inputs, marks, copy=self._may_write(cell.context), kept=kept)

    def _written(
        self, cell: StageRun, given: Given, run: Callable[[Inputs], Inputs]
    ) -> tuple[Inputs, list[bool]]:
        """Runs a cell, and sees which inputs it writes into."""
        outputs = run(given.tree)
        written = given.written()
        mutated = True in written
        if mutated and given.aliased(written, TIED):
            raise RuntimeError(
                f"{cell} modified in place a parameter that it shares with another stage (as an "
                "embedding with max_norm does), which sees the micro-batches in another order than "
                "the plain model does: choose a balance that puts these layers into one stage, or "
                "untie them"
            )
        if mutated and given.aliased(written):
            raise RuntimeError(
                f"{cell} modified in place a tensor whose memory others use as well (another "
                "input or the target that is a view of it; or it went over the partition border "
                "more than once, stashed as a skip, say): they would not see it. Let the layer "
                "work on a copy (for an activation: inplace=False)"
            )
        return outputs, written


def _quiet_backward(partition: nn.Module) -> bool:
    """Whether there are only PyTorch's own layers, which draw in forward alone, and no hooks."""
    return all(
        type(m).__module__.startswith("torch.nn.modules.") or m is partition
        for m in partition.modules()
    ) and not (
        any(m._backward_hooks or m._backward_pre_hooks for m in partition.modules())
        or any(m._forward_hooks or m._forward_pre_hooks for m in partition.modules())
        or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in partition.parameters())
    )
