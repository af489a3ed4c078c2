"""What several tests need: small models, the reference run, and the bitwise comparison with it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncpipe import Pipe
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


class Known(Inner):
    """Around a layer of PyTorch's own, which says itself whether it writes into its input."""

    __module__ = "torch.nn.modules.inner"


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
    """Draws in training, twice and in a way that no list of PyTorch's layers knows."""

    def forward(self, value: Any) -> Any:
        return on_x(self._noisy, value) if self.training else value

    @staticmethod
    def _noisy(x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * torch.rand_like(x)


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
    """Stashes "x", an integer tensor, None, or a buffer that its next forward changes in place."""

    def __init__(self, what: str = "x") -> None:
        super().__init__()
        self.what = what
        if what == "kept":
            self.register_buffer("kept", torch.zeros(LENGTH))

    def forward(self, value: Any) -> Any:
        x = value["x"] if isinstance(value, dict) else value
        if self.what == "int":
            x = torch.arange(len(x), device=x.device)
        elif self.what == "kept":
            x = self.kept.copy_(x.detach().mean((0, 1)))
        yield stash("skip", None if self.what == "none" else x)
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
        if isinstance(skip, Tensor) and not skip.is_floating_point():
            skip = skip.view(-1, 1, 1)
        return on_x(lambda x: x + skip, value)


def linear_model(layers: int = 4, width: int = 3) -> nn.Sequential:
    """Linear layers, the plainest model there is."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def tie(first: nn.Module, second: nn.Module) -> None:
    """Gives the second module the parameters and buffers of the first one."""
    for here, there in zip(first.modules(), second.modules(), strict=True):
        there._parameters.update(here._parameters)
        there._buffers.update(here._buffers)


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
    """What ``Pipe(model, chunks=chunks)`` has to equal.

    Autograd takes the last micro-batch back first. To the last bit it is the same for what a
    micro-batch uses once.
    """
    return lambda x: concatenate([model(piece) for piece in cut(x, chunks)])


def is_wanted(leaf: Any) -> bool:
    """Whether it gets a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def wanted_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree that get gradients."""
    return list(filter(is_wanted, pytree.tree_leaves(tree)))


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


def weigh(output: Any, target: Any = None) -> Tensor:
    """A loss of any tree, with another weight for each element; the target scales it."""
    terms = [
        (leaf * torch.linspace(-1, 1, leaf.numel(), device=leaf.device).view_as(leaf)).sum()
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    loss: Tensor = sum(terms[1:], terms[0])
    return loss if target is None else loss * target["scale"].mean()


def step(call: Callable[[Any], Any], module: nn.Module, x: Any) -> Result:
    """Forward and one backward of ``call``, whose parameters are those of ``module``."""
    x = pytree.tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad), x)
    module.zero_grad()
    output = call(x)
    if wanted_in(output):
        weigh(output).backward()
    return seen(module, x, output)


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
