"""The autograd graph of one cell (micro-batch, stage): its cuts, its ends and its leaves.

    forward    y of stage j-1 --> GraphCut --> stage j --> y        y travels without a graph
    backward   gy of stage j-1 <-- GraphCut <-- stage j <-- gy      gradients travel back

A cut is the first node of a cell's graph. Its tensors are not leaves, so the layers may modify them
in place, and their gradients are not accumulated anywhere. A cell keeps the ends of its graph, not
the output tensors, so the next stage can free them.

Parameters are known before the call. Other leaves (in a plain list, in a closure) are found in the
graph of a cell before its backward.
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

from syncpipe.data import described, distinct, map_tensors, modules_of, storage_users, tensors_in
from syncpipe.runtime.graph import AccumulateGrad, go_back, nodes_of
from syncpipe.runtime.recomputation import Recomputation
from syncpipe.runtime.streams import moved
from syncpipe.stages.call import Call
from syncpipe.training.weight_gradients import WeightGradients

_node_of = attrgetter("node")
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
    recomputation: Recomputation | None = None  # until it has run, there are no ends
    #: On the last stage the loss and its gradient, until the loss has run backward.
    root: tuple[GradientEdge, Tensor] | None = None
    output_cut: GraphCut | None = None  # start of the loss's graph, if it is not the cell's
    target_cut: GraphCut | None = None  # if a target needs a gradient
    targets: Sequence[Tensor] = ()
    deferred: WeightGradients | None = None  # if the backward is split

    def __init__(self, flags: Sequence[Sequence[bool]]) -> None:
        self.flags = flags  # for each incoming edge
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

    def roots(self, grads: Sequence[Sequence[Any]]) -> tuple[list[GradientEdge], list[Tensor]]:
        """The ends that got a gradient, and the gradients; ``grads`` has a list for each edge.

        Skips, which are used last, come first: a tensor that is both skip and output then adds up
        its gradients in the order of the plain model.
        """
        ends: list[GradientEdge] = []
        received: list[Tensor] = []
        for sent, arrived in reversed([*zip(self.ends, grads, strict=bool(grads))]):
            for end, grad in zip(sent, arrived, strict=True):
                if grad is not None:
                    ends.append(end)
                    received.append(grad.values() if grad.layout is torch.jagged else grad)
        return ends, received


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


class Leaves:
    """The leaves that get gradients in one call; ``known`` has the expected ones of each stage.

    One micro-batch may use a leaf that no other uses, so the graph of each cell is searched for
    unknown leaves, which takes about 0.2 us a node.
    """

    inspects = False  #: whether the graph of a cell is searched after its forward

    def __init__(self, call: Call, known: Iterable[Iterable[Tensor]]) -> None:
        self._call = call
        self._known = [{id(ANCHOR), *map(id, leaves)} for leaves in known]
        #: The nodes of known leaves, which later searches skip.
        self._known_nodes: list[set[Any]] = [set() for _ in self._known]
        self.nested_backward = [False for _ in self._known]  # by layers, inside their backward
        self._plain = set[type]()  # kinds of nodes that need no look

    def unknown_leaves(self, j: int, nodes: Iterable[Any], *cuts: Any) -> list[Tensor]:
        """The unknown leaves of the graph of ``nodes``; RuntimeError if it has other ``cuts``."""
        known, nodes_known, plain = self._known[j], self._known_nodes[j], self._plain
        new = []
        for node in nodes_of(nodes, nodes_known):
            kind = type(node)
            if kind in plain:
                continue
            if kind is AccumulateGrad:
                if id(node.variable) in known:
                    nodes_known.add(node)
                else:
                    new.append(node.variable)
            elif kind is CUT_NODE:
                if node.apply.__self__ not in cuts:
                    raise RuntimeError(FOREIGN)
            elif kind.__name__ == "CheckpointFunctionBackward":  # use_reentrant=True
                self.nested_backward[j] = True
            else:
                plain.add(kind)
        return new


class Accumulated(Leaves):
    """Leaves of ``train_batch``: each worker accumulates into ``.grad`` of its own leaves.

    Earlier gradients are copied, because adding and then subtracting is not exact.
    ``known`` are the parameters of the layers by default.

    Attributes:
        parameters: for each stage those that it owns.
        awaiting_grad: for each stage the leaves that have no gradient yet.
    """

    def __init__(self, call: Call, known: Any = None) -> None:
        stages, self._worker_of = call.pipeline.stages, call.pipeline.worker_of
        own: list[list[Tensor]] = known or [_parameters_of(s.partition) for s in stages]
        if call.ties is not None:  # the first stage of a tied parameter owns it
            for j, parameters in enumerate(own):
                foreign = call.ties.foreign(j)
                own[j] = [p for p in parameters if id(p) not in foreign]
        super().__init__(call, own if call.ties is None else map(chain, own, call.ties.leaves))
        self.parameters = own
        #: For each leaf its gradient before the call, and a copy of it.
        self._grads_before: dict[Tensor, tuple[Tensor | None, Tensor | None]] = {}
        self._owner: dict[int, tuple[Tensor, int]] = {}  # id(leaf) -> leaf, its first stage
        self.awaiting_grad: list[list[Tensor]] = [[] for _ in stages]
        for j, parameters in enumerate(own):
            self.expect_first_grads(j)
            for parameter in parameters:
                self._owner.setdefault(id(parameter), (parameter, j))
        self.register(chain(*own))

    def expect_first_grads(self, j: int) -> None:
        self.awaiting_grad[j] = _without_grad(self.parameters[j])

    def register(self, leaves: Iterable[Tensor]) -> None:
        """Saves the gradients of leaves; call before the first backward that reaches them."""
        for leaf in leaves:
            if leaf.requires_grad and leaf not in self._grads_before:
                grad = leaf.grad
                self._grads_before[leaf] = (grad, None if grad is None else grad.detach().clone())

    def grad_before(self, leaf: Tensor) -> Tensor | None:
        """A copy of the gradient that a leaf had before the call."""
        return self._grads_before.get(leaf, (None, None))[1]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the gradients from before the call."""
        for leaf, (grad, before) in self._grads_before.items():
            if grad is not None and before is not None:
                grad.copy_(before)
            leaf.grad = grad

    @torch.no_grad()
    def scale(self, factor: float | Tensor) -> None:
        """Multiplies what this call added by a number, or by a tensor on any device."""
        for leaf, (_, before) in self._grads_before.items():
            if (grad := leaf.grad) is not None:
                here = moved(factor, grad.device) if isinstance(factor, Tensor) else factor
                if before is None:
                    grad.mul_(here)
                else:
                    grad.sub_(before).mul_(here).add_(before)

    def adopt(self, j: int, new: list[Tensor]) -> None:
        """Makes ``new`` leaves of stage ``j`` known; call it before the backward of their graph.

        Raises RuntimeError if another worker adds to their gradients.
        """
        for leaf in new:
            # Nothing would read the gradient of a substitute: refused, too.
            original = self._call.original_of.get(id(leaf), leaf)
            _, owner = self._owner.setdefault(id(original), (original, j))  # atomic
            if original is not leaf or self._worker_of[owner] != self._worker_of[j]:
                raise RuntimeError(self._shared_message(original, owner, j))
        self.register(new)
        self._call.release_to_caller(j, list(map(self.grad_before, new)))
        self.awaiting_grad[j] += _without_grad(new)
        self._known[j].update(map(id, new))

    def own_first_grads(self, j: int) -> None:
        """Copies first gradients that share memory with other tensors; call after a backward.

        In ``x + p.view(...)`` both gradients do, and the next micro-batch would add in place to the
        gradient of ``x``, which is on its way to another stage, or waits for its weight half.
        """
        fresh = self.awaiting_grad[j]
        for leaf in fresh:
            if type(leaf.grad) is Tensor and storage_users(leaf.grad) > 1:
                leaf.grad = leaf.grad.clone()
        rest = [leaf for leaf in fresh if leaf.grad is None]
        if len(rest) < len(fresh):
            self._call.release_to_caller(j, [leaf.grad for leaf in fresh])
            self.awaiting_grad[j] = rest

    def go_back(
        self, j: int, roots: Sequence[Any], grads: Sequence[Tensor], cell: Cell, *cuts: Any
    ) -> None:
        """Backward through a graph of a cell of stage ``j``, from ``roots`` to ``cuts``."""
        new = self.unknown_leaves(j, map(_node_of, roots), *(cuts or (cell.cut,)))
        if new:
            self.adopt(j, new)
        run = go_back if cell.deferred is None else cell.deferred.go_back
        run(roots, grads)

    def pop_grads(self, j: int, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Takes the gradients from leaves that are copies of others."""
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def add(self, j: int, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        pairs = [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
        if pairs:
            go_back([get_gradient_edge(leaf) for leaf, _ in pairs], [grad for _, grad in pairs])
            pairs.clear()
            self.own_first_grads(j)

    def others(self) -> list[Tensor]:
        """The leaves that are no parameters, stage by stage, in the order of their discovery."""
        known = {id(parameter) for parameters in self.parameters for parameter in parameters}
        owned = [each for each in self._owner.values() if id(each[0]) not in known]
        return [leaf for leaf, _ in sorted(owned, key=lambda each: each[1])]

    def _shared_message(self, leaf: Tensor, *users: int) -> str:
        pipeline, named = self._call.pipeline, []
        for j in sorted(users):
            stage = pipeline.stages[j]
            loss = " or loss_fn" if stage.j == pipeline.n - 1 else ""
            device = pipeline.workers[self._worker_of[j]].device
            named.append(f"stage {stage.j} ({stage.layer_range}{loss}, on {device})")
        return (
            f"{described(leaf)}, a tensor that requires grad, is used by {' and by '.join(named)}. "
            "Two workers would add to its gradient at the same time: choose a balance that puts "
            "both layers on one device, use loss_fn(pipe(x), target), or give each stage a tensor "
            "of its own"
        )


def _without_grad(leaves: Iterable[Tensor]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf.requires_grad and leaf.grad is None]


def _parameters_of(partition: nn.Module) -> list[Tensor]:
    every = chain(*[module._parameters.values() for module in modules_of(partition)])
    return list({id(p): p for p in every if p is not None}.values())
