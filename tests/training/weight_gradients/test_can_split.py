"""Which modules are worth it to record."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe.training.weight_gradients import can_split
from tests.training.weight_gradients.halves import OfMyOwn, Tied, halves, whole


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x):
        return self.linear(x).relu()


def with_compiled_forward():
    module = Compiled()
    module.forward = torch.compile(module.forward, backend="eager")
    return module


def compiled_in_place():
    module = Compiled()
    module.compile(backend="eager")
    return module


def frozen(module):
    return module.requires_grad_(False)


CAN_SPLIT = {
    "linear": (lambda: nn.Linear(5, 4), True),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), True),
    "lazy": (lambda: nn.LazyLinear(4), True),
    "parameters of its own": (OfMyOwn, True),
    "tied embedding": (Tied, True),
    "frozen": (lambda: frozen(nn.Linear(5, 4)), False),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(5), nn.GELU()), False),
    "embedding": (lambda: nn.Embedding(5, 4), False),
    "lstm": (lambda: nn.LSTM(5, 4), False),
    "nothing": (nn.Sequential, False),
    "compiled": (lambda: nn.Sequential(torch.compile(Compiled(), backend="eager")), False),
    "compiled in place": (compiled_in_place, False),
    "compiled forward": (with_compiled_forward, False),
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.Linear(5, 4))), False),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(5, 4)), False),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16), True),
    "fast path": (
        lambda: nn.Sequential(frozen(nn.TransformerEncoderLayer(8, 2, 16).eval()), nn.Linear(8, 8)),
        False,
    ),
}


@pytest.mark.parametrize("name", CAN_SPLIT)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_can_split(name):
    make, expected = CAN_SPLIT[name]
    assert can_split(make()) is expected


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
