"""The simulator against its own promises; bubble, memory and orders of the schedules against their
papers and PyTorch.

Times of papers are in units of a forward of one stage. What 1F1B would idle with a device's two
stages as one is ``6 (p-1)``, and its first device has ``2 p`` cells in flight.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncpipe.schedules import SCHEDULES, build, one_f_one_b
from syncpipe.schedules.player import Costs, Simulation, Span, play, simulate
from syncpipe.schedules.schedule import Action, Kind, Schedule
from tests.schedules.test_schedule import LAYOUTS, in_a_v, schedules

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


# --- papers -------------------------------------------------------------------------------------

SIZES = [(4, 2), (6, 3), (8, 4), (16, 4), (20, 5), (32, 8)]
HALVES = [(1, 1, 1), (2, 2, 1), (1, 2, 1), (4, 5, 4), (2, 3, 2), (2, 1, 1)]


def played(
    schedule: Schedule, forward: float = 1, back: float = 1, weight: float = 1
) -> Simulation:
    return simulate(schedule, Costs.even(schedule.n, forward, back, weight))


def idle(simulation: Simulation) -> float:
    """The time that each device has nothing to do, in a step that all begin and end together."""
    assert len(set(simulation.busy)) == 1
    return simulation.makespan - simulation.busy[0]


def idle_in_between(simulation: Simulation) -> float:
    """The same from the first to the last action of the device where it is longest.

    Papers count like that where the optimizer of each device steps as soon as its work is done.
    """
    times = []
    for d, busy in enumerate(simulation.busy):
        spans = [span for span in simulation.spans if span.row == d]
        times.append(max(s.end for s in spans) - min(s.start for s in spans) - busy)
    return max(times)


@pytest.mark.parametrize(("f", "i", "w"), HALVES)
@pytest.mark.parametrize(("m", "p"), SIZES)
def test_zero_bubble_idles_as_its_paper_says(m: int, p: int, f: float, i: float, w: float) -> None:
    """Qi et al. 2023, table 2: (p-1)(F+B-W) and (p-1)(F+B-2W), B being their input half."""
    schedule = build("zb_h1", m, range(p))
    assert idle(played(schedule, f, i, w)) == pytest.approx((p - 1) * (f + i - w))
    assert schedule.in_flight_on_device == (p,) * p
    schedule = build("zb_h2", m, range(p))
    simulation = played(schedule, f, i, w)
    assert idle_in_between(simulation) == pytest.approx((p - 1) * (f + i - 2 * w))
    assert idle(simulation) == pytest.approx((p - 1) * max(f, f + i - 2 * w))
    assert schedule.in_flight == (min(m, 2 * p - 1),) * p


@pytest.mark.parametrize("p", range(1, 17))
def test_v_half_and_v_min_have_their_parts_of_the_bubble_and_of_the_memory(p: int) -> None:
    for m in (2 * p, 3 * p + 1):
        half, least = (build(name, m, in_a_v(p)) for name in ("v_half", "v_min"))
        assert 3 * (p - 1) - 2 <= idle(played(half)) <= 3 * (p - 1)
        assert p <= max(half.in_flight_on_device) <= p + 2 - p % 2
        assert 4 * (p - 1) - 1 <= idle(played(least)) <= 4 * (p - 1)
        assert 2 * p / 3 <= max(least.in_flight_on_device) <= 2 * (p + 4) / 3


# --- the table of the page ----------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
ROW = re.compile(r'\| `"(\w+)"`(.*?)\|.*\| ([\d.]+) %, ([\d.]+) \| ([\d.]+) %, ([\d.]+) \|\n')


def test_the_table_of_the_page_is_what_the_simulator_says() -> None:
    rows = ROW.findall(PAGE)
    assert {row[0] for row in rows} == set(SCHEDULES)
    for name, more, *numbers in rows:
        seen = []
        for m, p in ((8, 4), (64, 16)):
            made: Any = partial(one_f_one_b, slots="textbook") if "textbook" in more else name
            schedule = build(made, m, LAYOUTS.get(name, range)(p))
            most = max(schedule.in_flight_on_device) * p / schedule.n
            seen += [100 * played(schedule).bubble, most]
        assert [round(number, 1) for number in seen] == list(map(float, numbers)), name


# --- torch.distributed.pipelining: theirs without processes, as data ----------------------------

#: By our name; they have two stages on each device.
THEIRS = {
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}


def theirs(name: str, m: int, devices: int) -> Schedule:
    """Their schedule for the stages of the first process, which knows the order of all others."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(module, THEIRS[name]):
        pytest.skip(f"this PyTorch has no {THEIRS[name]}")
    stage: Any = SimpleNamespace(
        group_size=devices, group_rank=0, num_stages=2 * devices, stage_index=0,
        submod=nn.Identity(), is_first=True, is_last=False,
    )  # fmt: skip
    order = getattr(module, THEIRS[name])([stage, stage], m).pipeline_order
    rows = []
    for rank in range(devices):
        row: list[Action] = []
        for cell in order[rank]:
            for one in () if cell is None else getattr(cell, "sub_actions", None) or (cell,):
                action = Action(
                    KINDS[one.computation_type.name], one.microbatch_index, one.stage_index
                )
                assert repr(one) == str(action)  # the cells of our files
                row.append(action)
        rows.append(tuple(row))
    return Schedule(m, LAYOUTS[name](devices), tuple(rows), THEIRS[name])


SOME = [(4, 1), (4, 2), (9, 3), (8, 4), (16, 4), (32, 8)]


@pytest.mark.parametrize(
    ("name", "m", "devices"),
    [*((name, m, p) for name in THEIRS for m, p in SOME), *(("zbv", m, 4) for m in range(1, 7))],
)
def test_the_order_is_that_of_pytorch(name: str, m: int, devices: int) -> None:
    other = theirs(name, m, devices)
    ours = build(name, m, other.device_of)

    def order(schedule: Schedule) -> list[list[Action | str]]:
        """Of which stage a weight half is makes no difference: nobody waits for it."""
        return [
            [a if a.kind != "backward_weight" else "W" for a in row] for row in schedule.actions
        ]

    assert order(ours) == order(other)
    assert played(ours).makespan == played(other).makespan
    assert ours.in_flight_on_device == other.in_flight_on_device
