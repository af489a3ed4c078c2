"""The U-Net with which torchgpipe was measured, of any depth and width."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.skip import Namespace, pop, skippable

from .layers import Remember


@skippable(pop=["skip"])
class Concatenate(nn.Module):
    """Puts the channels of the encoder before those that come from below."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        skip = yield pop("skip")
        return torch.cat([skip, x], dim=1)


def _conv(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
        nn.InstanceNorm2d(channels),
        nn.ReLU(inplace=True),
    )


def _convs(channels_in: int, inside: int, channels: int, number: int) -> list[nn.Module]:
    """So many convolutions in a row; all but the last one have ``inside`` channels."""
    widths = [channels_in, *[inside] * (number - 1), channels]
    return [_conv(widths[k], widths[k + 1]) for k in range(number)]


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    *,
    input_channels: int = 3,
    output_channels: int = 1,
) -> nn.Sequential:
    """U-Net (B, C): from ``[N, input_channels, H, W]`` to ``[N, output_channels, H, W]``.

    Source: Kim et al. 2020, "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
    Models", https://arxiv.org/abs/2004.09910, the section on experiments: five down-samplings and
    as many up-samplings, B convolutions in a row between them, C channels in the first one. The
    original is Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597, figure 1.

    The paper says no more than that. This is assumed, and gives all six published numbers of
    parameters to the last digit:

    - At height k from the top, the encoder has C * 2^k channels in all B convolutions. A stack
      more, at the bottom, doubles the channels, and its last convolution halves them again.
    - The decoder resizes (without parameters) and concatenates; its B convolutions at height k
      have C * 2^(k-1) channels: as many as come from below after the next resizing at height k-1.
      So the top of the decoder has C / 2.
    - All convolutions are 3x3 with padding, without a bias, each followed by a normalization and
      ReLU; one 1x1 convolution with a bias makes the output.
    - The normalization is InstanceNorm without parameters: its result does not depend on how a
      mini-batch is divided. BatchNorm, or biases, would not change the published digits either
      (both together would). Max-pooling, nearest neighbours, and no dropout, of which the numbers
      say nothing.

    Args:
        depth: number of down-samplings; height and width must be multiples of 2^depth, and more
            than that, since InstanceNorm refuses single pixels.
        num_convs: B, at least 1.
        base_channels: C, an even number.
        input_channels: of the image.
        output_channels: of the segmentation.

    Returns:
        (2 * depth + 1) * num_convs + 4 * depth + 1 layers: each convolution is one, and so is each
        Remember, pooling, resizing and concatenation. The skips are nested, one for each height.

    Raises:
        ValueError: numbers of which no such network can be made.
    """
    if num_convs < 1:
        raise ValueError(f"num_convs={num_convs}: each stack needs at least one convolution")
    if base_channels < 2 or base_channels % 2:
        raise ValueError(f"base_channels={base_channels}: half of them must be a whole number")
    channels = [base_channels * 2**k for k in range(depth)]
    heights = [Namespace() for _ in range(depth)]
    layers: list[nn.Module] = []
    before = input_channels
    for width, height in zip(channels, heights, strict=True):
        layers += _convs(before, width, width, num_convs)
        layers += [Remember().isolate(height), nn.MaxPool2d(2)]
        before = width
    layers += _convs(before, 2 * before, before, num_convs)
    for width, height in zip(reversed(channels), reversed(heights), strict=True):
        layers += [nn.Upsample(scale_factor=2), Concatenate().isolate(height)]
        layers += _convs(before + width, width // 2, width // 2, num_convs)
        before = width // 2
    return nn.Sequential(*layers, nn.Conv2d(before, output_channels, 1))
