"""Which skips leave which partition, and what ``verify_skippables`` says where they do not fit."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncpipe.skip import Namespace, stash, verify_skippables
from syncpipe.skip.layout import inspect_layout
from syncpipe.skip.skippable import pops, stashes
from syncpipe.skip.store import use_store
from tests.support.skips import Around, NestedPipe, Receive, Send, Twice, X, make

NS = Namespace()


def test_layout_of_skips_that_cross_and_of_those_that_stay():
    a, b, c = (make([n]) for n in "abc")
    inside = [Send(), Receive(), Around(send=Send(), receive=Receive())]
    apart = [Send().isolate(NS), NestedPipe(send=Send())]
    layout = inspect_layout(
        [
            nn.Sequential(a, b, *inside, *apart),
            [c, make(popped=["b"]), NestedPipe(receive=Receive())],
            [make(popped=["c", "a"]), Receive().isolate(NS)],
        ]
    )
    first = {(None, "b"): 1, (None, "a"): 2, (NS, "skip"): 2}
    assert layout.outgoing == (first, {(None, "c"): 2}, {})
    last = {(None, "c"): 1, (None, "a"): 0, (NS, "skip"): 0}
    assert layout.incoming == ({}, {(None, "b"): 0}, last)


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
UNSTASHED = "but no earlier layer stashes it"
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
    (
        [Receive(), Send()],
        [
            f"layer 0 (Receive) pops 'skip', {UNSTASHED}",
            "layer 1 (Send) stashes 'skip', but no later layer pops it",
        ],
    ),
    (
        [Twice(), Send().isolate(NS)],
        [f"layer 1 (Send) stashes 'skip' in {NS!r}, but no later layer pops it"],
    ),
    (
        [Around(deep=Around(send=Send()))],
        ["layer 0 (Around) stashes 'skip', but no later layer pops it"],
    ),
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
            f"layer {k} ({kind}) has a generator as forward, but no @skippable of its own"
            for k, kind in enumerate(("Undecorated", "Generator"))
        ],
    ),
]


@pytest.mark.parametrize(("layers", "expected"), FAULTS)
def test_verify_says_what_does_not_match_in_the_order_of_the_layers(layers, expected):
    assert faults(*layers) == expected


def test_verify_names_layers_and_takes_a_sequential():
    with pytest.raises(TypeError, match=r"layer 1 'middle' \(Send\) stashes"):
        verify_skippables(nn.Sequential(OrderedDict(start=Twice(), middle=Send())))
    for thing in Send(), [Send(), Receive()], nn.ModuleList([Twice()]):
        with pytest.raises(TypeError, match=r"nn\.Sequential"):
            verify_skippables(thing)


def test_verify_accepts_what_matches():
    send, nested, block = Send(), NestedPipe(send=Send()), Around(send=Send(), receive=Receive())
    for layers in (
        [],
        [Twice()],
        [Around(one=send, two=send), Receive()],  # a submodule that is shared counts once
        [nested, Around(inner=nested)],
        [block, Around(send=Send(), receive=Receive())],
    ):
        verify_skippables(nn.Sequential(*layers))


@st.composite
def any_models(draw):
    """Layers that stash and pop without much thought, some of them nested."""
    names = st.lists(st.sampled_from("ab"), unique=True, max_size=1)
    layers = []
    for _ in range(draw(st.integers(1, 5))):
        stashed, popped = draw(names), draw(names)
        nested = draw(st.booleans()) and stashed != popped
        layers.append(
            Around(p=make((), popped), s=make(stashed, ())) if nested else make(stashed, popped)
        )
    return nn.Sequential(*layers)


@given(any_models())
def test_verify_accepts_exactly_the_models_with_one_stash_before_one_pop(model):
    table = [
        (
            [k for m in layer.modules() for k in stashes(m)],
            [k for m in layer.modules() for k in pops(m)],
        )
        for layer in model
    ]
    good = True
    for key in {k for stashed, popped in table for k in stashed + popped}:
        sources = [j for j, (stashed, _) in enumerate(table) if key in stashed]
        sinks = [j for j, (_, popped) in enumerate(table) if key in popped]
        good &= len(sources) == len(sinks) == 1 and sources[0] < sinks[0]
    if good:
        verify_skippables(model)
        model(X)
    else:
        assert faults(*model)
