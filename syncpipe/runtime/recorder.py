"""Records when each action of a call runs, for ``pipe.trace()``.

A CPU worker records the host's time. An accelerator records an event on the stream that does the
work; its time is read only on request, so that the call never waits. Each record also has the CPU
time of the thread, without waits for the interpreter's lock.
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


def as_range(name: str, run: Callable[..., _T], i: int, messages: list[Any]) -> _T:
    """Runs an action as a range of PyTorch's profiler, which must be active."""
    with _Range(f"{name} {i}"):
        return run(i, messages)


@dataclass(slots=True)
class Moment:
    """A point in time: the host's, or an event's, relative to the event ``since``."""

    host: float
    event: Any = None
    since: Any = None

    @property
    def seconds(self) -> float:
        """The time on the host's clock; waits for the event."""
        if self.event is None:
            return self.host
        self.event.synchronize()
        return self.host + float(self.since.elapsed_time(self.event)) / 1e3


@dataclass(slots=True)
class Record:
    """One action or transfer of a worker, with the attributes of ``timeline.Span``."""

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
    """Records call number ``step`` of a trace, on all threads.

    ``origins``, shared by all calls of a trace, has for each device an event and its time.
    """

    def __init__(
        self, records: list[Record], origins: dict[torch.device, Moment], step: int
    ) -> None:
        self._records, self._origins, self.step = records, origins, step
        self._streams: list[DeviceStreams] = []
        self._rows: Devices = ()

    def begin(self, worker_streams: list[DeviceStreams], rows: Devices) -> None:
        """Begins a call, on the caller's thread, with the workers' streams and stages' rows."""
        self._streams, self._rows = worker_streams, rows
        for streams in worker_streams:
            if streams.backend is not None and streams.device not in self._origins:
                # A busy host wakes up late: the fastest of several readings is used.
                readings = [_origin(streams) for _ in range(5)]
                self._origins[streams.device] = min(readings, key=itemgetter(0))[1]

    @contextmanager
    def span(self, kind: str, i: int, j: int) -> Iterator[None]:
        row = self._row(i, j)
        streams = self._streams[row]
        start, running = self._now(streams, streams.compute), time.thread_time()
        yield
        host = time.thread_time() - running
        end = self._now(streams, streams.compute)
        self._records.append(Record(kind, i, j, row, self.step, start, end, host=host))

    @contextmanager
    def transfer(self, i: int, j: int, target: int, *, backward: bool) -> Iterator[None]:
        """The context of a transfer from stage ``j`` to ``target``, or back if ``backward``."""
        if backward:
            j, target = target, j
        row = self._row(i, j)
        source, destination = self._streams[row], self._streams[self._row(i, target)]
        if source.backend is not None:  # a copy starts when its source is computed
            source.backend.wait(source.outbound, source.backend.record(source.compute))
        start = self._now(source, source.outbound)
        yield
        if destination.backend is None:
            end = self._now(source, source.outbound)
        else:
            end = self._now(destination, destination.inbound)
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
    """The largest error of a reading in seconds, and an event with the host's time."""
    begin = time.perf_counter()
    event = streams.backend.stamp(streams.compute)
    event.synchronize()
    end = time.perf_counter()
    return end - begin, Moment(end, event)
