"""The autograd graph of one cell (micro-batch, stage): its cuts and its ends.

    forward    y of stage j-1 --> GraphCut --> stage j --> y        y travels without a graph
    backward   gy of stage j-1 <-- GraphCut <-- stage j <-- gy      gradients travel back

A cut is the first node of a cell's graph. Its tensors are not leaves, so the layers may modify them
in place, and their gradients are not accumulated anywhere. A cell keeps the ends of its graph, not
the output tensors, so the next stage can free them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.data.trees import distinct, map_tensors, tensors_in
from syncpipe.runtime.graph import go_back
from syncpipe.storage import own_storage

_PythonNode: type[Any] = torch._C._FunctionBase
#: ``GradientEdge`` from the tuple of its fields, without a Python call.
_gradient_edge: Callable[[tuple[Any, ...]], GradientEdge] = partial(tuple.__new__, GradientEdge)
FOREIGN = (
    "a gradient reached a cell of the pipeline that is not running backward: a layer, a hook or "
    "loss_fn stored a tensor of another layer with its graph (self.aux = ...), and used it outside "
    "that cell. Return the tensor from its layer, or stash it as a skip. loss_fn may use what "
    "layers of the last stage store, if that stage has checkpoint='never'. For pipe(x), "
    "syncpipe.inline(graph=True) around the call and backward() gives the plain graph"
)


class Message(NamedTuple):
    """The value sent over an edge: a tree of tensors, or a list of gradients on the way back.

    ``event`` is recorded when the value is complete. For each tensor ``flags`` has whether it needs
    a gradient, and ``owners`` who else uses its memory (``inplace``).
    """

    value: Any
    event: Any = None
    flags: Sequence[bool] = ()
    owners: Sequence[int] = ()


class GraphCut:
    """The start of a graph. ``flags`` mark the tensors that need one of the ``grads``.

    It accepts gradients once while ``open``; a gradient at another time is an error.
    """

    __slots__ = ("_count", "_flags", "grads", "open")

    def __init__(self, flags: Sequence[bool], *, open: bool = False) -> None:
        self._flags, self.open = flags, open
        self._count = sum(flags)
        self.grads: list[Tensor | None] = [None] * self._count

    def enter(self, inputs: Any) -> Any:
        """Returns the inputs, a tree of tensors without a graph, as outputs of this node."""
        if not self._count:
            return inputs
        if type(inputs) is tuple and inputs[1:] == ((),) and type(inputs[0]) is Tensor:
            return _enter(self, ANCHOR, inputs[0])[0], ()  # the usual case
        return map_tensors(self._enter_tensors, inputs)

    def _enter_tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        # Autograd records the node because the anchor requires grad. A tensor that occurs twice
        # enters once, so its gradients are added up in the order of the plain model.
        flagged = list(compress(tensors, self._flags))
        entered = dict(zip(map(id, flagged), _enter(self, ANCHOR, *flagged), strict=True))
        return [entered.get(id(tensor), tensor) for tensor in tensors]

    def receive(self, *grads: Tensor | None) -> tuple[None, ...]:
        """The backward of the node: stores the gradients, and passes none on."""
        if not self.open:
            raise RuntimeError(FOREIGN)
        self.grads, self.open = list(grads), False
        return (None,) * (2 + len(grads))


class Cell:
    """What a cell keeps from its forward to its backward."""

    # Class attributes, because most cells need none of them.
    #: The number of ends for each outgoing edge, if the cell is recomputed.
    expected_ends: tuple[int, ...] = ()
    recomputation: Any = None  # until it has run, there are no ends
    #: On the last stage the loss and its gradient, until the loss has run backward.
    root: tuple[GradientEdge, Tensor] | None = None
    output_cut: GraphCut | None = None  # start of the loss's graph, if it is not the cell's
    target_cut: GraphCut | None = None  # if a target needs a gradient
    targets: Sequence[Tensor] = ()
    #: Who else uses the memory of its inputs, and of each part of its outputs (``inplace``).
    sent_owners: Sequence[Sequence[int]] = ((),)
    run_backward: Callable[..., None] = staticmethod(go_back)  #: runs its graph backward

    def __init__(self, flags: Sequence[Sequence[bool]], owners: Sequence[int] = ()) -> None:
        self.flags, self.owners = flags, owners  # for each incoming edge; for each input
        self.cut = GraphCut(flags[0] if len(flags) == 1 else list(chain.from_iterable(flags)))
        #: The graph ends of outputs, by outgoing edge; on the last stage, for the loss.
        self.ends: list[list[GradientEdge]] = []

    def detach_output(self, value: Any) -> tuple[Any, Sequence[bool]]:
        """Notes the ends of an output; returns it without a graph, and its requires_grad flags."""
        single = type(value) is Tensor  # the usual case
        flags = (value.requires_grad,) if single else [t.requires_grad for t in tensors_in(value)]
        if self.recomputation is not None:
            self.expected_ends += (sum(flags),)
        elif single:
            self.ends.append([_end(value)] if value.requires_grad else [])
        else:
            self.ends.append(ends_of(value))
        return (value.detach() if single else detached(value)), flags


class _Enter(torch.autograd.Function):
    """``apply(cut, anchor, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, cut: GraphCut, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.apply = cut.receive  # the engine calls `apply`: this saves the call of `backward`
        if len(tensors) == 1:
            return (tensors[0].detach(),)
        return tuple([tensor.detach() for tensor in tensors])

    backward = None  # type: ignore[assignment]


#: The type of a cut's node in a graph.
CUT_NODE: type[Any] = _Enter._backward_cls
#: ``_Enter.apply`` without its support for functorch transforms, which never get here.
_enter: Any = super(torch.autograd.Function, _Enter).apply
#: Never gets a gradient.
ANCHOR = torch.empty(0, requires_grad=True)
# All graphs end in the node of the anchor, in all workers. PyTorch makes the Python object of a
# node on first use, and without the GIL two threads must not do so at once: it is kept alive here.
_NODE = get_gradient_edge(ANCHOR).node


def ends_of(value: Any) -> list[GradientEdge]:
    """The graph ends of the tensors of a tree that require grad."""
    if type(value) is not Tensor:
        return [_end(tensor) for tensor in tensors_in(value) if tensor.requires_grad]
    return [_end(value)] if value.requires_grad else []


def detached(value: Any) -> Any:
    """A tree without its graph; a tensor that occurs twice stays one tensor."""
    if type(value) is Tensor:
        return value.detach()

    def detach(tensors: list[Tensor]) -> list[Tensor]:
        made = {id(tensor): tensor.detach() for tensor in tensors}
        return [made[id(tensor)] for tensor in tensors]

    return map_tensors(detach, value)


def with_own_storage(value: Any) -> Any:
    """A tree to keep, whose tensors are no slices of larger storages."""
    return map_tensors(lambda tensors: list(map(own_storage, tensors)), value)


def _end(tensor: Tensor) -> GradientEdge:
    if tensor.layout is torch.jagged:  # its shape has a symbol that recomputation makes anew
        tensor = tensor.values()
    node = tensor.grad_fn
    if node is None and not torch.is_grad_enabled():  # a parameter, in a forward without graph
        return _gradient_edge((_NODE, 0, None))
    if node is None or isinstance(node, _PythonNode):  # its Python object does not keep it alive
        return get_gradient_edge(tensor)
    return _gradient_edge((node, tensor.output_nr, None))


def cut_graph(value: Any) -> tuple[GraphCut, Any]:
    """Cuts the graph of a tree: its tensors start a new one, a repeated tensor only once."""
    tensors = distinct(value)
    cut = GraphCut([tensor.requires_grad for tensor in tensors], open=True)
    entered = cut.enter([tensor.detach() for tensor in tensors])
    start = {id(tensor): new for tensor, new in zip(tensors, entered, strict=True)}
    return cut, map_tensors(lambda found: [start[id(t)] for t in found], value)
