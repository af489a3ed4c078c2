"""What lanes and streams do by themselves, line by line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from syncpipe.runtime.streams import AcceleratorStreams, Lane
from tests.streams import test_streams
from tests.streams.happens_before import FakeStreams
from tests.streams.test_streams import Scenario

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


def test_a_gradient_is_held_while_it_is_copied(world, monkeypatch):
    """The autograd engine adds in place to a gradient that nobody else has."""
    sent: list[StorageWeakRef] = []
    copied = False
    send = Lane.send

    def noted(lane, tensors, to, after=None):
        if torch._C._current_graph_task_id() != -1:  # in backward
            sent.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        return send(lane, tensors, to, after)

    monkeypatch.setattr(Lane, "send", noted)
    monkeypatch.setattr(FakeStreams, "done", lambda self, event: copied)
    scenario = Scenario(world, "four devices", checkpoint="never", chunks=2)

    def forward():
        output = scenario.pipe(scenario.input(requires_grad=True))
        with world.watch():
            return (output * output).sum()

    with world.on(*scenario.callers):
        loss = forward()
        world.backward(loss)
        assert sent
        assert not any(gradient.expired() for gradient in sent)
        sent.clear()
        copied = True
        other = forward()
        world.backward(other)
        # But for the last one of each lane, nothing is kept that has arrived.
        assert sum(not gradient.expired() for gradient in sent) <= len(scenario.pipe.devices)
    del loss, other
