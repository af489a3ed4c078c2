"""Cells that run without keeping their graph, and are computed again before they go back.

The graph is cut at every boundary of a stage, so nothing has to be put back into an old graph: the
first one is dropped as soon as the outputs are there, the second one is what goes back.

    forward     x --> [cell] --> y        y goes on, the graph is dropped, x is kept
    recompute   x --> [cell] --> y'       this graph goes back

Both runs record a graph. A forward without one may take other kernels, with other last bits; and
it would save no memory at the peak, for the recomputation needs that of a whole cell as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from syncpipe.data import attributes_of, clones, described, map_tensors, objects_in, tensors_in
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import nodes_of
from syncpipe.runtime.module_state import CellState, modified, version_of

__all__ = [
    "Recomputation",
    "UnchangedObjects",
    "is_checkpointing",
    "is_recomputing",
    "stored_by",
    "without_storing",
]

_CHECKPOINTING: ContextVar[bool] = ContextVar("syncpipe_checkpointing", default=False)
_RECOMPUTING: ContextVar[bool] = ContextVar("syncpipe_recomputing", default=False)


def is_checkpointing() -> bool:
    """Return whether the calling layer runs in a forward whose activations are dropped.

    It will run once more, in backward, for the same micro-batch.
    """
    return _CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Return whether the calling layer runs for the second time, in backward.

    A layer with a side effect (a counter, a log) asks this to have it only once. Buffers need no
    such care: a recomputation neither sees nor leaves a change in them.
    """
    return _RECOMPUTING.get()


def _while_set(flag: ContextVar[bool], run: Callable[..., Any], *args: Any) -> Any:
    token = flag.set(True)
    try:
        return run(*args)
    finally:
        flag.reset(token)


def without_storing(cell: Callable[[Any], Any], inputs: Any) -> Any:
    """Runs a cell that will run again, and is told so."""
    return _while_set(_CHECKPOINTING, cell, inputs)


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

    __slots__ = ("_cell", "_mutates_inputs", "_state", "_stored", "_versions", "_where", "inputs")

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
        self._versions = list(map(version_of, tensors_in(inputs)))
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
        begins: list[Any] = []
        if self._stored is not None:
            begins = [tensor.grad_fn for tensor in tensors_in(inputs)]

        def run() -> None:
            given = map_tensors(clones, inputs) if self._mutates_inputs else inputs
            results.append(self._cell(given))

        try:
            self._check_inputs()
            _while_set(_RECOMPUTING, lambda: self._state.restored(run, moment, keep=keep))
        except BaseException as error:
            annotate(error, f"while recomputing {self._where}")
            raise
        outputs = results.pop()
        if self._stored is not None:
            shapes = any(len(key) > 1 for key in self._stored)
            self._compare(self._stored, stored_by(outputs, begins, shapes=shapes))
        return outputs

    def _check_inputs(self) -> None:
        for tensor, then in zip(tensors_in(self.inputs), self._versions, strict=True):
            if (now := version_of(tensor)) != then:
                kind = "a parameter" if isinstance(tensor, nn.Parameter) else "an input"
                raise modified(f"{kind} ({described(tensor)})", self._where, then, now)

    def _compare(self, then: Counter[Any], now: Counter[Any]) -> None:
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


class UnchangedObjects:
    """Guards objects in the inputs of a cell during its forward: they cannot be copied.

    Args:
        inputs: a tree.
    """

    def __init__(self, inputs: Any) -> None:
        self._objects = [(thing, _attributes(thing)) for thing in objects_in(inputs)]

    def check(self, where: object) -> None:
        """Raises a ``RuntimeError`` if the forward set an attribute, or modified one's tensor."""
        for thing, then in self._objects:
            now = _attributes(thing)
            for name in then.keys() | now.keys():
                if then.get(name, ())[1:] != now.get(name, ())[1:]:
                    raise RuntimeError(
                        f"{where} changed the attribute {name!r} of the {type(thing).__name__} "
                        "that it was given, so that it cannot be recomputed: let the layer return "
                        "a new object, pass tensors in tuples or dicts (or in a class registered "
                        "with torch.utils._pytree), or use checkpoint='never'"
                    )


def _attributes(thing: Any) -> dict[str, tuple[Any, ...]]:
    """The attributes of an object (which keeps them alive), and what tells whether they changed."""
    return {
        name: (value, id(value), version_of(value) if isinstance(value, Tensor) else 0)
        for name, value in attributes_of(thing).items()
    }
