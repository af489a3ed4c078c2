"""``RepeatingLoader``, and data that are drawn."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from syncpipe import Pipe, RepeatingLoader, inline
from tests.support.models import assert_same_tree
from tests.support.running import Do, assert_same, pipe_of
from tests.training.loss.whole import four, grads_of


class Random(TensorDataset):
    """Adds noise to its samples, as augmentations do."""

    def __getitem__(self, k):
        x, t = super().__getitem__(k)
        return x + torch.rand(()), t


def draw_slowly(x: Tensor) -> Tensor:
    """Draws, lets others have their turn, and draws again."""
    y = x * torch.rand(())
    for _ in range(50):
        os.sched_yield()
    return y + torch.rand(())


def random_pipe() -> Pipe:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(3, 3), Do(draw_slowly)) for _ in range(3)]
    return pipe_of(nn.Sequential(*layers), chunks=3)


def test_data_that_is_drawn_is_the_same_every_time_and_disturbs_no_layer():
    dataset = Random(torch.randn(8, 3), torch.arange(8))
    runs = []
    for k in range(6):
        pipe, seen = random_pipe(), []
        data = iter(RepeatingLoader(DataLoader(dataset, batch_size=2, shuffle=True)))
        watched = ((seen.append((x, t)) or x, t) for x, t in data)
        torch.manual_seed(4)
        for _ in range(5):
            if k:
                loss = pipe.train_batch(data_iter=watched, loss_fn=lambda y, t: y.pow(2).mean())
            else:
                with inline():
                    loss = pipe.train_batch(data_iter=watched, loss_fn=lambda y, t: y.pow(2).mean())
        runs.append(([loss, *grads_of(pipe), torch.get_rng_state()], seen))
    for result, seen in runs[1:]:
        assert_same_tree(seen, runs[0][1], "data")
        assert_same(result, runs[0][0])


# RepeatingLoader


def test_a_repeating_loader_begins_again():
    data = RepeatingLoader([1, 2, 3])
    assert [next(data) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert iter(data) is data


def test_a_repeating_loader_shuffles_anew_at_each_pass():
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_size=1, shuffle=True)
    data = iter(RepeatingLoader(loader))
    passes = [[int(next(data)[0]) for _ in range(50)] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(50))
    assert passes[0] != passes[1]


def test_a_repeating_loader_feeds_step_after_step():
    dataset = TensorDataset(torch.randn(10, 3), torch.randn(10, 3))
    data = iter(RepeatingLoader(DataLoader(dataset, batch_size=4)))  # 4, 4, 2
    pipe = four(chunks=2)
    losses = [pipe.train_batch(data_iter=data, loss_fn=F.mse_loss) for _ in range(6)]
    assert_same(losses[:3], losses[3:])


def test_a_repeating_loader_refuses_what_it_cannot_repeat():
    with pytest.raises(TypeError, match="cannot restart generator"):
        RepeatingLoader(x for x in [1])
    with pytest.raises(TypeError, match="iterable, not int"):
        RepeatingLoader(3)
    for empty in ([], {}, DataLoader(TensorDataset(torch.ones(0, 3)), batch_size=2)):
        with pytest.raises(ValueError, match="nothing in"):
            next(RepeatingLoader(empty))


def test_a_repeating_loader_notices_that_a_later_pass_is_empty():
    items = [1]
    data = RepeatingLoader(items)
    assert next(data) == 1
    items.clear()
    with pytest.raises(ValueError, match="nothing in"):
        next(data)
    items.append(2)
    assert next(data) == 2


def test_a_pass_that_fails_does_not_end_the_loader():
    class Flaky:
        fails = True

        def __iter__(self):
            yield 1
            if self.fails:
                raise OSError("disk")
            yield 2

    flaky = Flaky()
    data = RepeatingLoader(flaky)
    assert next(data) == 1
    with pytest.raises(OSError, match="disk"):
        next(data)
    flaky.fails = False
    assert [next(data) for _ in range(3)] == [1, 2, 1]
