"""What can be tied, what cannot, and where tied tensors are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.layers.ties import find_ties
from tests.support.models import assert_same, in_turn, step


def pair(first: nn.Module, second: nn.Module, **options: Any) -> Pipe:
    return Pipe(nn.Sequential(first, second), [1, 1], **{"devices": ["cpu:0", "cpu:1"], **options})


def tied(first: nn.Module, second: nn.Module) -> tuple[nn.Module, nn.Module]:
    second.weight = first.weight
    return first, second


def test_a_tie_knows_its_places_in_order_and_the_first_is_the_owner():
    b, c = tied(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(b), nn.Sequential(nn.Sequential(c, b))]
    weight, bias = find_ties(parts)
    assert weight.tensor is b.weight
    assert weight.stages == (1, 2)
    assert [place.full_name for place in weight.places] == ["0.weight", "0.0.weight", "0.1.weight"]
    assert [place.full_name for place in bias.places] == ["0.bias", "0.1.bias"]
    assert find_ties([nn.Sequential(b, nn.Sequential(b)), nn.Sequential(nn.ReLU())]) == []


class Writes(nn.Linear):
    """Reads a buffer and a weight, and writes into one of them if it is told to."""

    mask: Tensor

    def __init__(self, into: str | None) -> None:
        super().__init__(2, 2)
        self.into = into
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.into is not None:
            with torch.no_grad():
                getattr(self, self.into).mul_(1.5)
        return super().forward(x) * self.mask.clone()


@pytest.mark.parametrize("kind", ["mask", "weight"])
def test_what_a_forward_changes_cannot_be_tied(kind):
    layer = Writes(kind)
    pipe, x = pair(layer, layer), torch.randn(4, 2)
    message = rf"'0\.{kind}' \(stage 0\) and '1\.{kind}' \(stage 1\).*in place.*untie"
    for call in (lambda: pipe(x), lambda: pipe.train_batch(x, loss_fn=torch.mean)):
        with pytest.raises(RuntimeError, match=message):
            call()
    assert all(p.grad is None for p in pipe.parameters())
    layer.into = None
    pipe(x).sum().backward()


@pytest.mark.parametrize("deferred", [False, True])
def test_running_statistics_cannot_be_tied_in_training(deferred):
    norm, x = nn.BatchNorm1d(2), torch.randn(4, 2)
    pipe = pair(norm, norm, deferred_batch_norm=deferred)
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
    expected = step(in_turn(plain, 2), plain, x)
    assert_same(step(pipe, pipe, x), expected, rounded=["parameter_grads"])
    with pytest.raises(ValueError, match="running_mean"):
        pipe.train_batch(x, loss_fn=torch.mean)


def inside_of_a_pipe() -> list[nn.Module]:
    layer = nn.Linear(2, 2)
    return [nn.Sequential(Pipe(nn.Sequential(layer), [1], devices=["cpu"])), layer]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [nn.LazyLinear(2)] * 2, r"'0\.weight'.*'1\.weight'.*no value yet"),
        (inside_of_a_pipe, "inside of another Pipe"),
        (lambda: tied(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2))), r"TorchScript.*untie"),
    ],
)
def test_what_cannot_be_tied_is_refused_when_the_pipe_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        pair(*make())


def test_different_parameters_in_one_memory_are_refused_on_different_devices():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = nn.Parameter(first.weight.detach()[:1].expand(2, 2))
    message = r"'0\.weight' \(stage 0\).*'1\.weight' \(stage 1\).*memory in common"
    with pytest.raises(ValueError, match=message):
        pair(first, second, devices=["cpu", "meta"])
    assert second.weight.device.type == "cpu"
    pipe, x = pair(first, second), torch.randn(4, 2)
    assert torch.equal(pipe(x), second(first(x)))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_tied_weight_is_on_the_device_of_its_owner(overwrite, monkeypatch):
    # With it a move makes another parameter of each.
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", overwrite)
    pipe = pair(*tied(nn.Embedding(5, 3), nn.Linear(3, 5)), devices=["meta", "cpu"])
    assert pipe[0].weight is pipe[1].weight
    assert pipe[0].weight.device.type == "meta"
    assert pipe[1].bias.device.type == "cpu"
    pipe = pair(*tied(nn.Linear(5, 5), nn.Linear(5, 5)), devices=["meta", "meta"])
    assert pipe[0].weight is pipe[1].weight
    layer = nn.Linear(5, 5)
    pipe = pair(layer, layer, devices=["meta", "cpu"])
    assert {p.device.type for p in pipe.parameters()} == {"meta"}
    embedding, head = tied(nn.Embedding(5, 3, device="meta"), nn.Linear(3, 5))
    pipe = Pipe(nn.Sequential(embedding, nn.Linear(3, 3), head))  # placed already
    assert pipe.balance == [1, 2]
    assert [device.type for device in pipe.devices] == ["meta", "cpu"]


def test_what_belongs_elsewhere_stays_where_it_is():
    first, second = tied(nn.Linear(2, 2), nn.Linear(2, 2))
    first.weight.grad, second.bias.grad = torch.ones(2, 2), torch.ones(2)
    pipe = pair(first, second, devices=["cpu", "meta"])
    assert [p.device.type for p in pipe.parameters()] == ["cpu", "cpu", "meta"]
    assert (first.weight.grad == 1).all()
    assert second.bias.grad.is_meta
    inner = Pipe([nn.Linear(2, 2)], [1], devices=["cpu"])
    outer = pair(nn.Sequential(inner), nn.Linear(2, 2), devices=["meta", "meta"])
    assert [p.device.type for p in outer.parameters()] == ["cpu", "cpu", "meta", "meta"]


def test_what_was_untied_moves_to_its_own_device():
    pipe = pair(*tied(nn.Linear(2, 2), nn.Linear(2, 2)), devices=["cpu", "meta"])
    pipe[1].weight = nn.Parameter(torch.zeros(2, 2))
    assert pipe(torch.randn(1, 2)).is_meta
    assert [p.device.type for p in pipe.parameters()] == ["cpu", "cpu", "meta", "meta"]
