"""The planner's exact searches against brute force, and their formulas against the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.planner.costs.chain import Chain, costs_of
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.cuts.gpipe import GPipeCuts
from syncpipe.planner.cuts.network import even_cut, least_load
from syncpipe.planner.cuts.one_f_one_b import Family, OneFOneBCuts, slots_of
from syncpipe.schedules import gpipe, one_f_one_b
from syncpipe.schedules.simulation import simulate

FAMILIES: tuple[Family, ...] = ("textbook", "overlap")
numbers = st.integers(0, 12).map(float)
bandwidths = st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0, math.inf])
memories = st.sampled_from([10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 150.0, 300.0, math.inf])


@st.composite
def chains(draw: st.DrawFn, most: int = 8) -> Chain:
    length = draw(st.integers(1, most))

    def row() -> tuple[float, ...]:
        return tuple(draw(st.lists(numbers, min_size=length, max_size=length)))

    pairs = [(a, b) for a in range(length) for b in range(a + 1, length)]
    skips = (
        st.lists(st.tuples(st.sampled_from(pairs), numbers), max_size=3) if pairs else st.just([])
    )
    stored, shared = row(), row()
    return Chain(
        forward=row(),
        backward=row(),
        inputs=row(),
        stored=stored,
        shared=tuple(map(min, stored, shared)) if draw(st.booleans()) else shared,
        fixed=row(),
        skips=tuple((a, b, size) for (a, b), size in draw(skips)),
    )


@st.composite
def machines(draw: st.DrawFn, n: int) -> Machine:
    if draw(st.booleans()):
        return Machine.even(n, draw(memories), draw(bandwidths))
    rows = [[math.inf if a == b else draw(bandwidths) for b in range(n)] for a in range(n)]
    speed = [draw(st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0])) for _ in range(n)]
    return Machine(tuple(draw(memories) for _ in range(n)), tuple(map(tuple, rows)), speed=speed)


def balances(length: int, n: int) -> Iterator[tuple[int, ...]]:
    for borders in combinations(range(1, length), n - 1):
        yield tuple(j - i for i, j in pairwise((0, *borders, length)))


def recomputing(
    chain: Chain, machine: Machine, balance: Sequence[int], slots: Sequence[int]
) -> list[bool] | None:
    """Which stages recompute, written down a second time; None if something does not fit."""
    decisions = []
    for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0))):
        stored = sum(chain.stored[i:j]) - sum(chain.shared[i + 1 : j])
        waiting = sum(size for a, b, size in chain.skips if a < i <= b < j)
        base = sum(chain.fixed[i:j]) + slots[0] * waiting
        for recomputes in (False, True):
            kept = slots[s] * (chain.inputs[i] if recomputes else stored) + recomputes * stored
            if base + kept <= machine.memory[s]:
                decisions.append(recomputes)
                break
        else:
            return None
    return decisions


def gpipe_time(chain: Chain, machine: Machine, balance: Sequence[int], m: int) -> float | None:
    recomputes = recomputing(chain, machine, balance, (m,) * len(balance))
    if recomputes is None:
        return None
    costs = costs_of(chain, machine, balance)
    f, b, tx = costs.forward, costs.backward_input, costs.transfer
    r = [back + again * there for there, back, again in zip(f, b, recomputes, strict=True)]
    return sum(f) + sum(b) + 2 * sum(tx) + (m - 1) * (max(*f, 0, *tx) + max(*r, 0, *tx))


def bound_of_1f1b(
    chain: Chain, machine: Machine, balance: Sequence[int], m: int, slots: Sequence[int]
) -> float | None:
    """PLANNER.md's formulas stage by stage, and the links."""
    recomputes = recomputing(chain, machine, balance, slots)
    if recomputes is None:
        return None
    costs, n = costs_of(chain, machine, balance), len(balance)
    fs, bs, tx = costs.forward, costs.backward_input, costs.transfer
    off = fs[-1] if recomputes[-1] else 0
    whole = sum(fs) + sum(bs) + 2 * sum(tx) + off
    bounds = [whole + (m - 1) * way for way in tx]
    for s, q in enumerate(slots):
        f, r = fs[s], bs[s] + fs[s] * recomputes[s]
        pre = sum(fs[:s]) + sum(bs[:s]) + 2 * sum(tx[:s])
        d = sum(fs[s + 1 :]) + sum(bs[s + 1 :]) + 2 * sum(tx[s:]) + (off if s < n - 1 else 0)
        e = f if recomputes[s] and s < n - 1 else 0
        if m > q:
            own = m * (f + r) + max(0, d - (q - 1) * f - e) + max(0, d - (q - 1) * r - e)
        else:
            own = max(m * (f + r), f + d + bs[s] + (m - 1) * r, m * f + d + bs[s])
        bounds.append(pre + own)
    return max(bounds)


def best_of(values: Iterator[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


# --- against brute force ------------------------------------------------------------------------


@given(chains(), st.integers(1, 5), st.integers(1, 9), st.data())
def test_gpipe_finds_the_best_cut(chain: Chain, n: int, m: int, data: st.DataObject) -> None:
    machine = data.draw(machines(n))
    cut = GPipeCuts(chain, machine, m, (m,) * n).minimise()
    every = balances(len(chain), n)
    expected = best_of(gpipe_time(chain, machine, balance, m) for balance in every)
    if expected is None:
        assert cut is None
        return
    assert cut is not None
    assert cut.value == pytest.approx(expected, rel=1e-9)
    assert cut.value == pytest.approx(gpipe_time(chain, machine, cut.balance, m), rel=1e-9)
    assert list(cut.recomputes) == recomputing(chain, machine, cut.balance, (m,) * n)


@given(chains(), st.integers(1, 5), st.integers(1, 12), st.sampled_from(FAMILIES), st.data())
def test_1f1b_finds_the_least_bound(
    chain: Chain, n: int, m: int, family: Family, data: st.DataObject
) -> None:
    machine, slots = data.draw(machines(n)), slots_of(family, n, m)
    cut = OneFOneBCuts(chain, machine, m, [min(m, q) for q in slots]).minimise()
    every = balances(len(chain), n)
    expected = best_of(bound_of_1f1b(chain, machine, balance, m, slots) for balance in every)
    if expected is None:
        assert cut is None
        return
    assert cut is not None
    assert cut.value == pytest.approx(expected, rel=1e-9)
    assert cut.value == pytest.approx(bound_of_1f1b(chain, machine, cut.balance, m, slots))
    assert list(cut.recomputes) == recomputing(chain, machine, cut.balance, slots)


@given(chains(most=5), st.integers(1, 3), st.integers(1, 5), st.data())
def test_with_free_slots_no_choice_of_them_has_a_lower_bound(
    chain: Chain, n: int, m: int, data: st.DataObject
) -> None:
    machine = data.draw(machines(n))
    cut = OneFOneBCuts(chain, machine, m, (m,) * n, free=True).minimise()
    every = [
        bound_of_1f1b(chain, machine, balance, m, slots)
        for balance in balances(len(chain), n)
        for slots in product(range(1, m + 1), repeat=n)
        if list(slots) == sorted(slots, reverse=True)
    ]
    expected = best_of(iter(every))
    if expected is None:
        return
    assert cut is not None
    assert cut.value <= expected * (1 + 1e-9)
    if not chain.skips and machine.memory == (math.inf,) * n:
        assert cut.value == pytest.approx(expected, rel=1e-9)


@given(chains(), st.integers(1, 4), st.integers(1, 9), st.data())
def test_a_limit_on_the_time_hides_only_what_is_slower(
    chain: Chain, n: int, m: int, data: st.DataObject
) -> None:
    machine = data.draw(machines(n))
    slots = slots_of("overlap", n, m)
    factor = data.draw(st.sampled_from([0.5, 0.99, 1.0, 1.01, 2.0]))
    for search in (GPipeCuts(chain, machine, m, (m,) * n), OneFOneBCuts(chain, machine, m, slots)):
        best = search.minimise()
        if best is not None:
            again = search.minimise(at_most=best.value * factor)
            if factor >= 1 or best.value == 0:
                assert again is not None
                assert again.value == pytest.approx(best.value)
            else:
                assert again is None


@given(st.lists(numbers, min_size=1, max_size=9), st.data())
def test_no_cut_is_more_even(times: list[float], data: st.DataObject) -> None:
    """Of devices of different speed none is more even than the bound says."""
    n = data.draw(st.integers(1, len(times)))
    sums = list(accumulate(times, initial=0.0))
    speed = data.draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=n, max_size=n))

    def largest(balance: Sequence[int]) -> float:
        stages = zip(pairwise(accumulate(balance, initial=0)), speed, strict=True)
        return max(sum(times[i:j]) / v for (i, j), v in stages)

    cut = even_cut(sums, n, speed)
    assert (len(cut), sum(cut), min(cut) > 0) == (n, len(times), True)
    best = min(map(largest, balances(len(times), n)))
    assert least_load(sums, speed) <= best * (1 + 1e-9)
    if len(set(speed)) == 1:
        assert largest(cut) == pytest.approx(best)
        assert least_load(sums, speed) == pytest.approx(best)


# --- against the simulator ----------------------------------------------------------------------


@given(chains(), st.integers(1, 4), st.integers(1, 8), st.data())
def test_gpipe_takes_what_the_closed_form_says(
    chain: Chain, n: int, m: int, data: st.DataObject
) -> None:
    """Exactly without recomputation, at least that with it or with skips."""
    machine = data.draw(machines(n))
    cut = GPipeCuts(chain, machine, m, (m,) * n).minimise()
    if cut is None:
        return
    counts = [(m - 1) * recomputes for recomputes in cut.recomputes]
    time = simulate(gpipe(m, n), costs_of(chain, machine, cut.balance), counts).makespan
    if any(counts) or chain.skips:
        assert time >= cut.value * (1 - 1e-9)
    else:
        assert time == pytest.approx(cut.value, rel=1e-9)


@given(chains(), st.integers(1, 12), st.data())
def test_1f1b_takes_no_less_than_its_bound(chain: Chain, m: int, data: st.DataObject) -> None:
    """For any cut and any slots, whatever stages recompute."""
    n = data.draw(st.integers(1, min(5, len(chain))))
    machine = data.draw(machines(n))
    balance = data.draw(st.sampled_from(list(balances(len(chain), n))))
    slots = sorted(data.draw(st.lists(st.integers(1, 12), min_size=n, max_size=n)), reverse=True)
    recomputes = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    search = OneFOneBCuts(chain, machine, m, [min(m, q) for q in slots])
    schedule = one_f_one_b(m, n, slots=slots)
    counts = [m * again for again in recomputes]
    time = simulate(schedule, costs_of(chain, machine, balance), counts).makespan
    assert time >= search.value(balance, recomputes) * (1 - 1e-9)


def test_all_to_the_left_wait_while_the_last_stage_recomputes() -> None:
    chain = Chain(
        (10.0, 5.0), (10.0, 1.0), (0.0,) * 2, (0.0,) * 2, (0.0,) * 2, (0.0,) * 2, (0,) * 2
    )
    search = OneFOneBCuts(chain, Machine.even(2), 3, (1, 1))
    # With one slot stage 0 waits for the other at the first and the last micro-batch at least.
    assert search.value((1, 1), (False, True)) == 3 * (10 + 10) + 2 * (5 + 5 + 1)
    assert search.value((1, 1), (False, False)) == 3 * (10 + 10) + 2 * (5 + 1)


# --- what a stage holds, and small cases --------------------------------------------------------


def a_profile() -> Profile:
    """Three layers, measured with 2 and 4 samples; layer 1 keeps layer 0's output as well."""
    layers = [
        LayerProfile("a", {2: 1, 4: 2}, {2: 2, 4: 4}, {2: 20, 4: 40}, {2: 30, 4: 60}),
        LayerProfile(
            "b", {2: 1, 4: 3}, {2: 2, 4: 2}, {2: 8, 4: 16}, {2: 25, 4: 50}, {2: 20, 4: 40}, 100
        ),
        LayerProfile("c", {2: 5, 4: 6}, {2: 1, 4: 1}, {2: 2, 4: 4}, {2: 6, 4: 12}, {}, 10, 4, 3),
    ]
    return Profile(tuple(layers), (SkipProfile("s", 0, 2, {2: 7, 4: 14}),), {2: 12, 4: 24})


def test_a_chain_has_what_lies_between_the_sizes_that_were_measured() -> None:
    chain = Chain.of(a_profile(), 3, param_scale=4)
    assert chain.forward == (1.5, 2, 5.5)
    assert chain.backward == (3, 2, 1)
    assert chain.inputs == (18, 30, 12)
    assert chain.fixed == (0, 400, 4 * 6 + 4 + 3)
    assert chain.skips == ((0, 2, 10.5),)


def test_memory_of_a_stage() -> None:
    chain = Chain.of(a_profile(), 2, param_scale=4)
    assert chain.stored_in(0, 2) == 30 + 25 - 20  # what b shares with a counts once
    assert chain.stored_in(1, 2) == 25  # and is its own where a is elsewhere
    assert chain.memory(0, 2, q=3, q0=3, recomputes=False) == 400 + 3 * 35
    assert chain.memory(0, 2, q=3, q0=3, recomputes=True) == 400 + 3 * 12 + 35
    # The skip into c waits from when stage 0 sent it.
    assert chain.memory(2, 3, q=1, q0=3, recomputes=False) == 31 + 6 + 3 * 7
    assert chain.memory(0, 3, q=1, q0=1, recomputes=False) == 431 + 41


def test_skips_between_stages_take_the_link_between_their_devices() -> None:
    machine = Machine(
        (math.inf,) * 3,
        ((math.inf, 4.0, 2.0), (5.0, math.inf, 1.0), (1.0, 8.0, math.inf)),
    )
    costs = costs_of(Chain.of(a_profile(), 2, param_scale=4), machine, (1, 1, 1))
    assert costs.transfer == (20 / 4.0, 8 / 1.0)  # there or back, whichever is slower
    assert costs.skips == {(0, 2): 7 / 1.0}
    assert costs_of(Chain.of(a_profile(), 2, 4), machine, (3,)).skips == {}


@pytest.mark.parametrize(
    ("memory", "bandwidth", "message"),
    [
        ((), (), "names no device"),
        ((1.0, -2.0), ((math.inf, 1.0), (1.0, math.inf)), "memory of device 1 is -2"),
        ((1.0, math.nan), ((math.inf, 1.0), (1.0, math.inf)), "memory of device 1 is nan"),
        ((1.0,), ((math.inf, 1.0),), r"rows of \[2\] numbers, but memory is for 1"),
        ((1.0, 1.0), ((math.inf, 0.0), (1.0, math.inf)), "bandwidth from device 0 to 1 is 0"),
        ((1.0, 1.0), ((1.0, 1.0), (1.0, math.inf)), "device 0 to itself is 1"),
    ],
)
def test_machines_that_are_none(
    memory: tuple[float, ...], bandwidth: tuple[tuple[float, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Machine(memory, bandwidth)


def test_a_machine() -> None:
    machine = Machine.even(3, 16e9, 12e9)
    assert (len(machine), machine.uniform, machine.time(24e9, 0, 2)) == (3, True, 2.0)
    assert machine.time(24e9, 1, 1) == 0
    assert machine.head(2) == Machine.even(2, 16e9, 12e9)
    assert not Machine((1.0, 2.0), Machine.even(2).bandwidth).uniform
    assert not Machine((1.0, 1.0), Machine.even(2).bandwidth, speed=(1.0, 2.0)).uniform
    with pytest.raises(ValueError, match="there are 3 devices"):
        machine.head(4)
    with pytest.raises(ValueError, match="speed has 1 factors, but there are 2 devices"):
        Machine((1.0, 1.0), Machine.even(2).bandwidth, speed=(1.0,))


def test_devices_in_another_order() -> None:
    rows = ((math.inf, 1.0, 2.0), (3.0, math.inf, 4.0), (5.0, 6.0, math.inf))
    machine = Machine((1.0, 2.0, 1.0), rows, speed=(1.0, 3.0, 1.0))
    other = machine.ordered((1, 2))
    assert (other.memory, other.speed) == ((2.0, 1.0), (3.0, 1.0))
    assert other.bandwidth == ((math.inf, 4.0), (6.0, math.inf))
    assert other.names == ("device 1", "device 2")  # each keeps what it was called
    assert machine.orders() == [(0, 1, 2), (0, 2, 1), (1, 0, 2)]
    assert Machine.even(3).orders() == [(0, 1, 2)]
