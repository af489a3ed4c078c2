"""Small layers that several of the models share."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor, nn

from syncpipe.skip import skippable, stash


@skippable(stash=["skip"])
class Remember(nn.Module):
    """Sends its input past the layers that follow, to the layer that pops "skip", and passes it on.

    Give each of them a namespace, ``Remember().isolate(ns)``, the same as that of the other end.
    """

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("skip", x)
        return x


def conv(
    channels_in: int, channels: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution that keeps the size but for its stride, and batch normalisation."""
    convolution = nn.Conv2d(
        channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(channels))


class GlobalAverage(nn.Sequential):
    """The mean over the pixels: from ``[N, C, H, W]`` to ``[N, C]``."""

    def __init__(self) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten())
