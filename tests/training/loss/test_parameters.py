"""Losses that use parameters, their own or those of the layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.support.models import CHECKPOINT_MODES, linear_model
from tests.support.running import Dawdle, assert_same, pipe_of
from tests.support.training import KINDS, RUNS
from tests.training.loss.whole import assert_trains_like, four, grads_of, whole


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("form", ["module", "closure"])
@pytest.mark.parametrize("run", KINDS)
def test_a_loss_may_have_parameters_of_its_own(run, form, checkpoint):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, y, t):
            return F.mse_loss(self.linear(y), t)

    torch.manual_seed(3)
    head = Head()
    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=4, checkpoint=checkpoint)
    x, target = torch.randn(8, 3), torch.randn(8, 2)
    plain, other = copy.deepcopy(nn.Sequential(*pipe)), copy.deepcopy(head)
    for _ in range(2):
        losses = [other(plain(c), t) / 4 for c, t in zip(x.chunk(4), target.chunk(4), strict=True)]
        for loss in losses[::-1] if run == "gpipe" else losses:
            loss.backward()
        loss_fn = head if form == "module" else lambda y, t: head(y, t)
        pipe.train_batch(x, target, loss_fn=loss_fn, **RUNS[run][0])
        assert_same(grads_of(head), grads_of(other))
        torch.testing.assert_close(grads_of(pipe), grads_of(plain))


def test_a_loss_that_uses_parameters_of_all_stages_is_the_same_every_time():
    pipe = pipe_of(nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), Dawdle(k)) for k in range(3)]))

    def loss_fn(y):
        return y.pow(2).mean() + sum(p.pow(2).sum() for p in pipe.parameters())

    x, seen = torch.randn(8, 6), []
    expected = whole(
        pipe, lambda plain: plain(x).pow(2).mean() + sum(p.pow(2).sum() for p in plain.parameters())
    )
    for _ in range(30):
        pipe.zero_grad()
        loss = pipe.train_batch(x, loss_fn=loss_fn)
        seen.append(grads_of(pipe))
    assert_trains_like(pipe, loss, expected)
    for grads in seen:
        assert_same(grads, seen[0])


@pytest.mark.parametrize("chunks", [1, 4])
def test_gradients_of_parameters_that_only_the_loss_uses_are_tensors_of_their_own(chunks):
    class Idle(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.a, self.b, self.c = (nn.Parameter(torch.ones(3)) for _ in range(3))

    layers = nn.Sequential(Idle(), nn.Linear(3, 3))
    idle = layers[0]
    pipe = pipe_of(layers, chunks=chunks)

    def loss_fn(y):
        return y.mean() + (idle.a + idle.b).pow(2).sum() + idle.c.sum()

    for step in (1, 2):
        pipe.train_batch(torch.randn(8, 3), loss_fn=loss_fn)
        torch.testing.assert_close(idle.c.grad, torch.full((3,), float(step)))
    idle.a.grad.mul_(2)  # as gradients are clipped
    torch.testing.assert_close(idle.a.grad, torch.full((3,), 16.0))
    torch.testing.assert_close(idle.b.grad, torch.full((3,), 8.0))


def test_hooks_change_gradients_of_a_loss_that_uses_parameters_once():
    pipe = four()
    plain = copy.deepcopy(nn.Sequential(*pipe))
    for module in (pipe, plain):
        for p in module.parameters():
            p.register_hook(lambda grad: grad * 3)

    def loss_fn(y, parameters):
        return y.pow(2).mean() + sum(p.pow(2).sum() for p in parameters)

    x = torch.randn(8, 3)
    for piece in x.chunk(4):
        (loss_fn(plain(piece), plain.parameters()) / 4).backward()
    pipe.train_batch(x, loss_fn=lambda y: loss_fn(y, list(pipe.parameters())))
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))
