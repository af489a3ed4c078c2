"""Checkpoints with an extra ``module.`` in their keys."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncpipe.skip import pop, skippable, stash
from tests.support.skips import (
    SendConv,
    Twice,
    X,
)


def with_old_keys(state, *prefixes):
    """Inserts ``module.`` behind each of the prefixes."""
    renamed = dict(state)
    for prefix in prefixes:
        renamed = {
            prefix + "module." + key[len(prefix) :] if key.startswith(prefix) else key: value
            for key, value in renamed.items()
        }
    return renamed


@skippable(stash=["skip"])
class Child(SendConv):
    def forward(self, x):
        yield stash("skip", x)
        return x


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    mine, other = left.state_dict(), right.state_dict()
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[key], other[key]) for key in mine)


@pytest.mark.parametrize(
    ("build", "prefixes"),
    [
        (lambda: nn.Sequential(SendConv(), Twice()), ["0."]),
        (SendConv, [""]),
        (SendConv, []),  # the keys of today
        (Child, [""]),
    ],
)
def test_old_and_new_keys_load(build, prefixes):
    source, target = build(), build()
    source(X)
    old = with_old_keys(source.state_dict(), *prefixes)
    keys = list(old)
    target.load_state_dict(old)
    assert_same_state(source, target)
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
    layer = SendConv()
    with pytest.raises(RuntimeError, match="Unexpected key"):  # it does not replace a new one
        layer.load_state_dict({**layer.state_dict(), "module.conv.bias": X})
