"""Actions whose backward runs in two halves (``runtime.weight_gradients``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncpipe.runtime.weight_gradients import WeightGradients


def split(task: Any, r: int, inner: Any) -> Any:
    """Defers weight gradients of the cells whose backward runs in two halves."""
    call, stage = task.call, task.call.pipeline.stages[r].j
    own = {i for i, j in task.splits if j == stage}
    if not own:
        return inner
    streams, deferred = call.streams_of[r], task.deferred[r]
    # The gradients of these leaves are sent after the input half.
    ordinary = {id(leaf): False for leaf in call.extra_leaves[r]}

    def outer(i: int, cell: Any, grads: list[Any]) -> Any:
        if i in own:
            deferred[i] = WeightGradients(streams, ordinary)
            cell.run_backward = deferred[i].go_back
        return inner(i, cell, grads)

    return outer


def accumulate(task: Any, r: int, i: int, messages: list[Any]) -> Sequence[Any]:
    """The action that runs the weight half."""
    gradients = task.deferred[r].pop(i, None)
    if gradients is not None:
        gradients.accumulate()
        if task.leaves.awaiting_grad[r]:
            task.leaves.own_first_grads(r)
    return []
