"""The backward of one cell in two halves, for zero-bubble schedules.

    input half    gy --> [the cell's autograd backward, but for some products] --> gx
    weight half   (x, gy) --> weight.grad                  no graph, nobody waits for it

The input half runs the true graph. Only where a matrix product or a convolution meets a weight that
is an ordinary leaf, used once, autograd is not asked for the gradient of that leaf: the one product
that nothing else in backward depends on. A hook of its node puts the factors (x, gy) aside. All
other operations do their whole backward in the input half. So every module is right by
construction, its forward is PyTorch's own, and what splits is a matter of speed.

    y = x @ w.t()       AddmmBackward0 --> TBackward0 --> AccumulateGrad (w)
                          |   hook: (x, gy)      not run, for nobody asks for w
                          v
                         ...                     run as ever
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.runtime import offload
from syncpipe.runtime.graph import AccumulateGrad, go_back, nodes_of
from syncpipe.runtime.streams import DeviceStreams

#: A node whose weight half is put off, its product and settings, its paths to the two leaves.
_Node = tuple[Any, Any, Any, Sequence[Any], Sequence[Any]]


class WeightGradients:
    """The weight gradients of one cell, put off from its input half to its weight half.

    Together the halves leave the gradients that one whole backward leaves, to the last bit where
    ``.grad`` was ``None`` before. To a gradient that exists already a linear layer adds its product
    in one fused operation, which rounds once less. ``ordinary``, by identity of a leaf what
    :meth:`_is_ordinary` says, is shared by the cells of one stage in one call.
    """

    def __init__(
        self, streams: DeviceStreams | None = None, ordinary: dict[int, bool] | None = None
    ) -> None:
        self._streams = streams
        self._ordinary: dict[int, bool] = {} if ordinary is None else ordinary
        #: What is put aside: adds to gradients.
        self.pending: deque[Callable[[], None]] = deque()
        self._nodes: list[_Node] = []

    def go_back(self, roots: Sequence[Any], grads: Sequence[Any]) -> None:
        """The input half: as ``runtime.graph.go_back``, and puts weight halves aside."""
        ends = [get_gradient_edge(r).node if isinstance(r, Tensor) else r.node for r in roots]
        nodes = nodes_of(ends)
        found = self._split(nodes, ends)
        # What checkpoints by a backward in backward refuses to go back to chosen leaves.
        if not found or any("Checkpoint" in type(node).__name__ for node in nodes):
            go_back(roots, grads)
            return
        deferred = {path[-1] for *_, weight, bias in found for path in (weight, bias) if path}
        wanted = [n.variable for n in nodes if type(n) is AccumulateGrad and n not in deferred]
        # A node without other results would not run. As a place to go back to it does.
        edges = [GradientEdge(each[0], 0) for each in found]
        handles: list[Any] = []
        try:
            self._nodes = found
            for k, each in enumerate(found):
                handles.append(each[0].register_hook(partial(self._defer, k)))
            go_back(roots, grads, [*wanted, *edges])
        finally:
            self._nodes = []  # which would hold themselves by their hooks
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def accumulate(self) -> None:
        """The weight half: adds to the gradients what was put aside, and lets go of it.

        Unlike autograd's own accumulation it takes no lock: no other thread may add to the same
        gradients meanwhile. Autocast must be off.
        """
        while self.pending:
            self.pending.popleft()()

    def _split(self, nodes: Sequence[Any], ends: Sequence[Any]) -> list[_Node]:
        """The nodes of a graph to split: nothing else in it uses their weights and biases."""
        uses: Counter[Any] = Counter(ends)  # a leaf may be given a gradient of its own
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
            once = all(uses[each] == 1 for each in (*weight, *bias))
            if once and all(self._is_ordinary(path[-1]) for path in (weight, bias) if path):
                found.append((node, product, settings, weight, bias))
        return found

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
                and leaf.grad_dtype is leaf.dtype
                and not _has_hooks(node)
            )
        return known

    def _defer(self, k: int, _: Any, grads: Sequence[Tensor | None]) -> None:
        """The node has run, and still has what it saved."""
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
                if tensor._version != version:  # autograd itself only looks until the input half
                    raise RuntimeError(
                        f"the {what} (shape {list(tensor.shape)}) of a layer with a weight of "
                        f"shape {list(weight.shape)} was modified in place between the input half "
                        "of backward and its weight half, which needs it: let the layer (or the "
                        "backward of an autograd function) work on a copy"
                    )
            if streams is not None:
                streams.receive(event, [x, gy])
            product.accumulate(settings, gy, x, weight, bias)

        self.pending.append(accumulate)


class _Matrix:
    """``x @ w``, mostly of a transposed ``w``, in the order of operations of autograd."""

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
            # No temporary, and no pass over memory to add it.
            factors = (gy.t(), x.conj()) if transposed else (x.t().conj(), gy)
            torch.addmm(grad, *factors, out=grad)  # `addmm_` is not known to FlopCounterMode
            return
        gradient = gy.t().mm(x.conj()).t() if column_major else x.t().conj().mm(gy)
        add_to_grad(weight, gradient.t() if transposed else gradient)


class _Convolution:
    """Convolutions, transposed ones included.

    The gradient of the bias goes with that of the weight: oneDNN (CPU) computes them in one pass,
    so that to ask for the one is to pay for both.
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
    else:  # a sparse one cannot take up a dense one
        parameter.grad = gradient + parameter.grad


_FACTORS = "input", "gradient of the output"
#: What can be split, by the names of nodes. Of each ``factor`` is the attribute of the node that
#: has the input, ``weight`` (``bias``) which of its inputs is the weight (the bias, if its gradient
#: comes along). ``settings(node)`` is what else is needed; None if the node cannot be split.
PRODUCTS: dict[str, Any] = {
    "AddmmBackward0": _Matrix("_saved_mat1", 2),
    "MmBackward0": _Matrix("_saved_self", 1),
    "ConvolutionBackward0": _Convolution(),
}
#: What may stand between a weight and its product: transposed, and in autocast's dtype.
_PASS_THROUGH = ("TBackward0", "ToCopyBackward0")


def _path(node: Any, k: int) -> Sequence[Any] | None:
    """The nodes from input ``k`` of a node to a leaf; None if there is more in between.

    Nothing if that input needs no gradient.
    """
    path: list[Any] = []
    following = node.next_functions[k][0]
    if following is None:
        return path
    while following is not None and following.name() in _PASS_THROUGH:
        path.append(following)
        following = following.next_functions[0][0]
    return [*path, following] if type(following) is AccumulateGrad else None


def _has_saved_by_hooks(node: Any, name: str) -> bool:
    """Whether a layer has saved-tensor hooks of its own, which may count who asks for what."""
    saved = getattr(node, name.replace("_saved", "_raw_saved", 1))
    hook = getattr(saved, "unpack_hook", None)
    return hook is not None and getattr(hook, "__module__", "") != offload.__name__


def _has_hooks(node: Any) -> bool:
    """Whether somebody has put hooks on a node, as Megatron and Apex do to start collectives."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *_: None)  # the only way to see the others
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False
