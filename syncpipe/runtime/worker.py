"""A worker: the thread, and on an accelerator the streams, that serve one device."""

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

#: Whether this is a free-threaded build of CPython. There an object belongs to the thread that made
#: it, and what other threads let go of dies when that one next runs Python. A thread that sleeps
#: keeps all of it alive, the memory of tensors included.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def has_lock() -> bool:
    """Whether only one thread at a time can run Python."""
    return not FREE_THREADED or bool(sys._is_gil_enabled())  # type: ignore[attr-defined, unused-ignore]


class Worker:
    """A device with streams of its own, to be given to ``Pipe`` in place of a device.

    Pipes make their workers themselves, one for each device. Made by hand, a worker puts a
    partition on streams (and a thread) of its own even when another one uses the same device::

        Pipe(model, [2, 2], devices=[Worker("cuda:0"), Worker("cuda:0")])

    Args:
        device: what ``torch.device`` takes.
        streams: the stream operations to use, where PyTorch's own are not meant (tests).
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
        """Return the worker that a pipe makes for a device: it computes on the current stream."""
        worker = cls(device)
        worker._private = False
        return worker

    def lane(self) -> DeviceStreams:
        """Return this worker's device and streams for one call; call it on the caller's thread."""
        if self._made is None:
            backend = self._given
            if backend is None and self.device.type not in ("cpu", "meta"):
                backend = AcceleratorStreams(self.device)
            if backend is None:
                self._made = (None, None, None, None)
            else:
                compute = backend.new() if self._private else None
                self._made = (backend, compute, backend.new(), backend.new())
        backend, compute, outbound, inbound = self._made
        if backend is not None and compute is None:
            compute = backend.current()
        return DeviceStreams(self.device, backend, compute, outbound, inbound)

    def host_streams(self) -> tuple[Any, Any]:
        """Return two streams for copies to the host and back."""
        if self._host is None:
            backend = self.lane().backend
            self._host = (backend.new(), backend.new())
        return self._host

    def caller_lane(self) -> DeviceStreams:
        """Return the stream on which the caller of the pipe works on this worker's device."""
        backend = self.lane().backend
        return DeviceStreams(self.device, backend, None if backend is None else backend.current())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None, "_host": None}

    def __repr__(self) -> str:
        return f"Worker({str(self.device)!r})"


#: A job, which must not raise, and what to call once nothing is held of it.
Item = tuple[Callable[[], Any], Callable[[], Any]]
#: After a job, and later: so often an idle thread lets go of what dies only when it runs.
_LOOK_SECONDS = (0.001 if FREE_THREADED else None, 0.1)


class WorkerThread:
    """A daemon thread that runs the ``jobs`` it is given, in order, until it is stopped, or its
    ``owner`` dies."""

    def __init__(self, name: str, owner: object) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        # The callback is written in C: Ctrl-C cannot come in between.
        args = self.jobs, weakref.ref(owner, self.jobs.put)
        self._thread = threading.Thread(
            target=_serve, args=args, name=f"syncpipe {name}", daemon=True
        )

    def start(self) -> None:
        """Starts the thread; whoever stops it must know it by then, for Ctrl-C may come."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it was started and has not said itself that it ends.

        Not ``Thread.is_alive``: before Python 3.13 that takes a running thread for ended if Ctrl-C
        comes in the middle of it.
        """
        return self._thread.ident is not None and self._thread in threading.enumerate()

    def stop(self) -> None:
        """Ends the thread after the jobs it has; idempotent, callable from any thread."""
        self.jobs.put(None)

    def join(self, timeout: float) -> None:
        """Waits until the thread has ended, unless it is the calling one."""
        if self.alive and self._thread is not threading.current_thread():
            self._thread.join(timeout)


def _serve(jobs: SimpleQueue[Any], owner: weakref.ref[object]) -> None:
    # A function and not a method, so that an idle thread keeps nothing alive but its queue.
    seconds = _LOOK_SECONDS[0]
    while True:
        try:
            item = jobs.get(timeout=seconds)
        except Empty:
            seconds = seconds and min(2 * seconds, _LOOK_SECONDS[1])
            continue
        if item is None or item is owner:
            return
        job, report = item
        job()
        del item, job
        report()
        seconds = _LOOK_SECONDS[0]
