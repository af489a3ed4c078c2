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
from torch import Tensor, nn

import syncpipe.skip
from benchmarks import peers
from benchmarks.common import Options, Part
from benchmarks.models import gpt2_small, resnet, resnext101_32x8d
from benchmarks.peers import CPU, LIBRARIES, PLACES, fitting, gathered, missing
from benchmarks.skips import translated
from benchmarks.tasks import OURS, Peer, Task, check, distance, ours, plain
from syncpipe.skip import verify_skippables
from syncpipe.skip.layout import inspect_layout
from tests.support.models import assert_equals_plain

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
    verify_skippables(model)
    assert model(x).shape == (1, *output)


# -- small ones, in a pipe ------------------------------------------------------------------------


def pictures(side: int) -> Tensor:
    return torch.randn(4, 3, side, side)


def words() -> Tensor:
    return torch.randint(11, (4, 6))


TEXT = {"width": 8, "heads": 2, "vocabulary": 11, "length": 6}
# The model, its input, a balance with cuts in awkward places, the skips that pass over them.
SMALL: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor], list[int], int]] = {
    "resnet": (
        lambda: resnet((1, 2), channels=8, num_classes=5), lambda: pictures(16), [4, 6, 9], 2
    ),
    "resnext": (
        lambda: resnet((1, 1), channels=8, groups=4, group_width=16, num_classes=5),
        lambda: pictures(16), [5, 3, 6], 2,
    ),
    "gpt2": (lambda: gpt2_small(layers=2, **TEXT), words, [2, 3, 2], 0),
}  # fmt: skip


@pytest.mark.parametrize("family", SMALL)
def test_in_a_pipe_it_computes_the_same_bits(family):
    build, sample, balance, crossing = SMALL[family]
    torch.manual_seed(0)
    pipe = assert_equals_plain(
        build(), sample(), balance, steps=2, chunks=2, devices=[f"cpu:{j}" for j in range(3)]
    )
    outgoing = inspect_layout([list(partition) for partition in pipe.partitions]).outgoing
    assert sum(map(len, outgoing)) == crossing


# -- peers ----------------------------------------------------------------------------------------

WITH_SKIPS = ("resnet", "resnext")


def small_task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return Task(model, torch.randn(4, 3), torch.randn(4, 2), F.mse_loss, 2, [1, 2])


# -- the same layers for all ----------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_SKIPS)
def test_translated_model_is_the_model(name):
    build, sample, *_ = SMALL[name]
    torch.manual_seed(0)
    model, x = build().eval(), sample()
    other = translated(model, syncpipe.skip)
    assert torch.equal(other(x), model(x))
    assert set(other.parameters()) == set(model.parameters())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", WITH_SKIPS)
def test_other_libraries_train_the_same_layers(library, name):
    if missing(library) is not None:
        pytest.skip(missing(library))
    build, sample, *_ = SMALL[name]
    torch.manual_seed(0)
    model, x = build(), sample()
    target = torch.zeros_like(model(x))
    half = len(model) // 2
    task = Task(model, x, target, F.mse_loss, 2, [half, len(model) - half])
    part = Part("", "")
    found = gathered(task, part, [], CPU, ["never", "always"])
    assert [peer.library for peer in found].count(library) == 2, part.notes
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchgpipe", None)
    assert missing("torchgpipe") == 'it is not installed; pip install "torchgpipe"'


# -- whether they agree ---------------------------------------------------------------------------


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
    monkeypatch.setattr(peers, "LIBRARIES", {"fake": ("fake", "GPipe", "syncpipe.skip")})
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
