"""Backward in two halves where autograd runs inside of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.training.weight_gradients.halves import (
    assert_splits,
    halves,
    whole,
)


class Penalty(nn.Module):
    """Its output depends on a gradient of its own forward."""

    def __init__(self, layers, *, create_graph=True):
        super().__init__()
        self.layers, self.create_graph = layers, create_graph

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = self.layers(x)
            wanted = (x, *self.layers.parameters())
            gx, *_ = torch.autograd.grad(y.square().sum(), wanted, create_graph=self.create_graph)
            if not self.create_graph:
                y = self.layers(x)
        return y.flatten(1).sum(1) + gx.flatten(1).square().sum(1)


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_gradient_inside_of_a_forward(kind, create_graph):
    layers: nn.Module
    if kind == "linear":
        layers, shape = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)), (3, 5)
    else:
        layers = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 2, 2))
        shape = (3, 2, 5)
    module, x = Penalty(layers, create_graph=create_graph), torch.randn(shape, requires_grad=True)
    expected, (actual, count) = whole(module, x), halves(module, x)
    assert count >= 2 or create_graph
    torch.testing.assert_close(actual, expected)


def test_double_backward_through_autocast_reaches_the_weight():
    module = Penalty(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)))
    x = torch.randn(3, 5, requires_grad=True)

    def under_autocast(run):
        forward = module.forward

        def cast(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return forward(x)

        module.forward = cast
        try:
            return run(module, x)
        finally:
            module.forward = forward

    expected, (actual, _) = under_autocast(whole), under_autocast(halves)
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    for name, grad in expected[2].items():
        assert grad.abs().sum() > 0, name


class Wrapped(torch.autograd.Function):
    """A layer with a graph of its own, which its backward asks for gradients."""

    @staticmethod
    def forward(ctx, layer, x, *parameters):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x)
        ctx.parameters = parameters
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gy):
        return None, *torch.autograd.grad(ctx.y, (ctx.x, *ctx.parameters), gy)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.inner = nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        return Wrapped.apply(self.inner, self.before(x), *self.inner.parameters())


def test_a_backward_inside_of_backward_that_asks_for_the_gradients():
    assert_splits(Nested(), torch.randn(3, 5, requires_grad=True), 1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.before, self.after = nn.Linear(5, 5), nn.Linear(4, 3)
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 4))

    def forward(self, x):
        y = checkpoint(self.inner, self.before(x), use_reentrant=self.reentrant)
        return self.after(y)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_checkpoint(reentrant):
    count = 0 if reentrant else 2  # it wants no backward to chosen leaves around it
    assert_splits(Checkpointed(reentrant), torch.randn(3, 5, requires_grad=True), count)


def test_an_output_without_a_gradient_leaves_none():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, x):
            return y + x

        @staticmethod
        def backward(ctx, gy):
            return None, gy

    class Stopped(nn.Linear):
        def forward(self, x):
            return Stop.apply(super().forward(x), x)

    layer = Stopped(4, 4)
    assert_splits(layer, torch.randn(3, 4, requires_grad=True), 0)
    assert layer.weight.grad is None
