"""Streams, events and what goes wrong without them."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from tests import simulated

A, B = simulated.devices(2)


@contextmanager
def on(stream):
    device = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(stream.device.index)
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def test_current_device_and_stream_are_those_of_the_thread():
    other = torch.Stream(device=A)
    seen = []

    def look():
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream(A)))

    with on(torch.Stream(device=B)), on(other):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream(A) == other
    assert seen == [(0, torch.accelerator.current_stream(A))]


def test_a_missing_wait_gives_wrong_numbers():
    x = torch.ones(100, device=A)
    main, side = torch.accelerator.current_stream(A), torch.Stream(device=A)
    main.synchronize()
    for waits in (False, True):
        with simulated.held(main):
            y = x * 2
            event = main.record_event()
            if waits:
                side.wait_event(event)
            with on(side):
                z = y + 1
            if not waits:
                side.synchronize()
        side.synchronize()
        assert (z.cpu() == 3).all().item() == waits
        assert waits or z.cpu().isnan().all()


def test_a_delay_is_enough_to_see_a_missing_wait():
    x = torch.ones(100, device=A)
    main, side = torch.accelerator.current_stream(A), torch.Stream(device=A)
    main.synchronize()
    with simulated.delays(3000, stream=main):  # longer than a busy host takes for the next lines
        y = x * 2
        with on(side):
            z = y + 1
    side.synchronize()
    assert z.cpu().isnan().all()


def test_events():
    stream = torch.accelerator.current_stream(A)
    event = torch.Event(A)
    assert event.query()  # of nothing
    with simulated.held(stream):
        stream.record_event(event)
        assert not event.query()
        assert not stream.query()
    event.synchronize()
    assert event.query()
    stream.synchronize()
    assert stream.query()


def test_a_wait_is_for_the_event_as_it_was():
    """Recorded again later, an event does not move the waits that are there already."""
    main, side = torch.accelerator.current_stream(A), torch.Stream(device=A)
    event = main.record_event()
    side.wait_event(event)
    with simulated.held(main):
        main.record_event(event)
        side.synchronize()
        assert not event.query()
    event.synchronize()


def test_events_tell_the_time_of_the_device():
    stream = torch.accelerator.current_stream(A)
    start, end = (torch.Event(A, enable_timing=True) for _ in range(2))
    stream.record_event(start)
    simulated.sleep(30)
    stream.record_event(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 30


def test_backward_runs_on_the_stream_of_the_forward():
    side = torch.Stream(device=B)
    x = torch.ones(3, device=B, requires_grad=True)
    torch.accelerator.synchronize(B)
    with on(side):
        y = (x * x).sum()
    seen = []
    y.grad_fn.register_prehook(lambda grads: seen.append(torch.accelerator.current_stream(B)))
    y.backward()
    assert seen == [side]
    assert x.grad.cpu().tolist() == [2, 2, 2]


def test_an_error_in_a_kernel_comes_when_the_host_waits():
    table = torch.zeros(3, 2, device=A)
    index = torch.tensor([5], device=A)
    torch.nn.functional.embedding(index, table)
    with pytest.raises(RuntimeError, match="a kernel failed on sim:0: index out of range"):
        torch.accelerator.synchronize(A)
    torch.accelerator.synchronize(A)  # it is told once


def test_waits_of_the_host_are_counted_and_can_be_forbidden():
    x = torch.ones(3, device=A)
    simulated.waits(forget=True)
    x.sum().item()
    x.cpu()
    assert simulated.waits() == {"item": 1, "copy to the host": 1}
    with simulated.no_waits():
        for look in (x.sum().item, x.cpu, x.nonzero, lambda: x.equal(x)):
            with pytest.raises(RuntimeError, match="the host must not wait for stream 0"):
                look()
        torch.accelerator.synchronize(A)  # asked for, so it is no surprise
    assert x.sum().item() == 3
