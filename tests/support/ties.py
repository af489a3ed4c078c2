"""A model with a tie: a weight in two layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


def tie(first: nn.Module, second: nn.Module) -> None:
    """Gives the second module the parameters and buffers of the first one."""
    for here, there in zip(first.modules(), second.modules(), strict=True):
        there._parameters.update(here._parameters)
        there._buffers.update(here._buffers)


def language_model(layers: int = 3) -> nn.Sequential:
    """The same one every time: embedding, layers, and a head with the embedding's weight."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, *[Block() for _ in range(layers)], head)


def words(size: int, seed: int = 0) -> Tensor:
    """A mini-batch."""
    return torch.randint(WORDS, (size, 3), generator=torch.Generator().manual_seed(seed))
