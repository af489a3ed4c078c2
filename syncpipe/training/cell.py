"""What is kept of a cell from its forward to its backward, where its graph is cut, and its leaves.

    forward    y of stage j-1 --> GraphCut --> stage j --> y        y travels without a graph
    backward   gy of stage j-1 <-- GraphCut <-- stage j <-- gy      gradients travel back

A cut is the first node of a cell's graph. Its tensors are no leaves, so the cell may write into
them as it may in the plain model, and gradients come out as they are, added to nothing. Of the
outputs only the ends of the graph are kept, not the tensors, which are the next stage's business.

Parameters are known from the start. Other leaves (in a plain list, in a closure) come to light in
the graph of a cell, which is looked at before it goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.data import described, distinct, map_tensors, tensors_in, users_of
from syncpipe.runtime.graph import AccumulateGrad, go_back, nodes_of
from syncpipe.runtime.recomputation import Recomputation
from syncpipe.runtime.streams import moved
from syncpipe.stages.call import Call
from syncpipe.training.weight_gradients import WeightGradients

_C: Any = torch._C
_node_of = attrgetter("node")
_PythonNode: type[Any] = torch._C._FunctionBase
#: A ``GradientEdge`` from a tuple of all that is in it, without a way through Python.
_gradient_edge: Callable[[tuple[Any, ...]], GradientEdge] = partial(tuple.__new__, GradientEdge)
FOREIGN = (
    "a gradient arrives at a cell of the pipeline that does not run backward now: a layer, a "
    "hook or loss_fn has stored a tensor of another layer with its graph (self.aux = ...), and it "
    "is used outside of that cell. Let the layer return it, or stash it as a skip; what layers of "
    "the last stage store, loss_fn may use with checkpoint='never' there. For pipe(x), "
    "syncpipe.inline(graph=True) around the call and backward() gives the plain graph"
)


class GraphCut:
    """The inputs of a graph; ``flags`` tell which of their tensors need one of the ``grads``.

    It is ``open`` while its own cell goes back: what comes at another time is not from that.
    """

    __slots__ = ("_count", "_flags", "grads", "open")

    def __init__(self, flags: Sequence[bool], *, open: bool = False) -> None:
        self._flags, self.open = flags, open
        self._count = sum(flags)
        self.grads: list[Tensor | None] = [None] * self._count

    def enter(self, inputs: Any) -> Any:
        """The inputs, a tree of tensors without a graph, as the begin of one."""
        if not self._count:
            return inputs
        if type(inputs) is tuple and inputs[1:] == ((),) and type(inputs[0]) is Tensor:
            return _enter(self, ANCHOR, inputs[0])[0], ()  # mostly it is so
        return map_tensors(self._enter_tensors, inputs)

    def _enter_tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        # The anchor is what makes autograd record the node.
        # What is one tensor begins once, as in the plain model, whose order of additions it has.
        flagged = list(compress(tensors, self._flags))
        entered = dict(zip(map(id, flagged), _enter(self, ANCHOR, *flagged), strict=True))
        return [entered.get(id(tensor), tensor) for tensor in tensors]

    def receive(self, *grads: Tensor | None) -> tuple[None, ...]:
        """The backward of the node: takes the gradients, and hands none on."""
        if not self.open:
            raise RuntimeError(FOREIGN)
        self.grads, self.open = list(grads), False
        return (None,) * (2 + len(grads))


class Cell:
    """What is kept of a cell."""

    # Of the class: most cells have none of these.
    #: For each outgoing edge how many ends there are to be, if the cell is recomputed.
    expected_ends: tuple[int, ...] = ()
    recomputation: Recomputation | None = None  # then there are no ends yet
    #: On the last stage the loss, until it has gone back; and its gradient.
    root: tuple[GradientEdge, Tensor] | None = None
    output_cut: GraphCut | None = None  # where the graph of a loss begins, if not in the cell's
    target_cut: GraphCut | None = None  # of the targets that need a gradient, if any does
    targets: Sequence[Tensor] = ()
    weight_gradients: WeightGradients | None = None  # if the backward is split

    def __init__(self, flags: Sequence[Sequence[bool]]) -> None:
        self.flags = flags  # for each incoming edge
        self.cut = GraphCut(flags[0] if len(flags) == 1 else list(chain.from_iterable(flags)))
        #: For each outgoing edge the outputs that need a gradient, as ends of the graph; on the
        #: last stage those that the loss is made of.
        self.ends: list[list[GradientEdge]] = []

    def detach_output(self, value: Any) -> tuple[Any, Sequence[bool]]:
        """An output to send without its graph, and for each tensor whether it needs a gradient."""
        single = type(value) is Tensor  # mostly it is so
        flags = (value.requires_grad,) if single else [t.requires_grad for t in tensors_in(value)]
        if self.recomputation is not None:
            self.expected_ends += (sum(flags),)
        elif single:
            self.ends.append([_end(value)] if value.requires_grad else [])
        else:
            self.ends.append(ends_of(value))
        return (value.detach() if single else detached(value)), flags

    def roots(self, grads: Sequence[Sequence[Any]]) -> tuple[list[GradientEdge], list[Tensor]]:
        """The ends of the graph that got a gradient, and these; ``grads`` are for each edge.

        Skips, which are used last, come first: so a tensor that is an output, too, gets its
        gradients in the order of the plain model.
        """
        ends: list[GradientEdge] = []
        there: list[Tensor] = []
        for sent, arrived in reversed([*zip(self.ends, grads, strict=bool(grads))]):
            for end, grad in zip(sent, arrived, strict=True):
                if grad is not None:
                    ends.append(end)
                    there.append(grad.values() if grad.layout is torch.jagged else grad)
        return ends, there


class _Enter(torch.autograd.Function):
    """``apply(cut, anchor, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, cut: GraphCut, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.apply = cut.receive  # what the engine calls, without a way through `backward`
        if len(tensors) == 1:
            return (tensors[0].detach(),)
        return tuple([tensor.detach() for tensor in tensors])

    backward = None  # type: ignore[assignment]


#: The class of the nodes of cuts in a graph.
CUT_NODE: type[Any] = _Enter._backward_cls
#: ``_Enter.apply`` without what it does for transforms of functions, under which nothing trains.
_enter: Any = super(torch.autograd.Function, _Enter).apply
#: Never gets a gradient.
ANCHOR = torch.empty(0, requires_grad=True)
# All graphs end in its node, and all workers see it. PyTorch makes the Python object of a node when
# somebody asks for it; without the interpreter's lock two threads must not make one, so this lives.
_NODE = get_gradient_edge(ANCHOR).node


def ends_of(value: Any) -> list[GradientEdge]:
    """Where the graph of the tensors of a tree ends; those that need no gradient have none."""
    if type(value) is not Tensor:
        return [_end(tensor) for tensor in tensors_in(value) if tensor.requires_grad]
    return [_end(value)] if value.requires_grad else []


def detached(value: Any) -> Any:
    """A tree without its graph; what is one tensor stays one."""
    if type(value) is Tensor:
        return value.detach()

    def detach(tensors: list[Tensor]) -> list[Tensor]:
        made = {id(tensor): tensor.detach() for tensor in tensors}
        return [made[id(tensor)] for tensor in tensors]

    return map_tensors(detach, value)


def _end(tensor: Tensor) -> GradientEdge:
    if tensor.layout is torch.jagged:  # whose shape has a symbol that another run makes anew
        tensor = tensor.values()
    node = tensor.grad_fn
    if node is None and not torch.is_grad_enabled():  # a parameter itself, and nothing goes back
        return _gradient_edge((_NODE, 0, None))
    if node is None or isinstance(node, _PythonNode):  # which its Python object does not keep alive
        return get_gradient_edge(tensor)
    return _gradient_edge((node, tensor.output_nr, None))


def cut_graph(value: Any) -> tuple[GraphCut, Any]:
    """The tensors of a tree as the begin of a new graph; one that is in it twice begins once."""
    tensors = distinct(value)
    cut = GraphCut([tensor.requires_grad for tensor in tensors], open=True)
    entered = cut.enter([tensor.detach() for tensor in tensors])
    begin = {id(tensor): new for tensor, new in zip(tensors, entered, strict=True)}
    return cut, map_tensors(lambda found: [begin[id(t)] for t in found], value)


class Leaves:
    """The leaves that the cells of one call give gradients to; ``known`` are those of each stage.

    A graph alone tells which others there are: one micro-batch may use a leaf that no other does.
    So the graph of each cell is walked, which takes about 0.2 us a node.
    """

    inspects = False  #: whether the graph of a cell is looked at when it has gone forward

    def __init__(self, call: Call, known: Iterable[Iterable[Tensor]]) -> None:
        self._call = call
        self._known = [{id(ANCHOR), *map(id, leaves)} for leaves in known]
        #: The nodes of leaves that are known and were met, so that nobody walks there again.
        self._known_nodes: list[set[Any]] = [set() for _ in self._known]
        self.nested_backward = [False for _ in self._known]  # layers run a backward in theirs

    def unknown_leaves(self, j: int, nodes: Iterable[Any], *begins: Any) -> list[Tensor]:
        """The leaves of a graph of stage ``j`` that are not known.

        It ends in ``nodes``, and begins in leaves and in the cuts ``begins``, nowhere else.
        """
        known, nodes_known = self._known[j], self._known_nodes[j]
        new = []
        for node in nodes_of(nodes, nodes_known):
            kind = type(node)
            if kind is AccumulateGrad:
                if id(node.variable) in known:
                    nodes_known.add(node)
                else:
                    new.append(node.variable)
            elif kind is CUT_NODE:
                if node.apply.__self__ not in begins:
                    raise RuntimeError(FOREIGN)
            elif kind.__name__ == "CheckpointFunctionBackward":  # use_reentrant=True
                self.nested_backward[j] = True
        return new


class Accumulated(Leaves):
    """Those of ``train_batch``: workers add to their gradients, each to those of its own leaves.

    Gradients that were there before the call are kept, as copies: to add in place and to take away
    again would not give the same bits. What is ``known`` are, if nothing is given, the parameters
    of layers.

    Attributes:
        parameters: for each stage those that are its own.
        awaiting_grad: for each those whose first gradient is still to come.
    """

    def __init__(self, call: Call, known: Any = None) -> None:
        stages, self._worker_of = call.pipeline.stages, call.pipeline.worker_of
        own: list[list[Tensor]] = known or [_parameters_of(s.partition) for s in stages]
        if call.ties is not None:  # what is tied is the first stage's
            for j, parameters in enumerate(own):
                foreign = call.ties.foreign(j)
                own[j] = [p for p in parameters if id(p) not in foreign]
        super().__init__(call, own if call.ties is None else map(chain, own, call.ties.leaves))
        self.parameters = own
        #: By leaf its gradient before the call, and a copy of that.
        self._grads_before: dict[Tensor, tuple[Tensor | None, Tensor | None]] = {}
        self._owner: dict[int, tuple[Tensor, int]] = {}  # by identity: a leaf and its first stage
        self.awaiting_grad: list[list[Tensor]] = [[] for _ in stages]
        for j, parameters in enumerate(own):
            self.expect_first_grads(j)
            for parameter in parameters:
                self._owner.setdefault(id(parameter), (parameter, j))
        self.register(chain(*own))

    def expect_first_grads(self, j: int) -> None:
        """Call where the gradients of a stage's parameters begin anew."""
        self.awaiting_grad[j] = _without_grad(self.parameters[j])

    def register(self, leaves: Iterable[Tensor]) -> None:
        """Call before they get any gradient from this call."""
        for leaf in leaves:
            if leaf.requires_grad and leaf not in self._grads_before:
                grad = leaf.grad
                self._grads_before[leaf] = (grad, None if grad is None else grad.detach().clone())

    def grad_before(self, leaf: Tensor) -> Tensor | None:
        """The gradient that a leaf had, as a copy."""
        return self._grads_before.get(leaf, (None, None))[1]

    @torch.no_grad()
    def restore(self) -> None:
        """Gives leaves the gradients that they had."""
        for leaf, (grad, before) in self._grads_before.items():
            if grad is not None and before is not None:
                grad.copy_(before)
            leaf.grad = grad

    @torch.no_grad()
    def scale(self, factor: float | Tensor) -> None:
        """Multiplies what was added by this call by a number, or a tensor on any device."""
        for leaf, (_, before) in self._grads_before.items():
            if (grad := leaf.grad) is not None:
                here = moved(factor, grad.device) if isinstance(factor, Tensor) else factor
                if before is None:
                    grad.mul_(here)
                else:
                    grad.sub_(before).mul_(here).add_(before)

    def adopt(self, j: int, new: list[Tensor]) -> None:
        """Call before a graph of stage ``j`` with leaves that are new goes back.

        It refuses those to whose gradients another worker adds.
        """
        for leaf in new:
            # Of a leaf that stands for another one nobody asks for the gradient here.
            original = self._call.original_of.get(id(leaf), leaf)
            _, owner = self._owner.setdefault(id(original), (original, j))  # atomic
            if original is not leaf or self._worker_of[owner] != self._worker_of[j]:
                raise RuntimeError(self._shared_message(original, owner, j))
        self.register(new)
        self._call.release_to_caller(j, list(map(self.grad_before, new)))
        self.awaiting_grad[j] += _without_grad(new)
        self._known[j].update(map(id, new))

    def own_first_grads(self, j: int) -> None:
        """Call after a backward: copies a first gradient that shares its memory with other tensors.

        Autograd does not look behind views: of ``x + p.view(...)`` both gradients are one memory.
        While that of ``x`` is on its way to another stage, or waits for its weight half, the next
        micro-batch would be added to it in place.
        """
        fresh = self.awaiting_grad[j]
        for leaf in fresh:
            if type(leaf.grad) is Tensor and users_of(leaf.grad) > 1:
                leaf.grad = leaf.grad.clone()
        rest = [leaf for leaf in fresh if leaf.grad is None]
        if len(rest) < len(fresh):
            self._call.release_to_caller(j, [leaf.grad for leaf in fresh])
            self.awaiting_grad[j] = rest

    def go_back(
        self, j: int, roots: Sequence[Any], grads: Sequence[Tensor], cell: Cell, *begins: Any
    ) -> None:
        """Backward through a graph of a cell of stage ``j``, from its roots to its cut, or to
        those where it ``begins``."""
        new = self.unknown_leaves(j, map(_node_of, roots), *(begins or (cell.cut,)))
        if new:
            self.adopt(j, new)
        run = go_back if cell.weight_gradients is None else cell.weight_gradients.go_back
        run(roots, grads)

    def pop_grads(self, j: int, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of leaves that are copies of others; not there any more."""
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def add(self, j: int, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        there = [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
        if there:
            go_back([get_gradient_edge(leaf) for leaf, _ in there], [g for _, g in there])
            there.clear()
            self.own_first_grads(j)

    def others(self) -> list[Tensor]:
        """The leaves that are no parameters, by stage and in the order in which it found them."""
        known = {id(parameter) for parameters in self.parameters for parameter in parameters}
        owned = [each for each in self._owner.values() if id(each[0]) not in known]
        return [leaf for leaf, _ in sorted(owned, key=lambda each: each[1])]

    def _shared_message(self, leaf: Tensor, *users: int) -> str:
        pipeline, named = self._call.pipeline, []
        for j in sorted(users):
            stage = pipeline.stages[j]
            loss = " or loss_fn" if stage.j == pipeline.n - 1 else ""
            device = pipeline.workers[self._worker_of[j]].device
            named.append(f"stage {stage.j} ({stage.layers_in_words}{loss}, on {device})")
        return (
            f"{described(leaf)}, a tensor that requires grad, is used by {' and by '.join(named)}. "
            "Two workers would add to one gradient at the same time, in any order: "
            "choose a balance that puts both layers on one device, use loss_fn(pipe(x), target), "
            "or give each stage a tensor of its own"
        )


def _without_grad(leaves: Iterable[Tensor]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf.requires_grad and leaf.grad is None]


def _parameters_of(partition: nn.Module) -> list[Tensor]:
    every = chain(*[module._parameters.values() for module in partition.modules()])
    return list({id(p): p for p in every if p is not None}.values())
