"""Re-materialization where the pipeline itself runs backward: compute the cell again, and go on.

``train_batch`` cuts the graph at every border of a stage, so nothing has to be put back into an
old graph (compare ``checkpoint.CheckpointFrame``): the first one is dropped as soon as the outputs
are there, the second one is what goes back.

    forward     x --> [cell] --> y        y goes on, the graph is dropped, x is kept
    recompute   x --> [cell] --> y'       this graph goes back

Both runs record a graph. A forward without one may take other kernels, with other last bits; and
it would save no memory at the peak, for the recomputation needs that of a whole cell as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncpipe.runtime.errors import annotate
from syncpipe.runtime.rematerialization.checkpoint import CHECKPOINTING, RECOMPUTING
from syncpipe.runtime.rematerialization.guards import UnmodifiedTensors
from syncpipe.runtime.rematerialization.module_state import CellState
from syncpipe.tree import clones, map_tensors

__all__ = ["Recomputation", "without_storing"]


class Recomputation:
    """A cell that ran without keeping its graph, and how to run it again.

    Args:
        cell: computes the cell from a tree of inputs.
        inputs: that tree, detached; kept here until the cell was computed again.
        mutates_inputs: whether the cell may write into its inputs.
        state: what else the result depends on, as it was before the forward.
        where: the cell, which as a string is its name in messages.
    """

    __slots__ = ("_cell", "_mutates_inputs", "_state", "_unmodified", "_where", "inputs")

    def __init__(
        self,
        cell: Callable[[Any], Any],
        inputs: Any,
        *,
        mutates_inputs: bool,
        state: CellState,
        where: object,
    ) -> None:
        self._cell = cell
        self.inputs = inputs
        self._unmodified = UnmodifiedTensors(inputs, where)
        self._mutates_inputs = mutates_inputs
        self._state = state
        self._where = where

    def __call__(self, inputs: Any) -> Any:
        """The cell's outputs once more; ``inputs`` are those of the forward, with a new graph."""
        results: list[Any] = []

        def run() -> None:
            given = inputs
            if self._mutates_inputs:
                given = map_tensors(clones, inputs)
            results.append(self._cell(given))

        token = RECOMPUTING.set(True)
        try:
            self._unmodified.check()
            self._state.restored(run, once=True)
        except BaseException as error:
            annotate(error, f"while recomputing {self._where}")
            raise
        finally:
            RECOMPUTING.reset(token)
        return results.pop()


def without_storing(cell: Callable[[Any], Any], inputs: Any) -> Any:
    """Runs a cell that will run again, and is told so."""
    token = CHECKPOINTING.set(True)
    try:
        return cell(inputs)
    finally:
        CHECKPOINTING.reset(token)
