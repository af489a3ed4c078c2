"""``verify_skippables``: what it accepts, and what it says of the rest."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncpipe.skip import Namespace, stash, verify_skippables
from syncpipe.skip.skippable import pops, stashes
from tests.support.skips import (
    Around,
    NestedPipe,
    Receive,
    Send,
    Twice,
    X,
    make,
)


def faults(*layers: nn.Module, module: nn.Sequential | None = None) -> list[str]:
    """The lines of what verify_skippables has to say."""
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(*layers) if module is None else module)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_verify_accepts_a_matching_pair():
    assert verify_skippables(nn.Sequential(Send(), Twice(), Receive())) is None


def test_verify_accepts_a_model_without_skips():
    verify_skippables(nn.Sequential())
    verify_skippables(nn.Sequential(Twice(), Twice()))


@pytest.mark.parametrize("thing", [Send(), [Send(), Receive()], nn.ModuleList([Twice()])])
def test_verify_takes_a_sequential(thing):
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        verify_skippables(thing)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (
            [Send(), Send(), Receive()],
            ["layer 1 (Send) stashes 'skip' again, after layer 0 (Send)"],
        ),
        (
            [*[Send()] * 2, Receive()],  # one layer used twice
            ["layer 1 (Send) stashes 'skip' again, after layer 0 (Send)"],
        ),
        (
            [Send(), Receive(), Receive()],
            ["layer 2 (Receive) pops 'skip' again, after layer 1 (Receive)"],
        ),
        (
            [Send(), Receive(), Send(), Receive()],
            [
                "layer 2 (Send) stashes 'skip' again, after layer 0 (Send)",
                "layer 3 (Receive) pops 'skip' again, after layer 1 (Receive)",
            ],
        ),
        (
            [make(["a"], ["a"])],
            ["layer 0 (Layer) declares 'a' both as stash and as pop"],
        ),
        (
            [Twice(), Send()],
            ["layer 1 (Send) stashes 'skip', but no later layer pops it"],
        ),
        (
            [Twice(), Receive()],
            ["layer 1 (Receive) pops 'skip', but no earlier layer stashes it"],
        ),
        (
            [Receive(), Send()],
            [
                "layer 0 (Receive) pops 'skip', but no earlier layer stashes it",
                "layer 1 (Send) stashes 'skip', but no later layer pops it",
            ],
        ),
    ],
)
def test_verify_says_what_does_not_match(layers, expected):
    assert faults(*layers) == expected


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


# --- any model -----------------------------------------------------------------------------------


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
