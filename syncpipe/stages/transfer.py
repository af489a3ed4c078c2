"""Values on their way from one worker to another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from syncpipe.data import map_tensors
from syncpipe.runtime.streams import Lane, same_memory

__all__ = ["sent"]


def sent(source: Lane, target: Lane, value: Any) -> tuple[Any, Any]:
    """Sends a tree to another lane.

    Args:
        source: where it is.
        target: where it is needed.
        value: the tree, without a graph.

    Returns:
        The tree on the device of ``target``, and the event that says when it is there.
    """
    if source.streams is None and same_memory(source.device, target.device):
        return value, None
    events: list[Any] = []

    def moved(tensors: list[Tensor]) -> list[Tensor]:
        there, event = source.send(tensors, target)
        events.append(event)
        return there

    value = map_tensors(moved, value)
    return value, events[0] if events else None
