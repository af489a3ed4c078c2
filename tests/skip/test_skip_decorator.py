"""The decorator: what it makes of a class and its subclasses, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import nn

import syncpipe.skip
from syncpipe.skip import Namespace, skippable, stash, verify_skippables
from syncpipe.skip.skippable import is_skippable, pops, stashes
from syncpipe.skip.store import use_store
from tests.support.skips import (
    Around,
    Many,
    Receive,
    Send,
    SendConv,
    X,
    roundtrip,
)


def test_public_names():
    expected = {"skippable", "stash", "pop", "verify_skippables", "Namespace"}
    assert set(syncpipe.skip.__all__) == expected
    assert not hasattr(syncpipe.skip, "Declaration")


# --- what a module declares ----------------------------------------------------------------------


def test_declared_skips_in_order():
    assert stashes(Many()) == [(None, "a"), (None, "b")]
    assert pops(Many()) == [(None, "c")]


def test_ordinary_modules_declare_nothing():
    around = Around(inner=Send())
    assert stashes(around) == pops(around) == []
    assert not is_skippable(around)
    assert is_skippable(around.inner)


# --- the class stays the class -------------------------------------------------------------------


def test_class_is_changed_in_place():
    class Layer(nn.Module):
        """What it is for."""

        scale = 3

        def forward(self, x: torch.Tensor, *, flag: bool = False):
            """What it does."""
            yield stash("v", x)
            return x

    signature = inspect.signature(Layer.forward)
    decorated = skippable(stash=["v"])(Layer)
    assert decorated is Layer
    assert isinstance(Layer(), Layer)
    assert Layer.__doc__ == "What it is for."
    assert Layer.scale == 3
    assert Layer.forward.__doc__ == "What it does."
    assert inspect.signature(Layer.forward) == signature


def test_state_dict_has_no_extra_prefix():
    assert "0.conv.weight" in nn.Sequential(SendConv()).state_dict()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip])
def test_copies_work(duplicate):
    model = nn.Sequential(SendConv(), Receive())
    assert torch.equal(duplicate(model)(X), model(X))


def test_torch_save_and_load():
    model = nn.Sequential(SendConv().isolate(ns := Namespace()), Receive().isolate(ns))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), model(X))


# --- subclasses ----------------------------------------------------------------------------------


def test_subclass_inherits_the_skips():
    class Child(Send):
        pass

    assert stashes(Child()) == [(None, "skip")]
    assert torch.equal(nn.Sequential(Child(), Receive())(X), 2 * X)


def test_subclass_with_skips_of_its_own():
    @skippable(stash=["other"])
    class Child(Send):
        def forward(self, x):
            yield stash("other", x)
            return x

    store: dict[Any, Any] = {}
    with use_store(store):
        Child()(X)
    assert set(store) == {(None, "other")}
    assert stashes(Child()) == [(None, "other")]
    assert stashes(Send()) == [(None, "skip")]


def test_a_forward_that_overrides_one_with_skips_has_to_be_decorated():
    class Child(Send):
        def forward(self, x):
            return 2 * x

    class Grandchild(Child):
        pass

    for layer in Child(), Grandchild():
        with pytest.raises(TypeError, match=rf"decorate {type(layer).__name__} with @skippable"):
            verify_skippables(nn.Sequential(layer))
    declared = skippable()(Child)
    verify_skippables(nn.Sequential(declared()))
    assert stashes(declared()) == []
    assert torch.equal(nn.Sequential(declared())(X), 2 * X)


def test_plain_forward_of_a_subclass_that_calls_the_base():
    @skippable(stash=["skip"])
    class Child(Send):
        def forward(self, x):
            return Send.forward(self, 2 * x)

    model = nn.Sequential(Child(), Receive())
    verify_skippables(model)
    assert stashes(Child()) == [(None, "skip")]
    assert torch.equal(model(X), 4 * X)


def test_generator_of_a_subclass_that_calls_the_base_declares_the_skips_of_both():
    @skippable(stash=["other", "skip"])
    class Child(Send):
        def forward(self, x):
            yield stash("other", x)
            return super().forward(x)

    store: dict[Any, Any] = {}
    layer = Child().isolate(ns := Namespace())
    with use_store(store):
        layer(X)
    assert set(store) == set(stashes(layer)) == {(ns, "skip"), (ns, "other")}


def test_subclass_may_declare_other_names_for_the_same_generator():
    class Base(nn.Module):
        name = "first"

        def forward(self, x):
            yield stash(self.name, x)
            return x

    first = skippable(stash=["first"])(Base)

    @skippable(stash=["second"])
    class Second(first):
        name = "second"

    store: dict[Any, Any] = {}
    with use_store(store):
        Base()(X)
        Second()(X)
    assert set(store) == {(None, "first"), (None, "second")}


def test_new_names_keep_what_is_wrapped_around_the_generator():
    class Base(nn.Module):
        @torch.no_grad()
        def forward(self, x):
            yield stash("skip", x)
            return 2 * x

    skippable(stash=["skip"])(Base)

    @skippable(stash=["skip", "more"])
    class Child(Base):
        pass

    x = X.clone().requires_grad_()
    assert not Base()(x).requires_grad
    with pytest.raises(RuntimeError, match="more"):
        Child()(x)
    assert torch.is_grad_enabled()

    @skippable(stash=["skip"])
    class Same(Base):
        pass

    assert not Same()(x).requires_grad


# --- wrong decorations ---------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["stash", "pop"])
def test_a_string_is_no_list_of_names(argument):
    with pytest.raises(TypeError, match=rf"write {argument}=\['x'\]"):
        skippable(**{argument: "x"})


@pytest.mark.parametrize("names", [[1], ["x", None], [b"x"], 7, None])
def test_names_must_be_strings(names):
    with pytest.raises(TypeError, match="list of names"):
        skippable(stash=names)


def test_forgotten_parentheses():
    with pytest.raises(TypeError, match="list of names"):

        @skippable
        class Layer(nn.Module):
            pass


def test_name_listed_twice():
    with pytest.raises(ValueError, match="'x' more than once"):
        skippable(pop=["x", "y", "x"])


@pytest.mark.parametrize("thing", [int, lambda x: x, nn.Linear(1, 1)])
def test_only_modules_are_decorated(thing):
    with pytest.raises(TypeError, match=r"nn\.Module"):
        skippable()(thing)


def test_declared_names_need_a_generator():
    with pytest.raises(TypeError, match=r"Layer.*not a generator function"):

        @skippable(stash=["x"])
        class Layer(nn.Module):
            def forward(self, x):
                stash("x", x)
                return x


def test_declared_names_need_a_forward():
    with pytest.raises(TypeError, match="not a generator function"):
        skippable(stash=["x"])(type("Layer", (nn.Module,), {}))


def test_decorated_twice():
    with pytest.raises(TypeError, match="skippable already"):
        skippable(pop=["x"])(Send)


def test_own_attribute_isolate_is_not_overwritten():
    with pytest.raises(TypeError, match="isolate"):

        @skippable()
        class Layer(nn.Module):
            def isolate(self):
                pass
