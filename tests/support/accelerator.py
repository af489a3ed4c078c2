"""The accelerators that tests run on: real ones, or those of the simulated machine.

Tests marked ``gpu`` are written against these few functions and ``torch.accelerator``, so that
they run on either. The simulated machine is loaded in a process that is started with
``SYNCPIPE_SIMULATED=1`` (see ``conftest.py``); it computes on the host, so tests are smaller there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests import simulated


def kind() -> str:
    """The type of the accelerators: ``"cuda"``, ``"sim"``; ``"none"`` where there are none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "none" if accelerator is None else accelerator.type


def device(k: int = 0) -> torch.device:
    """One of the accelerators; where there are fewer, they stand for several in turn."""
    return torch.device(kind(), k % count())


def count() -> int:
    """How many there are, or may be used by ``SYNCPIPE_DEVICES``."""
    return min(torch.accelerator.device_count(), int(os.environ.get("SYNCPIPE_DEVICES", "64")))


def synchronize() -> None:
    """The host waits for all of them."""
    for k in range(count()):
        torch.accelerator.synchronize(k)


def sleep(ms: float = 10.0) -> None:
    """A kernel on the current stream that takes about so long, at 2 GHz."""
    if simulated.loaded():
        simulated.sleep(ms)
    else:
        torch.cuda._sleep(int(ms * 2e6))


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, it is an error when an operator makes the host wait for a device."""
    if simulated.loaded():
        with simulated.no_waits():
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def allocated(*devices: torch.device) -> int:
    """Bytes that are in use on the devices (all of them if none is named), all work being done."""
    synchronize()
    torch.accelerator.empty_cache()  # what was recorded on other streams is freed for good
    indices = [d.index for d in devices] or range(count())
    return sum(torch.accelerator.memory_allocated(k) for k in indices)


def blocks() -> int:
    """Blocks of memory that are in use on all devices, all work being done."""
    synchronize()
    torch.accelerator.empty_cache()
    return sum(torch.accelerator.memory_stats(k)["active.all.current"] for k in range(count()))
