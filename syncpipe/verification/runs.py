"""Runs that are compared: of the plain model, and of the pipe under its drivers and schedules.

All of them start from the same weights, buffers and random state, with copies of the same inputs.
The plain model is the layers one after another by hand, micro-batch by micro-batch, with a loss and
a backward for each. It has nothing of the pipe's but three things, which are what a pipe means:
values move to the device of each layer; a layer that draws random numbers is seeded as in a pipe,
by (draw of the call, layer, micro-batch); deferred batch normalisations leave their statistics to
the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.data import (
    NoChunk,
    clones,
    described,
    flatten,
    gather,
    leaf_names,
    map_tensors,
    unflatten,
)
from syncpipe.layers.batchnorm import MiniBatchStatistics, collect
from syncpipe.layers.conversion.sequential import batch_input, call_arguments
from syncpipe.layers.unpack import Unpacked
from syncpipe.pipe import Pipe
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.inline import INLINE
from syncpipe.runtime.random_numbers import Generators, draw_seed, never_draws, run_seeded
from syncpipe.runtime.streams import moved, same_memory
from syncpipe.skip.store import Store, use_store
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.stage import Stage
from syncpipe.state import State
from syncpipe.training.leaves import leaves_of
from syncpipe.training.loss.known import Loss
from syncpipe.training.loss.objective import Objective
from syncpipe.training.sources import FromMiniBatch, Source
from syncpipe.training.train import objective_of

__all__ = ["Layer", "PlainRun", "Result", "Runs", "named"]


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
        call: Callable[..., Any] = self.module
        if self.stage.partition.unpack:
            call = Unpacked(self.module)
        tensors = chain(self.module.named_parameters(), self.module.named_buffers())
        away = {f"0.{name}": t for name, t in tensors if not same_memory(t.device, self.device)}
        if not away:
            return call
        holder = nn.Sequential(self.module)  # its tensors can be replaced during a call
        holder.__dict__["forward"] = call
        here = placed(away, self.device)
        return lambda value: torch.func.functional_call(holder, here, (value,))

    def __str__(self) -> str:
        """As in messages of the pipe."""
        return f"layer {self.index} ({self.name!r}: {type(self.module).__name__})"


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
        output: the outputs of the plain model, put together.
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
            through = partial(self._through, layers, i, store)
            if not stage.hooked:
                value = through(value)
                continue
            own = stage.partition.__dict__
            own["forward"] = through  # so that its hooks run around it
            try:
                value = stage.partition(value)
            finally:
                own.pop("forward", None)
        return value

    def enter(self, layer: Layer, value: Any, store: Store) -> Any:
        """The input of the first layer of a stage, and the skips that it pops, on its device."""
        for key in layer.stage.pops:
            store[key] = placed(store[key], layer.device)
        return placed(value, layer.device)

    def layer(self, layer: Layer, i: int, value: Any, store: Store) -> Any:
        """A layer's output for a micro-batch."""
        statistics = self._statistics.get(layer.stage.j)
        try:
            with use_store(store), nullcontext() if statistics is None else collect(statistics):
                if never_draws(layer.module):
                    return layer.call()(value)
                return self._seeded(layer.device, layer.index, i, layer.call(), value)
        except BaseException as error:
            annotate(error, f"in {layer}, micro-batch {i}, run plainly")
            raise

    def loss(self, i: int, function: Callable[[Any], Any], given: Any) -> Any:
        """What a loss function gives for a micro-batch, as one more layer."""
        last = self._layers[-1]
        return self._seeded(last.device, last.index + 1, i, function, given)

    def commit(self) -> None:
        """All micro-batches went forward: running statistics move."""
        for statistics in self._statistics.values():
            statistics.commit()

    def _through(self, layers: list[Layer], i: int, store: Store, value: Any) -> Any:
        for layer in layers:
            value = self.layer(layer, i, value, store)
        return value

    def _seeded(
        self, device: torch.device, index: int, i: int, run: Callable[[Any], Any], value: Any
    ) -> Any:
        generators, cell = Generators(device), (self._seed, index, i)
        result, seen = run_seeded(generators, generators.all, cell, run, value, observe=True)
        if seen.draws:
            self.drew.add(index)
        return result


class Result(dict[str, dict[str, Any]]):
    """What a run computed: for each column of the report values by name.

    Attributes:
        output: the outputs of the plain model, put together.
        drew: the layers of the plain model that drew random numbers.
        apart: why the outputs of micro-batches cannot be put together; empty if they can.
    """

    output: Any = None
    drew: frozenset[int] = frozenset()
    apart = ""


class Runs:
    """Runs a pipe, and its layers plainly. Each run leaves everything behind as it was.

    Args:
        pipe: the pipe.
        input: of the mini-batch.
        target: likewise.
        loss: the loss function, and how much micro-batches count.
        options: ``loss_fn`` and what goes with it for ``train_batch``.

    Attributes:
        layers: of the pipe, in order.
        m: the number of micro-batches.
    """

    def __init__(
        self, pipe: Pipe, input: Any, target: Any, loss: Loss, options: dict[str, Any]
    ) -> None:
        self.pipe, self.pipeline = pipe, pipe._ready()
        self._input, self._target = input, target
        self.loss, self._options = loss, options
        self.m = self.source(pipe.chunks).m
        self.layers = layers_of(self.pipeline)
        self._devices = list(dict.fromkeys(layer.device for layer in self.layers))
        self._model = nn.Module()  # tied tensors have their first name in it
        self._model._modules.update({layer.name: layer.module for layer in self.layers})
        if isinstance(loss.function, nn.Module):
            self._model._modules["loss_fn"] = loss.function
        partitions = {f"stage {each.stage.j}": each.stage.partition for each in self.layers}
        self._state = State({**partitions, **self._model._modules}, leave=[pipe])  # type: ignore[dict-item]
        self._others: list[Tensor] = []  # leaves that belong to no layer
        # The last bit depends on how many threads compute it: layers of CPU workers share them.
        self._share = self._threads = torch.get_num_threads()
        if len(self.pipeline.workers) > 1 and not INLINE.get() and self.pipeline.on_cpu:
            self._share = self.pipeline.engine.share()

    def alone(self, run: Callable[[], Any]) -> Any:
        """Calls a function of the plain model, and puts all back."""
        try:
            return self._state.restored(run, self._devices, self._share)
        except BaseException as error:
            annotate(error, "in the plain model, which verify runs beside the pipe")
            raise

    def plain(self, order: Sequence[int]) -> Result:
        """The plain model, whose micro-batches go back in an order."""
        return self.alone(partial(self._plain, order))  # type: ignore[no-any-return]

    def forward(self) -> Result:
        """``pipe(x)``, and the backward of its micro-batches' losses."""
        return self._state.restored(self._forward, self._devices, self._threads)

    def train(self, schedule: Any, outputs: bool) -> Result:
        """``train_batch`` under a schedule."""
        return self._state.restored(partial(self._train, schedule, outputs), self._devices)

    def source(self, chunks: int, input: Any = None) -> Source:
        """Copies of the mini-batch, cut into micro-batches.

        Args:
            chunks: into how many.
            input: instead of that which was given.
        """
        input = _fresh(self._input) if input is None else input
        return FromMiniBatch(batch_input(self.pipe, input), _fresh(self._target), chunks)

    def loss_of(self, output: Any) -> Tensor:
        """The loss of a mini-batch's outputs, all at once."""
        target = self._target_of(self.source(1), 0)
        objective = Objective(Loss(self.loss.function, self.loss.reduction), m=1, total=1)
        return objective.root(0, objective.call((output, target)), 1, output, target).detach()

    # --- what is run -----------------------------------------------------------------------------

    def _plain(self, order: Sequence[int]) -> Result:
        inputs, given = self._leaves_of_input()
        source = self.source(self.pipe.chunks, given)
        run, objective = PlainRun(self.pipeline), self._objective(source)
        outputs, shares, left = [], {}, list(order)
        for i in range(source.m):
            output = run.forward(i, map_tensors(clones, source.pull(i)))
            outputs.append(_detached(output))
            shares[i] = self._root(objective, source, i, output, partial(run.loss, i))
            if not self._others:
                self._find_others(shares[i], inputs)
            while left and left[0] in shares:
                share = shares.pop(left.pop(0))
                if share.requires_grad:
                    torch.autograd.backward(share)
                for leaf in self._leaves():  # two may have one memory for their first gradients
                    leaf.grad = None if leaf.grad is None else leaf.grad.clone()
                del share
        run.commit()
        self._scale(objective, inputs)
        try:
            output, apart = gather(outputs), ""
        except ValueError as error:
            output, apart = {}, str(error)
        result = self._result(output, objective.loss(), inputs)
        result.output, result.drew, result.apart = output, frozenset(run.drew), apart
        return result

    def _forward(self) -> Result:
        inputs, given = self._leaves_of_input()
        args, kwargs = call_arguments(self.pipe, given)
        output = self.pipe(*args, **kwargs)
        kept, source = _detached(output), self.source(self.pipe.chunks)
        objective, sizes = self._objective(source), [source.size(i) for i in range(source.m)]

        def piece(i: int, tensors: list[Tensor]) -> list[Tensor]:
            return [torch.split(t, [n * len(t) // sum(sizes) for n in sizes])[i] for t in tensors]

        threads = torch.get_num_threads()
        torch.set_num_threads(self._share)
        roots = [
            self._root(objective, source, i, map_tensors(partial(piece, i), output), _call)
            for i in range(source.m)
        ]
        torch.set_num_threads(threads)
        torch.autograd.backward([root for root in roots if root.requires_grad])
        self._scale(objective, inputs)
        return self._result(kept, objective.loss(), inputs)

    def _train(self, schedule: Any, outputs: bool) -> Result:
        inputs, given = self._leaves_of_input()
        found = self.pipe.train_batch(
            given,
            _fresh(self._target),
            **{**self._options, "schedule": schedule, "verify": False, "return_outputs": outputs},
        )
        found = found if isinstance(found, tuple) else (found,)
        return self._result(found[1] if outputs else {}, found[0], inputs)

    def _objective(self, source: Source) -> Objective:
        objective = objective_of(self.loss, source)
        objective.known = placed(objective.known, self.layers[-1].device)
        return objective

    def _root(self, objective: Objective, source: Source, i: int, output: Any, run: Any) -> Tensor:
        """What a micro-batch goes back from."""
        given = output, self._target_of(source, i)
        return objective.root(i, run(objective.call, given), source.size(i), *given)

    def _scale(self, objective: Objective, inputs: dict[str, Tensor]) -> None:
        """Makes gradients those of the mini-batch, where its weight is known only in the end."""
        if (factor := objective.factor()) is None:
            return
        for leaf in [*self._leaves(), *inputs.values()]:
            if leaf.grad is not None:
                by = moved(factor, leaf.device) if isinstance(factor, Tensor) else factor
                leaf.grad.mul_(by)

    # --- inputs and results ----------------------------------------------------------------------

    def _leaves_of_input(self) -> tuple[dict[str, Tensor], Any]:
        """Leaves by name, and the input made of them, into which layers may write."""
        inputs: dict[str, Tensor] = {}
        leaves, structure = flatten(_fresh(self._input))
        for k, name in enumerate(leaf_names("input", self._input)):
            leaf = leaves[k]
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                inputs[name] = leaf.requires_grad_()
                leaves[k] = clones([leaf])[0]
        return inputs, unflatten(leaves, structure)

    def _target_of(self, source: Source, i: int) -> Any:
        return placed(source.target(i), self.layers[-1].device)

    def _leaves(self) -> list[Tensor]:
        return [*self._state.leaves, *self._others]

    def _find_others(self, root: Tensor, inputs: dict[str, Tensor]) -> None:
        """Finds what gets gradients besides parameters and inputs."""
        known = set(map(id, [*self._leaves(), *inputs.values()]))
        for leaf in leaves_of([root.grad_fn]):
            if id(leaf) not in known:
                self._state.add_leaf(leaf)
                leaf.grad = None
                self._others.append(leaf)

    def _result(self, output: Any, loss: Tensor, inputs: dict[str, Tensor]) -> Result:
        gradients = {name: p.grad for name, p in self._model.named_parameters()}
        for k, leaf in enumerate(self._others):
            gradients[f"tensor {k} of no layer, {described(leaf)}"] = leaf.grad
        return Result(
            outputs=named("output", output),
            loss=named("loss", loss),
            gradients=_copied(gradients),
            input_gradients=_copied({name: x.grad for name, x in inputs.items()}),
            buffers=_copied(dict(self._model.named_buffers())),
        )


def named(root: str, tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name, tensors detached and copied to the CPU's memory."""
    return _copied(dict(zip(leaf_names(root, tree), flatten(tree)[0], strict=True)))


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dense = value if value.layout is torch.strided else value.to_dense()
        return dense.detach().to("cpu", copy=True)

    return {name: copied(value) for name, value in values.items() if value is not None}


def _call(function: Callable[[Any], Any], given: Any) -> Any:
    return function(given)


def _detached(tree: Any) -> Any:
    return map_tensors(lambda tensors: [t.detach().clone() for t in tensors], tree)


def _fresh(tree: Any) -> Any:
    """A copy in memory that is laid out the same way; without gradients, unless there were."""
    leaves, structure = flatten(tree)
    made: dict[int, Any] = {}
    for k, leaf in enumerate(leaves):
        tensor = leaf.tensor if isinstance(leaf, NoChunk) else leaf
        if not isinstance(tensor, Tensor):
            continue
        if id(tensor) not in made:
            copy = clones([tensor.detach()])[0].requires_grad_(tensor.requires_grad)
            made[id(tensor)] = copy
        leaves[k] = NoChunk(made[id(tensor)]) if tensor is not leaf else made[id(tensor)]
    return unflatten(leaves, structure)
