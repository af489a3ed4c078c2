"""The gradients that ``pipe(x)`` gives back: captured in each cell, summed for each stage.

Nothing is added to a ``.grad`` here, that is for autograd to do when the node has returned them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from syncpipe.data import described, tensors_in
from syncpipe.runtime.graph import AccumulateGrad, captured, go_back, nodes_of
from syncpipe.runtime.interrupts import undone
from syncpipe.stages.call import Call
from syncpipe.training.cell import ANCHOR, CROSSING, FOREIGN, Border, Cell
from syncpipe.training.leaves import is_shared

__all__ = ["Captured"]


class Captured:
    """What gets gradients in one call of ``pipe(x)``, as ``Leaves`` in ``train_batch``.

    Args:
        call: the call.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        stages = call.pipeline.stages
        self._found: list[dict[int, Tensor]] = [{} for _ in stages]
        self._known: list[set[int]] = [set() for _ in stages]  # those in modules, by identity
        self._used: list[set[int]] = [set() for _ in stages]  # those in the graph of any cell
        self._own: list[list[Tensor]] = [[] for _ in stages]  # by number: what is captured
        self._given: list[tuple[Tensor, list[tuple[int, Tensor]]]] = []
        self._places: list[tuple[dict[str, Any], str, Any, bool]] = []
        self._nested = [False for _ in stages]
        self.waits = [() for _ in stages]  # nothing is added to any leaf, see ``Leaves``
        self._keep = False
        self._sums: list[dict[int, Tensor]] = []
        self._summed: list[set[int]] = []  # the leaves whose sum was made here: nobody else has it

    looks = True

    def look(self, j: int, outputs: Any, border: Border) -> None:
        """Looks for leaves in the graph of a cell of stage ``j``, also such that are in no module.

        Raises:
            RuntimeError: it goes on into another cell's.
        """
        known = self._known[j]
        if not known:
            inside = _tensors_of(self._call.pipeline.stages[j].partition)
            known.update(map(id, [*inside, *self._call.instead[j].values(), ANCHOR]))
        for node in nodes_of([t.grad_fn for t in tensors_in(outputs) if t.requires_grad]):
            kind = type(node)
            if kind is AccumulateGrad:
                leaf = node.variable
                self._used[j].add(id(leaf))
                if id(leaf) in known:
                    continue
                if leaf._backward_hooks:
                    raise RuntimeError(
                        f"{described(leaf)}, which requires grad and has hooks, is used by "
                        f"{self._call.pipeline.stages[j].describe(0)}, and is none of the "
                        "parameters of its layers: its hooks would run once for each micro-batch. "
                        "Make it a parameter of a layer, or use syncpipe.inline(graph=True)"
                    )
                self._found[j][id(leaf)] = leaf
            elif kind.__name__ == "CheckpointFunctionBackward":  # use_reentrant=True
                self._nested[j] = True
            elif kind is CROSSING and node.apply.__self__ is not border:
                raise RuntimeError(FOREIGN)

    def close(self) -> list[Tensor]:
        """Call after the last forward.

        Returns:
            The tensors that get gradients, each once. As on the plain model, hooks of those that
            are in no cell's graph do not run.
        """
        call, n = self._call, self._call.pipeline.n
        given: dict[int, tuple[Tensor, list[tuple[int, Tensor]]]] = {}
        for j, stage in reversed(list(enumerate(call.pipeline.stages))):
            ties, instead = call.ties, call.instead[j]
            own: list[Tensor] = list(self._found[j].values())
            if j >= n:
                assert call.replicas is not None
                self._own[j] = [*own, *call.replicas.trained[j]]
            else:
                foreign = set() if ties is None else ties.foreign(j)
                own += [t for t in _tensors_of(stage.partition) if id(t) not in foreign]
                for module in stage.partition.modules():
                    for held in (module._parameters, module._buffers):
                        for name, t in held.items():
                            stays = t is None or t.requires_grad or held is module._parameters
                            self._places.append((held, name, t, stays))
            for tensor in own:
                if tensor.requires_grad:
                    leaf = instead.get(id(tensor), tensor)
                    tensor = call.originals.get(id(tensor), tensor)
                    given.setdefault(id(tensor), (tensor, []))[1].append((j, leaf))
                    if j < n:
                        self._own[j].append(leaf)
            if ties is not None and j < n:
                self._own[j] += ties.leaves[j]
        if not any(self._nested):  # where a graph does not show all leaves
            leaves = {leaf for used in self._used for leaf in used}
            used = {id(call.originals[k]) if k in call.originals else k for k in leaves}
            given = {k: found for k, found in given.items() if k in used}
        self._given = list(given.values())
        return [tensor for tensor, _ in self._given]

    def passed(
        self, entered: Sequence[Tensor], trained: Sequence[Tensor], link: Callable[..., Any]
    ) -> list[Tensor]:
        """The tensors that get gradients, by way of a node for each stage on an accelerator.

        Args:
            entered: those of the input.
            trained: what :meth:`close` returned.
            link: makes the node.
        """
        call = self._call
        if all(lane.streams is None for lane in call.lanes):
            return [*entered, *trained]
        groups: dict[int, list[int]] = {-1: list(range(len(entered)))}
        for k, (_, places) in enumerate(self._given, start=len(entered)):
            groups.setdefault(call.pipeline.stages[places[0][0]].j, []).append(k)
        tensors = [*entered, *trained]
        for j, those in groups.items():
            if those:
                with call.caller_of[max(j, 0)].active():
                    made = link(*[tensors[k] for k in those])
                for k, tensor in zip(those, made, strict=True):
                    tensors[k] = tensor
        return tensors

    def begun(self, keep: bool) -> Captured:
        """The same for one backward, which keeps the graph or not."""
        other = copy(self)
        other._keep = keep
        other._sums, other._summed = [{} for _ in self._own], [set() for _ in self._own]
        other._own = [[leaf for leaf in own if leaf.requires_grad] for own in self._own]
        return other

    def go_back(
        self, j: int, roots: Sequence[GradientEdge], grads: Sequence[Tensor], cell: Cell
    ) -> None:
        """As of ``Leaves``."""
        own, lane = self._own[j], self._call.lane_of[j]
        found: Sequence[Tensor | None]
        if self._nested[j]:
            found = self._accumulated(own, roots, grads)
        else:
            found = captured(roots, grads, (*own, ANCHOR), keep=self._keep)[:-1]
        if lane.streams is not None:
            # The engine adds up what a leaf gets in one cell on the stream on which the leaf came
            # into a graph first: the caller's, or another worker's. Their memory is that stream's.
            for grad in found:
                if grad is not None:
                    lane.streams.keep(grad, lane.compute)
        self.add(j, own, found)

    def _accumulated(
        self, own: Sequence[Tensor], roots: Sequence[GradientEdge], grads: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The same where a layer runs a backward inside of its own, which adds to ``.grad``."""
        before = [leaf.grad for leaf in own]

        def run() -> list[Tensor | None]:
            for leaf in own:
                leaf.grad = None
            go_back(roots, grads, keep=self._keep)
            return [leaf.grad for leaf in own]

        return undone(run, map(setattr, own, repeat("grad"), before))

    def lowest(self, needed: Sequence[bool]) -> int:
        """The first stage that has a leaf whose gradient is needed."""
        n = self._call.pipeline.n
        there = [
            min(self._call.pipeline.stages[j].j for j, _ in places)
            for (_, places), flag in zip(self._given, needed, strict=True)
            if flag
        ]
        return min(there, default=n)

    def taken(self, j: int, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """As of ``Leaves``."""
        self._summed[j].difference_update(map(id, leaves))
        return [self._sums[j].pop(id(leaf), None) for leaf in leaves]

    def add(self, j: int, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """As of ``Leaves``.

        A first gradient is never added to in place: of ``x + p`` it is the gradient of ``x`` as
        well, which another stage may still read.
        """
        sums, summed = self._sums[j], self._summed[j]
        into: list[Tensor] = []
        added: list[Tensor] = []
        for leaf, grad in zip(leaves, grads, strict=True):
            key = id(leaf)
            if grad is None:
                continue
            if key not in sums:
                sums[key] = grad
            elif key in summed and type(grad) is type(sums[key]) is Tensor:
                into.append(sums[key])
                added.append(grad)
            else:
                sums[key] = _sum(sums[key], grad)
                # A sparse sum takes no dense gradient in place, one of several at once (vmap) none.
                if torch._C._has_storage(sums[key]):
                    summed.add(key)
        if into:
            with torch.no_grad():
                torch._foreach_add_(into, added)

    def sums(self) -> list[Tensor | None]:
        """The gradients of what :meth:`close` returned."""
        for j, sums in enumerate(self._sums):
            self._call.release_to_caller(j, list(sums.values()))
        found: list[Tensor | None] = []
        for _, places in self._given:
            total = None
            for j, leaf in places:
                part = self._sums[j].pop(id(leaf), None)
                if part is not None:
                    total = part if total is None else _sum(total, part)
            if total is not None and type(total) is Tensor and is_shared(total):
                total = total.clone()
            found.append(total)
        return found

    def swaps(self) -> list[tuple[dict[str, Any], str, Any]]:
        """What has to be in the modules for the layers to run once more: parameters as they were,
        and copies of buffers."""
        return [
            (held, name, tensor if stays else tensor.clone())
            for held, name, tensor, stays in self._places
        ]


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """As autograd adds gradients: the dense one comes first, ``sparse + dense`` is an error."""
    return second + first if first.is_sparse else first + second


def _tensors_of(partition: torch.nn.Module) -> list[Tensor]:
    """All parameters and buffers that need a gradient, each once."""
    found = {
        id(tensor): tensor
        for module in partition.modules()
        for tensor in chain(module._parameters.values(), module._buffers.values())
        if tensor is not None and tensor.requires_grad
    }
    return list(found.values())
