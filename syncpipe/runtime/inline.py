"""Pipes on the calling thread, for a caller who asks for it; drivers out of compilers' sight."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, cast

import torch

__all__ = ["INLINE", "inline", "untraced"]

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


def untraced(driver: Callable[..., Any]) -> Callable[..., Any]:
    """A driver, out of sight of torch.compile: that is for layers, not for what is between."""
    if "torch._dynamo" not in sys.modules:
        return driver
    disable: Any = torch.compiler.disable
    return cast("Callable[..., Any]", disable(driver))
