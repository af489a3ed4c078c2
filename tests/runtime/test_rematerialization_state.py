"""What a recomputation starts from: what changed since the forward is put back, or refused."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from syncpipe import Pipe
from tests.support.running import (
    MODES,
    Do,
    assert_same,
    in_threads,
    one_by_one,
    pipe_of,
    trained,
    weigh,
)

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(7))


class Block(nn.Module):
    """What it gives depends on its mode and on a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.Identity()
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x):
        x = self.norm(self.linear(x)) + self.shift
        return x.tanh() if self.training else x.sigmoid()


# Between forward and backward

CHANGES = {
    "eval()": lambda m: m.eval(),
    "eval() of a layer": lambda m: m[0].eval(),
    "frozen": lambda m: m.requires_grad_(False),
    "a parameter replaced": lambda m: setattr(m[0].linear, "bias", nn.Parameter(torch.ones(6))),
    "a buffer modified": lambda m: m[0].shift.fill_(3),
    "a buffer replaced": lambda m: setattr(m[0], "shift", torch.tensor(3.0)),
}


@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("kind", CHANGES)
def test_what_changed_since_the_forward_is_as_it_was(kind, mode):
    layers, found, modes = blocks(), [], []
    ours = pipe_of(copy.deepcopy(layers), checkpoint=mode)
    trained(ours, ours, X)  # not new any more
    ours.zero_grad()
    for module, run in ((layers, lambda x: one_by_one(layers, x)), (ours, ours)):
        loss, parameters = weigh(run(X.clone().requires_grad_())), list(module.parameters())
        CHANGES[kind](module)
        loss.backward()
        found.append([p.grad for p in parameters])
        modes.append([m.training for m in module.modules()])
    assert_same(*found)
    assert_same(modes[1][-len(modes[0]) + 1 :], modes[0][1:])  # what was set meanwhile stays


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu:0", "cpu:1"]])
def test_functional_call_is_recomputed_from_its_own_parameters(devices, mode):
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    pipe = Pipe(layers, [2, 1], devices=devices, chunks=4, checkpoint=mode)
    given = {k: (v.detach() * 2 + 1).requires_grad_() for k, v in layers.named_parameters()}
    before = dict(layers.named_parameters())
    ours = torch.autograd.grad(weigh(functional_call(pipe, given, X)), list(given.values()))
    y = torch.cat([functional_call(layers, given, c) for c in X.chunk(4)])
    assert_same(ours, torch.autograd.grad(weigh(y), list(given.values())))
    assert all(before[k] is v for k, v in layers.named_parameters())


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.weight


def frozen():
    return nn.Sequential(Times().requires_grad_(False), nn.Linear(6, 6))


def blocks():
    return nn.Sequential(Block(), Block())


def renorms():
    return nn.Sequential(nn.Embedding(5, 6, max_norm=0.5), nn.Tanh())


def triple(layer):
    with torch.no_grad():
        layer.weight.mul_(3)


def put_norm(block):
    block.norm = nn.BatchNorm1d(6)


MODIFIED = r"a parameter \(float32.* modified in place between forward and backward"


@pytest.mark.parametrize(
    ("layers", "x", "change", "message"),
    [
        (frozen, X, triple, MODIFIED),
        (renorms, torch.arange(4), triple, MODIFIED),
        (blocks, X, put_norm, r"modules of stage 0.*new: BatchNorm1d; gone: Identity"),
    ],
    ids=["frozen parameter", "embedding that renorms", "another module"],
)
def test_what_cannot_be_as_it_was_is_refused(layers, x, change, message):
    pipe = pipe_of(layers(), checkpoint="always")
    loss = weigh(pipe(x.clone().requires_grad_() if x.is_floating_point() else x))
    change(pipe[0])
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


# Between calls, and in them


class MakesItself(nn.Module):
    """Makes its parameter when it sees its first input."""

    def forward(self, x):
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(torch.full(x.shape[1:], 0.5))
        return (x * self.weight).tanh()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "make", [MakesItself, lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())]
)
def test_layers_may_make_their_parameters_in_the_first_call(make, mode):
    pipe = pipe_of(nn.Sequential(make(), make()), checkpoint=mode)
    weigh(pipe(X)).backward()
    ours = [p.grad.clone() for p in pipe.parameters()]
    assert all(count == 4 for name, count in pipe.named_buffers() if "tracked" in name)
    pipe.zero_grad()
    weigh(one_by_one(nn.Sequential(*pipe), X)).backward()
    assert_same(ours, [p.grad for p in pipe.parameters()])


LATER = {
    "a value": lambda block: block.shift.fill_(2),
    "a batch norm": put_norm,
    "a parametrization": lambda block: spectral_norm(block.linear),
    "a hook with buffers": lambda block: old_spectral_norm(block.linear),
}


@pytest.mark.parametrize("kind", LATER)
def test_buffers_that_come_into_a_layer_between_calls_are_known(kind):
    layers = blocks()
    other = copy.deepcopy(layers)
    pipe = pipe_of(layers, checkpoint="always")
    weigh(pipe(X)).backward()
    for module in (layers, other):
        torch.manual_seed(1)
        LATER[kind](module[0])
    for _ in range(2):
        ours = trained(pipe, pipe, X)
        assert_same(ours, trained(lambda x: one_by_one(other, x), other, X))


# Inputs


class Box:
    def __init__(self, x):
        self.x = x


class Slim:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("made", [Box, Slim])
@pytest.mark.parametrize("what", ["nothing", "sets", "modifies"])
def test_an_object_that_a_layer_changes_is_refused(what, made):
    changes = {
        "nothing": lambda box: None,
        "sets": lambda box: setattr(box, "x", box.x.tanh()),
        "modifies": lambda box: setattr(box, "x", box.x.add_(1)),
    }
    layers = nn.Sequential(Do(made), Do(changes[what]), Do(lambda box: box.x))
    balance = [3] if what == "nothing" else [1, 1, 1]  # a graph goes to no other stage in it
    pipe = Pipe(layers, balance, devices=["cpu:0"] * len(balance), chunks=4, checkpoint="always")
    x = X.clone().requires_grad_()
    if what == "nothing":
        pipe(x * 1).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        return
    with pytest.raises(RuntimeError, match=rf"stage 1 .*attribute 'x' of the {made.__name__}"):
        pipe(x * 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_input_that_is_given_twice_is_one_tensor(chunks, mode):
    add = Do(lambda pair: pair[0].relu_() + pair[1])
    pipe = pipe_of(nn.Sequential(add, nn.Linear(6, 6)), chunks=chunks, checkpoint=mode)
    x = X.clone()
    assert torch.equal(pipe((x, x)), pipe[1](X.relu() * 2))


REGISTER = (
    nn.Module.register_full_backward_pre_hook,
    nn.Module.register_state_dict_post_hook,
    nn.Module.register_load_state_dict_pre_hook,
    nn.Module.register_load_state_dict_post_hook,
    lambda module, _: setattr(module, "_compiled_call_impl", module.forward),
)


@pytest.mark.parametrize("register", REGISTER)
def test_what_a_pipe_would_leave_out_of_the_container_is_refused(register):
    module = nn.Sequential(nn.Linear(6, 6))
    register(module, lambda *_: None)
    with pytest.raises(ValueError, match="which a pipe would not run"):
        Pipe(module, [1])


class Slow(nn.Module):
    """Counts in a buffer, and others may run in the middle of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        calls = self.calls + 1
        os.sched_yield()
        self.calls.copy_(calls)
        return x


def test_threads_that_call_a_pipe_change_its_buffers_one_after_another():
    layers = nn.Sequential(Slow(), Slow())
    pipe = Pipe(layers, [2], devices=["cpu"], chunks=6, checkpoint="never")  # on their threads
    in_threads(lambda _: [pipe(X) for _ in range(30)], *range(2))
    assert [layer.calls.item() for layer in layers] == [360, 360]
