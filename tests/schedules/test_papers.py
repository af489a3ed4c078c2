"""Bubble and memory of the schedules for several stages on each device, as their papers have them.

Times are in units of a forward of one stage. What 1F1B would idle with a device's two stages as
one is ``6 (p-1)``, and its first device has ``2 p`` cells in flight.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from syncpipe.schedules import (
    SCHEDULES,
    Costs,
    Schedule,
    Simulation,
    build,
    gpipe,
    one_f_one_b,
    simulate,
)
from tests.schedules.layouts import LAYOUTS, V_SHAPED, in_a_v, rounds

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


# --- stages that go round the devices -----------------------------------------------------------


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize(("m", "p"), SIZES)
def test_looped_bfs_has_the_bubble_of_interleaving_and_the_memory_of_gpipe(
    m: int, p: int, each: int
) -> None:
    schedule = build("looped_bfs", m, rounds(p, each))
    assert played(schedule).bubble == pytest.approx((p - 1) / (each * m + p - 1))
    assert schedule.in_flight_on_device == (m * each,) * p
    if each == 1:
        assert schedule == gpipe(m, p)


@pytest.mark.parametrize(("f", "i", "w"), HALVES)
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize(("m", "p"), SIZES)
def test_interleaved_zero_bubble_idles_as_zb_h1_does_for_one_stage(
    m: int, p: int, each: int, f: float, i: float, w: float
) -> None:
    schedule = build("interleaved_zero_bubble", m, rounds(p, each))
    assert idle(played(schedule, f, i, w)) == pytest.approx((p - 1) * (f + i - w))
    assert schedule.in_flight_on_device == (p * each,) * p
    if each == 1:
        assert schedule == build("zb_h1", m, range(p))


# --- one stage on each device -------------------------------------------------------------------


@pytest.mark.parametrize(("f", "i", "w"), HALVES)
@pytest.mark.parametrize(("m", "p"), SIZES)
def test_zb_h2_idles_only_at_the_ends(m: int, p: int, f: float, i: float, w: float) -> None:
    """Qi et al. 2023, table 2: (p-1)(F+B-2W), B being their input half, and (2p-1) in flight."""
    schedule = build("zb_h2", m, range(p))
    simulation = played(schedule, f, i, w)
    assert idle_in_between(simulation) == pytest.approx((p - 1) * (f + i - 2 * w))
    assert idle(simulation) == pytest.approx((p - 1) * max(f, f + i - 2 * w))
    assert schedule.in_flight == (min(m, 2 * p - 1),) * p


# --- stages in a V ------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 1, 8])
@pytest.mark.parametrize("p", range(1, 9))
def test_zbv_has_no_bubble_with_the_memory_of_1f1b_and_dualpipev_little_more(
    p: int, more: int
) -> None:
    """DeepSeek: (p-1)(F&B + B - 3W), 2 (p-1) where a pair takes as long as its parts; 2p+1."""
    zbv, dual = (build(name, 2 * p + more, in_a_v(p)) for name in ("zbv", "dualpipev"))
    assert idle_in_between(played(zbv)) == 0
    assert idle(played(zbv)) == idle(played(dual)) == p - 1
    assert zbv.in_flight_on_device == (2 * p,) * p
    assert max(dual.in_flight_on_device) == 2 * p + 1


@pytest.mark.parametrize("p", range(1, 17))
def test_v_half_and_v_min_have_their_parts_of_the_bubble_and_of_the_memory(p: int) -> None:
    for m in (2 * p, 3 * p + 1):
        half, least = (build(name, m, in_a_v(p)) for name in ("v_half", "v_min"))
        assert 3 * (p - 1) - 2 <= idle(played(half)) <= 3 * (p - 1)
        assert p <= max(half.in_flight_on_device) <= p + 2 - p % 2
        assert 4 * (p - 1) - 1 <= idle(played(least)) <= 4 * (p - 1)
        assert 2 * p / 3 <= max(least.in_flight_on_device) <= 2 * (p + 4) / 3


@pytest.mark.parametrize("name", V_SHAPED)
def test_fewer_micro_batches_never_need_more_memory(name: str) -> None:
    for p in range(1, 7):
        most = max(build(name, 6 * p, in_a_v(p)).in_flight_on_device)
        for m in range(1, 4 * p):
            assert max(build(name, m, in_a_v(p)).in_flight_on_device) <= most


# --- the table of the page ----------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
ROW = re.compile(r'\| `"(\w+)"`(.*?)\|.*\| ([\d.]+) %, ([\d.]+) \| ([\d.]+) %, ([\d.]+) \|\n')
TEXTBOOK = partial(one_f_one_b, slots="textbook")


def test_the_table_names_all_of_them() -> None:
    assert {row[0] for row in ROW.findall(PAGE.read_text())} == set(SCHEDULES)


@pytest.mark.parametrize(
    "row", ROW.findall(PAGE.read_text()), ids=lambda row: row[0] + row[1].strip()
)
def test_the_table_is_what_the_simulator_says(row: tuple[str, ...]) -> None:
    name, more, *numbers = row
    seen = []
    for m, p in ((8, 4), (64, 16)):
        layout = LAYOUTS.get(name, range)(p)
        schedule = build(TEXTBOOK if "textbook" in more else name, m, layout)
        seen += [100 * played(schedule).bubble, max(schedule.in_flight_on_device) * p / schedule.n]
    assert [round(number, 1) for number in seen] == list(map(float, numbers))
