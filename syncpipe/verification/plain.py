"""The layers of a pipe one after another by hand, without anything of the pipe's.

But for three things, which are what a pipe means: values move to the device of each layer; a layer
that draws random numbers is seeded as in a pipe, by (draw of the call, layer, micro-batch), so that
it draws the same; deferred batch normalisations leave their statistics to the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from syncpipe.layers.batchnorm import MiniBatchStatistics, collect
from syncpipe.layers.unpack import Unpacked
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.randomness.generators import Generators
from syncpipe.runtime.randomness.quiet_layers import never_draws
from syncpipe.runtime.randomness.random import run_seeded
from syncpipe.runtime.randomness.turns import draw_seed
from syncpipe.runtime.streams import same_memory
from syncpipe.skip.store import Store, use_store
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.stage import Stage
from syncpipe.tree import map_tensors

__all__ = ["Layer", "PlainRun", "layers_of", "placed"]


@dataclass(frozen=True)
class Layer:
    """A layer of a pipe.

    Attributes:
        index: its place in the whole model.
        name: its name there.
        module: itself.
        stage: where it runs.
        device: the device of that stage.
    """

    index: int
    name: str
    module: nn.Module
    stage: Stage
    device: torch.device

    def call(self) -> Callable[[Any], Any]:
        """How it is called. Tied weights of another device come here, and gradients go back."""
        tensors = chain(self.module.named_parameters(), self.module.named_buffers())
        away = {name: t for name, t in tensors if not same_memory(t.device, self.device)}
        unpack = self.stage.partition.unpack
        call: Callable[..., Any] = Unpacked(self.module) if unpack else self.module
        if not away:
            return call
        here = placed({f"module.{name}": tensor for name, tensor in away.items()}, self.device)
        holder = _Holder(self.module, call)
        return lambda value: torch.func.functional_call(holder, here, (value,))

    def __str__(self) -> str:
        """As in messages of the pipe."""
        return f"layer {self.index} ({self.name!r}: {type(self.module).__name__})"


class _Holder(nn.Module):
    """Calls a module in some way, so that tensors of it can be replaced meanwhile."""

    def __init__(self, module: nn.Module, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self.way = [call]  # not as one more module

    def forward(self, value: Any) -> Any:
        return self.way[0](value)


def layers_of(pipeline: Pipeline) -> list[Layer]:
    """The layers of a pipeline in order."""
    found = []
    for stage in pipeline.stages[: pipeline.n]:
        device = pipeline.workers[pipeline.worker_of[stage.j]].device
        for k, module in enumerate(stage.partition._modules.values()):
            assert module is not None
            found.append(Layer(stage.first + k, stage.names[k], module, stage, device))
    return found


def placed(tree: Any, device: torch.device) -> Any:
    """A tree on a device; gradients find back."""
    return map_tensors(
        lambda ts: [t if same_memory(t.device, device) else t.to(device) for t in ts], tree
    )


class PlainRun:
    """One run of the plain model. It begins with a draw from the caller's generator, as a call.

    Args:
        pipeline: whose layers they are.

    Attributes:
        drew: the layers that drew random numbers; the loss function comes after the last one.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._layers = layers_of(pipeline)
        self._stages = pipeline.stages[: pipeline.n]
        self._seed = draw_seed()
        self._statistics = {s.j: MiniBatchStatistics() for s in self._stages if s.defers}
        self.drew: set[int] = set()

    def forward(self, i: int, value: Any) -> Any:
        """The output for a micro-batch."""
        store: Store = {}
        for stage in self._stages:
            layers = [layer for layer in self._layers if layer.stage is stage]
            value = self.enter(layers[0], value, store)
            value = self._stage(stage, partial(self._through, layers, i, store), value)
        return value

    def enter(self, layer: Layer, value: Any, store: Store) -> Any:
        """The input of the first layer of a stage, and the skips that it pops, on its device."""
        for key in layer.stage.pops:
            store[key] = placed(store[key], layer.device)
        return placed(value, layer.device)

    def layer(self, layer: Layer, i: int, value: Any, store: Store) -> Any:
        """A layer's output for a micro-batch."""
        try:
            with use_store(store), self._collecting(layer.stage):
                call = layer.call()
                if never_draws(layer.module):
                    return call(value)
                return self._seeded(Generators(layer.device), layer.index, i, call, value)
        except BaseException as error:
            annotate(error, f"in {layer}, micro-batch {i}, run plainly")
            raise

    def loss(self, i: int, function: Callable[[Any], Any], given: Any) -> Any:
        """What a loss function gives for a micro-batch, as one more layer."""
        last = self._layers[-1]
        return self._seeded(Generators(last.device), last.index + 1, i, function, given)

    def commit(self) -> None:
        """All micro-batches went forward: running statistics move."""
        for statistics in self._statistics.values():
            statistics.commit()

    def _through(self, layers: list[Layer], i: int, store: Store, value: Any) -> Any:
        for layer in layers:
            value = self.layer(layer, i, value, store)
        return value

    def _stage(self, stage: Stage, run: Callable[[Any], Any], value: Any) -> Any:
        if not stage.hooked:
            return run(value)
        own = stage.partition.__dict__
        own["forward"] = run  # so that its hooks run around it
        try:
            return stage.partition(value)
        finally:
            own.pop("forward", None)

    def _collecting(self, stage: Stage) -> AbstractContextManager[Any]:
        return collect(self._statistics[stage.j]) if stage.defers else nullcontext()

    def _seeded(
        self, generators: Generators, index: int, i: int, run: Callable[[Any], Any], value: Any
    ) -> Any:
        cell = (self._seed, index, i)
        result, seen = run_seeded(generators, generators.all, cell, run, value, observe=True)
        if seen.draws:
            self.drew.add(index)
        return result
