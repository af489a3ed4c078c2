"""``benchmarks``: each part runs in its quick form, and what is not the same is not measured."""

import json
import os
import sys

import pytest
import torch
from torch import distributed

from benchmarks import overhead
from benchmarks.common import Part, Spread, rounds
from benchmarks.schedules import parts as schedules
from benchmarks.schedules.emulated import SUBJECTS, Run
from benchmarks.schedules.emulated import napping as napping_problem
from benchmarks.schedules.model import check, mlp
from benchmarks.schedules.naps import Naps, splitting_naps
from syncpipe.training.weight_gradients_rules import BINDERS

GLOO = distributed.is_available() and distributed.is_gloo_available()
RATIOS = {
    "ideal": ["over the loop", "over ideal", "over measured ideal", "machine"],
    "zero_bubble": ["over the loop", "over 1f1b", "over ideal of 1f1b"],
    "emulated": ["over simulated", "bare threads over simulated", "over bare threads"],
    "overhead": ["over the loop", "us/cell"],
    "distributed": ["over the loop", "ours over theirs"],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(name == "distributed" and not GLOO, reason="needs gloo"),
        )
        for name in schedules.PARTS
    ],
)
def test_quick_form_of_each_part(name, tmp_path, capsys):
    threads, bound = torch.get_num_threads(), dict(BINDERS)
    files = {"--json": tmp_path / "report.json", "--markdown": tmp_path / "report.md"}
    options = [str(part) for item in files.items() for part in item]
    assert schedules.main(["--quick", "--only", name, *options]) == 0
    assert torch.get_num_threads() == threads
    assert bound == BINDERS
    assert "These numbers say nothing" in capsys.readouterr().out

    content = json.loads(files["--json"].read_text(encoding="utf-8"))
    assert content["about"]["torch"] == torch.__version__
    part = content["parts"][name]
    for ratio in RATIOS[name]:
        found = [row[ratio] for row in part["rows"] if row.get(ratio) is not None]
        assert found
        assert all(0 < row["low"] <= row["median"] <= row["high"] for row in found)
        assert all(len(row["samples"]) == 2 for row in found)
    text = files["--markdown"].read_text(encoding="utf-8")
    assert f"## {part['title']}" in text
    assert all(f"| {row['what']} " in text for row in part["rows"])
    assert all(target["aim"] in text for target in part["targets"])


def test_overhead(capsys, tmp_path):
    file = tmp_path / "overhead.json"
    argv = ["--layers", "2", "--chunks", "2", "--repeats", "2", "--seconds", "0.001"]
    assert overhead.main([*argv, "--json", str(file)]) == 0
    assert "Pipe, 2 workers, always" in capsys.readouterr().out
    content = json.loads(file.read_text(encoding="utf-8"))
    assert list(content) == ["about", "results", "targets"]
    assert content["about"]["cpus"] == os.cpu_count()


def test_nothing_else_is_measured_than_the_same():
    problem = mlp(2, 4, 4)
    loss, gradients = problem.expected(2)
    check("same", (loss, gradients), (loss, gradients))
    for k in range(len(gradients)):
        wrong = [gradient * (1.001 if j == k else 1) for j, gradient in enumerate(gradients)]
        with pytest.raises(SystemExit, match=f"gradient {k} is not the plain loop's"):
            check("wrong", (loss, wrong), (loss, gradients))
    with pytest.raises(SystemExit, match="the loss is not the plain loop's"):
        check("wrong", (loss * 1.001, gradients), (loss, gradients))


def test_naps_that_are_not_those_of_the_simulation_are_not_measured():
    split = next(subject for subject in SUBJECTS if subject.label == "zb_h1")
    expected = napping_problem(2, 2, Naps(0, 0, 0), splits=True).expected(2)
    with splitting_naps():
        Run(split, 2, 2, 0.0).check(expected)
    with pytest.raises(SystemExit, match="took naps"):  # without the rule nothing splits
        Run(split, 2, 2, 0.0).check(expected)


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


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--only", "ideals"], "argument --only: invalid choice: 'ideals'"),
        (["--repeats", "1"], "argument --repeats: must be at least 2, not 1"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_wrong_arguments(argv, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        schedules.main(argv)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


def test_missing_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert schedules.main(["--quick"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert 'pip install "syncpipe[bench]"' in err
