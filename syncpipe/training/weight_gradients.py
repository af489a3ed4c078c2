"""The backward of one cell in two halves, for zero-bubble schedules.

    input half    gy --> [the cell's autograd backward, but for some products] --> gx
    weight half   (x, gy) --> weight.grad                  no graph, nobody waits for it

The input half runs the true graph. Only where a matrix product or a convolution meets a weight that
is an ordinary leaf, autograd is not asked for the gradient of that leaf: the one product that
nothing else in backward depends on. A hook of its node puts the factors (x, gy) aside. All other
operations do their whole backward in the input half. So every module is right by construction, its
forward is PyTorch's own, and what splits is a matter of speed.

    y = x @ w.t()       AddmmBackward0 --> TBackward0 --> AccumulateGrad (w)
                          |   hook: (x, gy)      not run, for nobody asks for w
                          v
                         ...                     run as ever
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.runtime import offload
from syncpipe.runtime.graph import AccumulateGrad, go_back, nodes_of
from syncpipe.runtime.streams import Lane

__all__ = ["PRODUCTS", "Product", "WeightGradients", "add_to_grad"]


class Product(Protocol):
    """What the weight half of a node of the graph is, by the name of the node.

    Attributes:
        factor: the attribute of the node that has the input.
        weight: which of its inputs is the weight.
        bias: which is the bias, if its gradient comes along with that of the weight.
    """

    @property
    def factor(self) -> str: ...

    @property
    def weight(self) -> int: ...

    @property
    def bias(self) -> int | None: ...

    def settings(self, node: Any) -> Any:
        """What is needed of the node besides the input; None if it cannot be split."""

    def accumulate(
        self, settings: Any, gy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        """Adds to the gradients of a leaf and, if one is given, of the bias."""


class WeightGradients:
    """The weight gradients of one cell, put off from its input half to its weight half.

    ::

        weights = WeightGradients()
        weights.go_back([y], [gy])  # input half
        weights.accumulate()  # weight half

    Together the halves leave the gradients that one whole backward leaves, to the last bit where
    ``.grad`` was ``None`` before. There are two exceptions, both within rounding: to a gradient
    that exists already a linear layer adds its product in one fused operation; and the gradients of
    a parameter that is used more than once in the cell are summed in another order, under autocast
    also in the parameter's own dtype instead of autocast's.

    The object serves one thread at a time, and one cell.

    Args:
        lane: the streams of the stage.
        ordinary: by identity of a leaf whether all that a backward does with it is to add to its
            ``.grad``; shared by the cells of one stage in one call.
    """

    def __init__(self, lane: Lane | None = None, ordinary: dict[int, bool] | None = None) -> None:
        self._lane = lane
        self._ordinary: dict[int, bool] = {} if ordinary is None else ordinary
        self._halves: deque[_Half] = deque()
        self._nodes: list[_Node] = []

    def go_back(
        self, roots: Sequence[Any], grads: Sequence[Any], inputs: Sequence[Tensor] = ()
    ) -> None:
        """The input half: as ``runtime.graph.go_back``, and puts weight halves aside."""
        ends = [_node_of(root) for root in roots]
        nodes = nodes_of(ends)
        leaves, found, deferred = self._split(nodes, ends)
        # What checkpoints by a backward in backward refuses to go back to chosen leaves.
        if not found or any("Checkpoint" in type(node).__name__ for node in nodes):
            go_back(roots, grads, inputs)
            return
        self._nodes = found
        mine = weakref.ref(self)  # or the nodes would hold themselves
        handles = [
            each.node.register_hook(partial(_arrived, mine, k))
            for k, each in enumerate(self._nodes)
        ]
        # A node without other results would not run. As a place to go back to it does.
        wanted = [leaf for leaf in inputs or leaves if id(leaf) not in deferred]
        edges = [GradientEdge(each.node, 0) for each in self._nodes]
        try:
            go_back(roots, grads, [*wanted, *edges])
        finally:
            self._nodes = []
            for handle in handles:
                handle.remove()

    def accumulate(self) -> None:
        """The weight half: adds to the gradients what was put aside, and lets go of it.

        Unlike autograd's own accumulation it takes no lock: no other thread may add to the same
        gradients meanwhile. Autocast must be off.

        Raises:
            RuntimeError: the input of a layer, or the gradient of its output, was modified in
                place since the input half.
        """
        with torch.no_grad():
            while self._halves:
                self._halves.popleft().accumulate(self._lane)

    @property
    def pending(self) -> int:
        """How many weight halves are put aside."""
        return len(self._halves)

    def _split(
        self, nodes: Iterable[Any], ends: Iterable[Any]
    ) -> tuple[list[Tensor], list[_Node], set[int]]:
        """The leaves of a graph, the nodes to split, and which leaves (by identity) those defer.

        A leaf is deferred if nothing else in the graph uses it.
        """
        leaves: list[Tensor] = []
        uses: Counter[Any] = Counter(ends)  # a leaf may be given a gradient of its own
        found: list[_Node] = []
        for node in nodes:
            if type(node) is AccumulateGrad:
                leaves.append(node.variable)
                continue
            uses.update(following for following, _ in node.next_functions)
            product = PRODUCTS.get(node.name())
            if product is None or _has_saved_by_hooks(node, product.factor):
                continue
            settings, weight = product.settings(node), _path(node, product.weight)
            bias = () if product.bias is None else _path(node, product.bias)
            if settings is None or not weight or bias is None:
                continue
            found.append(_Node(node, product, settings, weight, bias))

        def deferred(path: Sequence[Any]) -> bool:
            return all(uses[node] == len(ours[node]) for node in path) and (
                not path or self._is_ordinary(path[-1])
            )

        given_up = True
        while given_up:  # a node that stays whole may use the weight or the bias of another
            ours: defaultdict[Any, set[Any]] = defaultdict(set)  # for each node uses by those found
            for each in found:
                for path in (each.weight, each.bias):
                    for user, used in zip([each.node, *path], path, strict=False):
                        ours[used].add(user)
            kept = [each for each in found if deferred(each.weight) and deferred(each.bias)]
            given_up, found = len(kept) < len(found), kept
        split = [path[-1] for each in found for path in (each.weight, each.bias) if path]
        return leaves, found, {id(end.variable) for end in split}

    def _is_ordinary(self, node: Any) -> bool:
        """Whether all that a backward does with a leaf is to add to its ``.grad``.

        What watches the accumulation has to see all of the gradient.
        """
        leaf = node.variable
        known = self._ordinary.get(id(leaf))
        if known is None:
            known = self._ordinary[id(leaf)] = (
                type(leaf) in (Tensor, nn.Parameter)
                and leaf.layout is torch.strided
                and not leaf._backward_hooks
                and not leaf._post_accumulate_grad_hooks
                and getattr(leaf, "grad_dtype", leaf.dtype) is leaf.dtype
                and not _has_hooks(node)
            )
        return known

    def _put_aside(self, k: int, gy: Tensor) -> None:
        """The node has run, and still has what it saved."""
        each, lane = self._nodes[k], self._lane
        x = getattr(each.node, each.product.factor).detach()
        event = None
        if lane is not None and lane.streams is not None:
            here = lane.streams.current()
            if here != lane.compute:  # the layer has a stream of its own
                event = lane.streams.record(here)
        bias = each.bias[-1].variable if each.bias else None
        weight = each.weight[-1].variable
        versions = x._version, gy._version
        half = _Half(each.product, each.settings, gy, x, versions, weight, bias, event)
        self._halves.append(half)


@dataclass(slots=True)
class _Node:
    """A node whose weight half is put off; its paths to the leaves, which are their ends."""

    node: Any
    product: Product
    settings: Any
    weight: Sequence[Any]
    bias: Sequence[Any]


@dataclass(slots=True)
class _Half:
    """The weight half of one node.

    Attributes:
        product: what kind it is.
        settings: of the node.
        gy: gradient of the output.
        x: the input.
        versions: of ``x`` and ``gy``, from when they were put aside.
        weight: the leaf.
        bias: the leaf whose gradient comes along, if one does.
        event: what the stream of the stage has to wait for.
    """

    product: Product
    settings: Any
    gy: Tensor
    x: Tensor
    versions: tuple[int, int]
    weight: Tensor
    bias: Tensor | None
    event: Any

    def accumulate(self, lane: Lane | None) -> None:
        now = self.x._version, self.gy._version
        if now != self.versions:  # autograd itself only looks until the input half
            what = "input" if now[0] != self.versions[0] else "gradient of the output"
            tensor = self.x if what == "input" else self.gy
            raise RuntimeError(
                f"the {what} (shape {list(tensor.shape)}) of a layer with a weight of shape "
                f"{list(self.weight.shape)} was modified in place between the input half of "
                "backward and its weight half, which needs it: let the layer (or the backward of "
                "an autograd function) work on a copy"
            )
        if lane is not None:
            lane.receive(self.event, [self.x, self.gy])
        self.product.accumulate(self.settings, self.gy, self.x, self.weight, self.bias)


class _Matrix:
    """``x @ w``, mostly of a transposed ``w``, in the order of operations of autograd.

    Args:
        factor: as of :class:`Product`.
        weight: as of :class:`Product`.
    """

    bias = None

    def __init__(self, factor: str, weight: int) -> None:
        self.factor, self.weight = factor, weight

    def settings(self, node: Any) -> Any:
        """Whether the weight is the transposed of a leaf, and whether it is column-major."""
        if getattr(node, "_saved_alpha", 1) != 1:
            return None
        rows, _ = node._saved_mat2_sym_sizes
        turned = False
        following = node.next_functions[self.weight][0]
        while following is not None and following.name() in _PASSED:
            turned ^= following.name() == "TBackward0"
            following = following.next_functions[0][0]
        return turned, tuple(node._saved_mat2_sym_strides) == (1, rows)

    def accumulate(
        self, settings: Any, gy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        turned, column_major = settings
        grad = weight.grad
        if grad is not None and grad.dtype is x.dtype and grad.layout is torch.strided:
            # No temporary, and no pass over memory to add it.
            factors = (gy.t(), x.conj()) if turned else (x.t().conj(), gy)
            torch.addmm(grad, *factors, out=grad)  # `addmm_` is not known to FlopCounterMode
            return
        gradient = gy.t().mm(x.conj()).t() if column_major else x.t().conj().mm(gy)
        add_to_grad(weight, gradient.t() if turned else gradient)


class _Convolution:
    """Convolutions, transposed ones included.

    The gradient of the bias goes with that of the weight: oneDNN (CPU) computes them in one pass,
    so that to ask for the one is to pay for both.
    """

    factor, weight, bias = "_saved_input", 1, 2

    def settings(self, node: Any) -> Any:
        """The weight as it was used, and the arguments of the operation."""
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
        return node._saved_weight, [getattr(node, f"_saved_{name}") for name in names]

    def accumulate(
        self, settings: Any, gy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        used, arguments = settings
        sizes = None if bias is None else [gy.shape[1]]
        _, gw, gb = torch.ops.aten.convolution_backward(
            gy, x, used, sizes, *arguments, (False, True, bias is not None)
        )
        add_to_grad(weight, gw)
        if bias is not None:
            add_to_grad(bias, gb)


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to ``parameter.grad`` as autograd does."""
    if gradient.is_complex() and not parameter.is_complex():
        gradient = gradient.real
    gradient = gradient.to(parameter)
    if parameter.grad is None:
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    elif parameter.grad.layout is torch.strided:
        parameter.grad.add_(gradient)
    else:  # a sparse one cannot take up a dense one
        parameter.grad = gradient + parameter.grad


#: What can be split, by the names of nodes.
PRODUCTS: dict[str, Product] = {
    "AddmmBackward0": _Matrix("_saved_mat1", 2),
    "MmBackward0": _Matrix("_saved_self", 1),
    "ConvolutionBackward0": _Convolution(),
}
#: What may stand between a weight and its product: transposed, and in autocast's dtype.
_PASSED = ("TBackward0", "ToCopyBackward0")


def _path(node: Any, k: int) -> Sequence[Any] | None:
    """The nodes from input ``k`` of a node to a leaf; None if there is more in between.

    Nothing if that input needs no gradient.
    """
    path: list[Any] = []
    following = node.next_functions[k][0]
    if following is None:
        return path
    while following is not None and following.name() in _PASSED:
        path.append(following)
        following = following.next_functions[0][0]
    return [*path, following] if type(following) is AccumulateGrad else None


def _arrived(
    mine: Callable[[], WeightGradients | None], k: int, _: Any, grads: Sequence[Tensor | None]
) -> None:
    weights = mine()
    if weights is not None and weights._nodes and grads[0] is not None:
        weights._put_aside(k, grads[0])


def _has_saved_by_hooks(node: Any, name: str) -> bool:
    """Whether a layer has saved-tensor hooks of its own, which may count who asks for what."""
    saved = getattr(node, name.replace("_saved", "_raw_saved", 1))
    hook = getattr(saved, "unpack_hook", None)
    return hook is not None and getattr(hook, "__module__", "") != offload.__name__


def _node_of(root: Any) -> Any:
    return get_gradient_edge(root).node if isinstance(root, Tensor) else root.node


def _has_hooks(node: Any) -> bool:
    """Whether somebody has put hooks on a node, as Megatron and Apex do to start collectives."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)  # the only way to see the others
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""
