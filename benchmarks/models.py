"""ResNet, ResNeXt and GPT-2 of the papers, as lists of layers that a pipe can cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


def _conv_relu(*args: Any, **kwargs: Any) -> nn.Sequential:
    return conv(*args, **kwargs).append(nn.ReLU(inplace=True))


class Block(nn.Module):
    """``relu(x + 1x1(3x3(1x1(x))))``, and x by way of a projection where its shape changes."""

    def __init__(
        self, channels_in: int, width: int, channels: int, stride: int, groups: int
    ) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv_relu(channels_in, width, 1),
            _conv_relu(width, width, 3, stride=stride, groups=groups),
            conv(width, channels, 1),
        )
        projected = channels_in != channels or stride != 1
        projection = conv(channels_in, channels, 1, stride=stride) if projected else nn.Identity()
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.residual(x) + self.projection(x))


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
        A layer for each block and 4 more.
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
            layers.append(Block(before, width, planes * 4, stride, groups))
            before = planes * 4
    return nn.Sequential(*layers, GlobalAverage(), nn.Linear(before, num_classes))


def resnext101_32x8d() -> nn.Sequential:
    """ResNeXt-101 with 32 groups of 8 channels, 37 layers, for images of 224x224 pixels.

    See :func:`resnet`. The paper has it as 32x4d and 64x4d; 32x8d is the one of Mahajan et al.
    2018, https://arxiv.org/abs/1805.00932, and of torchvision.
    """
    return resnet((3, 4, 23, 3), groups=32, group_width=8)


def small_resnext(classes: int = 10) -> nn.Sequential:
    """A ResNeXt of 20 convolutions in a row, for images of shape ``[N, 1, 8, 8]``."""
    layers: list[nn.Module] = [_conv_relu(1, 64, 3)]
    for channels_in, width, channels, stride in (
        (64, 64, 128, 1), (128, 64, 128, 1), (128, 64, 128, 1),
        (128, 128, 256, 2), (256, 128, 256, 1), (256, 128, 256, 1),
    ):  # fmt: skip
        layers.append(Block(channels_in, width, channels, stride, 8))
    return nn.Sequential(*layers, GlobalAverage(), nn.Linear(256, classes))


class Attention(nn.Module):
    """``x + attention(norm(x))``, causal, with several heads: ``[N, T, width]`` to the same shape.

    The residual stays inside: a cut there would have to send it as well as the output.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        heads = self.inward(self.norm(x)).view(samples, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.outward(mixed.transpose(1, 2).reshape(samples, length, width))


class FeedForward(nn.Module):
    """``x + outward(gelu(inward(norm(x))))``, position by position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class LearnedEmbedding(nn.Module):
    """Tokens ``[N, T]`` to vectors ``[N, T, width]``, with a parameter for each position."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)  # as in the published code
        nn.init.normal_(self.positions.weight, std=0.01)

    def forward(self, tokens: Tensor) -> Any:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)


def gpt2_layers(
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50_257,
    length: int = 1024,
) -> list[partial[nn.Module]]:
    """What makes each layer of :func:`gpt2_small`."""
    head = partial(nn.Linear, width, vocabulary, bias=False)
    blocks = [partial(Attention, width, heads), partial(FeedForward, width)] * layers
    first, norm = partial(LearnedEmbedding, vocabulary, width, length), partial(nn.LayerNorm, width)
    return [first, *blocks, norm, head]


def gpt2_small(**sizes: Any) -> nn.Sequential:
    """GPT-2 small: from tokens ``[N, T]`` to logits ``[N, T, vocabulary]``.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3
    and Table 2, first row (12 layers, 768). No dropout, as in the published code
    (https://github.com/openai/gpt-2), whose head has the table of the embedding. Here it has one of
    its own, 38.60 M parameters more, so that nothing large travels.

    Args:
        sizes: ``layers``, ``width``, ``heads``, ``vocabulary``, ``length``.

    Returns:
        2 * layers + 3 layers.
    """
    return nn.Sequential(*[make() for make in gpt2_layers(**sizes)])
