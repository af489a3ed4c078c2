"""The commands: one door to all benchmarks, and each group by itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as door
from benchmarks.common import Part, Spread, rounds
from benchmarks.group import Group

pictures = pytest.importorskip("benchmarks.pictures")  # needs matplotlib
GROUPS = {group.name: group for group, _ in door.GROUPS}


def test_every_benchmark_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert len(set(names)) == len(names)
    assert {name.split(".")[0] for name in names} == set(GROUPS) == {
        "overhead", "memory", "schedules", "planning", "peers", "data_parallel",
    }  # fmt: skip


def test_names_select_groups_and_parts() -> None:
    jobs = door.every(True)
    names = ["schedules.ideal", "overhead"]
    assert list(door.selected(names, jobs)) == names[::-1]
    planning = [name for name in jobs if name.startswith("planning.")]
    assert list(door.selected(["planning"], jobs)) == planning
    assert door.selected([], jobs) == jobs


def test_a_report_has_tables_pictures_and_numbers(tmp_path: Path) -> None:
    folder, numbers = tmp_path / "report", tmp_path / "all.json"
    arguments = ["overhead", "--quick", "--folder", str(folder), "--json", str(numbers)]
    assert door.main(arguments) == 0
    text = (folder / "report.md").read_text()
    assert "| train_batch 1f1b" in text
    assert "![Overhead](overhead.svg)" in text
    assert "These numbers say nothing" in text
    assert (folder / "overhead.svg").read_text().startswith("<?xml")
    content = json.loads(numbers.read_text())
    assert content["about"]["command"] == "python -m benchmarks overhead --quick"
    assert content["parts"]["overhead"]["rows"]


@pytest.mark.parametrize(
    ("main", "argv", "reason"),
    [
        (door.main, ["overheads"], "no benchmark 'overheads'"),
        (GROUPS["schedules"].main, ["--only", "ideals"], "--only: invalid choice: 'ideals'"),
        (GROUPS["schedules"].main, ["--repeats", "1"], "--repeats: must be at least 2, not 1"),
        (GROUPS["schedules"].main, ["--json", "/nowhere/at/all.json"], "no folder /nowhere/at"),
        (GROUPS["peers"].main, ["--threads", "0"], "--threads: must be at least 1, not 0"),
        (
            GROUPS["planning"].main,
            ["--profiles", "a", "--profile-samples", "1", "2"],
            "2 numbers for 1 profiles",
        ),
    ],
)
def test_wrong_arguments(main, argv, reason, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert reason in capsys.readouterr().err


def test_profiles_that_are_none_are_told_before_anything_is_measured(tmp_path, capsys):
    file = tmp_path / "vgg16.json"
    file.write_text("{}", encoding="utf-8")
    assert GROUPS["planning"].main(["--quick", "--profiles", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "--profiles" in err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for main in (door.main, GROUPS["schedules"].main):
        assert main(["--quick"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert 'pip install "syncpipe[bench]"' in err


def test_the_report_says_the_command_and_no_folder(tmp_path, capsys):
    group = Group("some", "Title", "", {"a": lambda options: Part("A", "")}, rounds="3")
    files = [str(tmp_path / "a.md"), str(tmp_path / "a.json")]
    argv = ["--quick", "--only", "a", "--repeats", "3", "--markdown", files[0], "--json", files[1]]
    assert group.main(argv) == 0
    assert "`python -m benchmarks.some --quick --only a --repeats 3`" in capsys.readouterr().out


# -- tables and pictures --------------------------------------------------------------------------


def test_every_job_runs_in_every_round_and_in_every_place():
    calls: list[str] = []

    def job(name):
        return lambda: calls.append(name) or float(len(calls))

    samples = rounds({name: job(name) for name in "abc"}, 6, "test")
    assert [len(times) for times in samples.values()] == [6, 6, 6]
    orders = ["".join(calls[k : k + 3]) for k in range(6, 24, 3)]
    assert sorted(map(sorted, orders)) == [list("abc")] * 6
    assert len(set(orders)) == 6
    assert all({order[place] for order in orders} == set("abc") for place in range(3))


def test_spread_and_table():
    part = Part("Title", "Setting.", {"ratio": "defined."})
    part.rows = [{"what": "a", "ratio": Spread.ratio([2.0, 4.0, 6.0], [1.0, 1.0, 1.0], 2)}]
    part.rows.append({"what": "b", "ms": 1234.5})
    part.aim("faster", False, "2 times")
    text = part.as_markdown()
    assert "| a    | 2 (1.5 .. 2.5) |      |" in text
    assert "| b    |                | 1234 |" in text
    assert "- **ratio**: defined." in text
    assert "- Target, **not met**: faster (2 times)" in text


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
    assert pictures.draw(Part("Title", "setting", rows=[{"what": "a", "seconds": 3.0}])) is None
