"""What is kept of a cell from its forward to its backward.

    forward   x --> Border --> stage --> y            y goes on without a graph
    backward  gx <-- Border <-- stage <-- gy          gy comes from the stage (or stages) y went to

It holds the ends of the cell's graph, not the outputs themselves, which are the next stage's
business. Of a re-materialized cell it holds the inputs, until the cell is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.runtime.again import Again
from syncpipe.runtime.border import Border
from syncpipe.runtime.weight_gradients import WeightGradients
from syncpipe.tree import distinct, map_tensors, tensors_in

__all__ = ["Kept", "cut", "ends_of", "leaves_of", "own_gradients", "without_grad"]


@dataclass(slots=True)
class Kept:
    """What is kept of a cell.

    Attributes:
        border: the inputs of its graph.
        counts: for each incoming edge how many of the border's gradients go back over it.
        ends: for each outgoing edge the outputs that need a gradient, as ends of the graph.
        expected: how many of these there are, for each edge.
        again: recomputes the cell; then there are no ends yet.
        root: the loss, on the last stage, until it has gone back.
        output: where the graph of the loss begins.
        target: the border of the targets, if any need a gradient; and which these are.
        leaves: those of the loss's graph that have no gradient yet.
        halves: keeps the weight gradients for later, if the backward is split.
    """

    border: Border
    counts: list[int]
    ends: list[list[GradientEdge]] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    again: Again | None = None
    root: Tensor | None = None
    output: Border | None = None
    target: Border | None = None
    targets: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    halves: WeightGradients | None = None

    def go_back(
        self, grads: list[list[Tensor | None]], watch: Callable[[Tensor], None] | None
    ) -> None:
        """Backward through the graph of the cell.

        Args:
            grads: for each outgoing edge the gradients of the outputs that need one; emptied.
            watch: called with every leaf of the graph, before it gets a gradient.
        """
        if self.root is not None:
            torch.autograd.backward(self.root)
            self.root = None
        if self.output is not None:
            grads = [self.output.grads]
        roots: list[Any] = []
        given: list[Any] = []
        for ends, arrived in zip(self.ends, grads, strict=True):
            for end, grad in zip(ends, arrived, strict=True):
                if grad is not None:
                    roots.append(end)
                    given.append(grad)
        grads.clear()
        if not roots:
            return
        if watch is not None:
            for leaf in leaves_of(roots, ()):
                watch(leaf)
        with nullcontext() if self.halves is None else self.halves.splitting():
            torch.autograd.backward(roots, given)


def ends_of(value: Any) -> list[GradientEdge]:
    """Where the graph of the tensors of a tree ends; those that need no gradient have none."""
    return [_end_of(tensor) for tensor in tensors_in(value) if tensor.requires_grad]


def _end_of(tensor: Tensor) -> GradientEdge:
    # In older versions of PyTorch an edge does not own the node of a custom Function; the node of
    # a view, which it does own, has that one behind it.
    if not _EDGES_OWN and isinstance(tensor.grad_fn, BackwardCFunction):
        tensor = tensor.view_as(tensor)
    return get_gradient_edge(tensor)


def cut(value: Any) -> tuple[Border, Any]:
    """The tensors of a tree as the begin of a new graph; one that is in it twice begins once."""
    tensors = distinct(value)
    if len(tensors) == 1 and tensors[0] is value:
        border = Border([value.requires_grad])
        return border, border.cross(value.detach())
    border = Border([tensor.requires_grad for tensor in tensors])
    crossed = border.cross([tensor.detach() for tensor in tensors])
    begin = {id(tensor): new for tensor, new in zip(tensors, crossed, strict=True)}
    return border, map_tensors(lambda found: [begin[id(t)] for t in found], value)


def leaves_of(roots: list[Any], given: Any) -> list[Tensor]:
    """The leaves that tensors or ends of a graph depend on, but for those behind ``given``."""
    seen = {tensor.grad_fn for tensor in tensors_in(given)}
    nodes: list[Any] = [r.grad_fn if isinstance(r, Tensor) else r.node for r in roots]
    leaves = []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves


def without_grad(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Those of the leaves that will get their first gradient."""
    return [leaf for leaf in leaves if leaf.requires_grad and leaf.grad is None]


def own_gradients(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Gives leaves that just got their first gradient memory of their own for it.

    To save a copy autograd makes it of a tensor that nobody else refers to. But it does not look
    behind views: of ``x + p.view(...)`` both gradients are one memory. While that of ``x`` is on
    its way to another stage, or waits for its weight half, the next micro-batch would be added
    to it in place.

    Returns:
        The leaves that have no gradient yet.
    """
    for leaf in leaves:
        if type(leaf.grad) is Tensor and _is_shared(leaf.grad):
            leaf.grad = leaf.grad.clone()
    return without_grad(leaves)


def _is_shared(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and _users(tensor) > _ALONE


def _users(tensor: Tensor) -> int:
    count: int = _C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


_C: Any = torch._C
_EDGES_OWN = "ownership_token" in GradientEdge._fields
_ALONE = _users(torch.empty(1))  # the tensor itself, and in some versions whoever asks
