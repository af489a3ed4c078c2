"""Which skips leave which partition, and what ``verify_skippables`` says where they do not fit."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from syncpipe.skip import Namespace, stash, verify_skippables
from syncpipe.skip.layout import inspect_layout
from tests.support.skips import Around, NestedPipe, Receive, Send, Twice, make

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
            "layer 0 (Undecorated) has a generator as forward, but no @skippable of its own",
            "layer 0 (Undecorated) stashes 'skip', but no later layer pops it",
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
