"""Pictures of timelines: what they say, that nothing is on top of anything, and files."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from syncpipe.schedules import build, interleaved_1f1b, one_f_one_b, zb_h1
from syncpipe.schedules.player import Costs, Simulation, simulate
from syncpipe.timeline import KINDS, Span, Timeline, compare, save_comparison
from tests.schedules.layouts import rounds
from tests.schedules.test_simulation import simulations
from tests.support.running import in_threads
from tests.timeline.test_timeline import TWO_STEPS, simulated, two_steps


def shown(figure: Any) -> list[Any]:
    """All texts that there are, titles and the names of rows among them."""
    found = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label]
        found += axes.get_yticklabels()
    return [text for text in dict.fromkeys(found) if text.get_text()]


def texts(figure: Any) -> list[str]:
    return [line for text in shown(figure) for line in text.get_text().split("\n")]


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("suffix", [".png", ".svg", ".json", ".PNG"])
def test_files(tmp_path: Path, suffix: str, kind: type[str] | type[Path]) -> None:
    if suffix != ".json":
        pytest.importorskip("matplotlib")
    path = tmp_path / f"a.b{suffix}"
    two_steps().save(kind(path))
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".json": b'{"traceEvents"'}[suffix.lower()]
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["a.pdf", "png", ".png", "a.png.txt"])
def test_files_of_other_kinds(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"path='.*{name}' must end in \.json, \.svg or \.png"):
        two_steps().save(tmp_path / name)
    with pytest.raises(ValueError, match=rf"path='.*{name}' must end in \.svg or \.png"):
        save_comparison(tmp_path / name, {"a": two_steps()})
    with pytest.raises(ValueError, match=r"must end in \.svg or \.png"):
        save_comparison("a.json", {"a": two_steps()})
    assert not [*tmp_path.iterdir()]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    timeline = two_steps()
    message = r'matplotlib: pip install "syncpipe\[plot\]"'
    for make in (
        timeline.figure,
        timeline.plot,
        lambda: timeline.save(tmp_path / "a.png"),
        lambda: timeline.save(tmp_path / "a.svg"),
        lambda: compare({"a": timeline}),
        lambda: save_comparison(tmp_path / "a.png", {"a": timeline}),
    ):
        with pytest.raises(ImportError, match=message):
            make()
    assert timeline._repr_svg_() is None
    timeline.save(tmp_path / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_the_picture_says() -> None:
    pytest.importorskip("matplotlib")
    said = texts(two_steps(title="mine").figure())
    for text in (
        "mine",
        "2 steps, 1 micro-batch, 2 stages, makespan 101 ms, bubble 25.0%",
        "gpu 0",
        "stage 1",
        "17% idle",
        "33% idle",
        "time (ms)",
        "forward",
        "backward",
        "forward again (recomputation)",
        "activations sent, below their sender",
        "gradients sent, above their sender",
        "idle: the bubble",
        "1 in memory",
        "memory: micro-batches in flight",
    ):
        assert text in said
    assert not [text for text in said if "half" in text]  # only what there is
    assert "stages 0, 4" in texts(simulated("interleaved_1f1b", each=2).figure())
    assert len([text for text in texts(simulated("zb_h1").figure()) if "half" in text]) == 2


@pytest.mark.parametrize(
    "timeline",
    [
        pytest.param(simulated("gpipe"), id="gpipe"),
        pytest.param(simulated("zb_h1", 32, 8), id="zb_h1"),
        pytest.param(simulated("interleaved_1f1b", 16, 8, 2), id="interleaved"),
        pytest.param(two_steps(title="Two steps"), id="two steps"),
        pytest.param(Timeline(TWO_STEPS, ["a" * 40, r"a $\frac$ of it"]), id="names"),
        pytest.param(Timeline(TWO_STEPS, ["", " "], title="T" * 90), id="long title"),
    ],
)
def test_no_text_is_on_another(timeline: Timeline) -> None:
    pytest.importorskip("matplotlib")
    figure = timeline.figure()
    figure.draw_without_rendering()
    boxes = [(text, text.get_window_extent()) for text in shown(figure)]
    for text, box in boxes:
        corners = (box.x0, box.y0), (box.x1, box.y1)
        assert all(figure.bbox.contains(*corner) for corner in corners), text
    for (text, box), (other, also) in combinations(boxes, 2):
        assert not overlap(box, also), (text, other)


@given(simulations())
def test_no_box_is_on_another(simulation: Simulation) -> None:
    """Rows and strips lie below each other, and beside each other what is on one height."""
    pytest.importorskip("matplotlib")
    from syncpipe.timeline.picture import MEMORY, boxes_of

    spans = Timeline.of(simulation).spans
    boxes = [(s.start, s.end, *height) for s, *height in boxes_of(spans)]
    assert len(boxes) == sum(s.kind != "transfer" or s.end > s.start for s in spans)
    assert all(top < bottom <= int(top) + MEMORY[0] for _, _, top, bottom in boxes)
    for (a, b, top, bottom), (c, d, also, end) in combinations(boxes, 2):
        assert min(b, d) <= max(a, c) or min(bottom, end) <= max(top, also)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
def test_memory_is_what_the_schedule_says(name: str) -> None:
    pytest.importorskip("matplotlib")
    schedule = build(name, 8, rounds(4, 2 if name == "interleaved_1f1b" else 1))
    timeline = Timeline.of(simulate(schedule, Costs.even(schedule.n, transfer=0.1)))
    notes = [text for text in texts(timeline.figure()) if text.endswith(" in memory")]
    assert notes == [f"{count} in memory" for count in schedule.in_flight_on_device]
    forwards = [span for span in timeline.spans if span.kind == "forward"]
    said = texts(Timeline(forwards, timeline.rows).figure())
    assert not [text for text in said if "memory" in text]


def test_on_axes_of_the_callers() -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    left, right = figure_module.Figure().subplots(1, 2)
    timeline = two_steps(title="mine")
    assert timeline.plot(right) is right
    assert not left.has_data()
    assert {"mine", "time (ms)", "gpu 0", "17% idle"} <= {*texts(right.figure)}
    assert {"forward", "idle: the bubble"} <= {t.get_text() for t in right.get_legend().get_texts()}
    assert {*texts(timeline.plot().figure)} >= {"mine", "time (ms)", "gpu 0", "forward"}


def overlap(a: Any, b: Any, slack: float = 2.0) -> bool:
    """Whether two boxes have more in common than a rim, in pixels."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return bool(min(width, height) > slack)


def test_nothing_global() -> None:
    """Pictures come from any thread, and from none of pyplot."""
    pytest.importorskip("matplotlib")
    import matplotlib

    before = dict(matplotlib.rcParams)
    timeline = simulated()
    made = in_threads(lambda _: timeline._repr_svg_(), *range(4))
    assert all(svg and svg.count("<path") == str(made[0]).count("<path") for svg in made)
    assert dict(matplotlib.rcParams) == before


# --- compared -----------------------------------------------------------------------------------


def test_compare(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    costs = Costs.even(4)
    timelines = {
        "first": Timeline.of(simulate(one_f_one_b(8, 4), costs)),
        "second": Timeline.of(simulate(zb_h1(8, 4), costs)),
    }
    figure = compare(timelines)
    said = texts(figure)
    assert said.count("device 0") == 2
    assert said.count("forward") == 1  # one legend
    for text in ("first", "second", "time (units)"):
        assert text in said
    assert figure.axes[0].get_xlim() == (0, 33)
    assert compare(timelines, scale=True).axes[0].get_xlim() == (0, 100)
    for name in ("both.svg", "both.png"):
        save_comparison(tmp_path / name, timelines, scale=True)
        assert (tmp_path / name).stat().st_size > 0
    late = [replace(span, start=span.start + 50, end=span.end + 50) for span in TWO_STEPS]
    figure = compare({"a": two_steps(), "b": Timeline(late, ["gpu 0", "gpu 1"], "ms")})
    assert figure.axes[0].get_xlim() == (0, 101)  # each from its first start


def test_compare_what_has_nothing_in_common() -> None:
    with pytest.raises(ValueError, match=r"units ms, units, .* scale=True"):
        compare({"measured": two_steps(), "planned": simulated()})
    with pytest.raises(ValueError, match=r"timelines=\{\} is empty; give at least one"):
        compare({})
    pytest.importorskip("matplotlib")
    figure = compare({"measured": two_steps(), "planned": simulated()}, scale=True)
    assert "time (% of the makespan)" in texts(figure)


def test_every_kind_can_be_drawn_and_interleaved_boxes_name_their_stage() -> None:
    pytest.importorskip("matplotlib")
    spans = [Span(kind, 40 * k, 0, 0, k, k + 1) for k, kind in enumerate(KINDS)]
    said = texts(Timeline(spans, ["cpu"]).figure())
    assert {"0", "40", "80", "120", "160"} <= {*said}
    timeline = Timeline.of(simulate(interleaved_1f1b(4, rounds(2, 2)), Costs.even(4)))
    counts = Counter(texts(timeline.figure()))
    assert [counts[f"s{j}"] for j in range(4)] == [8, 8, 8, 8]
