"""Something that took time, and how such things are counted; the ground of timelines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from syncpipe.schedules.kinds import KINDS as ACTIONS

__all__ = [
    "KINDS", "SECONDS", "Span", "check", "handy", "idle", "lanes", "merged", "number", "total",
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
            the unit of the others; None where unknown.
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
