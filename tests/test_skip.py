"""Skips: the decorator, the places where values wait, the checks, the layout."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import itertools
import pickle
import threading
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import syncpipe.skip
from syncpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from syncpipe.skip.layout import inspect_layout
from syncpipe.skip.skippable import is_skippable, pops, stashes
from syncpipe.skip.store import use_store


@skippable(stash=["skip"])
class Send(nn.Module):
    """Sends its input past the layers that follow."""

    def forward(self, x):
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Receive(nn.Module):
    def forward(self, x):
        return x + (yield pop("skip"))


@skippable(stash=["skip"])
class SendConv(nn.Module):
    """Has parameters and a buffer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        yield stash("skip", x)
        return self.norm(self.conv(x))


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


class Around(nn.Module):
    """An ordinary layer with other layers inside."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x


class NestedPipe(Around):
    _syncpipe_skips_are_internal = True


def make(stashed=(), popped=()):
    """A layer that adds what it pops, and stashes its input."""

    @skippable(stash=stashed, pop=popped)
    class Layer(nn.Module):
        def forward(self, x):
            total = x
            for name in popped:
                total = total + (yield pop(name))
            for name in stashed:
                yield stash(name, x)
            return total

    return Layer()


def faults(*layers: nn.Module, module: nn.Sequential | None = None) -> list[str]:
    """The lines of what verify_skippables has to say."""
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(*layers) if module is None else module)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def roundtrip(module):
    return pickle.loads(pickle.dumps(module))


X = torch.arange(6.0).reshape(3, 2)


# --- the public face ---------------------------------------------------------------------------


def test_public_names():
    expected = {"skippable", "stash", "pop", "verify_skippables", "Namespace"}
    assert set(syncpipe.skip.__all__) == expected
    assert not hasattr(syncpipe.skip, "Declaration")


# --- namespaces --------------------------------------------------------------------------------


def test_namespaces_differ():
    assert Namespace() != Namespace()
    assert len({Namespace() for _ in range(100)}) == 100


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, roundtrip])
def test_copy_of_a_namespace_equals_it(duplicate):
    namespace = Namespace()
    twin = duplicate(namespace)
    assert twin == namespace and hash(twin) == hash(namespace)
    assert duplicate(Namespace()) != namespace


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_namespace_pickles_with_every_protocol(protocol):
    namespace = Namespace()
    assert pickle.loads(pickle.dumps(namespace, protocol)) == namespace


def test_repr_tells_namespaces_apart():
    assert repr(Namespace()).startswith("Namespace(")
    assert repr(Namespace()) != repr(Namespace())


def test_namespace_leaves_the_random_generators_alone():
    before = torch.get_rng_state()
    Namespace()
    assert torch.equal(before, torch.get_rng_state())


# --- running skippable layers ------------------------------------------------------------------


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


# --- the class stays the class -----------------------------------------------------------------


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
    assert Layer.__doc__ == "What it is for." and Layer.scale == 3
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


# --- subclasses --------------------------------------------------------------------------------


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


def test_plain_forward_of_a_subclass_has_no_skips():
    class Child(Send):
        def forward(self, x):
            return 2 * x

    verify_skippables(nn.Sequential(Child()))
    assert stashes(Child()) == []
    assert torch.equal(nn.Sequential(Child())(X), 2 * X)


def test_plain_forward_of_a_subclass_that_calls_the_base():
    class Child(Send):
        def forward(self, x):
            return super().forward(2 * x)

    model = nn.Sequential(Child(), Receive())
    verify_skippables(model)
    assert torch.equal(model(X), 4 * X)


def test_base_called_by_its_name_counts_too():
    class Child(Send):
        def forward(self, x):
            return Send.forward(self, 2 * x)

    assert stashes(Child()) == [(None, "skip")]


def test_generator_of_a_subclass_that_calls_the_base_has_the_skips_of_both():
    @skippable(stash=["other"])
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


# --- wrong decorations -------------------------------------------------------------------------


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


# --- wrong forwards ----------------------------------------------------------------------------


def layer_of(function, **names):
    return skippable(**names)(type("Culprit", (nn.Module,), {"forward": function}))()


@pytest.mark.parametrize("thing", [None, X, "x", stash, pop])
def test_yielding_something_else(thing):
    def forward(self, x):
        yield thing
        return x

    with pytest.raises(TypeError, match=r"Culprit\.forward yielded"):
        layer_of(forward)(X)


def test_stash_of_an_undeclared_name():
    def forward(self, x):
        yield stash("b", x)

    with pytest.raises(RuntimeError, match=r"Culprit stashes 'b' .*stash=\['a', 'b'\]"):
        layer_of(forward, stash=["a"])(X)


def test_pop_of_an_undeclared_name():
    def forward(self, x):
        yield pop("a")

    with pytest.raises(RuntimeError, match=r"Culprit pops 'a' .*pop=\['a'\]"):
        layer_of(forward, stash=["a"])(X)


def test_stash_twice():
    def forward(self, x):
        yield stash("a", x)
        yield stash("a", x)

    with pytest.raises(RuntimeError, match="Culprit stashes 'a' twice"):
        layer_of(forward, stash=["a"])(X)


def test_pop_twice():
    def forward(self, x):
        yield pop("a")
        yield pop("a")

    with use_store({(None, "a"): X}), pytest.raises(RuntimeError, match="Culprit pops 'a' twice"):
        layer_of(forward, pop=["a"])(X)


def test_stash_forgotten():
    def forward(self, x):
        if x is None:
            yield stash("a", x)
        return x

    with pytest.raises(RuntimeError, match=r"Culprit .*did not stash \['a'\] \(stash None"):
        layer_of(forward, stash=["a"])(X)


def test_pop_forgotten():
    def forward(self, x):
        if x is None:
            yield pop("a")
        return x

    with pytest.raises(RuntimeError, match=r"Culprit .*did not pop \['a'\]"):
        layer_of(forward, pop=["a"])(X)


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

    with pytest.raises(ValueError) as caught:
        layer_of(forward, stash=["a"])(X)
    assert caught.value is error
    assert caught.traceback[-1].frame.code.raw is forward.__code__
    assert error.__cause__ is None and error.__context__ is None


# --- isolate -----------------------------------------------------------------------------------


def test_isolate_gives_back_the_layer():
    layer = Send()
    assert layer.isolate(Namespace()) is layer


def test_isolate_all_names():
    ns = Namespace()
    layer = Many().isolate(ns)
    assert stashes(layer) == [(ns, "a"), (ns, "b")]
    assert pops(layer) == [(ns, "c")]


def test_isolate_only_some_names_adds_up():
    one, two = Namespace(), Namespace()
    layer = Many().isolate(one, only=["a"]).isolate(two, only=["c"])
    assert stashes(layer) == [(one, "a"), (None, "b")]
    assert pops(layer) == [(two, "c")]


def test_isolate_nothing():
    assert stashes(Send().isolate(Namespace(), only=[])) == [(None, "skip")]


def test_isolate_concerns_one_instance():
    Send().isolate(Namespace())
    assert stashes(Send()) == [(None, "skip")]


def test_isolate_leaves_a_shallow_copy_alone():
    first = Send().isolate(one := Namespace())
    second = copy.copy(first).isolate(Namespace())
    assert stashes(first) == [(one, "skip")] != stashes(second)


def test_isolate_refuses_a_string():
    with pytest.raises(TypeError, match=r"only=\['a'\]"):
        Many().isolate(Namespace(), only="a")


def test_isolate_refuses_unknown_names():
    with pytest.raises(ValueError, match=r"Many does not declare \['z'\]"):
        Many().isolate(Namespace(), only=["a", "z"])


def test_isolate_refuses_other_things():
    with pytest.raises(TypeError, match="Namespace"):
        Send().isolate("ns")


def test_namespaces_keep_equal_names_apart():
    outer, inner = Namespace(), Namespace()
    model = nn.Sequential(
        Send().isolate(outer),
        Twice(),
        Send().isolate(inner),
        Twice(),
        Receive().isolate(inner),
        Receive().isolate(outer),
    )
    verify_skippables(model)
    assert torch.equal(model(X), 7 * X)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip])
def test_isolated_layers_still_match_after_a_copy(duplicate):
    ns = Namespace()
    model = duplicate(nn.Sequential(Send().isolate(ns), Twice(), Receive().isolate(ns)))
    verify_skippables(model)
    assert stashes(model[0]) == pops(model[2])
    assert torch.equal(model(X), 3 * X)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip])
def test_isolated_layers_still_match_when_copied_one_by_one(duplicate):
    ns = Namespace()
    layers = [duplicate(layer) for layer in (Send().isolate(ns), Receive().isolate(ns))]
    verify_skippables(nn.Sequential(*layers))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip])
def test_isolate_after_a_copy(duplicate):
    original = Send()
    assert stashes(duplicate(original).isolate(ns := Namespace())) == [(ns, "skip")]
    assert stashes(original) == [(None, "skip")]


def test_namespaces_do_not_show_in_the_state_dict():
    assert Send().isolate(Namespace()).state_dict() == {}


# --- what a module declares --------------------------------------------------------------------


def test_declared_skips_in_order():
    assert stashes(Many()) == [(None, "a"), (None, "b")]
    assert pops(Many()) == [(None, "c")]


def test_ordinary_modules_declare_nothing():
    around = Around(inner=Send())
    assert stashes(around) == pops(around) == []
    assert not is_skippable(around)
    assert is_skippable(around.inner)


# --- checkpoints with an extra prefix ----------------------------------------------------------


def with_old_keys(state, *prefixes):
    """Inserts ``module.`` behind each of the prefixes."""
    renamed = dict(state)
    for prefix in prefixes:
        renamed = {
            prefix + "module." + key[len(prefix) :] if key.startswith(prefix) else key: value
            for key, value in renamed.items()
        }
    return renamed


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    mine, other = left.state_dict(), right.state_dict()
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_old_keys_load():
    source, target = nn.Sequential(SendConv(), Twice()), nn.Sequential(SendConv(), Twice())
    source(X)
    target.load_state_dict(with_old_keys(source.state_dict(), "0."))
    assert_same_state(source, target)


def test_old_keys_of_a_lone_layer_load():
    source, target = SendConv(), SendConv()
    target.load_state_dict(with_old_keys(source.state_dict(), ""))
    assert_same_state(source, target)


def test_new_keys_still_load():
    source, target = SendConv(), SendConv()
    target.load_state_dict(source.state_dict())
    assert_same_state(source, target)


def test_loading_does_not_touch_the_caller_s_state_dict():
    old = with_old_keys(nn.Sequential(SendConv()).state_dict(), "0.")
    keys = list(old)
    nn.Sequential(SendConv()).load_state_dict(old)
    assert list(old) == keys


def test_old_keys_of_nested_skippable_layers_load():
    @skippable(pop=["skip"])
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = SendConv()

        def forward(self, x):
            return self.inner(x) + (yield pop("skip"))

    source, target = nn.Sequential(Outer()), nn.Sequential(Outer())
    old = with_old_keys(source.state_dict(), "0.inner.", "0.")
    assert "0.module.inner.module.conv.weight" in old
    target.load_state_dict(old)
    assert_same_state(source, target)


def test_old_keys_load_into_a_subclass():
    @skippable(stash=["skip"])
    class Child(SendConv):
        def forward(self, x):
            yield stash("skip", x)
            return x

    source, target = Child(), Child()
    target.load_state_dict(with_old_keys(source.state_dict(), ""))
    assert_same_state(source, target)


@pytest.mark.parametrize("store", ["module", "parameter", "buffer"])
def test_a_real_member_called_module_keeps_its_keys(store):
    @skippable(stash=["skip"])
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            if store == "module":
                self.module = nn.Linear(2, 2)
            elif store == "parameter":
                self.module = nn.Parameter(torch.rand(2))
            else:
                self.register_buffer("module", torch.rand(2))

        def forward(self, x):
            yield stash("skip", x)
            return x

    source, target = nn.Sequential(Layer()), nn.Sequential(Layer())
    target.load_state_dict(source.state_dict())
    assert_same_state(source, target)


def test_class_with_its_own_way_of_loading():
    seen = []

    @skippable(stash=["skip"])
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Linear(2, 2)

        def _load_from_state_dict(self, state_dict, prefix, *args):
            seen.extend(key for key in state_dict if key.startswith(prefix))
            super()._load_from_state_dict(state_dict, prefix, *args)

        def forward(self, x):
            yield stash("skip", x)
            return x

    source, target = nn.Sequential(Layer()), nn.Sequential(Layer())
    target.load_state_dict(with_old_keys(source.state_dict(), "0."))
    assert_same_state(source, target)
    assert sorted(seen) == ["0.conv.bias", "0.conv.weight"]


def test_keys_that_fit_nothing_are_still_reported():
    old = with_old_keys(nn.Sequential(SendConv()).state_dict(), "0.")
    old["0.module.conv.extra"] = X
    with pytest.raises(RuntimeError, match="Unexpected key"):
        nn.Sequential(SendConv()).load_state_dict(old)


def test_an_old_key_does_not_replace_a_new_one():
    layer = SendConv()
    state = {**layer.state_dict(), "module.conv.bias": X}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict(state)


# --- stores ------------------------------------------------------------------------------------


def test_store_holds_what_is_stashed_and_loses_what_is_popped():
    store: dict[Any, Any] = {}
    with use_store(store) as entered:
        assert entered is store
        Send()(X)
        assert store == {(None, "skip"): X}
        Receive()(X)
    assert store == {}


def test_stores_nest():
    outer: dict[Any, Any] = {}
    inner: dict[Any, Any] = {}
    with use_store(outer):
        with use_store(inner):
            Send()(1)
        Send()(2)
    assert inner == {(None, "skip"): 1} and outer == {(None, "skip"): 2}


def test_store_is_left_after_an_error():
    store: dict[Any, Any] = {}
    with pytest.raises(ZeroDivisionError), use_store(store):
        raise ZeroDivisionError
    Send()(X)
    assert store == {}


def test_values_outside_do_not_reach_into_a_store():
    layer = Send()
    layer(X)
    with use_store({}), pytest.raises(RuntimeError):
        Receive()(X)


def test_threads_use_their_own_stores():
    send, receive = Send(), Receive()
    barrier = threading.Barrier(4)
    results: dict[int, int] = {}

    def work(number: int, store: Any) -> None:
        barrier.wait(10)
        for _ in range(50):
            if store is None:
                send(number)
                results[number] = receive(0)
            else:
                with use_store(store):
                    send(number)
                    results[number] = receive(0)

    threads = [
        threading.Thread(target=work, args=(i, {} if i % 2 else None), daemon=True)
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {0: 0, 1: 1, 2: 2, 3: 3}


class Value:
    """Something that can be weakly referenced."""


def test_value_outside_dies_with_the_layer():
    layer, value = Send(), Value()
    layer(value)
    seen = weakref.ref(value)
    del value
    gc.collect()
    assert seen() is not None
    del layer
    gc.collect()
    assert seen() is None
    with pytest.raises(RuntimeError, match="no layer before it"):
        Receive()(0)


def test_names_of_dead_layers_are_forgotten():
    namespace = Namespace()
    seen = weakref.ref(namespace)
    layer = Send().isolate(namespace)
    layer(X)
    del layer, namespace
    nn.Sequential(Send(), Receive())(X)
    gc.collect()
    assert seen() is None


def test_value_outside_is_replaced_by_the_next_one():
    first, second = Send(), Send()
    value = Value()
    seen = weakref.ref(value)
    first(value)
    second(1)
    del value
    gc.collect()
    assert seen() is None
    del first
    gc.collect()
    assert Receive()(0) == 1


def test_value_is_freed_once_popped():
    @skippable(pop=["skip"])
    class Drop(nn.Module):
        def forward(self, x):
            yield pop("skip")
            return x

    layer, value = Send(), Value()
    seen = weakref.ref(value)
    layer(value)
    del value
    Drop()(0)
    gc.collect()
    assert seen() is None


# --- verify_skippables -------------------------------------------------------------------------


def test_verify_accepts_a_matching_pair():
    assert verify_skippables(nn.Sequential(Send(), Twice(), Receive())) is None


def test_verify_accepts_a_model_without_skips():
    verify_skippables(nn.Sequential())
    verify_skippables(nn.Sequential(Twice(), Twice()))


@pytest.mark.parametrize("thing", [Send(), [Send(), Receive()], nn.ModuleList([Twice()])])
def test_verify_takes_a_sequential(thing):
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        verify_skippables(thing)


def test_verify_stashed_again():
    (fault,) = faults(Send(), Send(), Receive())
    assert fault == "layer 1 (Send) stashes 'skip' again, after layer 0 (Send)"


def test_verify_stashed_again_after_the_pop():
    first, second = faults(Send(), Receive(), Send(), Receive())
    assert first.startswith("layer 2 (Send) stashes 'skip' again")
    assert second.startswith("layer 3 (Receive) pops 'skip' again")


def test_verify_popped_again():
    (fault,) = faults(Send(), Receive(), Receive())
    assert fault == "layer 2 (Receive) pops 'skip' again, after layer 1 (Receive)"


def test_verify_both_ways_in_one_layer():
    (fault,) = faults(make(["a"], ["a"]))
    assert fault == "layer 0 (Layer) declares 'a' both as stash and as pop"


def test_verify_never_popped():
    (fault,) = faults(Twice(), Send())
    assert fault == "layer 1 (Send) stashes 'skip', but no later layer pops it"


def test_verify_never_stashed():
    (fault,) = faults(Twice(), Receive())
    assert fault == "layer 1 (Receive) pops 'skip', but no earlier layer stashes it"


def test_verify_wrong_order():
    first, second = faults(Receive(), Send())
    assert first.startswith("layer 0 (Receive) pops 'skip', but no earlier")
    assert second.startswith("layer 1 (Send) stashes 'skip', but no later")


def test_verify_names_layers_and_namespaces():
    ns = Namespace()
    model = nn.Sequential(OrderedDict(start=Twice(), middle=Send().isolate(ns)))
    (fault,) = faults(module=model)
    assert fault.startswith(f"layer 1 'middle' (Send) stashes 'skip' in {ns!r},")


def test_verify_namespaces_do_not_match():
    assert len(faults(Send().isolate(Namespace()), Receive().isolate(Namespace()))) == 2


def test_verify_reports_everything_in_the_order_of_the_layers():
    lines = faults(
        make(popped=["p"]), make(["a", "b"]), make(["a"]), make(["c"], ["c"]), make(popped=["a"])
    )
    assert [line.split(" (")[0] for line in lines] == [f"layer {j}" for j in range(4)]


def test_verify_sees_a_layer_used_twice():
    layer = Send()
    (fault,) = faults(layer, layer, Receive())
    assert fault.startswith("layer 1 (Send) stashes 'skip' again")


def test_verify_looks_inside_layers():
    verify_skippables(nn.Sequential(Around(deep=Around(send=Send())), nn.Sequential(Receive())))
    (fault,) = faults(Around(deep=Around(send=Send())))
    assert fault.startswith("layer 0 (Around) stashes 'skip'")


def test_verify_names_the_submodule_declared_both_ways():
    (fault,) = faults(Around(deep=Around(odd=make(["a"], ["a"]))))
    assert fault.startswith("layer 0 (Around), in its submodule 'deep.odd' (Layer), declares 'a'")


def test_verify_leaves_a_pair_inside_a_layer_alone():
    block = Around(send=Send(), receive=Receive())
    model = nn.Sequential(block, copy.deepcopy(block))
    verify_skippables(model)
    assert torch.equal(model(X), 4 * X)


def test_verify_refuses_a_pair_inside_that_would_overwrite_another():
    (fault,) = faults(Send(), Around(send=Send(), receive=Receive()), Receive())
    assert fault.startswith("layer 1 (Around) stashes and pops 'skip' inside itself while")


def test_verify_counts_a_shared_submodule_once():
    send = Send()
    verify_skippables(nn.Sequential(Around(one=send, two=send), Receive()))


def test_verify_leaves_nested_pipes_alone():
    nested = NestedPipe(send=Send())
    verify_skippables(nn.Sequential(nested, Around(inner=nested)))


def test_verify_reports_a_generator_that_lacks_its_decorator():
    class Child(Send):
        def forward(self, x):
            yield stash("skip", x)

    class Plain(nn.Module):
        def forward(self, x):
            yield x

    first, second = faults(Child(), Plain())
    assert "layer 0 (Child) has a generator as forward" in first
    assert "layer 1 (Plain) has a generator as forward" in second


# --- inspect_layout ----------------------------------------------------------------------------


def test_layout_of_skips_that_cross():
    a, b, c = (make([n]) for n in "abc")
    layout = inspect_layout(
        [nn.Sequential(a, b), [c, make(popped=["b"])], [make(popped=["c", "a"])]]
    )
    assert layout.outgoing == ({(None, "b"): 1, (None, "a"): 2}, {(None, "c"): 2}, {})
    assert layout.incoming == ({}, {(None, "b"): 0}, {(None, "c"): 1, (None, "a"): 0})


def test_layout_leaves_out_what_stays_in_one_partition():
    layout = inspect_layout([[Send(), Receive()], [Around(send=Send(), receive=Receive())]])
    assert layout.incoming == layout.outgoing == ({}, {})


def test_layout_leaves_nested_pipes_alone():
    layout = inspect_layout([[NestedPipe(send=Send())], [NestedPipe(receive=Receive())]])
    assert layout.incoming == layout.outgoing == ({}, {})


def test_layout_tells_namespaces_apart():
    one, two = Namespace(), Namespace()
    layers = [Send().isolate(one), Send().isolate(two), Receive().isolate(one)]
    layout = inspect_layout([[layer] for layer in [*layers, Receive().isolate(two)]])
    assert layout.outgoing[0] == {(one, "skip"): 2} and layout.outgoing[1] == {(two, "skip"): 3}


# --- properties --------------------------------------------------------------------------------


@st.composite
def any_models(draw):
    """Layers that stash and pop without much thought, some of them nested."""
    names = st.lists(st.sampled_from("ab"), unique=True, max_size=1)
    count = draw(st.integers(1, 5))
    layers = []
    for _ in range(count):
        stashed, popped = draw(names), draw(names)
        nested = draw(st.booleans()) and stashed != popped
        layers.append(
            Around(p=make((), popped), s=make(stashed, ())) if nested else make(stashed, popped)
        )
    return nn.Sequential(*layers)


def direct_skips(model):
    """For each layer what it stashes and what it pops, by another way than the code's."""
    return [
        (
            [k for m in layer.modules() for k in stashes(m)],
            [k for m in layer.modules() for k in pops(m)],
        )
        for layer in model
    ]


@settings(deadline=None)
@given(any_models())
def test_verify_accepts_exactly_the_models_with_one_stash_before_one_pop(model):
    table = direct_skips(model)
    good = True
    for key in {k for stashed, popped in table for k in stashed + popped}:
        sources = [j for j, (stashed, _) in enumerate(table) if key in stashed]
        sinks = [j for j, (_, popped) in enumerate(table) if key in popped]
        good &= len(sources) == len(sinks) == 1 and sources[0] < sinks[0]
    if good:
        verify_skippables(model)
        model(X)
    else:
        assert faults(module=model)


@st.composite
def good_models(draw):
    """A model whose skips match, and a balance."""
    count = draw(st.integers(1, 7))
    stashed: list[list[str]] = [[] for _ in range(count)]
    popped: list[list[str]] = [[] for _ in range(count)]
    if count > 1:
        for number in range(draw(st.integers(0, 6))):
            start = draw(st.integers(0, count - 2))
            end = draw(st.integers(start + 1, count - 1))
            stashed[start].append(f"skip{number}")
            popped[end].append(f"skip{number}")
    cuts = draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    layers = [make(s, p) for s, p in zip(stashed, popped, strict=True)]
    return nn.Sequential(*layers), [0, *sorted(cuts), count]


@settings(deadline=None)
@given(good_models())
def test_stages_that_exchange_the_skips_of_the_layout_compute_the_same(case):
    model, bounds = case
    verify_skippables(model)
    partitions = [model[start:end] for start, end in itertools.pairwise(bounds)]
    layout = inspect_layout(partitions)
    sent: dict[tuple[Any, int], Any] = {}
    x = X
    for stage, partition in enumerate(partitions):
        store = {key: sent.pop((key, stage)) for key in layout.incoming[stage]}
        with use_store(store):
            x = partition(x)
        assert store.keys() == layout.outgoing[stage].keys()
        for key, to in layout.outgoing[stage].items():
            assert to > stage
            assert layout.incoming[to][key] == stage
            sent[key, to] = store[key]
    assert not sent
    assert torch.equal(x, model(X))
