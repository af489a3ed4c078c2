"""What a recomputation starts from: buffers and inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from tests.runtime.test_rematerialization_state import X, between
from tests.support.running import MODES, Do, assert_same, pipe_of, plain, trained, weigh


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x):
        return (self.linear(x) + self.shift).tanh()


@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_a_buffer_that_was_modified_meanwhile_is_recomputed_from_a_copy(mode):
    def change(module):
        module[0].shift.fill_(3)

    assert_same(*between(nn.Sequential(Shifted(), Shifted()), change, mode))


def test_a_buffer_that_was_replaced_meanwhile_is_recomputed_from_the_old_one():
    def change(module):
        module[0].shift = torch.tensor(3.0)

    assert_same(*between(nn.Sequential(Shifted(), Shifted()), change))


def test_a_buffer_may_be_modified_between_calls():
    layers = nn.Sequential(Shifted(), Shifted())
    other = copy.deepcopy(layers)
    pipe = pipe_of(layers, checkpoint="always")
    for step in range(3):
        for module in (layers, other):
            module[0].shift.fill_(step)
        assert_same(trained(pipe, pipe, X), trained(lambda x: plain(other, x), other, X))


class ReadsStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(x) + (x - self.norm.running_mean) / (self.norm.running_var + 1).sqrt()


class Data(nn.Module):
    """Changes its buffer without a trace in the version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.data.mul_(0.5).add_(x.detach().mean(0))
        return (x * self.mean.clone()).tanh()


class Adds(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("steps", buffer)

    def forward(self, x):
        with torch.no_grad():
            self.steps.add_(1)
        return x


class Reads(Adds):
    def forward(self, x):
        return (x + self.steps.clone()).tanh()


def shared():
    buffer = torch.zeros(())
    return nn.Sequential(Adds(buffer), Reads(buffer))


SUBTLE = {
    "statistics that another layer reads": ReadsStatistics,
    "no trace": Data,
    "one buffer in two layers": shared,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SUBTLE)
def test_buffers_are_what_they_were(kind, mode):
    layers = nn.Sequential(nn.Linear(6, 6), SUBTLE[kind](), nn.Linear(6, 6))
    other = copy.deepcopy(layers)
    pipe = pipe_of(layers, [2, 1], checkpoint=mode)
    for _ in range(2):
        assert_same(trained(pipe, pipe, X), trained(lambda x: plain(other, x), other, X))


@pytest.mark.parametrize("kind", SUBTLE)
def test_buffers_are_what_they_were_in_train_batch(kind):
    layers = nn.Sequential(nn.Linear(6, 6), SUBTLE[kind](), nn.Linear(6, 6))
    other = copy.deepcopy(layers)
    pipe = pipe_of(layers, [2, 1], chunks=1, checkpoint="always")

    def train(x):
        pipe.train_batch(x, x, loss_fn=lambda y, _: weigh(y), loss_reduction="sum")
        return [*(p.grad for p in layers.parameters()), *layers.buffers()]

    assert_same(train(X), trained(lambda x: plain(other, x, 1), other, X)[2:])


def test_a_buffer_that_starts_to_change_without_a_trace_in_another_mode_is_known():
    layers = nn.Sequential(nn.Linear(6, 6), Observed(), nn.Tanh())
    other = copy.deepcopy(layers)
    pipe = pipe_of(layers, [2, 1], checkpoint="always")
    for training in (False, True):
        layers[1].train(training)
        other[1].train(training)
        assert_same(trained(pipe, pipe, X), trained(lambda x: plain(other, x), other, X))


class Observed(Data):
    def forward(self, x):
        return super().forward(x) if self.training else (x - self.mean).tanh()


# Inputs


class Box:
    def __init__(self, x):
        self.x = x


class Slim:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("made", [Box, Slim])
@pytest.mark.parametrize("what", ["sets", "modifies"])
def test_an_object_that_a_layer_changes_is_refused(what, made):
    def change(box):
        if what == "sets":
            box.x = box.x.tanh()
        else:
            box.x.add_(1)

    layers = nn.Sequential(Do(made), Do(change), Do(lambda box: box.x))
    pipe = Pipe(layers, [1, 1, 1], devices=["cpu:0"] * 3, chunks=4, checkpoint="always")
    with pytest.raises(RuntimeError, match=rf"stage 1 .*attribute 'x' of the {made.__name__}"):
        pipe(X.clone().requires_grad_() * 1)


def test_an_object_that_no_layer_changes_passes():
    layers = nn.Sequential(nn.Linear(6, 6), Do(Box), Do(lambda box: box.x.tanh()))
    pipe = Pipe(layers, [1, 2], devices=["cpu:0", "cpu:1"], chunks=4, checkpoint="always")
    weigh(pipe(X)).backward()
    assert pipe[0].weight.grad is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_input_that_is_given_twice_is_one_tensor(chunks, mode):
    add = Do(lambda pair: pair[0].relu_() + pair[1])
    pipe = pipe_of(nn.Sequential(add, nn.Linear(6, 6)), chunks=chunks, checkpoint=mode)
    x = X.clone()
    y = pipe((x, x))
    assert torch.equal(y, pipe[1](X.relu() * 2))


@pytest.mark.parametrize("mode", MODES)
def test_an_entry_of_the_input_may_be_modified_in_a_later_stage(mode):
    class First(nn.Linear):
        def forward(self, d):
            return {"x": super().forward(d["x"]), "m": d["m"]}

    def change(d):
        d["m"].add_(1)
        return d["x"] * d["m"].clone()

    layers = nn.Sequential(First(6, 6), Do(change))
    pipe = pipe_of(layers, chunks=3, checkpoint=mode)
    for _ in range(2):
        pipe.zero_grad()
        weigh(pipe({"x": X, "m": X.clone()})).backward()
        ours = layers[0].weight.grad
        pipe.zero_grad()
        pieces = [layers({"x": x, "m": x.clone()}) for x in X.chunk(3)]
        weigh(torch.cat(pieces)).backward()
        assert torch.equal(ours, layers[0].weight.grad)


class Late(nn.Module):
    """An observer that is switched on later."""

    def __init__(self):
        super().__init__()
        self.enabled = False
        self.register_buffer("peak", torch.ones(()))

    def forward(self, x):
        y = x * self.peak.clone()
        if self.enabled:
            with torch.no_grad():
                self.peak.copy_(torch.maximum(self.peak, x.abs().max()))
        return y


@pytest.mark.parametrize("run", ["pipe", "train_batch"])
@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_may_change_for_the_first_time_in_a_later_call(mode, run):
    layers = nn.Sequential(nn.Linear(6, 6), Late(), nn.Linear(6, 6))
    other = copy.deepcopy(layers)
    pipe = pipe_of(layers, [2, 1], checkpoint=mode)
    for step in range(4):
        layers[1].enabled = other[1].enabled = step >= 2
        for module in (pipe, other):
            module.zero_grad()
        if run == "pipe":
            weigh(pipe(X)).backward()
            weigh(plain(other, X)).backward()
        else:
            pipe.train_batch(X, loss_fn=lambda y: y.square().sum(), loss_reduction="sum")
            plain(other, X).square().sum().backward()
        assert torch.equal(layers[1].peak, other[1].peak)
        for p, q in zip(pipe.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


class Counting(nn.Module):
    """Changes its buffer from the second micro-batch on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        y = x * self.count.clone()
        if float(x.detach()[0, 0]) > 0:
            self.count.add_(1)
        return y


def test_a_buffer_that_changes_in_a_later_micro_batch_is_what_it_was_in_those_before():
    x = torch.arange(4.0)[:, None].repeat(1, 3).requires_grad_()
    pipe = pipe_of(nn.Sequential(Counting(), nn.Identity()), checkpoint="always")
    pipe(x).sum().backward()
    assert x.grad[:, 0].tolist() == [1.0, 1.0, 2.0, 3.0]
