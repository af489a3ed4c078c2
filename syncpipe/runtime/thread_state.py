"""What a thread knows besides its variables: captured from the caller, in force in the workers.

Grad mode, autocast, the default device and a dozen other things belong to the thread that set
them. A layer must not notice that it runs on another thread, so each call captures the state of
its caller once and every worker applies it while it serves that call. Dispatch modes and PyTorch's
profiler must not be entered by two threads at a time: where one of them is active, or the caller
asks for it by :class:`inline`, the call runs on the caller's thread.

What goes back inside of an action, or of a recomputation, does so on that very thread
(:func:`backward_here`). Those hold locks, and autograd's only thread for an accelerator may be
waiting for these: it recomputes as well. As nobody who holds a lock waits for a thread of
autograd's, these may wait for locks.
"""

from __future__ import annotations

import contextvars
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, _GeneratorContextManager, contextmanager
from functools import lru_cache, partial
from operator import call
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from syncpipe.runtime.interrupts import run_and_undo

_P = ParamSpec("_P")
_T = TypeVar("_T")
_C: Any = torch._C
_Flag = tuple[Callable[[], Any], Callable[[Any], Any]]  #: what gets a value, and what sets it
_AUTOCAST_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "privateuseone")
INLINE: contextvars.ContextVar[bool | str] = contextvars.ContextVar(
    "syncpipe_inline", default=False
)


class inline(AbstractContextManager[None]):
    """A context in which every pipe runs on the calling thread, without any hand-off.

    For a debugger, and for whatever looks at one thread only. The results are the same::

        with syncpipe.inline():
            y = pipe(x)

    Args:
        graph: ``pipe(x)`` leaves the graph of its layers behind, for whoever uses tensors that
            forward hooks kept, and so on: its stages run one after another with ordinary copies
            between devices, and what is computed again is so by ``torch.utils.checkpoint``. Outputs
            are the same, and gradients but for the order in which those of one parameter are added.
    """

    def __init__(self, *, graph: bool = False) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._token = INLINE.set("graph" if self._graph else True)

    def __exit__(self, *exc_info: object) -> None:
        INLINE.reset(self._token)


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function out of sight of torch.compile: that is for layers, not for what is between."""
    if "torch._dynamo" not in sys.modules:
        return function
    disable: Any = torch.compiler.disable
    return disable(function)  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _flags() -> list[_Flag]:
    """What gets and sets the values of a thread; after the first four, all autocasts there are.

    Casts of weights are cached for all threads, and cleared by whoever leaves the outermost
    ``autocast``: outside of one the cache would go stale.
    """
    pairs = (
        (torch.is_autocast_enabled, torch.set_autocast_enabled),
        (torch.get_autocast_dtype, torch.set_autocast_dtype),
    )
    types = filter(torch.amp.is_autocast_available, _AUTOCAST_TYPES)
    return [
        (torch.is_grad_enabled, _C._set_grad_enabled),
        (_C._is_multithreading_enabled, _C._set_multithreading_enabled),
        (_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        *[(partial(get, t), partial(set_it, t)) for t in types for get, set_it in pairs],
    ]


def _set(flags: Sequence[_Flag], values: Sequence[Any]) -> None:
    for (get, set_it), value in zip(flags, values, strict=True):
        if get() != value:
            set_it(value)


@lru_cache(maxsize=1)
def _process_flags() -> list[_Flag]:
    """What gets and sets values of the whole process that layers often set for a while."""
    names = ("filters", "showwarning", "_showwarnmsg_impl")
    kinds = ("flash", "mem_efficient", "math", "cudnn", "overrideable")  # sdpa_kernel
    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        *[(partial(getattr, warnings, each), partial(setattr, warnings, each)) for each in names],
        *[(getattr(_C, f"_get_{k}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{k}")) for k in kinds],
    ]


def restoring_process(run: Callable[[], _T]) -> _T:
    """Runs something on several threads; then values of the process are as they were.

    Where two layers set one for a while (``with sdpa_kernel(...)``), the later one to end puts back
    what the other had set.
    """
    flags = _process_flags()
    return run_and_undo(run, partial(_set, flags, [get() for get, _ in flags]))


class CallerState:
    """The thread-local state of the thread that makes it.

    Attributes:
        nested: whether the caller is inside of an ``autocast``, which clears the cache at its end.
        autocasts: what switches off, and on again, each kind of autocast that is on.
        transformed: whether torch.func or torch.jit.trace looks, which cannot recompute anything.
        needs_inline: whether something is active that only the caller's own thread can honour.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.values = [get() for get, _ in _flags()]
        self.grad = self.values[0]
        self.values[1] = False  # as in `backward_here`
        self.autocasts = [set_it for get, set_it in _flags()[4:] if get() is True]
        self.inference = torch.is_inference_mode_enabled()
        # Both at once, in C, so that Ctrl-C cannot come in between.
        level, _ = map(call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
        self.nested = level > 1
        self.function_modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        devices = [vars(mode) for mode in self.function_modes if isinstance(mode, DeviceContext)]
        self._devices = [(attributes, dict(attributes)) for attributes in devices]
        self.transformed = (
            _C._functorch.peek_interpreter_stack() is not None
            or _C._get_tracing_state() is not None  # torch.jit.trace
        )
        self._subclasses = _C._is_torch_function_enabled()
        self._hooks = _C._autograd._top_saved_tensors_default_hooks(False)  # the innermost
        self.needs_inline = (
            _C._len_torch_dispatch_stack() > 0
            or _C._autograd._profiler_enabled()
            or not all(isinstance(mode, DeviceContext) for mode in self.function_modes)
            or self.transformed
            or _C._current_graph_task_id() != -1  # in backward, which must not wait
        )

    def leave_devices(self) -> None:
        """Lets ``torch.set_default_device(None)`` of the caller end what is in force.

        PyTorch's checkpoint enters that object again, which would then put itself back for ever.
        """
        for attributes, before in self._devices:
            attributes.update(before)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the state in force on the calling thread."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.callback(_set, _flags(), [get() for get, _ in _flags()])
            _set(_flags(), self.values)
            if self._subclasses and not _C._is_torch_function_enabled():  # in their `backward()`
                stack.enter_context(_C._EnableTorchFunction())
            if self.nested:  # an autocast inside a layer must not clear the caller's cache
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            for mode in self.function_modes:
                _push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(_pop_mode)
            if self._hooks is not None:
                _C._autograd._push_saved_tensors_default_hooks(*self._hooks)
                stack.callback(_C._autograd._pop_saved_tensors_default_hooks)
            yield


def restoring_thread(run: Callable[[], _T]) -> _T:
    """Runs something; then no modes or hooks of saved tensors are on that were not before, and
    gradients are as they were.

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

    functions, dispatch = _C._len_torch_function_stack, _C._len_torch_dispatch_stack
    hooks: Any = _C._autograd._top_saved_tensors_default_hooks
    before = functions(), dispatch(), torch.is_grad_enabled(), hooks(False)

    def undo() -> None:
        while functions() > before[0]:
            _C._pop_torch_function_stack()
        while dispatch() > before[1]:
            _C._pop_torch_dispatch_stack(None)
        _C._set_grad_enabled(before[2])
        while hooks(False) not in (None, before[3]):
            _C._autograd._pop_saved_tensors_default_hooks()

    return run_and_undo(closed, undo)


def backward_here(run: Callable[[], _T]) -> _T:
    """Runs something, and on this thread, too, all backwards that it begins."""

    def inside() -> _T:
        torch._C._set_multithreading_enabled(False)
        return run()

    before = torch._C._is_multithreading_enabled()
    return run_and_undo(inside, partial(torch._C._set_multithreading_enabled, before))


def without_autocast(state: CallerState, run: Callable[..., _T]) -> Callable[..., _T]:
    """A function for which is switched off what ``state`` has switched on, as after ``with``.

    ``torch.autocast`` itself would clear its cache on the way out, and that of all threads.
    """
    if not state.autocasts:
        return run

    def without(*args: Any) -> _T:
        for set_it in state.autocasts:
            set_it(False)
        try:
            return run(*args)
        finally:
            for set_it in state.autocasts:
                set_it(True)

    return without
