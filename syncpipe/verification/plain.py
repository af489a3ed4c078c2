"""The plain model: the layers one after another without a pipe, and observations of each layer.

It shares three things with a pipe: values move to the device of each layer, a layer that draws
random numbers is seeded by (draw of the call, layer, micro-batch), and deferred batch
normalisations collect the statistics of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from syncpipe.compare import Comparison, compare
from syncpipe.data.batch_classes import batch_kind
from syncpipe.data.batches import gather
from syncpipe.data.trees import by_name, flatten, map_tensors, tensors_in, unflatten
from syncpipe.layers.batchnorm import DeferredBatchNorm, MiniBatchStatistics, collect
from syncpipe.layers.unpack import spread
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.interrupts import Swap, with_swaps
from syncpipe.runtime.random_numbers import Generators, draw_seed, run_seeded
from syncpipe.runtime.streams import same_memory
from syncpipe.skip.store import Store, use_store
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.stage import CELL, Stage
from syncpipe.state import State
from syncpipe.storage import clones

__all__ = ["Layer", "Observation", "PlainRun", "layers_of", "observe", "placed", "without_draws"]

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # expected to change


@dataclass(frozen=True)
class Layer:
    """A layer of a pipe, with its index and name in the whole model, and its stage."""

    index: int
    name: str
    module: nn.Module
    stage: Stage

    def call(self) -> Callable[[Any], Any]:
        """The call of the layer, with tied weights of other devices copied (with gradients)."""
        call = partial(spread, self.module) if self.stage.partition.unpack else self.module
        tensors = chain(self.module.named_parameters(), self.module.named_buffers())
        here = self.stage.device
        away = {f"0.{name}": t for name, t in tensors if not same_memory(t.device, here)}
        if not away:
            return call
        holder = nn.Sequential(self.module)  # for functional_call
        holder.__dict__["forward"] = call
        return lambda value: torch.func.functional_call(holder, placed(away, here), (value,))

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name!r}: {type(self.module).__name__})"


def layers_of(pipeline: Pipeline) -> list[Layer]:
    return [
        Layer(stage.first + k, name, module, stage)
        for stage in pipeline.stages[: pipeline.n]
        for k, (name, module) in enumerate(zip(stage.names, stage.partition, strict=True))
    ]


def placed(tree: Any, device: torch.device) -> Any:
    return map_tensors(
        lambda ts: [t if same_memory(t.device, device) else t.to(device) for t in ts], tree
    )


class PlainRun:
    """One run of the plain model. As a call of a pipe, it draws a seed from the global generator.

    Attributes:
        drew: the indices of layers that drew random numbers; the loss function is one more layer.
        statistics: of batch normalisations for the mini-batch, for the caller to commit.
    """

    def __init__(self, layers: list[Layer]) -> None:
        self._layers, self._seed, self.statistics = layers, draw_seed(), MiniBatchStatistics()
        self.drew: set[int] = set()

    def forward(self, i: int, value: Any) -> Any:
        """The output for a micro-batch. Hooks of partitions run, too."""
        store: Store = {}

        def through(layers: Iterable[Layer], value: Any) -> Any:
            for layer in layers:
                value = self.layer(layer, i, value, store)
            return value

        for stage, layers in groupby(self._layers, lambda layer: layer.stage):
            token = CELL.set((stage.partition, partial(through, layers)))
            try:
                value = stage.partition(placed(value, stage.device))
            finally:
                CELL.reset(token)
        return value

    def layer(self, layer: Layer, i: int, value: Any, store: Store) -> Any:
        stage = layer.stage
        store.update({key: placed(skip, stage.device) for key, skip in store.items()})
        collecting = collect(self.statistics) if stage.defers_batch_norm else nullcontext()
        try:
            with use_store(store), collecting:
                value, call = placed(value, stage.device), layer.call()
                return self.seeded(layer.index, i, call, value)
        except BaseException as error:
            annotate(error, f"in {layer}, micro-batch {i}, run plainly")
            raise

    def seeded(self, index: int, i: int, function: Callable[[Any], Any], value: Any) -> Any:
        """The seeded output of a layer, or of the loss function, for a micro-batch."""
        last = self._layers[-1].index
        generators = Generators(self._layers[min(index, last)].stage.device)
        cell = self._seed, index, i
        result, seen = run_seeded(generators, generators.all, cell, function, value, observe=True)
        if seen.draws:
            self.drew.add(index)
        return result


class Observation(NamedTuple):
    """Observations of a layer that ran without a pipe, on the mini-batch and on micro-batches.

    Attributes:
        comparison: of the outputs for micro-batches with the output for the mini-batch.
        repeats: two runs with the same input and random numbers are equal.
        draws: it draws random numbers, so its outputs for micro-batches differ. The comparison is
            then one without them.
        uncompared: it draws also where its modules are told not to.
        writes: it modifies its input in place.
        changed: by kind, the names of attributes that its forward changed.
    """

    layer: Layer
    comparison: Comparison
    repeats: bool
    draws: bool
    uncompared: bool
    writes: bool
    changed: dict[str, list[str]]

    def reason(self) -> str:
        """The likely reason for the difference."""
        changed = _few([name for names in self.changed.values() for name in names])
        if own := self.changed.get("generator"):
            return (
                f"it draws from a generator of its own ({_few(own)}), which every micro-batch and "
                "every recomputation advances: let it draw from PyTorch's own generator "
                "(torch.rand_like(x) and the like, no generator=)"
            )
        if not self.repeats and changed:
            return (
                f"it keeps state ({changed} changes in forward) that its output depends on: each "
                "micro-batch changes it, and recomputation once more; change it only if not "
                "syncpipe.is_recomputing()"
            )
        if not self.repeats:
            return (
                "it does not give the same twice: it depends on something outside its module "
                "(a global, a file, the time, a thread), or on uninitialised memory"
            )
        if self.writes:
            return (
                "it works in place, on memory that others use as well: let it work on a copy (for "
                "an activation: inplace=False)"
            )
        norms = {
            f"{name}: {type(part).__name__}".removeprefix(": "): part
            for name, part in self.layer.module.named_modules()
            if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        }
        if norms:
            deferred = all(isinstance(part, DeferredBatchNorm) for part in norms.values())
            advice = (
                "its running statistics are those of mini-batches" if deferred
                else "deferred_batch_norm=True keeps running statistics those of mini-batches"
            )  # fmt: skip
            return (
                f"BatchNorm sees micro-batches ({_few(list(norms))}): each is normalised by its "
                f"own mean and variance, which often does no harm; {advice}, LayerNorm and "
                "GroupNorm look at no other samples"
            )
        time_first = [
            f"{name}: {type(part).__name__}".removeprefix(": ")
            for name, part in self.layer.module.named_modules()
            if getattr(part, "batch_first", True) is False
        ]
        if time_first:
            return (
                f"it takes time in dimension 0 ({_few(time_first)}), which a pipe cuts: "
                "batch_first=True"
            )
        return (
            "its output for a sample depends on the other samples of the mini-batch: a mean, a "
            "maximum or a softmax over dimension 0, attention between samples, a shape or a number "
            "that it takes from the batch"
        )


@torch.no_grad()
def observe(
    layers: list[Layer], whole: Any, pieces: list[Any], leave: Any, seen: list[Observation]
) -> Exception | None:
    """Run each layer on the mini-batch and on its micro-batches, and append to ``seen``.

    A layer after one that draws or differs gets the joined micro-batches as its mini-batch, so
    each is observed by itself. ``leave`` is excluded from the state of layers. Returns the
    exception of a layer on a micro-batch, if any.
    """
    run = PlainRun(layers)
    # Values made of graphs can be joined only in the outputs.
    ragged = any(map(batch_kind, flatten(whole, batches=True)[0]))
    store: Store = {}
    stores: list[Store] = [{} for _ in pieces]
    for layer in layers:
        state = State({"": layer.module}, leave=[leave])
        twice = partial(_run_twice, run, layer, whole, store)
        quietly = partial(_without_draws, layers, layer, whole, store, pieces, stores)
        (repeated, _), (whole, store) = state.restoring(twice, [layer.stage.device])
        quiet = None
        if layer.index in run.drew and not ragged:
            quiet = state.restoring(quietly, [layer.stage.device])
        pieces = [placed(piece, layer.stage.device) for piece in pieces]
        entering = tensors_in(pieces[0])
        versions = [tensor._version for tensor in entering]
        try:
            pieces = [run.layer(layer, i, piece, stores[i]) for i, piece in enumerate(pieces)]
        except Exception as error:
            return error
        apart = ragged and (layer is not layers[-1] or any(each.draws for each in seen))
        try:
            common = getattr(layer.module, "common_outputs", ())
            joined = whole if apart else _with_sizes(gather(pieces, common), pieces, whole)
        except ValueError:  # for example a mean over samples
            joined = whole
        comparison = quiet or compare(by_name("output", joined), by_name("output", whole))
        changed: dict[str, list[str]] = {}
        for kind, name in state.changes():
            if not name.endswith((*_RUNNING, "_hooks")):
                changed.setdefault(kind, []).append(name)
        repeats = compare(by_name("", repeated), by_name("", whole)).same
        writes = [tensor._version for tensor in entering] != versions
        draws = layer.index in run.drew
        uncompared = draws and quiet is None
        seen.append(Observation(layer, comparison, repeats, draws, uncompared, writes, changed))
        if draws or not comparison.same:
            whole = joined
    return None


def without_draws(module: nn.Module) -> list[Swap]:
    """The swaps that keep modules from drawing: in evaluation mode.

    Normalisations stay in training, and so do layers of PyTorch and of syncpipe that have modules
    inside, which would run other code.
    """
    own = ("torch.nn.modules.", "syncpipe.")
    return [
        (part, "training", False)
        for part in module.modules()
        if not isinstance(part, _NormBase)
        and (
            isinstance(part, (nn.MultiheadAttention, nn.RNNBase))
            or not any(part.children())
            or not type(part).__module__.startswith(own)
        )
    ]


def _without_draws(
    layers: list[Layer], layer: Layer, whole: Any, store: Store, pieces: Any, stores: list[Store]
) -> Comparison | None:
    """The comparison of a layer's outputs without random numbers; None if it draws anyway."""
    run, found = PlainRun(layers), list[Any]()

    def run_all() -> None:
        for i, (value, skips) in enumerate(zip((whole, *pieces), (store, *stores), strict=True)):
            value, copied = map_tensors(clones, (value, list(skips.values())))
            after = dict(zip(skips, copied, strict=True))
            found.append(run.layer(layer, max(0, i - 1), value, after))

    try:
        with_swaps(without_draws(layer.module), run_all)
    except Exception:  # it does not run with its modules in different modes
        return None
    if layer.index in run.drew:
        return None
    expected, *parts = found
    try:
        joined = gather(parts, getattr(layer.module, "common_outputs", ()))
    except ValueError:  # as in ``observe``
        return Comparison()
    joined = _with_sizes(joined, parts, expected)
    return compare(by_name("output", joined), by_name("output", expected))


def _with_sizes(joined: Any, pieces: list[Any], whole: Any) -> Any:
    """Joined outputs, with integers that add up to those of the mini-batch: numbers of samples."""
    values, structure = flatten(joined, batches=True)
    of_whole, other = flatten(whole, batches=True)
    if structure != other:
        return joined
    columns = zip(*[flatten(piece, batches=True)[0] for piece in pieces], strict=True)
    for k, (column, total) in enumerate(zip(columns, of_whole, strict=True)):
        if type(total) is int and {type(each) for each in column} == {int} and sum(column) == total:
            values[k] = total
    return unflatten(values, structure)


def _run_twice(run: PlainRun, layer: Layer, whole: Any, store: Store) -> list[tuple[Any, Store]]:
    """Run a layer twice on copies (it may write into them); returns outputs and skips of both."""
    found = []
    for _ in range(2):
        value, skips = map_tensors(clones, (whole, list(store.values())))
        after = dict(zip(store, skips, strict=True))
        found.append((run.layer(layer, 0, value, after), after))
    return found


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
