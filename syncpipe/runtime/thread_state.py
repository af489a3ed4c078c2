"""Thread-local state of PyTorch: captured from the caller, applied on the workers.

Grad mode, autocast, the default device and other settings belong to the thread that set them. A
layer must not notice that it runs on another thread: each call captures the caller's state once,
and every worker applies it during the call. Two threads cannot share dispatch modes or PyTorch's
profiler: if one is active, or under :class:`inline`, the call runs on the caller's thread.

A backward inside an action or a recomputation runs on the same thread (:func:`backward_here`). Both
hold locks, and autograd's one thread per accelerator, which recomputes too, may wait for them. So
no holder of a lock waits for a thread of autograd.
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
    """A context in which every pipe runs on the calling thread, for example in a debugger.

    The results are the same::

        with syncpipe.inline():
            y = pipe(x)

    Args:
        graph: let ``pipe(x)`` return outputs with the plain graph of its layers, so that tensors
            saved by hooks can be used with their graph. Stages run one after another with ordinary
            copies between devices, and recomputation uses ``torch.utils.checkpoint``. The gradients
            of a parameter may be summed in another order.
    """

    def __init__(self, *, graph: bool = False) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._token = INLINE.set("graph" if self._graph else True)

    def __exit__(self, *exc_info: object) -> None:
        INLINE.reset(self._token)


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Hides a function from torch.compile, which is for the layers only."""
    if "torch._dynamo" not in sys.modules:
        return function
    disable: Any = torch.compiler.disable
    return disable(function)  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _flags() -> list[_Flag]:
    """Getters and setters of a thread's settings: four, then two for each kind of autocast.

    The cache of cast weights serves all threads, and is cleared at the end of the outermost
    ``autocast``: without one it would go stale.
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
    """Getters and setters of settings of the process that layers often change temporarily."""
    names = ("filters", "showwarning", "_showwarnmsg_impl")
    kinds = ("flash", "mem_efficient", "math", "cudnn", "overrideable")  # sdpa_kernel
    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        *[(partial(getattr, warnings, each), partial(setattr, warnings, each)) for each in names],
        *[(getattr(_C, f"_get_{k}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{k}")) for k in kinds],
    ]


def restoring_process(run: Callable[[], _T]) -> _T:
    """Runs a function on several threads, then restores settings of the process.

    If two layers change a setting temporarily (``with sdpa_kernel(...)``), the one that ends last
    would restore the other's value.
    """
    flags = _process_flags()
    return run_and_undo(run, partial(_set, flags, [get() for get, _ in flags]))


def autocast_level() -> int:
    """The number of ``autocast`` contexts that this thread is in."""
    # Both in one C call, which Ctrl-C cannot interrupt.
    _, level = map(call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return level


class CallerState:
    """The thread-local state of the thread that makes it.

    Attributes:
        nested: whether the caller is inside an ``autocast``, which clears the cache at its end.
        autocasts: the setters of the autocasts that are enabled.
        transformed: whether torch.func or torch.jit.trace is active; neither can recompute.
        needs_inline: whether a mode is active that works on the caller's thread only.
    """

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.values = [get() for get, _ in _flags()]
        self.grad = self.values[0]
        self.values[1] = False  # as in `backward_here`
        self.autocasts = [set_it for get, set_it in _flags()[4:] if get() is True]
        self.inference = torch.is_inference_mode_enabled()
        self.nested = autocast_level() > 0
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
            or _C._current_graph_task_id() != -1  # a backward must not wait for workers
        )

    def leave_devices(self) -> None:
        """Restores ``set_default_device`` modes, so that ``set_default_device(None)`` ends them.

        PyTorch's checkpoint enters the mode again, which would then restore itself each time.
        """
        for attributes, before in self._devices:
            attributes.update(before)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The context in which the calling thread has this state."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.callback(_set, _flags(), [get() for get, _ in _flags()])
            _set(_flags(), self.values)
            if self._subclasses and not _C._is_torch_function_enabled():  # in a subclass's backward
                stack.enter_context(_C._EnableTorchFunction())
            if self.nested:  # keeps an autocast in a layer from clearing the caller's cache
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
    """Runs a function, then restores the thread's modes, hooks, flags and autocast nesting.

    After Ctrl-C, too, which can interrupt the end of PyTorch's own ``with`` blocks.
    """

    def closed() -> _T:
        try:
            return run()
        except KeyboardInterrupt as error:
            # `_pop_mode_temporarily` pushes its mode again when its generator is closed. If Ctrl-C
            # interrupted its `__exit__`, the garbage collector would close it, too late.
            for frame, _ in traceback.walk_tb(error.__traceback__):
                manager = frame.f_locals.get("self")
                if isinstance(manager, _GeneratorContextManager) and hasattr(manager, "gen"):
                    manager.gen.close()
            raise

    functions, dispatch = _C._len_torch_function_stack, _C._len_torch_dispatch_stack
    hooks: Any = _C._autograd._top_saved_tensors_default_hooks
    before = functions(), dispatch(), [get() for get, _ in _flags()], hooks(False), autocast_level()

    def undo() -> None:
        while functions() > before[0]:
            _C._pop_torch_function_stack()
        while dispatch() > before[1]:
            _C._pop_torch_dispatch_stack(None)
        _set(_flags(), before[2])
        while hooks(False) not in (None, before[3]):
            _C._autograd._pop_saved_tensors_default_hooks()
        while autocast_level() > before[4]:  # else no autocast would clear the cache any more
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()

    return run_and_undo(closed, undo)


def backward_here() -> None:
    """Lets this thread run all backwards that it starts, until :func:`restoring_thread` ends."""
    _C._set_multithreading_enabled(False)


def without_autocast(state: CallerState, run: Callable[..., _T]) -> Callable[..., _T]:
    """Wraps a function to run with the autocasts of ``state`` disabled.

    ``torch.autocast(enabled=False)`` would clear the cache of all threads at its end.
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
