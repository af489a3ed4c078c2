"""Backward in two halves under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncpipe.training.weight_gradients import WeightGradients
from tests.training.weight_gradients.halves import assert_same, fresh, left


def autocast_halves(module, x, dtype=torch.bfloat16):
    x = fresh(module, x)
    weights = WeightGradients()
    with torch.autocast("cpu", dtype=dtype):
        y = module(x)
    weights.go_back([y], [torch.cos(y.detach())])
    count = weights.pending
    weights.accumulate()
    return left(module, x, y), count


def autocast_whole(module, x, dtype=torch.bfloat16):
    x = fresh(module, x)
    with torch.autocast("cpu", dtype=dtype):
        y = module(x)
    torch.autograd.backward(y, torch.cos(y.detach()))
    return left(module, x, y)


class InFull(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


AUTOCAST = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 4)), (2, 3, 5), 2),
    "full precision": (lambda: nn.Sequential(InFull(5, 6), nn.Linear(6, 4)), (7, 5), 2),
    "conv": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.GELU(), nn.Conv1d(3, 2, 2)),
        (3, 2, 5),
        2,
    ),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2)), (3, 2, 5, 4), 1),
    "half module": (lambda: nn.Sequential(nn.Linear(5, 4).bfloat16(), nn.Linear(4, 3)), (7, 5), 2),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 5, 8), 4),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name, needs_gradient, dtype):
    make, shape, count = AUTOCAST[name]
    module = nn.Sequential(nn.Identity(), make()) if name != "encoder" else make()
    x = torch.randn(shape, requires_grad=needs_gradient)
    if needs_gradient:  # a leaf would be converted once for all
        module = nn.Sequential(Scaled(), module)
    expected, (actual, put_aside) = (
        autocast_whole(module, x, dtype),
        autocast_halves(module, x, dtype=dtype),
    )
    assert_same(actual, expected)
    assert put_aside == count
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        assert p.grad.dtype == p.dtype


class Scaled(nn.Module):
    def forward(self, x):
        return x * 2


def test_autocast_on_a_leaf_that_two_layers_share():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(33, 33), nn.Linear(33, 33)

        def forward(self, x):
            return self.a(x) + self.b(x) * 0.3

    module, x = Both(), torch.randn(16, 33, requires_grad=True)
    assert_same(autocast_halves(module, x)[0], autocast_whole(module, x))
