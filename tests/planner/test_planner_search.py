"""The planner's search over micro-batches, stages, schedules and slots; and when nothing fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.planner.costs.chain import Chain
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.costs.makespan import makespan
from syncpipe.planner.cuts.one_f_one_b import OneFOneBCuts, slots_of
from syncpipe.planner.search.candidate import Candidate, Terms, evaluate
from syncpipe.planner.search.search import search, shortage
from syncpipe.planner.search.sizes import chunk_counts, stage_counts
from syncpipe.schedules import gpipe, one_f_one_b
from syncpipe.schedules.simulation import Costs, simulate
from tests.planner.test_planner_exact import FAMILIES, balances, numbers, recomputing

batch_sizes = st.sampled_from([1, 2, 4, 6, 8, 12])


@st.composite
def profiles(draw: st.DrawFn, skips: bool = True, most: int = 6) -> Profile:
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
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)] if skips else []
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else []
    return Profile(tuple(layers), tuple(SkipProfile("s", a, b, number()) for a, b in chosen))


@st.composite
def machines(draw: st.DrawFn, limited: bool = True) -> Machine:
    n = draw(st.integers(1, 4))
    limits = st.sampled_from([5.0, 10.0, 20.0, 40.0, 80.0] if limited else [math.inf])
    memory = (draw(limits),) * n if draw(st.booleans()) else [draw(limits) for _ in range(n)]
    bandwidth = draw(st.sampled_from([0.5, 2.0, 8.0, math.inf]))
    return Machine(tuple(memory), Machine.even(n, 1.0, bandwidth).bandwidth)


def divisors(batch_size: int) -> list[int]:
    return [m for m in range(1, batch_size + 1) if batch_size % m == 0]


def placements(
    profile: Profile, machine: Machine, batch_size: int
) -> Iterator[tuple[Chain, tuple[int, ...], tuple[int, ...]]]:
    """Every cut with every number of micro-batches and the slots that are tried."""
    for m in divisors(batch_size):
        chain = Chain.of(profile, batch_size / m, 4)
        for n in range(1, len(machine) + 1):
            for balance in balances(len(chain), n):
                for slots in {slots_of(f, n, m) for f in FAMILIES} | {(m,) * n, (1,) * n}:
                    if n > 1 or slots == (1,):
                        yield chain, balance, slots


# --- what is found ------------------------------------------------------------------------------


@given(profiles(), machines(), batch_sizes)
def test_every_candidate_is_what_it_says(
    profile: Profile, machine: Machine, batch_size: int
) -> None:
    found = search(profile, machine, batch_size, param_scale=4)
    for one in found:
        n, m = len(one.balance), one.chunks
        assert one.fits(machine)
        assert len(torch.empty(batch_size).chunk(m)) == m
        chain = Chain.of(profile, -(-batch_size // m), 4)
        slots = one.slots or (m,) * n
        ends = enumerate(pairwise(accumulate(one.balance, initial=0)))
        assert one.memory == tuple(
            chain.memory(i, j, slots[s], slots[0], one.recomputes[s]) for s, (i, j) in ends
        )
        again = m if one.schedule == "1f1b" else m - 1  # of each stage that recomputes
        assert one.simulation.rematerialized == tuple(again * r for r in one.recomputes)
        assert all(map(int.__le__, one.simulation.in_flight, slots))
        same = evaluate(
            profile, machine, batch_size, balance=one.balance, chunks=m, schedule=one.schedule,
            slots=one.slots, recomputes=one.recomputes, param_scale=4,
        )  # fmt: skip
        assert same == one
        assert one.certificate >= 1 - 1e-9
    assert len({(one.schedule, len(one.balance)) for one in found}) == len(found)
    assert all(a.time <= b.time * (1 + 1e-7) for a, b in pairwise(found))


@given(profiles(), machines(), batch_sizes)
def test_something_is_found_exactly_if_something_fits(
    profile: Profile, machine: Machine, batch_size: int
) -> None:
    possible = any(
        recomputing(chain, machine, balance, slots) is not None
        for chain, balance, slots in placements(profile, machine, batch_size)
    )
    assert bool(search(profile, machine, batch_size, param_scale=4)) == possible
    assert (shortage(profile, machine, batch_size, param_scale=4) is None) == possible


@given(profiles(skips=False), machines(limited=False), batch_sizes)
def test_nothing_beats_the_best_for_gpipe(
    profile: Profile, machine: Machine, batch_size: int
) -> None:
    every = divisors(batch_size)
    found = search(profile, machine, batch_size, param_scale=4, chunks=every, schedules=["gpipe"])
    times = [
        evaluate(
            profile, machine, batch_size, balance=balance, chunks=m, schedule="gpipe", param_scale=4
        ).time
        for m in every
        for n in range(1, len(machine) + 1)
        for balance in balances(len(profile.layers), n)
    ]
    assert found[0].time == pytest.approx(min(times), rel=1e-9)


@given(profiles(skips=False), machines(), batch_sizes)
def test_1f1b_is_no_slower_than_the_cuts_with_the_least_bounds(
    profile: Profile, machine: Machine, batch_size: int
) -> None:
    every = divisors(batch_size)
    found = search(profile, machine, batch_size, param_scale=4, chunks=every, schedules=["1f1b"])
    for m in every:
        chain = Chain.of(profile, batch_size / m, 4)
        for n in range(1, len(machine) + 1):
            for family in FAMILIES:
                cut = OneFOneBCuts(chain, machine, m, slots_of(family, n, m)).minimise()
                if cut:
                    one = evaluate(
                        profile, machine, batch_size, balance=cut.balance, chunks=m,
                        schedule="1f1b", slots=family, param_scale=4,
                    )  # fmt: skip
                    assert found[0].time <= one.time * (1 + 1e-7)


def test_slots_are_made_to_suit_the_cut() -> None:
    """A slow link: the textbook's slots wait for it, GPipe's hold everything."""
    same = {8: 1.0}
    layers = [LayerProfile(str(k), same, same, {8: 2.0}, same) for k in range(2)]
    profile, machine = Profile(tuple(layers)), Machine.even(2, math.inf, 1.0)
    common: dict[str, Any] = {"param_scale": 4, "chunks": 8, "stages": 2}
    best = search(profile, machine, 8, schedules=["1f1b"], **common)[0]
    textbook = evaluate(
        profile, machine, 8, balance=(1, 1), chunks=8, schedule="1f1b", slots="textbook",
        param_scale=4,
    )  # fmt: skip
    assert textbook.slots == (2, 1)
    assert best.slots is not None
    assert 2 < best.slots[0] < 8
    assert best.time < textbook.time


def test_one_device_takes_micro_batches_in_turn() -> None:
    layer = LayerProfile("a", {8: 2.0}, {8: 4.0}, {8: 1.0}, {8: 80.0}, {}, 10)
    machine = Machine.even(1, 4 * 10 + 20.0)
    found = search(Profile((layer,)), machine, 16, param_scale=4)
    assert [(one.schedule, one.slots, one.recomputes) for one in found] == [
        ("1f1b", (1,), (False,))
    ]
    assert found[0].chunks == 8  # more than 4 for each device, as these do not fit
    assert found[0].time == pytest.approx(12)
    alone = search(Profile((layer,)), machine, 16, param_scale=4, schedules=["gpipe"])
    assert [one.recomputes for one in alone] == [(True,)]  # all of them are in flight


def test_a_faster_plan_with_recomputation_beats_fewer_micro_batches() -> None:
    layers = [LayerProfile(str(k), {8: 1.0}, {8: 2.0}, {8: 1.0}, {8: 40.0}) for k in range(4)]
    found = search(Profile(tuple(layers)), Machine.even(2, 45.0), 8, param_scale=4, stages=2)
    best = {one.schedule: one for one in reversed(found)}
    assert best["gpipe"].recomputes == (True, True)  # all of 2 x 40 would be in flight
    assert best["1f1b"].recomputes == (False, False)
    assert best["1f1b"].time < best["gpipe"].time


@given(st.integers(1, 10), st.integers(1, 5), st.data())
def test_the_fast_way_to_a_makespan_is_the_simulators(m: int, n: int, data: st.DataObject) -> None:
    def row(length: int) -> tuple[float, ...]:
        return tuple(data.draw(st.lists(numbers, min_size=length, max_size=length)))

    last = Costs(row(n), row(n), row(n), row(n - 1)) if data.draw(st.booleans()) else None
    costs = Costs(row(n), row(n), row(n), row(n - 1), last=last)
    again = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    slots = sorted(data.draw(st.lists(st.integers(1, 12), min_size=n, max_size=n)), reverse=True)
    expected = simulate(gpipe(m, n), costs, [(m - 1) * r for r in again])
    assert makespan(m, None, costs, again) == expected.makespan
    expected = simulate(one_f_one_b(m, n, slots=slots), costs, [m * r for r in again])
    assert makespan(m, slots, costs, again) == expected.makespan


def test_the_fast_way_knows_that_links_are_queues() -> None:
    costs = Costs((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (5.0,))
    expected = simulate(gpipe(3, 2), costs).makespan
    assert makespan(3, None, costs, [False, False]) == expected == 34


# --- nothing fits -------------------------------------------------------------------------------


@settings(max_examples=60)
@given(profiles(), machines(), batch_sizes)
def test_a_shortage_comes_nearest_and_its_advice_is_right(
    profile: Profile, machine: Machine, batch_size: int
) -> None:
    lack = shortage(profile, machine, batch_size, param_scale=4)
    if lack is None:
        return
    assert lack.missing > 0
    assert lack.memory[lack.stage] == pytest.approx(lack.factor * lack.limits[lack.stage])
    for chain, balance, slots in placements(profile, machine, batch_size):
        ends = enumerate(pairwise(accumulate(balance, initial=0)))
        worst = max(
            min(chain.memory(i, j, slots[s], slots[0], again) for again in (False, True))
            / machine.memory[s]
            for s, (i, j) in ends
        )
        assert lack.factor <= worst * (1 + 1e-3)
    grown = machine.with_memory([lack.factor * 1.001 * limit for limit in machine.memory])
    assert search(profile, grown, batch_size, param_scale=4)
    if lack.devices is not None:
        for n in (lack.devices - 1, lack.devices):
            more = Machine.even(n, machine.memory[0])
            assert bool(search(profile, more, batch_size, param_scale=4)) == (n == lack.devices)
    if lack.batch_size is not None:
        assert search(profile, machine, lack.batch_size, param_scale=4)


def test_a_shortage_in_numbers() -> None:
    layers = [LayerProfile(str(k), {8: 1.0}, {8: 1.0}, {8: 8.0}, {8: 16.0}, {}, 25) for k in "abcd"]
    profile = Profile(tuple(layers))
    lack = shortage(profile, Machine.even(2, 150.0), 8, param_scale=4)
    assert lack is not None
    assert (lack.balance, lack.chunks, lack.stage) == ((2, 2), 8, 0)
    # 2 layers with 100 for parameters; 2 micro-batches of one sample recompute: 2 x 0 + 4 kept.
    assert lack.memory == (204.0, 204.0)
    assert (lack.missing, lack.devices, lack.batch_size) == (54.0, 4, None)
    assert "stage 0 needs 204 B of 150 B" in str(lack)
    fewer = shortage(profile, Machine.even(2, 212.0), 16, param_scale=4, chunks=2)
    assert fewer is not None
    assert fewer.batch_size == 6  # micro-batches of 3 samples keep 12 beside the 200


# --- what is tried, and errors ------------------------------------------------------------------


def test_how_many_micro_batches_are_tried() -> None:
    one, two = {8: 1.0}, {8: 1.0, 16: 2.0}
    single = Profile((LayerProfile("a", one, one, one, one),))
    double = Profile((LayerProfile("a", two, two, two, two),))
    assert chunk_counts(single, 2, 24) == ((1, 2, 3, 4, 6, 8), (12, 24))
    assert chunk_counts(double, 2, 24) == ((1, 2, 3, 4, 6, 8, 12, 24), ())
    assert chunk_counts(single, 2, 24, 12) == ((12,), ())
    assert max(chunk_counts(single, 2, 4096)[1]) == 1024
    assert stage_counts(10, 4) == (1, 2, 3, 4)
    assert stage_counts(3, 4) == (1, 2, 3)
    assert stage_counts(100, 64) == tuple(range(1, 65))


ONE = {8: 1.0}
PROFILE = Profile(tuple(LayerProfile(str(k), ONE, ONE, ONE, ONE) for k in range(3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunks": 6}, "chunks=6 does not divide batch_size=8 .* they are 4 of 2"),
        ({"chunks": 0}, "chunks=0 does not divide"),
        ({"chunks": []}, "chunks is empty"),
        ({"stages": 3}, "stages=3 is not possible with 2 devices and 3 layers: give it 1 to 2"),
        ({"stages": []}, "stages is empty"),
        ({"schedules": ["zb_h1"]}, "schedule='zb_h1'"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_searches_that_make_no_sense(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(PROFILE, Machine.even(2), **{"batch_size": 8, "param_scale": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"balance": (1, 1)}, r"balance=\[1, 1\] does not cut 3 layers"),
        ({"balance": (3, 0)}, r"balance=\[3, 0\] does not cut"),
        ({"balance": (1, 1, 1)}, "3 stages for 2 devices"),
        ({"chunks": 5}, "chunks=5 does not divide"),
        ({"schedule": "naive"}, "schedule='naive'"),
        ({"schedule": "gpipe", "slots": "textbook"}, "GPipe's schedule has none"),
        ({"slots": (2,)}, "are for each of 2 stages"),
        ({"slots": "many"}, "slots='many': use 'textbook', 'overlap' or 'single'"),
        ({"recomputes": (True,)}, "are for each of 2 stages"),
    ],
)
def test_cuts_that_make_no_sense(arguments: Any, message: str) -> None:
    usual = {"balance": (1, 2), "chunks": 2, "schedule": "1f1b", "param_scale": 4}
    with pytest.raises(ValueError, match=message):
        evaluate(PROFILE, Machine.even(2), 8, **{**usual, **arguments})


def test_what_does_not_fit_is_said_not_raised() -> None:
    common: dict[str, Any] = {"balance": (1, 2), "chunks": 2, "schedule": "gpipe", "param_scale": 4}
    one: Candidate = evaluate(PROFILE, Machine.even(2, 1.5), 8, **common)
    assert not one.fits(Machine.even(2, 1.5))
    assert one.memory == (1.0, 2 * 0.5 + 2 * 0.5)
    assert one.fits(Machine.even(2, 2.0))
    assert Terms(PROFILE, Machine.even(2), 8, 4).recomputing((1, 2), 2, (2, 2)) == (False, False)


@pytest.mark.parametrize(
    ("times", "outputs"),
    [
        ([1, 2, 3, 1, 3, 1], [60, 40, 40, 40, 20, 1]),
        ([3, 2, 3, 2, 1, 3], [40, 30, 30, 10, 1, 1]),
        ([2, 1, 2, 1, 1, 2], [60, 60, 30, 10, 10, 1]),
    ],
)
def test_where_links_are_slow_slots_that_suit_the_cut_beat_both_families(
    times: list[int], outputs: list[int]
) -> None:
    layers = [
        LayerProfile(str(k), {8: float(t)}, {8: 2.0 * t}, {8: size}, {8: 0})
        for k, (t, size) in enumerate(zip(times, outputs, strict=True))
    ]
    profile, machine = Profile(tuple(layers)), Machine.even(4, math.inf, 10.0)
    given: dict[str, Any] = {"chunks": 8, "schedule": "1f1b", "param_scale": 4.0}
    usual = min(
        evaluate(profile, machine, 64, balance=balance, slots=family, **given).time
        for balance in balances(6, 4)
        for family in FAMILIES
    )
    (best,) = search(profile, machine, 64, param_scale=4.0, chunks=8, stages=4, schedules=["1f1b"])
    assert best.time < 0.97 * usual
