"""Putting things back, whenever Ctrl-C comes.

Python looks for Ctrl-C between any two bytecodes of the main thread, also on the first line of a
``finally``, and then the rest of it does not run. What does not help:

* a ``finally`` in a ``finally``, or a loop until it worked: the same gap once more;
* a context manager written in Python, ``@contextmanager`` and ``ExitStack`` included: Ctrl-C comes
  after it was entered and before its ``with`` knows, or on the first line of its ``__exit__``;
* blocking the signal: only the main thread may, layers run in others as well, and a layer that
  hangs could not be interrupted any more.

What helps: a call of a C function, with whatever it calls in C, has no bytecodes. ``deque(undo,
maxlen=0)`` exhausts an iterator in one such call, and where the steps of it are C functions, too
(``map(setitem, ...)``), Ctrl-C comes before all of them or after all of them. Before: that is one
interrupt, and the call stands in a ``finally`` of its own once more. Whoever presses Ctrl-C twice
within a microsecond is out of luck. Locks are held by ``with lock:`` itself, which is C as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

__all__ = ["undone"]

_T = TypeVar("_T")
_NOTHING = nullcontext()


def undone(
    run: Callable[[], _T], undo: Iterator[Any], lock: AbstractContextManager[Any] = _NOTHING
) -> _T:
    """Calls a function, and then takes back what it did, or began to do.

    Args:
        run: the function.
        undo: takes one thing back with each step, by C functions; made before, so that it knows
            what to put back.
        lock: to be held meanwhile.
    """
    try:
        return run()
    finally:
        try:
            with lock:
                deque(undo, maxlen=0)
        finally:  # has nothing left to do, unless Ctrl-C came right before it
            deque(undo, maxlen=0)
