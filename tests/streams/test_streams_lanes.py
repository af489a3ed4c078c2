"""What lanes and streams do by themselves, line by line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from syncpipe.runtime.streams import AcceleratorStreams
from tests.streams import test_streams

world = pytest.fixture(test_streams.world.__wrapped__, name="world")


class Noted:
    """A stream, an event or a tensor of a made-up accelerator that notes what is done to it."""

    def __init__(self, kind: str) -> None:
        self.device = SimpleNamespace(type=kind, index=0)
        self.done: list[tuple[str, Any]] = []

    def wait_event(self, event: Any) -> None:
        self.done.append(("wait", event))

    def record_stream(self, stream: Any) -> None:
        self.done.append(("record", stream))


def test_a_wait_is_the_stream_s_own():
    stream, event = Noted("made up"), object()
    AcceleratorStreams(stream.device).wait(stream, event)
    assert stream.done == [("wait", event)]


@pytest.mark.parametrize("kind", ["made up", "cpu"])
def test_memory_of_the_accelerator_is_recorded_on_the_stream_that_uses_it(kind):
    tensor, stream = Noted(kind), object()
    AcceleratorStreams(Noted("made up").device).keep(tensor, stream)
    assert tensor.done == ([("record", stream)] if kind == "made up" else [])
