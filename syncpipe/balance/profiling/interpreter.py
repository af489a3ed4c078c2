"""How long a layer holds the interpreter: all its Python, but not the operators that it calls.

An operator lets go of CPython's lock while it works or launches kernels. What is left between
operators is Python, of which one process does no two at a time, however many devices there are. It
is CPU time of the thread: one that sleeps, waits or is kept waiting holds no interpreter::

    python(.) linear[ kernel ] python(.) relu[ kernel ] python(.)
              -- lock is free --         -- lock is free --

Backward runs in autograd's engine, without the lock, but for the backward of a
``torch.autograd.Function`` in Python, which is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _push_mode

from syncpipe.runtime.thread_state import settled

__all__ = ["python_time"]


class _Operators(TorchFunctionMode):
    """Counts the operators that are called, and the seconds inside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seconds = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        start = time.thread_time()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds += time.thread_time() - start
            self.calls += 1


def python_time(call: Callable[[], Any]) -> float:
    """Seconds that something takes outside of operators.

    Args:
        call: does it, and nothing that makes torch.compile look for operators.
    """
    seconds, calls = _outside(call)
    return max(0.0, seconds - calls * _of_counting())


def _outside(call: Callable[[], Any]) -> tuple[float, int]:
    operators = _Operators()

    def timed() -> float:
        _push_mode(operators)  # type: ignore[no-untyped-call]
        start = time.thread_time()
        call()
        return time.thread_time() - start

    seconds = settled(timed)
    return seconds - operators.seconds, operators.calls


@lru_cache(maxsize=1)
def _of_counting() -> float:
    """Seconds that it takes to count one operator: those of the quickest of some loops."""
    tensor, many = torch.empty(0), 100

    def loop() -> None:
        for _ in range(many):
            torch.relu(tensor)

    def bare() -> float:
        start = time.thread_time()
        for _ in range(many):
            pass
        return time.thread_time() - start

    return max(0.0, min(_outside(loop)[0] - bare() for _ in range(20))) / many
