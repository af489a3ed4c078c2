"""A plan as text and as a page of HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import syncpipe
from syncpipe.balance import LayerProfile, Profile
from syncpipe.planner import Alternative, Plan
from syncpipe.timeline.timeline import Timeline


def profile_of(layers: int, names: str = "layer{}", **more: Any) -> Profile:
    return Profile(
        tuple(
            LayerProfile(
                names.format(k), {8: 1e-3 * (1 + k % 5)}, {8: 2e-3}, {8: 10**5}, {8: 1e6 * (k % 3)},
                parameter_bytes=10**6 * (k % 2),
            )
            for k in range(layers)
        ),
        **more,
    )  # fmt: skip


def planned(layers: int = 6, devices: str = "3 x 1GB, 10GB/s", **more: Any) -> Plan:
    given = {"batch_size": 32, "chunks": 4, **more}
    return syncpipe.plan(profile_of(layers), devices=devices, **given)


def page(plan: Plan, folder: Path) -> str:
    plan.save(folder / "plan.HTML")
    return (folder / "plan.HTML").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("layers", "devices", "more"),
    [
        (6, "3 x 1GB, 10GB/s", {}),
        (1, "1 x 1GB", {}),
        (6, "3 x 1GB, 10GB/s", {"schedule": "zbv"}),
        (6, "3 x 9MB, 10GB/s", {}),  # recomputes
        (6, "1 x 20MB + 2 x 1TB, 10GB/s", {}),
    ],
)
def test_the_page_has_stages_layers_memory_and_alternatives(
    layers: int, devices: str, more: dict[str, Any], tmp_path: Path
) -> None:
    plan = planned(layers, devices, **more)
    shown = page(plan, tmp_path)
    assert not re.search(r"\bnan|\binf\b", shown)
    HTMLParser().feed(shown)
    for layer in plan.profile.layers:
        assert f"<td>{layer.name}</td>" in shown
    for s, stage in enumerate(plan.stages):
        assert f"stage {s} on {stage.device}" in shown
    assert shown.count('class="lane"') == max(plan.device_of) + 1
    assert "<td>this plan</td>" in shown
    for other in plan.alternatives:
        assert f"<td>{escape(other.name)}</td>" in shown


def test_the_verdict_comes_first_and_is_red_where_one_should_not_pipeline(tmp_path: Path) -> None:
    light = planned(devices="2 x 1GB, 10GB/s")
    assert light.alternatives
    shown = page(light, tmp_path)
    assert '<p class="verdict bad">' in shown
    assert shown.index("The plain truth") < shown.index("Where the model is cut")
    assert 'class="verdict good"' in page(replace(light, alternatives=()), tmp_path)


def test_alternatives_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    plan = planned()
    shown = page(plan, tmp_path)
    rows = [("this plan", plan.step_time), *((a.name, a.time) for a in plan.alternatives if a.time)]
    places = [
        shown.index(f"<td>{escape(name)}</td>") for name, _ in sorted(rows, key=lambda row: row[1])
    ]
    assert places == sorted(places)


def test_memory_is_drawn_up_to_the_limit(tmp_path: Path) -> None:
    plan = planned(devices="3 x 1GB, 10GB/s")
    lanes = re.findall(r'aria-label="memory of [^"]*"><path d="([^"]*)"', page(plan, tmp_path))
    for lane, memory in zip(lanes, plan.chosen.on_device, strict=True):
        least = min(float(y) for y in re.findall(r"V([\d.]+)H", lane))
        assert least == pytest.approx(100 * (1 - memory / 1e9), abs=0.1)


def test_without_matplotlib_the_page_has_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: Timeline, path: Any) -> None:
        raise ImportError("no matplotlib")

    monkeypatch.setattr(Timeline, "save", missing)
    shown = page(planned(), tmp_path)
    assert "syncpipe[plot]" in shown
    assert "Alternatives" in shown


def test_names_of_any_kind_are_text(tmp_path: Path) -> None:
    profile = profile_of(4, "</text><script>&\x01\ud800{}")
    plan = syncpipe.plan(profile, devices="2 x 1GB, 1GB/s", batch_size=8)
    assert "<script" not in page(plan, tmp_path)
    plan = syncpipe.plan(profile_of(4, "\ud800\n{}"), devices="2 x 1GB, 1GB/s", batch_size=8)
    str(plan).encode()
    assert r"0  device 0  \ud800\n0 to " in str(plan)


def test_the_page_needs_nothing_else_and_fits_a_phone(tmp_path: Path) -> None:
    shown = page(planned(), tmp_path)
    assert not re.search(r"<(script|link|img|iframe)|@import|src=", shown)
    assert 'name="viewport" content="width=device-width' in shown
    assert "prefers-color-scheme: dark" in shown


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plan.pdf' must end in \.html; plan.timeline"):
        planned().save(tmp_path / "plan.pdf")


def test_what_takes_as_long_is_not_1_00_times_as_fast() -> None:
    plan = planned()
    other = Alternative("data parallelism, 2 copies", 0.999 * plan.step_time, pipeline=False)
    text = " ".join(str(replace(plan, alternatives=(other,))).split())
    assert "data parallelism, 2 copies would be as fast as this plan" in text


def test_that_one_size_was_measured_is_said_up_to_the_most_micro_batches() -> None:
    for samples, capped in ((1024, False), (2048, True)):
        text = str(planned(batch_size=samples, chunks=None))
        assert ", 1024 micro-batches of" in text
        assert "what each takes beside its samples is unknown" in text
        assert ("are tried on demand only" in text) is capped


def test_times_that_are_uncertain_have_a_spread_and_the_load_is_named() -> None:
    profile = profile_of(4, spread=0.4, load_average=6.25, device="cpu", source="measured")
    text = str(syncpipe.plan(profile, devices="2 x 1GB, 1GB/s", batch_size=8))
    assert "times \u00b140%: rounds differ by so much (load 6.2 when it was measured)" in text
    assert re.search(r"step time   [\d.]+ ms \u00b140%,", text)
    calm = syncpipe.plan(profile_of(4, spread=0.01), devices="2 x 1GB, 1GB/s", batch_size=8)
    assert "\u00b1" not in str(calm)


def test_an_estimate_says_what_it_is() -> None:
    profile = profile_of(4, device="A100", source="estimated")
    text = str(syncpipe.plan(profile, devices="2 x 1GB, 1GB/s", batch_size=8))
    assert "an estimate from the data sheet, never compared with a measurement" in text
