"""``train_batch``: copies of a pipe, several threads and pipes, turns with ``pipe(x)``."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.running import assert_same, in_threads, pipe_of
from tests.support.training import RUNS, WHOLE, Trained, assert_same_step, pipe_step, weigh
from tests.training.train_batch.loop import assert_same_state, by_hand, model, model_pipe


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_of_a_pipe_that_was_trained_trains(copied):
    pipe, x = model_pipe("1f1b"), torch.randn(10, 6)
    pipe.train_batch(x, loss_fn=weigh)
    other = copied(pipe)
    for module in (pipe, other):
        module.zero_grad()
        module.train_batch(x, loss_fn=weigh)
    assert_same_state(other, pipe, exact=True)


def test_two_threads_train_one_pipe():
    pipe, plain = model_pipe("1f1b").eval(), model().eval()  # nothing but .grad changes
    x, target = torch.randn(10, 6), torch.randn(10, 3)
    losses = []
    in_threads(
        lambda _: losses.extend(pipe.train_batch(x, target, loss_fn=F.mse_loss) for _ in range(25)),
        *range(2),
    )
    for _ in range(50):
        expected, _ = by_hand(plain, x, target, "1f1b")
    assert_same(losses, [expected] * 50)
    assert_same_state(pipe, plain, exact=True)


def test_pipes_train_at_the_same_time():
    x = [torch.randn(10, 6, requires_grad=True) for _ in range(4)]

    pipes = [[model_pipe(WHOLE[k]) for k in range(4)] for _ in range(2)]  # they draw: one thread

    def train(k: int, again: int = 0) -> Trained:
        pipe = pipes[again][k]
        return [pipe_step(pipe, x[k], loss_fn=weigh, **RUNS[WHOLE[k]][0]) for _ in range(20)][-1]

    together = in_threads(train, *range(4))
    for k in range(4):
        assert_same_step(together[k], train(k, 1))


def test_train_batch_and_the_drop_in_take_turns():
    pipe, plain = pipe_of(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 6)
    plain.load_state_dict(pipe[0].state_dict())
    x = torch.randn(8, 6)
    for _ in range(2):
        weigh(pipe(x)).backward()
        weigh(torch.cat([plain(c).tanh() for c in x.chunk(4)])).backward()
        pipe.train_batch(x, loss_fn=lambda y: y.pow(2).mean())
        for c in x.chunk(4):
            (plain(c).tanh().pow(2).mean() * 0.25).backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain.weight.grad)
