"""How the losses of micro-batches become that of the mini-batch: sizes, sums, weights, scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.support.models import linear_model
from tests.support.running import Do, assert_same, pipe_of
from tests.support.training import KINDS, RUNS
from tests.training.loss.whole import assert_trains_like, four, grads_of, whole


@pytest.mark.parametrize("size", [8, 7, 5, 3, 1])
def test_mean_losses_are_weighted_by_the_size_of_the_micro_batch(size):
    pipe = four(chunks=4)
    x, target = torch.randn(size, 3), torch.randn(size, 3)
    loss = pipe.train_batch(x, target, loss_fn=F.mse_loss)
    assert_trains_like(pipe, loss, whole(pipe, lambda plain: F.mse_loss(plain(x), target)))
    assert not loss.requires_grad
    assert loss.shape == ()


def test_sums_are_added():
    pipe = four()
    x, target = torch.randn(7, 3), torch.randn(7, 3)

    def loss_fn(y, t):
        return F.mse_loss(y, t, reduction="sum")

    loss = pipe.train_batch(x, target, loss_fn=loss_fn, loss_reduction="sum")
    assert_trains_like(pipe, loss, whole(pipe, lambda plain: loss_fn(plain(x), target)))


WEIGHTS = {
    "Python integers": lambda w: w,
    "Python floats": lambda w: w / 2,
    "tensors": lambda w: torch.tensor(float(w)),
    "integer tensors": lambda w: torch.tensor(w),
    "tensors of one element": lambda w: torch.tensor([w]),
    "numpy": lambda w: np.int64(w),
}


@pytest.mark.parametrize("counts", [[3, 1, 4, 2], [2, 2, 2, 2], [0, 3, 1, 0], [0, 0, 0, 5]])
@pytest.mark.parametrize("existing", [False, True], ids=["no grad yet", "on top of a grad"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_loss_may_come_with_its_weight(kind, existing, counts):
    pipe = four()
    x, target = torch.randn(20, 3), torch.randn(20, 3)
    mask = torch.cat([torch.arange(5) < count for count in counts])
    micro = iter(counts)

    def loss_fn(y, pair):
        t, kept = pair
        weight = next(micro)
        assert kept.sum() == weight
        total = ((y - t).pow(2).mean(1) * kept).sum()
        return total / max(weight, 1), WEIGHTS[kind](weight)

    def masked(plain):
        return ((plain(x) - target).pow(2).mean(1) * mask).sum() / mask.sum()

    expected = whole(pipe, masked)
    if existing:
        for p, grad in zip(pipe.parameters(), expected[1], strict=True):
            p.grad = torch.ones_like(p)
            grad += 1
    loss = pipe.train_batch(x, (target, mask), loss_fn=loss_fn)
    assert_trains_like(pipe, loss, expected)


@pytest.mark.parametrize("kind", ["Python integers", "tensors"])
@pytest.mark.parametrize("run", KINDS)
def test_weights_with_every_schedule_and_gradients_beyond_the_parameters(run, kind):
    torch.manual_seed(2)
    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=3)
    x0, t0 = torch.randn(7, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    scale = nn.Parameter(torch.tensor(1.5))  # of the loss
    sizes = [3, 3, 1]

    def per_sample(y, t):
        return (y - t * scale).pow(2).sum(1)

    def masked(plain):
        losses = torch.cat([per_sample(plain(x0.exp()), t0.tanh())])
        weights = torch.cat([torch.full((n,), k + 1.0) for k, n in enumerate(sizes)])
        return (losses * weights).sum() / weights.sum()

    seen = iter(range(3))
    expected = whole(pipe, masked)
    others = [t.grad for t in (x0, t0, scale)]
    x0.grad = t0.grad = scale.grad = None

    def loss_fn(y, t):
        return per_sample(y, t).mean(), WEIGHTS[kind](len(y) * (next(seen) + 1))

    options = RUNS[run][0]
    loss = pipe.train_batch(x0.exp(), t0.tanh(), loss_fn=loss_fn, **options)
    assert_trains_like(pipe, loss, expected)
    torch.testing.assert_close([t.grad for t in (x0, t0, scale)], others)


def test_leaves_that_only_a_layer_knows_are_weighted_as_well():
    weight = torch.ones(3, requires_grad=True)
    pipe = pipe_of(nn.Sequential(Do(lambda x: x * weight), nn.Linear(3, 3)))
    pieces = [torch.randn(n, 3) for n in (1, 5, 3, 3)]
    y = nn.Sequential(*pipe)(torch.cat(pieces))
    expected = torch.autograd.grad(y.pow(2).mean(), weight)
    pipe.train_batch(
        data_iter=iter([(piece, None) for piece in pieces]), loss_fn=lambda y: y.pow(2).mean()
    )
    torch.testing.assert_close(weight.grad, *expected)


def test_leaves_that_a_layer_uses_for_some_micro_batches_only_are_weighted_as_well():
    weight = torch.ones(3, requires_grad=True)
    layers = nn.Sequential(nn.Linear(3, 3), Do(lambda x: x * weight if len(x) == 3 else x))
    pipe = pipe_of(layers)
    pieces = [torch.randn(n, 3) for n in (1, 5, 3, 3)]
    total = sum(layers(piece).pow(2).mean() * len(piece) for piece in pieces) / 12
    expected = torch.autograd.grad(total, weight)
    pipe.train_batch(
        data_iter=iter([(piece, None) for piece in pieces]), loss_fn=lambda y: y.pow(2).mean()
    )
    torch.testing.assert_close(weight.grad, *expected)


@pytest.mark.parametrize("data", ["mini-batch", "iterator"])
def test_a_grad_scaler_scales_gradients_and_not_the_loss_that_comes_back(data):
    pipe = four()
    x, target = torch.randn(8, 3), torch.randn(8, 3)
    loss, grads = whole(pipe, lambda plain: F.mse_loss(plain(x), target))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    given = {"input": x, "target": target}
    if data == "iterator":
        given = {"data_iter": zip(x.chunk(4), target.chunk(4), strict=True)}
    ours = pipe.train_batch(**given, loss_fn=F.mse_loss, grad_scaler=scaler)
    assert_trains_like(pipe, ours, (loss, [grad * 1024 for grad in grads]))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    before = [p.detach().clone() for p in pipe.parameters()]
    scaler.step(optimizer)
    scaler.update()
    steps = [old - p.detach() for old, p in zip(before, pipe.parameters(), strict=True)]
    torch.testing.assert_close(steps, grads)


def test_an_overflow_is_found_by_the_scaler():
    pipe = four()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    before = [p.detach().clone() for p in pipe.parameters()]
    pipe.train_batch(torch.randn(8, 3), loss_fn=lambda y: y.sum() * 1e36, grad_scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert_same([p.detach() for p in pipe.parameters()], before)
    assert scaler.get_scale() == 2.0**14


def test_a_scaler_that_is_off_does_nothing():
    pipe, x = four(), torch.randn(8, 3)
    expected = whole(pipe, lambda plain: plain(x).pow(2).mean())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = pipe.train_batch(x, loss_fn=lambda y: y.pow(2).mean(), grad_scaler=scaler)
    assert_trains_like(pipe, loss, expected)


def test_a_scaler_that_is_none_is_named():
    with pytest.raises(TypeError, match="grad_scaler"):
        four().train_batch(torch.randn(4, 3), loss_fn=torch.sum, grad_scaler=3)


def test_losses_may_need_no_gradient_in_some_micro_batches():
    pipe, x = four(), torch.randn(4, 3)
    x[1] = 0

    def loss_fn(y, t):
        return y.sum() if t.any() else y.detach().sum()

    pipe.train_batch(x, x.clone(), loss_fn=loss_fn)
    expected = whole(pipe, lambda plain: plain(x[[0, 2, 3]]).sum() / 4)
    torch.testing.assert_close(grads_of(pipe), expected[1])
