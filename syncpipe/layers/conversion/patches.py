"""Attributes that are replaced for a while, in classes and modules that all threads use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from syncpipe.runtime.interrupts import forkable_lock, run_and_undo

_T = TypeVar("_T")
_INHERITED = object()
_patching = forkable_lock()


class Patches:
    """Attributes of classes, modules and objects that are replaced while :meth:`around` runs.

    All threads see them, so only one thread at a time replaces any: what another one had put there
    would be restored as if it had been there before. ``unittest.mock.patch`` knows of no other
    thread, and leaves attributes replaced if Ctrl-C comes at the end of its block.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replaces an attribute, which :meth:`around` restores; TypeError if it cannot be set."""
        self._before.append((owner, name, vars(owner).get(name, _INHERITED)))
        try:
            setattr(owner, name, value)
        except TypeError:
            self._before.pop()
            raise

    def around(self, run: Callable[[], _T]) -> _T:
        """Calls ``run``, which may call :meth:`put`; then restores all, the last one first."""
        with _patching:
            return run_and_undo(run, self._undo)

    def _undo(self) -> None:
        for owner, name, before in reversed(self._before):
            if before is not _INHERITED:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)
