"""What the loss function is given, and what comes back beside the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import NoChunk, Pipe
from tests.support.models import CHECKPOINT_MODES, assert_same_tree, linear_model
from tests.support.training import KINDS, RUNS
from tests.training.loss.whole import four, whole


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_the_loss_function_is_called_once_a_micro_batch_in_order(run, checkpoint):
    seen = []

    def loss_fn(y, t):
        seen.append(int(t[0]))
        return y.sum()

    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=4, checkpoint=checkpoint)
    pipe.train_batch(
        torch.randn(4, 3), torch.arange(4), loss_fn=loss_fn, verify=False, **RUNS[run][0]
    )
    assert seen == [0, 1, 2, 3]


def test_without_a_target_the_loss_gets_the_output_alone():
    pipe = four()
    seen = []

    def loss_fn(*given):
        seen.append(len(given))
        return given[0].sum()

    pipe.train_batch(torch.randn(4, 3), loss_fn=loss_fn, verify=False)
    pipe.train_batch(torch.randn(4, 3), torch.randn(4), loss_fn=loss_fn)
    assert seen == [1] * 4 + [2] * 4


def test_targets_are_trees_that_are_cut_like_the_input():
    pipe, seen = four(chunks=2), []
    target = {
        "a": torch.arange(5),
        "b": (torch.arange(5.0), None),
        "whole": NoChunk(torch.arange(3)),
        "word": "x",
    }

    def loss_fn(y, t):
        seen.append(t)
        return y.sum()

    pipe.train_batch(torch.randn(5, 3), target, loss_fn=loss_fn, verify=False)
    expected = [
        {"a": a, "b": (a.float(), None), "whole": torch.arange(3), "word": "x"}
        for a in torch.arange(5).chunk(2)
    ]
    assert_same_tree(seen, expected, "targets")


@pytest.mark.parametrize("target", [7, "x", NoChunk(torch.arange(2))])
def test_a_target_without_anything_to_cut_goes_to_every_micro_batch(target):
    pipe, seen = four(), []
    pipe.train_batch(
        torch.randn(4, 3), target, verify=False, loss_fn=lambda y, t: seen.append(t) or y.sum()
    )
    assert_same_tree(seen, [getattr(target, "tensor", target)] * 4, "targets")


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_target_may_need_a_gradient(checkpoint):
    pipe = four(checkpoint=checkpoint)
    x, target = torch.randn(8, 3), torch.randn(8, 3, requires_grad=True)
    loss, _ = whole(pipe, lambda plain: F.mse_loss(plain(x), target))
    expected, target.grad = target.grad, None
    torch.testing.assert_close(pipe.train_batch(x, target, loss_fn=F.mse_loss), loss)
    torch.testing.assert_close(target.grad, expected)


# What comes back


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_outputs_come_back_gathered_and_detached(run, checkpoint):
    class Two(nn.Module):
        def forward(self, x):
            return {"y": x * 2, "rest": [x.detach() > 0, None, "word"]}

    layers = nn.Sequential(*linear_model(3), Two())
    pipe = Pipe(layers, [1, 1, 1, 1], devices=RUNS[run][1], chunks=3, checkpoint=checkpoint)
    x = torch.randn(7, 3)
    expected = [layers(piece) for piece in x.chunk(3)]
    loss, output = pipe.train_batch(
        x, loss_fn=lambda y: y["y"].sum(), return_outputs=True, **RUNS[run][0]
    )
    assert loss.shape == ()
    assert not output["y"].requires_grad
    assert torch.equal(output["y"], torch.cat([y["y"] for y in expected]))
    assert torch.equal(output["rest"][0], torch.cat([y["rest"][0] for y in expected]))
    assert output["rest"][1:] == [None, "word"]


def test_the_outputs_are_those_of_the_layers_whatever_the_loss_does_to_them():
    pipe, x = four(), torch.randn(8, 3)
    expected = torch.cat([nn.Sequential(*pipe)(piece) for piece in x.chunk(4)])
    _, output = pipe.train_batch(
        x, loss_fn=lambda y: torch.relu(y).mul(2).sum(), return_outputs=True
    )
    assert torch.equal(output, expected)
