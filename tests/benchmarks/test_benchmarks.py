"""One door to all benchmarks, which run in their quick forms; models of papers, and peers."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from benchmarks import __main__ as door
from benchmarks import peers, schedules
from benchmarks.common import Part, Spread, rounds
from benchmarks.models import gpt2_small, resnet, resnext101_32x8d
from benchmarks.overhead import CHUNKS, calls_per_cell, tiny
from benchmarks.overhead import peers as ways
from benchmarks.peers import CPU, LIBRARIES, PLACES, fitting, gathered, missing
from benchmarks.tasks import OURS, Peer, Task, check, distance, ours, plain
from syncpipe.runtime.weight_gradients import PRODUCTS
from tests import simulated


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


def test_the_pictures_of_the_documentation_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(door, "PICTURES", tmp_path)
    assert door.main(["picture"]) == 0
    for name in ("pipe.svg", "schedules.svg"):
        assert (tmp_path / name).read_text().startswith("<?xml")


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


# -- their quick forms ----------------------------------------------------------------------------

GLOO = distributed.is_available() and distributed.is_gloo_available()
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers"
)
needs_gloo = pytest.mark.skipif(not GLOO, reason="needs gloo")
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
long = pytest.mark.skipif("SYNCPIPE_QUICK" not in os.environ, reason="python -m tests.long quick")
QUICK = [
    "schedules",
    "overhead",
    pytest.param("planning", marks=long),
    pytest.param("peers.tiny", marks=long),
    pytest.param("one_call", marks=long),
    pytest.param("converted.transformers", marks=[long, needs_transformers]),
    pytest.param("data_parallel.small_layers", marks=[long, needs_gloo]),
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


@long
@pytest.mark.simulated
@pytest.mark.skipif(
    torch.accelerator.is_available() or simulated.unavailable() is not None,
    reason="there are no simulated devices",
)
def test_parts_for_accelerators_run_on_simulated_ones_and_are_skipped_without(tmp_path, capsys):
    names = [f"gpu.{part}" for part in ("tests1", "overhead", "workers", "memory", "plan")]
    names += ["peers.gpu-gpt2", "memory"]
    command = [sys.executable, "-m", "benchmarks", *names, "--quick", f"--folder={tmp_path}"]
    subprocess.run(command, env={**os.environ, "SYNCPIPE_SIMULATED": "1"}, check=True)
    for name in ("gpu", "memory"):
        parts = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["parts"]
        on_any = [part for title, part in parts.items() if not title.startswith("peers")]
        assert all(table["rows"] for part in on_any for table in part["tables"])
    row = parts["build"]["tables"][0]["rows"][0]
    assert min(row["host"], row["device 0"]) > 0
    assert "Skipped: PyTorch finds no CUDA GPU" in (tmp_path / "peers.md").read_text()
    assert door.main(["gpu", "--quick", f"--folder={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("Skipped: PyTorch finds no accelerator here") == 8


# -- what a cell costs, in calls of Python functions: a number that no machine changes -------------

#: By what is called and how: at most so many for each micro-batch and stage, with what a call costs
#: once. Without that share they are 30 of both drivers with Python 3.11; with recomputation, whose
#: bounds leave some room, 62 of ``train_batch`` and 56 of ``pipe(x)``.
MOST = {
    ("pipe(x)", "never"): 38,
    ("pipe(x)", "always"): 77,
    ("train_batch 1f1b", "never"): 37,
    ("train_batch gpipe", "never"): 37,
    ("train_batch 1f1b", "always"): 83,
    ("train_batch zb_h1", "never"): 82,
}


@pytest.mark.parametrize(("how", "checkpoint"), MOST)
def test_calls_per_cell_do_not_grow(how, checkpoint):
    task = tiny(4)
    (peer,) = (
        peer
        for peer in ways(task, 1)
        if (peer.library, peer.how, peer.checkpoint) == (OURS, how, checkpoint)
    )
    step = partial(task.step, peer)
    for _ in range(3):
        step()
    assert 0 < calls_per_cell(step, CHUNKS * 4) <= MOST[how, checkpoint]


# --- what is compared -----------------------------------------------------------------------------


#: How to build it, its parameters as published (by torchvision and Radford et al. 2019), an input
#: of one sample and the shape of the output without that.
PUBLISHED: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], tuple[int, ...]]] = {
    "ResNet-101": (partial(resnet, (3, 4, 23, 3)), 44_549_160, (3, 224, 224), (1000,)),
    "ResNeXt-101 32x8d": (resnext101_32x8d, 88_791_336, (3, 224, 224), (1000,)),
    "GPT-2 small": (gpt2_small, 124_439_808 + 50_257 * 768, (), (1024, 50_257)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters_is_the_published_one_and_it_runs_without_values(name):
    build, published, sample, output = PUBLISHED[name]
    with torch.device("meta"):
        model = build()
        x = torch.randn(1, *sample) if sample else torch.randint(50_257, (1, 1024))
    assert sum(p.numel() for p in model.parameters()) == published
    assert model(x).shape == (1, *output)


# -- whether they agree ---------------------------------------------------------------------------


def small_task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return Task(model, torch.randn(4, 3), torch.randn(4, 2), F.mse_loss, 2, [1, 2])


def test_every_mistake_is_too_far():
    task = small_task().small()
    task.model.double()
    expected = task.outcome(plain(task)[0])
    assert distance(expected, expected) == 0
    wrong = [
        (expected[0], [g * (1.001 if j == k else 1) for j, g in enumerate(expected[1])])
        for k in range(len(expected[1]))
    ]
    wrong.append((expected[0] * 1.001, expected[1]))
    wrong.append((expected[0], [gradient * float("nan") for gradient in expected[1]]))
    for each in wrong:
        with pytest.raises(SystemExit, match="wrong: its gradients are not the plain loop's"):
            check("wrong", each, expected)


def test_ours_has_to_agree():
    task = small_task()
    half = Peer(OURS, "half", "", "", lambda x, t: plain(task)[1].step(x[:1], t[:1]))
    with pytest.raises(SystemExit, match="half: its gradients are not the plain loop's"):
        gathered(task, Part("", ""), [half], CPU, ["never"])
    assert {parameter.dtype for parameter in task.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("broken", "note"),
    [
        (lambda model, *_, **__: lambda x: 2 * model(x), "its gradients are not the plain loop's"),
        (lambda *_, **__: 1 / 0, "fake does not run here: ZeroDivisionError"),
        (
            lambda model, *_, **__: copy.deepcopy(model),
            "fake does not run here: SystemExit: 0.weight got no gradient",
        ),
    ],
)
def test_libraries_that_differ_or_fail_are_left_out(broken, note, monkeypatch):
    monkeypatch.setitem(sys.modules, "fake", SimpleNamespace(GPipe=broken))
    monkeypatch.setattr(peers, "LIBRARIES", {"fake": ("fake", "GPipe")})
    part, task = Part("", ""), small_task()
    found = gathered(task, part, ours(task, PLACES, ["never"]), CPU, ["never"])
    assert "fake" not in {peer.library for peer in found}
    assert len(found) == 2 + 2 * 4
    assert any(note in line for line in part.notes)


# -- the parts for a GPU --------------------------------------------------------------------------


def test_out_of_memory_is_told_of():
    def too_much(x, target):
        raise torch.OutOfMemoryError("no")

    task, part = small_task(), Part("", "")
    large, loop = Peer("large", "", "", "", too_much), plain(task)[0]
    assert fitting(part, task, [large, loop]) == [loop]
    assert part.notes == ["Out of memory: large."]
