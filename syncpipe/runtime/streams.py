"""The streams of a worker, and transfers between workers.

A worker on an accelerator has three streams: ``compute`` (the device's current stream at the time
of the call), and ``outbound`` and ``inbound`` for copies to and from other devices, so that copies
overlap with computation. A CPU worker has none: its :class:`DeviceStreams` has no ``backend``.

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
    # A build for an accelerator names its type even on a machine without one.
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return []
    return [torch.device(kind.type, k) for k in range(torch.accelerator.device_count())]


def checked_device(device: torch.device | str | int, kind: str | None = None) -> torch.device:
    """The ``torch.device`` of a name, or of an index and its ``kind``; ``RuntimeError`` if invalid.

    PyTorch stores the index in 8 bits: it takes "cpu:300" for "cpu:44".
    """
    counted = isinstance(device, int) and kind is not None
    found = torch.device(kind, device) if counted else torch.device(device)  # type: ignore[arg-type]
    index = device if counted else str(device).partition(":")[2]
    if str(index) not in ("", str(found.index)) or (found.index or 0) < 0:
        raise RuntimeError(f"PyTorch supports indices 0 to 127 only, and takes it for {found}")
    return found


def same_memory(a: torch.device, b: torch.device) -> bool:
    """Whether two devices share one memory, as ``cpu:0`` and ``cpu:1`` do."""
    return a.type == b.type and (a.type == "cpu" or a.index == b.index)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device; the host waits only for copies to the CPU, which it may read."""
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")


class AcceleratorStreams:
    """The stream operations of one device; only this class looks into streams and events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def new(self) -> torch.Stream:
        return torch.Stream(device=self.device)

    @contextmanager
    def use(self, stream: torch.Stream) -> Iterator[None]:
        """Makes ``stream`` and its device current on the calling thread; restores both after it.

        ``with stream:`` would store the previous stream in the stream object, which threads share.
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
        """An event after all work that ``stream`` was given so far."""
        return stream.record_event()

    def stamp(self, stream: torch.Stream) -> torch.Event:
        """As :meth:`record`, with timing; for traces."""
        return stream.record_event(torch.Event(self.device, enable_timing=True))

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Makes later work on ``stream`` wait for ``event``; the host does not wait."""
        stream.wait_event(event)

    def keep(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Keeps the memory of ``tensor`` until ``stream`` has finished with it."""
        if tensor.device.type == self.device.type:
            tensor.record_stream(stream)


@dataclass(slots=True)
class DeviceStreams:
    """The device of a worker and its streams in one call; a CPU worker has no streams."""

    device: torch.device
    backend: Any = None  # as AcceleratorStreams
    compute: Any = None
    outbound: Any = None
    inbound: Any = None

    def active(self) -> AbstractContextManager[Any]:
        """The context in which the stages of this worker run."""
        return nullcontext() if self.backend is None else self.backend.use(self.compute)

    def wait_for(self, other: DeviceStreams) -> None:
        """Makes later work wait for all work that ``other`` was given so far.

        This includes outbound copies: they may still read the caller's tensors.
        """
        if self.backend is None or other.backend is None:
            return
        for stream in (other.compute, other.outbound):
            if stream is not None and self.compute != stream:
                self.backend.wait(self.compute, other.backend.record(stream))

    def record_on_stream(self, tensors: Sequence[Tensor], other: DeviceStreams) -> None:
        """Keeps the memory of tensors that ``other`` made until these streams have used it."""
        if self.backend is not None and self.compute != other.compute:
            for tensor in tensors:
                self.backend.keep(tensor, self.compute)

    def receive(self, event: Any, tensors: Sequence[Tensor]) -> None:
        """Makes later work wait for received tensors (``event`` None: no wait needed)."""
        if self.backend is None or event is None:
            return
        self.backend.wait(self.compute, event)
        for tensor in tensors:
            self.backend.keep(tensor, self.compute)

    def send(
        self, tensors: Sequence[Tensor], to: DeviceStreams, after: Any = None
    ) -> tuple[list[Tensor], Any]:
        """Sends tensors; returns them on the device of ``to``, and an event for :meth:`receive`.

        ``after`` is the event at which the tensors are ready; None if these streams computed them.
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
