"""The small ResNeXt of the benchmarks, and how it is cut."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models.small_resnext import BLOCKS, even_balance, layer_times, resnext

LAYERS = 3 + 5 * len(BLOCKS)


@pytest.mark.parametrize("partitions", range(1, len(BLOCKS) + 1))
def test_even_balance(partitions: int) -> None:
    balance = even_balance([1.0] * LAYERS, partitions)
    assert len(balance) == partitions
    assert sum(balance) == LAYERS
    # The best there is, plus one layer where that border would fall between two blocks.
    assert max(balance) <= -(-LAYERS // partitions) + 1


def test_layer_times_leave_the_model_alone() -> None:
    model = resnext()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    times = layer_times(model, torch.rand(4, 1, 8, 8), repeats=1)
    assert len(times) == len(model) == LAYERS
    assert all(0 < seconds < float("inf") for seconds in times)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
