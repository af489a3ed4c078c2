"""More memory, bandwidth, devices or speed, or smaller parameters, never make a plan slower."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.brute import case, everything
from benchmarks.planning.profiles import random_profile
from benchmarks.planning.sweeps import held
from syncpipe import plan
from syncpipe.balance.profile import LayerProfile, Profile
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.search.candidate import Candidate, evaluate
from syncpipe.planner.search.orders import search_orders
from syncpipe.planner.search.search import search
from syncpipe.planner.search.sizes import chunk_counts

KINDS = ("tight", "tight, slow links", "tight, unlike devices", "prime mini-batches")


def best(profile: Profile, machine: Machine, batch: int, **choice: Any) -> Candidate | None:
    return next(iter(search(profile, machine, batch, **{"param_scale": 4, **choice})), None)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(KINDS), st.integers(0, 10**6))
def test_nothing_is_faster_than_the_plan_and_the_bound_is_below_all(kind: str, seed: int) -> None:
    """Every cut, number of stages and of micro-batches, both schedules, any slots."""
    profile, machine, batch = case(kind, seed)
    times = list(everything(profile, machine, batch))
    found = best(profile, machine, batch)
    assert (found is None) == (not times)
    if found is not None:
        assert min(times) * (1 - 1e-9) <= found.time <= 1.02 * min(times)
        assert 0 < found.least <= min(times) * (1 + 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.sampled_from([1.05, 1.4, 2.0, 4.0]))
def test_more_is_never_slower(kind: str, seed: int, more: float) -> None:
    profile, machine, batch = case(kind, seed)
    found = best(profile, machine, batch)
    if found is None:
        return
    n = len(machine)
    faster = tuple(tuple(more * rate for rate in row) for row in machine.bandwidth)
    others = {
        "memory": machine.with_memory([more * size for size in machine.memory]),
        "bandwidth": Machine(machine.memory, faster, speed=machine.speed),
        "speed": Machine(
            machine.memory, machine.bandwidth, speed=[more * speed for speed in machine.speed]
        ),
    }
    for what, other in others.items():
        again = best(profile, other, batch)
        assert again is not None, what
        assert again.time <= found.time * (1 + 1e-6), what
    smaller = best(profile, machine, batch, param_scale=4 / more)
    assert smaller is not None
    assert smaller.time <= found.time * (1 + 1e-6)
    if n > 1 and (fewer := best(profile, machine.head(n - 1), batch)) is not None:
        assert found.time <= fewer.time * (1 + 1e-6)


def test_the_slots_of_several_stages_grow_together() -> None:
    """One stage with more alone gains nothing: this plan was slower with smaller parameters."""
    profile = random_profile(18, "sweep 7")
    machine = Machine.even(4, held(profile, 128) / 4, 12e9)
    larger, smaller = (best(profile, machine, 128, param_scale=scale) for scale in (3.0, 2.0))
    assert larger is not None
    assert smaller is not None
    assert smaller.time <= larger.time


def a_profile(count: int = 8, sizes: tuple[int, ...] = (1, 64)) -> Profile:
    def linear(each: float, fixed: float = 0.0) -> dict[int, float]:
        return {size: fixed + each * size for size in sizes}

    layers = [
        LayerProfile(str(k), linear(1 + k % 3, 2), linear(2 + k % 2, 3), linear(1), linear(8))
        for k in range(count)
    ]
    return Profile(tuple(layers))


def test_memory_saved_by_small_micro_batches_is_worth_more_than_recomputation() -> None:
    profile, batch = a_profile(sizes=(64,)), 256
    limit = 24.0 * 8 * 2  # as much as 24 samples store on a stage of two layers
    found = best(profile, Machine.even(4, limit, 1e9), batch)
    assert found is not None
    assert not any(found.recomputes)
    given = best(profile, Machine.even(4, limit, 1e9), batch, chunks=16)
    assert given is not None
    assert any(given.recomputes)
    assert found.time < 0.9 * given.time


# --- micro-batches of different sizes -----------------------------------------------------------


def test_a_prime_mini_batch_is_about_as_fast_as_one_that_is_even() -> None:
    profile, machine = a_profile(), Machine.even(4, math.inf, 100.0)
    even, prime = (best(profile, machine, batch) for batch in (256, 257))
    assert even is not None
    assert prime is not None
    assert 1 < prime.chunks < 257
    assert prime.time <= 1.05 * even.time


@given(st.integers(1, 3000))
def test_the_numbers_of_micro_batches_are_those_that_chunk_makes(batch: int) -> None:
    usual, extra = chunk_counts(a_profile(1), 4, batch)
    counts = [*usual, *extra]
    assert counts == sorted(set(counts))
    assert all(len(torch.empty(batch).chunk(m)) == m for m in counts)
    assert {m for m in range(1, min(batch, 1024) + 1) if batch % m == 0} <= set(counts)
    assert all(b <= 2.5 * a + 1 for a, b in pairwise(counts))


def test_the_last_micro_batch_takes_what_its_samples_take() -> None:
    """10 samples in 4 micro-batches are 3, 3, 3 and 1; memory is that of the large ones."""
    one = {1: 1.0}
    layers = tuple(LayerProfile(k, one, {1: 2.0}, one, {1: 5.0}) for k in "ab")
    common: dict[str, Any] = {"balance": (1, 1), "chunks": 4, "param_scale": 4}
    gpipe = evaluate(Profile(layers), Machine.even(2), 10, schedule="gpipe", **common)
    # Forwards 3 + 3 + 3 + 3 + 1 on the second device, then backwards 2 + 6 + 6 + 6 + 6.
    assert gpipe.time == 13 + 26
    assert gpipe.memory == (60.0, 60.0)
    assert gpipe.bound <= gpipe.time
    alone = evaluate(
        Profile(layers), Machine.even(1), 10, schedule="1f1b", slots=[1], chunks=4, balance=(2,),
        param_scale=4,
    )  # fmt: skip
    assert alone.time == alone.bound == 10 * 6


# --- devices that are not alike -----------------------------------------------------------------


def test_a_device_that_is_faster_gets_more_layers() -> None:
    machine = Machine((math.inf,) * 2, Machine.even(2).bandwidth, speed=(3.0, 1.0))
    found = best(a_profile(16), machine, 64, stages=2, chunks=8)
    assert found is not None
    assert found.balance[0] >= 11
    costs = found.simulation.costs
    assert costs.forward[0] == pytest.approx(costs.forward[1], rel=0.4)


def test_the_order_of_the_kinds_is_chosen() -> None:
    """The first stages store more, so the large devices come first, whatever was said."""
    profile = a_profile()
    given = Machine((600.0, 600.0, 2400.0, 2400.0), Machine.even(4, 1, 1e3).bandwidth)
    order, found = search_orders(profile, given, 64, param_scale=4)
    assert order == (2, 3, 0, 1)
    as_given = best(profile, given, 64)
    assert as_given is None or found[0].time < as_given.time
    chosen = plan(profile, devices=given, batch_size=64)
    assert chosen.machine.memory == (2400.0, 2400.0, 600.0, 600.0)
    assert chosen.stages[0].device == "device 2"
    assert chosen.step_time == found[0].time


def test_speeds_given_to_plan() -> None:
    slow = plan(a_profile(), devices="2 x 1GB, 1GB/s", batch_size=64)
    fast = plan(a_profile(), devices="2 x 1GB, 1GB/s", batch_size=64, speed=[2, 2])
    assert fast.step_time == pytest.approx(slow.step_time / 2, rel=1e-3)
