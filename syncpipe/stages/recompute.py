"""Recomputed cells: forwards that drop their graph, and their recomputation."""

from __future__ import annotations

import traceback
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

from syncpipe.data.trees import map_tensors, tensors_in
from syncpipe.options import Selective, StageMode
from syncpipe.runtime.random_numbers import (
    holds_generators,
    is_random,
    let_modules_hold,
    put_back_states,
    states_of,
)
from syncpipe.runtime.recomputation import ModuleState, Recomputation
from syncpipe.skip.store import current_store
from syncpipe.stages.inplace import GuardedInputs, overlap_flags, own_memory
from syncpipe.storage import storage_of


class StageRecomputation:
    """The recomputation of a stage's cells in one call."""

    def __init__(self, run: Any, mode: StageMode) -> None:
        self.run, self.stage = run, run.stage
        self.policy = mode if isinstance(mode, Selective) else None
        self.modules: ModuleState | None = None  # the modules in this call
        self._new = True  # whether no cell has run yet
        self._compared = 0  # the last micro-batch whose stored tensors are compared

    def forward(
        self, i: int, inputs: Any, detached: Any, owners: Sequence[int],
        begun: Callable[[Recomputation], None] | None = None,
    ) -> tuple[Any, Recomputation | None]:  # fmt: skip
        """As ``StageRun.forward``, but drops the graph; returns the recomputation, too.

        The recomputation is None if backward needs the graph: a layer's change cannot be undone.
        """
        result: tuple[Any, Recomputation | None] = self.run.locked(
            self._without_storing, i, inputs, detached, owners, begun
        )
        return result

    def _without_storing(
        self, i: int, inputs: Any, detached: Any, owners: Sequence[int],
        begun: Callable[[Recomputation], None] | None,
    ) -> tuple[Any, Recomputation | None]:  # fmt: skip
        run, stage, where = self.run, self.stage, self.stage.describe(i)
        modules = self.modules = self.modules or self._module_state()
        cell = Recomputation(modules, where, partial(self._run, i), may_keep=begun is None)
        if self.policy is not None:
            cell.saved = self.policy.contexts(), deque()
        writes = run.writes or any(owners)
        if begun is not None:
            cell.keep(detached)
            cell.mutates_inputs = writes  # assumed until the forward has ended
            begun(cell)
        # The first cell of a call is compared with its recomputation, in the first call by shapes,
        # too. TorchScript compiles itself in its second run, and then stores other tensors.
        shapes = None
        if i <= self._compared and stage.compares_later:
            stage.compares_later, self._compared = False, 1
        elif i <= self._compared:
            shapes = stage.partition.training not in stage.compared_modes
            stage.compared_modes.add(stage.partition.training)
        given = GuardedInputs(inputs, owners, copy=run.writes, kept=True) if writes else None
        outputs = cell.forward(inputs if given is None else given.tree, shapes, guard=writes)
        cell.mutates_inputs = given is not None and given.check_writes(where)
        if cell.mutates_inputs:
            cell.stored = None
        if self._new or modules.lazy:  # the forward may have made parameters
            self._new = False
            if modules.changed() or modules.lazy:
                cell.modules = self.modules = self._module_state()
        run.count()
        if cell.keeps_graph:
            return outputs, None
        cell.keep(detached)
        return outputs, cell

    def _module_state(self) -> ModuleState:
        return ModuleState(self.stage.partition, self.stage.changes, self.run.substitute_of)

    def _run(self, i: int, cell: Recomputation, recomputing: bool, inputs: Any) -> Any:
        """Runs a cell; with a policy, saves results of operations, or takes those saved."""
        if cell.saved is None:
            return self.run.wrapped_layers(i, inputs, cell, recomputing)
        contexts, states = cell.saved
        with ExitStack() as around:
            # The recomputation would not find the forward's cached casts.
            around.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            around.enter_context(contexts[recomputing])
            seen = around.enter_context(_SavedStates(self.stage, states, recomputing))
            result = self.run.wrapped_layers(i, inputs, cell, recomputing)
        if not recomputing:
            seen.check(getattr(contexts[0], "storage", None), self.stage.describe(i))
        return result

    def checkpointed(self, i: int, inputs: Any, owners: Sequence[int]) -> Any:
        """Computes cell ``(i, j)`` as part of a plain graph that stores only the inputs."""
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
                recomputation.modules = self._module_state()  # a backward inside the forward
            given = map_tensors(
                lambda tensors: [t.detach().requires_grad_(next(following)) for t in tensors],
                recomputation.inputs,
            )
            epoch = torch._C._current_graph_task_id()
            run_again = partial(self.run.locked, recomputation, given, epoch, True)
            drawing = [self.stage.partition] if self.stage.generators.in_modules else []
            return let_modules_hold(drawing, run_again)

        like = torch.empty(0, device=self.stage.device)  # shows `checkpoint` the device type
        try:
            return checkpoint(
                run, like, use_reentrant=False, preserve_rng_state=False, early_stop=False
            )
        except BaseException as error:
            # Before 2.13 its hooks stay on this thread until the traceback dies, on any thread.
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if frame.f_globals.get("__name__") == checkpoint.__module__ and (
                    generator := frame.f_locals.get("gen")
                ):
                    generator.close()
            raise


def in_units(parent: Any, i: int, value: Any) -> Any:
    """Runs the layers of a cell unit by unit; some units are recomputed by themselves."""
    store = current_store() if parent.stage.has_skips else None
    inputs: Any = (value, ())
    given = [inputs]  # nothing else writes into the memory of these
    del value  # another name would count as a user of the tensor
    for run, recomputed in parent.units:
        unit = run.stage
        unit.partition.training = parent.stage.partition.training
        inputs = (inputs[0], tuple([store.pop(key) for key in unit.pops]) if store else ())
        if recomputed:
            inputs, flags = own_memory(given, inputs, overlap_flags(inputs), all_leaves=False)
            given.append(inputs)
            outputs = run.recomputation.checkpointed(i, inputs, flags)
        else:
            outputs = run.forward(i, inputs)
        if outputs[1] and store is not None:
            store.update(zip(unit.stashes, outputs[1], strict=True))
        inputs = outputs
        del outputs
    return inputs[0]


class _SavedStates(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Saves the generators' states after each random operation, and restores them in recomputation.

    Also notes which results are written into. PyTorch misses kernels, for example of ``nn.GRU``,
    that write into views without versions, so that a saved result would be wrong.
    """

    def __init__(self, stage: Any, states: deque[list[Tensor]], recomputing: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators, self._recomputing = stage.generators.own, recomputing
        self._states = states
        self._made: dict[int, Any] = {}  # by storage the operation that made it
        self._written: dict[int, Any] = {}  # by storage the last operation that wrote into it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._recomputing:
            self._note_storages(func, result, (args, kwargs))
        if not is_random(func) or kwargs.get("generator") is not None:
            return result
        if not self._recomputing:
            self._states.append(states_of(self._generators))
        # No state is left if the recomputation runs other operations, which PyTorch reports.
        # Operations that may draw, but did not, hold no generators.
        elif (states := self._states.popleft() if self._states else []) and holds_generators():
            put_back_states(self._generators, states)
        return result

    def _note_storages(self, func: Any, result: Any, given: Any) -> None:
        for storage in map(storage_of, tensors_in(result)):
            if func._schema.is_mutable:
                self._written[storage] = func
            elif storage not in self._made or storage not in map(storage_of, tensors_in(given)):
                self._made[storage] = func  # not a view of an argument
                self._written.pop(storage, None)

    def check(self, saved: Any, where: str) -> None:
        """Refuses saved results that were written into without a new version."""
        for key, entries in saved.items() if isinstance(saved, dict) else ():
            for entry in tree_leaves(entries):
                tensor = getattr(entry, "val", None)
                if not isinstance(tensor, Tensor) or tensor._version != entry.version:
                    continue  # PyTorch refuses it itself
                storage = storage_of(tensor)
                if storage in self._written and self._made.get(storage) is key:
                    raise RuntimeError(
                        f"checkpoint=Selective(...) saves the results of {key}, and in {where} "
                        f"{self._written[storage]} wrote into one of them through a view without "
                        "versions (as kernels of nn.GRU do), so gradients would be wrong: let the "
                        f"policy not save {key}, or give this stage another mode, "
                        "checkpoint=[..., 'always', ...]"
                    )
