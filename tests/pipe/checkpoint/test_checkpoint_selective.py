"""``checkpoint=Selective(...)``: what is saved is not computed again."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from syncpipe import Pipe, Selective, is_checkpointing, is_recomputing
from tests.support.running import assert_same, beside, trained
from tests.support.training import FOUR, KINDS, RUNS
from tests.support.watched import Memory, alive, gone

ops = torch.ops.aten
PRODUCTS = [ops.mm.default, ops.addmm.default]


def by_function(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "list": Selective(PRODUCTS),
    "function": Selective(by_function),
    "context_fn": partial(create_selective_checkpoint_contexts, PRODUCTS),
}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.0)) for _ in range(4)]
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_result_is_that_of_the_plain_model(way):
    pipe, run, plain = beside(WAYS[way], mlp(), (2, 2))
    x = torch.randn(8, 3)
    for _ in range(2):
        assert_same(trained(pipe, pipe, x), trained(run, plain, x))


@pytest.mark.parametrize("run", KINDS)
def test_train_batch_gives_what_it_gives_without(run):
    options, devices = RUNS[run]
    results = []
    for checkpoint in ("never", Selective(PRODUCTS), ["never", Selective(by_function)] * 2):
        pipe = Pipe(mlp(), [1] * 4, devices=devices, chunks=3, checkpoint=checkpoint)
        torch.manual_seed(1)
        x = torch.randn(6, 3, requires_grad=True)
        loss = pipe.train_batch(x, loss_fn=lambda y: y.square().mean(), **options)
        results.append([loss, x.grad, *(p.grad for p in pipe.parameters())])
    for result in results[1:]:
        if run == "zb_h1":
            assert all(torch.allclose(a, b) for a, b in zip(result, results[0], strict=True))
        else:
            assert_same(result, results[0])


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


@pytest.mark.parametrize("driver", ["forward", "train"])
def test_what_is_saved_is_kept_and_comes_back_and_nothing_else(driver):
    layer, look = Products(), []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            look.append((alive(layer.products), alive(layer.others)))
            return x.clone()

    pipe = Pipe(nn.Sequential(layer, nn.Linear(3, 3), Look()), [2, 1], devices=FOUR[:2], chunks=1,
                checkpoint=[Selective([ops.mm.default]), "never"])  # fmt: skip
    for _ in range(2):
        x = torch.randn(4, 3, requires_grad=True)
        if driver == "forward":
            pipe(x).sum().backward()
        else:
            pipe.train_batch(x, loss_fn=torch.sum)
    if driver == "forward":  # else stage 0 may be computing again already
        assert look[-1] == (1, 0)
    assert layer.told[-2:] == [(True, False), (False, True)]
    assert layer.addresses[-2] == layer.addresses[-1]  # the very tensor
    assert gone(layer.products)


class Draws(nn.Module):
    """Draws twice: a policy may save one of the two."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.5)).sin() * x.tanh()


@pytest.mark.parametrize("driver", ["forward", "train"])
@pytest.mark.parametrize("saved", [ops.rand_like.default, ops.bernoulli.default, ops.tanh.default])
def test_what_is_computed_again_draws_what_it_drew_also_behind_what_is_saved(saved, driver):
    results = []
    for checkpoint in ("never", "always", Selective([saved])):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 3), Draws(), Draws(), nn.Linear(3, 3), Draws())
        pipe = Pipe(layers, [3, 2], devices=FOUR[:2], chunks=3, checkpoint=checkpoint)
        for _ in range(2):
            torch.manual_seed(1)
            x = torch.randn(6, 3, requires_grad=True)
            if driver == "forward":
                pipe(x).square().sum().backward()
            else:
                pipe.train_batch(x, loss_fn=lambda y: y.square().mean())
        results.append([x.grad, *(p.grad for p in pipe.parameters()), torch.rand(3)])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_buffers_change_once_for_each_micro_batch():
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    pipe, run, plain = beside(Selective(PRODUCTS), layers, (2, 2))
    x = torch.randn(8, 3)
    for _ in range(2):
        assert_same(trained(pipe, pipe, x), trained(run, plain, x))


def test_a_policy_is_asked_on_the_workers_and_its_exception_is_the_callers():
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        raise ValueError("mine")

    pipe = Pipe(mlp(), [2, 2], devices=FOUR[:2], chunks=2, checkpoint=Selective(policy))
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            pipe(torch.randn(4, 3))
    pipe.checkpoint = "never"
    pipe(torch.randn(4, 3)).sum().backward()


def test_it_is_printed_copied_and_refused():
    assert repr(Selective([ops.mm.default])) == f"Selective([{ops.mm.default!r}])"
    pipe = Pipe(mlp(), [2, 2], devices=FOUR[:2], checkpoint=WAYS["context_fn"])
    assert isinstance(pipe.checkpoint, Selective)
    pipe.checkpoint = Selective(by_function)
    again = pickle.loads(pickle.dumps(pipe))
    again(torch.randn(4, 3)).sum().backward()
    with pytest.raises(TypeError, match="must be a list of operations"):
        Selective(3)
    with pytest.raises(ValueError, match="OpOverload"):
        Selective([torch.mm])
