"""Post-accumulate-grad hooks run once in a call of train_batch, on the whole gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncpipe import Pipe


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], ["cpu:0", "cpu:0"]])
def test_an_optimizer_in_backward_makes_one_step(schedule, devices):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    pipe = Pipe(layers, [2, 1], devices=devices, chunks=4)
    x, seen = torch.randn(8, 3), []
    pipe.train_batch(x, loss_fn=torch.mean, schedule=schedule)
    expected = [p.grad.clone() for p in pipe.parameters()]

    def step(parameter):
        seen.append(parameter.grad.clone())
        parameter.grad = None

    for parameter in pipe.parameters():
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        pipe.train_batch(x, loss_fn=torch.mean, schedule=schedule)
        assert len(seen) == len(expected)
        for grad in expected:
            assert any(torch.equal(grad, other) for other in seen)
        assert all(p.grad is None for p in pipe.parameters())
        seen.clear()


def test_hooks_stay_where_a_call_fails():
    pipe = Pipe(nn.Sequential(nn.Linear(3, 1)), [1], devices=["cpu:0"], chunks=2)
    seen = []
    pipe[0].weight.register_post_accumulate_grad_hook(seen.append)

    def fail(y):
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=fail)
    assert not seen
    pipe(torch.randn(4, 3)).sum().backward()
    assert len(seen) == 1
