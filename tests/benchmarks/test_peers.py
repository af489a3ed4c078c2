"""``benchmarks.peers``: all train the same; what is missing, fails or differs is told of."""

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

import syncpipe.skip
from benchmarks.common import Part
from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.gpt2 import gpt2_small
from benchmarks.models.resnet import resnet
from benchmarks.models.unet import unet
from benchmarks.peers import check as peers_check
from benchmarks.peers import gpu as peers_gpu
from benchmarks.peers import libraries as peers_libraries
from benchmarks.peers import parts as peers
from benchmarks.peers.check import distance, gathered, outcome, too_far
from benchmarks.peers.cpu import CPU, PLACES, threads
from benchmarks.peers.libraries import LIBRARIES, OURS, Peer, Task, missing, ours, plain
from benchmarks.peers.measure import Meter, PeerOptions, fitting
from benchmarks.peers.skips import translated

GLOO = distributed.is_available() and distributed.is_gloo_available()
IMAGES = partial(torch.rand, 4, 3, 64, 64)
WITH_SKIPS = {
    "resnext": (
        partial(resnet, (1, 1), channels=8, groups=2, group_width=16, num_classes=3),
        IMAGES,
    ),
    "unet": (partial(unet, 2, 1, 4), partial(torch.rand, 4, 3, 16, 16)),
    "amoebanet": (partial(amoebanetd, 3, 3, 8), IMAGES),
    "tied gpt2": (
        partial(gpt2_small, tied=True, layers=1, width=8, heads=2, vocabulary=9, length=4),
        partial(torch.randint, 9, (4, 4)),
    ),
}


def small_task(chunks=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return Task(model, torch.randn(4, 3), torch.randn(4, 2), F.mse_loss, chunks, [1, 2])


@pytest.fixture
def only_fake(monkeypatch):
    """Makes a module the only other library; returns the module, whose GPipe is to be set."""
    fake = ModuleType("fake")
    monkeypatch.setitem(sys.modules, "fake", fake)
    for library in list(LIBRARIES):
        monkeypatch.delitem(LIBRARIES, library)
    monkeypatch.setitem(LIBRARIES, "fake", ("fake", "GPipe", "syncpipe.skip"))
    return fake


# -- the command ----------------------------------------------------------------------------------


def test_tiny_layers_by_everybody(tmp_path, capsys):
    threads = torch.get_num_threads()
    files = {"--json": tmp_path / "report.json", "--markdown": tmp_path / "report.md"}
    options = [str(part) for item in files.items() for part in item]
    assert peers.main(["--quick", "--only", "tiny", *options]) == 0
    assert torch.get_num_threads() == threads
    assert "These numbers say nothing" in capsys.readouterr().out

    content = json.loads(files["--json"].read_text(encoding="utf-8"))
    part, text = content["parts"]["tiny"], files["--markdown"].read_text(encoding="utf-8")
    found = {row["library"] for row in part["rows"]}
    assert {"plain loop", "plain, whole mini-batch", OURS} <= found
    assert ("torch.distributed" in found) == GLOO
    for library in LIBRARIES:
        assert (library in found) == (missing(library) is None)
        assert (f"Skipped: {library}" in text) != (library in found)
        assert content["about"][library] is None or library in found
    for row in part["rows"]:
        beside = {name.removeprefix("over ") for name in row if name.startswith("over ")}
        others = found - {"plain loop", "plain, whole mini-batch", OURS}
        if row["checkpoint"] == "always":
            others -= {"torch.distributed"}
        assert beside - {"the loop"} == (others if row["library"] == OURS else set())
        assert len(row["ms"]["samples"]) == 2
        assert row["workers"] != "2 workers" or row["threads"].startswith("1 + 1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_a_line_that_says_so(capsys):
    assert peers.main(["--quick", "--only", *peers_gpu.PARTS]) == 0
    assert capsys.readouterr().out.count("Skipped: PyTorch finds no CUDA GPU here.") == 4


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--only", "tin"], "argument --only: invalid choice: 'tin'"),
        (["--repeats", "1"], "argument --repeats: must be at least 2, not 1"),
        (["--threads", "0"], "argument --threads: must be at least 1, not 0"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_wrong_arguments(argv, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        peers.main(argv)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_pipe_that_is_left_over_does_not_keep_the_process(library):
    if missing(library) is not None:
        pytest.skip(missing(library))
    code = f"""if True:
        import torch
        from benchmarks.peers.libraries import Task, theirs
        task = Task(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2, 2), None, None, 1, [1])
        kept = list(theirs(task, {library!r}, torch.device("cpu"), ["never", "always"]))
    """
    here = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=here, check=True, timeout=120)


# -- the same layers for all ----------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_SKIPS)
def test_translated_model_is_the_model(name):
    build, sample = WITH_SKIPS[name]
    torch.manual_seed(0)
    model, x = build().eval(), sample()
    other = translated(model, syncpipe.skip, x[:1])
    between = []
    for layer in other:
        layer.register_forward_hook(lambda *call: between.append(call[-1]))
    assert torch.equal(other(x), model(x))
    assert len(between) >= len(other)
    assert all(isinstance(value, (torch.Tensor, tuple)) for value in between)
    assert set(other.parameters()) == set(model.parameters())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", WITH_SKIPS)
def test_other_libraries_train_the_same_layers(library, name):
    if missing(library) is not None:
        pytest.skip(missing(library))
    build, sample = WITH_SKIPS[name]
    torch.manual_seed(0)
    model, x = build(), sample()
    target = torch.zeros_like(model(x))
    half = len(model) // 2
    task = Task(model, x, target, F.mse_loss, 2, [half, len(model) - half])
    part = Part("", "")
    found = gathered(task, part, [], CPU, ["never", "always"])
    assert [peer.library for peer in found.peers].count(library) == 2, part.notes
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchgpipe", None)
    assert missing("torchgpipe") == 'it is not installed; pip install "torchgpipe"'


# -- whether they agree ---------------------------------------------------------------------------


def test_every_mistake_is_too_far():
    task = small_task().small()
    task.model.double()
    loop = plain(task)[0]
    expected = outcome(task, loop)
    assert too_far(distance(expected, expected), expected) is None
    for k in range(len(expected[1])):
        wrong = [gradient * (1.001 if j == k else 1) for j, gradient in enumerate(expected[1])]
        assert too_far(distance((expected[0], wrong), expected), expected) is not None
    assert too_far(distance((expected[0] * 1.001, expected[1]), expected), expected) is not None
    nan = [gradient * float("nan") for gradient in expected[1]]
    assert too_far(distance((expected[0], nan), expected), expected) is not None


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
def test_libraries_that_differ_or_fail_are_left_out(only_fake, broken, note):
    only_fake.GPipe = broken
    part, task = Part("", ""), small_task()
    found = gathered(task, part, ours(task, PLACES, ["never"], ["never"]), CPU, ["never"])
    assert "fake" not in {peer.library for peer in found.peers}
    assert len(found.peers) == 2 + 2 * 4
    assert any(note in line for line in part.notes)


# -- the parts for a GPU --------------------------------------------------------------------------


def test_gpu_part_on_another_device(monkeypatch):
    monkeypatch.setattr(peers_gpu, "PARTITIONS", (2,))
    forgotten, peaks = [], iter(range(1, 10**6))
    meter = Meter(lambda: None, lambda: forgotten.append(1), lambda: next(peaks) << 20)
    part = peers_gpu.run(peers_gpu._gpt2, "fake", PeerOptions(True), CPU, meter)
    assert len(forgotten) == 4 * len(part.rows)  # two rounds, and two before them
    assert {row["partitions"] for row in part.rows} == {2}
    assert {row["workers"] for row in part.rows} == {"", "1 worker", "2 workers"}
    # The highest of all rounds: the last one, in which everybody has a peak of their own.
    peaks_seen = sorted(row["peak MiB"] for row in part.rows)
    assert peaks_seen == [3 * len(part.rows) + 1 + k for k in range(len(part.rows))]
    assert all(row["samples/s"].median > 0 for row in part.rows)
    assert any("memory beside" in note for note in part.notes) or all(map(missing, LIBRARIES))


def test_out_of_memory_is_told_of():
    def too_much(x, target):
        raise torch.OutOfMemoryError("no")

    found = peers_check.Field(small_task(), Part("", ""))
    found.peers = [Peer("large", "", "", "", too_much), plain(found.task)[0]]
    assert fitting(found, Meter()) == found.peers[1:]
    assert found.part.notes == ["Out of memory: large."]
    assert peers_libraries.plain(found.task)[0].label == "plain loop"
