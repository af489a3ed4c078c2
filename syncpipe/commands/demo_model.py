"""The demo's model: a small ResNet, flattened so that a stage may end inside of a residual block.

The identity then travels as a skip, from the layer that stashes it to the layer that pops it::

    Fork -> 3x3 -> 3x3 -> Join
      '----- identity -----^

The blocks are those of "Deep Residual Learning for Image Recognition"
(https://arxiv.org/abs/1512.03385), shrunk for images of 8x8 pixels.
"""

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.skip import Namespace, pop, skippable, stash

__all__ = ["BLOCKS", "MOST_STAGES", "crossing_skips", "resnet"]

# (channels in, channels out, stride) of each residual block.
BLOCKS = ((32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1))
LAYERS_PER_BLOCK = 4
# With more of them, what is left for a stage is not worth a hand-off.
MOST_STAGES = 2 * len(BLOCKS)


@skippable(stash=["identity"])
class Fork(nn.Module):
    """Opens a residual block: puts its input aside and passes it on."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("identity", x)
        return x


@skippable(pop=["identity"])
class Join(nn.Module):
    """Closes a residual block: adds what :class:`Fork` put aside."""

    def __init__(self, shortcut: nn.Module) -> None:
        super().__init__()
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        identity = yield pop("identity")
        return torch.relu(x + self.shortcut(identity))


def _conv(channels_in: int, channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels))


def _block(channels_in: int, channels: int, stride: int) -> list[nn.Module]:
    same = channels_in == channels and stride == 1
    shortcut = nn.Identity() if same else _conv(channels_in, channels, 1, stride)
    block = Namespace()  # every block uses the name "identity"; this keeps them apart
    return [
        Fork().isolate(block),  # type: ignore[operator]  # a method that skippable adds
        _conv(channels_in, channels, 3, stride).append(nn.ReLU()),
        _conv(channels, channels, 3),
        Join(shortcut).isolate(block),  # type: ignore[operator]
    ]


def resnet(classes: int = 10) -> nn.Sequential:
    """A ResNet of 9 convolutions in a row, for images of shape ``[N, 1, 8, 8]``."""
    layers: list[nn.Module] = [_conv(1, BLOCKS[0][0], 3).append(nn.ReLU())]
    for block in BLOCKS:
        layers += _block(*block)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, pool, nn.Linear(BLOCKS[-1][1], classes))


def crossing_skips(balance: Sequence[int]) -> int:
    """How many residual connections have their two ends in different stages."""
    stage = [j for j, layers in enumerate(balance) for _ in range(layers)]
    forks = range(1, 1 + LAYERS_PER_BLOCK * len(BLOCKS), LAYERS_PER_BLOCK)
    return sum(stage[k] != stage[k + LAYERS_PER_BLOCK - 1] for k in forks)
