"""Where the training driver cuts the graph: at every border between stages.

    stage j-1 --> y      y travels without a graph      Border --> stage j --> ...
       ^                                                   |
       +------------- gradients travel back <-------------+

A border is the first node of a cell's graph. Its tensors are no leaves, so the cell may write into
them as it may in the plain model, and gradients come out as they are, added to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from syncpipe.tree import map_tensors

__all__ = ["ANCHOR", "CROSSING", "Border"]


class Border:
    """The inputs of a cell's graph.

    Args:
        flags: for each tensor of the inputs whether it needs a gradient.

    Attributes:
        grads: after backward, for each tensor that needs a gradient that gradient, or None.
        node: the node, until it has run.
    """

    __slots__ = ("_flags", "grads", "node")

    def __init__(self, flags: Sequence[bool]) -> None:
        self._flags = flags
        self.grads: list[Tensor | None] = [None] * sum(flags)
        self.node: Any = None

    def cross(self, inputs: Any) -> Any:
        """The inputs, a tree of tensors without a graph, as the begin of one."""
        return map_tensors(self._crossed, inputs) if self.grads else inputs

    def _crossed(self, tensors: list[Tensor]) -> list[Tensor]:
        # The anchor is what makes autograd record the node.
        if len(tensors) == len(self.grads):
            crossed: list[Tensor] = _cross(self, ANCHOR, *tensors)
            self.node = crossed[0].grad_fn
            return crossed
        crossed = _cross(self, ANCHOR, *compress(tensors, self._flags))
        self.node = crossed[0].grad_fn
        following = iter(crossed)
        flagged = zip(tensors, self._flags, strict=True)
        return [next(following) if flag else tensor for tensor, flag in flagged]

    def arrive(self, *grads: Tensor | None) -> tuple[None, ...]:
        """The backward of the node: takes the gradients, and hands none on."""
        self.grads, self.node = list(grads), None
        return (None,) * (2 + len(grads))


class _Cross(torch.autograd.Function):
    """``apply(border, anchor, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, border: Border, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.apply = border.arrive  # what the engine calls, without a way through `backward`
        return tuple([tensor.detach() for tensor in tensors])

    backward = None  # type: ignore[assignment]


#: The class of the nodes of borders in a graph.
CROSSING: type[Any] = _Cross._backward_cls


#: ``_Cross.apply`` without what it does for transforms of functions, under which nothing trains.
_cross: Any = super(torch.autograd.Function, _Cross).apply

#: Never gets a gradient.
ANCHOR = torch.empty(0, requires_grad=True)
# All graphs end in its node, and all workers see it. PyTorch makes the Python object of a node when
# somebody asks for it; without the interpreter's lock two threads must not make one, so this lives.
_NODE = get_gradient_edge(ANCHOR).node
