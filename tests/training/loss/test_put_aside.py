"""A loss that uses what layers put aside, as mixtures of experts do with their balance."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import Pipe

X, Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))


class Aside(nn.Module):
    """Puts something aside that goes back."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.aux = None

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.aux = y.pow(2).mean()
        return y


def model(k):
    """Three layers; the one with index ``k`` puts something aside."""
    torch.manual_seed(0)
    return nn.Sequential(*(Aside() if index == k else nn.Linear(4, 4) for index in range(3)))


def with_aside(layer):
    return lambda output, target: F.mse_loss(output, target) + layer.aux


def step(layers, k, devices, schedule, checkpoint):
    pipe = Pipe(layers, [1, 1, 1], devices=devices, chunks=4, checkpoint=checkpoint)
    pipe.train_batch(X, Y, loss_fn=with_aside(layers[k]), schedule=schedule)
    return pipe


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "devices", [["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"]], ids=["one", "three"]
)
def test_loss_fn_may_use_what_layers_of_the_last_stage_put_aside(devices, schedule):
    layers = model(2)
    plain = copy.deepcopy(layers)
    order = reversed(range(4)) if schedule == "gpipe" else range(4)
    losses = [
        with_aside(plain[2])(plain(x), y) / 4 for x, y in zip(X.chunk(4), Y.chunk(4), strict=True)
    ]
    for i in order:
        losses[i].backward()
    step(layers, 2, devices, schedule, "never")
    for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        if schedule == "zb_h1":  # adds products to gradients in one operation
            torch.testing.assert_close(ours.grad, theirs.grad)
        else:
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "devices", [["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"]], ids=["one", "three"]
)
@pytest.mark.parametrize(("k", "checkpoint"), [(1, "never"), (1, "always"), (2, "always")])
def test_what_would_be_lost_is_refused(k, checkpoint, devices, schedule):
    layers = model(k)
    with pytest.raises(RuntimeError, match="with its graph"):
        step(layers, k, devices, schedule, checkpoint)
    assert all(parameter.grad is None for parameter in layers.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_go_back_as_they_were_returned_whatever_loss_fn_does_with_them_later(reduction):
    layers = model(None)
    plain = copy.deepcopy(layers)
    kept = []

    def loss_fn(output, target):
        for loss in kept:
            loss.mul_(3)
        kept.append(F.mse_loss(output, target, reduction=reduction))
        return kept[-1]

    pipe = Pipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4)
    pipe.train_batch(
        X, Y, loss_fn=loss_fn, loss_reduction=reduction, schedule="gpipe", verify=False
    )
    for i in reversed(range(4)):
        loss = F.mse_loss(plain(X.chunk(4)[i]), Y.chunk(4)[i], reduction=reduction)
        (loss / 4 if reduction == "mean" else loss).backward()
    for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
