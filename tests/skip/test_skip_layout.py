"""The layout: which skips leave which partition, and where to."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncpipe.skip import Namespace, verify_skippables
from syncpipe.skip.layout import inspect_layout
from syncpipe.skip.store import use_store
from tests.support.skips import (
    Around,
    NestedPipe,
    Receive,
    Send,
    X,
    make,
)


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
    assert layout.outgoing[0] == {(one, "skip"): 2}
    assert layout.outgoing[1] == {(two, "skip"): 3}


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
