"""``checkpoint=``: a function of the layer, a list of layers, ``Selective(...)``."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from syncpipe import Pipe, Selective, is_checkpointing, is_recomputing
from tests.support.running import assert_same
from tests.support.training import FOUR
from tests.support.watched import Memory, alive, gone

ops = torch.ops.aten
PRODUCTS = [ops.mm.default, ops.addmm.default]


class Counted(nn.Module):
    """Counts its runs, and what it was told in each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.told: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.told.append((is_checkpointing(), is_recomputing()))
        return self.linear(x).tanh()

    @property
    def again(self) -> int:
        return self.told.count((False, True))


class Other(Counted):
    pass


def pipe_of(checkpoint: Any, balance: tuple[int, ...] = (4, 2), **options: Any) -> Pipe:
    layers = nn.Sequential(*[(Other if k % 2 else Counted)() for k in range(6)])
    options.setdefault("chunks", 2)
    devices = FOUR[: len(balance)]
    return Pipe(layers, balance, devices=devices, checkpoint=checkpoint, **options)


def again(pipe: Pipe) -> list[int]:
    return [layer.again for layer in pipe]


def forward(pipe: Pipe, x: Tensor | None = None) -> None:
    pipe(torch.randn(4, 3) if x is None else x).square().sum().backward()


def train(pipe: Pipe, x: Tensor | None = None) -> None:
    x = torch.randn(4, 3) if x is None else x
    pipe.train_batch(x, loss_fn=lambda y: y.square().mean())


def by_function(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


every_driver = pytest.mark.parametrize("run", [forward, train])
BY_LAYER = {
    "function": (lambda layer: isinstance(layer, Other), [1, 3, 5]),
    "indices": ([1, 2, -1], [1, 2, 5]),
    "bools": ([False, True, True, False, False, True], [1, 2, 5]),
    "range": (range(2, 6), [2, 3, 4, 5]),
    "groups": ([(0, 1), range(3, 6)], [0, 1, 3, 4, 5]),
    "one stage": (["never", [5]], [5]),
    "the other": ([[1], "always"], [1, 4, 5]),
    "both": ([lambda layer: isinstance(layer, Other), "never"], [1, 3]),
}


# --- what is recomputed, and what is kept ----------------------------------------------------


@every_driver
@pytest.mark.parametrize("way", BY_LAYER)
def test_the_layers_that_are_named_are_recomputed_and_no_others(way, run):
    checkpoint, named = BY_LAYER[way]
    pipe = pipe_of(checkpoint)
    run(pipe)
    for k, layer in enumerate(pipe):
        assert [told for told in layer.told if not told[1]] == [(k in named, False)] * 2
        assert layer.again == (2 if k in named else 0)


@every_driver
@pytest.mark.parametrize(
    ("checkpoint", "stored"), [("never", 6), ([1, 2, 3], 3), ([(1, 2, 3)], 1), ([1, (2, 3)], 2)]
)
def test_a_layer_keeps_its_input_and_a_group_that_of_its_first_layer(checkpoint, stored, run):
    made: list[Memory] = []
    counts: list[int] = []

    class Make(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inner = x.sin()
            outer = inner.sin()  # what the next layer starts from
            if not is_recomputing():
                made.extend((Memory(inner), Memory(outer)))
            return outer

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(alive(made))
            return x.clone()

    layers = nn.Sequential(nn.Linear(3, 3), Make(), Make(), Make(), Count())
    pipe = Pipe(layers, [1, 4], devices=FOUR[:2], chunks=1, checkpoint=["never", checkpoint])
    for _ in range(2):  # in its first call a pipe makes copies of inputs
        made.clear()
        run(pipe)
    assert counts[-1] == stored
    assert gone(made)


class Products(nn.Module):
    """A product and a tanh, which remembers what it made when."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.products: list[Memory] = []
        self.others: list[Memory] = []
        self.addresses: list[int] = []
        self.told: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.told.append((is_checkpointing(), is_recomputing()))
        y = x.mm(self.weight)
        z = y.tanh()
        self.addresses.append(y.data_ptr())
        if not is_recomputing():
            self.products.append(Memory(y))
            self.others.append(Memory(z))
        return z.exp()


@every_driver
def test_what_a_policy_saves_is_kept_and_comes_back_and_nothing_else(run):
    layer, look = Products(), []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            look.append((alive(layer.products), alive(layer.others)))
            return x.clone()

    layers = nn.Sequential(layer, nn.Linear(3, 3), Look())
    modes = [Selective([ops.mm.default]), "never"]
    pipe = Pipe(layers, [2, 1], devices=FOUR[:2], chunks=1, checkpoint=modes)
    for _ in range(2):
        layer.products.clear()
        layer.others.clear()
        run(pipe, torch.randn(4, 3, requires_grad=True))
    if run is forward:  # else stage 0 may be computing again already
        assert look[-1] == (1, 0)
    assert layer.told[-2:] == [(True, False), (False, True)]
    assert layer.addresses[-2] == layer.addresses[-1]  # the very tensor
    assert gone(layer.products)


# --- the same result -------------------------------------------------------------------------


class Draws(nn.Module):
    """Draws twice: a policy may save one of the two."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.5)).sin() * x.tanh()


@every_driver
@pytest.mark.parametrize("saved", [ops.rand_like.default, ops.bernoulli.default, ops.tanh.default])
def test_what_is_computed_again_draws_what_it_drew_also_behind_what_is_saved(saved, run):
    results = []
    for checkpoint in ("never", "always", Selective([saved])):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 3), Draws(), Draws(), nn.Linear(3, 3), Draws())
        pipe = Pipe(layers, [3, 2], devices=FOUR[:2], chunks=3, checkpoint=checkpoint)
        for _ in range(2):
            torch.manual_seed(1)
            x = torch.randn(6, 3, requires_grad=True)
            run(pipe, x)
        results.append([x.grad, *(p.grad for p in pipe.parameters()), torch.rand(3)])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


# --- what users do with it -------------------------------------------------------------------


def test_an_exception_while_recomputing_names_the_layer_and_the_pipe_goes_on():
    class Fails(nn.Module):
        fail = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fail and is_recomputing():
                raise ValueError("bad")
            return x.exp()

    fails = Fails()
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), fails), [2], devices=["cpu:0"], checkpoint=[1])
    for run in (forward, train):
        with pytest.raises(ValueError, match="bad") as caught:
            run(pipe)
        assert "in layer 1 ('1': Fails)" in "\n".join(caught.value.__notes__)
    fails.fail = False
    forward(pipe)
    train(pipe)


def test_a_policy_is_asked_on_the_workers_and_its_exception_is_the_callers():
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        raise ValueError("mine")

    pipe = pipe_of(Selective(policy))
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            pipe(torch.randn(4, 3))
    pipe.checkpoint = "never"
    forward(pipe)


def test_it_can_be_set_and_the_balance_cuts_what_is_named():
    pipe = pipe_of("never")
    pipe.checkpoint = [(2, 3, 4)]
    assert pipe.checkpoint == ((2, 3, 4),)
    for balance in ([4, 2], [3, 3]):
        pipe.balance = balance
        for layer in pipe:
            layer.told.clear()
        forward(pipe)
        assert again(pipe) == [0, 0, 2, 2, 2, 0]
    pipe.eval()
    forward(pipe)
    assert again(pipe) == [0, 0, 2, 2, 2, 0]


@pytest.mark.parametrize("checkpoint", [[1, (2, 3)], Selective(by_function)])
def test_copies_and_pickles_keep_it(checkpoint):
    pipe = pipe_of(checkpoint)
    for copied in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert repr(copied.checkpoint) == repr(pipe.checkpoint)
        forward(copied)
        assert again(copied) == (
            [2] * 6 if isinstance(checkpoint, Selective) else [0, 2, 2, 2, 0, 0]
        )


def test_a_policy_under_autocast_whose_casts_of_weights_are_cached():
    pipe = pipe_of(Selective(PRODUCTS), chunks=4)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.train_batch(torch.randn(4, 3), loss_fn=lambda y: y.float().mean())
        loss = pipe(torch.randn(4, 3)).float().sum()
    loss.backward()
    assert all(layer.linear.weight.grad is not None for layer in pipe)


def test_two_backwards_through_one_graph_recompute_twice():
    pipe = pipe_of([1])
    loss = pipe(torch.randn(4, 3)).sum()
    loss.backward(retain_graph=True)
    grads = [p.grad.clone() for p in pipe.parameters()]
    pipe.zero_grad()
    loss.backward()
    assert_same([p.grad for p in pipe.parameters()], grads)
    assert pipe[1].again == 4


def test_a_policy_is_printed_and_refused():
    assert repr(Selective([ops.mm.default])) == f"Selective([{ops.mm.default!r}])"
    context_fn = partial(create_selective_checkpoint_contexts, PRODUCTS)
    assert isinstance(pipe_of(context_fn).checkpoint, Selective)
    with pytest.raises(TypeError, match="must be a list of operations"):
        Selective(3)
    with pytest.raises(ValueError, match="OpOverload"):
        Selective([torch.mm])
