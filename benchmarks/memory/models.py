"""Two models as lists of layers yet to be made: GPT-2 small and ResNet-50, a block for a layer.

    whole = nn.Sequential(*[make() for make in entry.layers])

So the same list makes the model on the host, on ``meta``, or layer by layer on its device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.gpt2 import LearnedEmbedding
from benchmarks.models.layers import GlobalAverage
from benchmarks.models.transformer import Attention, FeedForward
from syncpipe import Selective

__all__ = ["ENTRIES", "Entry"]

OPS = torch.ops.aten


class Bottleneck(nn.Module):
    """A residual block of three convolutions (He et al. 2015, figure 5, right).

    Args:
        channels_in: of the input.
        planes: of the 3x3 convolution; the block puts out four times as many.
        stride: of the 3x3 convolution.
    """

    def __init__(self, channels_in: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.projection: nn.Module = nn.Identity()
        if stride != 1 or channels_in != 4 * planes:
            convolution = nn.Conv2d(channels_in, 4 * planes, 1, stride, bias=False)
            self.projection = nn.Sequential(convolution, nn.BatchNorm2d(4 * planes))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.bn1(self.conv1(x)))
        y = torch.relu_(self.bn2(self.conv2(y)))
        return torch.relu_(self.bn3(self.conv3(y)) + self.projection(x))


class Stem(nn.Module):
    """The first convolution, and what halves the picture once more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.bn(self.conv(x)))
        return nn.functional.max_pool2d(y, 3, 2, 1)


@dataclass(frozen=True)
class Entry:
    """A model, and how it is trained.

    Attributes:
        name: in the report.
        layers: what makes each layer.
        batch: a mini-batch on the host, and its target.
        sample: the mini-batch in words.
        balance: the cut.
        blocks: the types of the layers that are computed again by layer.
        save: what a selective policy saves.
    """

    name: str
    layers: list[Callable[[], nn.Module]]
    batch: Callable[[], tuple[Tensor, Tensor]]
    sample: str
    balance: tuple[int, int]
    blocks: tuple[type[nn.Module], ...]
    save: Selective

    def build(self) -> nn.Sequential:
        """The model, on the default device."""
        return nn.Sequential(*[make() for make in self.layers])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy over the last dimension."""
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

    def modes(self) -> dict[str, Any]:
        """What ``checkpoint`` may be, by a name for the report."""
        return {
            "never": "never",
            "always": "always",
            "by layer": lambda layer: isinstance(layer, self.blocks),
            "selective": self.save,
            "offload": "offload",
        }


def gpt2(quick: bool) -> Entry:
    """GPT-2 small with a head of its own; a small one of its kind to see that it runs."""
    depth, width, heads, words, length = (2, 64, 2, 512, 64) if quick else (12, 768, 12, 50257, 128)
    block = [
        partial(Attention, width, heads, True),
        partial(FeedForward, width, 4 * width, partial(nn.GELU, approximate="tanh")),
    ]
    layers: list[Any] = [
        partial(LearnedEmbedding, words, width, 1024),
        *(block * depth),
        partial(nn.LayerNorm, width),
        partial(nn.Linear, width, words, bias=False),
    ]
    rows = 4

    def batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(words, (rows, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    cut = 1 + 2 * depth * 2 // 3
    return Entry(
        "GPT-2 small", layers, batch, f"{rows} sequences of {length} tokens",
        (cut, len(layers) - cut), (Attention, FeedForward),
        Selective([OPS.mm.default, OPS.addmm.default, OPS.bmm.default]),
    )  # fmt: skip


def resnet50(quick: bool) -> Entry:
    """ResNet-50; the first two blocks of each stage to see that it runs."""
    layers: list[Any] = [Stem]
    channels = 64
    for stage, count in enumerate((1, 1, 1, 1) if quick else (3, 4, 6, 3)):
        planes = 64 * 2**stage
        for k in range(count):
            layers.append(partial(Bottleneck, channels, planes, 2 if stage and not k else 1))
            channels = 4 * planes
    layers += [GlobalAverage, partial(nn.Linear, channels, 1000)]
    rows, side = (4, 64) if quick else (8, 224)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 3, side, side), torch.randint(1000, (rows,))

    cut = 3 if quick else 5
    return Entry(
        "ResNet-50", layers, batch, f"{rows} pictures of {side} x {side}",
        (cut, len(layers) - cut), (Bottleneck, Stem), Selective([OPS.convolution.default]),
    )  # fmt: skip


#: By name, what makes an entry.
ENTRIES: dict[str, Callable[[bool], Entry]] = {"gpt2": gpt2, "resnet50": resnet50}
