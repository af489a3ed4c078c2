"""What is kept of a cell from its forward to its backward, and where its graph is cut.

    forward    y of stage j-1 --> Border --> stage j --> y        y travels without a graph
    backward   gy of stage j-1 <-- Border <-- stage j <-- gy      gradients travel back

A border is the first node of a cell's graph. Its tensors are no leaves, so the cell may write into
them as it may in the plain model, and gradients come out as they are, added to nothing. Of the
outputs only the ends of the graph are kept, not the tensors, which are the next stage's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.data import distinct, map_tensors, tensors_in
from syncpipe.runtime.recomputation import Recomputation
from syncpipe.training.weight_gradients import WeightGradients

__all__ = ["ANCHOR", "CROSSING", "FOREIGN", "Border", "Cell", "cut", "ends_of"]

_PythonNode: type[Any] = torch._C._FunctionBase
#: A ``GradientEdge`` from a tuple of all that is in it, without a way through Python.
_gradient_edge: Callable[[tuple[Any, ...]], GradientEdge] = partial(tuple.__new__, GradientEdge)
_NO_TOKEN = tuple(GradientEdge._field_defaults.values())  # there are none in older versions
FOREIGN = (
    "a gradient arrives at a cell of the pipeline that does not run backward now: a layer, a "
    "hook or loss_fn has stored a tensor of another layer with its graph (self.aux = ...), and it "
    "is used outside of that cell. Let the layer return it, or stash it as a skip; what layers of "
    "the last stage store, loss_fn may use with checkpoint='never' there. For pipe(x), "
    "syncpipe.inline(graph=True) around the call and backward() gives the plain graph"
)


class Border:
    """The inputs of a graph.

    Args:
        flags: for each tensor of the inputs whether it needs a gradient.
        open: whether its own cell goes back; gradients that come at another time are not from it.

    Attributes:
        grads: after backward, for each tensor that needs a gradient that gradient, or None.
    """

    __slots__ = ("_count", "_flags", "grads", "open")

    def __init__(self, flags: Sequence[bool], *, open: bool = False) -> None:
        self._flags, self.open = flags, open
        self._count = sum(flags)
        self.grads: list[Tensor | None] = [None] * self._count

    def begin(self) -> None:
        """Call before its cell goes back."""
        self.open, self.grads = True, [None] * self._count

    def cross(self, inputs: Any) -> Any:
        """The inputs, a tree of tensors without a graph, as the begin of one."""
        if not self._count:
            return inputs
        if type(inputs) is tuple and inputs[1:] == ((),) and type(inputs[0]) is Tensor:
            return _cross(self, ANCHOR, inputs[0])[0], ()  # mostly it is so
        return map_tensors(self._crossed, inputs)

    def _crossed(self, tensors: list[Tensor]) -> list[Tensor]:
        # The anchor is what makes autograd record the node.
        if len(tensors) == self._count:
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


class Cell:
    """What is kept of a cell.

    Args:
        flags: for each incoming edge which of its tensors need a gradient, that goes back over it.

    Attributes:
        border: the inputs of its graph.
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

    def __init__(self, flags: Sequence[Sequence[bool]]) -> None:
        self.flags = flags
        self.border = Border(flags[0] if len(flags) == 1 else list(chain.from_iterable(flags)))
        self.ends: list[list[GradientEdge]] = []

    def copy(self) -> Cell:
        """The same cell, for one of several backwards through it."""
        other = Cell.__new__(Cell)
        other.__dict__.update(self.__dict__, ends=list(self.ends))
        return other

    def detached(self, value: Any) -> tuple[Any, Sequence[bool]]:
        """An output to send without its graph, and for each tensor whether it needs a gradient."""
        flags: Sequence[bool]
        if type(value) is Tensor and self.recomputation is None:  # mostly it is so
            self.ends.append([_end(value)] if value.requires_grad else [])
            return value.detach(), (value.requires_grad,)
        if type(value) is Tensor:
            flags, there = (value.requires_grad,), value.detach()
        else:
            flags = [tensor.requires_grad for tensor in tensors_in(value)]
            there = map_tensors(lambda tensors: [t.detach() for t in tensors], value)
        if self.recomputation is None:
            self.ends.append(ends_of(value))
        else:
            self.expected += (sum(flags),)
        return there, flags

    def roots(
        self, grads: Sequence[Sequence[Tensor | None]]
    ) -> tuple[Sequence[GradientEdge], Sequence[Tensor]]:
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


class _Cross(torch.autograd.Function):
    """``apply(border, anchor, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, border: Border, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.apply = border.arrive  # what the engine calls, without a way through `backward`
        if len(tensors) == 1:
            return (tensors[0].detach(),)
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
