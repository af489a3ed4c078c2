"""Where the training driver cuts the graph: at every border between stages.

    stage j-1 --> y      y travels without a graph      Border --> stage j --> ...
       ^                                                   |
       +------------- gradients travel back <-------------+

A border is the first node of a cell's graph. Its tensors are no leaves, so the cell may write into
them as it may in the plain model, and gradients come out as they are, added to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.data import distinct, map_tensors, tensors_in

__all__ = ["ANCHOR", "CROSSING", "FOREIGN", "Border", "cut", "ends_of"]

_PythonNode: type[Any] = torch._C._FunctionBase
#: A ``GradientEdge`` from a tuple of all that is in it, without a way through Python.
_gradient_edge: Callable[[tuple[Any, ...]], GradientEdge] = partial(tuple.__new__, GradientEdge)
_NO_TOKEN = tuple(GradientEdge._field_defaults.values())  # there are none in older versions
FOREIGN = (
    "a gradient comes to a cell of the pipeline that does not go back at this moment: a layer, a "
    "hook or loss_fn has kept a tensor of another layer with its graph (self.aux = ...), and it "
    "is used outside of that cell. Let the layer return it, or stash it as a skip; what layers of "
    "the last stage put aside, loss_fn may use with checkpoint='never' there. For pipe(x), "
    "syncpipe.inline(graph=True) around the call and backward() gives the plain graph"
)


class Border:
    """The inputs of a cell's graph.

    Args:
        flags: for each tensor of the inputs whether it needs a gradient.

    Attributes:
        grads: after backward, for each tensor that needs a gradient that gradient, or None.
        open: whether its own cell goes back; gradients that come at another time are not from it.
    """

    __slots__ = ("_flags", "grads", "open")

    def __init__(self, flags: Sequence[bool], *, open: bool = False) -> None:
        self._flags = flags
        self.grads: list[Tensor | None] = [None] * sum(flags)
        self.open = open

    def begin(self) -> None:
        """Call before its cell goes back."""
        self.open, self.grads = True, [None] * len(self.grads)

    def cross(self, inputs: Any) -> Any:
        """The inputs, a tree of tensors without a graph, as the begin of one."""
        return map_tensors(self._crossed, inputs) if self.grads else inputs

    def _crossed(self, tensors: list[Tensor]) -> list[Tensor]:
        # The anchor is what makes autograd record the node.
        if len(tensors) == len(self.grads):
            crossed: list[Tensor] = _cross(self, ANCHOR, *tensors)
            return crossed
        following = iter(_cross(self, ANCHOR, *compress(tensors, self._flags)))
        flagged = zip(tensors, self._flags, strict=True)
        return [next(following) if flag else tensor for tensor, flag in flagged]

    def arrive(self, *grads: Tensor | None) -> tuple[None, ...]:
        """The backward of the node: takes the gradients, and hands none on."""
        if not self.open:
            raise RuntimeError(FOREIGN)
        self.grads, self.open = list(grads), False
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
        border = Border([value.requires_grad], open=True)
        return border, border.cross(value.detach())
    border = Border([tensor.requires_grad for tensor in tensors], open=True)
    crossed = border.cross([tensor.detach() for tensor in tensors])
    begin = {id(tensor): new for tensor, new in zip(tensors, crossed, strict=True)}
    return border, map_tensors(lambda found: [begin[id(t)] for t in found], value)
