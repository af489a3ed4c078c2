"""Where a layer stays whole: hooks, computed weights, subclasses, modes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

from syncpipe.training.weight_gradients import WeightGradients
from tests.training.weight_gradients.halves import assert_same, assert_splits, halves, whole


@pytest.mark.parametrize("when", ["before forward", "after forward"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_see_its_gradient_once(kind, when):
    layer, x = nn.Linear(5, 4), torch.randn(3, 5)
    seen = []

    def see(tensor):
        assert (tensor is layer.weight) == (kind != "register_hook")
        seen.append(tensor)

    def hook():
        getattr(layer.weight, kind)(see)

    weights = WeightGradients()
    if when == "before forward":
        hook()
    y = layer(x).sum()
    if when == "after forward":
        hook()
    weights.go_back([y], [torch.ones(())])
    assert weights.pending == 0
    assert len(seen) == 1
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    "wrap",
    [parametrizations.weight_norm, parametrizations.spectral_norm, weight_norm],
    ids=["weight_norm", "spectral_norm", "old weight_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_computed_weight(wrap):
    module = nn.Sequential(wrap(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))
    assert_splits(module.eval(), torch.randn(3, 5, requires_grad=True), 1)


class Sub(Tensor):
    pass


def test_tensor_subclasses():
    layer = nn.Linear(5, 4)
    x = torch.randn(3, 5).as_subclass(Sub)
    assert_splits(layer, x, 1)
    layer.weight = nn.Parameter(torch.randn(4, 5).as_subclass(Sub))
    assert_splits(layer, torch.randn(3, 5), 0)


def test_meta_tensors():
    layer = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Linear(4, 3)).to("meta")
    (_, gx, grads), count = halves(layer, torch.empty(2, 2, 5, device="meta", requires_grad=True))
    assert count == 2
    assert gx is not None
    assert all(grad is not None and grad.is_meta for grad in grads.values())


def test_a_weight_that_is_given_a_gradient_of_its_own():
    layer, weights = nn.Linear(5, 4), WeightGradients()
    y = layer(torch.ones(3, 5)).sum()
    weights.go_back([y, layer.weight], [torch.ones(()), torch.ones(4, 5)])
    weights.accumulate()
    torch.testing.assert_close(layer.weight.grad, torch.full((4, 5), 4.0))


@pytest.mark.parametrize("shared", ["weight", "bias"])
def test_what_is_shared_with_a_convolution_that_stays_whole(shared):
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(3, 2, 1) for _ in range(2)])
            self.biases = nn.ParameterList([torch.randn(3) for _ in range(2)])

        def forward(self, x):
            (w, v), (b, c) = self.weights, self.biases
            if shared == "weight":
                return F.conv1d(x, w, b) + F.conv1d(x, w, c) + c.square().sum()
            return F.conv1d(x, w, b) + F.conv1d(x, v, b) + v.square().sum()

    module, x = Shares(), torch.randn(4, 2, 5, requires_grad=True)
    expected = whole(module, x)
    actual, count = halves(module, x)
    assert count == 0
    assert_same(actual, expected)
