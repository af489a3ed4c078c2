"""``train_batch``: layers of many kinds, compiled, fake, lazy, and pipes in layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint as checkpointed

from syncpipe import Pipe
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import NormBlock, pipe_of
from tests.support.training import assert_same_step, pipe_step, plain_step, weigh
from tests.training.train_batch.loop import model_pipe


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_compiled_layers(run, checkpoint):
    torch._dynamo.reset()
    try:
        layers = nn.Sequential(NormBlock(), nn.Tanh(), NormBlock(), nn.Linear(6, 3))
        plain = copy.deepcopy(layers)
        for k in (0, 2):
            layers[k].compile(backend="eager")
        pipe = pipe_of(layers, [2, 2], checkpoint=checkpoint)
        x = torch.randn(12, 6)
        orders = [[3, 2, 1, 0] if run == "gpipe" else [0, 1, 2, 3]] * 2
        for _ in range(2):
            expected = plain_step(plain, x, loss_fn=weigh, chunks=4, orders=orders, balance=[2, 2])
            actual = pipe_step(pipe, x, loss_fn=weigh, schedule=run)
            assert_same_step(actual, expected, exact=run != "zb_h1")
            pipe.zero_grad()
            plain.zero_grad()
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_a_pipe_inside_a_layer(run, checkpoint):
    def build(inner):
        torch.manual_seed(2)
        core = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
        if inner:
            core = Pipe(core, [2, 2], chunks=1, checkpoint="always")
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(core), nn.Linear(6, 3))

    plain, pipe = build(False), pipe_of(build(True), checkpoint=checkpoint)
    x = torch.randn(8, 6)
    orders = [[3, 2, 1, 0] if run == "gpipe" else [0, 1, 2, 3]] * 3
    expected = plain_step(plain, x, loss_fn=weigh, chunks=4, orders=orders, balance=[1, 1, 1])
    actual = pipe_step(pipe, x, loss_fn=weigh, schedule=run)
    assert_same_step(actual, expected, exact=run != "zb_h1")


@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_fake_tensors_are_trained(run):
    with FakeTensorMode():
        pipe = model_pipe(run)
        loss = pipe.train_batch(
            torch.randn(10, 6), torch.randn(10, 3), loss_fn=F.mse_loss, schedule=run
        )
        assert loss.shape == ()
        assert all(p.grad.shape == p.shape for p in pipe.parameters())


class Layer(nn.Module):
    """A function of its input and of layers."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(x, *self.layers)


def penalty(x: Tensor, layer: nn.Module) -> Tensor:
    """Runs a backward of its own, and is differentiated twice."""
    leaf = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(layer(leaf).pow(2).sum(), leaf, create_graph=True)
    return layer(x) + grad


ARCHITECTURES: dict[str, Any] = {
    "attention": lambda: [
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
    ],
    "recurrent": lambda: [
        Layer(lambda x, inner: inner(x)[0], nn.LSTM(8, 8, batch_first=True)),
        nn.Linear(8, 8),
        Layer(lambda x, inner: inner(x)[0], nn.GRU(8, 8, batch_first=True)),
    ],
    "convolution": lambda: [nn.Conv1d(5, 5, 3, padding=1), nn.GroupNorm(5, 5), nn.BatchNorm1d(5)],
    "embedding": lambda: [nn.Embedding(9, 8, max_norm=2.0), nn.Linear(8, 8), nn.LayerNorm(8)],
    "views in place": lambda: [
        nn.Linear(8, 8), Layer(lambda x: x[:, :3]), nn.ReLU(inplace=True), nn.Linear(8, 8)
    ],
    "spectral norm": lambda: [spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)],
    "weight norm": lambda: [weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)],
    "used twice": lambda: [Layer(lambda x, f: f(f(x).tanh()), nn.Linear(8, 8)), nn.Linear(8, 8)],
    "a parameter comes out": lambda: [
        nn.Linear(8, 8), Layer(lambda x, f: (x, f.weight), nn.Linear(8, 8)),
        Layer(lambda t: t[0] @ t[1]),
    ],
    "expanded": lambda: [nn.Linear(8, 1), Layer(lambda x: x.expand(-1, -1, 8)), nn.Linear(8, 8)],
    "gradient penalty": lambda: [nn.Linear(8, 8), Layer(penalty, nn.Linear(8, 8)), nn.Linear(8, 8)],
    "checkpointed": lambda: [
        nn.Linear(8, 8),
        Layer(lambda x, f: checkpointed(f, x, use_reentrant=False), nn.Linear(8, 8)),
        nn.Tanh(),
    ],
    "cut off": lambda: [nn.Linear(8, 8), Layer(lambda x: x.detach()), nn.Linear(8, 8)],
    "frozen between": lambda: [
        nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
    ],
    "complex": lambda: [
        nn.Linear(8, 8), Layer(lambda x: torch.complex(x, x * 2)), Layer(lambda x: x.abs())
    ],
    "double": lambda: [nn.Linear(8, 8).double(), nn.Tanh(), nn.Linear(8, 8).double()],
}  # fmt: skip


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, run, checkpoint):
    torch.manual_seed(0)
    layers = nn.Sequential(*ARCHITECTURES[name]())
    plain, n = copy.deepcopy(layers), len(layers)
    if name == "embedding":
        x = torch.randint(9, (7, 5))
    else:
        x = torch.randn(7, 5, 8, dtype=next(layers.parameters()).dtype, requires_grad=True)
    pipe = Pipe(layers, [1] * n, chunks=3, checkpoint=checkpoint)
    orders = [[2, 1, 0] if run == "gpipe" else [0, 1, 2]] * n
    for _ in range(2):
        expected = plain_step(plain, x, loss_fn=weigh, chunks=3, orders=orders, balance=[1] * n)
        actual = pipe_step(pipe, x, loss_fn=weigh, schedule=run)
        assert_same_step(actual, expected, exact=run != "zb_h1")
        plain.zero_grad()
        pipe.zero_grad()


def test_lazy_layers_get_their_parameters_in_the_first_call():
    pipe = pipe_of(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3)))
    pipe.train_batch(torch.randn(8, 6), loss_fn=weigh)
    assert pipe[0].weight.grad.shape == (4, 6)
    assert pipe[2].weight.grad.shape == (3, 4)
