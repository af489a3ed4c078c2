"""``benchmarks.models``: the sizes that were published, and models that a pipe can cut anywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import gpt2_small, resnet, resnext101_32x8d
from syncpipe.skip import verify_skippables
from syncpipe.skip.layout import inspect_layout
from tests.support.models import assert_equals_plain

#: How to build it, its parameters as published (by torchvision and Radford et al. 2019), an input
#: of one sample and the shape of the output without that.
PUBLISHED: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], tuple[int, ...]]] = {
    "ResNet-101": (partial(resnet, (3, 4, 23, 3)), 44_549_160, (3, 224, 224), (1000,)),
    "ResNeXt-101 32x8d": (resnext101_32x8d, 88_791_336, (3, 224, 224), (1000,)),
    "GPT-2 small": (gpt2_small, 124_439_808 + 50_257 * 768, (), (1024, 50_257)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters_is_the_published_one_and_it_runs_without_values(name):
    build, published, sample, output = PUBLISHED[name]
    with torch.device("meta"):
        model = build()
        x = torch.randn(1, *sample) if sample else torch.randint(50_257, (1, 1024))
    assert sum(p.numel() for p in model.parameters()) == published
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
    "gpt2": (lambda: gpt2_small(layers=2, **TEXT), words, [2, 3, 2], 0),
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
