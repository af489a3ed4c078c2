"""What a layer can ask: whether it runs to be computed again, or for the second time."""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["CHECKPOINTING", "RECOMPUTING", "is_checkpointing", "is_recomputing"]

CHECKPOINTING: ContextVar[bool] = ContextVar("syncpipe_checkpointing", default=False)
RECOMPUTING: ContextVar[bool] = ContextVar("syncpipe_recomputing", default=False)


def is_checkpointing() -> bool:
    """Whether the calling layer runs in a forward whose activations are dropped.

    It will run once more, in backward, for the same micro-batch.
    """
    return CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Whether the calling layer runs for the second time, in backward.

    A layer with a side effect (a counter, a log) asks this to have it only once. Buffers need no
    such care: a recomputation neither sees nor leaves a change in them.
    """
    return RECOMPUTING.get()
