"""``python -m benchmarks``: one door to all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as door
from benchmarks.common import Part, Spread

pictures = pytest.importorskip("benchmarks.pictures")  # needs matplotlib


def test_every_benchmark_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert {name.split(".")[0] for name in names} == {
        "overhead", "schedules", "planning", "papers", "peers",
    }  # fmt: skip
    assert len(set(names)) == len(names)


def test_names_select_groups_and_parts() -> None:
    jobs = door.every(True)
    assert list(door.selected(["overhead"], jobs)) == ["overhead"]
    assert list(door.selected(["schedules.ideal", "overhead"], jobs)) == [
        "overhead", "schedules.ideal",
    ]  # fmt: skip
    assert set(door.selected(["planning"], jobs)) == {
        name for name in jobs if name.startswith("planning.")
    }
    assert door.selected([], jobs) == jobs


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        door.main(["overheads"])
    assert "'overheads'" in capsys.readouterr().err


def test_a_report_has_tables_pictures_and_numbers(tmp_path: Path) -> None:
    folder, numbers = tmp_path / "report", tmp_path / "all.json"
    arguments = ["overhead", "--quick", "--folder", str(folder), "--json", str(numbers)]
    assert door.main(arguments) == 0
    text = (folder / "report.md").read_text()
    assert "| Pipe, 1 worker, never" in text
    assert "![Overhead](overhead.svg)" in text
    assert "These numbers say nothing" in text
    assert (folder / "overhead.svg").read_text().startswith("<?xml")
    content = json.loads(numbers.read_text())
    assert content["about"]["command"] == "python -m benchmarks overhead --quick"
    assert content["parts"]["overhead"]["rows"]


def test_a_picture_has_a_panel_for_each_ratio_and_a_bar_for_each_line() -> None:
    spread = Spread.of([1.0, 2.0, 3.0])
    rows = [
        {"what": "a", "over the loop": spread, "us": spread},
        {"what": "b", "over the loop": spread, "over theirs": spread},
        {"what": "c", "us": spread},
    ]
    figure = pictures.draw(Part("Title", "setting", rows=rows))
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["over the loop", "over theirs"]
    assert [len(axes.patches) for axes in figure.axes] == [2, 1]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b"]


def test_without_ratios_there_is_no_picture() -> None:
    assert pictures.draw(Part("Title", "setting", rows=[{"what": "a", "seconds": 3.0}])) is None
