"""Something that took time, and how such things are counted; the ground of timelines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from syncpipe.schedules.kinds import KINDS as ACTIONS

__all__ = [
    "KINDS", "Span", "check", "handy", "hosted", "idle", "lanes", "merged", "number", "total",
]  # fmt: skip

#: What a span can be.
KINDS = (*ACTIONS, "transfer")

#: The units of time that are known, the longest first.
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, on one row of a timeline.

    Attributes:
        kind: one of :data:`KINDS`.
        i: micro-batch.
        j: stage; for a transfer the one that it comes from.
        row: index of the worker or device; for a transfer the one that sends.
        start: seconds since the timeline's beginning; for a simulation in its own unit.
        end: the same.
        target: for a transfer the stage that it goes to.
        step: which call of the pipe (mini-batch) it belongs to.
        backward: for a transfer, whether it carries a gradient.
        host: for how long the thread that did it was running, in Python or in what that called, in
            the unit of the others; None where nobody knows.
    """

    kind: str
    i: int
    j: int
    row: int
    start: float
    end: float
    target: int | None = None
    step: int = 0
    backward: bool = False
    host: float | None = None

    @property
    def duration(self) -> float:
        """How long it took."""
        return self.end - self.start


def check(span: Span, rows: tuple[str, ...]) -> None:
    """Refuses what cannot be shown.

    Raises:
        ValueError: on an unknown kind, a row that is none, and an end before the start.
    """
    if span.kind not in KINDS:
        raise ValueError(f"kind={span.kind!r} in {span}; there are {', '.join(KINDS)}")
    if not 0 <= span.row < len(rows):
        raise ValueError(f"row={span.row} in {span}, but rows={rows} has {len(rows)}")
    if not -math.inf < span.start <= span.end < math.inf:
        raise ValueError(
            f"start={span.start}, end={span.end} in {span}; both are finite, and the end is not "
            "before the start"
        )


def merged(intervals: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The same time without overlaps, in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return tuple(result)


def total(intervals: Iterable[tuple[float, float]]) -> float:
    """How long intervals without overlaps are together."""
    return math.fsum(end - start for start, end in intervals)


def idle(busy: float, time: float) -> float:
    """The fraction of some time in which nothing was done; 0 where there was no time."""
    return max(0.0, 1 - busy / time) if time else 0.0


def lanes(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """Spans by start, each with the first lane that is free: on one lane no two overlap."""
    ends: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda span: span.start):
        lane = next((k for k, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        placed.append((lane, span))
    return placed


def handy(unit: str, time: float) -> tuple[float, str]:
    """A factor and a unit in which this time is a handy number."""
    if unit not in SECONDS:
        return 1.0, unit
    seconds = time * SECONDS[unit]
    shortest = "us" if seconds else unit
    best = next((name for name, one in SECONDS.items() if seconds >= one), shortest)
    return SECONDS[unit] / SECONDS[best], best


def number(value: float) -> str:
    """Three digits that count, and all of those before the point."""
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


def hosted(spans: Iterable[Span]) -> float | None:
    """For how long threads were running in these spans; None where nobody knows."""
    known = [span.host for span in spans if span.host is not None]
    return math.fsum(known) if known else None


def table(spans: Sequence[Span], rows: Sequence[tuple[str, float]], time: float, unit: str) -> str:
    """A line for each row and one for all: busy, idle and host time, and what each kind took.

    Args:
        spans: what is counted.
        rows: the name of each, and how long it was busy.
        time: how long steps took, of which a row idled the rest.
        unit: of all times.
    """
    whole, whole_unit = handy(unit, time)
    factor, short_unit = handy(unit, median([span.duration for span in spans] or [0.0]))
    kinds = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
    host = ["host"] if hosted(spans) is not None else []
    lines = [["", "busy", "idle", *host, *kinds]]

    def add(name: str, busy: float, time: float, counted: Sequence[Span]) -> None:
        line = [name, f"{number(busy * whole)} {whole_unit}", f"{idle(busy, time):.1%}"]
        if host:
            running = hosted(counted)
            line.append("-" if running is None else f"{number(running * whole)} {whole_unit}")
        for kind in kinds:
            times = [span.duration * factor for span in counted if span.kind == kind]
            line.append(_times(times) if times else "-")
        lines.append(line)

    for row, (name, busy) in enumerate(rows):
        add(name, busy, time, [span for span in spans if span.row == row])
    add("all", math.fsum(busy for _, busy in rows), len(rows) * time, spans)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for name, *cells in lines:
        right = map(str.rjust, cells, widths[1:])
        text.append("  ".join([name.ljust(widths[0]), *right]))
    return "\n".join([*text, f"kinds: count x mean | median in {short_unit}"])


def _times(times: Sequence[float]) -> str:
    return f"{len(times)} x {number(math.fsum(times) / len(times))} | {number(median(times))}"
