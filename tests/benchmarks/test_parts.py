"""``benchmarks``: each part runs in its quick form, and what is not the same is not measured."""

from __future__ import annotations

import json

import pytest
import torch
from torch import distributed

from benchmarks import __main__ as door
from benchmarks import schedules
from benchmarks.peers import LIBRARIES, missing
from benchmarks.tasks import OURS
from syncpipe.training.weight_gradients import PRODUCTS
from tests import simulated

GLOO = distributed.is_available() and distributed.is_gloo_available()
needs_gloo = pytest.mark.skipif(not GLOO, reason="needs gloo")
needs_devices = pytest.mark.skipif(
    not torch.accelerator.is_available() and simulated.unavailable() is not None,
    reason="neither accelerators nor simulated ones",
)
#: Columns that have to be there: of spreads over the rounds.
RATIOS = {
    "ideal": ["over the loop", "over ideal", "over measured ideal", "machine"],
    "emulated": ["over simulated"],
    "overhead": ["over the loop", "us/cell"],
    "sleeping": ["times as fast as turns", "ms"],
    "transformer": ["times as fast as turns", "ms"],
    "tiny": ["over the loop", "ms"],
    "predicted": ["measured / predicted", "measured ms"],
    "small_layers": ["over alone", "over DDP(pipe)", "ms"],
}
QUICK = [
    "schedules",
    "planning",
    "peers.tiny",
    "overhead",
    "one_call",
    "converted.handwritten",
    pytest.param("data_parallel.small_layers", marks=needs_gloo),
    pytest.param("memory.build", marks=[pytest.mark.simulated, needs_devices]),
]


@pytest.mark.parametrize("name", QUICK)
def test_quick_form_of_each_part(name, tmp_path, capsys):
    threads, bound = torch.get_num_threads(), dict(PRODUCTS)
    assert door.main([name, "--quick", "--folder", str(tmp_path)]) == 0
    assert torch.get_num_threads() == threads
    assert bound == PRODUCTS
    assert "These numbers say nothing" in capsys.readouterr().out

    group = name.split(".")[0]
    content = json.loads((tmp_path / f"{group}.json").read_text(encoding="utf-8"))
    text = (tmp_path / f"{group}.md").read_text(encoding="utf-8")
    assert content["about"]["torch"] == torch.__version__
    assert f"`python -m benchmarks {name} --quick`" in text
    for part, found in content["parts"].items():
        rows = [row for table in found["tables"] for row in table["rows"]]
        assert rows
        assert all(f"## {table['title']}\n" in text for table in found["tables"])
        for ratio in RATIOS.get(part, []):
            spreads = [row[ratio] for row in rows if row.get(ratio) is not None]
            assert spreads
            assert all(0 < row["low"] <= row["median"] <= row["high"] for row in spreads)
            assert all(len(row["samples"]) == 2 for row in spreads)
    if group == "memory":
        assert min(rows[0]["host"], rows[0]["device 0"]) > 0
    if group == "peers":
        libraries = {row["library"] for row in rows}
        assert {"plain loop", "plain, whole mini-batch", OURS} <= libraries
        assert ("torch.distributed" in libraries) == GLOO
        for library in LIBRARIES:
            assert (library in libraries) == (missing(library) is None)
            assert (f"Skipped: {library}" in text) != (library in libraries)


def test_naps_that_are_not_those_of_the_simulation_are_not_measured():
    with schedules.splitting_naps():
        schedules.napping("zb_h1", 2, 2, 0.0)
    with pytest.raises(SystemExit, match="took naps"):  # without the rule nothing splits
        schedules.napping("zb_h1", 2, 2, 0.0)
