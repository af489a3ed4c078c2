"""What is kept of a cell from its forward to its backward.

    forward   x --> Border --> stage --> y            y goes on without a graph
    backward  gx <-- Border <-- stage <-- gy          gy comes from the stage (or stages) y went to

It holds the ends of the cell's graph, not the outputs themselves, which are the next stage's
business. Of a re-materialized cell it holds the inputs, until the cell is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from syncpipe.data import map_tensors, tensors_in
from syncpipe.runtime.graph import go_back
from syncpipe.runtime.recomputation import Recomputation
from syncpipe.schedules.steps import Edge
from syncpipe.training.border import Border, ends_of
from syncpipe.training.weight_gradients import WeightGradients

__all__ = ["PendingBackward"]


class PendingBackward:
    """What is kept of a cell.

    Args:
        border: the inputs of its graph.
        flags: for each incoming edge which of its tensors need a gradient, that goes back over it.

    Attributes:
        ends: for each outgoing edge the outputs that need a gradient, as ends of the graph; on the
            last stage those that the loss is made of.
        expected: how many of these there are, for each edge, if the cell is recomputed.
        recomputation: recomputes the cell; then there are no ends yet.
        root: the loss, on the last stage, until it has gone back; and its gradient.
        output: where the graph of the loss begins, if it does not go on into the cell's.
        target: the border of the targets, if any needs a gradient.
        targets: those that do.
        halves: keeps the weight gradients for later, if the backward is split.
    """

    # Of the class: most cells have none of these.
    expected: tuple[int, ...] = ()
    recomputation: Recomputation | None = None
    root: tuple[GradientEdge, Tensor] | None = None
    output: Border | None = None
    target: Border | None = None
    targets: Sequence[Tensor] = ()
    halves: WeightGradients | None = None

    def __init__(self, border: Border, flags: Sequence[Sequence[bool]]) -> None:
        self.border = border
        self.flags = flags
        self.ends: list[list[GradientEdge]] = []

    def copy(self) -> PendingBackward:
        """The same cell, for one of several backwards through it."""
        other = PendingBackward(self.border, self.flags)
        other.ends, other.expected = list(self.ends), self.expected
        other.recomputation = self.recomputation
        return other

    def detached(self, edge: Edge | None, value: Any) -> tuple[Any, list[bool]]:
        """An output to send without its graph, and for each tensor whether it needs a gradient."""
        if type(value) is Tensor:
            flags, there = [value.requires_grad], value.detach()
        else:
            flags = [tensor.requires_grad for tensor in tensors_in(value)]
            there = map_tensors(lambda tensors: [t.detach() for t in tensors], value)
        if self.recomputation is None:
            self.ends.append(ends_of(value))
        else:
            self.expected += (sum(flags),)
        return there, flags

    @property
    def go_back(self) -> Callable[..., None]:
        """Runs a graph backward, or the input half of that."""
        return go_back if self.halves is None else self.halves.go_back

    def roots(
        self, grads: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the backward of the cell begins.

        Args:
            grads: for each outgoing edge the gradients of the outputs that need one; nothing if no
                output is needed.

        Returns:
            The ends of the graph that got a gradient, and these.
        """
        ends: list[GradientEdge] = []
        there: list[Tensor] = []
        for sent, arrived in zip(self.ends, grads, strict=bool(grads)):
            for end, grad in zip(sent, arrived, strict=True):
                if grad is not None:
                    ends.append(end)
                    there.append(grad)
        return ends, there
