"""``@skippable``, namespaces, stores, and what ``verify_skippables`` says."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from syncpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from syncpipe.skip.skippable import is_skippable, pops, stashes
from syncpipe.skip.store import use_store
from tests.support.running import in_threads
from tests.support.skips import Around, Receive, Send, SendConv, make
from tests.support.training import assert_trains_as

NS, X = Namespace(), torch.arange(6.0).reshape(3, 2)


@skippable(stash=["a", "b"], pop=["c"])
class Many(nn.Module):
    def forward(self, x):
        c = yield pop("c")
        yield stash("a", x)
        yield stash("b", c)
        return x


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


class NestedPipe(Around):
    _syncpipe_skips_are_internal = True


def roundtrip(module):
    return pickle.loads(pickle.dumps(module))


def layer_of(function, **names):
    return skippable(**names)(type("Culprit", (nn.Module,), {"forward": function}))()


def stashed_by(layer: nn.Module, x: Any = X) -> dict[Any, Any]:
    """What a layer stashes when it is called."""
    store: dict[Any, Any] = {}
    with use_store(store) as entered:
        assert entered is store
        layer(x)
    return store


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

    assert not Child()(X.clone().requires_grad_()).requires_grad
    assert set(stashed_by(Base())) == {(None, "first")}
    assert set(stashed_by(Child())) == {(None, "second")}


def test_what_a_pipe_makes_of_overrides():
    class Child(Send):
        def forward(self, x):
            return super().forward(2 * x)

    class Grandchild(Child):
        pass

    for layer in Child(), Grandchild():
        with pytest.raises(TypeError, match=rf"decorate {type(layer).__name__} with @skippable"):
            Pipe(nn.Sequential(layer, Twice(), Receive()), [1, 1, 1])

    @skippable(stash=["skip"])
    class Says(Send):
        def forward(self, x):
            return 2 * x

    pipe = Pipe(nn.Sequential(Says(), Twice(), Receive()), [1, 1, 1], devices=["cpu:0"] * 3)
    message = r"layer 0 \('0': Says\).*did not stash 'skip'.*@skippable"
    with pytest.raises(RuntimeError, match=message):
        pipe(X)


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
            lambda: skippable()(type("Own", (nn.Identity,), {"isolate": 7})),
            TypeError,
            "Own has an isolate of its own.*rename it",
        ),
        (
            lambda: skippable(stash=["x"])(type("Layer", (nn.Identity,), {})),
            TypeError,
            r"Layer.*not a generator function",
        ),
        (lambda: Many().isolate(NS, only="a"), TypeError, r"only=\['a'\]"),
        (
            lambda: Many().isolate(NS, only=["a", "z"]),
            ValueError,
            r"Many does not declare \['z'\]",
        ),
        (lambda: Many().isolate("ns"), TypeError, "Namespace"),
    ],
)
def test_wrong_arguments_are_refused(decorate, error, message):
    with pytest.raises(error, match=message):
        decorate()


# --- what a forward may do -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 7, (1, "two"), {"k": X}])
def test_any_value_can_be_stashed_and_yield_stash_gives_none(value):
    def give(self, x):
        return (yield stash("v", value))

    def take(self, x):
        assert x is None
        return (yield pop("v"))

    model = nn.Sequential(layer_of(give, stash=["v"]), layer_of(take, pop=["v"]))
    assert model(X) is value


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


@pytest.mark.parametrize(
    ("commands", "declared", "error", "message"),
    [
        *[([no], {}, TypeError, r"Culprit\.forward yielded") for no in (None, X, "x", stash, pop)],
        ([stash("b", 0)], {"stash": ["a"]}, RuntimeError, r"stashes 'b' .*stash=\['a', 'b'\]"),
        ([pop("a")], {"stash": ["a"]}, RuntimeError, r"pops 'a' .*pop=\['a'\]"),
        ([stash("a", 0)] * 2, {"stash": ["a"]}, RuntimeError, "Culprit stashes 'a' twice"),
        ([pop("a")] * 2, {"pop": ["a"]}, RuntimeError, "Culprit pops 'a' twice"),
        ([], {"stash": ["a"]}, RuntimeError, r"Culprit.*did not stash 'a': stash None"),
        ([], {"pop": ["a"]}, RuntimeError, r"Culprit.*did not pop 'a'"),
    ],
)
def test_what_is_yielded_must_be_what_is_declared(commands, declared, error, message):
    def forward(self, x):
        for command in commands:
            _ = yield command  # `yield from` a list could not be sent a value
        return x

    store = {(None, "a"): X} if "pop" in declared else {}
    with use_store(store), pytest.raises(error, match=message):
        layer_of(forward, **declared)(X)


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
        layer_of(pops_nothing, pop=["nothing"]).isolate(NS)(X)
    assert f"pops skip 'nothing' in {NS!r}, but no layer before it" in str(failed.value)
    assert closed == [True, True], "open for as long as the traceback is"


# --- namespaces ----------------------------------------------------------------------------------


PICKLES = [
    lambda n, p=p: pickle.loads(pickle.dumps(n, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)
]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, *PICKLES])
def test_namespaces_differ_but_for_their_copies_and_draw_nothing(duplicate):
    before = torch.get_rng_state()
    assert len({Namespace() for _ in range(100)}) == 100
    assert torch.equal(before, torch.get_rng_state())
    assert duplicate(NS) == NS
    assert hash(duplicate(NS)) == hash(NS)
    assert duplicate(Namespace()) != NS
    assert repr(Namespace()) != repr(NS)


def test_isolate_moves_some_names_or_all_of_one_layer():
    other, layer = Namespace(), Many()
    assert stashes(layer) == [(None, "a"), (None, "b")]
    assert layer.isolate(NS, only=["a"]).isolate(other, only=["c"]) is layer
    assert stashes(layer) == [(NS, "a"), (None, "b")]
    assert pops(layer) == [(other, "c")]
    assert stashes(layer.isolate(NS)) == [(NS, "a"), (NS, "b")]
    assert stashes(Send().isolate(NS, only=[])) == stashes(Send()) == [(None, "skip")]
    assert Send().isolate(NS).state_dict() == {}
    around = Around(inner=Send())
    assert stashes(around) == pops(around) == []
    assert [is_skippable(m) for m in (around, around.inner)] == [False, True]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, roundtrip])
def test_isolated_layers_match_after_they_were_copied_one_by_one(duplicate):
    send, receive = (duplicate(layer.isolate(NS)) for layer in (Send(), Receive()))
    model = nn.Sequential(send, receive)
    verify_skippables(model)
    assert torch.equal(model(X), 2 * X)
    other = duplicate(send).isolate(Namespace())
    assert stashes(send) == [(NS, "skip")] != stashes(other)


# --- where values wait, and for how long ---------------------------------------------------------


def test_stores_nest_and_lose_what_is_popped():
    outer: dict[Any, Any] = {}
    inner: dict[Any, Any] = {}
    with use_store(outer):
        with use_store(inner):
            Send()(1)
        Send()(2)
    with pytest.raises(ZeroDivisionError), use_store(inner):
        raise ZeroDivisionError
    Send()(X)  # into no store
    with use_store({}), pytest.raises(RuntimeError):
        Receive()(X)
    assert (inner, outer) == ({(None, "skip"): 1}, {(None, "skip"): 2})
    with use_store(outer):
        assert Receive()(1) == 3
    assert outer == {}


def test_threads_use_their_own_stores():
    send, receive = Send(), Receive()

    def work(number: int) -> int:
        for _ in range(50):
            if number % 2:
                send(number)
                result = receive(0)
            else:
                with use_store({}):
                    send(number)
                    result = receive(0)
        return result

    assert in_threads(work, *range(4)) == [0, 1, 2, 3]


class Value:
    """Something that can be weakly referenced."""


def test_a_value_outside_of_a_pipe_dies_with_the_layer_or_when_another_one_stashes():
    layer, value = Send().isolate(namespace := Namespace()), Value()
    layer(value)
    seen, name = weakref.ref(value), weakref.ref(namespace)
    del value, namespace
    gc.collect()
    assert seen() is not None
    del layer
    gc.collect()
    assert seen() is None
    assert name() is None
    with pytest.raises(RuntimeError, match="no layer before it"):
        Receive()(0)
    first, second, value = Send(), Send(), Value()
    seen = weakref.ref(value)
    first(value)
    second(1)
    del value
    gc.collect()
    assert seen() is None
    assert Receive()(0) == 1


# --- what does not fit ---------------------------------------------------------------------------


def faults(*layers: nn.Module) -> list[str]:
    """The lines of what verify_skippables has to say."""
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(*layers))
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


class Undecorated(Send):
    def forward(self, x):
        yield stash("skip", x)


class Generator(nn.Module):
    def forward(self, x):
        yield x


AGAIN = "layer 1 (Send) stashes 'skip' again, after layer 0 (Send)"
LOST = "stashes 'skip', but no later layer pops it"
UNSTASHED = "pops 'skip', but no earlier layer stashes it"
FAULTS: list[tuple[list[nn.Module], list[str]]] = [
    ([Send(), Send(), Receive()], [AGAIN]),
    ([*[Send()] * 2, Receive()], [AGAIN]),  # one layer used twice
    (
        [Send(), Receive(), Send(), Receive()],
        [
            "layer 2 (Send) stashes 'skip' again, after layer 0 (Send)",
            "layer 3 (Receive) pops 'skip' again, after layer 1 (Receive)",
        ],
    ),
    ([make(["a"], ["a"])], ["layer 0 (Layer) declares 'a' both as stash and as pop"]),
    ([Receive(), Send()], [f"layer 0 (Receive) {UNSTASHED}", f"layer 1 (Send) {LOST}"]),
    (
        [Twice(), Send().isolate(NS)],
        [f"layer 1 (Send) stashes 'skip' in {NS!r}, but no later layer pops it"],
    ),
    ([Around(deep=Around(send=Send()))], [f"layer 0 (Around) {LOST}"]),
    (
        [Around(deep=Around(odd=make(["a"], ["a"])))],
        [
            "layer 0 (Around), in its submodule 'deep.odd' (Layer), declares 'a' both as stash and "
            "as pop"
        ],
    ),
    (
        [Send(), Around(send=Send(), receive=Receive()), Receive()],
        [
            "layer 1 (Around) stashes and pops 'skip' inside itself while another 'skip' is on its "
            "way from layer 0 (Send) to layer 2 (Receive)"
        ],
    ),
    (
        [Undecorated(), Generator()],
        [
            "layer 0 (Undecorated) has a generator as forward, but no @skippable of its own",
            f"layer 0 (Undecorated) {LOST}",
            "layer 1 (Generator) has a generator as forward, but no @skippable of its own",
        ],
    ),
]


@pytest.mark.parametrize(("layers", "expected"), FAULTS)
def test_verify_says_what_does_not_match_in_the_order_of_the_layers(layers, expected):
    assert faults(*layers) == expected


def test_verify_names_layers_takes_a_sequential_and_accepts_what_matches():
    with pytest.raises(TypeError, match=r"layer 1 'middle' \(Send\) stashes"):
        verify_skippables(nn.Sequential(OrderedDict(start=Twice(), middle=Send())))
    for thing in Send(), [Send(), Receive()], nn.ModuleList([Twice()]):
        with pytest.raises(TypeError, match=r"nn\.Sequential"):
            verify_skippables(thing)
    send, nested, block = Send(), NestedPipe(send=Send()), Around(send=Send(), receive=Receive())
    for layers in (
        [],
        [Around(one=send, two=send), Receive()],  # a submodule that is shared counts once
        [nested, Around(inner=nested)],
        [block, Around(send=Send(), receive=Receive())],
    ):
        verify_skippables(nn.Sequential(*layers))


@pytest.mark.parametrize("balance", [[2, 2, 3], [2, 5]])
def test_gradients_of_what_is_stashed_and_returned_are_added_in_the_plain_order(balance):
    popping = make(popped=["a"]), make(popped=["b"])
    parts = make(["a", "b"]), nn.Linear(7, 7), popping[0], nn.Linear(7, 7), popping[1], nn.Tanh()
    model = nn.Sequential(nn.Linear(7, 7), *parts)
    pipe = Pipe(copy.deepcopy(model), balance, chunks=2)
    assert_trains_as(pipe, model, torch.randn(10, 7), loss_fn=torch.mean)
