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

from collections import Counter
from collections.abc import Callable
from typing import Any

from syncpipe.data import clones, map_tensors, tensors_in
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import nodes_of
from syncpipe.runtime.rematerialization.checkpoint import CHECKPOINTING, RECOMPUTING
from syncpipe.runtime.rematerialization.guards import UnmodifiedTensors
from syncpipe.runtime.rematerialization.module_state import CellState

__all__ = ["Recomputation", "stored_by", "without_storing"]


class Recomputation:
    """A cell that ran without keeping its graph, and how to run it again.

    Args:
        cell: computes the cell from a tree of inputs.
        inputs: that tree, detached; kept here until the cell was computed again.
        mutates_inputs: whether the cell may write into its inputs.
        state: what else the result depends on, as it was before the forward.
        where: the cell, which as a string is its name in messages.
        stored: what tells which tensors the forward stored; None: nobody will compare.
    """

    __slots__ = ("_cell", "_mutates_inputs", "_state", "_stored", "_unmodified", "_where", "inputs")

    def __init__(
        self,
        cell: Callable[[Any], Any],
        inputs: Any,
        *,
        mutates_inputs: bool,
        state: CellState,
        where: object,
        stored: Counter[Any] | None = None,
    ) -> None:
        self._cell = cell
        self._stored = stored
        self.inputs = inputs
        self._unmodified = UnmodifiedTensors(inputs, where)
        self._mutates_inputs = mutates_inputs
        self._state = state
        self._where = where

    def __call__(self, inputs: Any, moment: object, keep: bool) -> Any:
        """The cell's outputs once more.

        Args:
            inputs: those of the forward, with a new graph.
            moment: the same as long as the user's code cannot have changed any module.
            keep: let it be done again.
        """
        results: list[Any] = []
        begins = [tensor.grad_fn for tensor in tensors_in(inputs)]

        def run() -> None:
            given = inputs
            if self._mutates_inputs:
                given = map_tensors(clones, inputs)
            results.append(self._cell(given))

        token = RECOMPUTING.set(True)
        try:
            self._unmodified.check()
            self._state.restored(run, moment, keep=keep)
        except BaseException as error:
            annotate(error, f"while recomputing {self._where}")
            raise
        finally:
            RECOMPUTING.reset(token)
        outputs = results.pop()
        if self._stored is not None:
            shapes = any(len(key) > 1 for key in self._stored)
            self._compare(stored_by(outputs, begins, shapes=shapes))
        return outputs

    def _compare(self, now: Counter[Any]) -> None:
        then = self._stored
        assert then is not None
        if now == then:
            return
        names = [", ".join(map(str, (a - b).elements())) for a, b in ((now, then), (then, now))]
        second, first = (name or "nothing more" for name in names)
        raise RuntimeError(
            f"{self._where} stored other tensors for backward when it was recomputed: those of "
            f"{second} instead of {first}. Its layers must do the same both times; if one depends "
            "on a global or counts its calls, let it ask syncpipe.is_recomputing(); if the forward "
            "ran in a context that backward does not (sdpa_kernel, parametrize.cached), call "
            "backward in it, too; or use checkpoint='never'."
        )


def stored_by(outputs: Any, begins: list[Any], *, shapes: bool) -> Counter[Any]:
    """The operations in the graph of a cell, which say what was stored.

    Args:
        outputs: of the cell.
        begins: the nodes of its inputs, before it ran.
        shapes: with shapes and dtypes of what they gave, which takes longer.
    """
    found: Counter[Any] = Counter()
    for node in nodes_of([t.grad_fn for t in tensors_in(outputs)], begins):
        kind = type(node).__name__
        if kind in _OURS:
            continue
        metadata = node._input_metadata if shapes else ()
        found[kind, *[(tuple(each.shape), each.dtype) for each in metadata]] += 1
    return found


#: How inputs come in: a cell that writes into them is given copies. And casts, which store nothing:
#: how many there are hangs on autocast's cache, which any thread clears that leaves its autocast.
_OURS = {"_CrossBackward", "CloneBackward0", "_ExactBackward", "AccumulateGrad", "ToCopyBackward0"}


def without_storing(cell: Callable[[Any], Any], inputs: Any) -> Any:
    """Runs a cell that will run again, and is told so."""
    token = CHECKPOINTING.set(True)
    try:
        return cell(inputs)
    finally:
        CHECKPOINTING.reset(token)
