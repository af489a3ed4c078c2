"""P1 and P2 where ``tests.fuzz`` does not go: what is changed after it was stashed."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.models import (
    CHANNELS,
    CHECKPOINT_MODES,
    LENGTH,
    Receive,
    Send,
    assert_equals_plain,
    assert_same,
    step,
)
from tests.support.running import Do, pipe_of


def batch(size: int, requires_grad: bool) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, CHANNELS, LENGTH, generator=generator)
    return x.requires_grad_(requires_grad)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[2, 3], [1, 2, 2], [2, 1, 1, 1]])
@pytest.mark.parametrize("devices", [["cpu:0"] * 4, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]])
def test_a_stashed_tensor_that_is_changed_in_place_is_right_or_refused(
    balance, checkpoint, devices
):
    # The plain model pops what the ReLU left of the tensor.
    torch.manual_seed(0)
    layers = [nn.Linear(LENGTH, LENGTH), Send(), nn.ReLU(inplace=True), nn.Tanhshrink(), Receive()]
    arguments: dict[str, Any] = {"checkpoint": checkpoint, "devices": devices, "chunks": 3}
    with suppress(RuntimeError, ValueError):
        assert_equals_plain(nn.Sequential(*layers), batch(6, True), balance, steps=2, **arguments)


@pytest.mark.parametrize("balance", [[2, 2], [2, 1, 1], [1, 1, 1, 1]])
def test_a_stashed_tensor_with_more_uses_has_the_gradients_of_the_plain_model_to_rounding(balance):
    # (skip + one use) + other use there, skip + (one use + other use) here: what is used beyond
    # a border is summed there, and only the sum comes back.
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(LENGTH, LENGTH), Send(), Do(lambda x: x.tanh() + x.sigmoid()), Receive()
    )
    x, plain = batch(64, True), copy.deepcopy(layers)
    pipe = Pipe(layers, balance, chunks=2)
    expected = step(lambda t: torch.cat([plain(c) for c in t.chunk(2)]), plain, x)
    assert_same(step(pipe, pipe, x), expected, rounded=True)


def test_calls_layers_and_micro_batches_draw_different_numbers():
    pipe = Pipe(nn.Sequential(nn.Dropout(0.5), nn.Identity()), [1, 1], chunks=2)
    x = torch.ones(64, 3)
    assert not torch.equal(pipe(x), pipe(x))
    assert not torch.equal(*pipe(x).chunk(2))
    twice = Pipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1])
    kept = twice(x) != 0
    assert 0 < kept.float().mean() < 0.45, "both layers drew the same mask"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_train_batch_draws_what_the_forward_draws_whatever_its_loss_draws(schedule):
    layers, x = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.RReLU()), torch.randn(8, 6)
    torch.manual_seed(1)
    expected, after = pipe_of(layers)(x), torch.get_rng_state()
    torch.manual_seed(1)
    _, output = pipe_of(layers).train_batch(
        x, loss_fn=lambda y: y.mean() * torch.rand(()), schedule=schedule, return_outputs=True
    )
    assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(1)
    assert not torch.equal(torch.get_rng_state(), after), "the generator was rewound"
