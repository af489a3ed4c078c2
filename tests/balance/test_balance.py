"""The exact cut against brute force, and balances that need no measuring."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from syncpipe import Pipe
from syncpipe.balance import (
    balance_by_parameters,
    balance_by_type,
    balance_cost,
    balance_uniform,
)
from tests.support.models import linear_model

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


# --- the cut ------------------------------------------------------------------------------------


def key_of(cost: list[float], borders: list[int]) -> tuple[Fraction, Fraction]:
    """What a cut has to minimise: the largest stage, then how uneven all are."""
    stages = [sum(map(Fraction, cost[a:b]), Fraction(0)) for a, b in pairwise(borders)]
    return max(stages), sum((stage**2 for stage in stages), Fraction(0))


def brute_force(cost: list[float], n: int) -> tuple[Fraction, Fraction]:
    layers = len(cost)
    return min(key_of(cost, [0, *cut, layers]) for cut in combinations(range(1, layers), n - 1))


numbers = st.one_of(
    st.integers(0, 5),
    st.sampled_from([0, 0, 1, 100]),
    st.sampled_from([0.1, 0.2, 0.3]),
    st.floats(0, 1e300, allow_subnormal=True),
)


@given(st.lists(numbers, min_size=1, max_size=9), st.data())
@example([1.0, 1e-300, 1e300], None)
@example([0, 0, 0, 0], None)
def test_the_cut_is_the_best_and_then_the_most_even(
    cost: list[float], data: st.DataObject | None
) -> None:
    n = 2 if data is None else data.draw(st.integers(1, len(cost)))
    balance = balance_cost(cost, n)
    assert len(balance) == n
    assert min(balance) >= 1
    borders = [0, *accumulate(balance)]
    assert borders[-1] == len(cost)
    assert key_of(cost, borders) == brute_force(cost, n)


@given(
    st.lists(st.sampled_from([0, 1, 1, 2, 50]), min_size=30, max_size=60),
    st.integers(2, 12),
)
def test_longer_chains_against_a_dynamic_program(cost: list[int], n: int) -> None:
    layers, sums = len(cost), [0, *accumulate(cost)]
    best: list[tuple[int, int] | None] = [(0, 0), *[None] * layers]
    largest = [0, *[sums[-1] + 1] * layers]
    for _ in range(n):
        largest = [
            min((max(largest[a], sums[b] - sums[a]) for a in range(b)), default=sums[-1] + 1)
            for b in range(layers + 1)
        ]
    bound = largest[-1]
    for _ in range(n):
        ways = [
            [
                (0, best[a][1] + (sums[b] - sums[a]) ** 2)
                for a in range(b)
                if best[a] is not None and sums[b] - sums[a] <= bound
            ]
            for b in range(layers + 1)
        ]
        best = [min(way) if way else None for way in ways]
    found = key_of(cost, [0, *accumulate(balance_cost(cost, n))])
    assert best[-1] is not None
    assert found == (bound, best[-1][1])


def test_a_layer_that_costs_nothing_stays_with_the_one_before_it() -> None:
    assert balance_cost([1, 0, 1, 0], 2) == [2, 2]
    assert balance_cost([0, 0, 1, 1], 2) == [3, 1]


@pytest.mark.parametrize(
    "cost", [[1.0] * 10_000, [(k * 7919 % 1009) / 7 for k in range(10_000)], [0] * 9_999 + [1]]
)
@pytest.mark.parametrize("n", [1, 64, 500])
def test_ten_thousand_layers(cost: list[float], n: int) -> None:
    balance = balance_cost(cost, n)
    borders = [0, *accumulate(balance)]
    assert len(balance) == n
    assert borders[-1] == len(cost)
    assert min(balance) >= 1
    mean, largest = Fraction(sum(map(Fraction, cost))) / n, Fraction(max(cost))
    assert key_of(cost, borders)[0] <= mean + largest


def test_one_giant_among_many_leaves_the_rest_even() -> None:
    cost = [1] * 300_000
    cost[100_000] = 10**7
    balance = balance_cost(cost, 64)
    assert balance[:-1].count(1) <= 1
    assert sum(balance) == len(cost)
    giant = balance.index(1)
    for rest in (balance[:giant], balance[giant + 1 :]):
        assert max(rest) - min(rest) <= 1


@pytest.mark.parametrize(
    "cost",
    [
        torch.tensor([1.0, 1, 4, 2, 2]),
        [torch.tensor(1), 1, Fraction(4), 2.0, 2],
        (number for number in (1, 1, 4, 2, 2)),
        torch.tensor([1, 1, 4, 2, 2], dtype=torch.uint8).numpy(),
        [10**400, 10**400, 4 * 10**400, 2 * 10**400, 2 * 10**400],
        [Decimal("0.1"), Decimal("0.1"), Decimal("0.4"), Decimal("0.2"), Decimal("0.2")],
    ],
)
def test_costs_are_any_numbers(cost: Any) -> None:
    assert balance_cost(cost, 2) == [3, 2]


@pytest.mark.parametrize(
    ("cost", "partitions", "message"),
    [
        ([1, 2], 3, r"partitions=3.*2 layers.*at most 2"),
        ([1, 2], 0, r"partitions=0.*at least 1"),
        ([1, 2], 1.0, r"partitions=1\.0"),
        ([1, 2], True, r"partitions=True"),
        ([], 1, r"0 layers"),
        ([1, -2], 1, r"cost\[1\]=-2.*not negative"),
        ([1, float("nan")], 1, r"cost\[1\]=nan"),
        ([float("inf")], 1, r"cost\[0\]=inf"),
    ],
)
def test_what_cannot_be_cut_is_named(cost: list[float], partitions: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_cost(cost, partitions)


# --- without measuring --------------------------------------------------------------------------


def mixed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)
    )


def test_by_parameters_the_largest_stage_has_as_few_as_can_be() -> None:
    assert balance_by_parameters(3, mixed()) == [2, 2, 2]


def test_frozen_parameters_do_not_count_and_tied_ones_count_once() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)])
    model[0].weight.requires_grad_(False)
    model[3].weight = model[4].weight = model[2].weight
    assert balance_by_parameters(2, model) == [2, 3]


def test_by_parameters_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(10**5, 10**5) for _ in range(6)])
    assert balance_by_parameters(3, model) == [2, 2, 2]


def test_lazy_parameters_are_refused_with_the_layer() -> None:
    with pytest.raises(ValueError, match=r"layer '1' \(LazyLinear\) is lazy"):
        balance_by_parameters(1, nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))


@given(st.integers(1, 30), st.data())
def test_uniform_gives_the_first_stages_one_layer_more(layers: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, layers))
    model = nn.Sequential(*[nn.ReLU() for _ in range(layers)])
    assert balance_uniform(n, model) == [layers // n + (j < layers % n) for j in range(n)]


@pytest.mark.parametrize("regex", ["linear", "^Linear$", "LIN"])
def test_by_type_stages_have_as_many_layers_that_match(regex: str) -> None:
    assert balance_by_type(2, mixed(), regex) == [4, 2]


@pytest.mark.parametrize(
    ("regex", "message"),
    [("conv", r"regex='conv' matches no layer.*Linear, ReLU, Tanh"), ("(", r"regex='\('")],
)
def test_a_regex_that_finds_nothing_is_refused_with_what_there_is(regex: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_by_type(2, mixed(), regex)


@pytest.mark.parametrize("balance", [balance_by_parameters, balance_uniform])
def test_only_a_sequential_has_a_balance(balance: object) -> None:
    with pytest.raises(TypeError, match="Linear"):
        balance(1, nn.Linear(1, 1))  # type: ignore[operator]


# --- Pipe(balance="...") ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "expected"),
    [("parameters", [2, 2, 2]), ("uniform", [2, 2, 2]), ("type:linear", [3, 2, 1])],
)
def test_a_pipe_finds_its_balance_with_a_stage_for_each_device(
    how: str, expected: list[int]
) -> None:
    pipe = Pipe(mixed(), how, devices=FOUR[:3])
    if how == "type:linear":
        expected = balance_by_type(3, mixed(), "linear")
    assert pipe.balance == expected


def test_it_can_be_set_later_and_never_makes_more_stages_than_layers() -> None:
    pipe = Pipe(linear_model(3), [3], devices=FOUR)
    pipe.balance = "uniform"
    assert pipe.balance == [1, 1, 1]
    x = torch.randn(2, 3)
    assert torch.equal(pipe(x), nn.Sequential(*pipe)(x))


@pytest.mark.parametrize("how", ["", "params", "type", "Uniform"])
def test_another_string_is_refused_with_those_that_there_are(how: str) -> None:
    with pytest.raises(
        ValueError, match=rf"balance='{how}'.*'parameters', 'uniform'.*'type:regex'"
    ):
        Pipe(linear_model(), how, devices=FOUR)


def test_without_devices_nobody_knows_how_many_stages() -> None:
    with pytest.raises(ValueError, match=r"balance='uniform'.*no accelerator.*devices=\["):
        Pipe(linear_model(), "uniform")
