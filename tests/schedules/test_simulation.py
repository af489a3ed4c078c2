"""The simulator against what papers publish, against formulas, and against its own promises."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncpipe.schedules import build, gpipe, naive, one_f_one_b, zb_h1
from syncpipe.schedules.player import Costs, Simulation, Span, simulate
from syncpipe.schedules.schedule import Action, Schedule
from tests.schedules.test_schedule import schedules

SIZES = [(1, 1), (4, 1), (1, 4), (2, 2), (3, 4), (8, 4), (16, 4), (8, 8), (32, 8)]

# Multiples of 1/4 add up without rounding, so that sums can be compared exactly.
times = st.integers(0, 40).map(lambda quarters: quarters / 4)


def costs_for(n: int) -> st.SearchStrategy[Costs]:
    def row(length: int) -> st.SearchStrategy[tuple[float, ...]]:
        return st.lists(times, min_size=length, max_size=length).map(tuple)

    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    skips = st.dictionaries(st.sampled_from(pairs), times, max_size=3) if pairs else st.just({})
    return st.builds(Costs, row(n), row(n), row(n), row(n - 1), skips)


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    schedule = draw(schedules())
    return simulate(schedule, draw(costs_for(schedule.n)))


# --- published facts ----------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.5])
def test_bubble_of_gpipe_and_1f1b(m: int, n: int, backward: float) -> None:
    costs = Costs.even(n, 1.0, backward / 2, backward / 2)
    for schedule in (gpipe(m, n), one_f_one_b(m, n), one_f_one_b(m, n, slots="textbook")):
        assert simulate(schedule, costs).bubble == pytest.approx((n - 1) / (m + n - 1))


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (1, 2, 1), (4, 5, 4), (2, 3, 2)])
@pytest.mark.parametrize(("m", "n"), [(4, 4), (8, 4), (16, 8)])
def test_zero_bubble_idles_for_f_plus_i_minus_w(
    f: float, i: float, w: float, m: int, n: int
) -> None:
    """Qi et al. 2023, table 2: (p-1)(F+B-W), B being their input half."""
    makespan = simulate(zb_h1(m, n), Costs.even(n, f, i, w)).makespan
    assert makespan - m * (f + i + w) == pytest.approx((n - 1) * (f + i - w))


@pytest.mark.parametrize(("m", "n"), [(8, 2), (16, 4), (32, 8)])
@pytest.mark.parametrize("transfer", [0.1, 0.3, 0.5])
def test_more_slots_hide_transfers(m: int, n: int, transfer: float) -> None:
    costs = Costs.even(n, transfer=transfer)
    textbook = simulate(one_f_one_b(m, n, slots="textbook"), costs).makespan
    overlap = simulate(one_f_one_b(m, n, slots="overlap"), costs).makespan
    hidden = 3 * (m + n - 1) + 2 * (n - 1) * transfer  # only the first and the last way show
    assert overlap == pytest.approx(hidden)
    assert textbook > overlap


# --- formulas -----------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_gpipe_step_time(m: int, n: int, data: st.DataObject) -> None:
    """PLANNER.md: T = K + X + (m-1) (F* + R*), exact without recomputation."""
    costs = replace(data.draw(costs_for(n)), skips={})
    backward = [i + w for i, w in zip(costs.backward_input, costs.backward_weight, strict=True)]
    slowest = max((*costs.forward, *costs.transfer)) + max((*backward, *costs.transfer))
    expected = sum(costs.forward) + sum(backward) + 2 * sum(costs.transfer) + (m - 1) * slowest
    assert simulate(gpipe(m, n), costs).makespan == expected


@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_1f1b_is_no_faster_than_its_bound(m: int, n: int, data: st.DataObject) -> None:
    """PLANNER.md, 1F1B step time: a bound for each stage with q slots."""
    costs = replace(data.draw(costs_for(n)), skips={})
    numbers = data.draw(st.lists(st.integers(1, 12), min_size=n, max_size=n))
    slots = sorted(numbers, reverse=True)
    makespan = simulate(one_f_one_b(m, n, slots=slots), costs).makespan
    backward = [i + w for i, w in zip(costs.backward_input, costs.backward_weight, strict=True)]
    both = [f + b for f, b in zip(costs.forward, backward, strict=True)]
    for s, q in enumerate(slots):
        f, b = costs.forward[s], backward[s]
        left = sum(both[:s]) + 2 * sum(costs.transfer[:s])
        right = sum(both[s + 1 :]) + 2 * sum(costs.transfer[s:])
        if m > q:
            bound = m * (f + b) + max(0, right - (q - 1) * f) + max(0, right - (q - 1) * b)
        else:
            bound = max(m * (f + b), f + right + b + (m - 1) * b, m * f + right + b)
        assert makespan >= left + bound


# --- what holds for every schedule --------------------------------------------------------------


@given(simulations())
def test_bounds(simulation: Simulation) -> None:
    schedule, costs = simulation.schedule, simulation.costs
    assert simulation.makespan >= max(simulation.busy)
    there = sum(
        time
        for j, time in enumerate(costs.transfer)
        if schedule.device_of[j] != schedule.device_of[j + 1]
    )
    chain = sum(costs.forward) + sum(costs.backward_input) + 2 * there
    if not schedule.splits:  # then nobody goes back before the weights are done
        chain += sum(costs.backward_weight)
    assert simulation.makespan >= chain
    assert 0 <= simulation.bubble <= 1
    total = sum(map(sum, (costs.forward, costs.backward_input, costs.backward_weight)))
    assert sum(simulation.busy) == schedule.m * total
    transfers = sum(transfer.end - transfer.start for transfer in simulation.transfers)
    assert simulation.makespan <= schedule.m * total + transfers


def action_of(span: Span) -> Action:
    return Action(span.kind, span.i, span.j)  # type: ignore[arg-type]


@given(simulations())
def test_spans_follow_the_schedule(simulation: Simulation) -> None:
    """In order on each device, one at a time, and never before what they need is there."""
    schedule, costs = simulation.schedule, simulation.costs
    spans = {action_of(span): span for span in simulation.spans}
    arrivals: dict[tuple[int, int | None, bool], float] = {}
    for t in simulation.transfers:
        key = t.i, t.target, t.backward
        arrivals[key] = max(t.end, arrivals.get(key, 0.0))
    assert len(spans) == len(simulation.spans) == sum(map(len, schedule.actions))
    for d, row in enumerate(schedule.actions):
        free = 0.0
        for action in row:
            kind, i, j = action
            span = spans[action]
            assert span.row == d
            assert span.end == span.start + costs.of(action)
            needed = [spans[each].end for each in schedule.predecessors(action)]
            if kind != "backward_weight":
                needed.append(arrivals.get((i, j, kind != "forward"), 0.0))
            assert span.start == max([free, *needed])
            free = span.end


@given(simulations())
def test_links_carry_one_thing_at_a_time(simulation: Simulation) -> None:
    schedule, costs = simulation.schedule, simulation.costs
    ends = {action_of(span): span.end for span in simulation.spans}
    busy_until: dict[tuple[int, int], float] = {}
    count = 0
    for t in simulation.transfers:
        assert t.target is not None
        sender = schedule.backward_of(t.i, t.j) if t.backward else Action("forward", t.i, t.j)
        link = (schedule.device(t.i, t.j), schedule.device(t.i, t.target))
        assert t.row == link[0] != link[1]
        assert t.start >= max(ends[sender], busy_until.get(link, 0.0))
        busy_until[link] = t.end
    device = schedule.device_of
    count = sum(device[a] != device[b] for a, b, _ in costs.edges)
    assert len(simulation.transfers) == 2 * schedule.m * count
    for spans in (simulation.spans, simulation.transfers):
        assert [s.start for s in spans] == sorted(s.start for s in spans)


@given(simulations(), st.data())
def test_what_is_slower_never_ends_earlier(simulation: Simulation, data: st.DataObject) -> None:
    """Without queues on links, where a change may let something else go first."""
    schedule = simulation.schedule
    costs = replace(simulation.costs, transfer=(), skips={})
    name = data.draw(st.sampled_from(["forward", "backward_input", "backward_weight"]))
    j = data.draw(st.integers(0, schedule.n - 1))
    slower = list(getattr(costs, name))
    slower[j] += data.draw(times)
    changed: dict[str, Any] = {name: tuple(slower)}
    slow = replace(costs, **changed)
    assert simulate(schedule, slow).makespan >= simulate(schedule, costs).makespan


# --- skips, small cases and errors --------------------------------------------------------------


def test_a_skip_is_waited_for_there_and_back() -> None:
    costs = Costs.even(3)
    assert simulate(gpipe(1, 3), costs).makespan == 9
    slow = replace(costs, skips={(0, 2): 5.0})
    simulation = simulate(gpipe(1, 3), slow)
    # F0 1, skip 5, F2 1, B2 2, skip back 5, B0 2
    assert simulation.makespan == 16


def test_on_one_device_nothing_travels() -> None:
    costs = Costs.even(3, transfer=7.0)
    simulation = simulate(build("1f1b", 4, (0, 0, 0)), replace(costs, skips={(0, 2): 9.0}))
    assert simulation.transfers == ()
    assert simulation.makespan == 4 * 9
    assert simulation.bubble == 0


def test_a_link_is_a_queue() -> None:
    """Transfers three times as long as a forward set the pace of the second device."""
    simulation = simulate(gpipe(3, 2), Costs.even(2, 1, 1, 0, transfer=3.0))
    ways = [(t.start, t.end) for t in simulation.transfers if t.target == 1]
    assert ways == [(1, 4), (4, 7), (7, 10)]


def test_a_schedule_that_cannot_run() -> None:
    broken = Schedule(1, (0,), ((Action("backward", 0, 0), Action("forward", 0, 0)),))
    with pytest.raises(ValueError, match="0B0, action 0 of device 0, waits for 0F0"):
        simulate(broken, Costs.even(1))
    with pytest.raises(ValueError, match="costs are for 3 stages, but schedule 'gpipe' has 2"):
        simulate(gpipe(2, 2), Costs.even(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1,), (1, 1), (1,)), "backward_input has 2 times, but forward is for 1 stages"),
        (((1, 1), (1, 1), (1,)), "backward_weight has 1 times"),
        (((1, 1), (1, 1), (1, 1), (1, 1)), "transfer has 2 times, .* give 1"),
        (((1, -1), (1, 1), (1, 1)), "forward has the time -1"),
        (((1, 1), (1, math.nan), (1, 1)), "backward_input has the time nan"),
        (((1, 1), (1, 1), (1, 1), (math.inf,)), "transfer has the time inf"),
        (((1, 1), (1, 1), (1, 1), (), {(0, 1): -2}), "skips has the time -2"),
        (((1, 1), (1, 1), (1, 1), (), {(1, 0): 2}), "skip from stage 1 to 0"),
        (((1, 1), (1, 1), (1, 1), (), {(0, 2): 2}), "skip from stage 0 to 2 is none, with 2"),
        (((), (), ()), "at least one stage"),
        (((1, 1), (1, 1), (1, 1), (), {}, (1,)), r"recompute has 1 times.*2 stages"),
    ],
)
def test_costs_that_are_none(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs(*arguments)


# --- recomputation ------------------------------------------------------------------------------


@st.composite
def recomputing(draw: st.DrawFn) -> Simulation:
    schedule = draw(schedules())
    counts = [draw(st.integers(0, schedule.m)) for _ in range(schedule.n)]
    return simulate(schedule, draw(costs_for(schedule.n)), counts)


@given(recomputing())
def test_each_recomputation_is_right_before_its_backward(simulation: Simulation) -> None:
    kinds = ("recompute", "backward", "backward_input")
    for row in range(len(simulation.schedule.actions)):
        spans = sorted((s for s in simulation.spans if s.row == row), key=lambda s: s.start)
        order = [action_of(span) for span in spans]
        for k, action in enumerate(order):
            if action.kind in kinds[1:]:
                again = action.i < simulation.rematerialized[action.j]
                before = order[k - 1]
                assert (before.kind == "recompute") == again
                assert not again or before[1:] == action[1:]
    recomputed = [s for s in simulation.spans if s.kind == "recompute"]
    assert len(recomputed) == sum(simulation.rematerialized)


@given(st.data())
def test_what_is_played_is_when_spans_end(data: st.DataObject) -> None:
    """The player and the spans work out times each by itself; also for a smaller last one."""
    schedule = data.draw(schedules())
    usual, last = (data.draw(costs_for(schedule.n)) for _ in range(2))
    costs = replace(usual, last=replace(last, skips=usual.skips))
    counts = [data.draw(st.integers(0, schedule.m)) for _ in range(schedule.n)]
    every = data.draw(st.sampled_from([None, 1, 2]))
    simulation = simulate(schedule, costs, counts, update_every=every)
    assert simulation.makespan == max(span.end for span in simulation.spans)


@pytest.mark.parametrize("device_of", [((0, 1), 2), (0, (1, 2)), ((0, 1), (2, 3))])
def test_each_replica_has_links_of_its_own(device_of: tuple[int | tuple[int, ...], ...]) -> None:
    simulation = simulate(build("1f1b", 6, device_of), Costs.even(2, transfer=4.0))
    assert simulation.makespan == max(span.end for span in simulation.spans)
    receivers = {simulation.schedule.device(t.i, t.target or 0) for t in simulation.transfers}
    assert receivers == set(range(len(simulation.schedule.actions)))


@given(recomputing())
def test_recomputing_less_never_takes_longer(simulation: Simulation) -> None:
    plain = simulate(simulation.schedule, simulation.costs)
    assert plain.makespan <= simulation.makespan
    assert sum(simulation.busy) == pytest.approx(
        sum(plain.busy)
        + sum(
            count * time
            for count, time in zip(
                simulation.rematerialized, simulation.costs.recompute, strict=True
            )
        )
    )


@pytest.mark.parametrize("m", [2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_in_even_stages_gpipe_pays_for_all_but_what_waits_anyway(m: int, n: int) -> None:
    """The last micro-batch of every stage but the last is recomputed while others go back."""
    costs = Costs.even(n, 1.0, 1.0, 1.0)
    stored = simulate(gpipe(m, n), costs).makespan
    assert simulate(gpipe(m, n), costs, [m - 1] * n).makespan == stored + m - 1
    assert simulate(gpipe(m, n), costs, [m] * n).makespan == stored + m


def test_a_recomputation_does_not_wait_for_the_gradient() -> None:
    simulation = simulate(naive(1, 2), Costs.even(2, 1.0, 1.0, 1.0), [1, 0])
    again = next(span for span in simulation.spans if span.kind == "recompute")
    assert (again.start, again.end) == (1.0, 2.0)
    assert simulation.makespan == 6.0


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [-1, 0], [0, 5]])
def test_numbers_that_do_not_fit_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rematerialized=.*0 to m=4.*2 stages"):
        simulate(gpipe(4, 2), Costs.even(2), counts)
