"""Models of several kinds whose layers are not alike, small enough for two cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.schedules.model import Problem
from syncpipe.skip import Namespace, pop, skippable, stash

OUT = 10


def mlp(quick: bool) -> Problem:
    """Linear maps of unequal widths."""
    torch.manual_seed(0)
    widths = [256, 1024, 512, 2048, 256, 1024, 1024, 128, OUT]
    if quick:
        widths = [8, 16, 8, OUT]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.GELU()]
    batch = 8 if quick else 512
    return Problem(nn.Sequential(*layers[:-1]), torch.randn(batch, widths[0]), _target(batch))


def conv_net(quick: bool) -> Problem:
    """Convolutions on 32 x 32 pixels that become fewer and wider."""
    torch.manual_seed(0)
    channels = [3, 32, 32, 64, 64, 128, 128]
    if quick:
        channels = [3, 4, 8]
    layers: list[nn.Module] = []
    for k, (a, b) in enumerate(pairwise(channels)):
        # Without biases: before a normalization their gradient would be rounding and no more.
        conv = nn.Conv2d(a, b, 3, stride=1 if k % 2 == 0 else 2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(b), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], OUT)]
    batch, pixels = (8, 8) if quick else (128, 32)
    return Problem(nn.Sequential(*layers), torch.randn(batch, 3, pixels, pixels), _target(batch))


class _MeanOverTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def transformer(quick: bool) -> Problem:
    """An encoder of equal layers, and a head; without dropout, so that gradients compare."""
    torch.manual_seed(0)
    width, blocks, batch, tokens = (8, 2, 8, 4) if quick else (128, 6, 32, 64)
    layers: list[nn.Module] = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(blocks)
    ]
    layers += [_MeanOverTokens(), nn.Linear(width, OUT)]
    return Problem(nn.Sequential(*layers), torch.randn(batch, tokens, width), _target(batch))


@skippable(stash=["skip"])
class _Down(nn.Module):
    """Narrower, and what came in is stashed."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.map = nn.Linear(a, b)

    def forward(self, x: Tensor) -> Iterator[Any]:
        yield stash("skip", x)
        return torch.nn.functional.gelu(self.map(x))


@skippable(pop=["skip"])
class _Up(nn.Module):
    """Wider again, and what was stashed is added."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.map = nn.Linear(a, b)

    def forward(self, x: Tensor) -> Iterator[Any]:
        return torch.nn.functional.gelu(self.map(x)) + (yield pop("skip"))


def u_net(quick: bool) -> Problem:
    """Linear maps that become narrower and then wider, with skips across, as in a U-Net."""
    torch.manual_seed(0)
    widths = [16, 8, 4] if quick else [1536, 1024, 512, 256]
    spaces = [Namespace() for _ in widths[1:]]
    borders = list(zip(pairwise(widths), spaces, strict=True))
    layers: list[nn.Module] = [_Down(a, b).isolate(ns) for (a, b), ns in borders]
    layers += [nn.Linear(widths[-1], widths[-1]), nn.GELU()]
    layers += [_Up(b, a).isolate(ns) for (a, b), ns in reversed(borders)]
    layers += [nn.Linear(widths[0], OUT)]
    batch = 8 if quick else 512
    return Problem(nn.Sequential(*layers), torch.randn(batch, widths[0]), _target(batch))


def _target(batch: int) -> Tensor:
    return torch.randn(batch, OUT)


MODELS: dict[str, Callable[[bool], Problem]] = {
    "MLP of unequal widths": mlp,
    "conv net": conv_net,
    "transformer encoder": transformer,
    "skips across a narrow middle": u_net,
}
