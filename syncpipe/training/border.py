"""Where the training driver cuts the graph: at every border between stages.

    stage j-1 --> y      y travels without a graph      Border --> stage j --> ...
       ^                                                   |
       +------------- gradients travel back <-------------+

A border is the first node of a cell's graph. Its tensors are no leaves, so the cell may write into
them as it may in the plain model, and gradients come out as they are, added to nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from syncpipe.tree import map_tensors, tensors_in

__all__ = ["ANCHOR", "Border"]


class Border:
    """The inputs of a cell's graph.

    Args:
        flags: for each tensor of the inputs whether it needs a gradient.

    Attributes:
        grads: after backward, for each tensor that needs a gradient that gradient, or None.
    """

    __slots__ = ("_flags", "grads")

    def __init__(self, flags: list[bool]) -> None:
        self._flags = flags
        self.grads: list[Tensor | None] = [None] * sum(flags)

    def cross(self, inputs: Any) -> Any:
        """The inputs, a tree of tensors without a graph, as the begin of one."""
        if not self.grads:
            return inputs
        crossing = [t for t, flag in zip(tensors_in(inputs), self._flags, strict=True) if flag]
        # The anchor is what makes autograd record the node.
        crossed = iter(_Cross.apply(self, ANCHOR, *crossing))  # type: ignore[no-untyped-call]
        return map_tensors(
            lambda tensors: [
                next(crossed) if flag else t for t, flag in zip(tensors, self._flags, strict=True)
            ],
            inputs,
        )


class _Cross(torch.autograd.Function):
    """``apply(border, anchor, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, border: Border, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.border = border
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.border.grads = list(grads)
        return (None,) * (2 + len(grads))


#: Never gets a gradient.
ANCHOR = torch.empty(0, requires_grad=True)
# All graphs end in its node, and all workers see it. PyTorch makes the Python object of a node when
# somebody asks for it; without the interpreter's lock two threads must not make one, so this lives.
_NODE = get_gradient_edge(ANCHOR).node
