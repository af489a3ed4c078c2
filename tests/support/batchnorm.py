"""What the tests of deferred batch normalisation share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncpipe.layers.batchnorm import (
    MiniBatchStatistics,
    collect,
)


def run(module: nn.Module, *micro_batches: Tensor) -> list[Tensor]:
    """One mini-batch, committed."""
    stats = MiniBatchStatistics()
    outputs = []
    for x in micro_batches:
        with collect(stats):
            outputs.append(module(x))
    stats.commit()
    return outputs


def assert_same_buffers(a: nn.Module, b: nn.Module) -> None:
    left, right = dict(a.named_buffers()), dict(b.named_buffers())
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], msg=lambda m, k=key: f"{k}: {m}")


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
