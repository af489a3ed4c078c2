"""Putting things back, whenever Ctrl-C comes.

Python looks for Ctrl-C between any two bytecodes of the main thread, also on the first line of a
``finally``, and then the rest of it does not run. What does not help:

* a context manager written in Python, ``@contextmanager`` and ``ExitStack`` included: Ctrl-C comes
  after it was entered and before its ``with`` knows, or on the first line of its ``__exit__``;
* blocking the signal: only the main thread may, layers run in others as well, and a layer that
  hangs could not be interrupted any more.

What helps: what takes everything back, however often it is called, is called once more if Ctrl-C
came in the middle of it. A second Ctrl-C within a microsecond may still get through. Locks
are held by ``with lock:`` itself, which is C, and has no bytecodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["swapped", "undone"]

_T = TypeVar("_T")


def undone(run: Callable[[], _T], undo: Callable[[], Any] | Iterator[Any]) -> _T:
    """Calls a function, and then takes back what it did, or began to do.

    Args:
        run: the function.
        undo: takes everything back, however often it is called; or an iterator that takes one
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


def swapped(swaps: Iterable[tuple[Any, str, Any]], run: Callable[[], _T]) -> _T:
    """Calls a function while other values are in some places, which all have one before.

    Args:
        swaps: a dict and a key, or a module or tensor and the name of an attribute, and the value.
        run: the function.
    """
    swaps = list(swaps)
    before = [
        (owner, name, getattr(owner, name) if _by_attribute(owner) else owner[name])
        for owner, name, _ in swaps
    ]

    def put_and_run() -> _T:
        _put(swaps)
        return run()

    return undone(put_and_run, lambda: _put(before))


def _put(swaps: Iterable[tuple[Any, str, Any]]) -> None:
    for owner, name, value in swaps:
        if _by_attribute(owner):
            setattr(owner, name, value)
        else:
            owner[name] = value


def _by_attribute(owner: Any) -> bool:
    return isinstance(owner, nn.Module | Tensor)
