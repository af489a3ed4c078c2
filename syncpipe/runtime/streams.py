"""Streams of a device, behind the few operations that a pipeline needs.

A worker on an accelerator has three streams: ``compute`` (the device's current stream at the time
of the call), and ``outbound`` and ``inbound`` for copies to and from other devices, so that a copy
overlaps with computation. A CPU worker has none: its :class:`DeviceStreams` has no ``backend``.

    device a   compute   | stage (i,a) |e stage (i+1,a) |
               outbound                 |w copy |                 e: event, w: waits for it
    device b   inbound                  | copy  |e
               compute   | stage (i-1,b)         |w stage (i,b) |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def accelerators() -> list[torch.device]:
    """All accelerators of this machine."""
    # A build for an accelerator names its type even where there is none, so ask for availability.
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return []
    return [torch.device(kind.type, k) for k in range(torch.accelerator.device_count())]


def checked_device(device: torch.device | str | int, kind: str | None = None) -> torch.device:
    """What ``torch.device`` makes of a device, or its index and ``kind``; a ``RuntimeError`` if
    there is none. It counts in 8 bits: "cpu:300" would be "cpu:44"."""
    counted = isinstance(device, int) and kind is not None
    found = torch.device(kind, device) if counted else torch.device(device)  # type: ignore[arg-type]
    index = device if counted else str(device).partition(":")[2]
    if str(index) not in ("", str(found.index)) or (found.index or 0) < 0:
        raise RuntimeError(f"PyTorch knows the numbers 0 to 127 only, and takes it for {found}")
    return found


def same_memory(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are the same memory (``cpu:0`` and ``cpu:1`` are, for tensors)."""
    return a.type == b.type and (a.type == "cpu" or a.index == b.index)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device; the host waits only where it could read too early: on the CPU."""
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")


class AcceleratorStreams:
    """The operations on streams of one device; to all others streams and events are opaque."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> torch.Stream:
        """The stream on which the calling thread works on this device."""
        return torch.accelerator.current_stream(self.device)

    def new(self) -> torch.Stream:
        return torch.Stream(device=self.device)

    @contextmanager
    def use(self, stream: torch.Stream) -> Iterator[None]:
        """Makes ``stream`` and its device current on the calling thread, and puts back what was.

        ``with stream:`` stores the previous stream in the stream object, which threads share.
        """
        index, device = stream.device.index, torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(index)
        previous = torch.accelerator.current_stream(index)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)
            torch.accelerator.set_device_index(device)

    def record(self, stream: torch.Stream) -> torch.Event:
        """An event that happens when all work so far on ``stream`` is done."""
        return stream.record_event()

    def stamp(self, stream: torch.Stream) -> torch.Event:
        """The same, of an event that can tell its time (only traces ask)."""
        return stream.record_event(torch.Event(self.device, enable_timing=True))

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Lets further work on ``stream`` wait for ``event``; the host does not wait."""
        stream.wait_event(event)

    def keep(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Keeps the memory of ``tensor`` from being reused before ``stream`` is done with it."""
        if tensor.device.type == self.device.type:
            tensor.record_stream(stream)


@dataclass(slots=True)
class DeviceStreams:
    """A worker as one call sees it: its device, and its streams where it has any."""

    device: torch.device
    backend: Any = None  # as AcceleratorStreams
    compute: Any = None
    outbound: Any = None
    inbound: Any = None

    def active(self) -> AbstractContextManager[Any]:
        """The context in which the stages of this worker run."""
        return nullcontext() if self.backend is None else self.backend.use(self.compute)

    def wait_for(self, other: DeviceStreams) -> None:
        """Lets this work wait for everything that ``other`` was given so far.

        Copies that ``other`` sends count: they may still be reading what it was given.
        """
        if self.backend is None or other.backend is None:
            return
        for stream in (other.compute, other.outbound):
            if stream is not None and self.compute != stream:
                self.backend.wait(self.compute, other.backend.record(stream))

    def record_on_stream(self, tensors: Sequence[Tensor], other: DeviceStreams) -> None:
        """Keeps the memory of tensors that ``other`` made until these streams are done with it."""
        if self.backend is not None and self.compute != other.compute:
            for tensor in tensors:
                self.backend.keep(tensor, self.compute)

    def receive(self, event: Any, tensors: Sequence[Tensor]) -> None:
        """Lets these streams wait for what another one sent (None: nothing to wait for)."""
        if self.backend is None or event is None:
            return
        self.backend.wait(self.compute, event)
        for tensor in tensors:
            self.backend.keep(tensor, self.compute)

    def send(
        self, tensors: Sequence[Tensor], to: DeviceStreams, after: Any = None
    ) -> tuple[list[Tensor], Any]:
        """Sends tensors; returns them on the device of ``to``, and an event for :meth:`receive`.

        ``after`` is the event that says when they are here; None if these streams computed them.
        """
        if same_memory(self.device, to.device):
            event = None if self.backend is None else self.backend.record(self.compute)
            return list(tensors), event
        with ExitStack() as stack:
            if self.backend is not None:
                ready = self.backend.record(self.compute) if after is None else after
                self.backend.wait(self.outbound, ready)
                stack.enter_context(self.backend.use(self.outbound))
            if to.backend is not None:
                stack.enter_context(to.backend.use(to.inbound))
            copies = [moved(tensor, to.device) for tensor in tensors]
            if self.backend is not None:
                for tensor in tensors:
                    self.backend.keep(tensor, self.outbound)
            return copies, None if to.backend is None else to.backend.record(to.inbound)
