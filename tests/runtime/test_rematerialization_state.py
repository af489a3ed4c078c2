"""What a recomputation starts from: what changed since the forward is put back, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from syncpipe import Pipe
from tests.support.running import MODES, Do, assert_same, one_by_one, pipe_of, trained, weigh

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(7))


def between(layers, change, mode="always", x=X):
    """The gradients of a plain model and of a pipe that both change before backward."""
    found = []
    ours = pipe_of(copy.deepcopy(layers), checkpoint=mode)
    weigh(ours(x)).backward()  # not new any more
    ours.zero_grad()
    for module, run in ((layers, lambda x: one_by_one(layers, x)), (ours, ours)):
        loss = weigh(run(x))
        change(module)
        loss.backward()
        found.append([p.grad for p in module.parameters()])
    return found


# Parameters


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


def test_a_parameter_that_was_replaced_is_recomputed_from_the_old_one():
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    pipe = pipe_of(layers, [2], checkpoint="always")
    old = layers[0].weight
    loss = weigh(pipe(X))
    layers[0].weight = nn.Parameter(torch.zeros(6, 6))
    loss.backward()
    new, layers[0].weight = layers[0].weight, old
    ours, old.grad = old.grad, None
    weigh(one_by_one(layers, X)).backward()
    assert new.grad is None
    assert torch.equal(ours, old.grad)


def test_parameters_that_were_frozen_after_the_forward_are_recomputed_as_before():
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    x = X.clone().requires_grad_()
    assert_same(*between(layers, lambda module: module.requires_grad_(False), x=x))


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.weight


def test_a_frozen_parameter_that_was_modified_is_refused_where_nothing_else_is_stored():
    pipe = pipe_of(nn.Sequential(Times(), nn.Linear(6, 6)), checkpoint="always")
    pipe[0].requires_grad_(False)
    loss = weigh(pipe(X.clone().requires_grad_()))
    with torch.no_grad():
        pipe[0].weight.mul_(3)
    with pytest.raises(RuntimeError, match=r"a parameter \(float32\[6\]\).* modified in place"):
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_embeddings_that_renorm_their_rows_train_as_in_the_plain_loop(mode):
    layers = nn.Sequential(nn.Embedding(5, 6, max_norm=0.5), nn.Linear(6, 6))
    other = copy.deepcopy(layers)
    pipe = pipe_of(layers, checkpoint=mode)
    for step in range(3):
        x = torch.randint(5, (12,), generator=torch.Generator().manual_seed(step))
        results = []
        for module, run in ((layers, pipe), (other, lambda x: one_by_one(other, x))):
            module.zero_grad()
            weigh(run(x)).backward()
            results.append([t for p in module.parameters() for t in (p.detach(), p.grad)])
        assert_same(*results)


def test_an_embedding_that_was_modified_by_others_is_refused_though_it_renorms():
    pipe = pipe_of(nn.Sequential(nn.Embedding(5, 6, max_norm=0.5), nn.Tanh()), checkpoint="always")
    loss = weigh(pipe(torch.arange(4)))
    with torch.no_grad():
        pipe[0].weight.mul_(3)
    with pytest.raises(RuntimeError, match="was modified in place between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_lazy_layers_get_their_parameters_in_the_first_call(mode):
    pipe = pipe_of(
        nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2)), checkpoint=mode
    )
    y = pipe(X)
    weigh(y).backward()
    assert torch.equal(pipe[1].num_batches_tracked, torch.tensor(4))
    other = copy.deepcopy(pipe)
    ours = [p.grad for p in pipe.parameters()]
    other.zero_grad()
    weigh(one_by_one(nn.Sequential(*other), X)).backward()
    assert_same(ours, [p.grad for p in other.parameters()])


class Late(nn.Module):
    """Makes its parameter when it sees its first input."""

    def forward(self, x):
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(torch.full(x.shape[1:], 0.5))
        return (x * self.weight).tanh()


def test_a_layer_may_make_its_parameters_in_its_first_forward():
    pipe = pipe_of(nn.Sequential(Late(), Late()), checkpoint="always")
    weigh(pipe(X)).backward()
    ours = [p.grad for p in pipe.parameters()]
    pipe.zero_grad()
    weigh(one_by_one(nn.Sequential(*pipe), X)).backward()
    assert_same(ours, [p.grad for p in pipe.parameters()])


# Modes and modules


class Modal(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = self.linear(x)
        return x.tanh() if self.training else x.sigmoid()


@pytest.mark.parametrize("change", [lambda m: m.eval(), lambda m: m[0].eval()])
def test_a_cell_is_recomputed_in_the_mode_of_its_forward(change):
    layers = nn.Sequential(Modal(), Modal())
    assert_same(*between(layers, change))


def test_the_mode_that_was_set_meanwhile_stays():
    pipe = pipe_of(nn.Sequential(Modal(), Modal()), checkpoint="always")
    loss = weigh(pipe(X))
    pipe.eval()
    loss.backward()
    assert not any(module.training for module in pipe.modules())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.Identity()

    def forward(self, x):
        return self.norm(self.linear(x))


def put_norm(block):
    block.norm = nn.BatchNorm1d(6)


LATER = {
    "a batch norm": put_norm,
    "a parametrization": lambda block: spectral_norm(block.linear),
    "a hook with buffers": lambda block: old_spectral_norm(block.linear),
}


@pytest.mark.parametrize("kind", LATER)
def test_buffers_that_come_into_a_layer_between_calls_are_known(kind):
    layers = nn.Sequential(Block(), Block())
    other = copy.deepcopy(layers)
    pipe = pipe_of(layers, checkpoint="always")
    weigh(pipe(X)).backward()
    for module in (layers, other):
        torch.manual_seed(1)
        LATER[kind](module[0])
    for _ in range(2):
        ours = trained(pipe, pipe, X)
        assert_same(ours, trained(lambda x: one_by_one(other, x), other, X))


def test_a_layer_that_comes_in_between_forward_and_backward_is_refused():
    pipe = pipe_of(nn.Sequential(Block(), Block()), checkpoint="always")
    loss = weigh(pipe(X))
    put_norm(pipe[0])
    with pytest.raises(RuntimeError, match=r"modules of stage 0.*new: BatchNorm1d; gone: Identity"):
        loss.backward()


# How often, and where not at all


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]


def test_asking_twice_for_what_was_saved_recomputes_once():
    runs = []

    def layer(x):
        runs.append(len(x))
        return Twice.apply(x.sin(), x.cos())

    pipe = pipe_of(nn.Sequential(nn.Linear(6, 6), Do(layer)), checkpoint="always")
    weigh(pipe(X)).backward()
    assert len(runs) == 2 * 4


def test_saved_tensor_hooks_may_be_forbidden():
    pipe = Pipe(nn.Sequential(nn.Linear(6, 6)), [1], devices=["cpu"], checkpoint="always")
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        weigh(pipe(X)).backward()
    assert pipe[0].weight.grad is not None


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: m.register_state_dict_post_hook(lambda *_: None),
        lambda m: m.register_load_state_dict_pre_hook(lambda *_: None),
        lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
        lambda m: setattr(m, "_compiled_call_impl", m.forward),
    ],
)
def test_what_a_pipe_would_leave_out_of_the_container_is_refused(register):
    module = nn.Sequential(nn.Linear(6, 6))
    register(module)
    with pytest.raises(ValueError, match="which a pipe would not run"):
        Pipe(module, [1])
