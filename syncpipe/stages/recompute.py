"""Cells that store nothing, and run once more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from syncpipe.data import map_tensors, storage_of, tensors_in
from syncpipe.options import Selective, StageMode
from syncpipe.runtime.random_numbers import (
    holds_generators,
    is_random,
    let_modules_hold,
    modules_that_draw,
    put_back_states,
    states_of,
    without_generators,
)
from syncpipe.runtime.recomputation import ModuleState, Recomputation
from syncpipe.skip.store import current_store
from syncpipe.stages.inplace import GuardedInputs, input_flags, overlap_flags, own_memory


class Record:
    """What is noted of a cell in its forward, for its recomputation."""

    def __init__(self, policy: Selective | None) -> None:
        self.drawn: dict[int, Any] = {}
        self.rows: list[Any] = []  # of embeddings with max_norm
        self.saved = None if policy is None else (policy.contexts(), deque[list[Tensor]]())


class StageRecomputation:
    """How the cells of a stage are recomputed in one call."""

    def __init__(self, run: Any, mode: StageMode) -> None:
        self.run, self.stage = run, run.stage
        self.policy = mode if isinstance(mode, Selective) else None
        self.modules: ModuleState | None = None  # as they are in this call
        self._new = True  # nothing was computed without storing yet
        self._compared = 0  # the last cell whose recomputation may be compared

    def forward(
        self, i: int, inputs: Any, detached: Any, owners: Sequence[int], target: Any = None,
        begun: Callable[[Recomputation], None] | None = None,
    ) -> tuple[Any, Recomputation | None]:  # fmt: skip
        """As that of a ``StageRun``, but the graph is dropped; with what computes it again.

        That is None where the graph has to be kept: the layers changed what cannot be put back.
        """
        if self.modules is None:
            self.modules = self._module_state()
        result: tuple[Any, Recomputation | None] = self.run.locked(
            self._without_storing, self.modules, i, inputs, detached, owners, target, begun
        )
        return result

    def _without_storing(
        self, modules: ModuleState, i: int, inputs: Any, detached: Any, owners: Sequence[int],
        target: Any, begun: Callable[[Recomputation], None] | None,
    ) -> tuple[Any, Recomputation | None]:  # fmt: skip
        run, stage, where = self.run, self.stage, f"{self.run.words} {i}"
        record, may_keep = Record(self.policy), begun is None
        cell = Recomputation(modules, where, may_keep=may_keep)

        def compute(inputs: Any, recomputing: bool = False) -> Any:
            if record.saved is None:
                return run.run(i, inputs, record, recomputing)
            run_cell = partial(run.run, i, inputs, record, recomputing)
            return self._selectively(i, record, recomputing, run_cell)

        if run.first and run.writes:
            owners = input_flags(inputs[0], target)
        writes = run.writes or any(owners)
        if begun is not None:
            cell.keep(partial(compute, recomputing=True), detached)
            cell.mutates_inputs = writes  # as long as nobody knows whether it does
            begun(cell)
        shapes = None  # the first cell of a call is compared with its recomputation
        if i <= self._compared and stage.compares_later:  # a script compiles itself in its second
            stage.compares_later, self._compared = False, 1  # run, and stores other tensors then
        elif i <= self._compared:  # in the first call with shapes
            shapes = stage.is_new(("stored", stage.partition.training))
        if writes:
            given = GuardedInputs(inputs, owners, copy=run.writes, kept=True)
            outputs = cell.forward(compute, given.tree, shapes, guard=True)
            cell.mutates_inputs = given.written(where)
            if cell.mutates_inputs:
                cell.stored = None
        else:
            outputs = cell.forward(compute, inputs, shapes)
        if self._new or modules.lazy:  # it may have made its parameters only now
            self._new = False
            after = self._module_state()
            if modules.lazy or not after.like(modules):
                cell.modules = self.modules = after
        run.count()
        if cell.keeps_graph and may_keep:
            return outputs, None
        cell.keep(partial(compute, recomputing=True), detached)
        return outputs, cell

    def _module_state(self) -> ModuleState:
        return ModuleState(self.stage.partition, self.stage.changes, self.run.substitute_of)

    def _selectively(
        self, i: int, record: Record, recomputing: bool, run: Callable[[], Any]
    ) -> Any:
        assert record.saved is not None
        contexts, states = record.saved
        with ExitStack() as around:
            # A cast that was found in the cache would be missing when this runs again.
            around.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            around.enter_context(contexts[recomputing])
            seen = around.enter_context(_SavedStates(self.stage, states, recomputing))
            result = run()
        if not recomputing:
            seen.check(getattr(contexts[0], "storage", None), self.stage.describe(i))
        return result

    def checkpointed(self, i: int, inputs: Any, owners: Sequence[int]) -> Any:
        """Computes cell ``(i, j)`` as a part of a graph that stores nothing of it."""
        begun: list[Recomputation] = []
        running = True
        flags = [tensor.requires_grad for tensor in tensors_in(inputs)]

        def run(_: Tensor) -> Any:
            nonlocal running, inputs
            if not begun:
                detached = map_tensors(lambda tensors: [t.detach() for t in tensors], inputs)
                outputs = self.forward(i, inputs, detached, owners, begun=begun.append)[0]
                running, inputs = False, detached
                return outputs
            recomputation, following = begun[0], iter(flags)
            if running and (self._new or recomputation.modules.lazy):
                recomputation.modules = self._module_state()  # a backward in its forward
            given = map_tensors(
                lambda tensors: [t.detach().requires_grad_(next(following)) for t in tensors],
                recomputation.inputs,
            )
            epoch = torch._C._current_graph_task_id()
            run_again = partial(self.run.recompute, recomputation, given, epoch, keep=True)
            in_modules = self.stage.generators.in_modules
            drawing = modules_that_draw([self.stage.partition]) if in_modules else []
            # The order of locks is: stage before random state.
            return without_generators(partial(let_modules_hold, drawing, run_again))

        like = torch.empty(0, device=self.stage.device)  # tells what kind of device it is
        return checkpoint(
            run, like, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )


def in_units(parent: Any, i: int, value: Any) -> Any:
    """The layers of a cell, one unit after another: those that are recomputed by themselves."""
    store = current_store() if parent.stage.has_skips else None
    inputs: Any = (value, ())
    given = [inputs]  # nothing else writes into the memory of these
    del value  # a name more would count as another user of the tensor
    for run, recomputed in parent.units:
        unit = run.stage
        unit.partition.training = parent.stage.partition.training
        inputs = (inputs[0], tuple([store.pop(key) for key in unit.pops]) if store else ())
        if recomputed:
            inputs, flags = own_memory(given, inputs, overlap_flags(inputs), all_leaves=False)
            given.append(inputs)
            outputs = run.checkpointed(i, inputs, flags)
        else:
            outputs = run.forward(i, inputs)
        if outputs[1] and store is not None:
            store.update(zip(unit.stashes, outputs[1], strict=True))
        inputs = outputs
        del outputs
    return inputs[0]


class _SavedStates(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the states of the generators after each random operation; recomputing: puts them back.

    It also sees which results are written into. Of kernels that write into views of these which
    count no versions (those of ``nn.GRU``) PyTorch sees nothing, and what is saved would be wrong.
    """

    def __init__(self, stage: Any, states: deque[list[Tensor]], recomputing: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators, self._recomputing = stage.generators.own, recomputing
        self._states = states
        self._made: dict[int, Any] = {}  # by storage the operation whose result it is
        self._written: dict[int, Any] = {}  # and the last one that wrote into it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._recomputing:
            self._look(func, result, (args, kwargs))
        if not is_random(func) or kwargs.get("generator") is not None:
            return result
        if not self._recomputing:
            self._states.append(states_of(self._generators))
        # There is none if other operations are run this time, which whoever looks for their
        # results will say. Operations that may be random and are not need no turn.
        elif (states := self._states.popleft() if self._states else []) and holds_generators():
            put_back_states(self._generators, states)
        return result

    def _look(self, func: Any, result: Any, given: Any) -> None:
        for storage in map(storage_of, tensors_in(result)):
            if func._schema.is_mutable:
                self._written[storage] = func
            elif storage not in self._made or storage not in map(storage_of, tensors_in(given)):
                self._made[storage] = func  # else it is a view
                self._written.pop(storage, None)

    def check(self, saved: Any, where: str) -> None:
        """Refuses results that were saved, as PyTorch does it, and written into unseen."""
        for key, entries in saved.items() if isinstance(saved, dict) else ():
            for entry in tree_leaves(entries):
                tensor = getattr(entry, "val", None)
                if not isinstance(tensor, Tensor) or tensor._version != entry.version:
                    continue  # PyTorch refuses it
                storage = storage_of(tensor)
                if storage in self._written and self._made.get(storage) is key:
                    raise RuntimeError(
                        f"checkpoint=Selective(...) saves the results of {key}, and in {where} "
                        f"{self._written[storage]} wrote into one of them by a view that counts "
                        "no versions (as the kernels of nn.GRU do), so that gradients would be "
                        f"wrong: do not let the policy save {key} there, or give this stage "
                        "another mode, checkpoint=[..., 'always', ...]"
                    )
