"""The search for plans, beside brute force and the simulator, and what it says if none fits."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning import case, compared, random_profile
from syncpipe import plan
from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.planner.candidates import Candidate, Problem, one_f_one_b_shape
from syncpipe.planner.chain import Chain, Mode, chunk_counts, costs_of
from syncpipe.planner.machine import BYTES, Machine, number_of
from syncpipe.planner.search import search, search_orders, shortage
from syncpipe.schedules import one_f_one_b, simulate

numbers = st.integers(0, 12).map(float)
batch_sizes = st.sampled_from([1, 2, 4, 6, 8, 12])
KINDS = ("tight", "tight, slow links", "tight, unlike devices", "prime mini-batches")


@st.composite
def profiles(draw: st.DrawFn, most: int = 6) -> Profile:
    """Measured with 4 samples, and everything in proportion."""
    count = draw(st.integers(1, most))

    def number() -> dict[int, float]:
        return {4: draw(numbers)}

    layers = []
    for k in range(count):
        stored = number()
        shared = {4: min(stored[4], draw(numbers))}
        parameters = draw(st.integers(0, 5))
        layers.append(
            LayerProfile(str(k), number(), number(), number(), stored, shared, parameters)
        )
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else []
    return Profile(tuple(layers), tuple(SkipProfile("s", a, b, number()) for a, b in chosen))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    n = draw(st.integers(1, 4))
    limits = st.sampled_from([5.0, 10.0, 20.0, 40.0, 80.0])
    memory = (draw(limits),) * n if draw(st.booleans()) else [draw(limits) for _ in range(n)]
    bandwidth = draw(st.sampled_from([0.5, 2.0, 8.0, math.inf]))
    return Machine(tuple(memory), Machine.even(n, 1.0, bandwidth).bandwidth)


def best(profile: Profile, machine: Machine, batch: int, scale: float = 4.0, **choice: Any
) -> Candidate | None:  # fmt: skip
    return next(iter(search(Problem(profile, machine, batch, scale), **choice)), None)


def balances(length: int, n: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, length), n - 1):
        yield tuple(j - i for i, j in pairwise((0, *ends, length)))


# --- against brute force ------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.sampled_from(KINDS), st.integers(0, 10**6))
def test_nothing_is_faster_than_the_plan(kind: str, seed: int) -> None:
    """Every cut, number of stages and of micro-batches, any slots."""
    ratio = compared(*case(kind, seed))
    assert ratio is None or 1 - 1e-9 <= ratio <= 1.02


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.sampled_from([1.05, 1.4, 2.0, 4.0]))
def test_more_is_never_slower(kind: str, seed: int, more: float) -> None:
    profile, machine, batch = case(kind, seed)
    found = best(profile, machine, batch)
    if found is None:
        return
    faster = tuple(tuple(more * rate for rate in row) for row in machine.bandwidth)
    speed = tuple(more * speed for speed in machine.speed)
    others = {
        "memory": replace(machine, memory=[more * size for size in machine.memory]),
        "bandwidth": Machine(machine.memory, faster, speed=machine.speed),
        "speed": Machine(machine.memory, machine.bandwidth, speed=speed),
    }
    for what, other in others.items():
        again = best(profile, other, batch)
        assert again is not None, what
        assert again.time <= found.time * 1.005, what
    smaller = best(profile, machine, batch, 4 / more)
    assert smaller is not None
    assert smaller.time <= found.time * 1.005
    n = len(machine)
    if n > 1 and (fewer := best(profile, machine.ordered(range(n - 1)), batch)) is not None:
        assert found.time <= fewer.time * 1.005


@pytest.mark.parametrize(
    ("profile", "devices", "memory", "chunks", "time"),
    [
        (random_profile(200, "x1"), 16, 669e6, 16, 5.2),  # 9.94, where 5.45 fit
        (random_profile(50, "x0", skips=20), 8, 510e6, 128, 0.7175),  # 0.734, where 0.713 fit
        (random_profile(24, "x0", skips=20), 8, 667e6, 16, 2.33),  # 2.12 without a limit
    ],
)
def test_tight_memory_has_slots_between_those_that_hide_transfers_the_textbooks_and_one(
    profile: Profile, devices: int, memory: float, chunks: int, time: float
) -> None:
    found = best(profile, Machine.even(devices, memory, 12e9), 512, chunks=chunks)
    assert found is not None
    assert found.time < time
    assert 1 < found.shape.in_flight[0] < 2 * devices - 1


def test_more_memory_is_no_slower_where_skips_leave_few_slots() -> None:
    profile = random_profile(20, "memory 12", skips=5)
    less, more = (best(profile, Machine.even(6, x, 12e9), 128, chunks=16) for x in (555e6, 588e6))
    assert less is not None
    assert more is not None
    assert more.time <= 1.005 * less.time


def test_a_skip_that_takes_the_link_for_long_stays_within_a_stage() -> None:
    layers = [LayerProfile(str(k), {1: 1.0}, {1: 2.0}, {1: 0.1}, {1: 1.0}) for k in range(12)]
    profile = Profile(tuple(layers), (SkipProfile("s", 1, 8, {1: 60.0}),))
    problem = Problem(profile, Machine.even(3, 1000.0, 1.0), 16, 4.0)
    every = (
        problem.evaluate(one_f_one_b_shape(16, slots), cut)
        for cut in balances(12, 3)
        for slots in ((3, 2, 1), (5, 3, 1), (9, 5, 1))
    )
    found = best(profile, problem.machine, 16, chunks=16, stages=3)
    assert found is not None
    assert found.time <= min(one.time for one in every if one and one.excess <= 1)


# --- what a candidate says -----------------------------------------------------------------------


@given(profiles(most=8), st.integers(1, 12), st.data())
def test_a_draft_is_what_is_simulated_and_no_faster_than_its_bound(
    profile: Profile, m: int, data: st.DataObject
) -> None:
    """Whatever the slots, whatever is recomputed; one small micro-batch in the end."""
    n = data.draw(st.integers(1, min(4, len(profile.layers))))
    batch = data.draw(st.sampled_from([m, 3 * m - 1 if m > 2 else m]))
    machine = Machine.even(n, math.inf, data.draw(st.sampled_from([0.5, 2.0, math.inf])))
    balance = data.draw(st.sampled_from(list(balances(len(profile.layers), n))))
    slots = sorted(data.draw(st.lists(st.integers(1, m), min_size=n, max_size=n)), reverse=True)
    mode = st.sampled_from(("store", "recompute"))
    modes: list[Mode] = data.draw(st.lists(mode, min_size=n, max_size=n))  # type: ignore[arg-type]
    problem = Problem(profile, machine, batch, 4.0)
    shape = one_f_one_b_shape(m, tuple(slots))
    candidate = problem.evaluate(shape, balance, modes)
    assert candidate is not None
    costs = problem.costs(shape, balance)
    played = simulate(one_f_one_b(m, n, slots=slots), costs, shape.recomputed(modes))
    assert candidate.time == pytest.approx(played.makespan)
    assert problem.bound(shape, balance, costs, modes) <= candidate.time * (1 + 1e-9)
    assert problem.evaluate(shape, balance, modes, at_most=candidate.time) == candidate
    assert all(map(int.__le__, played.in_flight, slots))
    stages = enumerate(zip(candidate.ends, slots, modes, strict=True))
    chain = problem.chain(m)
    memory = [chain.memory(*ends, q, slots[0], how) for _, (ends, q, how) in stages]
    if profile.skips:  # whose gradients wait for less long if they come from near
        assert all(a <= b * (1 + 1e-9) for a, b in zip(candidate.memory, memory, strict=True))
    else:
        assert list(candidate.memory) == pytest.approx(memory)


# --- offload ------------------------------------------------------------------------------------


def offloading(host: float) -> Candidate:
    layers = [LayerProfile(str(k), {8: 1.0}, {8: 2.0}, {8: 2.0}, {8: 40.0}) for k in range(4)]
    machine = Machine.even(2, 175.0, 1.0, host)  # with two in flight the slow link waits
    found = best(Profile(tuple(layers)), machine, 64, chunks=8, stages=2)
    assert found is not None
    return found


def test_a_fast_link_to_the_host_is_better_than_recomputation() -> None:
    without, slow, fast = (offloading(host) for host in (0.0, 5.0, 1000.0))
    assert "offload" not in slow.modes
    assert "offload" in fast.modes
    assert fast.time < slow.time <= without.time


def test_no_step_is_shorter_than_what_the_link_takes() -> None:
    layers = [LayerProfile(str(k), {8: 1.0}, {8: 2.0}, {8: 1.0}, {8: 40.0}) for k in range(2)]
    problem = Problem(Profile(tuple(layers)), Machine.even(2, math.inf, host=10.0), 64, 4.0)
    candidate = problem.evaluate(one_f_one_b_shape(8, (2, 1)), (1, 1), ("offload", "store"))
    assert candidate is not None
    assert candidate.time == candidate.bound == 8 * 2 * 40 / 10


# --- nothing fits -------------------------------------------------------------------------------


@settings(max_examples=60)
@given(profiles(), machines(), batch_sizes)
def test_what_is_found_fits_and_a_shortage_comes_nearest_and_its_advice_is_right(
    profile: Profile, machine: Machine, batch: int
) -> None:
    problem = Problem(profile, machine, batch, 4.0)
    text, found = shortage(problem), search(problem)
    assert bool(found) == (text is None)
    for one in found:
        assert one.excess <= 1
        assert all(a <= b for a, b in zip(one.memory, machine.memory, strict=False))
        assert len(torch.empty(batch).chunk(one.shape.m)) == one.shape.m
    assert len({len(one.balance) for one in found}) == len(found)
    assert all(a.time <= b.time * (1 + 1e-7) for a, b in pairwise(found))
    if text is None:
        return

    def excess(balance: Sequence[int], m: int) -> float:
        candidate = problem.evaluate(one_f_one_b_shape(m, (1,) * len(balance)), balance)
        assert candidate is not None
        return candidate.excess

    said = re.search(r"balance=\[(.*?)\] with chunks=(\d+)", text)
    assert said
    nearest = excess([*map(int, said[1].split(", "))], int(said[2]))
    ns = range(1, min(len(machine), len(profile.layers)) + 1)
    every = (excess(cut, m) for m in range(1, batch + 1) if batch % m == 0 for n in ns
             for cut in balances(len(profile.layers), n))  # fmt: skip
    assert nearest == pytest.approx(min(every), rel=1e-3)
    more = [nearest * 1.001 * limit for limit in machine.memory]
    if each := re.search(r"([\d.]+ [kMG]?B) on each device", text):
        more = [number_of("memory", each[1], BYTES)] * len(machine)
    assert best(profile, replace(machine, memory=more), batch)
    if devices := re.search(r"(\d+) such devices", text):
        for n in (int(devices[1]) - 1, int(devices[1])):
            fits = best(profile, Machine.even(n, machine.memory[0]), batch) is not None
            assert fits == (n == int(devices[1]))
    if smaller := re.search(r"batch_size=(\d+)", text):
        assert best(profile, machine, int(smaller[1]))


def test_a_shortage_in_numbers() -> None:
    layers = [LayerProfile(str(k), {8: 1.0}, {8: 1.0}, {8: 8.0}, {8: 16.0}, {}, 25) for k in "abcd"]
    profile = Profile(tuple(layers))
    text = shortage(Problem(profile, Machine.even(2, 150.0), 8, 4.0))
    # 2 layers with 100 for parameters, and 25 for Adam's step.
    assert text is not None
    assert "balance=[2, 2] with chunks=8 under '1f1b': stage 0 (layers 'a' to 'b')" in text
    assert "needs 250 B, 100 B more than the 150 B of device 0" in text
    assert "4 such devices" in text
    assert "batch_size" not in text
    # Micro-batches of 3 samples store 12 beside the 100 of plain SGD, whose step takes no more.
    fewer = shortage(Problem(profile, Machine.even(2, 112.0), 16, 2.0), chunks=2)
    assert "batch_size=6" in str(fewer)


# --- micro-batches ------------------------------------------------------------------------------


def a_profile(count: int = 8, sizes: tuple[int, ...] = (1, 64)) -> Profile:
    def linear(each: float, fixed: float = 0.0) -> dict[int, float]:
        return {size: fixed + each * size for size in sizes}

    layers = [
        LayerProfile(str(k), linear(1 + k % 3, 2), linear(2 + k % 2, 3), linear(1), linear(8))
        for k in range(count)
    ]
    return Profile(tuple(layers))


@given(st.integers(1, 3000))
def test_the_numbers_of_micro_batches_are_those_that_chunk_makes(batch: int) -> None:
    counts = list(chunk_counts(batch))
    assert counts == sorted(set(counts))
    assert counts[-1] <= 1024
    assert all(len(torch.empty(batch).chunk(m)) == m for m in counts)
    assert {m for m in range(1, min(batch, 1024) + 1) if batch % m == 0} <= set(counts)
    assert all(b <= 2.5 * a + 1 for a, b in pairwise(counts))


def test_the_last_micro_batch_takes_what_its_samples_take() -> None:
    """10 samples in 4 micro-batches are 3, 3, 3 and 1; memory is that of the large ones."""
    one = {1: 1.0}
    layers = tuple(LayerProfile(k, one, {1: 2.0}, one, {1: 5.0}) for k in "ab")
    problem = Problem(Profile(layers), Machine.even(2), 10, 4.0)
    candidate = problem.evaluate(one_f_one_b_shape(4, (2, 1)), (1, 1))
    assert candidate is not None
    costs = problem.costs(candidate.shape, (1, 1))
    assert costs.forward == (3.0, 3.0)
    assert costs.last is not None
    assert costs.last.forward == (1.0, 1.0)
    assert candidate.memory == (30.0, 15.0)
    alone = best(Profile(layers), Machine.even(1), 10, chunks=4)
    assert alone is not None
    assert alone.time == alone.bound == 10 * 6


# --- devices ------------------------------------------------------------------------------------


def test_the_order_of_the_kinds_is_chosen() -> None:
    """The first stages store more, so the large devices come first, whatever was said."""
    profile = a_profile()
    given = Machine((600.0, 600.0, 2400.0, 2400.0), Machine.even(4, 1, 1e3).bandwidth)
    order, found = search_orders(Problem(profile, given, 64, 4.0))[0]
    assert order == (2, 3, 0, 1)
    as_given = best(profile, given, 64)
    assert as_given is None or found[0].time < as_given.time
    chosen = plan(profile, devices=given, batch_size=64)
    assert chosen.machine.memory == (2400.0, 2400.0, 600.0, 600.0)
    assert chosen.stages[0].device == "device 2"
    assert chosen.step_time == found[0].time


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_like_devices_is_that_of_the_links(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.choice((3, 4))
    rate = [[0.0] * n for _ in range(n)]
    for a, b in combinations(range(n), 2):
        rate[a][b] = rate[b][a] = draw.choice((1.0, 4.0, 20.0))
    machine = Machine((math.inf,) * n, tuple(map(tuple, rate)))
    problem = Problem(a_profile(6), machine, 64, 4.0)
    order, found = search_orders(problem, chunks=8)[0]
    assert problem.on(machine.ordered(order)).evaluate(found[0].shape, found[0].balance) == found[0]
    every = (search(problem.on(machine.ordered(some)), chunks=8) for some in permutations(range(n)))
    assert found[0].time <= 1.02 * min(one[0].time for one in every)


# --- what a stage costs and holds ---------------------------------------------------------------


def skip_profile() -> Profile:
    """Three layers, measured with 2 and 4 samples; layer 1 stores layer 0's output as well."""
    layers = [
        LayerProfile("a", {2: 1, 4: 2}, {2: 2, 4: 4}, {2: 20, 4: 40}, {2: 30, 4: 60}),
        LayerProfile(
            "b", {2: 1, 4: 3}, {2: 2, 4: 2}, {2: 8, 4: 16}, {2: 25, 4: 50}, {2: 20, 4: 40}, 100
        ),
        LayerProfile("c", {2: 5, 4: 6}, {2: 1, 4: 1}, {2: 2, 4: 4}, {2: 6, 4: 12}, {}, 10, 4, 3),
    ]
    return Profile(tuple(layers), (SkipProfile("s", 0, 2, {2: 7, 4: 14}),), {2: 12, 4: 24})


def test_a_chain_has_what_lies_between_the_sizes_that_were_measured() -> None:
    chain = Chain.of(skip_profile(), 3, param_scale=4)
    assert chain.forward == (1.5, 2, 5.5)
    assert chain.backward == (3, 2, 1)
    assert chain.inputs == (18, 30, 12, 3)
    assert chain.fixed == (0, 400, 4 * 6 + 4 + 3)
    assert chain.skips == ((0, 2, 10.5),)


def test_skips_between_stages_take_the_link_between_their_devices() -> None:
    rows = ((math.inf, 4.0, 2.0), (5.0, math.inf, 1.0), (1.0, 8.0, math.inf))
    machine = Machine((math.inf,) * 3, rows)
    chain = Chain.of(skip_profile(), 2, param_scale=4)
    costs = costs_of(chain, machine, (1, 1, 1))
    assert costs.transfer == (20 / 4.0, 8 / 1.0)  # there or back, whichever is slower
    assert costs.skips == {(0, 2): 7 / 1.0}
    assert costs_of(chain, machine, (3,)).skips == {}
