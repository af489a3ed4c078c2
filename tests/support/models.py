"""What several tests need: small models, the reference run, and the bitwise comparison with it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncpipe import Pipe
from syncpipe.runtime.graph import nodes_of
from syncpipe.skip import pop, skippable, stash
from tests.support.compare import assert_same

CHANNELS, LENGTH = 4, 3  # every layer below maps [batch, CHANNELS, LENGTH] to the same shape
CHECKPOINT_MODES = ["always", "except_last", "never"]


# --- layers: each takes a tensor, or the dict that Fork makes, and works on its "x" -------------


def on_x(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies a function to a tensor, or to the entry "x" of a dict."""
    return {**value, "x": function(value["x"])} if isinstance(value, dict) else function(value)


class Inner(nn.Module):
    """A layer of PyTorch, or any function, on a tensor or on "x"."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Any) -> Any:
        return on_x(self.inner, value)


class Tied(nn.Module):
    """Two linear layers with one weight, the first of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(LENGTH, LENGTH)
        self.b = nn.Linear(LENGTH, LENGTH, bias=False)
        self.b.weight = self.a.weight

    def forward(self, value: Any) -> Any:
        return on_x(lambda x: self.a(self.b(self.a(x).tanh())), value)


class Counter(nn.Module):
    """Reads and changes a buffer in each forward, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, value: Any) -> Any:
        with torch.no_grad():
            self.scale.add_(0.25)
        scale = self.scale.clone()  # what autograd stores must not change
        return on_x(lambda x: x * scale, value)


class Noise(nn.Module):
    """Draws in training, in a way that no list of PyTorch's layers knows."""

    def forward(self, value: Any) -> Any:
        return on_x(lambda x: x + torch.randn_like(x) if self.training else x, value)


class Fork(nn.Module):
    """From a tensor to a tree: several tensors, one of them an integer one, None and a string."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        rows = torch.arange(len(x), device=x.device)
        return {"x": x + 0, "side": (x * 2, [rows, None]), "label": "fork", "mask": x.detach() > 0}


class Join(nn.Module):
    """From the tree of Fork back to a tensor."""

    def forward(self, tree: dict[str, Any]) -> Tensor:
        side, (rows, _) = tree["side"]
        return (tree["x"] - side + rows.view(-1, 1, 1)) * tree["mask"]


@skippable(stash=["skip"])
class Send(nn.Module):
    """Stashes "x", an integer tensor or None."""

    def __init__(self, what: str = "x") -> None:
        super().__init__()
        self.what = what

    def forward(self, value: Any) -> Any:
        x = value["x"] if isinstance(value, dict) else value
        numbers = torch.arange(len(x), device=x.device)
        yield stash("skip", {"x": x, "int": numbers, "none": None}[self.what])
        return value


@skippable(pop=["skip"])
class Receive(nn.Module):
    """Pops a skip, and uses it or not."""

    def __init__(self, used: bool = True) -> None:
        super().__init__()
        self.used = used

    def forward(self, value: Any) -> Any:
        skip = yield pop("skip")
        if skip is None or not self.used:
            return value
        if not skip.is_floating_point():
            skip = skip.view(-1, 1, 1)
        return on_x(lambda x: x + skip, value)


def linear_model(layers: int = 4, width: int = 3) -> nn.Sequential:
    """Linear layers, the plainest model there is."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def named_model() -> nn.Sequential:
    """Layers with names, one of them with buffers."""
    return nn.Sequential(
        OrderedDict(stem=nn.Linear(3, 3), act=nn.ReLU(), norm=nn.BatchNorm1d(3), fc=nn.Linear(3, 2))
    )


# --- the reference: the plain model, micro-batch by micro-batch ----------------------------------


def cut(tree: Any, chunks: int) -> list[Any]:
    """The micro-batches of a tree, by ``torch.chunk``; what is no tensor goes whole to each."""
    leaves, spec = pytree.tree_flatten(tree)
    pieces = [leaf.chunk(chunks) if isinstance(leaf, Tensor) else None for leaf in leaves]
    m = max((len(cut) for cut in pieces if cut is not None), default=1)
    rows = [
        [leaf if cut is None else cut[i] for leaf, cut in zip(leaves, pieces, strict=True)]
        for i in range(m)
    ]
    return [pytree.tree_unflatten(row, spec) for row in rows]


def concatenate(outputs: list[Any]) -> Any:
    """The outputs of the micro-batches as one tree."""
    return pytree.tree_map(
        lambda *row: torch.cat(row) if isinstance(row[0], Tensor) else row[0], *outputs
    )


def in_turn(model: nn.Module, chunks: int) -> Callable[[Any], Any]:
    """What ``Pipe(model, chunks=chunks)`` has to equal: each micro-batch goes back by itself."""

    def run(x: Any) -> Any:
        pieces = cut(x, chunks)
        return concatenate(by_itself([model(piece) for piece in pieces]))

    return run


def by_itself(outputs: list[Any]) -> list[Any]:
    """The outputs of micro-batches, so that each goes back by itself, the last one first."""
    rows = [pytree.tree_leaves(output) for output in outputs]
    pairs = [(leaf, i) for i, row in enumerate(rows) for leaf in row if is_wanted(leaf)]
    if not pairs:
        return outputs
    anchor = torch.empty(0, requires_grad=True)
    passed = iter(_OneByOne.apply(*zip(*pairs, strict=True), anchor))
    return pytree.tree_map(lambda leaf: next(passed) if is_wanted(leaf) else leaf, outputs)


def is_wanted(leaf: Any) -> bool:
    """Whether it gets a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def wanted_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree that get gradients."""
    return list(filter(is_wanted, pytree.tree_leaves(tree)))


class _OneByOne(torch.autograd.Function):
    """``apply(outputs, micro_batches, anchor)``."""

    @staticmethod
    def forward(ctx: Any, outputs: Sequence[Tensor], of: Sequence[int], anchor: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.outputs, ctx.of = outputs, of
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        nodes = nodes_of([output.grad_fn for output in ctx.outputs])
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        for i in sorted(set(ctx.of), reverse=True):
            pairs = [
                (output, grad)
                for output, k, grad in zip(ctx.outputs, ctx.of, grads, strict=True)
                if k == i and grad is not None
            ]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            for leaf in leaves:  # whose first gradient may be that of another one, too
                leaf.grad = None if leaf.grad is None else leaf.grad.clone()
        for leaf, grad in zip(leaves, before, strict=True):
            if grad is not None:
                leaf.grad = grad if leaf.grad is None else grad + leaf.grad
        return None, None, None


@dataclass
class Result:
    """All that one can see of a call, or of a training step."""

    output: Any
    input_grads: list[Tensor | None]
    parameter_grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    loss: Tensor | None = None


def seen(
    module: nn.Module, inputs: Any, output: Any, loss: Any = None, leaves: Any = None
) -> Result:
    """What a call left behind, as it is now; ``leaves`` by name, if they are no parameters."""

    def copied(tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), tree)

    leaves = dict(module.named_parameters()) if leaves is None else leaves
    return Result(
        copied(output),
        copied([getattr(leaf, "grad", None) for leaf in pytree.tree_leaves(inputs)]),
        copied({name: leaf.grad for name, leaf in leaves.items()}),
        copied(dict(module.named_buffers())),
        copied(loss),
    )


def loss_of(output: Any) -> Tensor | None:
    """A scalar with another weight for each element; None if nothing is differentiable."""
    terms = [
        (leaf * torch.linspace(-1, 1, leaf.numel(), device=leaf.device).view_as(leaf)).sum()
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return sum(terms[1:], terms[0]) if terms else None


def step(call: Callable[[Any], Any], module: nn.Module, x: Any) -> Result:
    """Forward and one backward of ``call``, whose parameters are those of ``module``."""
    x = pytree.tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad), x)
    module.zero_grad()
    output = call(x)
    loss = loss_of(output)
    if loss is not None:
        loss.backward()
    return seen(module, x, output)


assert_same_tree = assert_same


def assert_equals_plain(
    model: nn.Sequential, x: Any, balance: list[int] | None, *, steps: int = 1, **arguments: Any
) -> Pipe:
    """P1 for a model without random layers: the pipe against the plain model; returns the pipe."""
    plain = copy.deepcopy(model)
    pipe = Pipe(model, balance, **arguments)
    reference = in_turn(plain, arguments.get("chunks", 1))
    for _ in range(steps):
        assert_same(step(pipe, pipe, x), step(reference, plain, x))
    return pipe
