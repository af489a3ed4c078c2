"""The decorator: what it makes of a class, what a forward may do, and namespaces."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import syncpipe.skip
from syncpipe import Pipe
from syncpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from syncpipe.skip.skippable import is_skippable, pops, stashes
from syncpipe.skip.store import use_store
from tests.support.skips import (
    Around,
    Many,
    Receive,
    Send,
    SendConv,
    Twice,
    X,
    layer_of,
    roundtrip,
)

NS = Namespace()


def stashed_by(layer: nn.Module, x: Any = X) -> dict[Any, Any]:
    """What a layer stashes when it is called."""
    store: dict[Any, Any] = {}
    with use_store(store):
        layer(x)
    return store


def test_public_names():
    expected = {"skippable", "stash", "pop", "verify_skippables", "Namespace"}
    assert set(syncpipe.skip.__all__) == expected


# --- what it makes of a class --------------------------------------------------------------------


def test_class_is_changed_in_place():
    class Layer(nn.Module):
        """What it is for."""

        scale = 3

        def forward(self, x: torch.Tensor, *more: Any, scale: int = 1):
            """What it does."""
            yield stash("v", x)
            return x * scale + sum(more)

    signature = inspect.signature(Layer.forward)
    decorated = skippable(stash=["v"])(Layer)
    assert decorated is Layer
    assert (Layer.__doc__, Layer.scale) == ("What it is for.", 3)
    assert Layer.forward.__doc__ == "What it does."
    assert inspect.signature(Layer.forward) == signature
    assert torch.equal(Layer()(X, 1, 2, scale=3), X * 3 + 3)
    assert "0.conv.weight" in nn.Sequential(SendConv()).state_dict()


def test_declared_skips_in_order():
    assert stashes(Many()) == [(None, "a"), (None, "b")]
    assert pops(Many()) == [(None, "c")]
    around = Around(inner=Send())
    assert stashes(around) == pops(around) == []
    assert [is_skippable(m) for m in (around, around.inner)] == [False, True]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip])
def test_copies_work(duplicate):
    model = nn.Sequential(SendConv().isolate(NS), Receive().isolate(NS))
    assert torch.equal(duplicate(model)(X), model(X))


@skippable(stash=["other", "skip"])
class Both(Send):
    """Stashes, and calls the forward that it overrides, which does so as well."""

    def forward(self, x):
        yield stash("other", x)
        return super().forward(x)


@skippable(stash=["skip"])
class Calls(Send):
    """Is no generator, but calls one."""

    def forward(self, x):
        return super().forward(2 * x)


@skippable(stash=["other"])
class Other(Send):
    def forward(self, x):
        yield stash("other", x)
        return x


@skippable()
class Silent(Send):
    def forward(self, x):
        return 2 * x


@skippable()
class Rarely(nn.Module):
    def forward(self, x):
        if x is None:
            yield pop("never")
        return 2 * x


class Inherits(Send):
    pass


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Both, {"skip", "other"}),
        (Calls, {"skip"}),
        (Other, {"other"}),
        (Silent, set()),
        (Rarely, set()),
        (Inherits, {"skip"}),
    ],
)
def test_classes_and_subclasses_stash_what_they_declare(kind, names):
    layer = kind().isolate(NS)
    assert set(stashes(layer)) == set(stashed_by(layer)) == {(NS, name) for name in names}
    assert is_skippable(layer)


def test_a_forward_that_overrides_one_with_skips_has_to_be_decorated():
    class Child(Send):
        def forward(self, x):
            return super().forward(2 * x)

    class Grandchild(Child):
        pass

    for layer in Child(), Grandchild():
        with pytest.raises(TypeError, match=rf"decorate {type(layer).__name__} with @skippable"):
            Pipe(nn.Sequential(layer, Twice(), Receive()), [1, 1, 1])


def test_a_skip_that_a_subclass_does_not_stash_is_a_clear_error():
    @skippable(stash=["skip"])
    class Says(Send):
        def forward(self, x):
            return 2 * x

    pipe = Pipe(nn.Sequential(Says(), Twice(), Receive()), [1, 1, 1], devices=["cpu:0"] * 3)
    with pytest.raises(
        RuntimeError, match=r"layer 0 \('0': Says\).*did not stash 'skip'.*@skippable"
    ):
        pipe(X)


def test_new_names_keep_what_is_wrapped_around_the_generator():
    class Base(nn.Module):
        name = "first"

        @torch.no_grad()
        def forward(self, x):
            yield stash(self.name, x)
            return 2 * x

    skippable(stash=["first"])(Base)

    @skippable(stash=["second"])
    class Child(Base):
        name = "second"

    x = X.clone().requires_grad_()
    assert not Child()(x).requires_grad
    assert set(stashed_by(Base())) == {(None, "first")}
    assert set(stashed_by(Child())) == {(None, "second")}


NO_NAMES: Any = [[1], ["x", None], [b"x"], 7, None, nn.Module]


@pytest.mark.parametrize(
    ("decorate", "error", "message"),
    [
        *[(lambda n=n: skippable(stash=n), TypeError, "list of names") for n in NO_NAMES],
        (lambda: skippable(stash="x"), TypeError, r"write stash=\['x'\]"),
        (lambda: skippable(pop="x"), TypeError, r"write pop=\['x'\]"),
        (lambda: skippable(pop=["x", "y", "x"]), ValueError, "'x' more than once"),
        (lambda: skippable()(int), TypeError, r"nn\.Module"),
        (lambda: skippable()(nn.Linear(1, 1)), TypeError, r"nn\.Module"),
        (lambda: skippable(pop=["x"])(Send), TypeError, "skippable already"),
        (
            lambda: skippable(stash=["x"])(type("Layer", (nn.Identity,), {})),
            TypeError,
            r"Layer.*not a generator function",
        ),
        (
            lambda: skippable()(type("Layer", (nn.Module,), {"isolate": None})),
            TypeError,
            "'isolate', which @skippable adds",
        ),
    ],
)
def test_wrong_decorations_are_refused(decorate, error, message):
    with pytest.raises(error, match=message):
        decorate()


# --- what a forward may do -----------------------------------------------------------------------


def test_gradient_flows_through_the_skip():
    x = X.clone().requires_grad_()
    y = nn.Sequential(Send(), Twice(), Receive())(x)
    y.sum().backward()
    assert torch.equal(y, 3 * X)
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


@pytest.mark.parametrize("value", [None, 7, (1, "two"), {"k": X}])
def test_any_value_can_be_stashed_and_yield_stash_gives_none(value):
    def give(self, x):
        return (yield stash("v", value))

    def take(self, x):
        assert x is None
        return (yield pop("v"))

    model = nn.Sequential(layer_of(give, stash=["v"]), layer_of(take, pop=["v"]))
    assert model(X) is value


def test_bare_stash_and_pop_do_nothing():
    assert stashed_by(nn.Sequential(), stash("skip", X)) == {}
    pop("skip")


def test_layers_inside_a_skippable_layer_share_its_store():
    def forward(self, x):
        yield stash("skip", x)
        return Receive()(x)

    assert torch.equal(layer_of(forward, stash=["skip"])(X), 2 * X)


def test_compiled_models_and_layers_give_the_same():
    layers = Send(), Twice(), Receive()
    for model in (
        torch.compile(nn.Sequential(*layers), backend="eager"),
        nn.Sequential(*(torch.compile(layer, backend="eager") for layer in layers)),
    ):
        store: dict[Any, Any] = {}
        with use_store(store):
            assert torch.equal(model(X), 3 * X)
        assert store == {}
    verify_skippables(model)
    torch.compiler.reset()


@pytest.mark.parametrize("thing", [None, X, "x", stash, pop])
def test_yielding_something_else(thing):
    def forward(self, x):
        yield thing

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


def test_pop_of_what_nobody_stashed_names_the_skip():
    with use_store({(None, "skip"): X}), pytest.raises(RuntimeError) as caught:
        Receive().isolate(NS)(X)
    assert f"Receive pops skip 'skip' in {NS!r}, but no layer before it" in str(caught.value)


def test_exceptions_travel_unchanged_and_the_generator_is_closed():
    error, closed = ValueError("mine"), []

    def forward(self, x):
        try:
            yield stash("a", x)
            raise error
        finally:
            closed.append(True)

    with pytest.raises(ValueError, match="mine") as caught:
        layer_of(forward, stash=["a"])(X)
    assert caught.value is error
    assert caught.traceback[-1].frame.code.raw is forward.__code__
    assert error.__cause__ is error.__context__ is None

    def pops_nothing(self, x):
        try:
            yield pop("nothing")
        finally:
            closed.append(True)

    with pytest.raises(RuntimeError) as failed:
        layer_of(pops_nothing, pop=["nothing"])(X)
    assert closed == [True, True], f"open for as long as the traceback of {failed.value!r} is"


# --- namespaces ----------------------------------------------------------------------------------


def test_namespaces_differ_and_draw_nothing():
    before = torch.get_rng_state()
    assert len({Namespace() for _ in range(100)}) == 100
    assert repr(Namespace()) != repr(NS)
    assert repr(NS).startswith("Namespace(")
    assert torch.equal(before, torch.get_rng_state())


PICKLES = [
    lambda n, p=p: pickle.loads(pickle.dumps(n, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)
]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, *PICKLES])
def test_copy_of_a_namespace_equals_it(duplicate):
    assert duplicate(NS) == NS
    assert hash(duplicate(NS)) == hash(NS)
    assert duplicate(Namespace()) != NS


def test_isolate_moves_some_names_or_all_of_one_layer():
    other, layer = Namespace(), Many()
    assert layer.isolate(NS, only=["a"]).isolate(other, only=["c"]) is layer
    assert stashes(layer) == [(NS, "a"), (None, "b")]
    assert pops(layer) == [(other, "c")]
    assert stashes(layer.isolate(NS)) == [(NS, "a"), (NS, "b")]
    assert stashes(Send().isolate(NS, only=[])) == stashes(Send()) == [(None, "skip")]
    assert Send().isolate(NS).state_dict() == {}


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, roundtrip])
def test_isolated_layers_match_after_they_were_copied_one_by_one(duplicate):
    send, receive = (duplicate(layer.isolate(NS)) for layer in (Send(), Receive()))
    verify_skippables(nn.Sequential(send, receive))
    other = duplicate(send).isolate(Namespace())
    assert stashes(send) == [(NS, "skip")] != stashes(other)


@pytest.mark.parametrize(
    ("namespace", "only", "error", "message"),
    [
        (NS, "a", TypeError, r"only=\['a'\]"),
        (NS, ["a", "z"], ValueError, r"Many does not declare \['z'\]"),
        ("ns", None, TypeError, "Namespace"),
    ],
)
def test_isolate_refuses(namespace, only, error, message):
    with pytest.raises(error, match=message):
        Many().isolate(namespace, only=only)


def test_namespaces_keep_equal_names_apart():
    inner = Namespace()
    model = nn.Sequential(
        Send().isolate(NS), Twice(), Send().isolate(inner), Twice(), Receive().isolate(inner),
        Receive().isolate(NS),
    )  # fmt: skip
    verify_skippables(model)
    assert torch.equal(model(X), 7 * X)
