"""``train_batch``: inputs that are trees, layers in place, parameters that are shared or frozen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import NoChunk, Pipe
from tests.support.models import CHECKPOINT_MODES, LENGTH
from tests.support.running import assert_same, pipe_of
from tests.support.training import (
    KINDS,
    RUNS,
    WHOLE,
    assert_same_step,
    pipe_step,
    plain_step,
    weigh,
)
from tests.training.train_batch.loop import assert_same_state, by_hand, model, model_pipe


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["naive", "gpipe", "1f1b", "zb_h1"])
def test_layers_at_the_start_of_a_partition_may_work_in_place(run, checkpoint):
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(LENGTH, LENGTH), nn.ReLU(inplace=True), nn.Tanh()
        )

    pipe = Pipe(build(), [1, 1, 2], chunks=3, checkpoint=checkpoint)
    plain = build()
    x = torch.randn(6, LENGTH)
    before = x.clone()
    orders = [[2, 1, 0] if run == "gpipe" else [0, 1, 2]] * 3
    for _ in range(3):
        expected = plain_step(plain, x, loss_fn=weigh, chunks=3, orders=orders, balance=[1, 1, 2])
        assert_same_step(
            pipe_step(pipe, x, loss_fn=weigh, schedule=run), expected, exact=run != "zb_h1"
        )
    assert torch.equal(x, before)


class Tree(nn.Module):
    """From a tree of everything to a tree of everything."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, tree):
        whole = tree.get("whole", torch.ones(3))
        x = self.linear(tree["x"]) * tree["scale"] + tree["ids"][:, None] + whole
        pair = (tree["pair"][0] * 2, tree["pair"][1])
        return {**tree, "x": x, "pair": pair, "mask": x.detach() > 0}


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_trees_with_numbers_none_and_several_tensors(run, checkpoint):
    layers = nn.Sequential(Tree(), Tree(), Tree())
    plain = copy.deepcopy(layers)
    x = {
        "x": torch.randn(5, 3, requires_grad=True),
        "scale": 3,
        "ids": torch.arange(5),
        "pair": (torch.randn(5, 2, requires_grad=True), None),
        "unused": torch.randn(5, 1, requires_grad=True),
    }
    pipe = pipe_of(layers, chunks=2, checkpoint=checkpoint)
    orders = [[1, 0] if run == "gpipe" else [0, 1]] * 3
    expected = plain_step(plain, x, loss_fn=weigh, chunks=2, orders=orders, balance=[1, 1, 1])
    assert expected.input_grads[-1] is not None
    actual = pipe_step(pipe, x, loss_fn=weigh, schedule=run)
    assert_same_step(actual, expected, exact=run != "zb_h1")


def test_a_tensor_that_every_micro_batch_needs_whole():
    whole = torch.randn(3, requires_grad=True)
    layers = nn.Sequential(Tree(), Tree())
    x = {"x": torch.randn(5, 3), "scale": 2, "ids": torch.arange(5), "pair": (torch.ones(5), None)}
    pipe = pipe_of(layers, chunks=2)

    def loss_fn(tree):
        return tree["x"].pow(2).mean()

    expected = loss_fn(layers({**x, "whole": whole}))
    grads = torch.autograd.grad(expected, [whole, *layers.parameters()])
    loss = pipe.train_batch({"whole": NoChunk(whole), **x}, loss_fn=loss_fn)  # first in the tree
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close([whole.grad, *(p.grad for p in layers.parameters())], list(grads))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_a_frozen_first_stage_is_never_gone_back_through(run, checkpoint):
    layers = model()
    layers[0].requires_grad_(False)
    layers[1].requires_grad_(False)
    backwards = []
    layers[0].register_full_backward_hook(lambda *_: backwards.append(1))
    plain = copy.deepcopy(layers)
    pipe = model_pipe(run, layers, checkpoint=checkpoint)
    x, target = torch.randn(10, 6), torch.randn(10, 3)
    expected = by_hand(plain, x, target, run)
    loss = pipe.train_batch(x, target, loss_fn=F.mse_loss, **RUNS[run][0])
    assert_same(loss, expected[0])
    assert_same_state(pipe, plain, exact=run in WHOLE)
    assert backwards == []


def test_a_parameter_that_stages_share_gets_both_gradients():
    class Times(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return (x @ self.weight).tanh()

    weight = nn.Parameter(torch.randn(6, 6))
    layers = nn.Sequential(Times(weight), nn.Linear(6, 6), Times(weight))
    pipe = Pipe(layers, [1, 1, 1], devices=["cpu:0", "cpu:1", "cpu:0"], chunks=4)
    x, seen = torch.randn(8, 6), []
    for _ in range(10):
        pipe.zero_grad()
        pipe.train_batch(x, loss_fn=weigh)
        seen.append(weight.grad)
    pipe.zero_grad()
    for chunk in x.chunk(4):
        (weigh(layers(chunk)) / 4).backward()
    torch.testing.assert_close(seen[0], weight.grad)  # added up in another order
    assert all(torch.equal(grad, seen[0]) for grad in seen)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b"])
def test_an_entry_that_goes_through_a_stage_may_be_changed_in_place_in_the_next(run, checkpoint):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, tree):
            return {"x": self.linear(tree["x"]), "m": tree["m"]}

    class Second(nn.Module):
        def forward(self, tree):
            tree["m"].add_(1)
            return tree["x"] * tree["m"]

    layers = nn.Sequential(First(), Second())
    plain = copy.deepcopy(layers)
    pipe = pipe_of(layers, chunks=3, checkpoint=checkpoint)
    x = {"x": torch.randn(6, 3), "m": torch.randn(6, 3)}
    orders = [[2, 1, 0] if run == "gpipe" else [0, 1, 2]] * 2
    expected = plain_step(plain, x, loss_fn=weigh, chunks=3, orders=orders, balance=[1, 1])
    assert_same_step(pipe_step(pipe, x, loss_fn=weigh, schedule=run), expected)
