"""Which layer is it? A second pass, only when something differs, layer by layer.

observe    each layer plainly, on the mini-batch and on its micro-batches, from the same inputs
Prints     what each layer took and gave in a run, in a few numbers, to be held against another
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncpipe.compare import Comparison, compare
from syncpipe.runtime.rematerialization.checkpoint import is_recomputing
from syncpipe.skip.store import Store
from syncpipe.state import SIMPLE, Change, State
from syncpipe.tree import clones, flatten, leaf_names, map_tensors, tensors_in, unflatten
from syncpipe.verification.plain import Layer, PlainRun
from syncpipe.verification.runs import Runs, named

__all__ = ["Observation", "Prints", "observe"]

_CLOSE = 1e-5


@dataclass(frozen=True)
class Observation:
    """What is seen of a layer that runs plainly.

    Attributes:
        layer: the layer.
        comparison: of its outputs for the micro-batches with that for the mini-batch.
        repeats: it gives the same twice for the same input, from the same state.
        draws: it draws random numbers as PyTorch's layers do, so that these have to differ.
        changes: what its forwards changed in it.
        writes: it modifies its input in place.
        norms: batch normalisations in it that go by the batch at hand.
    """

    layer: Layer
    comparison: Comparison
    repeats: bool
    draws: bool
    changes: list[Change]
    writes: bool
    norms: list[str]


def observe(runs: Runs) -> list[Observation]:
    """Runs each layer on the mini-batch, and on the micro-batches that it consists of."""
    found: list[Observation] = runs.alone(partial(_observed, runs))
    return found


@torch.no_grad()
def _observed(runs: Runs) -> list[Observation]:
    run, other = PlainRun(runs.pipeline), PlainRun(runs.pipeline)
    pieces, whole = runs.micro_batches(runs.pipe.chunks), runs.micro_batches(1)[0]
    stores: list[Store] = [{} for _ in pieces]
    store: Store = {}
    found = []
    for k, layer in enumerate(runs.layers):
        if k == 0 or layer.stage is not runs.layers[k - 1].stage:
            whole = other.enter(layer, whole, store)
            pieces = [run.enter(layer, *each) for each in zip(pieces, stores, strict=True)]
        state = State({"": layer.module}, leave=[runs.pipe])
        once = partial(_copied_run, other, layer, whole, store)
        (first, _), (whole, store) = (state.restored(once, [layer.device]) for _ in range(2))
        entering = tensors_in(pieces[0])
        versions = [tensor._version for tensor in entering]
        pieces = [run.layer(layer, i, piece, stores[i]) for i, piece in enumerate(pieces)]
        joined, comparison = _joined(whole, pieces)
        seen = Observation(
            layer,
            comparison,
            repeats=compare(named("", first), named("", whole)).status != "different",
            draws=layer.index in run.drew,
            changes=[change for change in state.changes() if not change.name.endswith("_hooks")],
            writes=[tensor._version for tensor in entering] != versions,
            norms=_norms(layer.module),
        )
        found.append(seen)
        if seen.draws or comparison.status == "different":  # the next one is seen by itself
            whole = joined
    return found


@torch.no_grad()
def _copied_run(run: PlainRun, layer: Layer, value: Any, store: Store) -> tuple[Any, Store]:
    """The output of a layer, and the skips after it; for copies, into which it may write."""
    value, skips = map_tensors(clones, (value, list(store.values())))
    store = dict(zip(store, skips, strict=True))
    return run.layer(layer, 0, value, store), store


def _joined(whole: Any, pieces: list[Any]) -> tuple[Any, Comparison]:
    """Outputs of micro-batches as one of the mini-batch, and how they compare."""
    leaves, structure = flatten(whole)
    rows = [flatten(piece)[0] for piece in pieces]
    if any(len(row) != len(leaves) for row in rows):
        return whole, Comparison("different", words="trees of other structures")
    expected, actual = {}, {}
    for k, name in enumerate(leaf_names("output", whole)):
        parts = [row[k] for row in rows]
        if all(isinstance(part, Tensor) and part.dim() for part in [*parts, leaves[k]]) and sum(
            map(len, parts)
        ) == len(leaves[k]):
            expected[name] = leaves[k].to("cpu", copy=True)
            leaves[k] = torch.cat(parts)
            actual[name] = leaves[k].to("cpu")
        else:
            for i, part in enumerate(parts):
                expected.update(named(f"{name} for micro-batch {i}", leaves[k]))
                actual.update(named(f"{name} for micro-batch {i}", part))
    return unflatten(leaves, structure), compare(actual, expected)


def _norms(module: nn.Module) -> list[str]:
    return [
        f"{name!r}: {type(part).__name__}" if name else type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    ]


# --- prints --------------------------------------------------------------------------------------

_Print = tuple[Any, ...]


class Prints:
    """A few numbers of what each layer took and gave."""

    def __init__(self) -> None:
        self._given: dict[int, list[_Print]] = {}
        self._forwards: dict[int, list[tuple[_Print, _Print]]] = {}
        self._recomputations: dict[int, list[tuple[_Print, _Print]]] = {}

    def watch(self, layers: list[Layer]) -> None:
        """Hooks itself on, where a module is only one layer, and run by one thread at a time."""
        for layer in layers:
            key = layer.index
            self._given[key], self._forwards[key], self._recomputations[key] = [], [], []
            if [other.module for other in layers].count(layer.module) == 1:
                layer.module.register_forward_pre_hook(partial(self._before, key))
                layer.module.register_forward_hook(partial(self._after, key))

    def _before(self, key: int, module: nn.Module, args: Any) -> None:
        self._given[key].append(_print(args))

    def _after(self, key: int, module: nn.Module, args: Any, output: Any) -> None:
        pairs = self._recomputations if is_recomputing() else self._forwards
        pairs[key].append((self._given[key].pop(), _print(output)))

    def first_other(self, plain: Prints, layers: list[Layer]) -> tuple[Layer, bool] | None:
        """The first layer that gave something else than in a plain run, or when it was recomputed.

        Returns:
            The layer, and whether it was when it was recomputed.
        """
        for layer in layers:
            outputs = [
                [out for _, out in prints._forwards[layer.index]] for prints in (self, plain)
            ]
            if len(outputs[0]) != len(outputs[1]) or not all(map(_close, *outputs)):
                return layer, False
        for layer in layers:
            forwards = self._forwards[layer.index]
            for given, output in self._recomputations[layer.index]:
                before = [out for then, out in forwards if _close(then, given)]
                if before and not any(_close(out, output) for out in before):
                    return layer, True
        return None


@torch.no_grad()
def _print(tree: Any) -> _Print:
    return tuple([_numbers(leaf) for leaf in flatten(tree)[0]])


def _numbers(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, SIMPLE) else type(leaf)
    values = next(iter(named("", leaf).values())).reshape(-1)
    values = (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).double()
    mixed = (values * torch.arange(len(values), dtype=torch.float64).cos()).sum()
    return (str(leaf.dtype), tuple(leaf.shape), float(values.abs().sum()), float(mixed))


def _close(a: _Print, b: _Print) -> bool:
    return len(a) == len(b) and all(map(_close_numbers, a, b))


def _close_numbers(a: Any, b: Any) -> bool:
    if not isinstance(a, tuple) or not isinstance(b, tuple) or a[:2] != b[:2]:
        return bool(a == b)
    far = max(abs(a[2] - b[2]), abs(a[3] - b[3]))
    return bool(far <= _CLOSE * abs(b[2]) or (a[2] != a[2] and b[2] != b[2]))
