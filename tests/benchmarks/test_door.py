"""One door to all benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as door
from benchmarks.common import Part, Spread, rounds


def test_every_benchmark_is_listed_and_names_select(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*names: str) -> list[str]:
        assert door.main([*names, "--list"]) == 0
        return capsys.readouterr().out.split()

    names = listed()
    assert len(set(names)) == len(names)
    assert {name.split(".")[0] for name in names} == set(door.GROUPS)
    page = (Path(door.__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in door.GROUPS)
    assert listed("schedules.ideal", "overhead") == ["schedules.ideal", "overhead.overhead"]
    assert listed("planning") == [name for name in names if name.startswith("planning.")]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["overheads"], "no benchmark 'overheads'"),
        (["schedules.ideals"], "no benchmark 'schedules.ideals'"),
        (["schedules", "--repeats", "1"], "--repeats: '1' is not a whole number from 2"),
    ],
)
def test_wrong_arguments(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        door.main(argv)
    assert reason in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert door.main(["--quick"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert 'pip install "syncpipe[bench]"' in err


def test_the_picture_of_the_readme_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(door, "RESULTS", tmp_path)
    assert door.main(["picture"]) == 0
    assert (tmp_path / "schedules.svg").read_text().startswith("<?xml")


# -- tables --------------------------------------------------------------------------------------


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
