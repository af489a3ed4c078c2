"""What is kept of a cell from its forward to its backward.

    forward   x --> Border --> stage --> y            y goes on without a graph
    backward  gx <-- Border <-- stage <-- gy          gy comes from the stage (or stages) y went to

It holds the ends of the cell's graph, not the outputs themselves, which are the next stage's
business. Of a re-materialized cell it holds the inputs, until the cell is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.runtime.graph import go_back
from syncpipe.runtime.rematerialization.recomputation import Recomputation
from syncpipe.schedules.steps import Edge
from syncpipe.training.border import Border
from syncpipe.training.weight_gradients import WeightGradients
from syncpipe.tree import distinct, map_tensors, tensors_in

__all__ = ["PendingBackward", "cut", "ends_of"]

_PythonNode: type[Any] = torch._C._FunctionBase
#: A ``GradientEdge`` from a tuple of all that is in it, without a way through Python.
_gradient_edge: Callable[[tuple[Any, ...]], GradientEdge] = partial(tuple.__new__, GradientEdge)
_NO_TOKEN = tuple(GradientEdge._field_defaults.values())  # there are none in older versions


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

    def detached(self, edge: Edge, value: Any) -> tuple[Any, list[bool]]:
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


def ends_of(value: Any) -> list[GradientEdge]:
    """Where the graph of the tensors of a tree ends; those that need no gradient have none."""
    if type(value) is Tensor:
        return [_end(value)] if value.requires_grad else []
    return [_end(tensor) for tensor in tensors_in(value) if tensor.requires_grad]


def _end(tensor: Tensor) -> GradientEdge:
    node = tensor.grad_fn
    if node is None or isinstance(node, _PythonNode):  # which its Python object does not keep alive
        return get_gradient_edge(tensor)
    return _gradient_edge((node, tensor.output_nr, *_NO_TOKEN))


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
