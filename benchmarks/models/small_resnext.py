"""A small ResNeXt for images of 8x8 pixels, and a simple way to cut it into even partitions.

Each residual block is flattened into five layers of one ``nn.Sequential``, so that a partition may
end inside of it. The identity then travels as a skip, from the layer that stashes it to the layer
that pops it::

    Fork -> 1x1 -> 3x3 grouped -> 1x1 -> Join
      '------------ identity -------------^

The architecture is that of "Aggregated Residual Transformations for Deep Neural Networks"
(https://arxiv.org/abs/1611.05431), shrunk for images of 8x8 pixels.
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.layers import conv
from syncpipe.skip import Namespace, pop, skippable, stash

__all__ = ["BLOCKS", "resnext"]

GROUPS = 8
# (channels in, channels inside, channels out, stride) of each residual block.
BLOCKS = (
    (64, 64, 128, 1),
    (128, 64, 128, 1),
    (128, 64, 128, 1),
    (128, 128, 256, 2),
    (256, 128, 256, 1),
    (256, 128, 256, 1),
)


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


def _block(channels_in: int, width: int, channels: int, stride: int) -> list[nn.Module]:
    same = channels_in == channels and stride == 1
    shortcut = nn.Identity() if same else conv(channels_in, channels, 1, stride=stride)
    block = Namespace()  # every block uses the name "identity"; this keeps them apart
    return [
        Fork().isolate(block),  # type: ignore[operator]  # a method that skippable adds
        conv(channels_in, width, 1).append(nn.ReLU()),
        conv(width, width, 3, stride=stride, groups=GROUPS).append(nn.ReLU()),
        conv(width, channels, 1),
        Join(shortcut).isolate(block),  # type: ignore[operator]
    ]


def resnext(classes: int = 10) -> nn.Sequential:
    """A ResNeXt of 20 convolutions in a row, for images of shape ``[N, 1, 8, 8]``."""
    layers: list[nn.Module] = [conv(1, BLOCKS[0][0], 3).append(nn.ReLU())]
    for block in BLOCKS:
        layers += _block(*block)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, pool, nn.Linear(BLOCKS[-1][2], classes))
