"""ResNet and ResNeXt with bottleneck blocks, each block opened up into five layers.

The identity of a block travels as a skip, so that a partition may end inside of the block::

    Remember -> 1x1 -> 3x3 -> 1x1 -> Add
        '--------- identity --------^

That is also how torchgpipe cut ResNet-101 (Kim et al. 2020, https://arxiv.org/abs/2004.09910).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.skip import Namespace, pop, skippable

from .layers import GlobalAverage, Remember, conv

EXPANSION = 4  # a block puts out so many times the channels of its stage


@skippable(pop=["skip"])
class Add(nn.Module):
    """Ends a block: adds its input, by way of the projection where the shape has changed.

    The projection belongs to this end, so that what travels is what all blocks send: their input.
    """

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        identity = yield pop("skip")
        return torch.relu_(x + self.projection(identity))


def _conv_relu(*args: Any, **kwargs: Any) -> nn.Sequential:
    return conv(*args, **kwargs).append(nn.ReLU(inplace=True))


def _block(
    channels_in: int, width: int, channels: int, stride: int, groups: int
) -> list[nn.Module]:
    projected = channels_in != channels or stride != 1
    projection = conv(channels_in, channels, 1, stride=stride) if projected else nn.Identity()
    block = Namespace()
    return [
        Remember().isolate(block),
        _conv_relu(channels_in, width, 1),
        _conv_relu(width, width, 3, stride=stride, groups=groups),
        conv(width, channels, 1),
        Add(projection).isolate(block),
    ]


def resnet(
    blocks: Sequence[int],
    *,
    channels: int = 64,
    groups: int = 1,
    group_width: int = 64,
    num_classes: int = 1000,
) -> nn.Sequential:
    """A residual network of bottleneck blocks: from ``[N, 3, H, W]`` to ``[N, num_classes]``.

    Source: He et al. 2015, "Deep Residual Learning for Image Recognition",
    https://arxiv.org/abs/1512.03385, Table 1 and figure 5 (right); with groups, Xie et al. 2016,
    "Aggregated Residual Transformations for Deep Neural Networks",
    https://arxiv.org/abs/1611.05431, figure 3c.

    Assumed: the 3x3 convolution of a block has the stride, as in torchvision. (He et al. give it
    to the first 1x1; the number of parameters is the same.)

    Args:
        blocks: how many blocks each stage has. Each stage but the first halves height and width
            and doubles the channels.
        channels: that the stem puts out.
        groups: of the 3x3 convolutions.
        group_width: channels in each of the groups, where ``channels`` is 64 and for the first
            stage; with one group, 64 makes it a ResNet.
        num_classes: of the classifier.

    Returns:
        5 layers for each block and 4 more, the smallest of them a Remember.
    """
    layers: list[nn.Module] = [
        _conv_relu(3, channels, 7, stride=2),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    before = channels
    for stage, number in enumerate(blocks):
        planes = channels * 2**stage
        width = planes * groups * group_width // 64
        for k in range(number):
            stride = 2 if stage > 0 and k == 0 else 1
            layers += _block(before, width, planes * EXPANSION, stride, groups)
            before = planes * EXPANSION
    return nn.Sequential(*layers, GlobalAverage(), nn.Linear(before, num_classes))


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    """ResNet-101, 169 layers, for images of 224x224 pixels; see :func:`resnet`."""
    return resnet((3, 4, 23, 3), num_classes=num_classes)


def resnext101_32x8d(num_classes: int = 1000) -> nn.Sequential:
    """ResNeXt-101 with 32 groups of 8 channels, 169 layers, for images of 224x224 pixels.

    See :func:`resnet`. The paper has it as 32x4d and 64x4d; 32x8d is the one of Mahajan et al.
    2018, https://arxiv.org/abs/1805.00932, and of torchvision.
    """
    return resnet((3, 4, 23, 3), groups=32, group_width=8, num_classes=num_classes)
