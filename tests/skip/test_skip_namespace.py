"""Namespaces, and layers isolated in them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from syncpipe.skip import Namespace, verify_skippables
from syncpipe.skip.skippable import pops, stashes
from tests.support.skips import (
    Many,
    Receive,
    Send,
    Twice,
    X,
    roundtrip,
)


def test_namespaces_differ():
    assert Namespace() != Namespace()
    assert len({Namespace() for _ in range(100)}) == 100


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, roundtrip])
def test_copy_of_a_namespace_equals_it(duplicate):
    namespace = Namespace()
    twin = duplicate(namespace)
    assert twin == namespace
    assert hash(twin) == hash(namespace)
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


# --- isolate -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("namespace", "only", "error", "message"),
    [
        (Namespace(), "a", TypeError, r"only=\['a'\]"),
        (Namespace(), ["a", "z"], ValueError, r"Many does not declare \['z'\]"),
        ("ns", None, TypeError, "Namespace"),
    ],
)
def test_isolate_refuses(namespace, only, error, message):
    with pytest.raises(error, match=message):
        Many().isolate(namespace, only=only)


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
