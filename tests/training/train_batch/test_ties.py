"""P1 of ``train_batch`` for weights that several stages share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.models import CHECKPOINT_MODES
from tests.support.ties import WIDTH, WORDS, language_model, words
from tests.support.training import ANY_RUNS, FOUR, assert_trains_as


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ANY_RUNS)
def test_a_tied_head_learns_as_in_the_plain_loop(run, checkpoint):
    options, devices = ANY_RUNS[run]
    pipe = Pipe(language_model(), [1, 2, 1, 1], devices=devices, chunks=4, checkpoint=checkpoint)
    plain, optimizer = language_model(), torch.optim.SGD(pipe.parameters(), 0.5, 0.9)
    x, target = words(8), words(8, 1)
    losses = []
    for _ in range(4):
        plain.load_state_dict(pipe.state_dict())
        plain.zero_grad()
        losses.append(assert_trains_as(pipe, plain, x, target, loss_fn=loss_of, **options).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


class Add(nn.Module):
    def __init__(self, factor: float, weight: nn.Parameter) -> None:
        super().__init__()
        self.factor, self.weight = factor, weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * self.factor


class Idle(nn.Linear):
    """Does not use its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Looked(nn.Embedding):
    """Hands on no gradient, so that its weight gets none but that of others who have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def added() -> nn.Sequential:
    weight = nn.Parameter(torch.tensor([0.7]))
    return nn.Sequential(*[Add(factor, weight) for factor in (0.3, 0.2, 0.1)])


def tied(first: nn.Module, middle: nn.Module) -> nn.Sequential:
    rows, columns = first.weight.shape
    model = nn.Sequential(first, middle, nn.Linear(columns, rows, bias=False))
    model[2].weight = first.weight
    if isinstance(middle, Idle):
        middle.weight = first.weight
    return model


#: Models of three stages, and their input.
THREE: dict[str, tuple[Any, Tensor]] = {
    "0.1 + 0.2 + 0.3 is not 0.1 + (0.2 + 0.3)": (added, torch.zeros(2, 1)),
    "idle": (lambda: tied(nn.Linear(3, 3, bias=False), Idle(3, 3)), torch.randn(4, 3)),
    "sparse": (
        lambda: tied(nn.Embedding(WORDS, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)), words(4)
    ),
    "frozen before the last": (
        lambda: tied(Looked(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)), words(4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", THREE)
def test_three_stages_add_in_the_plain_loops_order_whoever_is_late(name, checkpoint):
    make, x = THREE[name]
    model = make()
    plain = copy.deepcopy(model)
    pipe = Pipe(model, [1, 1, 1], devices=FOUR[:3], chunks=2, checkpoint=checkpoint)
    for _ in range(10):
        assert_trains_as(pipe, plain, x, loss_fn=torch.mean)
        pipe.zero_grad()
        plain.zero_grad()
