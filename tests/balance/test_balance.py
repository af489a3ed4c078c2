"""The cut against a plain dynamic program, and balances by name, by time and by size."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from syncpipe import Pipe
from syncpipe.balance import (
    balance_by_parameters,
    balance_by_size,
    balance_by_time,
    balance_by_type,
    balance_cost,
    balance_uniform,
    param_scale_of,
)
from syncpipe.pipe import layout
from tests.balance.test_measure import Clock, Takes, clock
from tests.support.models import Receive, Send, linear_model

__all__ = ["clock"]  # a fixture

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


# --- the cut ------------------------------------------------------------------------------------


def key_of(cost: Any, balance: list[int]) -> tuple[Fraction, Fraction]:
    """What a cut has to minimise: the largest stage, then how uneven all are."""
    borders = [0, *accumulate(balance)]
    stages = [sum(map(Fraction, cost[a:b]), Fraction(0)) for a, b in pairwise(borders)]
    return max(stages), sum((stage**2 for stage in stages), Fraction(0))


def best_key(cost: Any, n: int) -> tuple[Fraction, Fraction]:
    """The same of the best cut; its largest stage first, then the squares within that bound."""
    sums = [Fraction(0), *accumulate(map(Fraction, cost))]
    found: list[Fraction] = []
    for join in (max, lambda left, stage: left + stage**2):
        best = {0: Fraction(0)}
        for _ in range(n):
            ways: dict[int, list[Fraction]] = {}
            for a in best:
                for b in range(a + 1, len(sums)):
                    if not found or sums[b] - sums[a] <= found[0]:
                        ways.setdefault(b, []).append(join(best[a], sums[b] - sums[a]))
            best = {b: min(values) for b, values in ways.items()}
        found.append(best[len(cost)])
    return found[0], found[1]


numbers = st.one_of(
    st.integers(0, 5),
    st.sampled_from([0, 0, 1, 100, 0.1, 0.2, 0.3]),
    st.floats(0, 1e300, allow_subnormal=True),
)
short = st.lists(numbers, min_size=1, max_size=9)
long = st.lists(st.sampled_from([0, 1, 1, 2, 50]), min_size=30, max_size=45)


@given(st.one_of(short, long), st.data())
@example([1.0, 1e-300, 1e300], None)
@example([0, 0, 0, 0], None)
def test_the_cut_is_the_best_and_then_the_most_even(
    cost: list[float], data: st.DataObject | None
) -> None:
    n = 2 if data is None else data.draw(st.integers(1, min(12, len(cost))))
    balance = balance_cost(cost, n)
    assert (len(balance), sum(balance)) == (n, len(cost))
    assert min(balance) >= 1
    assert key_of(cost, balance) == best_key(cost, n)


@pytest.mark.parametrize(
    "cost", [[1.0] * 10_000, [(k * 7919 % 1009) / 7 for k in range(10_000)], [0] * 9_999 + [1]]
)
@pytest.mark.parametrize("n", [1, 64, 500])
def test_ten_thousand_layers(cost: list[float], n: int) -> None:
    balance = balance_cost(cost, n)
    assert (len(balance), sum(balance)) == (n, len(cost))
    assert min(balance) >= 1
    assert key_of(cost, balance)[0] <= Fraction(sum(map(Fraction, cost))) / n + Fraction(max(cost))


@pytest.mark.parametrize(
    ("cost", "balance"),
    [
        ([1, 0, 1, 0], [2, 2]),  # a layer that costs nothing stays with the one before it
        ([0, 0, 1, 1], [3, 1]),
        (torch.tensor([1.0, 1, 4, 2, 2]), [3, 2]),  # costs are any numbers
        ([torch.tensor(1), 1, Fraction(4), 2.0, 2], [3, 2]),
        ((number for number in (1, 1, 4, 2, 2)), [3, 2]),
    ],
)
def test_costs_of_any_kind(cost: Any, balance: list[int]) -> None:
    assert balance_cost(cost, 2) == balance


# --- by name ------------------------------------------------------------------------------------


def mixed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)
    )


def test_by_parameters_frozen_ones_do_not_count_and_tied_ones_count_once() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)])
    model[0].weight.requires_grad_(False)
    model[3].weight = model[4].weight = model[2].weight
    assert balance_by_parameters(2, model) == [2, 3]
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(10**5, 10**5) for _ in range(6)])
    assert balance_by_parameters(3, model) == [2, 2, 2]


@pytest.mark.parametrize(
    ("model", "how", "devices", "balance"),
    [
        (mixed(), "parameters", 2, [2, 4]),
        *((mixed(), f"type:{regex}", 2, [4, 2]) for regex in ("linear", "^Linear$", "LIN")),
        (linear_model(8), "uniform", 3, [3, 3, 2]),
        (linear_model(3), "uniform", 4, [1, 1, 1]),  # never more stages than layers
    ],
)
def test_a_pipe_finds_its_balance_with_a_stage_for_each_device(
    model: nn.Sequential, how: str, devices: int, balance: list[int]
) -> None:
    assert Pipe(model, how, devices=FOUR[:devices]).balance == balance
    pipe = Pipe(model, [len(model)], devices=FOUR[:devices])
    pipe.balance = how
    assert pipe.balance == balance


def test_one_accelerator_makes_one_stage_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.placement, "default_devices", lambda _: [torch.device("cpu")])
    with pytest.warns(UserWarning, match="balance='uniform' makes .* there is one: name more"):
        assert Pipe(linear_model(3), "uniform").balance == [3]


# --- by what was measured -----------------------------------------------------------------------


def test_a_balance_by_time(clock: Clock) -> None:
    seconds = [1.0, 5.0, 2.0, 2.0, 3.0, 1.0]
    model = nn.Sequential(*[Takes(clock, time) for time in seconds])
    balance = balance_by_time(3, model, torch.rand(2, 3), timeout=0.0)
    assert key_of(seconds, balance) == best_key(seconds, 3)


def test_a_balance_by_size() -> None:
    model = nn.Sequential(*[nn.Linear(30, 30) for _ in range(3)], nn.Linear(30, 90))
    assert balance_by_size(2, model, torch.rand(2, 30)) == [3, 1]
    # 200 samples of 30 floats for each layer outweigh its 930 parameters.
    large = torch.rand(200, 30)
    assert balance_by_size(2, model, large) == [2, 2]
    assert balance_by_size(2, model, large, chunks=100) == [3, 1]
    assert balance_by_size(2, model, large, param_scale=100.0) == [3, 1]
    adam = torch.optim.Adam
    assert balance_by_size(2, model, large, optimizer=adam) == balance_by_size(
        2, model, large, param_scale=4.0
    )
    shares = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Flatten(), nn.Linear(3, 3))
    assert balance_by_size(2, shares, torch.rand(64, 3, requires_grad=True)) == [3, 1]
    skips = nn.Sequential(nn.Linear(3, 3), Send(), nn.Linear(3, 3), Receive())
    x = torch.rand(4, 3)
    assert balance_by_size(2, skips, x, device="meta") == balance_by_size(2, skips, x)


@pytest.mark.parametrize(
    ("optimizer", "scale"),
    [
        (partial(torch.optim.SGD, lr=0.1), 2),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 3),
        (torch.optim.RMSprop, 3),
        (torch.optim.AdamW, 4),
        (partial(torch.optim.Adam, amsgrad=True), 5),
    ],
)
def test_an_optimizer_says_how_much_parameters_weigh(optimizer: Any, scale: float) -> None:
    assert param_scale_of(optimizer) == scale


# --- what has no balance ------------------------------------------------------------------------

STRINGS = "'parameters', 'uniform'.*'type:regex'"
TWO, X = linear_model(2), torch.rand(2, 3)
SGD = torch.optim.SGD([torch.ones(1)], lr=0.1)


@pytest.mark.parametrize(
    ("find", "arguments", "error", "message"),
    [
        (balance_cost, ([1, 2], 3), ValueError, r"partitions=3.*2 layers.*at most 2"),
        (balance_cost, ([1, 2], 0), ValueError, r"partitions=0.*at least 1"),
        (balance_cost, ([1, 2], 1.0), TypeError, r"partitions=1\.0"),
        (balance_cost, ([1, 2], True), TypeError, r"partitions=True"),
        (balance_cost, ([], 1), ValueError, r"0 layers"),
        (balance_cost, ([1, -2], 1), ValueError, r"cost\[1\]=-2.*not negative"),
        (balance_cost, ([1, float("nan")], 1), ValueError, r"cost\[1\]=nan"),
        (balance_cost, ([float("inf")], 1), ValueError, r"cost\[0\]=inf"),
        (balance_by_type, (1, mixed(), "conv"), ValueError,
         r"regex='conv' matches no layer.*Linear, ReLU, Tanh"),
        (balance_by_type, (1, mixed(), "("), ValueError, r"regex='\('"),
        (balance_by_parameters, (1, nn.Sequential(nn.ReLU(), nn.LazyLinear(3))), ValueError,
         r"layer '1' \(LazyLinear\) is lazy"),
        (balance_by_parameters, (1, nn.Linear(1, 1)), TypeError, "Linear"),
        (balance_uniform, (1, nn.Linear(1, 1)), TypeError, "Linear"),
        *((partial(Pipe, devices=FOUR), (TWO, how), ValueError, f"balance='{how}'.*{STRINGS}")
          for how in ("", "params", "type", "Uniform")),
        (Pipe, (TWO, "uniform"), ValueError, r"balance='uniform'.*no accelerator.*devices=\["),
        (partial(balance_by_time, device="meta"), (2, TWO, X), ValueError,
         r"on meta.*balance_by_size"),
        (balance_by_time, (4, TWO, X), ValueError, "at most 2"),
        (balance_by_size, (4, TWO, X), ValueError, "at most 2"),
        (partial(balance_by_size, chunks=0), (2, TWO, X), ValueError, "chunks=0"),
        (partial(balance_by_size, param_scale=-1.0), (2, TWO, X), ValueError, "param_scale=-1.0"),
        (partial(balance_by_size, param_scale=7.0, optimizer=torch.optim.Adam), (2, TWO, X),
         ValueError, "both given"),
        *((param_scale_of, (wrong,), TypeError, "optimizer=")
          for wrong in (torch.optim.LBFGS, "adam", SGD, list)),
    ],
)  # fmt: skip
def test_what_cannot_be_balanced_is_named(
    find: Callable[..., Any], arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find(*arguments)
