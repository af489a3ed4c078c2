"""What may be in the actions of a task beside the plain path, innermost first.

A function that has nothing to do on a stage in this call returns ``inner``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from syncpipe.runtime.engine import Run
from syncpipe.stages.drawing import seeded
from syncpipe.stages.inplace import in_place
from syncpipe.stages.recompute import recompute, recomputed
from syncpipe.training.shared import reduce, tied
from syncpipe.training.weight_gradients import accumulate, split


def inspected(task: Any, r: int, inner: Any) -> Any:
    """Lets the leaves inspect the graph of each cell after its forward, if they do."""
    return inner if task.leaves is None else task.leaves.around_forward(r, inner)


#: Around the forward of a cell. ``in_place`` needs the outputs of the one that ``recomputed`` runs;
#: ``inspected`` looks for leaves in graphs, which copies for other stages do not have.
FORWARD: list[Callable[[Any, int, Any], Any]] = [recomputed, inspected, in_place]
#: Around the backward of a cell. ``seeded`` holds locks: all else runs under them.
BACKWARD: list[Callable[[Any, int, Any], Any]] = [tied, split, seeded]
#: Further kinds of action.
ACTIONS: dict[str, Callable[[Any, int], Run]] = {
    "recompute": lambda task, r: partial(recompute, task, r),
    "backward_weight": lambda task, r: partial(accumulate, task, r),
    "reduce": lambda task, r: partial(reduce, task, r),
}
