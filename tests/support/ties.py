"""Models with ties: a weight in two layers, a module at two places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.models import CHECKPOINT_MODES

WORDS, WIDTH = 7, 4


class Block(nn.Module):
    """Uses its two weights once each, and reads a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inner(x)) * self.scale


class Twice(nn.Linear):
    """Uses its weight twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(super().forward(x)))


class Add(nn.Module):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(0.5)


MAKE = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "block": Block,
    "twice": lambda: Twice(WIDTH, WIDTH),
    "add_": Add,
    "norm": lambda: nn.LayerNorm(WIDTH),
}


@dataclass(frozen=True)
class TiedSpec:
    """A language model in words: an embedding, layers, and a head with the embedding's weight.

    Attributes:
        kinds: of the layers.
        ties: pairs of places in ``kinds`` and whether they are one module; the second layer gets
            the parameters of the first one, if they are of one kind.
        head: whether the head is tied to the embedding.
        frozen: whether the tied weight is.
    """

    kinds: tuple[str, ...]
    ties: tuple[tuple[int, int, bool], ...] = ()
    head: bool = True
    frozen: bool = False

    def build(self) -> nn.Sequential:
        """The same model every time."""
        torch.manual_seed(0)
        layers = [MAKE[kind]() for kind in self.kinds]
        for a, b, is_one in self.ties:
            first, second = sorted((a % len(layers), b % len(layers)))
            if self.kinds[first] != self.kinds[second]:
                continue
            if is_one:
                layers[second] = layers[first]
            else:
                tie(layers[first], layers[second])
        embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if self.head:
            head.weight = embedding.weight
        embedding.weight.requires_grad_(not self.frozen)
        return nn.Sequential(embedding, *layers, head)


def modes(layers: int) -> st.SearchStrategy[Any]:
    """Ways to re-materialize: by micro-batch, by layer, or to the host."""
    by_layer = st.lists(st.booleans(), min_size=layers, max_size=layers)
    return st.sampled_from([*CHECKPOINT_MODES, "offload"]) | by_layer


def tie(first: nn.Module, second: nn.Module) -> None:
    """Gives the second module the parameters and buffers of the first one."""
    for here, there in zip(first.modules(), second.modules(), strict=True):
        there._parameters.update(here._parameters)
        there._buffers.update(here._buffers)


def language_model(layers: int = 3) -> nn.Sequential:
    """The usual one: embedding, layers, and a head with the embedding's weight."""
    return TiedSpec(("block",) * layers).build()


def words(size: int, seed: int = 0) -> Tensor:
    """A mini-batch."""
    return torch.randint(WORDS, (size, 3), generator=torch.Generator().manual_seed(seed))
