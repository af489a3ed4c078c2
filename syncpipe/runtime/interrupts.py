"""Putting things back whenever Ctrl-C comes, and locks that a forked child finds free.

Python looks for Ctrl-C between any two bytecodes of the main thread, also on the first line of a
``finally``, whose rest then does not run, and in context managers written in Python. The signal
cannot be blocked: layers run in other threads as well, and one that hangs has to be interrupted.
What helps: what takes everything back, however often it is called, is called once more if Ctrl-C
came in the middle of it. Locks are held by ``with lock:`` itself, which is C and has no bytecodes.
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
#: A dict and a key, or a module or tensor and the name of an attribute; and what to put there.
Swap = tuple[Any, str, Any]


def run_and_undo(run: Callable[[], _T], undo: Callable[[], Any] | Iterator[Any]) -> _T:
    """Calls a function, and then takes back what it did, or began to do.

    ``undo`` takes everything back, however often it is called, or is an iterator that takes one
    thing back with each step, by C functions.
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
    """Calls a function while other values are in some places, which all have one before."""
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


def forkable() -> Any:
    """A ``threading.RLock`` that is free in a forked child, which has the forking thread only."""
    lock: Any = threading.RLock()
    _locks.add(weakref.ref(lock, _locks.discard))  # written in C: Ctrl-C cannot come in between
    return lock


def _free() -> None:
    for lock in [reference() for reference in list(_locks)]:
        # Those of the thread that forked are still its own: the child goes on with that thread.
        if lock is not None and not lock._is_owned():
            lock._at_fork_reinit()  # as the locks of Python's own modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
