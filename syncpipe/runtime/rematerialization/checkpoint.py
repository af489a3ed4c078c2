"""Re-materialization: a cell stores nothing for backward and is computed again.

The forward runs under saved-tensor hooks that replace every tensor that autograd would store by
a :class:`_Slot`. The graph itself is the true one: it holds the parameters, so their hooks and
``DistributedDataParallel`` notice nothing. The first time backward asks for a slot (or earlier, see
``transfer.Early``), the cell runs again under hooks that put the values into the slots.

    forward     x --> [cell] --> y        graph: nodes --> slots --> frame --> (x, cell)
    recompute   x --> [cell]              its own graph is dropped, its values fill the slots

Who owns what: the nodes own their slots, a slot owns its frame, and the frame owns the inputs. When
backward frees the nodes, all of it goes. A frame knows its slots weakly, so a value that nobody
can ask for is never kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from syncpipe.runtime.errors import annotate
from syncpipe.runtime.free_threading import FREE_THREADED
from syncpipe.runtime.rematerialization.guards import UnmodifiedTensors, version_of
from syncpipe.runtime.rematerialization.module_state import OUTERMOST
from syncpipe.runtime.thread_state import Autocast, CallerState, backward_here
from syncpipe.tree import clones, described, map_tensors, tensors_in

__all__ = [
    "CHECKPOINTING",
    "RECOMPUTING",
    "CheckpointFrame",
    "is_checkpointing",
    "is_recomputing",
]

CHECKPOINTING: ContextVar[bool] = ContextVar("syncpipe_checkpointing", default=False)
RECOMPUTING: ContextVar[bool] = ContextVar("syncpipe_recomputing", default=False)


def is_checkpointing() -> bool:
    """Whether the calling layer runs in a forward whose activations are dropped.

    It will run once more, in backward, for the same micro-batch.
    """
    return CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Whether the calling layer runs for the second time, in backward.

    A layer with a side effect (a counter, a log) asks this to have it only once. Buffers need no
    such care: a recomputation neither sees nor leaves a change in them.
    """
    return RECOMPUTING.get()


#: A parameter, and its version when it was stored.
_Stored = tuple[nn.Parameter, int]
_NEVER = "use checkpoint='never'"
_graph_stays = torch._C._autograd._get_current_graph_task_keep_graph  # as for retain_graph=True


class _Slot:
    """Stands in the graph for a tensor that will be computed again."""

    __slots__ = ("__weakref__", "frame", "index", "value")

    def __init__(self, frame: CheckpointFrame, index: int) -> None:
        self.frame = frame
        self.index = index
        self.value: Tensor | None = None


Cell = Callable[[Any], Any]


class CheckpointFrame:
    """One re-materialized cell: how to run it again, and the slots to fill.

    Args:
        cell: computes the cell from its inputs (a tree), the same every time.
        inputs: the tree of inputs, detached: a frame does not keep the graph before it alive.
        requires_grad: for each of its tensors whether the cell's own requires grad.
        restored: calls a function with modules and buffers as they were before the forward.
        lock: to be held meanwhile, if there are buffers.
        caller: the state of the thread that called the pipe.
        threads: intra-op threads of the forward (0: those of the thread at hand).
        where: the cell, which as a string is its name in messages.
    """

    def __init__(
        self,
        cell: Cell,
        inputs: Any,
        *,
        requires_grad: list[bool],
        restored: Callable[[Callable[[], None]], None],
        lock: Any,
        caller: CallerState,
        threads: int,
        where: object,
    ) -> None:
        self._cell = cell
        self._restored = restored
        self._stage_lock = lock
        self._caller = caller
        self._threads = threads
        self._where = where
        self._lock = threading.RLock()
        self._slots: list[weakref.ref[_Slot]] = []
        self._complete = False  # False during the forward: a layer may run a backward in it
        self._shapes: list[str] = []
        self._requires_grad = requires_grad
        self.keep(inputs, mutates_inputs=True)  # until the forward has shown whether it does

    def keep(self, inputs: Any, *, mutates_inputs: bool) -> None:
        """Starts from these inputs from now on.

        Args:
            inputs: a tree.
            mutates_inputs: whether the cell writes into its inputs, so that it has to be given
                copies of them.
        """
        self._inputs = inputs
        self._mutates_inputs = mutates_inputs
        self._unmodified = UnmodifiedTensors(inputs, self._where)

    def forward(self, cell: Cell, inputs: Any) -> Any:
        """Runs the cell for the first time, storing nothing."""
        given = {id(t) for t in tensors_in(inputs)}
        disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if disabled is not None:  # by torch.func.grad, for one
            raise RuntimeError(f"re-materialization cannot be used here ({disabled}): {_NEVER}")

        def pack(tensor: Tensor) -> _Slot | _Stored:
            if isinstance(tensor, nn.Parameter) and id(tensor) not in given:
                # Alive anyway, and without a graph of its own.
                return tensor, version_of(tensor)
            slot = _Slot(self, len(self._slots))
            self._slots.append(weakref.ref(slot))
            self._shapes.append(described(tensor))
            return slot

        token = CHECKPOINTING.set(True)
        try:  # by hand: Ctrl-C may come between any two lines, but not before this one
            torch._C._autograd._push_saved_tensors_default_hooks(pack, _unpack)
            outputs = cell(inputs)
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            CHECKPOINTING.reset(token)
        self._complete = True
        return outputs

    @property
    def stores(self) -> bool:
        """Whether backward will ask for anything."""
        return bool(self._slots)

    def recompute(self) -> None:
        """Fills the slots that are alive and empty; does nothing when there is none."""
        with self._lock:
            if any((slot := ref()) is not None and slot.value is None for ref in self._slots):
                # The caller's context, but for the lock that this thread may hold itself.
                self._caller.context.copy().run(self._recompute, OUTERMOST.get())

    def _recompute(self, held: Any) -> None:
        self._unmodified.check()
        RECOMPUTING.set(True)
        count, expected = 0, len(self._slots)
        fault: RuntimeError | None = None

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count, fault
            # Not the tensor itself: stored by the node that made it, the two would never die.
            if isinstance(tensor, nn.Parameter):
                return tensor.detach()
            if count >= expected and not self._complete:
                return tensor.detach()
            if count >= expected or described(tensor) != self._shapes[count]:
                fault = RuntimeError(self._not_the_same(count, described(tensor)))
                raise fault
            slot = self._slots[count]()
            if slot is not None and slot.value is None:
                slot.value = tensor.detach()
            count += 1
            return tensor.detach()

        flags = iter(self._requires_grad)
        inputs = map_tensors(
            lambda ts: [t.detach().requires_grad_(next(flags)) for t in ts], self._inputs
        )
        if self._mutates_inputs:
            with torch.enable_grad():
                inputs = map_tensors(clones, inputs)

        def run() -> None:
            with _As(self._caller, self._threads):
                try:  # by hand, as in the forward
                    torch._C._autograd._push_saved_tensors_default_hooks(pack, _identity)
                    backward_here(lambda: self._cell(inputs))
                finally:
                    torch._C._autograd._pop_saved_tensors_default_hooks()

        try:
            with self._stage_lock if self._stage_lock and held is None else nullcontext():
                OUTERMOST.set(held or self._stage_lock)
                self._restored(run)
        except BaseException as error:
            annotate(error, f"while recomputing {self._where}")
            if fault is not None and error is not fault:  # TorchScript raises one without a message
                raise fault from error
            raise
        if count < expected:
            raise RuntimeError(self._not_the_same(count, "nothing more"))

    def _not_the_same(self, count: int, got: str) -> str:
        expected = self._shapes[count] if count < len(self._shapes) else "nothing more"
        return (
            f"{self._where} stored other tensors for backward when it was recomputed: as number "
            f"{count} {got} instead of {expected}. Its layers must do the same both times; if one "
            "depends on a global or counts its calls, let it ask syncpipe.is_recomputing(); if the "
            "forward ran in a context that backward does not (sdpa_kernel, parametrize.cached), "
            f"call backward in it, too; or {_NEVER}."
        )


def _unpack(packed: _Slot | _Stored) -> Tensor:
    if isinstance(packed, tuple):
        parameter, version = packed
        if version_of(parameter) != version:  # autograd leaves this to whoever sets hooks
            raise RuntimeError(
                f"a parameter ({described(parameter)}) that is needed for backward was modified in "
                f"place since the forward (version {version} became {version_of(parameter)}): call "
                "backward before the optimizer's step, and modify copies"
            )
        return parameter
    if packed.value is None:
        packed.frame.recompute()
    value = packed.value
    assert value is not None
    # A node may ask again, and lets go of the slot when it is done; but not in a graph that stays.
    if _graph_stays():
        packed.value = None
    elif FREE_THREADED:
        _lent.to_node(packed)
    return value


class _Lent(threading.local):
    """The slots whose values the node at hand has asked for; the next node no longer needs them.

    When a node lets go of a slot, the slot dies on the worker that made it, which may sleep.
    """

    def __init__(self) -> None:
        self.node = 0
        self.slots: list[weakref.ref[_Slot]] = []

    def to_node(self, slot: _Slot) -> None:
        node = id(torch._C._current_autograd_node())
        if node != self.node:
            for reference in self.slots:
                other = reference()
                if other is not None:
                    other.value = None
            self.node, self.slots = node, []
        self.slots.append(weakref.ref(slot))


_lent = _Lent()


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class _As:
    """The caller's state of the forward, in the autograd thread that recomputes.

    Autograd brings modes and grad mode of the caller of backward; autocast, default device and
    intra-op threads are the forward's.
    """

    def __init__(self, state: CallerState, threads: int) -> None:
        self._state = state
        self._count = threads

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = Autocast()
        self._threads = torch.get_num_threads()
        torch._C._set_grad_enabled(True)
        # Outside of its `with autocast` nobody would ever clear the cache, so it stays off. Without
        # one the flag stays, for which compiled layers would be compiled again.
        then = self._state.autocast
        then.set(self._autocast, cache=then.cache and not then.casts)
        here = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._modes = [mode for mode in self._state.function_modes if mode not in here]
        for mode in self._modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]
        if self._count and self._count != self._threads:
            torch.set_num_threads(self._count)

    def __exit__(self, *exc_info: object) -> None:
        if self._count and self._count != self._threads:
            torch.set_num_threads(self._threads)
        for _ in self._modes:
            _pop_mode()  # type: ignore[no-untyped-call]
        self._autocast.set(self._state.autocast, cache=self._autocast.cache)
        torch._C._set_grad_enabled(self._grad)
