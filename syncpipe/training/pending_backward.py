"""What is kept of a cell from its forward to its backward.

    forward   x --> Border --> stage --> y            y goes on without a graph
    backward  gx <-- Border <-- stage <-- gy          gy comes from the stage (or stages) y went to

It holds the ends of the cell's graph, not the outputs themselves, which are the next stage's
business. Of a re-materialized cell it holds the inputs, until the cell is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.runtime.graph import AccumulateGrad, nodes_of
from syncpipe.runtime.rematerialization.recomputation import Recomputation
from syncpipe.training.border import Border
from syncpipe.training.weight_gradients import WeightGradients
from syncpipe.tree import distinct, map_tensors, tensors_in

__all__ = ["PendingBackward", "cut", "ends_of", "leaves_of"]


@dataclass(slots=True)
class PendingBackward:
    """What is kept of a cell.

    Attributes:
        border: the inputs of its graph.
        counts: for each incoming edge how many of the border's gradients go back over it.
        ends: for each outgoing edge the outputs that need a gradient, as ends of the graph.
        expected: how many of these there are, for each edge.
        recomputation: recomputes the cell; then there are no ends yet.
        root: the loss, on the last stage, until it has gone back.
        output: where the graph of the loss begins.
        target: the border of the targets, if any needs a gradient.
        targets: those that do.
        halves: keeps the weight gradients for later, if the backward is split.
    """

    border: Border
    counts: list[int]
    ends: list[list[GradientEdge]] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    recomputation: Recomputation | None = None
    root: Tensor | None = None
    output: Border | None = None
    target: Border | None = None
    targets: list[Tensor] = field(default_factory=list)
    halves: WeightGradients | None = None

    def go_back(
        self, grads: list[list[Tensor | None]], look: Callable[[list[Tensor]], None]
    ) -> None:
        """Backward through the graph of the cell.

        Args:
            grads: for each outgoing edge the gradients of the outputs that need one; emptied.
            look: called with the leaves of the graph, before they get gradients.
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
        look(leaves_of([root.node for root in roots]))
        with nullcontext() if self.halves is None else self.halves.splitting():
            torch.autograd.backward(roots, given)


def ends_of(value: Any) -> list[GradientEdge]:
    """Where the graph of the tensors of a tree ends; those that need no gradient have none."""
    return [get_gradient_edge(tensor) for tensor in tensors_in(value) if tensor.requires_grad]


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


def leaves_of(nodes: list[Any]) -> list[Tensor]:
    """The leaves of a graph that ends in these nodes."""
    return [node.variable for node in nodes_of(nodes) if type(node) is AccumulateGrad]
