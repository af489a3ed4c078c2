"""``benchmarks``: each part runs in its quick form, and what is not the same is not measured."""

from __future__ import annotations

import json

import pytest
import torch
from torch import distributed

from benchmarks.common import check
from benchmarks.data_parallel.parts import GROUP as DATA_PARALLEL
from benchmarks.overhead import GROUP as OVERHEAD
from benchmarks.peers.libraries import LIBRARIES, OURS, missing
from benchmarks.peers.parts import GROUP as PEERS
from benchmarks.planning.parts import GROUP as PLANNING
from benchmarks.schedules.model import mlp
from benchmarks.schedules.parts import GROUP as SCHEDULES
from benchmarks.schedules.sleeping.emulated import SUBJECTS, Run
from benchmarks.schedules.sleeping.emulated import napping as napping_problem
from benchmarks.schedules.sleeping.naps import Naps, splitting_naps
from syncpipe.training.weight_gradients import PRODUCTS

GLOO = distributed.is_available() and distributed.is_gloo_available()
needs_gloo = pytest.mark.skipif(not GLOO, reason="needs gloo")
#: Columns that have to be there: of spreads over the rounds.
RATIOS = {
    "ideal": ["over the loop", "over ideal", "over measured ideal", "machine"],
    "emulated": ["over simulated"],
    "overhead": ["over the loop", "us/cell"],
    "tiny": ["over the loop", "ms"],
    "time": ["search ms", "plan ms", "ms"],
    "predicted": ["measured / predicted", "machine"],
    "small_layers": ["over alone", "over DDP(pipe)", "ms"],
}
QUICK = [
    *((SCHEDULES, name) for name in SCHEDULES.parts),
    *((PLANNING, name) for name in PLANNING.parts),
    (PEERS, "tiny"),
    (OVERHEAD, "overhead"),
    pytest.param(DATA_PARALLEL, "small_layers", marks=needs_gloo),
]


@pytest.mark.parametrize(("group", "name"), QUICK)
def test_quick_form_of_each_part(group, name, tmp_path, capsys):
    threads, bound = torch.get_num_threads(), dict(PRODUCTS)
    files = {"--json": tmp_path / "report.json", "--markdown": tmp_path / "report.md"}
    options = [str(part) for item in files.items() for part in item]
    assert group.main(["--quick", "--only", name, *options]) == 0
    assert torch.get_num_threads() == threads
    assert bound == PRODUCTS
    assert "These numbers say nothing" in capsys.readouterr().out

    content = json.loads(files["--json"].read_text(encoding="utf-8"))
    assert content["about"]["torch"] == torch.__version__
    part = content["parts"][name]
    tables = part.get("tables", [part])
    rows = [row for table in tables for row in table["rows"]]
    for ratio in RATIOS.get(name, []):
        found = [row[ratio] for row in rows if row.get(ratio) is not None]
        assert found
        assert all(0 < row["low"] <= row["median"] <= row["high"] for row in found)
        assert all(len(row["samples"]) == 2 for row in found)
    text = files["--markdown"].read_text(encoding="utf-8")
    assert rows
    assert all(f"## {table['title']}\n" in text for table in tables)
    if group is PEERS:
        libraries = {row["library"] for row in rows}
        assert {"plain loop", "plain, whole mini-batch", OURS} <= libraries
        assert ("torch.distributed" in libraries) == GLOO
        for library in LIBRARIES:
            assert (library in libraries) == (missing(library) is None)
            assert (f"Skipped: {library}" in text) != (library in libraries)


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
