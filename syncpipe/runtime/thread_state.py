"""What a thread knows besides its variables: captured from the caller, in force in the workers.

Grad mode, autocast, the default device and a dozen other things belong to the thread that set
them. A layer must not notice that it runs on another thread, so each call captures the state of
its caller once and every worker applies it while it serves that call. Two kinds of state cannot go
to another thread at all: dispatch modes and PyTorch's profiler (unless it was told to profile all
threads), because one object of theirs must not be entered by two threads at a time. Where one of
them is active the call runs inline, on the caller's thread (:attr:`CallerState.needs_inline`).

One thing is never the caller's: what goes back inside of an action, or of a recomputation, does so
on that very thread (:func:`backward_here`). Those hold locks (of a stage, of generators, of a
cell), and autograd's only thread for an accelerator may be waiting for these: it recomputes as
well. As nobody who holds a lock waits for a thread of autograd's, these may wait for locks.
"""

from __future__ import annotations

import contextvars
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, _GeneratorContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch.overrides import (
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import DeviceContext

from syncpipe.runtime.interrupts import undone

__all__ = ["Autocast", "CallerState", "backward_here", "settled", "without_autocast"]

_T = TypeVar("_T")
_AUTOCAST_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "privateuseone")


@lru_cache(maxsize=1)
def _autocast_types() -> tuple[str, ...]:
    """The device types whose autocast state this build of PyTorch knows."""
    return tuple(filter(torch.amp.is_autocast_available, _AUTOCAST_TYPES))


def _saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost saved-tensor hooks of this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class Autocast:
    """The autocast state of a thread, for every device type."""

    __slots__ = ("cache", "casts", "enabled")

    def __init__(self) -> None:
        self.cache = torch.is_autocast_cache_enabled()
        self.enabled = [
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
            for name in _autocast_types()
        ]
        self.casts = any(enabled for _, enabled, _ in self.enabled)

    def set(self, present: Autocast, *, cache: bool) -> None:
        """Puts the state in force on the calling thread.

        Args:
            present: what is in force there now.
            cache: whether casts of weights may be cached. The cache is global and cleared by
                whoever leaves the outermost ``autocast``; outside of one it would go stale.
        """
        if self.enabled != present.enabled:
            for name, enabled, dtype in self.enabled:
                torch.set_autocast_enabled(name, enabled)
                torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(cache)


class CallerState:
    """The thread-local state of the thread that makes it.

    Attributes:
        context: the caller's context variables.
        grad: whether the caller records a graph.
        nested: whether the caller is inside of an ``autocast``, which clears the cache at its end.
        needs_inline: whether something is active that only the caller's own thread can honour.
    """

    __slots__ = (
        "_forward_ad",
        "_hooks",
        "autocast",
        "context",
        "function_modes",
        "grad",
        "inference",
        "needs_inline",
        "nested",
    )

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = Autocast()
        self.nested = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        self.function_modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._forward_ad = torch._C._is_fwd_grad_enabled()
        self._hooks = _saved_tensor_hooks()
        self.needs_inline = (
            torch._C._len_torch_dispatch_stack() > 0
            or torch._C._autograd._profiler_enabled()
            or not all(isinstance(mode, DeviceContext) for mode in self.function_modes)
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._get_tracing_state() is not None  # torch.jit.trace
            or torch._C._current_graph_task_id() != -1  # in backward, which must not wait
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the state in force on the calling thread."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for set_it, before, value in (
                (torch._C._set_grad_enabled, torch.is_grad_enabled(), self.grad),
                (torch._C._set_fwd_grad_enabled, torch._C._is_fwd_grad_enabled(), self._forward_ad),
                # As in `backward_here`.
                (
                    torch._C._set_multithreading_enabled,
                    torch._C._is_multithreading_enabled(),
                    False,
                ),
            ):
                stack.callback(set_it, before)
                set_it(value)
            if self.nested:  # an autocast inside a layer must not clear the caller's cache
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            own = Autocast()
            stack.callback(own.set, self.autocast, cache=own.cache)
            self.autocast.set(own, cache=self.autocast.cache)
            for mode in self.function_modes:
                _push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(_pop_mode)
            if self._hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            yield


def settled(run: Callable[[], _T]) -> _T:
    """Runs something; then no modes are on that were not before, and gradients are as they were.

    After Ctrl-C as well: PyTorch's own ``with`` blocks end in Python, where it may come.
    """

    def closed() -> _T:
        try:
            return run()
        except KeyboardInterrupt as error:
            # `_pop_mode_temporarily` puts its mode on again when it is closed: late, by the garbage
            # collector, if Ctrl-C came in the `__exit__` that goes on with it.
            for frame, _ in traceback.walk_tb(error.__traceback__):
                manager = frame.f_locals.get("self")
                if isinstance(manager, _GeneratorContextManager) and hasattr(manager, "gen"):
                    manager.gen.close()
            raise

    functions, dispatch = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    before = functions(), dispatch(), torch.is_grad_enabled(), sys.getprofile()

    def undo() -> None:
        while functions() > before[0]:
            torch._C._pop_torch_function_stack()
        while dispatch() > before[1]:
            torch._C._pop_torch_dispatch_stack(None)
        torch._C._set_grad_enabled(before[2])
        sys.setprofile(before[3])

    return undone(closed, undo)


def backward_here(run: Callable[[], _T]) -> _T:
    """Runs something, and on this thread, too, all backwards that it begins."""

    def inside() -> _T:
        torch._C._set_multithreading_enabled(False)
        return run()

    before = torch._C._is_multithreading_enabled()
    return undone(inside, partial(torch._C._set_multithreading_enabled, before))


def without_autocast(state: CallerState, run: Callable[..., _T]) -> Callable[..., _T]:
    """A function for which is switched off what ``state`` has switched on, as after ``with``.

    ``torch.autocast`` itself would clear its cache on the way out, and that of all threads.
    """
    enabled = [name for name, on, _ in state.autocast.enabled if on]
    if not enabled:
        return run

    def without(*args: Any) -> _T:
        for name in enabled:
            torch.set_autocast_enabled(name, False)
        try:
            return run(*args)
        finally:
            for name in enabled:
                torch.set_autocast_enabled(name, True)

    return without
