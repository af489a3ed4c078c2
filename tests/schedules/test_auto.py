"""``auto``: never longer than a named schedule, never over memory, never under the bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from syncpipe.schedules import (
    SCHEDULES,
    Action,
    AutoSchedule,
    Costs,
    Schedule,
    auto,
    build,
    gpipe,
    one_f_one_b,
    simulate,
    validate,
)
from syncpipe.schedules.greedy import Problem
from syncpipe.schedules.schedule import stages_on
from tests.schedules.test_schedule import costs_for, placements

#: Memory for one micro-batch, and all but the last one are recomputed.
TIGHT: dict[str, Any] = {
    "m": 2, "device_of": (0, 1, 2), "costs": Costs.even(3, transfer=0.25), "split": False,
    "rematerialized": [0, 1, 0], "activations": [0.0, 1.0, 1.0], "inputs": [0.0] * 3,
    "memory": [0.0, 1.0, 1.0],
}  # fmt: skip
UNEVEN = Costs((1, 2, 1, 3), (1, 2, 1.5, 3), (1, 2, 0.5, 2), (0.1, 0.2, 0.1))


@st.composite
def arguments(
    draw: st.DrawFn, places: st.SearchStrategy[tuple[int, ...]] | None = None, most: int = 6
) -> dict[str, Any]:
    """For ``auto``, with memory for one micro-batch at least."""
    m = draw(st.integers(1, most))
    device_of = draw(placements() if places is None else places)
    n = len(device_of)
    sizes = st.lists(st.integers(0, 4).map(float), min_size=n, max_size=n)
    activations = draw(sizes)
    one = [
        sum(a for a, d in zip(activations, device_of, strict=True) if d == device)
        for device in range(max(device_of) + 1)
    ]
    more = draw(st.sampled_from([0.0, 1.0, 4.0, math.inf]))
    return {
        "m": m,
        "device_of": device_of,
        "costs": replace(draw(costs_for(n)), last=draw(st.none() | costs_for(n))),
        "rematerialized": [draw(st.sampled_from([0, m - 1, m])) for _ in range(n)],
        "activations": activations,
        "inputs": [min(pair) for pair in zip(activations, draw(sizes), strict=True)],
        "memory": [size + more for size in one],
        "split": draw(st.booleans()),
    }


def problem_of(given: dict[str, Any]) -> Problem:
    split = given["split"] and any(given["costs"].backward_weight)
    sizes = [tuple(given[name]) for name in ("rematerialized", "activations", "inputs", "memory")]
    return Problem(given["m"], given["device_of"], given["costs"], *sizes, split)  # type: ignore


def held(schedule: Schedule, given: dict[str, Any]) -> list[float]:
    """For each device the most that it holds; once more, by the book."""
    peaks = []
    for row in schedule.actions:
        alive: dict[tuple[int, int], float] = {}
        peaks.append(0.0)
        for kind, i, j in row:
            again = kind == "forward" and i < given["rematerialized"][j]
            alive[i, j] = given["inputs" if again else "activations"][j]
            peaks[-1] = max(peaks[-1], math.fsum(alive.values()))
            if kind in ("backward", "backward_weight"):
                del alive[i, j]
    return peaks


@given(arguments(), st.sampled_from(sorted(SCHEDULES)))
@settings(deadline=None, max_examples=40)
def test_valid_within_memory_and_no_longer_than_named_ones(
    given: dict[str, Any], name: str
) -> None:
    schedule = auto(**given)
    validate(schedule)
    report = schedule.report
    assert simulate(schedule, given["costs"], given["rematerialized"]).makespan == report.step
    assert report.memory == pytest.approx(held(schedule, given))
    assert all(a <= b * (1 + 1e-9) for a, b in zip(report.memory, given["memory"], strict=True))
    assert given["split"] or not schedule.splits
    assert report.bound <= report.step * (1 + 1e-9)
    assert report.step <= min(report.named.values())
    try:
        other = build(name, given["m"], given["device_of"])
    except ValueError:
        return  # it is for other stages
    fits = all(a <= b for a, b in zip(held(other, given), given["memory"], strict=True))
    if fits and (given["split"] or not other.splits):
        step = simulate(other, given["costs"], given["rematerialized"]).makespan
        assert report.step <= step * (1 + 1e-9)


def orders(problem: Problem, d: int) -> Iterator[list[Action]]:
    """All orders of the actions of a device that one stage alone allows."""

    def following(done: dict[tuple[int, int], int]) -> Iterator[list[Action]]:
        if all(count == problem.m for count in done.values()):
            yield []
        for (k, j), i in done.items():
            if i < problem.m and done.get((k - 1, j), problem.m) > i:
                for rest in following({**done, (k, j): i + 1}):
                    yield [Action(problem.kinds[k], i, j), *rest]

    yield from following(
        {(k, j): 0 for k in range(len(problem.kinds)) for j in stages_on(problem.device_of)[d]}
    )


@given(arguments(st.sampled_from([(0, 1), (0, 1, 2), (0, 0)]), most=2))
@example(TIGHT)
@settings(deadline=None, max_examples=30)
def test_small_ones_are_nearly_the_best_there_is(given: dict[str, Any]) -> None:
    """Of the orders in which no micro-batch overtakes another, to 5 %."""
    problem, report = problem_of(given), auto(**given).report
    rows = [
        [row for row in orders(problem, d) if problem.peak(row) <= limit]
        for d, limit in enumerate(problem.limits)
    ]
    best = min(problem.play(each).makespan for each in product(*rows))
    assert report.bound <= best * (1 + 1e-9)
    assert report.step <= 1.05 * best


# --- examples -----------------------------------------------------------------------------------


def test_uneven_stages_gain() -> None:
    """By default in the memory of 1F1B or ZB-H1, and without halves in that of 1F1B."""
    schedule = auto(8, 4, costs=UNEVEN)
    report = schedule.report
    assert isinstance(schedule, AutoSchedule)
    assert schedule == auto(8, 4, costs=UNEVEN)
    assert build(schedule, 8, (0, 1, 2, 3)) is schedule
    assert report.limits == (7, 5, 4, 4)
    assert {"1f1b", "zb_h1"} <= set(report.named)
    assert report.step < 1.02 * report.bound
    assert "times the bound" in str(report)
    assert auto(8, 4, costs=UNEVEN, split=False).report.limits == one_f_one_b(8, 4).in_flight
    report = auto(8, 4, costs=UNEVEN, memory=[7, 5, 3, 1]).report
    assert min(report.named.values()) > 1.05 * report.step


def test_the_zero_bubble_little_memory_and_slow_links() -> None:
    # Qi et al. 2023, section 2.3 (ZB-H2): with 2n - 1 micro-batches in flight nothing idles.
    report = auto(16, 4, costs=Costs.even(4), memory=7).report
    assert report.step == report.bound == 3 * 16 + 3
    # Where one must be careful not to get stuck, and where that is too careful.
    assert auto(8, (0, 1, 2, 0, 1, 2), costs=Costs.even(6), memory=3).report.step < 90
    report = auto(8, (0, 1, 0, 1), costs=Costs.even(4), memory=3).report
    assert report.step <= 50
    # All eight go over the link, and the last one then forward, back over the other one, and back.
    costs = Costs((1, 1), (1, 1), (1, 1), (5,))
    report = auto(8, 2, costs=costs, memory=math.inf).report
    assert report.step == 1 + 8 * 5 + (1 + 1 + 5 + 1 + 1)


def test_micro_batches_are_in_order_unless_another_one_is_shorter() -> None:
    """The last micro-batch, which alone is not recomputed, goes back first under GPipe."""
    costs = Costs((1, 1), (1, 1), (1, 1), (5,))
    made = auto(8, 2, costs=costs, memory=math.inf, split=False, starts=[gpipe(8, 2)])
    for row in made.actions:
        for kind in ("forward", "backward"):
            assert [action.i for action in row if action.kind == kind] == list(range(8))
    costs = Costs((1, 1), (10, 1), (0, 0), recompute=(0, 9))
    schedule = auto(2, 2, costs=costs, rematerialized=[1, 1], memory=math.inf)
    assert schedule.actions == gpipe(2, 2).actions
    assert schedule.report.step == schedule.report.named["gpipe"] == 24
