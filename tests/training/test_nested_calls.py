"""``loss_fn`` and ``data_iter`` that use the pipe which calls them."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import Pipe, inline
from tests.support.running import MODES, Dawdle, Noise, assert_same, pipe_of

SCHEDULES = ("naive", "gpipe", "1f1b")  # what zero bubble adds is equal to rounding only
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))


class Scaled(nn.Module):
    """Has a buffer, so that its stage has to be locked."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))

    def forward(self, x):
        return x * self.scale


def model():
    """Layers that draw in training."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 6), Dawdle(1), nn.Dropout()),
        nn.Sequential(Dawdle(2), nn.LayerNorm(6), Noise()),
        nn.Sequential(Scaled(), Dawdle(3), nn.Dropout()),
        nn.Sequential(nn.Linear(6, 6), Dawdle(4), nn.Dropout(0.2)),
    )


def pieces():
    return zip(X.chunk(4), Y.chunk(4), strict=True)


def steps(pipe):
    """Some steps in which the loss function and the iterator use the pipe."""

    @torch.no_grad()
    def use(x):
        return pipe(x).pow(2).mean()

    def loss_fn(output, target):
        return F.mse_loss(output, target) + use(target)

    results = []
    for step, schedule in enumerate(SCHEDULES):
        torch.manual_seed(step)
        data = ((x + use(x), y + torch.rand(6)) for x, y in pieces())
        pipe.zero_grad()
        loss = pipe.train_batch(data_iter=data, loss_fn=loss_fn, schedule=schedule)
        results += [loss, *(p.grad for p in pipe.parameters()), *pipe.buffers()]
        results += [torch.get_rng_state()]
    return [r.clone() for r in results]


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_inside_does_as_inline(mode):
    torch.manual_seed(1)
    layers = model()
    ours, theirs = (pipe_of(copy.deepcopy(layers), checkpoint=mode) for _ in range(2))
    with inline():
        expected = steps(theirs)
    assert_same(steps(ours), expected)


def stream(pipe, **given):
    return pipe.train_stream(
        given["data_iter"], optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=given["loss_fn"]
    )


CALLS = {
    "train_batch": Pipe.train_batch,
    "eval_batch": Pipe.eval_batch,
    "stream": stream,
    "pipe(x)": lambda pipe, **given: pipe(X),
}
#: What would change gradients or modes, or see weights of no one moment.
REFUSED = [*product(["train_batch", "eval_batch"], list(CALLS)[:3]), *product(["stream"], CALLS)]


@pytest.mark.parametrize("context", [inline, torch.enable_grad], ids=["inline", "workers"])
@pytest.mark.parametrize("where", ["loss_fn", "data_iter"])
@pytest.mark.parametrize(("outer", "inner"), REFUSED)
def test_what_changes_gradients_modes_or_weights_is_refused_inside(outer, inner, where, context):
    pipe = pipe_of(model())

    def again():
        CALLS[inner](pipe, data_iter=iter(pieces()), loss_fn=F.mse_loss)

    def loss_fn(output, target):
        if where == "loss_fn":
            again()
        return F.mse_loss(output, target)

    def data():
        for x, y in pieces():
            if where == "data_iter":
                again()
            yield x, y

    message = "(inside of a call of the same pipe|train_stream calls this)"
    with context():
        with pytest.raises(RuntimeError, match=message):
            CALLS[outer](pipe, data_iter=data(), loss_fn=loss_fn)
        assert all(p.grad is None for p in pipe.parameters())
        assert all(module.training for module in pipe.modules())
        pipe.train_batch(X, Y, loss_fn=F.mse_loss)
        pipe.eval_batch(X)
