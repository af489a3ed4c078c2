"""Every schedule by name on CPU workers, where numbers are such that nothing is rounded.

Whole numbers add up to the same whatever the order, so a step equals that of the plain model to
the last bit, also where backward is split and where a weight is used twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.schedules import SCHEDULES
from tests.schedules.layouts import LAYOUTS
from tests.support.models import CHECKPOINT_MODES, assert_same_tree
from tests.support.skips import Receive, Send

#: The loss, and the gradients of the input and of the parameters.
Step = tuple[Tensor, Tensor | None, list[Tensor | None]]


class Square(nn.Module):
    """Has autograd store its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


def linear(seed: int) -> nn.Linear:
    """Its parameters are whole numbers."""
    layer = nn.Linear(3, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for p in layer.parameters():
        p.data = torch.randint(-2, 3, p.shape, generator=generator).double()
    return layer


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).double()


def step(train: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Step:
    """What a function that computes a loss and goes back leaves behind."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    return train(x).detach(), x.grad, [p.grad for p in model.parameters()]


def plain_step(model: nn.Module, x: Tensor) -> Step:
    def train(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        loss.backward()
        return loss

    return step(train, model, x)


def pipe_step(pipe: Pipe, x: Tensor) -> Step:
    return step(partial(pipe.train_batch, loss_fn=torch.sum, loss_reduction="sum"), pipe, x)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("m", [1, 2, 5, 12])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_is_that_of_the_plain_model(name: str, m: int, checkpoint: str) -> None:
    """With a skip between stages that are no neighbours."""
    layers = [linear(0), Send(), Square(), linear(1), linear(2), Receive(), linear(3), linear(4)]
    model = nn.Sequential(*layers)
    x = whole_numbers(12, 3)
    expected = plain_step(model, x)
    devices = [f"cpu:{d}" for d in LAYOUTS.get(name, range)(3 if name in LAYOUTS else 6)]
    pipe = Pipe(
        model, [2, 1, 1, 1, 2, 1], devices=devices, chunks=m, checkpoint=checkpoint, schedule=name
    )
    for _ in range(2):
        assert_same_tree(pipe_step(pipe, x), expected, name)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", ["zbv", "v_half", "v_min", "dualpipev"])
def test_in_a_v_the_first_and_the_last_layer_may_share_their_weight(
    name: str, checkpoint: str
) -> None:
    first, last = linear(0), linear(1)
    last.weight = first.weight
    model = nn.Sequential(first, Square(), linear(2), last)
    x = whole_numbers(8, 3)
    expected = plain_step(model, x)
    devices = ["cpu:0", "cpu:1", "cpu:1", "cpu:0"]
    pipe = Pipe(model, [1] * 4, devices=devices, chunks=4, checkpoint=checkpoint, schedule=name)
    for _ in range(2):
        assert_same_tree(pipe_step(pipe, x), expected, name)
