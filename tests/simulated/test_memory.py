"""The allocator: reuse, streams, what it counts; and copies to and from the host."""

from __future__ import annotations

import gc

import pytest
import torch

from tests import simulated
from tests.simulated.test_streams_and_events import on

A, B = simulated.devices(2)


def test_new_memory_is_nan():
    x = torch.empty(100, device=A)
    assert x.isnan().all()
    x.zero_()
    data = x.data_ptr()
    del x
    x = torch.empty(100, device=A)
    assert x.data_ptr() == data  # reused at once on its own stream
    assert x.isnan().all()


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_record_stream(recorded, taken):
    """Memory that another stream still reads is overwritten, unless that stream was recorded."""
    main, side = torch.accelerator.current_stream(A), torch.Stream(device=A)
    x = torch.ones(100, device=A)
    data = x.data_ptr()
    side.wait_event(main.record_event())
    with simulated.held(side):
        with on(side):
            y = x * 2
        if recorded:
            x.record_stream(side)
        del x
        with on(side):
            assert torch.empty(100, device=A).data_ptr() != data  # it is the other stream's
        z = torch.zeros(100, device=A) if taken else None
        main.synchronize()
    side.synchronize()
    assert (y.cpu() == 2).all().item() == recorded
    assert z is None or (z.cpu() == 0).all()
    assert recorded or taken or y.cpu().isnan().all()


def blocks():
    return torch.accelerator.memory_stats(A)["active.all.current"]


def test_recorded_memory_counts_until_the_stream_is_done():
    main, side = torch.accelerator.current_stream(A), torch.Stream(device=A)
    main.synchronize()
    before = blocks(), simulated.live_bytes(A)
    x = torch.ones(1000, device=A)
    with simulated.held(side):
        x.record_stream(side)
        del x
        assert torch.accelerator.memory_allocated(A) == before[1]  # handed back
        assert blocks() == before[0] + 1  # but not to be had
        assert simulated.live_bytes(A) == before[1] + 4096
    side.synchronize()
    assert (blocks(), simulated.live_bytes(A)) == before


def test_peaks_are_counted_for_each_device():
    gc.collect()
    for device in (A, B):
        torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(B)
    x = torch.ones(1024, 256, device=B)
    y = x + x
    del x, y
    assert torch.accelerator.max_memory_allocated(B) - before == 2 * 1024 * 1024
    assert torch.accelerator.memory_allocated(B) == before
    assert torch.accelerator.max_memory_allocated(A) == torch.accelerator.memory_allocated(A)


def test_a_device_can_be_full():
    with simulated.capacity(B, 1 << 20), pytest.raises(torch.OutOfMemoryError, match="sim:1 out"):
        torch.empty(1 << 21, device=B)
    torch.empty(1 << 21, device=B)


@pytest.mark.parametrize("pinned", [False, True])
def test_from_pinned_memory_the_data_are_read_later_from_other_memory_at_once(pinned):
    x = torch.ones(4).pin_memory() if pinned else torch.ones(4)
    assert x.is_pinned() == pinned
    with simulated.held(torch.accelerator.current_stream(A)), simulated.no_waits():
        y = x.to(A, non_blocking=True)
        x.zero_()
    assert y.cpu().tolist() == [not pinned] * 4


def test_pinned_memory_is_not_reused_while_it_is_read():
    with simulated.held(torch.accelerator.current_stream(A)):
        y = torch.ones(4).pin_memory().to(A, non_blocking=True)
        torch.zeros(4).pin_memory()
    assert y.cpu().tolist() == [1, 1, 1, 1]


def test_to_the_host_non_blocking_is_garbage_until_somebody_waits():
    stream = torch.accelerator.current_stream(A)
    x = torch.ones(4, device=A)
    with simulated.held(stream), simulated.no_waits():
        y = x.to("cpu", non_blocking=True)
        assert y.is_pinned()
        assert y.isnan().all()
    stream.synchronize()
    assert y.tolist() == [1, 1, 1, 1]


def test_a_copy_between_devices_involves_both_current_streams():
    source, target = (torch.accelerator.current_stream(d) for d in (A, B))
    x, y = torch.ones(4, device=A), torch.zeros(4, device=B)
    for waiting, held in ((source, target), (target, source)):
        torch.accelerator.synchronize(A)
        torch.accelerator.synchronize(B)
        with simulated.held(held):
            y.copy_(x, non_blocking=True)
            assert not waiting.query()  # for the other one
    assert y.cpu().tolist() == [1, 1, 1, 1]


def test_a_copy_runs_on_the_stream_of_its_source():
    """A stream of the target that is not the current one knows nothing of it."""
    side = torch.Stream(device=B)
    x, y = torch.ones(4, device=A), torch.empty(4, device=B)
    torch.accelerator.synchronize(B)
    with simulated.held(torch.accelerator.current_stream(A)):
        y.copy_(x)
        with on(side):
            early = y + 1
        side.synchronize()
    assert early.cpu().isnan().all()
    assert (y + 1).cpu().tolist() == [2, 2, 2, 2]
