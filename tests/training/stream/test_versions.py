"""Which versions of the weights cells used, and how many were held, as a call of the pipe tells."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe
from syncpipe.schedules.stream import VERSIONS
from tests.support.running import Do
from tests.support.watched import Memory, alive, gone
from tests.training.stream.models import WORKERS, mini_batches, mlp, sgd
from tests.training.stream.reference import by_the_paper

BALANCE = [2, 2, 2, 1]


@pytest.mark.parametrize("devices", [WORKERS, ["cpu"] * 4], ids=["workers", "one"])
@pytest.mark.parametrize("versions", VERSIONS)
def test_versions_are_those_of_the_paper(versions, devices):
    pipe = Pipe(mlp(), BALANCE, devices=devices, chunks=4)
    data = mini_batches(9, 8)
    found = pipe.train_stream(data, optimizer=sgd, loss_fn=F.cross_entropy, versions=versions)
    pieces = 4 if versions == "2bw" else 1
    rows = [tuple(by_the_paper(b, j, [1] * 4, versions) for j in range(4)) for b in range(9)]
    assert found.versions == [row for row in rows for _ in range(pieces)]
    assert (
        found.kept
        == {"stashing": (4, 3, 2, 1), "vertical_sync": (4,) * 4, "2bw": (2,) * 4}[versions]
    )


class Weighed(nn.Linear):
    """Remembers the memory of the weights that it computed with."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.seen: list[Memory] = []
        self.counts: list[int] = []

    def forward(self, x):
        memory = self.weight.untyped_storage().data_ptr()
        if all(memory != known for known, _ in self.seen):
            self.seen.append((memory, Memory(self.weight)))
        self.counts.append(alive([each for _, each in self.seen]))
        return super().forward(x)


@pytest.mark.parametrize("versions", VERSIONS)
def test_no_more_memory_is_taken_than_for_the_versions_that_are_held(versions):
    layers = [Weighed() for _ in range(4)]
    pipe = Pipe(nn.Sequential(*layers), [1] * 4, devices=WORKERS, chunks=4, checkpoint="never")
    data = [(torch.randn(8, 4), torch.randint(0, 4, (8,))) for _ in range(20)]
    found = pipe.train_stream(data, optimizer=sgd, loss_fn=F.cross_entropy, versions=versions)
    for layer, kept in zip(pipe, found.kept, strict=True):
        assert len(layer.seen) == kept  # the memory of versions that are over is used again
        assert max(layer.counts) <= kept
    gc.collect()
    for layer in pipe:
        newest = layer.weight.untyped_storage().data_ptr()
        assert gone([memory for where, memory in layer.seen if where != newest])


def test_parameters_stay_the_same_tensors_in_the_same_memory():
    pipe = Pipe(mlp(), BALANCE, devices=WORKERS)
    before = [(p, p.data_ptr(), p.detach()) for p in pipe.parameters()]
    pipe.train_stream(mini_batches(6), optimizer=sgd, loss_fn=F.cross_entropy)
    for parameter, (same, memory, alias) in zip(pipe.parameters(), before, strict=True):
        assert parameter is same
        assert parameter.data_ptr() == memory
        assert torch.equal(parameter, alias)
        assert parameter.grad is None


def test_frozen_layers_have_one_version():
    model = mlp()
    model[0].requires_grad_(False)
    pipe = Pipe(model, BALANCE, devices=WORKERS)
    before = pipe[0].weight.clone()
    found = pipe.train_stream(mini_batches(6), optimizer=sgd, loss_fn=F.cross_entropy)
    assert found.optimizers[0] is None
    assert found.kept[0] == 1
    assert torch.equal(pipe[0].weight, before)


def test_memory_does_not_grow_with_the_number_of_mini_batches():
    """What a call keeps of each mini-batch is its loss, and numbers."""
    alive_at = []

    def data(steps):
        for b in range(steps):
            if b in (50, steps - 1):
                gc.collect()
                alive_at.append(sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor)))
            yield torch.randn(2, 8), torch.randint(0, 4, (2,))

    pipe = Pipe(mlp(), [3, 4], devices=["cpu"] * 2, checkpoint="never")
    pipe.train_stream(data(400), optimizer=sgd, loss_fn=F.cross_entropy)
    early, late = alive_at
    assert late - early <= 350 + 10  # the losses


@pytest.mark.parametrize("versions", ["stashing", "2bw"])
def test_except_last_recomputes_nothing_on_the_last_stage(versions):
    """There each micro-batch goes back at once."""
    forwards = [0, 0]

    def counting(j):
        def count(x):
            forwards[j] += 1

        return Do(count)

    model = nn.Sequential(counting(0), nn.Linear(8, 8), counting(1), nn.Linear(8, 4))
    pipe = Pipe(model, [2, 2], devices=WORKERS[:2], chunks=2, checkpoint="except_last")
    pipe.train_stream(mini_batches(3), optimizer=sgd, loss_fn=F.cross_entropy, versions=versions)
    micro_batches = 6 if versions == "2bw" else 3
    assert forwards == [2 * micro_batches, micro_batches]
