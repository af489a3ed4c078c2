"""Layers with a fault each, and pipes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.skip import skippable, stash
from tests.support.running import Do

WIDTH = 6


class OwnGenerator(nn.Module):
    """Draws, but not from PyTorch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.source).to(x.device)


class Counter(nn.Module):
    """Counts its forwards in an attribute, and goes by it."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class Memory(nn.Module):
    """Keeps what it saw in containers and objects of all kinds."""

    class Box:
        value = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = [1]
        self.table = {"n": [0], "mean": torch.zeros(WIDTH)}
        self.box = self.Box()
        self.names = {"a"}
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.later: Tensor | None = None
        self.spare = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.spare.requires_grad_(False)
        self.seen.append(len(x))
        self.table["n"][0] += 1
        self.table["mean"] += x.detach().mean(0).to("cpu")
        self.box.value += 1
        self.names.add(f"b{len(self.seen)}")
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        self.later = x.detach()
        self.new = 1
        return x * 1


class TwoBiases(nn.Module):
    """For a single sample both gradients are one tensor, in the very same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a.view(1, -1) + self.b.view(1, -1)


def scale() -> nn.Module:
    """Writes into what it is given."""
    return Do(lambda x: x.mul_(2))


@skippable(stash=["skip"])
class Send(nn.Module):
    """Stashes its own output, not a copy of it."""

    def forward(self, x: Tensor) -> Any:
        x = x * 2
        yield stash("skip", x)
        return x


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def pipe_of(*layers: Any, balance: Sequence[int] = (), **options: Any) -> Pipe:
    """A pipe on CPU workers: by default of three layers, two, the second of which has the last."""
    layers = layers or (linear(), linear(), linear())
    balance = balance or [2, len(layers) - 2]
    options = {"devices": [f"cpu:{j}" for j in range(len(balance))], "chunks": 4, **options}
    return Pipe(list(layers), balance, **options)


def batch(size: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    return torch.randn(size, WIDTH), torch.randint(0, WIDTH, (size,))
