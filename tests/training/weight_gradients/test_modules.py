"""Backward in two halves: whole modules, and parameters that are used more than once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.training.weight_gradients.halves import Tied, assert_splits, halves, whole


class Attention(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **arguments)

    def forward(self, x):
        other = x[..., :6] if self.attention.kdim == 6 else x
        y, weights = self.attention(x, other, other)
        return y + weights.mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 5, 2), nn.Linear(5, 3)

    def forward(self, x):
        y = self.head(self.lstm(x)[0])
        return y


MODULES = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 3)
        ),
        (3, 4, 8),
        2,
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Flatten(), nn.Linear(144, 5)
        ),
        (5, 3, 8, 8),
        2,
    ),
    "attention": (Attention, (3, 5, 8), 2),
    "attention, dropout": (lambda: Attention(dropout=0.3, batch_first=True), (3, 5, 8), 2),
    "attention, no bias": (lambda: Attention(bias=False, add_zero_attn=True), (3, 5, 8), 2),
    "attention, other keys": (lambda: Attention(kdim=6, vdim=6, add_bias_kv=True), (3, 5, 8), 4),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 5, 8), 4),
    "encoder, eval": (lambda: nn.TransformerEncoderLayer(8, 2, 16).eval(), (3, 5, 8), 4),
    "lstm": (Recurrent, (4, 2, 8), 1),
    "bilinear": (lambda: OnItself(nn.Bilinear(8, 8, 3)), (4, 8), 0),
}


class OnItself(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x)


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, needs_gradient):
    make, shape, count = MODULES[name]
    assert_splits(make(), torch.randn(shape, requires_grad=needs_gradient), count)


def test_attention_takes_its_keys_from_elsewhere():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(8, 2, 16)

        def forward(self, x):
            return self.layer(x, x.flip(0).tanh())

    # Other keys than queries: they go through views of one weight, which is no leaf then.
    assert_splits(Decoder(), torch.randn(3, 2, 8, requires_grad=True), 5)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_stacks(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    images = data.draw(st.booleans())
    width = data.draw(st.integers(1, 5))
    shape = (data.draw(st.integers(0, 4)), width)
    shape += (6, 5) if images else ()
    layers = []
    count = 0
    for _ in range(data.draw(st.integers(1, 4))):
        wide, bias = data.draw(st.integers(1, 6)), data.draw(st.booleans())
        if images:
            kernel = data.draw(st.sampled_from([1, 3]))
            layers.append(nn.Conv2d(width, wide, kernel, padding=kernel // 2, bias=bias))
        else:
            layers.append(nn.Linear(width, wide, bias=bias))
        frozen = data.draw(st.booleans())
        next(layers[-1].parameters()).requires_grad_(not frozen)
        layers.append(data.draw(st.sampled_from([nn.ReLU(True), nn.Tanh(), nn.Identity()])))
        count, width = count + (not frozen), wide
    assert_splits(nn.Sequential(*layers), torch.randn(shape, requires_grad=True), count)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_nobody_could_see(backend):
    linear = nn.Linear(5, 4)
    function = torch.compile(
        lambda x: F.linear(x, linear.weight, linear.bias).relu(), backend=backend
    )

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.linear = nn.Linear(5, 5), linear

        def forward(self, x):
            return function(self.before(x))

    module, x = Hidden(), torch.randn(3, 5, requires_grad=True)
    for _ in range(2):
        torch.testing.assert_close(halves(module, x)[0], whole(module, x))


# -- parameters used more than once


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


def test_a_parameter_used_more_than_once():
    x = torch.randn(4, 5, requires_grad=True)
    assert_splits(Twice(nn.Linear(5, 5)), x, 2, exact=False)
    assert_splits(Twice(nn.Conv1d(2, 2, 3, padding=1)), torch.randn(3, 2, 5), 2, exact=False)
    assert_splits(Tied(), torch.arange(8.0).view(4, 2), 0)  # the embedding does not split
