"""What operators compute is what they compute on the CPU, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import simulated
from tests.support.running import Do

DEVICE = torch.device("sim:1")
DOUBLE = torch.float64


def numbers(*shape):
    return torch.randn(shape, dtype=DOUBLE)


def indices(count, *shape):
    return torch.randint(count, shape)


def results(module, inputs):
    """Output, gradients of inputs and parameters, and buffers, on the CPU."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    output = module(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(-1, 1, output.numel(), dtype=DOUBLE).reshape(output.shape)
    (output * weights.to(output.device)).sum().backward()
    leaves = [x for x in inputs if x.requires_grad] + list(module.parameters())
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [value.detach().cpu() for value in (output, *grads, *module.buffers())]


def check(module, inputs):
    """Compares, with kernels that come late; says why the host had to wait meanwhile."""
    module = module.to(DOUBLE)
    there = copy.deepcopy(module).to(DEVICE)
    expected = results(module, inputs)
    inputs = [x.to(DEVICE) for x in inputs]
    simulated.waits(forget=True)
    with simulated.delays(1, 0.1):
        found = results(there, inputs)
    waits = simulated.waits()
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    return {reason for reason in waits if not reason.startswith("copy")}


SEQUENCE = lambda: [numbers(2, 5, 8)]  # noqa: E731
IMAGE = lambda: [numbers(2, 4, 6, 6)]  # noqa: E731
ROWS = lambda: [numbers(6, 4)]  # noqa: E731
TOKENS = lambda: [indices(10, 3, 5)]  # noqa: E731

LAYERS = {
    "Linear": (lambda: nn.Linear(4, 5), ROWS),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), IMAGE),
    "Conv2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False), IMAGE),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), IMAGE),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), IMAGE),
    "BatchNorm2d, evaluation": (lambda: nn.BatchNorm2d(4).eval(), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(4), ROWS),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "Embedding": (lambda: nn.Embedding(10, 4, padding_idx=0), TOKENS),
    "GELU": (nn.GELU, ROWS),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, activation="gelu"),
        SEQUENCE,
    ),
}


FUNCTIONS = {
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(6, device=x.device) % 4),
    "mse": lambda x: F.mse_loss(x, x.detach() * 2),
    "index by numbers": lambda x: x[:, [0, 2]] * 2,
    "put in": lambda x: x.clone().index_put_((torch.tensor([0, 1]),), x[2:4]),
    "cat": lambda x: torch.cat([x, x.exp()], 1),
    "split": lambda x: torch.cat(x.split(2, 1)[::-1], 1),
    "transposed": lambda x: x.t().contiguous() @ x,
    "sort": lambda x: x.sort(-1)[0],
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "masked fill": lambda x: x.masked_fill(x > 0, 1.0),
    "norms": lambda x: x.norm() + x.std() + x.var(0).sum() + x.logsumexp(1).sum(),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(1, x.argsort(1), x),
    "unfold": lambda x: x.unfold(1, 2, 1) * 1,
    "expand": lambda x: x[None].expand(3, -1, -1) * 1,
    "in place": lambda x: (x * 1).add_(1).mul_(2).relu_(),
    "into a slice": lambda x: torch.zeros_like(x).index_copy_(
        0, torch.tensor([1], device=x.device), x[:1]
    ),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "grid": lambda x: x + torch.arange(4, device=x.device) + torch.eye(6, 4, device=x.device),
    "one hot": lambda x: F.one_hot(torch.arange(6, device=x.device) % 4, 4) * x[0],
}


NEED_DATA = {
    "index by a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x[(x > 0).nonzero(as_tuple=True)],
    "bags": lambda x: F.embedding_bag(torch.zeros(2, 3, dtype=torch.long, device=x.device), x),
}


@pytest.mark.parametrize("name", [*LAYERS, *FUNCTIONS, *NEED_DATA])
def test_what_is_computed_is_what_the_cpu_computes(name):
    make, inputs = LAYERS.get(name, (lambda: Do((FUNCTIONS | NEED_DATA)[name]), ROWS))
    waits = check(make(), inputs())
    assert bool(waits) == (name in NEED_DATA)  # otherwise the host never has to


def test_double_backward():
    x = numbers(3).to(DEVICE).requires_grad_()
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    grad.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 6 * x.detach().cpu())


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.zeros(4, device=DEVICE),
        lambda x: x + torch.zeros(3),
        lambda x: x + torch.zeros(3, device="sim:2"),
        lambda x: torch.zeros(1, device="sim:9"),
    ],
    ids=["shapes", "host", "devices", "no such device"],
)
def test_mistakes_are_named_at_once(mistake):
    x = torch.zeros(3, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"size of tensor|same device|invalid device ordinal"):
        mistake(x)


def test_an_out_argument_of_another_size_is_resized():
    out = torch.empty(0, device=DEVICE)
    torch.add(torch.ones(3, device=DEVICE), 1, out=out)
    assert out.cpu().tolist() == [2, 2, 2]
