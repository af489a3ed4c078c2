"""VGG-16: no skips, and nearly all of its parameters at the end."""

from __future__ import annotations

from torch import nn

CONVOLUTIONS = (2, 2, 3, 3, 3)  # in a row, before each pooling
WIDEST = 8  # the channels double up to so many times the first ones


def vgg16(
    num_classes: int = 1000,
    *,
    image_size: int = 224,
    channels: int = 64,
    hidden: int = 4096,
    dropout: float = 0.5,
) -> nn.Sequential:
    """VGG-16: from ``[N, 3, image_size, image_size]`` to ``[N, num_classes]``.

    Source: Simonyan and Zisserman 2014, "Very Deep Convolutional Networks for Large-Scale Image
    Recognition", https://arxiv.org/abs/1409.1556, Table 1, column D; dropout from section 3.1.
    Nothing had to be assumed. Batch normalization is younger than the paper.

    Args:
        num_classes: of the classifier.
        image_size: height and width, a multiple of 32.
        channels: of the first convolution.
        hidden: width of the two fully connected layers.
        dropout: behind each of these two.

    Returns:
        22 layers: each convolution with its ReLU is one, each pooling, each fully connected one.
    """
    layers: list[nn.Module] = []
    before = 3
    for stage, number in enumerate(CONVOLUTIONS):
        width = channels * min(2**stage, WIDEST)
        for _ in range(number):
            convolution = nn.Conv2d(before, width, 3, padding=1)
            layers.append(nn.Sequential(convolution, nn.ReLU(inplace=True)))
            before = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    before *= (image_size // 2 ** len(CONVOLUTIONS)) ** 2
    for _ in range(2):
        linear = nn.Linear(before, hidden)
        layers.append(nn.Sequential(linear, nn.ReLU(inplace=True), nn.Dropout(dropout)))
        before = hidden
    return nn.Sequential(*layers, nn.Linear(before, num_classes))
