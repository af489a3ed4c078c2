"""The simulator against what papers publish, against formulas, and against its own promises."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncpipe.schedules import gpipe, naive, one_f_one_b
from syncpipe.schedules.player import Costs, Simulation, Span, play, simulate
from syncpipe.schedules.schedule import Action, Schedule
from tests.schedules.test_schedule import schedules

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


@pytest.mark.parametrize(("m", "n"), [(8, 2), (16, 4), (32, 8)])
@pytest.mark.parametrize("transfer", [0.1, 0.3, 0.5])
def test_more_slots_hide_transfers(m: int, n: int, transfer: float) -> None:
    costs = Costs.even(n, transfer=transfer)
    textbook = simulate(one_f_one_b(m, n, slots="textbook"), costs).makespan
    overlap = simulate(one_f_one_b(m, n, slots="overlap"), costs).makespan
    hidden = 3 * (m + n - 1) + 2 * (n - 1) * transfer  # only the first and the last way show
    assert overlap == pytest.approx(hidden)
    assert textbook > overlap


def action_of(span: Span) -> Action:
    return Action(span.kind, span.i, span.j)  # type: ignore[arg-type]


@given(st.data())
def test_everything_starts_as_soon_as_it_can(data: st.DataObject) -> None:
    """In order on each device and link, and never before what it needs is there."""
    schedule, m = (made := data.draw(schedules())), made.m
    usual, last = (data.draw(costs_for(schedule.n)) for _ in range(2))
    costs = replace(usual, last=replace(last, skips=usual.skips))
    counts = [data.draw(st.integers(0, m)) for _ in range(schedule.n)]
    simulation = simulate(schedule, costs, counts)
    spans = {action_of(span): span for span in simulation.spans}
    busy: dict[Any, float] = defaultdict(float)  # links, and what has arrived
    for t in simulation.transfers:
        assert t.target is not None
        sender = schedule.backward_of(t.i, t.j) if t.backward else Action("forward", t.i, t.j)
        link, there = (t.row, schedule.device(t.i, t.target)), (t.i, t.target, t.backward)
        assert t.row == schedule.device(t.i, t.j) != link[1]
        assert t.start == max(spans[sender].end, busy[link])
        busy[link], busy[there] = t.end, max(t.end, busy[there])
    device = schedule.device_of
    sent = sum(device[a] != device[b] for a, b, _ in costs.edges)
    assert len(simulation.transfers) == 2 * m * sent
    for d, row in enumerate(schedule.actions):
        free = 0.0
        for kind, i, j in row:
            needed = [spans[each].end for each in schedule.predecessors(Action(kind, i, j))]
            if kind != "backward_weight":
                needed.append(busy[i, j, kind != "forward"])
            if kind in ("backward", "backward_input") and i < counts[j]:
                again = spans[Action("recompute", i, j)]
                assert (again.row, again.start) == (d, free)
                free += costs.at(i, m).recompute[j]
                assert again.end == free
            span = spans[Action(kind, i, j)]
            assert (span.row, span.start) == (d, max([free, *needed]))
            free = span.start + costs.at(i, m).times[kind][j]
            assert span.end == free
    assert len(spans) == len(simulation.spans) == sum(map(len, schedule.actions)) + sum(counts)
    for found in (simulation.spans, simulation.transfers):
        assert [s.start for s in found] == sorted(s.start for s in found)
    played = play(schedule.actions, m, schedule.device_of, costs, counts).makespan
    assert simulation.makespan == played == max(span.end for span in spans.values())


def costs_of(*arguments: Any, **more: Any) -> Any:
    return lambda: Costs(*arguments, **more)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (costs_of((1,), (1, 1), (1,)), "backward_input has 2 times, but forward is for 1 stages"),
        (costs_of((1, 1), (1, 1), (1,)), "backward_weight has 1 times"),
        (costs_of((1, 1), (1, 1), (1, 1), (1, 1)), r"transfer has 2 times, .* give 1"),
        (costs_of((1, -1), (1, 1), (1, 1)), "forward has the time -1"),
        (costs_of((1, 1), (1, math.nan), (1, 1)), "backward_input has the time nan"),
        (costs_of((1, 1), (1, 1), (1, 1), (math.inf,)), "transfer has the time inf"),
        (costs_of((1, 1), (1, 1), (1, 1), (), {(0, 1): -2}), "skips has the time -2"),
        (costs_of((1, 1), (1, 1), (1, 1), (), {(1, 0): 2}), "skip from stage 1 to 0"),
        (costs_of((1, 1), (1, 1), (1, 1), (), {(0, 2): 2}), "from stage 0 to 2 is none, with 2"),
        (costs_of((), (), ()), "at least one stage"),
        (costs_of((1, 1), (1, 1), (1, 1), recompute=(1,)), "recompute has 1 times"),
        (costs_of((1,), (1,), (1,), last=Costs.even(2)), "last is for 2 stages"),
        (lambda: simulate(Schedule(1, (0,), ((),)), Costs.even(1)), "0F0 is missing"),
        (lambda: simulate(gpipe(2, 2), Costs.even(3)), "for 3 stages, but schedule 'gpipe' has 2"),
        (lambda: simulate(gpipe(2, 2), Costs.even(2), update_every=0), "update_every=0"),
        *(
            (partial(simulate, gpipe(4, 2), Costs.even(2), counts), "rematerialized=.* 0 to m=4")
            for counts in ([1], [1, 1, 1], [-1, 0], [0, 5])
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_recomputation_does_not_wait_for_the_gradient() -> None:
    simulation = simulate(naive(1, 2), Costs.even(2, 1.0, 1.0, 1.0), [1, 0])
    again = next(span for span in simulation.spans if span.kind == "recompute")
    assert (again.start, again.end) == (1.0, 2.0)
    assert simulation.makespan == 6.0
