"""The backward of one cell in two halves, for zero-bubble schedules.

    input half    gy --> [the cell's autograd backward, without some products] --> gx
    weight half   (x, gy) --> weight.grad                  no graph, no other stage waits for it

The input half runs autograd's graph. It leaves out one kind of gradient: of a weight that is an
ordinary leaf and is used once, in a matrix product or a convolution. Nothing else in backward
depends on that product, so a hook of its node stores the factors (x, gy). All other operations run
their full backward in the input half. So results are correct for every module, and only the speed
depends on what can be split.

    y = x @ w.t()       AddmmBackward0 --> TBackward0 --> AccumulateGrad (w)
                          |   hook: (x, gy)      not run, because w is no input of this backward
                          v
                         ...                     run as usual
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.runtime.graph import AccumulateGrad, go_back, nodes_of
from syncpipe.runtime.streams import DeviceStreams

#: The hook that unpacks tensors whose saving has no side effects: what is packed is a function.
UNPACK = call
#: A node with a deferred weight half, its product and settings, its paths to weight and bias.
_Node = tuple[Any, Any, Any, Sequence[Any], Sequence[Any]]


class WeightGradients:
    """The weight gradients of one cell, deferred from its input half to its weight half.

    Both halves together give the gradients of one backward, bit for bit if ``.grad`` was ``None``.
    A linear layer adds its product to an existing gradient in one fused operation, which rounds
    once less. ``ordinary`` caches :meth:`_is_ordinary`, by id of a leaf, for all cells of a stage.
    """

    def __init__(
        self, streams: DeviceStreams | None = None, ordinary: dict[int, bool] | None = None
    ) -> None:
        self._streams = streams
        self._ordinary: dict[int, bool] = {} if ordinary is None else ordinary
        #: Each adds one product to gradients.
        self.pending: deque[Callable[[], None]] = deque()
        self._nodes: list[_Node] = []

    def splits(self, roots: Sequence[Any]) -> bool:
        """Whether weight gradients of a graph can be deferred."""
        ends = _nodes_at(roots)
        return bool(self._split(nodes_of(ends), ends))

    def go_back(
        self, roots: Sequence[Any], grads: Sequence[Any], leaves: Sequence[Any] = ()
    ) -> None:
        """The input half: as ``runtime.graph.go_back``, and defers weight gradients."""
        ends, known = _nodes_at(roots), set(map(id, leaves))
        nodes = nodes_of(ends)
        found = self._split(nodes, ends)
        if known:
            found = [each for each in found if id(each[3][-1].variable) in known]
        # Reentrant checkpoints refuse a backward with chosen inputs.
        if not found or any("Checkpoint" in type(node).__name__ for node in nodes):
            go_back(roots, grads, leaves)
            return
        deferred = {path[-1] for *_, weight, bias in found for path in (weight, bias) if path}
        variables = [n.variable for n in nodes if type(n) is AccumulateGrad and n not in deferred]
        wanted = [leaf for leaf in variables if not known or id(leaf) in known]
        # A node whose other inputs need no gradient runs only as an input of the backward.
        edges = [GradientEdge(each[0], 0) for each in found]
        handles: list[Any] = []
        try:
            self._nodes = found
            for k, each in enumerate(found):
                handles.append(each[0].register_hook(partial(self._defer, k)))
            go_back(roots, grads, [*wanted, *edges])
        finally:
            self._nodes = []  # else a reference cycle through the hooks
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def accumulate(self) -> None:
        """The weight half: adds the deferred products to the gradients, and frees their factors.

        No other thread may add to the same gradients meanwhile, and autocast must be off.
        """
        while self.pending:
            self.pending.popleft()()

    def _split(self, nodes: Sequence[Any], ends: Sequence[Any]) -> list[_Node]:
        """The nodes of a graph to split: no other node uses their weights and biases."""
        uses: Counter[Any] = Counter(ends)  # an end may be a leaf itself
        for node in nodes:
            uses.update(following for following, _ in node.next_functions)
        found: list[_Node] = []
        for node in nodes:
            product = PRODUCTS.get(node.name())
            if product is None or _has_saved_by_hooks(node, product.factor):
                continue
            settings, weight = product.settings(node), _path(node, product.weight)
            bias = () if product.bias is None else _path(node, product.bias)
            if settings is None or not weight or bias is None:
                continue
            once = set(map(uses.get, (*weight, *bias))) == {1}
            if once and all(self._is_ordinary(path[-1]) for path in (weight, bias) if path):
                found.append((node, product, settings, weight, bias))
        return found

    def _is_ordinary(self, node: Any) -> bool:
        """Whether a backward only adds to the ``.grad`` of a leaf: no hooks, no conversions."""
        leaf = node.variable
        known = self._ordinary.get(id(leaf))
        if known is None:
            known = self._ordinary[id(leaf)] = (
                type(leaf) in (Tensor, nn.Parameter)
                and leaf.layout is torch.strided
                and not leaf._backward_hooks
                and not leaf._post_accumulate_grad_hooks
                and leaf.grad_dtype is leaf.dtype
                and not _has_hooks(node)
            )
        return known

    def _defer(self, k: int, _: Any, grads: Sequence[Tensor | None]) -> None:
        """The hook of node ``k``, which has just run and still has its saved tensors."""
        if not self._nodes or (gy := grads[0]) is None:
            return
        node, product, settings, weights, biases = self._nodes[k]
        x, streams = getattr(node, product.factor).detach(), self._streams
        event = None
        if streams is not None and streams.backend is not None:
            here = streams.backend.current()
            if here != streams.compute:  # the layer has a stream of its own
                event = streams.backend.record(here)
        bias, weight = biases[-1].variable if biases else None, weights[-1].variable
        versions = x._version, gy._version

        def accumulate() -> None:
            for what, tensor, version in zip(_FACTORS, (x, gy), versions, strict=True):
                if tensor._version != version:  # autograd checks it up to the input half only
                    raise RuntimeError(
                        f"the {what} (shape {list(tensor.shape)}) of a layer with a weight of "
                        f"shape {list(weight.shape)} was modified in place between the input half "
                        "of backward and its weight half, which needs it: modify a copy in the "
                        "layer (or in the backward of an autograd function)"
                    )
            if streams is not None:
                streams.receive(event, [x, gy])
            product.accumulate(settings, gy, x, weight, bias)

        self.pending.append(accumulate)


class _Matrix:
    """``x @ w``, or ``x @ w.t()``, in autograd's order of operations."""

    bias = None

    def __init__(self, factor: str, weight: int) -> None:
        self.factor, self.weight = factor, weight

    def settings(self, node: Any) -> Any:
        if getattr(node, "_saved_alpha", 1) != 1:
            return None
        rows, _ = node._saved_mat2_sym_sizes
        names = [each.name() for each in _path(node, self.weight) or ()]
        transposed = names.count("TBackward0") % 2 == 1
        return transposed, tuple(node._saved_mat2_sym_strides) == (1, rows)

    def accumulate(self, settings: Any, gy: Tensor, x: Tensor, weight: Tensor, bias: Any) -> None:
        transposed, column_major = settings
        grad = weight.grad
        if grad is not None and grad.dtype is x.dtype and grad.layout is torch.strided:
            # Adds without a temporary, in one pass over memory.
            factors = (gy.t(), x.conj()) if transposed else (x.t().conj(), gy)
            torch.addmm(grad, *factors, out=grad)  # `addmm_` is not known to FlopCounterMode
            return
        gradient = gy.t().mm(x.conj()) if column_major else x.t().conj().mm(gy)
        # No view unless it has to be one: it becomes the gradient, which shares no memory.
        add_to_grad(weight, gradient if transposed == column_major else gradient.t())


class _Convolution:
    """Convolutions, transposed ones included.

    The bias gradient is deferred with the weight gradient: oneDNN (CPU) computes both in one pass.
    """

    factor, weight, bias = "_saved_input", 1, 2

    def settings(self, node: Any) -> Any:
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
        return node._saved_weight, [getattr(node, f"_saved_{name}") for name in names]

    def accumulate(self, settings: Any, gy: Tensor, x: Tensor, weight: Tensor, bias: Any) -> None:
        used, arguments = settings
        sizes = None if bias is None else [gy.shape[1]]
        _, gw, gb = torch.ops.aten.convolution_backward(
            gy, x, used, sizes, *arguments, (False, True, bias is not None)
        )
        add_to_grad(weight, gw)
        if bias is not None:
            add_to_grad(bias, gb)


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    if gradient.is_complex() and not parameter.is_complex():
        gradient = gradient.real
    gradient = gradient.to(parameter)
    if parameter.grad is None:
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    elif parameter.grad.layout is torch.strided:
        parameter.grad.add_(gradient)
    else:  # a dense gradient cannot be added to a sparse one in place
        parameter.grad = gradient + parameter.grad


def _nodes_at(roots: Sequence[Any]) -> list[Any]:
    return [get_gradient_edge(r).node if isinstance(r, Tensor) else r.node for r in roots]


_FACTORS = "input", "gradient of the output"
#: Name of a node -> how to split it. ``factor`` is the attribute of the node with the input x;
#: ``weight`` and ``bias`` are indices of its inputs (``bias`` is None if not deferred).
#: ``settings(node)`` has the other arguments, and is None if this node cannot be split.
PRODUCTS: dict[str, Any] = {
    "AddmmBackward0": _Matrix("_saved_mat1", 2),
    "MmBackward0": _Matrix("_saved_self", 1),
    "ConvolutionBackward0": _Convolution(),
}
#: Nodes between a weight and its product: a transposition, a cast by autocast.
_PASS_THROUGH = ("TBackward0", "ToCopyBackward0")


def _path(node: Any, k: int) -> Sequence[Any] | None:
    """The nodes from input ``k`` to a leaf; None if others are between; empty without gradient."""
    path: list[Any] = []
    following = node.next_functions[k][0]
    if following is None:
        return path
    while following is not None and following.name() in _PASS_THROUGH:
        path.append(following)
        following = following.next_functions[0][0]
    return [*path, following] if type(following) is AccumulateGrad else None


def _has_saved_by_hooks(node: Any, name: str) -> bool:
    """Whether a layer's own saved-tensor hooks apply, which may count how often they unpack."""
    saved = getattr(node, name.replace("_saved", "_raw_saved", 1))
    hook = getattr(saved, "unpack_hook", None)
    return hook is not None and hook is not UNPACK


def _has_hooks(node: Any) -> bool:
    """Whether a node has hooks; Megatron and Apex, for example, start collectives in them."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *_: None)  # the only way to see the others
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False
