"""``plan.save``: a plan as one picture; and what its page says in special cases."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import syncpipe
from syncpipe.balance import LayerProfile, Profile
from syncpipe.planner import Machine, Plan
from syncpipe.planner.report.rivals import Rival
from syncpipe.planner.report.verdict import verdict

SVG = "{http://www.w3.org/2000/svg}"


def profile_of(layers: int, names: str = "layer{}") -> Profile:
    return Profile(
        tuple(
            LayerProfile(
                names.format(k), {8: 1e-3 * (1 + k % 5)}, {8: 2e-3}, {8: 10**5}, {8: 1e6 * (k % 3)},
                parameter_bytes=10**6 * (k % 2),
            )
            for k in range(layers)
        )
    )  # fmt: skip


def planned(layers: int = 6, devices: str = "3 x 1GB, 10GB/s", **more: Any) -> Plan:
    given = {"batch_size": 32, "chunks": 4, **more}
    return syncpipe.plan(profile_of(layers), devices=devices, **given)


def picture(plan: Plan, folder: Path) -> ElementTree.Element:
    path = folder / "plan.svg"
    plan.save(path)
    return ElementTree.parse(path).getroot()


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    "plan",
    [
        planned(),
        planned(200, "16 x 1GB, 10GB/s"),
        planned(1, "1 x 1GB"),
        planned(schedule="zbv"),
        planned(devices="3 x 9MB, 10GB/s"),  # recomputes
        planned(devices="1 x 20MB + 2 x 1TB, 10GB/s"),
    ],
    ids=["small", "large", "one", "halves", "tight", "mixed"],
)
def test_everything_is_inside_of_the_picture(plan: Plan, tmp_path: Path) -> None:
    root = picture(plan, tmp_path)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter(f"{SVG}rect"):
        if box.get("width") != "100%":
            x, y, w, h = (float(box.get(key, "nan")) for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height
    for path in root.iter(f"{SVG}path"):
        assert not re.search("nan|inf", path.get("d", "nan"))


def test_it_shows_layers_stages_devices_and_what_else_there_was(tmp_path: Path) -> None:
    plan = planned()
    shown = texts(picture(plan, tmp_path))
    assert {"layer0", "layer5", "stage 2", "device 2", "this plan"} <= set(shown)
    assert {rival.name for rival in plan.rivals if len(rival.name) < 40} <= set(shown)
    assert "schedule ZB-H1" in shown


def test_the_limit_is_drawn_where_it_is_near(tmp_path: Path) -> None:
    def limits(plan: Plan) -> int:
        paths = picture(plan, tmp_path).iter(f"{SVG}path")
        return sum(path.get("class") == "limit" for path in paths)

    assert limits(planned(devices="3 x 9MB, 10GB/s")) == 3 + 1  # and in the legend
    assert limits(planned(devices="3 x 1TB, 10GB/s")) == 0


def test_names_of_any_kind_are_text(tmp_path: Path) -> None:
    plan = syncpipe.plan(
        profile_of(4, "</text><script>&\x01\ud800{}"), devices="2 x 1GB, 1GB/s", batch_size=8
    )
    assert "script" not in {element.tag for element in picture(plan, tmp_path).iter()}
    plan.save(tmp_path / "plan.html")
    assert "<script" not in (tmp_path / "plan.html").read_text()


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    planned().save(path)
    page = path.read_text()
    assert set(re.findall(r"https?://[^\s\"<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img|iframe)|@import|src=", page)
    assert "Compared with" in page  # the same as text
    assert "prefers-color-scheme: dark" in page


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.html or \.svg"):
        planned().save(tmp_path / "plan.pdf")


def test_no_time_at_all_is_drawn(tmp_path: Path) -> None:
    layers = profile_of(3).layers
    free = Profile(tuple(replace(layer, backward={8: 0.0}, forward={8: 1e-12}) for layer in layers))
    plan = syncpipe.plan(free, devices="2 x 1GB, 1GB/s", batch_size=8)
    assert texts(picture(plan, tmp_path))


def test_names_that_cannot_be_printed_are_escaped() -> None:
    plan = syncpipe.plan(profile_of(4, "\ud800\n{}"), devices="2 x 1GB, 1GB/s", batch_size=8)
    str(plan).encode()
    assert r"0  device 0  \ud800\n0 to " in str(plan)


def test_what_takes_as_long_is_not_1_00_times_as_fast() -> None:
    other = Rival("data parallelism, 2 copies", 0.999, pipeline=False)
    text = verdict([other], [], 1.0, Machine.even(2, 1e9, 1e9), fewer=False)
    assert "data parallelism, 2 copies would be as fast as this plan (999 ms a step)" in text


def test_that_one_size_was_measured_is_said_up_to_the_most_micro_batches() -> None:
    for samples, capped in ((1024, False), (2048, True)):
        page = str(planned(batch_size=samples, chunks=None))
        assert ", 1024 micro-batches of" in page
        assert "nobody knows what each takes beside its samples" in page
        assert ("are tried on demand only" in page) is capped
