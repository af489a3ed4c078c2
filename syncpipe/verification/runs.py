"""Runs that are compared: of the plain model, and of the pipe under its drivers and schedules.

All of them start from the same weights, buffers and random state, with copies of the same inputs::

    together   micro-batches one after another, outputs joined, one loss, one backward: as pipe(x)
    apart      a loss and a backward for each micro-batch, in a given order: as train_batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.layers.conversion.sequential import batch_input, call_arguments
from syncpipe.microbatch import NoChunk, gather
from syncpipe.pipe import Pipe
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.inline import INLINE
from syncpipe.runtime.streams import moved
from syncpipe.schedules.schedule import Schedule
from syncpipe.state import State
from syncpipe.training.leaves import leaves_of
from syncpipe.training.loss.known import Loss
from syncpipe.training.loss.objective import Objective
from syncpipe.training.sources import FromMiniBatch, Source
from syncpipe.training.train import objective_of
from syncpipe.tree import clones, described, flatten, leaf_names, map_tensors, unflatten
from syncpipe.verification.plain import Layer, PlainRun, layers_of, placed

__all__ = ["Result", "Runs", "named", "orders_of"]

#: Is shown the layers before they run, and may hook itself on.
Watch = Callable[[list[Layer]], None] | None
_BACK = ("backward", "backward_input")


@dataclass
class Result:
    """What a run computed: values by name, tensors in the CPU's memory.

    Attributes:
        drew: the layers of the plain model that drew random numbers.
    """

    outputs: dict[str, Any]
    loss: dict[str, Any]
    gradients: dict[str, Any]
    input_gradients: dict[str, Any]
    buffers: dict[str, Any]
    drew: set[int] = field(default_factory=set)


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
    """

    def __init__(
        self, pipe: Pipe, input: Any, target: Any, loss: Loss, options: dict[str, Any]
    ) -> None:
        self.pipe, self.pipeline = pipe, pipe._ready()
        self._input, self._target = input, target
        self._loss, self._options = loss, options
        self.layers = layers_of(self.pipeline)
        self._devices = list(dict.fromkeys(layer.device for layer in self.layers))
        self._modules: dict[str, nn.Module] = {layer.name: layer.module for layer in self.layers}
        if isinstance(loss.function, nn.Module):
            self._modules["loss_fn"] = loss.function
        stages = {
            f"stage {stage.j}": stage.partition for stage in self.pipeline.stages[: self.pipeline.n]
        }
        self._state = State({**stages, **self._modules}, leave=[pipe])
        self._others: list[Tensor] = []  # leaves that belong to no layer
        # The last bit depends on how many threads compute it: layers of CPU workers share them.
        self._threads = torch.get_num_threads()
        concurrent = len(self.pipeline.workers) > 1 and not INLINE.get()
        self._share = self._threads
        if concurrent and self.pipeline.on_cpu:
            self._share = self.pipeline.engine.share()

    @property
    def m(self) -> int:
        """The number of micro-batches."""
        return self._source(self._input, self._target, self.pipe.chunks).m

    def alone(self, run: Callable[[], Any]) -> Any:
        """Calls a function of the plain model, and puts all back."""
        try:
            return self._state.restored(run, self._devices, self._share)
        except BaseException as error:
            annotate(error, "in the plain model, which verify runs beside the pipe")
            raise

    def together(self, chunks: int) -> Result:
        """The plain model on so many micro-batches, with one loss."""
        return self.alone(partial(self._together, chunks))  # type: ignore[no-any-return]

    def apart(self, order: Sequence[int], watch: Watch = None) -> Result:
        """The plain model with a loss for each micro-batch, which go back in an order."""
        run = partial(self._apart, order)
        return self.alone(partial(_watched, self, watch, run))  # type: ignore[no-any-return]

    def forward(self, watch: Watch = None) -> Result:
        """``pipe(x)``, and backward."""
        return self._state.restored(partial(_watched, self, watch, self._forward), self._devices)

    def train(self, schedule: Any, watch: Watch = None) -> Result:
        """``train_batch`` under a schedule."""
        run = partial(self._train, schedule)
        return self._state.restored(partial(_watched, self, watch, run), self._devices)

    def micro_batches(self, chunks: int) -> list[Any]:
        """Inputs as the first layer gets them, without gradients."""
        source = self._source(_fresh(self._input), _fresh(self._target), chunks)
        return [source.pull(i) for i in range(source.m)]

    # --- what is run -----------------------------------------------------------------------------

    def _together(self, chunks: int) -> Result:
        inputs, given = self._given()
        target = _fresh(self._target)
        run, source = PlainRun(self.pipeline), self._source(given, target, chunks)
        pieces = [map_tensors(clones, source.pull(i)) for i in range(source.m)]
        output = gather([run.forward(i, piece) for i, piece in enumerate(pieces)])
        run.commit()
        return self._gone_back(inputs, given, target, output, run.drew)

    def _forward(self) -> Result:
        inputs, given = self._given()
        args, kwargs = call_arguments(self.pipe, given)
        return self._gone_back(inputs, given, _fresh(self._target), self.pipe(*args, **kwargs))

    def _gone_back(
        self,
        inputs: dict[str, Tensor],
        given: Any,
        target: Any,
        output: Any,
        drew: set[int] | None = None,
    ) -> Result:
        """One loss of all outputs, and one backward, on the caller's own threads."""
        torch.set_num_threads(self._threads)
        source = self._source(given, target, 1)
        target = self._at_loss(source, 0)
        objective = Objective(Loss(self._loss.function, self._loss.reduction), m=1, total=1)
        kept = map_tensors(lambda ts: [t.detach().clone() for t in ts], output)
        loss = objective.root(0, objective.call((output, target)), 1, output, target)
        self._find_others(loss, inputs)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return self._result(kept, objective.loss(), inputs, drew)

    def _apart(self, order: Sequence[int]) -> Result:
        inputs, given = self._given()
        source = self._source(given, _fresh(self._target), self.pipe.chunks)
        run, objective = PlainRun(self.pipeline), objective_of(self._loss, source)
        objective.known = placed(objective.known, self.layers[-1].device)
        outputs, shares, left = [], {}, list(order)
        for i in range(source.m):
            output = run.forward(i, map_tensors(clones, source.pull(i)))
            outputs.append(map_tensors(lambda ts: [t.detach().clone() for t in ts], output))
            given = output, self._at_loss(source, i)
            result = run.loss(i, objective.call, given)
            shares[i] = objective.root(i, result, source.size(i), *given)
            del output, given, result
            while left and left[0] in shares:
                share = shares.pop(left.pop(0))
                if share.requires_grad:
                    torch.autograd.backward(share)
                    self._own_gradients()
        run.commit()
        if (factor := objective.factor()) is not None:
            for leaf in [*self._leaves(), *inputs.values()]:
                if leaf.grad is not None:
                    leaf.grad.mul_(
                        moved(factor, leaf.device) if isinstance(factor, Tensor) else factor
                    )
        return self._result(gather(outputs), objective.loss(), inputs, run.drew)

    def _train(self, schedule: Any) -> Result:
        inputs, given = self._given()
        found = self.pipe.train_batch(
            given,
            _fresh(self._target),
            schedule=schedule,
            return_outputs=True,
            verify=False,
            **self._options,
        )
        return self._result(found[1], found[0], inputs)

    # --- inputs and results ----------------------------------------------------------------------

    def _given(self) -> tuple[dict[str, Tensor], Any]:
        """Leaves by name, and the input made of them, into which layers may write."""
        inputs: dict[str, Tensor] = {}
        leaves, structure = flatten(_fresh(self._input))
        for k, name in enumerate(leaf_names("input", self._input)):
            leaf = leaves[k]
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                inputs[name] = leaf.requires_grad_()
                leaves[k] = clones([leaf])[0]
        return inputs, unflatten(leaves, structure)

    def _source(self, input: Any, target: Any, chunks: int) -> Source:
        return FromMiniBatch(batch_input(self.pipe, input), target, chunks)

    def _at_loss(self, source: Source, i: int) -> Any:
        return placed(source.target(i), self.layers[-1].device)

    def _leaves(self) -> list[Tensor]:
        return [*self._state.leaves, *self._others]

    def _find_others(self, loss: Tensor, inputs: dict[str, Tensor]) -> None:
        """Finds what gets gradients besides, by the first graph."""
        known = set(map(id, [*self._leaves(), *inputs.values()]))
        for leaf in leaves_of([loss.grad_fn]):
            if id(leaf) not in known:
                self._state.add_leaf(leaf)
                leaf.grad = None
                self._others.append(leaf)

    def _own_gradients(self) -> None:
        """Two leaves can have one memory for their gradients, and the next would be added twice."""
        for leaf in self._leaves():
            if leaf.grad is not None:
                leaf.grad = leaf.grad.clone()

    def _result(
        self, output: Any, loss: Tensor, inputs: dict[str, Tensor], drew: set[int] | None = None
    ) -> Result:
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for name, module in self._modules.items():
            parameters.update({f"{name}.{key}": p for key, p in module.named_parameters()})
            buffers.update({f"{name}.{key}": b for key, b in module.named_buffers()})
        parameters, buffers = _each_once(parameters), _each_once(buffers)
        for k, leaf in enumerate(self._others):
            parameters[f"tensor {k} of no layer, {described(leaf)}"] = leaf
        return Result(
            named("output", output),
            named("loss", loss),
            {name: value for name, p in parameters.items() for value in named("", p.grad).values()},
            {name: value for name, x in inputs.items() for value in named("", x.grad).values()},
            {name: value for name, b in buffers.items() for value in named("", b).values()},
            drew or set(),
        )


def named(root: str, tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name, tensors detached and copied to the CPU's memory."""
    leaves = flatten(tree)[0]
    return dict(zip(leaf_names(root, tree), map(_copied, leaves), strict=True))


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return dense.to("cpu", copy=True)


def _watched(runs: Runs, watch: Watch, run: Callable[[], Result]) -> Result:
    if watch is not None:
        watch(runs.layers)
    return run()


def _each_once(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors by their first name: that is the owner's, who adds up the gradients."""
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if names[id(tensor)] == name}


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


def orders_of(schedule: Schedule) -> list[tuple[int, ...]]:
    """For each stage the order in which micro-batches go back."""
    actions = [action for row in schedule.actions for action in row if action.kind in _BACK]
    return [tuple([a.i for a in actions if a.j == j]) for j in range(schedule.n)]
