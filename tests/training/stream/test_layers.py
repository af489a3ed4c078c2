"""Layers, hooks and optimizers with habits of their own, in ``train_stream``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe
from tests.training.stream.models import WORKERS, sgd
from tests.training.stream.test_arguments import pipe_of, renormed, train


class Clamps(nn.Linear):
    """As BinaryConnect does."""

    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


def test_a_layer_that_assigns_to_its_weight_is_refused_where_it_has_versions():
    model = nn.Sequential(Clamps(8, 8), nn.Linear(8, 4))
    with pytest.raises(RuntimeError, match="by its data"):
        train(Pipe(model, [1, 1], devices=WORKERS[:2]))


def test_parameters_of_a_version_have_the_attributes_of_theirs():
    class Scaled(nn.Linear):
        def forward(self, x):
            assert isinstance(self.weight, nn.Parameter)
            return super().forward(x) * self.weight.scale

    model = nn.Sequential(Scaled(8, 8), nn.Linear(8, 4))
    model[0].weight.scale = 2.0
    assert len(train(Pipe(model, [1, 1], devices=WORKERS[:2])).losses) == 5


def test_optimizers_may_have_state_of_their_own():
    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            self.state["steps"] = self.state.get("steps", 0) + 1
            return super().step(closure)

    done = train(pipe_of(), optimizer=lambda ps: Counts(ps, lr=0.1))
    assert [each.state["steps"] for each in done.optimizers] == [5] * 4


def test_hooks_of_several_parameters_run_once_for_each_update():
    pipe, seen = pipe_of(), []
    parameters = list(pipe[0].parameters())
    torch.autograd.graph.register_multi_grad_hook(parameters, lambda grads: seen.append(len(grads)))
    train(pipe)
    assert seen == [2] * 5


def test_a_hook_may_freeze_a_parameter():
    def frozen_after_two(devices):
        pipe = pipe_of(devices=devices, balance=[2, 2, 2, 1] if len(devices) > 1 else [7])
        steps = []

        def freeze(optimizer, args, kwargs):
            steps.append(1)
            pipe[0].weight.requires_grad_(len(steps) < 2)

        def optimizer(parameters):
            made = sgd(parameters)
            if any(p is pipe[0].weight for p in parameters):
                made.register_step_post_hook(freeze)
            return made

        seen = []
        pipe[0].weight.register_hook(lambda grad: seen.append(1))
        train(pipe, optimizer=optimizer)
        return len(seen)

    assert frozen_after_two(WORKERS) == 2


def test_a_loss_without_a_graph_is_refused():
    with pytest.raises(RuntimeError, match="the loss does not require grad"):
        train(pipe_of(), loss_fn=lambda y, t: F.cross_entropy(y.detach(), t))


def test_many_views_of_one_buffer_are_many_parameters():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.randn(3000, 8)
            self.rows = nn.ParameterList([nn.Parameter(row) for row in flat])

        def forward(self, x):
            return x + self.rows[0]

    pipe = Pipe(nn.Sequential(Views(), nn.Linear(8, 4)), [1, 1], devices=WORKERS[:2])
    assert len(train(pipe).losses) == 5


def test_a_layer_that_writes_into_its_weight_is_refused_where_it_has_versions():
    pipe = Pipe(renormed(), [1, 1], devices=WORKERS[:2], checkpoint="never")
    data = [(torch.randint(0, 9, (4,)), torch.randint(0, 4, (4,))) for _ in range(3)]
    with pytest.raises(RuntimeError, match="a layer changed a parameter"):
        train(pipe, data)
