"""Layers compiled with ``torch.compile`` work in a pipe as they do in the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from syncpipe import Pipe, sequential
from tests.support.models import in_turn
from tests.support.running import MODES, NormBlock, Using, assert_same, pipe_of, trained


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Calls(nn.Module):
    """Calls a compiled function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.function = torch.compile(lambda x, w: (x @ w).sin(), backend="eager")

    def forward(self, x):
        return self.function(x, self.weight)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_give_the_plain_loops_bits(mode, backend):
    wrapped = torch.compile(nn.Linear(6, 6), backend="eager")
    layers = nn.Sequential(NormBlock(), nn.Tanh(), Calls(), wrapped, NormBlock(), nn.Linear(6, 3))
    reference = copy.deepcopy(layers)
    compiled = copy.deepcopy(layers)  # the plain loop, compiled too
    for each in (layers, compiled):
        for k in (0, 4):
            each[k].compile(backend=backend)
    pipe = pipe_of(layers, [2, 4], checkpoint=mode)
    assert list(pipe.state_dict()) == list(reference.state_dict())
    for _ in range(3):
        x = torch.randn(12, 6)
        result = trained(pipe, pipe, x)
        assert_same(result, trained(in_turn(compiled, 4), compiled, x))
        assert_same(result, trained(in_turn(reference, 4), reference, x), rounded=True)


def test_a_compiled_step_around_a_pipe_runs_the_pipe():
    pipe = pipe_of(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    x = torch.randn(8, 6)
    step = torch.compile(lambda x: pipe(x * 2) + 1, backend="eager")
    assert torch.equal(step(x), in_turn(nn.Sequential(*pipe), 4)(x * 2) + 1)


def test_a_compiled_step_around_train_batch_trains():
    pipe = pipe_of(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    x = torch.randn(8, 6)
    steps = [lambda: pipe.train_batch(x * 2, loss_fn=torch.mean)]
    steps.append(torch.compile(steps[0], backend="eager"))
    assert torch.equal(*[step() for step in steps])


def test_a_compiled_module_around_a_converted_model_runs_the_pipe_and_goes_back():
    """What is between layers stays out of the graph, the recomputation too."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), torch.randn(8, 6)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    pipe = Pipe(sequential(model, x), [3], devices=["cpu"], chunks=2)
    around = Using(lambda x, pipe, head: head(pipe(x)), pipe, nn.Linear(6, 6))
    found = torch.compile(around, backend="aot_eager")(x)
    found.sum().backward()
    assert torch.equal(found, around(x))


def drops(x, linear, norm, drop):
    return drop(norm(linear(x).sin())) + x


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_pipe_compiles_its_layers_once_and_gives_the_same_bits(mode, autocast):
    block = nn.Sequential(nn.Linear(6, 6), nn.GELU())
    drop = Using(drops, nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.3))
    layers = nn.Sequential(nn.Linear(6, 6), drop, block, nn.Linear(6, 3))
    pipe, compiled = (
        Pipe(copy.deepcopy(layers), [2, 2], devices=["cpu", "cpu"], chunks=4, checkpoint=mode)
        for _ in range(2)
    )
    torch._dynamo.utils.counters.clear()
    compiled.compile(backend="eager")
    assert list(compiled.state_dict()) == list(layers.state_dict())
    x, found = torch.randn(12, 6), []
    for each in (pipe, compiled):
        torch.manual_seed(0)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = each(x).float().square().mean()
                each.train_batch(x, loss_fn=lambda y: y.float().square().mean())
            loss.backward()
        found.append([parameter.grad for parameter in each.parameters()])
    assert_same(*found)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    assert torch.equal(copy.deepcopy(compiled).eval()(x), compiled.eval()(x))
