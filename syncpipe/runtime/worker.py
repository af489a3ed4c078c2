"""A worker: the thread, and on an accelerator the streams, of one device."""

from __future__ import annotations

import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch

from syncpipe.runtime.streams import AcceleratorStreams, DeviceStreams, checked_device

#: Whether this is a free-threaded build of CPython. There an object that another thread drops is
#: freed when the thread that made it next runs Python, so a sleeping thread keeps tensors alive.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def has_lock() -> bool:
    return not FREE_THREADED or bool(sys._is_gil_enabled())  # type: ignore[attr-defined, unused-ignore]


class Worker:
    """A device with its own thread and streams, to be given to ``Pipe`` in place of a device.

    A pipe makes one worker per device. Workers made by hand give several partitions on one device
    a thread and streams each::

        Pipe(model, [2, 2], devices=[Worker("cuda:0"), Worker("cuda:0")])

    Args:
        device: what ``torch.device`` takes.
        streams: stream operations to use in place of PyTorch's (for tests).
    """

    def __init__(self, device: torch.device | str | int, *, streams: Any = None) -> None:
        self.device = checked_device(device)
        if self.device.index is None and self.device.type not in ("cpu", "meta"):
            self.device = torch.device(self.device.type, torch.accelerator.current_device_index())
        self._given = streams
        self._private = True
        self._made: tuple[Any, Any, Any, Any] | None = None
        self._host: tuple[Any, Any] | None = None

    @classmethod
    def shared(cls, device: torch.device) -> Worker:
        """Return the worker that a pipe makes for a device; it computes on the current stream."""
        worker = cls(device)
        worker._private = False
        return worker

    def lane(self) -> DeviceStreams:
        """Return the device and streams of one call; must run on the caller's thread."""
        if self._given is None and self.device.type in ("cpu", "meta"):
            return DeviceStreams(self.device)
        if self._made is None:
            backend = AcceleratorStreams(self.device) if self._given is None else self._given
            compute = backend.new() if self._private else None
            self._made = (backend, compute, backend.new(), backend.new())
        backend, compute, outbound, inbound = self._made
        compute = backend.current() if compute is None else compute
        return DeviceStreams(self.device, backend, compute, outbound, inbound)

    def host_streams(self) -> tuple[Any, Any]:
        """Return two streams for copies to the host and back."""
        if self._host is None:
            backend = self.lane().backend
            self._host = (backend.new(), backend.new())
        return self._host

    def caller_lane(self) -> DeviceStreams:
        """Return the caller's current stream on this worker's device."""
        backend = self.lane().backend
        return DeviceStreams(self.device, backend, None if backend is None else backend.current())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None, "_host": None}

    def __repr__(self) -> str:
        return f"Worker({str(self.device)!r})"


#: A job, which must not raise, and a callback for when all references to the job are dropped.
Item = tuple[Callable[[], Any], Callable[[], Any]]
#: Seconds until an idle thread wakes to free objects (``FREE_THREADED``): the first, the longest.
_POLL_SECONDS = (0.001 if FREE_THREADED else None, 0.1)


class WorkerThread:
    """A daemon thread that runs its ``jobs`` in order until it is stopped or ``owner`` is freed."""

    def __init__(self, name: str, owner: object) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        # A C callback: Ctrl-C cannot interrupt it.
        args = self.jobs, weakref.ref(owner, self.jobs.put)
        self._thread = threading.Thread(
            target=_serve, args=args, name=f"syncpipe {name}", daemon=True
        )

    def start(self) -> None:
        """Starts the thread; its owner must hold it already, in case of Ctrl-C."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread was started and has not ended.

        Not ``Thread.is_alive``: before Python 3.13, Ctrl-C inside it marks a running thread ended.
        """
        return self._thread.ident is not None and self._thread in threading.enumerate()

    def stop(self) -> None:
        """Ends the thread after its current jobs; idempotent, callable from any thread."""
        self.jobs.put(None)

    def join(self, timeout: float) -> None:
        """Waits for the end of the thread, unless it is the calling one."""
        if self.alive and self._thread is not threading.current_thread():
            self._thread.join(timeout)


def _serve(jobs: SimpleQueue[Any], owner: weakref.ref[object]) -> None:
    # Not a method, so that an idle thread keeps only its queue alive.
    seconds = _POLL_SECONDS[0]
    while True:
        try:
            item = jobs.get(timeout=seconds)
        except Empty:
            seconds = seconds and min(2 * seconds, _POLL_SECONDS[1])
            continue
        if item is None or item is owner:
            return
        job, report = item
        job()
        del item, job
        report()
        seconds = _POLL_SECONDS[0]
