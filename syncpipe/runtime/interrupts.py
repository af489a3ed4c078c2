"""Restores state after Ctrl-C at any bytecode; makes locks that are free in a forked child.

Python raises ``KeyboardInterrupt`` between any two bytecodes of the main thread, also on the first
line of a ``finally``, whose rest is then skipped, and inside context managers written in Python.
The signal cannot be blocked: a layer that hangs must be interruptible. So each undo function is
idempotent and runs again if Ctrl-C interrupted it. Locks are taken by ``with lock:``, which is C
code.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

_T = TypeVar("_T")
#: A dict and a key, or a module or tensor and an attribute name; and the value to put there.
Swap = tuple[Any, str, Any]


def run_and_undo(run: Callable[[], _T], undo: Callable[[], Any] | Iterator[Any]) -> _T:
    """Calls ``run``, then ``undo``, also after an exception or Ctrl-C in either of them.

    ``undo`` is an idempotent function, or an iterator whose steps are C functions.
    """
    if isinstance(undo, Iterator):
        undo = partial(deque, undo, maxlen=0)
    try:
        return run()
    finally:
        try:
            undo()
        except BaseException:  # Ctrl-C
            undo()
            raise


def with_swaps(swaps: Iterable[Swap], run: Callable[[], _T]) -> _T:
    """Calls ``run`` while the values of ``swaps`` are in their places; then restores the others."""
    swaps = list(swaps)
    before = [
        (owner, name, getattr(owner, name) if _by_attribute(owner) else owner[name])
        for owner, name, _ in swaps
    ]

    def put_and_run() -> _T:
        _put(swaps)
        return run()

    return run_and_undo(put_and_run, partial(_put, before))


def _put(swaps: Iterable[Swap]) -> None:
    for owner, name, value in swaps:
        if _by_attribute(owner):
            setattr(owner, name, value)
        else:
            owner[name] = value


def _by_attribute(owner: Any) -> bool:
    return isinstance(owner, nn.Module | Tensor)


_locks: set[weakref.ref[Any]] = set()


def forkable_lock() -> Any:
    """A ``threading.RLock`` that a forked child finds free, unless the forking thread holds it."""
    lock: Any = threading.RLock()
    _locks.add(weakref.ref(lock, _locks.discard))  # a C callback: Ctrl-C cannot interrupt it
    return lock


def _free() -> None:
    for lock in [reference() for reference in list(_locks)]:
        if lock is not None and not lock._is_owned():  # the child continues the forking thread
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
