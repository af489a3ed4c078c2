"""Pipes on the calling thread, for a caller who asks for it; drivers out of compilers' sight."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from syncpipe.runtime.thread_state import settled

__all__ = ["INLINE", "driven", "inline"]

INLINE: ContextVar[bool | str] = ContextVar("syncpipe_inline", default=False)


class inline(AbstractContextManager[None]):
    """A context in which every pipe runs on the calling thread, without any hand-off.

    For a debugger, and for whatever looks at one thread only. The results are the same::

        with syncpipe.inline():
            y = pipe(x)

    Args:
        graph: ``pipe(x)`` leaves the graph of its layers behind, for whoever uses tensors that
            forward hooks kept, and so on: its stages run one after another with ordinary copies
            between devices, and what is computed again is so by ``torch.utils.checkpoint``. Outputs
            are the same, and gradients but for the order in which those of one parameter are added.
    """

    def __init__(self, *, graph: bool = False) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._token = INLINE.set("graph" if self._graph else True)

    def __exit__(self, *exc_info: object) -> None:
        INLINE.reset(self._token)


def driven(driver: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a driver out of sight of torch.compile: that is for layers, not for what is between.

    Settings of the calling thread are as they were when it ends, Ctrl-C or not.
    """
    run = partial(driver, *args, **options)
    if "torch._dynamo" not in sys.modules:
        return settled(run)
    disable: Any = torch.compiler.disable
    return disable(settled)(run)
