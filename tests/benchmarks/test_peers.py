"""What is compared: models of the papers, and peers that all train the same."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import peers
from benchmarks.common import Options, Part
from benchmarks.models import gpt2_small, resnet, resnext101_32x8d
from benchmarks.peers import CPU, PLACES, fitting, gathered, missing
from benchmarks.tasks import OURS, Peer, Task, check, distance, ours, plain

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


def test_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchgpipe", None)
    assert missing("torchgpipe") == 'it is not installed; pip install "torchgpipe"'


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_a_line_that_says_so():
    notes = [note for run in peers.GPU_PARTS.values() for note in run(Options(quick=True)).notes]
    assert notes == ["Skipped: PyTorch finds no CUDA GPU here."] * 2


def test_out_of_memory_is_told_of():
    def too_much(x, target):
        raise torch.OutOfMemoryError("no")

    task, part = small_task(), Part("", "")
    large, loop = Peer("large", "", "", "", too_much), plain(task)[0]
    assert fitting(part, task, [large, loop]) == [loop]
    assert part.notes == ["Out of memory: large."]
