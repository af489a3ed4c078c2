"""Pipes that run on the calling thread because the caller asks for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

__all__ = ["INLINE", "inline"]

INLINE: ContextVar[bool] = ContextVar("syncpipe_inline", default=False)


class inline(AbstractContextManager[None]):
    """A context in which every pipe runs on the calling thread, without any hand-off.

    For a debugger, and for whatever looks at one thread only. The results are the same::

        with syncpipe.inline():
            y = pipe(x)
    """

    def __enter__(self) -> None:
        self._token = INLINE.set(True)

    def __exit__(self, *exc_info: object) -> None:
        INLINE.reset(self._token)
