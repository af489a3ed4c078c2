"""Timelines against the simulations they come from: numbers, costs, tables, traces for Perfetto."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncpipe.schedules import build, gpipe, one_f_one_b, zb_h1
from syncpipe.schedules.player import Costs, Simulation, simulate
from syncpipe.timeline import Span, Timeline, compare
from tests.schedules.layouts import rounds
from tests.schedules.test_simulation import costs_for, simulations

# One row works for 3 of 4 ms, the other for 2; then a second step, in which both work throughout.
TWO_STEPS = [
    Span("forward", 0, 0, 0, 1.0, 2.0),
    Span("transfer", 0, 0, 0, 2.0, 2.5, target=1),
    Span("forward", 0, 1, 1, 2.5, 3.5),
    Span("recompute", 0, 1, 1, 3.75, 4.0),
    Span("backward", 0, 1, 1, 3.5, 4.5),  # the recomputation is a part of it
    Span("transfer", 0, 1, 1, 4.5, 4.75, target=0, backward=True),
    Span("backward", 0, 0, 0, 3.0, 5.0),
    Span("backward", 0, 1, 1, 100.0, 102.0, step=7),
    Span("backward", 0, 0, 0, 100.0, 102.0, step=7),
]


def two_steps(unit: str = "ms", title: str = "") -> Timeline:
    return Timeline(TWO_STEPS, ["gpu 0", "gpu 1"], unit, title)


def simulated(name: str = "1f1b", m: int = 8, p: int = 4, each: int = 1) -> Timeline:
    schedule = build(name, m, rounds(p, each))
    return Timeline.of(simulate(schedule, Costs.even(p * each, transfer=0.25)))


# --- what can be asked --------------------------------------------------------------------------


@given(simulations())
def test_it_is_the_simulation(simulation: Simulation) -> None:
    timeline = Timeline.of(simulation)
    assert timeline.busy == pytest.approx(simulation.busy)
    assert timeline.bubble == pytest.approx(simulation.bubble)
    assert timeline.makespan == simulation.makespan
    assert timeline.title == simulation.schedule.name
    assert len(timeline.rows) == len(simulation.schedule.actions)
    starts = [span.start for span in timeline.spans]
    assert starts == sorted(starts)
    assert set(timeline.spans) == {*simulation.spans, *simulation.transfers}


def test_several_steps() -> None:
    """The time between steps is nobody's, and what is part of something else counts once."""
    timeline = two_steps()
    assert timeline.windows == ((1.0, 5.0), (100.0, 102.0))
    assert timeline.makespan == 101
    assert timeline.busy == (5, 4)
    assert timeline.bubble == pytest.approx(1 - 9 / 12)


def test_steps_that_overlap() -> None:
    """As when two outputs wait for their backward: the time in common counts once."""
    spans = [
        Span("forward", 0, 0, 0, 0, 1, step=0),
        Span("forward", 0, 0, 0, 1, 2, step=1),
        Span("backward", 0, 0, 0, 2, 3, step=1),
        Span("backward", 0, 0, 0, 3, 4, step=0),
    ]
    assert Timeline(spans, ["cpu"]).bubble == 0


@pytest.mark.parametrize("rows", [[], ["a", "b"]])
def test_empty(rows: list[str], tmp_path: Path) -> None:
    timeline = Timeline([], rows)
    assert (timeline.makespan, timeline.bubble, timeline.windows) == (0, 0, ())
    assert timeline.busy == (0,) * len(rows)
    assert "bubble 0.0%" in timeline.table()
    assert "0 spans" in repr(timeline)
    timeline.save(tmp_path / "empty.json")
    pytest.importorskip("matplotlib")
    timeline.save(tmp_path / "empty.png")
    compare({"a": timeline, "b": two_steps("s")})


def test_no_time_at_all() -> None:
    timeline = Timeline.of(simulate(gpipe(2, 2), Costs.even(2, 0, 0, 0)))
    assert (timeline.makespan, timeline.bubble) == (0, 0)
    pytest.importorskip("matplotlib")
    timeline.figure()
    compare({"a": timeline, "b": simulated()}, scale=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sideways"}, "kind='sideways' in Span.*there are forward, backward, .*transfer"),
        ({"row": 2}, r"row=2 in Span.*rows=\('gpu 0', 'gpu 1'\) has 2"),
        ({"row": -1}, "row=-1 in Span"),
        ({"end": 0.5}, "start=1.0, end=0.5 in Span"),
        ({"start": math.nan}, "start=nan"),
        ({"end": math.inf}, "end=inf"),
    ],
)
def test_spans_that_are_none(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline([replace(TWO_STEPS[0], **change)], ["gpu 0", "gpu 1"])


class Late(Timeline):
    """Gets its spans later, as what is measured does."""

    @property
    def spans(self) -> tuple[Span, ...]:
        return two_steps().spans


def test_spans_that_come_late(tmp_path: Path) -> None:
    late, timeline = Late((), ["gpu 0", "gpu 1"], "ms"), two_steps()
    assert set(timeline.spans) == set(TWO_STEPS)
    for name in ("windows", "makespan", "busy", "bubble", "costs"):
        assert getattr(late, name) == getattr(timeline, name)
    assert late.table() == timeline.table()
    assert repr(late) == repr(timeline).replace("Timeline", "Late")
    assert trace(late, tmp_path) == trace(timeline, tmp_path)
    pytest.importorskip("matplotlib")
    assert late._repr_svg_() is not None


# --- what stages cost ---------------------------------------------------------------------------


def approximately(costs: Costs) -> dict[str, Any]:
    return {name: pytest.approx(value, abs=1e-6) for name, value in vars(costs).items()}


@given(costs_for(3), st.sampled_from([0, 3, 4]))
@settings(deadline=None)
def test_a_simulation_has_the_costs_that_it_was_made_with(costs: Costs, count: int) -> None:
    times = costs.forward, costs.backward_input, costs.backward_weight
    between = [costs.transfer[j] + costs.skips.get((j, j + 1), 0.0) for j in range(2)]
    further = {(0, 2): costs.skips[0, 2]} if (0, 2) in costs.skips else {}
    timeline = Timeline.of(simulate(zb_h1(4, 3), costs, [count, 0, count]))
    assert vars(Costs(*times, between, further)) == approximately(timeline.costs)
    assert timeline.rematerialized == (count, 0, count)


def test_medians_of_whole_backwards_and_the_slower_way() -> None:
    costs = Costs((1, 2), (3, 4), (5, 6), recompute=(7, 8))
    timeline = Timeline.of(simulate(one_f_one_b(3, 2), costs, [2, 0]))
    assert timeline.costs == Costs((1, 2), (8, 10), (0, 0), recompute=(7, 2))
    spans = [
        Span(kind, i, j, j, 10.0 * i, 10.0 * i + time, step=i)
        for i, time in enumerate([1.0, 2.0, 9.0])
        for kind in ("forward", "backward")
        for j in (0, 1)
    ]
    spans += [
        Span("transfer", 0, 0, 0, 0, 2, 1),
        Span("transfer", 0, 1, 1, 0, 3, 0, backward=True),
    ]
    assert Timeline(spans, ["one", "other"]).costs == Costs((2, 2), (2, 2), (0, 0), (3,))


@pytest.mark.parametrize(
    ("kinds", "message"),
    [([], "no step"), (["backward"], "no step"), (["forward"], "no backward of stage 0")],
)
def test_what_is_missing_for_costs(kinds: list[str], message: str) -> None:
    spans = [Span(kind, 0, 0, 0, 0, 1) for kind in kinds]
    with pytest.raises(ValueError, match=message):
        _ = Timeline(spans, ["one"]).costs


# --- as text ------------------------------------------------------------------------------------


def test_table() -> None:
    header, first, second, whole, kinds, summary = two_steps().table().splitlines()
    assert header.split() == ["busy", "idle", "forward", "backward", "recompute", "transfer"]
    assert [cell.strip() for cell in first.split("  ") if cell] == [
        "gpu 0", "5.00 ms", "16.7%", "1 x 1.00 | 1.00", "2 x 2.00 | 2.00", "-", "1 x 0.50 | 0.50"
    ]  # fmt: skip
    assert second.split()[:6] == ["gpu", "1", "4.00", "ms", "33.3%", "1"]
    assert whole.split()[:4] == ["all", "9.00", "ms", "25.0%"]
    assert "4 x 1.75 | 2.00" in whole
    assert kinds.endswith("mean | median in ms")
    assert summary == "makespan 101 ms, bubble 25.0%"


@pytest.mark.parametrize(
    ("unit", "time", "shown"),
    [
        ("s", 2.0, "2.00 s"),
        ("s", 0.5, "500 ms"),
        ("s", 0.0123456, "12.3 ms"),
        ("s", 4.2e-5, "42.0 us"),
        ("s", 4.2e-8, "0.04 us"),
        ("s", 12345.0, "12345 s"),
        ("ms", 2000.0, "2.00 s"),
        ("us", 2000.0, "2.00 ms"),
        ("units", 2000.0, "2000 units"),
        ("units", 0.002, "0.00 units"),
    ],
)
def test_units(unit: str, time: float, shown: str) -> None:
    timeline = Timeline([Span("forward", 0, 0, 0, 0.0, time)], ["cpu"], unit)
    assert f"makespan {shown}," in timeline.table()
    assert shown in repr(timeline)


def test_repr() -> None:
    assert repr(Timeline.of(simulate(zb_h1(8, 4), Costs.even(4)))) == (
        "<Timeline 'zb_h1': 144 spans on 4 rows, makespan 27.0 units, bubble 11.1%>"
    )


# --- as a trace for Perfetto --------------------------------------------------------------------


def trace(timeline: Timeline, folder: Path) -> Any:
    path = folder / "trace.json"
    timeline.save(path)
    return json.loads(path.read_text(encoding="utf-8"))


def threads(events: Iterable[Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


@settings(max_examples=30)
@given(simulations(), st.sampled_from([("s", 1e6), ("ms", 1e3), ("us", 1.0), ("units", 1e6)]))
def test_trace_has_every_span_and_nothing_overlaps_on_a_thread(
    tmp_path_factory: pytest.TempPathFactory, simulation: Simulation, unit: tuple[str, float]
) -> None:
    known = Timeline.of(simulation)
    timeline = Timeline(known.spans, known.rows, unit[0])
    events = trace(timeline, tmp_path_factory.mktemp("trace"))["traceEvents"]
    names = threads(events)
    assert len(names) == len(set(names.values()))
    assert not {*timeline.rows} - {*names.values()}
    found: Counter[Any] = Counter()
    for e in events:
        if e["ph"] == "X":
            row = names[e["tid"]].split(" transfers")[0]
            assert (row != names[e["tid"]]) == (e["cat"] == "transfer")
            where = tuple(e["args"].get(key) for key in ("i", "j", "step", "target", "backward"))
            found[(e["cat"], *where, row, e["ts"], e["dur"])] += 1
    expected: Counter[Any] = Counter()
    for s in timeline.spans:
        more = (s.target, s.backward) if s.kind == "transfer" else (None, None)
        times = (s.start * unit[1], (s.end - s.start) * unit[1])
        expected[(s.kind, s.i, s.j, s.step, *more, timeline.rows[s.row], *times)] += 1
    assert found == expected
    events = trace(known, tmp_path_factory.mktemp("trace"))["traceEvents"]
    for tid in threads(events):
        own = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == tid]
        assert all(a[1] <= b[0] for a, b in pairwise(own))


def test_trace_names_the_rows(tmp_path: Path) -> None:
    content = trace(two_steps(title="mine"), tmp_path)
    events = content["traceEvents"]
    expected = ["gpu 0", "gpu 0 transfers", "gpu 1", "gpu 1 transfers"]
    assert [*threads(events).values()] == expected
    order = [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"]
    assert order == sorted(set(order))
    assert [e["args"] for e in events if e["name"] == "process_name"] == [{"name": "mine"}]
    assert content["otherData"] == {"unit": "ms"}
