"""``benchmarks.models``: the sizes that were published, and models that a pipe can cut anywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import gpt2_small, resnet, resnext101_32x8d, unet
from syncpipe.skip import verify_skippables
from syncpipe.skip.layout import inspect_layout
from tests.support.models import assert_equals_plain

#: How to build it, its parameters as published (by torchvision, Radford et al. 2019, Kim et al.
#: 2020 and Huang et al. 2019), an input of one sample and the shape of the output without that.
PUBLISHED: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], tuple[int, ...]]] = {
    "ResNet-101": (partial(resnet, (3, 4, 23, 3)), "44.549160 M", (3, 224, 224), (1000,)),
    "ResNeXt-101 32x8d": (resnext101_32x8d, "88.791336 M", (3, 224, 224), (1000,)),
    "GPT-2 small": (gpt2_small, "163.04 M", (), (1024, 50_257)),
    "GPT-2 small, tied": (partial(gpt2_small, tied=True), "124.439808 M", (), (1024, 50_257)),
    **{
        f"U-Net {size}": (partial(unet, 5, *size), count, (3, 192, 192), (1, 192, 192))
        for size, count in {
            (5, 64): "232.7 M", (6, 72): "362.2 M", (11, 128): "2.21 B", (24, 160): "7.80 B",
            (48, 160): "15.82 B",
        }.items()
    },
}  # fmt: skip
LONG = {"U-Net (48, 160)"}  # with nothing in them that smaller ones lack


# -- the published sizes --------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters_is_the_published_one_and_it_runs_without_values(name):
    build, published, sample, output = PUBLISHED[name]
    with torch.device("meta"):
        model = build()
        x = torch.randn(1, *sample) if sample else torch.randint(50_257, (1, 1024))
    digits, unit = published.split()
    count = sum(p.numel() for p in model.parameters()) / {"M": 1e6, "B": 1e9}[unit]
    assert f"{count:.{len(digits.partition('.')[2])}f}" == digits
    if name not in LONG:
        verify_skippables(model)
        assert model(x).shape == (1, *output)


# -- small ones, in a pipe ------------------------------------------------------------------------


def pictures(side: int) -> Tensor:
    return torch.randn(4, 3, side, side)


def words() -> Tensor:
    return torch.randint(11, (4, 6))


TEXT = {"width": 8, "heads": 2, "vocabulary": 11, "length": 6}
# The model, its input, a balance with cuts in awkward places, the skips that pass over them.
SMALL: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor], list[int], int]] = {
    "resnet": (
        lambda: resnet((1, 2), channels=8, num_classes=5), lambda: pictures(16), [4, 6, 9], 2
    ),
    "resnext": (
        lambda: resnet((1, 1), channels=8, groups=4, group_width=16, num_classes=5),
        lambda: pictures(16), [5, 3, 6], 2,
    ),
    "unet": (lambda: unet(2, 2, 4), lambda: pictures(16), [5, 6, 8], 2),
    "gpt2": (lambda: gpt2_small(layers=2, **TEXT), words, [2, 3, 2], 0),
    "gpt2_tied": (lambda: gpt2_small(tied=True, layers=2, **TEXT), words, [2, 3, 2], 1),
}  # fmt: skip


@pytest.mark.parametrize("family", SMALL)
def test_in_a_pipe_it_computes_the_same_bits(family):
    build, sample, balance, crossing = SMALL[family]
    torch.manual_seed(0)
    pipe = assert_equals_plain(
        build(), sample(), balance, steps=2, chunks=2, devices=[f"cpu:{j}" for j in range(3)]
    )
    outgoing = inspect_layout([list(partition) for partition in pipe.partitions]).outgoing
    assert sum(map(len, outgoing)) == crossing
