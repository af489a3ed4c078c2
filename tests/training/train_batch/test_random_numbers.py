"""``train_batch``: what layers and losses draw is the same whoever runs them, and when."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from syncpipe import Pipe, inline
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Dawdle, Do, pipe_of
from tests.support.training import KINDS, RUNS, assert_same_step, pipe_step, weigh
from tests.training.train_batch.loop import noisy


def test_train_batch_draws_what_the_forward_draws():
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.RReLU(), nn.Dropout())
    pipe, x = pipe_of(layers), torch.randn(8, 6)
    torch.manual_seed(1)
    expected = pipe(x).detach()
    after = torch.get_rng_state()
    for run in ("naive", "gpipe", "1f1b", "zb_h1"):
        torch.manual_seed(1)
        _, output = pipe.train_batch(x, loss_fn=weigh, schedule=run, return_outputs=True)
        assert torch.equal(output, expected)
        assert torch.equal(torch.get_rng_state(), after)


def test_a_loss_may_draw_numbers_of_its_own():
    drawn, by_layers = [], []

    def loss_fn(y):
        drawn.append(torch.rand(3).tolist())
        return weigh(y)

    def draw(x):
        by_layers.append(torch.rand(3).tolist())

    layers = nn.Sequential(Do(draw), nn.Linear(3, 3), nn.Dropout(), Dawdle(), Do(draw))
    pipe = pipe_of(layers, checkpoint="never")
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        pipe.train_batch(torch.ones(8, 3), loss_fn=loss_fn)
    first, again, other = drawn[:4], drawn[4:8], drawn[8:]
    assert first == again
    # For each of two seeds 4 micro-batches in the loss and in each of two layers.
    assert len({tuple(numbers) for numbers in first + other + by_layers}) == 2 * 4 * 3


def stress_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(6, 6), Dawdle(k), nn.Dropout(0.3), nn.Tanh()) for k in range(4)],
        nn.Sequential(nn.BatchNorm1d(6), Dawdle(9), nn.Linear(6, 6)),
    )


@pytest.mark.parametrize(
    ("run", "checkpoint"),
    [(run, mode) for k, run in enumerate(KINDS) for mode in CHECKPOINT_MODES[k % 2 :: 2]],
)
def test_many_steps_on_four_workers_give_what_the_inline_run_gives(run, checkpoint):
    options, devices = RUNS[run]
    ours = Pipe(stress_model(), [1, 1, 2, 1], devices=devices, chunks=6, checkpoint=checkpoint)
    theirs = Pipe(stress_model(), [1, 1, 2, 1], devices=devices, chunks=6, checkpoint="never")
    x = torch.randn(12, 6)
    for _ in range(50):
        results = []
        for pipe, context in ((ours, nullcontext()), (theirs, inline())):
            torch.manual_seed(4)
            with context:
                results.append(pipe_step(pipe, x.requires_grad_(), loss_fn=noisy, **options))
            pipe.zero_grad()
        assert_same_step(*results)  # split or not: both do the same
