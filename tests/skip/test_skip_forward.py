"""Layers with skips at work, and what a forward may not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from syncpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from syncpipe.skip.skippable import is_skippable
from syncpipe.skip.store import use_store
from tests.support.skips import (
    Receive,
    Send,
    Twice,
    X,
    layer_of,
)


def test_skip_in_a_plain_sequential():
    assert torch.equal(nn.Sequential(Send(), Twice(), Receive())(X), 3 * X)


def test_gradient_flows_through_the_skip():
    x = X.clone().requires_grad_()
    nn.Sequential(Send(), Twice(), Receive())(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


@pytest.mark.parametrize("value", [None, 7, (1, "two"), {"k": X}])
def test_any_value_can_be_stashed(value):
    @skippable(stash=["v"])
    class Give(nn.Module):
        def forward(self, x):
            yield stash("v", value)
            return x

    @skippable(pop=["v"])
    class Take(nn.Module):
        def forward(self, x):
            return (yield pop("v"))

    assert nn.Sequential(Give(), Take())(X) is value


def test_forward_takes_all_kinds_of_arguments():
    @skippable(stash=["v"])
    class Layer(nn.Module):
        def forward(self, x, *more, scale=1):
            yield stash("v", None)
            return x * scale + sum(more)

    assert torch.equal(Layer()(X, 1, 2, scale=3), X * 3 + 3)


def test_yield_stash_gives_back_none():
    @skippable(stash=["v"], pop=["w"])
    class Layer(nn.Module):
        def forward(self, x):
            yield pop("w")
            return (yield stash("v", x))

    with use_store({(None, "w"): 1}):
        assert Layer()(X) is None


def test_bare_stash_and_pop_do_nothing():
    store: dict[Any, Any] = {}
    with use_store(store):
        stash("skip", X)
        pop("skip")
    assert store == {}


def test_hooks_run():
    seen = []
    layer = Send()
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    layer(X)
    assert seen[0] is X


def test_generator_without_declared_names():
    @skippable()
    class Layer(nn.Module):
        def forward(self, x):
            if x is None:
                yield pop("never")
            return 2 * x

    assert torch.equal(Layer()(X), 2 * X)


def test_plain_forward_without_declared_names():
    @skippable()
    class Layer(nn.Module):
        def forward(self, x):
            return 2 * x

    assert torch.equal(Layer()(X), 2 * X)
    assert is_skippable(Layer())


def test_layers_inside_a_skippable_layer_share_its_store():
    @skippable(stash=["skip"])
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Receive()

        def forward(self, x):
            yield stash("skip", x)
            return self.inner(x)

    assert torch.equal(Outer()(X), 2 * X)


def test_compiled_model_gives_the_same():
    model = nn.Sequential(Send(), Twice(), Receive())
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(X), model(X))
    torch.compiler.reset()


def test_compiled_layers_give_the_same():
    layers = [torch.compile(layer, backend="eager") for layer in (Send(), Twice(), Receive())]
    model = nn.Sequential(*layers)
    verify_skippables(model)
    store: dict[Any, Any] = {}
    with use_store(store):
        assert torch.equal(model(X), 3 * X)
    assert store == {}
    torch.compiler.reset()


# --- wrong forwards ------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, X, "x", stash, pop])
def test_yielding_something_else(thing):
    def forward(self, x):
        yield thing
        return x

    with pytest.raises(TypeError, match=r"Culprit\.forward yielded"):
        layer_of(forward)(X)


@pytest.mark.parametrize(
    ("commands", "declared", "message"),
    [
        ([stash("b", 0)], {"stash": ["a"]}, r"stashes 'b' .*stash=\['a', 'b'\]"),
        ([pop("a")], {"stash": ["a"]}, r"pops 'a' .*pop=\['a'\]"),
        ([stash("a", 0), stash("a", 0)], {"stash": ["a"]}, "stashes 'a' twice"),
        ([pop("a"), pop("a")], {"pop": ["a"]}, "pops 'a' twice"),
        ([], {"stash": ["a"]}, r".*did not stash \['a'\] \(stash None"),
        ([], {"pop": ["a"]}, r".*did not pop \['a'\]"),
    ],
)
def test_what_is_yielded_must_be_what_is_declared(commands, declared, message):
    def forward(self, x):
        for command in commands:
            _ = yield command  # `yield from` a list could not be sent a value
        return x

    store = {(None, "a"): X} if "pop" in declared else {}
    with use_store(store), pytest.raises(RuntimeError, match=f"Culprit {message}"):
        layer_of(forward, **declared)(X)


def test_pop_of_what_nobody_stashed():
    with pytest.raises(RuntimeError, match="Receive pops skip 'skip', but no layer before it"):
        Receive()(X)


def test_pop_of_what_nobody_stashed_names_the_namespace():
    ns = Namespace()
    with use_store({(None, "skip"): X}), pytest.raises(RuntimeError) as caught:
        Receive().isolate(ns)(X)
    assert repr(ns) in str(caught.value)


def test_generator_is_closed_when_a_pop_fails():
    closed = []

    def forward(self, x):
        try:
            yield pop("a")
        finally:
            closed.append(True)

    with pytest.raises(RuntimeError) as caught:
        layer_of(forward, pop=["a"])(X)
    assert closed == [True], f"open for as long as the traceback of {caught.value!r} is"


def test_exceptions_travel_unchanged():
    error = ValueError("mine")

    def forward(self, x):
        yield stash("a", x)
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        layer_of(forward, stash=["a"])(X)
    assert caught.value is error
    assert caught.traceback[-1].frame.code.raw is forward.__code__
    assert error.__cause__ is None
    assert error.__context__ is None
