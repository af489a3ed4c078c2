"""Timelines against the simulations they come from, and the files and pictures made of them."""

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

from syncpipe.schedules import build, gpipe, zb_h1
from syncpipe.schedules.simulation import Costs, Simulation, simulate
from syncpipe.timeline.timeline import Span, Timeline, compare
from tests.schedules.layouts import rounds
from tests.schedules.test_simulation import simulations

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
def test_numbers_are_the_simulations(simulation: Simulation) -> None:
    timeline = Timeline.of(simulation)
    assert timeline.busy == pytest.approx(simulation.busy)
    assert timeline.bubble == pytest.approx(simulation.bubble)
    assert timeline.makespan == simulation.makespan
    assert timeline.title == simulation.schedule.name
    assert len(timeline.rows) == len(simulation.schedule.actions)


@given(simulations())
def test_spans_are_the_simulations(simulation: Simulation) -> None:
    spans = Timeline.of(simulation).spans
    device_of = simulation.schedule.device_of
    starts = [span.start for span in spans]
    assert starts == sorted(starts)
    actions = {(s.kind, s.i, s.j, s.row, s.start, s.end) for s in spans if s.kind != "transfer"}
    assert actions == {(*s.action, s.device, s.start, s.end) for s in simulation.spans}
    ways = Counter(
        (s.i, s.j, s.row, s.target, s.backward, s.start, s.end)
        for s in spans
        if s.kind == "transfer"
    )
    expected: Counter[Any] = Counter()
    for way in simulation.transfers:
        kind, i, j = way.action
        expected[i, j, device_of[j], way.target, kind != "forward", way.start, way.end] += 1
    assert ways == expected


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


def test_in_any_order() -> None:
    spans = two_steps().spans
    assert [span.start for span in spans] == sorted(span.start for span in TWO_STEPS)
    assert set(spans) == set(TWO_STEPS)


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
    """Gets its spans and rows later, as what is measured does."""

    def __init__(self) -> None:
        super().__init__((), (), "ms")

    @property
    def spans(self) -> tuple[Span, ...]:
        return two_steps().spans

    @property
    def rows(self) -> tuple[str, ...]:
        return two_steps().rows


def test_spans_that_come_late(tmp_path: Path) -> None:
    late, timeline = Late(), two_steps()
    for name in ("windows", "makespan", "busy", "bubble"):
        assert getattr(late, name) == getattr(timeline, name)
    assert late.table() == timeline.table()
    assert repr(late) == repr(timeline).replace("Timeline", "Late")
    assert trace(late, tmp_path) == trace(timeline, tmp_path)
    pytest.importorskip("matplotlib")
    assert late._repr_svg_() is not None


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
def test_trace_has_every_span(
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


@settings(max_examples=30)
@given(simulations())
def test_nothing_overlaps_on_a_thread(
    tmp_path_factory: pytest.TempPathFactory, simulation: Simulation
) -> None:
    events = trace(Timeline.of(simulation), tmp_path_factory.mktemp("trace"))["traceEvents"]
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
