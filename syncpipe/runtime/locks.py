"""Locks that a forked child finds free, whichever of its parent's threads held them.

The child has only the thread that forked. What another one was doing there is nobody's business
any more, but the locks that it held would never be released.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["forkable"]

_locks: set[weakref.ref[Any]] = set()


def forkable() -> Any:
    """A ``threading.RLock`` that is free in a forked child."""
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
