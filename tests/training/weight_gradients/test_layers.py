"""Backward in two halves leaves what one whole backward leaves: linear maps, convolutions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.training.weight_gradients.halves import (
    OfMyOwn,
    assert_same,
    assert_splits,
    halves,
    whole,
)

SHAPES = [
    ((33,), (0,)),
    ((7, 33), (0, 1)),
    ((1, 33), (0, 1)),
    ((0, 33), (0, 1)),
    ((33, 7), (1, 0)),
    ((33, 1), (1, 0)),
    ((5, 7, 33), (0, 1, 2)),
    ((7, 5, 33), (1, 0, 2)),
    ((33, 5, 7), (2, 1, 0)),
    ((33, 2, 3), (1, 2, 0)),
    ((0, 4, 33), (0, 1, 2)),
    ((2, 3, 5, 33), (0, 1, 2, 3)),
    ((3, 2, 5, 33), (1, 0, 2, 3)),
]


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "order"), SHAPES)
def test_a_linear_layer(shape, order, bias, needs_gradient):
    x = torch.randn(shape).permute(order).requires_grad_(needs_gradient)
    layer = nn.Linear(33, 41, bias=bias)
    assert_splits(layer, x, 1)
    y = layer(x)
    for gy in (
        torch.ones(()).expand(y.shape),
        torch.randn(y.shape[::-1]).permute(*reversed(range(y.dim()))),
    ):
        assert_same(halves(layer, x, gy)[0], whole(layer, x, gy))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_frozen_parameter_gets_no_gradient(name):
    layer = nn.Linear(5, 4)
    layer.get_parameter(name).requires_grad_(False)
    assert_splits(layer, torch.randn(3, 5, requires_grad=True), 1 if name == "bias" else 0)
    assert layer.get_parameter(name).grad is None


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_a_weight_that_is_stored_transposed(shape):
    layer = nn.Linear(5, 4)
    layer.weight = nn.Parameter(torch.randn(5, 4).t())
    assert_splits(layer, torch.randn(shape, requires_grad=True), 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype):
    layer, x = nn.Linear(5, 4, dtype=dtype), torch.randn(3, 5, dtype=dtype, requires_grad=True)
    gy = torch.randn(3, 4, dtype=dtype)
    assert_same(halves(layer, x, gy)[0], whole(layer, x, gy))
    assert halves(layer, x, gy)[1] == 1


def test_calls_of_the_users_own():
    module = OfMyOwn()
    assert_splits(module, torch.randn(3, 4, requires_grad=True), 2)
    assert module.leaf.grad is not None


@pytest.mark.parametrize("where", ["first", "last"])
def test_activations_may_be_modified_in_place(where):
    relu = nn.ReLU(inplace=True)
    layers = [nn.Linear(5, 6), relu, nn.Linear(6, 4)] if where == "first" else [nn.Linear(5, 4)]
    for shape in [(3, 5), (2, 3, 5)]:
        module = nn.Sequential(*layers, nn.ReLU(inplace=True))
        assert_splits(module, torch.randn(shape, requires_grad=True), len(layers) // 2 + 1)


# -- convolutions


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (3, 4, 11), 1),
    "one sample": (lambda: nn.Conv1d(4, 6, 3), (4, 11), 1),
    "same": (lambda: nn.Conv1d(4, 6, 3, padding="same", dilation=2), (3, 4, 11), 1),
    "lopsided same": (lambda: nn.Conv1d(4, 6, 4, padding="same"), (3, 4, 11), 1),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (3, 4, 7, 6), 1),
    "2d": (lambda: nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 2)), (3, 4, 9, 8), 1),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (3, 4, 7, 6), 1),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 7, 6), 1),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (3, 4, 7, 6), 1),
    "circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (3, 4, 7, 6), 1),
    "reflected": (
        lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"),
        (3, 4, 7, 6),
        1,
    ),
    "channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        (3, 4, 7, 6),
        1,
    ),
    "empty": (lambda: nn.Conv2d(4, 6, 3), (0, 4, 7, 6), 1),
    "3d": (lambda: nn.Conv3d(2, 3, 3, dilation=(1, 2, 1)), (2, 2, 5, 6, 5), 1),
    "bfloat16": (lambda: nn.Conv2d(4, 6, 3, dtype=torch.bfloat16), (3, 4, 7, 6), 1),
    "double": (lambda: nn.Conv2d(4, 6, 3, dtype=torch.float64), (3, 4, 7, 6), 1),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, output_padding=1), (3, 4, 7), 1),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), (3, 4, 7, 6), 1),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), (2, 2, 3, 4, 3), 1),
}


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution(name, needs_gradient):
    make, shape, count = CONVOLUTIONS[name]
    module = make()
    x = torch.randn(shape, dtype=next(module.parameters()).dtype)
    assert_splits(module, x.requires_grad_(needs_gradient), count)


def test_a_complex_convolution_stays_whole():
    module = nn.Conv1d(2, 3, 2, dtype=torch.complex64)
    x = torch.randn(3, 2, 5, dtype=torch.complex64, requires_grad=True)
    assert_splits(module, x, 0)


def test_an_input_in_channels_last_leaves_the_layout_of_the_weight():
    x = torch.randn(3, 4, 7, 6).to(memory_format=torch.channels_last)
    assert_splits(nn.Conv2d(4, 6, 3), x.requires_grad_(), 1)


@pytest.mark.parametrize("kind", ["hook", "computed", "frozen"])
def test_a_bias_of_a_convolution_that_cannot_wait(kind):
    class Layer(nn.Conv2d):
        def forward(self, x):
            assert self.bias is not None
            return F.conv2d(x, self.weight, self.bias * 2 if kind == "computed" else self.bias)

    layer = Layer(2, 3, 3)
    assert layer.bias is not None
    seen = []
    if kind == "hook":
        layer.bias.register_hook(seen.append)
    layer.bias.requires_grad_(kind != "frozen")
    count = 1 if kind == "frozen" else 0  # oneDNN has no gradient of the bias alone
    assert_splits(layer, torch.randn(2, 2, 5, 5, requires_grad=True), count)
    assert len(seen) == (2 if kind == "hook" else 0)
