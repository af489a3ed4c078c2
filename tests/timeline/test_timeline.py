"""Timelines against the simulations they come from: numbers, costs, tables, traces, pictures."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncpipe.schedules import build, gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from syncpipe.schedules.player import Costs, Simulation, simulate
from syncpipe.schedules.schedule import KINDS
from syncpipe.timeline import Span, Timeline, compare
from tests.schedules.test_schedule import costs_for, rounds, simulations
from tests.support.training import on_each_device

# One row works for 3 of 4 ms, the other for 2; then a second step, in which both work throughout.
TWO_STEPS = [
    Span("forward", 0, 0, 0, 1.0, 2.0),
    Span("transfer", 0, 0, 0, 2.0, 2.5, target=1),
    Span("forward", 0, 1, 1, 2.5, 3.5),
    Span("recompute", 0, 1, 1, 3.5, 3.75),
    Span("backward", 0, 1, 1, 3.75, 4.5),
    Span("transfer", 0, 1, 1, 4.5, 4.75, target=0, backward=True),
    Span("backward", 0, 0, 0, 3.0, 5.0),
    Span("backward", 0, 1, 1, 100.0, 102.0, step=7),
    Span("backward", 0, 0, 0, 100.0, 102.0, step=7),
]
GPUS = ["gpu 0", "gpu 1"]


def two_steps(unit: str = "ms", title: str = "") -> Timeline:
    return Timeline(TWO_STEPS, GPUS, unit, title)


def simulated(name: str = "1f1b", m: int = 8, p: int = 4, each: int = 1) -> Timeline:
    schedule = build(name, m, rounds(p, each))
    return Timeline.of(simulate(schedule, Costs.even(p * each, transfer=0.25)))


# --- what can be asked --------------------------------------------------------------------------


def test_time_that_steps_have_in_common_counts_once() -> None:
    """As when two outputs wait for their backward."""
    numbers = [(0, "forward"), (1, "forward"), (1, "backward"), (0, "backward")]
    spans = [Span(kind, 0, 0, 0, t, t + 1, step=step) for t, (step, kind) in enumerate(numbers)]
    assert Timeline(spans, ["cpu"]).bubble == 0


@pytest.mark.parametrize("rows", [[], ["a", "b"]])
def test_nothing_and_no_time_at_all(rows: list[str], tmp_path: Path) -> None:
    for timeline in (
        Timeline([], rows),
        Timeline.of(simulate(gpipe(2, 2), Costs.even(2, 0, 0, 0))),
    ):
        assert (timeline.makespan, timeline.bubble) == (0, 0)
        assert timeline.busy == (0,) * len(timeline.rows)
        assert "bubble 0.0%" in timeline.table()
        timeline.save(tmp_path / "empty.json")
        pytest.importorskip("matplotlib")
        timeline.save(tmp_path / "empty.png")
        compare({"a": timeline, "b": simulated()}, scale=True)


@given(costs_for(3), st.sampled_from([0, 3, 4]))
@settings(deadline=None)
def test_a_simulation_has_the_costs_that_it_was_made_with(costs: Costs, count: int) -> None:
    times = costs.forward, costs.backward_input, costs.backward_weight
    between = [costs.transfer[j] + costs.skips.get((j, j + 1), 0.0) for j in range(2)]
    further = {(0, 2): costs.skips[0, 2]} if (0, 2) in costs.skips else {}
    timeline = Timeline.of(simulate(zb_h1(4, 3), costs, [count, 0, count]))
    found = {name: pytest.approx(value, abs=1e-6) for name, value in vars(timeline.costs).items()}
    assert vars(Costs(*times, between, further)) == found
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
    ways = Span("transfer", 0, 0, 0, 0, 2, 1), Span("transfer", 0, 1, 1, 0, 3, 0, backward=True)
    assert Timeline([*spans, *ways], GPUS).costs == Costs((2, 2), (2, 2), (0, 0), (3,))


# --- as text, and as a trace for Perfetto -------------------------------------------------------


def test_table() -> None:
    header, first, second, whole, kinds, summary = two_steps().table().splitlines()
    assert header.split() == ["busy", "idle", "forward", "backward", "recompute", "transfer"]
    assert [cell.strip() for cell in first.split("  ") if cell] == [
        "gpu 0", "5.00 ms", "16.7%", "1 x 1.00 | 1.00", "2 x 2.00 | 2.00", "-", "1 x 0.50 | 0.50"
    ]  # fmt: skip
    assert second.split()[:6] == ["gpu", "1", "4.00", "ms", "33.3%", "1"]
    assert whole.split()[:4] == ["all", "9.00", "ms", "25.0%"]
    assert "4 x 1.69 | 2.00" in whole
    assert kinds.endswith("mean | median in ms")
    assert summary == "makespan 101 ms, bubble 25.0%"
    assert repr(Timeline.of(simulate(zb_h1(8, 4), Costs.even(4)))) == (
        "<Timeline 'zb_h1': 144 spans on 4 rows, makespan 27.0 units, bubble 11.1%>"
    )


def test_units() -> None:
    for unit, time, text in (
        ("s", 2.0, "2.00 s"), ("s", 0.0123456, "12.3 ms"), ("s", 4.2e-8, "0.04 us"),
        ("s", 12345.0, "12345 s"), ("ms", 2000.0, "2.00 s"), ("us", 2000.0, "2.00 ms"),
        ("units", 2000.0, "2000 units"), ("units", 0.002, "0.00 units"),
    ):  # fmt: skip
        timeline = Timeline([Span("forward", 0, 0, 0, 0.0, time)], ["cpu"], unit)
        assert f"makespan {text}," in timeline.table()


@settings(max_examples=30)
@given(simulations(), st.sampled_from([("s", 1e6), ("ms", 1e3), ("us", 1.0), ("units", 1e6)]))
def test_trace_has_every_span_and_nothing_overlaps_on_a_thread(
    tmp_path_factory: pytest.TempPathFactory, simulation: Simulation, unit: tuple[str, float]
) -> None:
    known = Timeline.of(simulation)
    timeline = Timeline(known.spans, known.rows, unit[0], title="mine")
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    timeline.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["otherData"] == {"unit": unit[0]}
    events = content["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["mine"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(names) == len(set(names.values()))
    found: Counter[Any] = Counter()
    threads: dict[int, list[Any]] = {}
    for e in events:
        if e["ph"] == "X":
            row = names[e["tid"]].split(" transfers")[0]
            assert (row != names[e["tid"]]) == (e["cat"] == "transfer")
            where = tuple(e["args"].get(key) for key in ("i", "j", "step", "target", "backward"))
            found[(e["cat"], *where, row, e["ts"], e["dur"])] += 1
            threads.setdefault(e["tid"], []).append(e)
    expected: Counter[Any] = Counter()
    for s in timeline.spans:
        more = (s.target, s.backward) if s.kind == "transfer" else (None, None)
        times = (s.start * unit[1], (s.end - s.start) * unit[1])
        expected[(s.kind, s.i, s.j, s.step, *more, timeline.rows[s.row], *times)] += 1
    assert found == expected
    for own in threads.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(own))


# --- as a picture -------------------------------------------------------------------------------


def shown(figure: Any) -> list[Any]:
    """All texts that there are, titles and the names of rows among them."""
    found = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label]
        found += axes.get_yticklabels()
    return [text for text in dict.fromkeys(found) if text.get_text()]


def texts(figure: Any) -> list[str]:
    return [line for text in shown(figure) for line in text.get_text().split("\n")]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".json", ".PNG"])
def test_files(tmp_path: Path, suffix: str) -> None:
    if suffix != ".json":
        pytest.importorskip("matplotlib")
    path = tmp_path / f"a.b{suffix}"
    two_steps().save(str(path) if suffix == ".svg" else path)
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".json": b'{"traceEvents"'}[suffix.lower()]
    assert path.read_bytes().startswith(start)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ["matplotlib", *(n for n in sys.modules if n.split(".")[0] == "matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    timeline = two_steps()
    for make in (
        timeline.figure,
        timeline.plot,
        lambda: timeline.save(tmp_path / "a.png"),
        lambda: compare({"a": timeline}),
    ):
        with pytest.raises(ImportError, match=r'matplotlib: pip install "syncpipe\[plot\]"'):
            make()
    assert timeline._repr_svg_() is None
    timeline.save(tmp_path / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_the_picture_says() -> None:
    matplotlib = pytest.importorskip("matplotlib.figure")
    wanted = {
        "mine", "makespan 101 ms, bubble 25.0%", "gpu 0", "stage 1", "17% idle", "33% idle",
        "time (ms)", "1 in memory",
    }  # fmt: skip
    legend = {
        "forward", "backward", "recomputation of the forward", "idle: the bubble",
        "activations sent, below their sender", "gradients sent, above their sender",
        "memory: micro-batches in flight", "micro-batch",
    }  # fmt: skip
    timeline = two_steps(title="mine")
    said = {*texts(timeline.figure())}
    assert wanted | legend <= said
    assert not [text for text in said if "half" in text]  # only what there is
    left, right = matplotlib.Figure().subplots(1, 2)
    assert timeline.plot(right) is right
    assert not left.has_data()
    assert {"mine", "gpu 0", "17% idle", "time (ms)"} <= {*texts(right.figure)}
    assert legend == {text.get_text() for text in right.get_legend().get_texts()}
    assert {*texts(timeline.plot().figure)} == said
    spans = [Span(kind, 40 * k, 0, 0, k, k + 1) for k, kind in enumerate([*KINDS, "transfer"])]
    assert {"0", "40", "80", "120", "160"} <= {*texts(Timeline(spans, ["cpu"]).figure())}
    timeline = Timeline.of(simulate(interleaved_1f1b(4, rounds(2, 2)), Costs.even(4)))
    counts = Counter(texts(timeline.figure()))
    assert counts["stages 0, 2"] == 1
    assert [counts[f"s{j}"] for j in range(4)] == [8, 8, 8, 8]


def overlap(a: Any, b: Any, slack: float) -> bool:
    """Whether two boxes have more in common than a rim."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return bool(min(width, height) > slack)


@pytest.mark.parametrize(
    "timeline",
    [
        simulated("gpipe"),
        simulated("interleaved_1f1b", 16, 8, 2),
        Timeline(TWO_STEPS, ["a" * 40, r"a $\frac$ of it"]),
        Timeline(TWO_STEPS, ["", " "], title="T" * 90),
    ],
)
def test_no_text_and_no_box_is_on_another(timeline: Timeline) -> None:
    pytest.importorskip("matplotlib")
    figure = timeline.figure()
    figure.draw_without_rendering()
    boxes = [(text, text.get_window_extent()) for text in shown(figure)]
    for text, box in boxes:
        corners = (box.x0, box.y0), (box.x1, box.y1)
        assert all(figure.bbox.contains(*corner) for corner in corners), text
    for (text, box), (other, also) in combinations(boxes, 2):
        assert not overlap(box, also, slack=2.0), (text, other)
    if len(timeline.spans) == len(TWO_STEPS):  # with a backward of what never went forward
        return
    drawn = [
        path.get_extents()
        for collection in figure.axes[0].collections
        if collection.get_facecolor()[0][:3].sum() < 2.6 and not collection.get_hatch()
        for path in collection.get_paths()
    ]
    spans = [s for s in timeline.spans if s.duration and s.kind != "recompute"]
    assert len(drawn) == len(spans) + len(timeline.rows)  # and what memory holds
    assert not any(overlap(box, also, slack=1e-9) for box, also in combinations(drawn, 2))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
def test_memory_is_what_the_schedule_says(name: str) -> None:
    pytest.importorskip("matplotlib")
    schedule = build(name, 8, rounds(4, 2 if name == "interleaved_1f1b" else 1))
    timeline = Timeline.of(simulate(schedule, Costs.even(schedule.n, transfer=0.1)))
    notes = [text for text in texts(timeline.figure()) if text.endswith(" in memory")]
    assert notes == [f"{count} in memory" for count in on_each_device(schedule)]
    forwards = [span for span in timeline.spans if span.kind == "forward"]
    said = texts(Timeline(forwards, timeline.rows).figure())
    assert not [text for text in said if "memory" in text]


def test_compare() -> None:
    pytest.importorskip("matplotlib")
    costs = Costs.even(4)
    timelines = {
        "first": Timeline.of(simulate(one_f_one_b(8, 4), costs)),
        "second": Timeline.of(simulate(zb_h1(8, 4), costs)),
    }
    figure = compare(timelines)
    said = texts(figure)
    assert (said.count("device 0"), said.count("forward")) == (2, 1)  # one legend
    assert {"first", "second", "time (units)"} <= {*said}
    assert figure.axes[0].get_xlim() == (0, 33)
    scaled = compare({**timelines, "measured": two_steps()}, scale=True)
    assert scaled.axes[0].get_xlim() == (0, 100)
    assert "time (% of the makespan)" in texts(scaled)
    late = [replace(span, start=span.start + 50, end=span.end + 50) for span in TWO_STEPS]
    figure = compare({"a": two_steps(), "b": Timeline(late, GPUS, "ms")})
    assert figure.axes[0].get_xlim() == (0, 101)  # each from its first start


# --- what cannot be -----------------------------------------------------------------------------


def with_span(**change: Any) -> Any:
    return lambda: Timeline([replace(TWO_STEPS[0], **change)], GPUS)


def with_kinds(*kinds: str) -> Any:
    return lambda: Timeline([Span(kind, 0, 0, 0, 0, 1) for kind in kinds], ["one"]).costs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_span(kind="sideways"), "kind='sideways'.*kinds are forward, backward, .*transfer"),
        (with_span(row=2), r"row=2.*rows=\('gpu 0', 'gpu 1'\) has 2"),
        (with_span(row=-1), "row=-1"),
        (with_span(end=0.5), "start=1.0, end=0.5.* end not before start"),
        (with_span(start=math.nan), "start=nan"),
        (with_span(end=math.inf), "end=inf"),
        (with_kinds(), "stage 0 has no forward or no backward"),
        (with_kinds("backward"), "stage 0 has no forward or no backward"),
        (with_kinds("forward"), "stage 0 has no forward or no backward"),
        (lambda: compare({"a": two_steps(), "b": simulated()}), "units ms, units: scale=True"),
        (lambda: compare({}), r"timelines=\{\} is empty; give at least one"),
        (lambda: two_steps().save("a.pdf"), r"path='a.pdf' must end in \.json, \.svg or \.png"),
        (lambda: two_steps().save(".png"), r"path='.png' must end in \.json, \.svg or \.png"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
