"""What can be tied, what cannot, and where tied tensors are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.layers.ties import check_memory, find_ties
from tests.support.models import assert_same, in_turn, step

TWO = ["cpu:0", "cpu:1"]


def pair(first: nn.Module, second: nn.Module, **options: Any) -> Pipe:
    """A pipe of two layers on two workers."""
    return Pipe(nn.Sequential(first, second), [1, 1], devices=TWO, **options)


def test_a_tie_knows_its_places_in_order_and_the_first_is_the_owner():
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    c.weight = b.weight
    parts = [nn.Sequential(a), nn.Sequential(b), nn.Sequential(nn.Sequential(c, b))]
    weight, bias = find_ties(parts)
    assert weight.tensor is b.weight
    assert weight.owner == 1
    assert weight.stages == (1, 2)
    assert [place.full_name for place in weight.places] == ["0.weight", "0.0.weight", "0.1.weight"]
    assert [place.full_name for place in bias.places] == ["0.bias", "0.1.bias"]


def test_what_one_stage_has_twice_is_no_tie():
    layer = nn.Linear(2, 2)
    assert find_ties([nn.Sequential(layer, nn.Sequential(layer)), nn.Sequential(nn.ReLU())]) == []


# -- buffers


class Masked(nn.Module):
    """Reads a buffer, and counts in it if it is told to."""

    mask: Tensor

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(2, 2), counts
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            with torch.no_grad():
                self.mask += 1
        return self.linear(x) * self.mask.clone()


def test_a_buffer_that_is_only_read_may_be_tied():
    layer = Masked(counts=False)
    plain = nn.Sequential(layer, layer)
    pipe = pair(*copy.deepcopy(plain), chunks=2)
    x = torch.randn(4, 2)
    for _ in range(2):
        assert_same(step(pipe, pipe, x), step(in_turn(plain, 2), plain, x))
        for module in (pipe, plain):
            module.zero_grad()
            module[0].mask *= 3
    assert pipe[1].mask is pipe[0].mask


@pytest.mark.parametrize("kind", ["mask", "weight"])
def test_what_a_forward_changes_cannot_be_tied(kind):
    layer = Masked(counts=True) if kind == "mask" else Writes(2, 2)
    pipe, x = pair(layer, layer), torch.randn(4, 2)
    message = rf"'0\.{kind}' \(stage 0\) and '1\.{kind}' \(stage 1\).*in place.*untie"
    with pytest.raises(RuntimeError, match=message):
        pipe(x)
    with pytest.raises(RuntimeError, match=message):
        pipe.train_batch(x, loss_fn=torch.mean)
    assert all(p.grad is None for p in pipe.parameters())
    layer.counts = False
    pipe(x).sum().backward()


@pytest.mark.parametrize("deferred", [False, True])
def test_running_statistics_cannot_be_tied_in_training(deferred):
    norm = nn.BatchNorm1d(2)
    pipe = pair(norm, norm, deferred_batch_norm=deferred)
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match=r"'0\.running_mean'.*BatchNorm1d.*eval\(\)"):
        pipe(x)
    assert pipe[0].running_mean.tolist() == [0, 0]
    pipe.eval()
    assert torch.equal(pipe(x), nn.Sequential(pipe[0], pipe[0])(x))
    pipe.train()
    pipe.balance = [2]
    pipe(x)


def test_one_worker_keeps_the_plain_models_order_in_pipe_of_x():
    norm = nn.BatchNorm1d(2)
    plain = nn.Sequential(norm, nn.Linear(2, 2), norm)
    pipe = Pipe(copy.deepcopy(plain), [1, 1, 1], devices=["cpu"] * 3, chunks=2)
    x = torch.randn(4, 2)
    assert_same(step(pipe, pipe, x), step(in_turn(plain, 2), plain, x))
    with pytest.raises(ValueError, match="running_mean"):
        pipe.train_batch(x, loss_fn=torch.mean)


# -- refused


def test_an_embedding_that_keeps_its_rows_short_cannot_be_tied():
    embedding, head = nn.Embedding(5, 3, max_norm=0.1), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    with pytest.raises(RuntimeError, match=r"stage 0.*max_norm.*untie"):
        pair(embedding, head)(torch.arange(4))


class Writes(nn.Linear):
    """Writes into its weight, if it is told to."""

    counts = True

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            with torch.no_grad():
                self.weight.mul_(1.5)
        return super().forward(x)


def lazy() -> list[nn.Module]:
    layer = nn.LazyLinear(2)
    return [layer, layer]


def inside_of_a_pipe() -> list[nn.Module]:
    layer = nn.Linear(2, 2)
    return [nn.Sequential(Pipe(nn.Sequential(layer), [1], devices=["cpu"])), layer]


def scripted() -> list[nn.Module]:
    first, second = nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2))
    second.weight = first.weight
    return [first, second]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lazy, r"'0\.weight'.*'1\.weight'.*no value yet"),
        (inside_of_a_pipe, "inside of another Pipe"),
        (scripted, r"TorchScript.*untie"),
    ],
)
def test_what_cannot_be_tied_is_refused_when_the_pipe_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        pair(*make())


def test_different_parameters_in_one_memory_are_refused_on_different_devices():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = nn.Parameter(first.weight.detach()[:1].expand(2, 2))
    parts = [nn.Sequential(first), nn.Sequential(second)]
    with pytest.raises(ValueError, match=r"'0\.weight' in stage 0.*'0\.weight' in stage 1.*memory"):
        check_memory(parts)
    with pytest.raises(ValueError, match="memory in common"):
        Pipe(nn.Sequential(first, second), [1, 1], devices=["cpu", "meta"])
    assert second.weight.device.type == "cpu"
    pipe, x = pair(first, second), torch.randn(4, 2)
    assert torch.equal(pipe(x), second(first(x)))


# -- devices


def test_a_tied_weight_is_on_the_device_of_its_owner():
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5)
    head.weight = embedding.weight
    pipe = Pipe(nn.Sequential(embedding, head), [1, 1], devices=["meta", "cpu"])
    assert pipe[0].weight is pipe[1].weight
    assert pipe[0].weight.device.type == "meta"
    assert pipe[1].bias.device.type == "cpu"


def test_layers_that_are_placed_may_be_tied():
    embedding = nn.Embedding(5, 3, device="meta")
    head = nn.Linear(3, 5)
    head.weight = embedding.weight
    pipe = Pipe(nn.Sequential(embedding, nn.Linear(3, 3), head))
    assert pipe.balance == [1, 2]
    assert [device.type for device in pipe.devices] == ["meta", "cpu"]


def test_what_was_untied_moves_to_its_own_device():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    pipe = Pipe(nn.Sequential(first, second), [1, 1], devices=["meta", "cpu"])
    own = pipe[1].weight = nn.Parameter(torch.zeros(2, 2, device="meta"))
    with pytest.raises(NotImplementedError, match="meta"):  # there are no data to move
        pipe(torch.randn(1, 2, device="meta"))
    assert pipe[1].weight is own
