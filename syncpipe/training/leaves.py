"""The leaves of the graphs of one call: who adds to their gradients, and what these were before.

Parameters are known from the start. Other leaves (in a plain list, in a closure) come to light in
the graph of a cell, which is looked at before it goes back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.data import described
from syncpipe.runtime.graph import AccumulateGrad, go_back, nodes_of
from syncpipe.runtime.streams import moved
from syncpipe.stages.call import Call
from syncpipe.training.cell import ANCHOR, CROSSING, FOREIGN, Cell

__all__ = ["Gradients", "Leaves", "go_back_of", "is_shared", "leaves_of"]


class Gradients:
    """The gradients that tensors had before a call added to them.

    Where there were none (``zero_grad`` as it is by default) this costs nothing. Where there were,
    it holds a copy: adding in place and taking away again would not give the same bits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[Tensor, tuple[Tensor | None, Tensor | None]] = {}

    def register(self, tensors: Iterable[Tensor]) -> None:
        """Adds leaves, before they get any gradient from this call."""
        with self._lock:
            for tensor in tensors:
                if tensor.requires_grad and tensor not in self._before:
                    grad = tensor.grad
                    self._before[tensor] = (grad, None if grad is None else grad.detach().clone())

    def before(self, tensor: Tensor) -> Tensor | None:
        """The gradient that a leaf had, as a copy."""
        return self._before.get(tensor, (None, None))[1]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, into the very tensors that were there."""
        for tensor, (grad, copy) in self._before.items():
            if grad is not None and copy is not None:
                grad.copy_(copy)
            tensor.grad = grad

    @torch.no_grad()
    def scale(self, factor: float | Tensor) -> None:
        """Multiplies what was added by this call.

        Args:
            factor: a number, or a tensor without dimensions on any device.
        """
        factors: dict[torch.device, float | Tensor] = {}
        for tensor, (_, copy) in self._before.items():
            grad = tensor.grad
            if grad is None:
                continue
            if grad.device not in factors:
                factors[grad.device] = (
                    moved(factor, grad.device) if isinstance(factor, Tensor) else factor
                )
            if copy is None:
                grad.mul_(factors[grad.device])
            else:
                grad.sub_(copy).mul_(factors[grad.device]).add_(copy)


class Leaves:
    """What the workers of one call may add gradients to, each of them to leaves of its own.

    Args:
        call: the call.
        gradients: learns of every leaf before it gets a gradient.
        known: for each stage the leaves that are known; None: the parameters of its layers.

    Attributes:
        parameters: for each stage those that are its own.
        waits: for each those whose first gradient is still to come; None before it went back.

    Raises:
        RuntimeError: a layer starts collectives of its own in backward.
    """

    def __init__(
        self, call: Call, gradients: Gradients, known: list[list[Tensor]] | None = None
    ) -> None:
        stages, self._worker_of = call.pipeline.stages, call.pipeline.worker_of
        self._call = call
        self._gradients = gradients
        self._owner: dict[int, tuple[Tensor, int]] = {}  # by identity: a leaf and its first stage
        own = [_parameters_of(stage.partition) for stage in stages]
        self.parameters = own if known is None else known
        self._known = [{id(ANCHOR), *map(id, parameters)} for parameters in self.parameters]
        if call.ties is not None:  # what is tied is the first stage's
            for j, parameters in enumerate(self.parameters):
                foreign = call.ties.foreign(j)
                self.parameters[j] = [p for p in parameters if id(p) not in foreign]
                self._known[j] -= foreign
                self._known[j].update(map(id, call.ties.leaves[j]))
        #: The nodes of leaves that are known, so that nobody walks there again.
        self._nodes: list[set[Any]] = [set() for _ in stages]
        self.waits: list[list[Tensor] | None] = [None for _ in stages]
        for j, parameters in enumerate(self.parameters):
            for parameter in parameters:
                self._own(j, parameter)
        gradients.register(chain(*self.parameters))

    def new(self, j: int, nodes: Iterable[Any], *begins: Any) -> list[Tensor]:
        """The leaves of a graph of stage ``j`` that were in none before.

        Args:
            j: the stage.
            nodes: where the graph ends.
            begins: the borders where it may begin.

        Raises:
            RuntimeError: it begins somewhere else.
        """
        known, nodes_known = self._known[j], self._nodes[j]
        new = []
        for node in nodes_of(nodes, nodes_known):
            kind = type(node)
            if kind is AccumulateGrad:
                if id(node.variable) in known:
                    nodes_known.add(node)
                else:
                    new.append(node.variable)
            elif kind is CROSSING and node.apply.__self__ not in begins:
                raise RuntimeError(FOREIGN)
        return new

    def claim(self, j: int, new: list[Tensor]) -> None:
        """Call before a graph of stage ``j`` goes back.

        Args:
            j: the stage.
            new: the leaves that are new.

        Raises:
            RuntimeError: another worker adds to the gradient of one of them.
        """
        fresh = self.waits[j]
        if fresh is None:
            fresh = self.waits[j] = self._without_grad(j, self.parameters[j])
        if not new:
            return
        for leaf in new:
            if not self._own(j, leaf):
                raise RuntimeError(self._shared(j, leaf))
        self.register(j, new)
        fresh += self._without_grad(j, new)
        self._known[j].update(map(id, new))

    def got(self, j: int) -> None:
        """Call after a backward: copies a first gradient that shares its memory with other tensors.

        To save a copy autograd makes it of a tensor that nobody else refers to. But it does not
        look behind views: of ``x + p.view(...)`` both gradients are one memory. While that of ``x``
        is on its way to another stage, or waits for its weight half, the next micro-batch would be
        added to it in place.
        """
        fresh = self.waits[j]
        if fresh:
            for leaf in fresh:
                if type(leaf.grad) is Tensor and is_shared(leaf.grad):
                    leaf.grad = leaf.grad.clone()
            rest = [leaf for leaf in fresh if leaf.grad is None]
            if len(rest) < len(fresh):
                self._call.release_to_caller(j, [leaf.grad for leaf in fresh])
                self.waits[j] = rest

    looks = False  #: whether the graph of a cell is looked at when it has gone forward

    def go_back(
        self, j: int, roots: Sequence[GradientEdge], grads: Sequence[Tensor], cell: Cell
    ) -> None:
        """Backward through the graph of a cell of stage ``j``.

        Args:
            j: the stage.
            roots: where it ends.
            grads: the gradients that it begins with.
            cell: the cell.
        """
        new = self.new(j, map(_NODE_OF, roots), cell.border)
        if new or self.waits[j] is None:
            self.claim(j, new)
        run = go_back if cell.halves is None else cell.halves.go_back
        run(roots, grads)

    def taken(self, j: int, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of leaves that are copies of others; not there any more."""
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def add(self, j: int, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Adds what replicas have for leaves of stage ``j``."""
        there = [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
        if there:
            self.claim(j, [])
            go_back([get_gradient_edge(leaf) for leaf, _ in there], [g for _, g in there])
            there.clear()
            self.got(j)

    def found(self) -> list[Tensor]:
        """The leaves that are no parameters, by stage and in the order in which it found them."""
        known = {id(parameter) for parameters in self.parameters for parameter in parameters}
        owned = [each for each in self._owner.values() if id(each[0]) not in known]
        return [leaf for leaf, _ in sorted(owned, key=lambda each: each[1])]

    def of_others(self, j: int, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Those of some leaves to which a worker is known to add that is not the one of stage j.

        Of leaves that are not its own a replica never knows: the first one may have them.
        """
        if j >= self._call.pipeline.n:
            return list(leaves)
        here, found = self._worker_of[j], []
        for leaf in leaves:
            _, k = self._owner.get(id(leaf), (leaf, j))
            if self._worker_of[k] != here or id(leaf) in self._call.originals:
                found.append(leaf)
        return found

    def register(self, j: int, leaves: Iterable[Tensor]) -> None:
        """Registers leaves found on stage ``j`` to which other workers will add."""
        self._call.for_caller(j, self._gradients.register, leaves)

    def _own(self, j: int, leaf: Tensor) -> bool:
        """Makes a leaf one of the worker of stage ``j``, if it is not another worker's."""
        _, owner = self._owner.setdefault(id(leaf), (leaf, j))  # atomic
        return self._worker_of[owner] == self._worker_of[j]

    def _without_grad(self, j: int, leaves: list[Tensor]) -> list[Tensor]:
        """The leaves without a gradient yet; the gradients of the others are the caller's, too."""
        self._call.release_to_caller(j, [leaf.grad for leaf in leaves])
        return [leaf for leaf in leaves if leaf.requires_grad and leaf.grad is None]

    def _shared(self, j: int, leaf: Tensor) -> str:
        first, second = map(self._named, sorted((self._owner[id(leaf)][1], j)))
        return (
            f"{described(leaf)}, a tensor that requires grad, is used by {first} and by "
            f"{second}. Two workers would add to one gradient at the same time, in any order: "
            "choose a balance that puts both layers on one device, use pipe(x), or give each stage "
            "a tensor of its own"
        )

    def _named(self, j: int) -> str:
        pipeline = self._call.pipeline
        stage = pipeline.stages[j]
        loss = " or loss_fn" if stage.j == pipeline.n - 1 else ""
        device = pipeline.workers[self._worker_of[j]].device
        return f"stage {stage.j} ({stage.layers_in_words}{loss}, on {device})"


def go_back_of(
    cell: Cell, roots: Sequence[Any], grads: Sequence[Tensor], inputs: Sequence[Tensor] = ()
) -> None:
    """Runs a graph of a cell backward, or the input half of that."""
    if cell.halves is None:
        go_back(roots, grads, inputs)
    else:
        cell.halves.go_back(roots, grads, inputs)


def leaves_of(nodes: Iterable[Any]) -> list[Tensor]:
    """The leaves of a graph that ends in some nodes."""
    return [node.variable for node in nodes_of(nodes) if type(node) is AccumulateGrad]


def _parameters_of(partition: nn.Module) -> list[Tensor]:
    """The parameters of a partition, whose layers can be trained here.

    Raises:
        RuntimeError: a layer starts collectives of its own in backward.
    """
    found: dict[int, Tensor] = {}
    for module in partition.modules():
        kind: Any = type(module)
        if _wrapper(kind):
            raise RuntimeError(
                f"a layer is wrapped in {_wrapper(kind)}, which starts collectives of its "
                "own in backward. Under train_batch the workers of each process would start them "
                "in any order, once for each micro-batch. Leave the layers as they are, and make "
                "the whole pipe data-parallel: syncpipe.distributed.data_parallel(pipe)"
            )
        found.update((id(p), p) for p in module._parameters.values() if p is not None)
    return list(found.values())


@lru_cache(maxsize=1024)
def _wrapper(kind: type) -> str:
    """The class of PyTorch's by which modules start collectives; empty where there is none."""
    for base in kind.__mro__:
        if base.__module__.startswith(_COMMUNICATE):
            return base.__name__
    return ""


def is_shared(tensor: Tensor) -> bool:
    """Whether other tensors have the same memory."""
    return bool(_C._has_storage(tensor)) and _users(tensor) > _ALONE  # a sparse one has none


def _users(tensor: Tensor) -> int:
    count: int = _C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


_NODE_OF = attrgetter("node")
_C: Any = torch._C
_ALONE = _users(torch.empty(1))  # the tensor itself, and in some versions whoever asks
_COMMUNICATE = (
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.replicate",
)
