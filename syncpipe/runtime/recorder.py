"""Writes down what a call does when, for ``pipe.trace()``.

On a CPU worker a moment is the host's time. On an accelerator it is an event on the stream where
the work is done, which nobody waits for: the times are read when somebody asks for them. Beside it
stands for how long the thread was running, which does not count where it waited for the
interpreter's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import torch

from syncpipe.runtime.streams import DeviceStreams
from syncpipe.schedules.schedule import Devices, devices_of

_T = TypeVar("_T")
_Range = torch._C._profiler._RecordFunctionFast


def as_range(name: str, run: Callable[..., _T], *args: Any) -> _T:
    """Runs something as a range of PyTorch's profiler; to be asked for only while one is active."""
    with _Range(name):
        return run(*args)


@dataclass(slots=True)
class Moment:
    """A point in time: the host's, or that of an event relative to another one."""

    host: float
    event: Any = None
    since: Any = None

    @property
    def seconds(self) -> float:
        """On the host's clock; waits until the event has happened."""
        if self.event is None:
            return self.host
        self.event.synchronize()
        return self.host + float(self.since.elapsed_time(self.event)) / 1e3


@dataclass(slots=True)
class Record:
    """Something that a worker did; the attributes are those of ``timeline.Span``."""

    kind: str
    i: int
    j: int
    row: int
    step: int
    start: Moment | None = None
    end: Moment | None = None
    target: int | None = None
    backward: bool = False
    host: float | None = None


class Recorder:
    """Records call number ``step``, for all threads.

    ``origins`` has for each device an event, and when it happened, for all calls of a trace.
    """

    def __init__(
        self, records: list[Record], origins: dict[torch.device, Moment], step: int
    ) -> None:
        self._records, self._origins, self.step = records, origins, step
        self._streams: list[DeviceStreams] = []
        self._rows: Devices = ()

    def begin(self, worker_streams: list[DeviceStreams], rows: Devices) -> None:
        """Call first, on the caller's thread, with the workers' streams and the stages' rows."""
        self._streams, self._rows = worker_streams, rows
        for streams in worker_streams:
            if streams.backend is not None and streams.device not in self._origins:
                # A host that is busy wakes up late; the quickest of some readings tells the time.
                readings = [_origin(streams) for _ in range(5)]
                self._origins[streams.device] = min(readings, key=itemgetter(0))[1]

    @contextmanager
    def span(self, kind: str, i: int, j: int) -> Iterator[None]:
        """The context in which stage ``j`` computes something."""
        row = self._row(i, j)
        streams = self._streams[row]
        start, running = self._now(streams, streams.compute), time.thread_time()
        yield
        host = time.thread_time() - running
        end = self._now(streams, streams.compute)
        self._records.append(Record(kind, i, j, row, self.step, start, end, host=host))

    @contextmanager
    def transfer(self, i: int, j: int, target: int, *, backward: bool) -> Iterator[None]:
        """The context in which something is sent from stage ``j`` to ``target``, or back."""
        if backward:  # along the same edge, the other way
            j, target = target, j
        row = self._row(i, j)
        source, there = self._streams[row], self._streams[self._row(i, target)]
        if source.backend is not None:  # it cannot begin before what it sends is there
            source.backend.wait(source.outbound, source.backend.record(source.compute))
        start = self._now(source, source.outbound)
        yield
        if there.backend is None:
            end = self._now(source, source.outbound)
        else:
            end = self._now(there, there.inbound)
        record = Record("transfer", i, j, row, self.step, start, end, target, backward)
        self._records.append(record)

    def _row(self, i: int, j: int) -> int:
        rows = devices_of(self._rows, j)
        return rows[i % len(rows)]

    def _now(self, streams: DeviceStreams, stream: Any) -> Moment:
        if streams.backend is None:
            return Moment(time.perf_counter())
        origin = self._origins[streams.device]
        return Moment(origin.host, streams.backend.stamp(stream), origin.event)


def _origin(streams: DeviceStreams) -> tuple[float, Moment]:
    """An event with the host's time, and by how much that may be wrong."""
    begin = time.perf_counter()
    event = streams.backend.stamp(streams.compute)
    event.synchronize()
    end = time.perf_counter()
    return end - begin, Moment(end, event)
