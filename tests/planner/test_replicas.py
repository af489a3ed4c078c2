"""PipeDream's formula against every configuration, and plans whose stages several devices share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import syncpipe
from benchmarks.planning import pipedream
from syncpipe import Pipe
from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.options import consecutive
from syncpipe.planner import NoPlan
from syncpipe.planner.candidates import Problem, ScheduleShape
from syncpipe.planner.chain import Chain, costs_of
from syncpipe.planner.machine import Machine
from syncpipe.schedules import build, one_f_one_b, simulate

Stages = tuple[tuple[int, int, int], ...]


def profile(
    times: list[float], outputs: list[float], weights: list[int], frozen: int = 0,
    skips: tuple[SkipProfile, ...] = (), stored: float = 0.0,
) -> Profile:  # fmt: skip
    """Layers of so many seconds (a third of it forward), bytes out and bytes of parameters."""
    kept, none = {1: stored}, dict[int, float]()
    layers = [
        LayerProfile(f"{k}", {1: t / 3}, {1: t * 2 / 3}, {1: a}, kept, none, w, min(w, frozen))
        for k, (t, a, w) in enumerate(zip(times, outputs, weights, strict=True))
    ]
    return Profile(tuple(layers), skips)


def every(layers: int, machines: int) -> Iterator[Stages]:
    for n in range(1, min(layers, machines) + 1):
        for ends in combinations(range(1, layers), n - 1):
            for used in combinations(range(1, machines), n - 1):
                cuts, shares = pairwise((0, *ends, layers)), pairwise((0, *used, machines))
                yield tuple((i, j, b - a) for (i, j), (a, b) in zip(cuts, shares, strict=True))


def sent(profile: Profile, first: int) -> float:
    """Bytes that cross the cut before a layer, there."""
    skips = sum(skip.bytes[1] for skip in profile.skips if skip.stash < first <= skip.pop)
    return skips + profile.layers[first - 1].output_bytes[1] if first else 0.0


def time_of(stages: Stages, profile: Profile, bandwidth: float) -> float:
    """The formula, written down once more."""
    worst = 0.0
    for first, last, m in stages:
        layers = profile.layers[first:last]
        computing = sum(layer.forward[1] + layer.backward[1] for layer in layers)
        trained = sum(layer.parameter_bytes - layer.frozen_bytes for layer in layers)
        exchange = 4 * (m - 1) * trained / (m * bandwidth)
        transfer = 2 * sent(profile, first) / (bandwidth * m)
        worst = max(worst, computing / m, exchange / m, transfer)
    return worst


numbers = st.integers(0, 20)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    layers = draw(st.integers(1, 6))
    row = st.lists(numbers, min_size=layers, max_size=layers)
    pairs = [*combinations(range(layers), 2)] or [()]
    ends = draw(st.lists(st.sampled_from(pairs), max_size=2))
    skips = [SkipProfile("s", *pair, {1: draw(numbers)}) for pair in ends if pair]
    return profile(draw(row), draw(row), draw(row), draw(numbers), tuple(skips))


@given(profiles(), st.integers(1, 5), st.sampled_from([0.5, 1.0, 3.0, 10.0, math.inf]))
def test_nothing_is_faster_with_fewer_stages_or_fewer_bytes(
    profile: Profile, machines: int, bandwidth: float
) -> None:
    def rank(stages: Stages) -> tuple[float, int, float]:
        crossing = sum(sent(profile, first) for first, _, _ in stages)
        return float(f"{time_of(stages, profile, bandwidth):.10e}"), len(stages), crossing

    found = pipedream(profile, machines, bandwidth, samples=1)
    assert rank(found) == min(map(rank, every(len(profile.layers), machines)))
    assert sum(r for *_, r in found) == machines


# --- as a pipe runs them -------------------------------------------------------------------------


def test_a_pipe_runs_what_is_planned() -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    costs = profile([4.0, 4.0, 4.0], [1.0, 1.0, 1.0], [10, 1000, 1000])
    plan = syncpipe.plan(costs, devices="4 x 1GB, 1kB/s", batch_size=8, replicas=True)
    assert max(plan.replicas) > 1
    assert sum(plan.replicas) == 4
    devices = [f"cpu:{k}" for k in range(4)]
    pipe = Pipe(layers, **plan.options(), devices=plan.on(devices))
    assert (pipe.balance, pipe.replicas, pipe.chunks) == (plan.balance, plan.replicas, plan.chunks)
    with pipe.trace() as trace:
        pipe.train_batch(torch.randn(8, 8), loss_fn=torch.mean)
    assert trace.rows == tuple(devices)
    assert "device 0, device 1" in str(plan)
    here = syncpipe.plan(
        costs, devices=devices, memory=1e9, bandwidth=1e3, batch_size=8, replicas=True
    )
    assert here.devices == tuple(devices)


def test_the_step_is_that_of_the_simulation_and_gradients_exchanged() -> None:
    costs, machine = profile([6.0, 3.0], [0.0, 0.0], [32, 32]), Machine.even(3, bandwidth=4.0)
    plan = syncpipe.plan(costs, devices=machine, batch_size=12, replicas=True)
    assert (plan.balance, plan.replicas) == ([1, 1], [2, 1])
    steps = {}
    for chunks in (2, 3, 4, 6, 12):
        chain = Chain.of(costs, 12 / chunks, 4.0)
        schedule = build("1f1b", chunks, consecutive(plan.replicas))
        step = simulate(schedule, costs_of(chain, machine, plan.balance)).makespan
        steps[chunks] = step + 2 * 32 / 4.0
    assert plan.step_time == pytest.approx(min(steps.values()))
    assert steps[plan.chunks] == pytest.approx(plan.step_time)
    assert plan.bound <= plan.step_time
    # Parameters, gradients, Adam's state; and gradients of the replica, or what Adam's step takes.
    assert plan.chosen.memory == pytest.approx((4 * 32 + 32, 4 * 32 + 32))


def test_what_does_not_fit_is_laid_out_in_another_way() -> None:
    once, stored = {1: 1.0, 12: 2.0}, {1: 10.0, 12: 120.0}
    layers = [LayerProfile(f"{k}", once, once, {1: 0, 12: 0}, stored) for k in range(2)]
    free, limited = (
        syncpipe.plan(Profile(tuple(layers)), devices=Machine.even(4, limit), batch_size=12,
                      replicas=True)
        for limit in (math.inf, 30.0)
    )  # fmt: skip
    assert max(free.chosen.on_device) > 30 >= max(limited.chosen.on_device)
    assert limited.step_time > free.step_time
    with pytest.raises(NoPlan, match=r"no plan fits into memory.* more than the 5 B"):
        syncpipe.plan(
            Profile(tuple(layers)), devices=Machine.even(4, 5.0), batch_size=12, replicas=True
        )


def test_no_replica_is_without_a_micro_batch() -> None:
    vgg_like = profile([40, 40, 10], [100, 1, 1], [1, 1, 400])
    plan = syncpipe.plan(vgg_like, devices="4 x 1GB, 10B/s", batch_size=2, replicas=True)
    assert (plan.replicas, plan.chunks) == ([2, 1], 2)
    assert plan.bound <= plan.step_time


@pytest.mark.parametrize(
    ("layers", "machine"),
    [
        (profile([6] * 4, [1] * 4, [5] * 4, stored=2), Machine.even(2, 60.0, 100.0)),
        (profile([6] * 4, [1] * 4, [5] * 4, stored=2), Machine.even(4, 60.0, 100.0)),
        (profile([6] * 3, [1] * 3, [4] * 3, stored=2), Machine.even(3, math.inf, 1.0)),
        (profile([9, 3, 12], [1] * 3, [1, 1, 30], stored=2), Machine.even(4, math.inf, 10.0)),
    ],
    ids=["tight", "tight, four devices", "slow links", "one heavy layer"],
)
def test_no_layout_is_faster(layers: Profile, machine: Machine) -> None:
    problem, times = Problem(layers, machine, 8, 4.0), list[float]()
    for stages in every(len(layers.layers), len(machine)):
        for fewer in range(len(machine)):
            replicas = [max(1, r - fewer) for *_, r in stages]
            shape = ScheduleShape(one_f_one_b(8, consecutive(replicas)))
            candidate = problem.evaluate(shape, [j - i for i, j, _ in stages])
            times += [candidate.time] if candidate and candidate.excess <= 1 else []
    plan = syncpipe.plan(layers, devices=machine, batch_size=8, chunks=8, replicas=True)
    assert plan.step_time <= min(times) * (1 + 1e-9)
    assert max(a / b for a, b in zip(plan.chosen.on_device, machine.memory, strict=False)) <= 1
