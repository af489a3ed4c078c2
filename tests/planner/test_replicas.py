"""PipeDream's planner against every configuration there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import syncpipe
from syncpipe import Pipe
from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.options import consecutive
from syncpipe.planner.chain import Chain, costs_of
from syncpipe.planner.machine import Machine
from syncpipe.planner.replicas import replicated, runnable
from syncpipe.schedules import build, simulate

Stages = tuple[tuple[int, int, int], ...]


def profile(
    times: list[float],
    outputs: list[float],
    weights: list[int],
    skips: tuple[SkipProfile, ...] = (),
    frozen: int = 0,
) -> Profile:
    """Layers of so many seconds (a third of it forward), bytes out and bytes of parameters."""
    return Profile(
        tuple(
            LayerProfile(
                f"layer{k}", {1: t / 3}, {1: t * 2 / 3}, {1: a}, {1: 0}, {}, w, min(w, frozen)
            )
            for k, (t, a, w) in enumerate(zip(times, outputs, weights, strict=True))
        ),
        skips,
    )


def every(layers: int, machines: int) -> Iterator[Stages]:
    for n in range(1, min(layers, machines) + 1):
        for ends in combinations(range(1, layers), n - 1):
            for used in combinations(range(1, machines), n - 1):
                cuts, shares = pairwise((0, *ends, layers)), pairwise((0, *used, machines))
                yield tuple((i, j, b - a) for (i, j), (a, b) in zip(cuts, shares, strict=True))


def time_of(stages: Stages, profile: Profile, bandwidth: float) -> float:
    """The formula, written down once more."""
    worst = 0.0
    for first, last, m in stages:
        layers = profile.layers[first:last]
        computing = sum(layer.forward[1] + layer.backward[1] for layer in layers)
        exchange = 4 * (m - 1) * sum(layer.parameter_bytes for layer in layers) / (m * bandwidth)
        worst = max(worst, computing / m, exchange / m)
        if first:
            worst = max(worst, 2 * profile.layers[first - 1].output_bytes[1] / (bandwidth * m))
    return worst


numbers = st.integers(0, 20)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    layers = draw(st.integers(1, 6))
    row = st.lists(numbers, min_size=layers, max_size=layers)
    return profile(draw(row), draw(row), draw(row))


@given(profiles(), st.integers(1, 5), st.sampled_from([0.5, 1.0, 3.0, 10.0, math.inf]))
def test_nothing_is_faster_with_fewer_stages_or_fewer_bytes(
    profile: Profile, machines: int, bandwidth: float
) -> None:
    def sent(stages: Stages) -> float:
        return sum(profile.layers[first - 1].output_bytes[1] for first, _, _ in stages[1:])

    def rank(stages: Stages) -> tuple[float, int, float]:
        return float(f"{time_of(stages, profile, bandwidth):.10e}"), len(stages), sent(stages)

    found, count = replicated(profile, machines, bandwidth), len(profile.layers)
    assert rank(found.stages) == min(map(rank, every(count, machines)))
    assert [found.time, found.times[-1]] == pytest.approx(
        [time_of(found.stages, profile, bandwidth)] * 2
    )
    assert found.data_parallel == pytest.approx(
        time_of(((0, count, machines),), profile, bandwidth)
    )
    assert found.one_machine == pytest.approx(time_of(((0, count, 1),), profile, bandwidth))
    assert found.machines == machines
    str(found)


def vgg_like() -> Profile:
    """Work in front, parameters at the end, and little on the way between the two."""
    return profile([40, 40, 10], [100, 1, 1], [1, 1, 400])


def test_the_parameters_stay_on_one_machine() -> None:
    found = replicated(vgg_like(), 4, 10.0)
    assert found.configuration == "3-1"
    assert found.stages == ((0, 2, 3), (2, 3, 1))
    assert found.synchronization[1] == 0
    assert found.speedup == pytest.approx(found.data_parallel / (80 / 3))
    free = replicated(vgg_like(), 8, math.inf)  # gradients take no time
    assert (free.configuration, free.speedup) == ("8", 1)
    assert free.time == pytest.approx(90 / 8)


def test_frozen_parameters_need_no_exchange() -> None:
    found = replicated(profile([8], [1], [100], frozen=100), 2, 1.0)
    assert found.synchronization == (0,)


def test_a_skip_counts_where_it_crosses_a_cut() -> None:
    skip = SkipProfile("s", 0, 1, {1: 400})
    plain, skipped = (
        replicated(profile([10, 10], [1, 1], [100, 100], skips), 2, 10.0) for skips in ((), (skip,))
    )
    assert plain.configuration == "1-1"
    assert skipped.configuration == "2"


def test_the_size_of_the_mini_batch() -> None:
    layers = [LayerProfile("a", {2: 1, 4: 2}, {2: 2, 4: 4}, {2: 1, 4: 2}, {2: 0, 4: 0})]
    assert replicated(Profile(tuple(layers)), 1, 1.0).time == pytest.approx(6)
    assert replicated(Profile(tuple(layers)), 1, 1.0, samples=3).time == pytest.approx(4.5)
    entry = {"name": "a", "forward_ms": 1, "backward_ms": 2, "activation_bytes": 1}
    whole = Profile.from_list([{**entry, "parameter_bytes": 1, "stored_bytes": 1}] * 3)
    assert replicated(whole, 1, 1.0).samples is None
    assert replicated(whole, 1, 1.0, samples=32).time == pytest.approx(0.009)
    found = syncpipe.plan(whole, devices="4 x 1GB, 1GB/s", batch_size=64, replicas=True)
    assert found.one_machine == pytest.approx(0.009)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("costs", "machines", "bandwidth", "parts"),
    [
        (
            vgg_like(),
            4,
            10.0,
            ("configuration 3-1", "layer0 to layer1 (2)", "computing in stage 0"),
        ),
        (vgg_like(), 8, 1e9, ("data parallelism, all layers on each of them",)),
        (profile([1, 1], [1000, 1], [10, 10]), 2, 1.0, ("1 machine alone would be faster",)),
        (profile([1, 1], [9, 1], [100, 100]), 2, 2.0, ("transfers to stage 1",)),
        (profile([1], [1], [100]), 2, 2.0, ("gradients between the replicas of stage 0",)),
    ],
)
def test_the_page_explains_the_stages(
    costs: Profile, machines: int, bandwidth: float, parts: tuple[str, ...]
) -> None:
    text = str(replicated(costs, machines, bandwidth))
    assert [part for part in parts if part not in text] == []


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machines", "bandwidth", "samples", "match"),
    [
        (0, 1.0, None, "machines=0"),
        (2, 0.0, None, r"bandwidth=0\.0"),
        (2, math.nan, None, "bandwidth=nan"),
        (2, 1.0, 0, "samples=0"),
    ],
)
def test_numbers_that_are_none(
    machines: int, bandwidth: float, samples: int | None, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        replicated(vgg_like(), machines, bandwidth, samples=samples)


# --- as a pipe runs them -------------------------------------------------------------------------


def test_a_pipe_runs_what_is_planned() -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    costs = profile([4.0, 4.0, 4.0], [1.0, 1.0, 1.0], [10, 1000, 1000])
    plan: Any = syncpipe.plan(costs, devices="4 x 1GB, 1kB/s", batch_size=8, replicas=True)
    assert max(plan.replicas) > 1
    assert sum(plan.replicas) == 4
    devices = [f"cpu:{k}" for k in range(4)]
    pipe = Pipe(layers, **plan.options(), devices=devices)
    assert (pipe.balance, pipe.replicas, pipe.chunks) == (plan.balance, plan.replicas, plan.chunks)
    with pipe.trace() as trace:
        pipe.train_batch(torch.randn(8, 8), loss_fn=torch.mean)
    assert trace.rows == tuple(devices)
    assert plan.as_dict()["options"] == plan.options()
    assert f"{plan.chunks} micro-batches" in str(plan)


def test_the_step_is_that_of_the_simulation_and_gradients_exchanged() -> None:
    costs = profile([6.0, 3.0], [0.0, 0.0], [8, 8])
    machine = Machine.even(3, bandwidth=4.0)
    plan = runnable(replicated(costs, 3, 4.0, samples=1), costs, machine, 12, 4.0)
    assert (plan.balance, plan.replicas) == ([1, 1], [2, 1])
    steps = {}
    for chunks in (2, 3, 4, 6, 12):
        chain = Chain.of(costs.of(12), 12 / chunks, 4.0)
        schedule = build("1f1b", chunks, consecutive(plan.replicas))
        step = simulate(schedule, costs_of(chain, machine, plan.balance)).makespan
        steps[chunks] = step + 2 * 8 / 4.0
    assert plan.step == pytest.approx(min(steps.values()))
    assert steps[plan.chunks] == pytest.approx(plan.step)
    # Parameters, gradients, Adam's state, and gradients that arrive; a copy, and its gradients.
    assert plan.memory == pytest.approx((4 * 8 + 8, 2 * 8, 4 * 8))


def test_what_does_not_fit_has_smaller_micro_batches() -> None:
    layers = [LayerProfile(f"{k}", {1: 1.0}, {1: 2.0}, {1: 0}, {1: 10}) for k in range(2)]
    costs = Profile(tuple(layers))
    plan = replicated(costs, 4, math.inf, samples=1)
    free, limited = (
        runnable(plan, costs, Machine.even(4, limit), 12, 4.0) for limit in (math.inf, 30.0)
    )
    assert max(free.memory) > 30 >= max(limited.memory)
    assert limited.chunks > free.chunks
