"""Balances that are made of what was measured of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe.balance.by_cost import balance_by_size, balance_by_time, param_scale_of
from tests.balance.test_profile_measure import Clock, Takes, clock
from tests.support.models import Receive, Send

__all__ = ["clock"]  # a fixture


def best(costs: list[float], partitions: int) -> float:
    """The largest stage of the best cut, by trying them all."""
    ends = [(0, *cut, len(costs)) for cut in combinations(range(1, len(costs)), partitions - 1)]
    return min(max(sum(costs[a:b]) for a, b in pairwise(e)) for e in ends)


def test_a_balance_by_time(clock: Clock) -> None:
    seconds = [1.0, 5.0, 2.0, 2.0, 3.0, 1.0]
    model = nn.Sequential(*[Takes(clock, time) for time in seconds])
    balance = balance_by_time(3, model, torch.rand(2, 3), timeout=0.0)
    assert len(balance) == 3
    starts = [sum(balance[:j]) for j in range(4)]
    stages = [sum(seconds[a:b]) for a, b in pairwise(starts)]
    assert max(stages) == best(seconds, 3)


def test_a_balance_by_size() -> None:
    model = nn.Sequential(*[nn.Linear(30, 30) for _ in range(3)], nn.Linear(30, 90))
    assert balance_by_size(2, model, torch.rand(2, 30)) == [3, 1]
    # 200 samples of 30 floats for each layer outweigh its 930 parameters.
    assert balance_by_size(2, model, torch.rand(200, 30)) == [2, 2]
    assert balance_by_size(2, model, torch.rand(200, 30), chunks=100) == [3, 1]
    assert balance_by_size(2, model, torch.rand(200, 30), param_scale=100.0) == [3, 1]


def test_what_layers_share_weighs_once() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Flatten(), nn.Linear(3, 3))
    x = torch.rand(64, 3, requires_grad=True)
    assert balance_by_size(2, model, x) == [3, 1]


def test_the_optimizer_says_how_much_parameters_weigh() -> None:
    model = nn.Sequential(*[nn.Linear(30, 30) for _ in range(3)], nn.Linear(30, 90))
    x = torch.rand(40, 30)
    for scale in (2.0, 3.0, 4.0):
        make = {
            2.0: partial(torch.optim.SGD, lr=0.1),
            3.0: partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            4.0: torch.optim.Adam,
        }[scale]
        balance = balance_by_size(2, model, x, optimizer=make)
        assert balance == balance_by_size(2, model, x, param_scale=scale)
    with pytest.raises(ValueError, match="both given"):
        balance_by_size(2, model, x, param_scale=3.0, optimizer=torch.optim.Adam)


@pytest.mark.parametrize(
    ("optimizer", "scale"),
    [
        (partial(torch.optim.SGD, lr=0.1), 2),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 3),
        (torch.optim.RMSprop, 3),
        (torch.optim.Adagrad, 3),
        (torch.optim.Adam, 4),
        (torch.optim.AdamW, 4),
        (partial(torch.optim.Adam, amsgrad=True), 5),
    ],
)
def test_what_an_optimizer_keeps(optimizer: Any, scale: float) -> None:
    assert param_scale_of(optimizer) == scale


@pytest.mark.parametrize(
    "optimizer", [torch.optim.LBFGS, "adam", torch.optim.SGD([torch.ones(1)], lr=0.1), list]
)
def test_what_is_no_optimizer(optimizer: Any) -> None:
    with pytest.raises(TypeError, match="optimizer="):
        param_scale_of(optimizer)


@pytest.mark.parametrize("balance", [balance_by_time, balance_by_size])
def test_more_partitions_than_layers(balance: Callable[..., list[int]]) -> None:
    with pytest.raises(ValueError, match="4"):
        balance(4, nn.Sequential(nn.ReLU(), nn.ReLU()), torch.rand(2))


def test_a_skippable_model_can_be_balanced() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Send(), nn.Linear(3, 3), Receive())
    x = torch.rand(4, 3)
    assert sum(balance_by_time(2, model, x, timeout=0.0)) == 4
    sizes = balance_by_size(2, model, x, device="meta")
    assert sizes == balance_by_size(2, model, x)
