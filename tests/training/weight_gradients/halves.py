"""One backward, whole and in two halves, and what both leave behind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from syncpipe.training.weight_gradients import WeightGradients


def left(module, x, y):
    return y.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


def fresh(module, x):
    torch.manual_seed(1)
    module.zero_grad()
    return x.detach().requires_grad_(x.requires_grad)


def whole(module, x, gy=None):
    x = fresh(module, x)
    y = module(x)
    torch.autograd.backward(y, torch.cos(y.detach()) if gy is None else gy)
    return left(module, x, y)


def halves(module, x, gy=None):
    """The same in two halves, and how many weight halves were put aside."""
    x = fresh(module, x)
    weights, y = WeightGradients(), module(x)
    weights.go_back([y], [torch.cos(y.detach()) if gy is None else gy])
    count = weights.pending
    weights.accumulate()
    assert weights.pending == 0
    return left(module, x, y), count


def input_half(module, x, loss=torch.sum):
    """What a forward and the input half of its backward put aside."""
    weights, y = WeightGradients(), loss(module(x))
    weights.go_back([y], [torch.ones_like(y)])
    return weights


def cosine(y):
    """A loss with the gradient that `whole` starts from."""
    return (y * torch.cos(y.detach())).sum()


def assert_same(actual, expected, *, exact=True):
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(actual[:2], expected[:2], rtol=0, atol=0, check_stride=True)
    for name, wanted in expected[2].items():
        got = actual[2][name]
        assert (got is None) == (wanted is None), name
        if got is not None:
            torch.testing.assert_close(got, wanted, check_stride=True, **tolerance)


def assert_splits(module, x, count, *, exact=True):
    expected = whole(module, x)
    actual, put_aside = halves(module, x)
    assert_same(actual, expected, exact=exact)
    assert put_aside == count


class OfMyOwn(nn.Module):
    """Calls functions in its own way: by keyword, with a computed bias, with a plain leaf."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.leaf = torch.randn(4, 4, requires_grad=True)

    def forward(self, x):
        x = F.linear(input=x, weight=self.weight, bias=self.scale * 2)
        return F.linear(x.tanh(), self.leaf, bias=self.scale[:1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x[:, 0].long() % 7).tanh())
