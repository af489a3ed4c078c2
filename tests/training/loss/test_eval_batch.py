"""``eval_batch``: outputs and losses, flags and generators as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.support.models import assert_same_tree, linear_model
from tests.support.running import Dawdle, Do, in_threads, pipe_of
from tests.support.watched import Memory, alive
from tests.training.loss.whole import four, grads_of, whole


def noisy_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Sequential(nn.Dropout(), nn.RReLU())
    )


def test_eval_batch_gives_the_outputs_of_the_model_in_eval_mode():
    pipe = pipe_of(noisy_model(), chunks=3, checkpoint="always")
    pipe(torch.randn(9, 3))  # some statistics
    plain = copy.deepcopy(nn.Sequential(*pipe)).eval()
    x = torch.randn(7, 3, requires_grad=True)
    before = {key: value.clone() for key, value in pipe.state_dict().items()}
    output = pipe.eval_batch(x)
    assert torch.equal(output, torch.cat([plain(piece) for piece in x.chunk(3)]))
    assert not output.requires_grad
    assert output.grad_fn is None
    assert_same_tree(dict(pipe.state_dict()), before, "state")
    assert pipe.training


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 1, 1]])
def test_eval_batch_gives_the_loss_of_the_mini_batch(balance):
    pipe = pipe_of(linear_model(), balance, chunks=3)
    x, target = torch.randn(7, 3), torch.randn(7, 3)
    expected, _ = whole(pipe, lambda plain: F.mse_loss(plain(x), target))
    loss = pipe.eval_batch(x, target, loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, expected)
    assert not loss.requires_grad
    total = pipe.eval_batch(
        x, target, loss_fn=lambda y, t: F.mse_loss(y, t, reduction="sum"), loss_reduction="sum"
    )
    torch.testing.assert_close(total, expected * 21)
    weighted = pipe.eval_batch(x, target, loss_fn=lambda y, t: (F.mse_loss(y, t), len(y)))
    torch.testing.assert_close(weighted, expected)
    data = zip(x.chunk(3), target.chunk(3), strict=True)
    torch.testing.assert_close(pipe.eval_batch(data_iter=data, loss_fn=F.mse_loss), expected)
    assert grads_of(pipe) == [None] * 8


def test_eval_batch_takes_inputs_from_an_iterator():
    pipe, x = four(chunks=3), torch.randn(7, 3)
    data = iter([(piece, None) for piece in [*x.chunk(3), x]])
    assert torch.equal(pipe.eval_batch(data_iter=data), pipe.eval_batch(x))
    assert len(list(data)) == 1


def modes_of(pipe: Pipe) -> list[bool]:
    return [module.training for module in [*pipe.modules(), *pipe.partitions]]


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("call", ["input", "loss", "data_iter"])
def test_eval_batch_leaves_every_training_flag_as_it_was(call, failing):
    seen = []

    def look(x):
        seen.append(pipe[1].training)
        if failing:
            raise ValueError("bad")

    pipe = pipe_of(nn.Sequential(nn.Linear(3, 3), noisy_model(), Do(look)), chunks=2)
    pipe[1][1].eval()  # as people freeze a BatchNorm
    pipe[1][3].train(False)
    pipe[1][3][0].train(True)
    before = modes_of(pipe)
    x = torch.randn(4, 3)
    given = {
        "input": {"input": x},
        "loss": {"input": x, "loss_fn": torch.sum},
        "data_iter": {"data_iter": iter([(x, None)] * 2)},
    }[call]
    if failing:
        with pytest.raises(ValueError, match="bad"):
            pipe.eval_batch(**given)
    else:
        pipe.eval_batch(**given)
    assert modes_of(pipe) == before
    assert set(seen) == {False}


def test_eval_batch_in_several_threads_leaves_the_flags_and_is_right():
    layers = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Linear(3, 3), Dawdle(1)), nn.Dropout())
    pipe, x = pipe_of(layers, chunks=2), torch.ones(4, 3)
    expected = pipe.eval_batch(x)

    def evaluate(_):
        return all(torch.equal(pipe.eval_batch(x), expected) for _ in range(60))

    assert in_threads(evaluate, *range(3)) == [True] * 3
    assert all(modes_of(pipe))


def test_eval_batch_never_re_materializes_and_stores_nothing():
    references: list[Any] = []
    counts = []

    def look(x):
        y = x * 2
        counts.append(alive(references))
        references.append(Memory(y))
        assert not torch.is_grad_enabled()
        return y.sin()

    pipe = pipe_of(nn.Sequential(nn.Linear(3, 3), Do(look)), chunks=4, checkpoint="always")
    pipe.eval_batch(torch.randn(8, 3), loss_fn=torch.sum)
    assert counts == [0] * 4
    assert alive(references) == 0


def test_eval_batch_moves_the_generator_as_a_forward_does():
    pipe, x = pipe_of(noisy_model()), torch.randn(8, 3)
    torch.manual_seed(3)
    pipe.eval_batch(x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    pipe.eval()(x)
    assert torch.equal(after, torch.get_rng_state())


def test_eval_batch_works_under_no_grad_and_inference_mode():
    pipe, x = four(), torch.randn(8, 3)
    expected = pipe.eval_batch(x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(pipe.eval_batch(x), expected)


def test_eval_batch_refuses_a_target_that_nobody_would_use():
    with pytest.raises(ValueError, match="loss_fn"):
        four().eval_batch(torch.randn(4, 3), torch.randn(4, 3))
