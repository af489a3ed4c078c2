"""Timelines: measured ones, or simulated ones (:meth:`Timeline.of`).

A timeline is a list of spans, each on a row, which is a worker or a device:

    row 0   F0F1F2      B2--B1--B0--    The bubble is the time between the first start and the
    row 1     F0F1F2B2--B1--B0--        last end in which rows are idle: here a quarter.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from syncpipe.format import SECONDS, columns, duration, three_digits, time_unit
from syncpipe.schedules.player import Costs, Simulation, Span, lanes
from syncpipe.schedules.schedule import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Span", "Timeline", "compare"]

#: The kinds of spans.
_KINDS = (*KINDS, "transfer")


class Timeline:
    """Spans on rows: which worker or device did what, and when.

    Args:
        spans: in any order.
        rows: names of the workers or devices.
        unit: of time: ``"s"``, ``"ms"`` or ``"us"``, converted where shown; or any other.
        title: stands above pictures.

    Raises:
        ValueError: a span has an unknown kind or row, or ends before it starts.
    """

    def __init__(
        self, spans: Iterable[Span], rows: Sequence[str], unit: str = "s", title: str = ""
    ) -> None:
        self.rows, self.unit, self.title = tuple(rows), unit, title
        self._spans = tuple(sorted(spans, key=lambda span: span.start))
        for span in self._spans:
            times = -math.inf < span.start <= span.end < math.inf
            if span.kind not in _KINDS or not 0 <= span.row < len(rows) or not times:
                raise ValueError(
                    f"{span}: kinds are {', '.join(_KINDS)}; rows={self.rows} has {len(rows)}; "
                    "start and end must be finite, and end not before start"
                )

    @classmethod
    def of(
        cls, simulation: Simulation, title: str = "", *,
        rows: Sequence[str] = (), unit: str = "units",
    ) -> Timeline:  # fmt: skip
        """The timeline of a simulation, by default with the name of its schedule as title."""
        schedule = simulation.schedule
        names = rows or [f"device {d}" for d in range(len(schedule.actions))]
        spans = [*simulation.spans, *simulation.transfers]
        return cls(spans, names, unit, title or schedule.name)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans in the order of their starts."""
        return self._spans

    @property
    def windows(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each step; overlapping steps are merged."""
        steps: dict[int, list[float]] = defaultdict(list)
        for span in self.spans:
            steps[span.step] += span.start, span.end
        return _union((min(times), max(times)) for times in steps.values())

    @property
    def makespan(self) -> float:
        """From the first start to the last end, time between steps included."""
        windows = self.windows
        return windows[-1][1] - windows[0][0] if windows else 0.0

    @property
    def busy(self) -> tuple[float, ...]:
        """For each row the time spent on actions; transfers do not count."""
        actions = [span for span in self.spans if span.kind != "transfer"]
        rows = range(len(self.rows))
        times = [[(span.start, span.end) for span in actions if span.row == row] for row in rows]
        return tuple([_total_length(_union(own)) for own in times])

    @property
    def host(self) -> tuple[float | None, ...]:
        """For each row the CPU time of its thread in actions, None where unknown."""
        spans, rows = self.spans, range(len(self.rows))
        return tuple(_host_time([span for span in spans if span.row == row]) for row in rows)

    @property
    def idle(self) -> tuple[float, ...]:
        """For each row the idle fraction of the steps' time."""
        time = _total_length(self.windows)
        return tuple([_idle_fraction(busy, time) for busy in self.busy])

    @property
    def bubble(self) -> float:
        """The idle fraction, from 0 to 1, of all rows' time within steps."""
        return _idle_fraction(math.fsum(self.busy), len(self.rows) * _total_length(self.windows))

    @property
    def costs(self) -> Costs:
        """Durations for a simulation: for each stage the median over micro-batches and steps.

        In the unit of the timeline. A whole backward counts as its input half; for separate halves
        trace a schedule that has them, for example ``"zb_h1"``. Of the two directions between
        stages the slower one counts.

        Raises:
            ValueError: no forward or no backward of a stage was recorded.
        """
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        sent: dict[tuple[int, int, int, int], float] = defaultdict(float)
        for span in self.spans:
            if span.target is None:
                times[span.kind, span.j].append(span.duration)
            else:  # a stage may send several tensors to another
                sent[span.j, span.target, span.step, span.i] += span.duration
        medians = {key: median(samples) for key, samples in times.items()}
        stages = range(1 + max((j for _, j in medians), default=-1))
        for j in stages or (0,):
            medians.setdefault(("backward_input", j), medians.get(("backward", j), -1.0))
            if ("forward", j) not in medians or medians["backward_input", j] < 0:
                raise ValueError(
                    f"stage {j} has no forward or no backward in this timeline: trace train_batch"
                )
        links: dict[tuple[int, int], list[float]] = defaultdict(list)
        for (j, target, *_), time in sent.items():
            links[j, target].append(time)
        slower: dict[tuple[int, int], float] = defaultdict(float)
        for link, samples in links.items():
            slower[min(link), max(link)] = max(median(samples), slower[min(link), max(link)])
        return Costs(
            forward=tuple([medians["forward", j] for j in stages]),
            backward_input=tuple([medians["backward_input", j] for j in stages]),
            backward_weight=tuple([medians.get(("backward_weight", j), 0.0) for j in stages]),
            transfer=tuple([slower.pop((j, j + 1), 0.0) for j in stages[:-1]]),
            skips=slower,
            recompute=tuple([medians.get(("recompute", j), medians["forward", j]) for j in stages]),
        )

    @property
    def rematerialized(self) -> tuple[int, ...]:
        """For each stage how many micro-batches were recomputed."""
        cells = {(span.i, span.j) for span in self.spans if span.kind == "recompute"}
        stages = range(1 + max((span.j for span in self.spans), default=-1))
        return tuple(sum(j == stage for _, j in cells) for stage in stages)

    def table(self) -> str:
        """A line for each row and one for all: busy, idle and host time, durations by kind."""
        spans, n = self.spans, len(self.rows)
        factor, unit = time_unit(self.unit, median([span.duration for span in spans] or [0.0]))
        kinds = [kind for kind in _KINDS if any(span.kind == kind for span in spans)]
        busy, idle = [*self.busy, math.fsum(self.busy)], [*self.idle, self.bubble]
        host = [*self.host, _host_time(spans)]
        lines = [["", "busy", "idle", *["host"] * (host[n] is not None), *kinds]]
        for row, name in enumerate([*self.rows, "all"]):
            own = [span for span in spans if row in (span.row, n)]
            line, running = [name, duration(busy[row], self.unit), f"{idle[row]:.1%}"], host[row]
            if host[n] is not None:
                line.append("-" if running is None else duration(running, self.unit))
            for kind in kinds:
                took = [span.duration * factor for span in own if span.kind == kind]
                numbers = [three_digits(some(took)) for some in (fmean, median) if took]
                line.append(f"{len(took)} x {' | '.join(numbers)}" if took else "-")
            lines.append(line)
        kinds_in = f"kinds: count x mean | median in {unit}"
        return "\n".join([*columns(lines), kinds_in, self.summary])

    @property
    def summary(self) -> str:
        """Makespan and bubble as text."""
        return f"makespan {duration(self.makespan, self.unit)}, bubble {self.bubble:.1%}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a picture (``.svg``, ``.png``), or ``.json`` for https://ui.perfetto.dev.

        In Perfetto each row is a thread, with further threads for its transfers; units other than
        s, ms and us are shown as seconds. Pictures need matplotlib, ``syncpipe[plot]``.
        """
        suffix = Path(path).suffix.lower()
        if suffix not in (".json", ".svg", ".png"):
            raise ValueError(f"path={os.fspath(path)!r} must end in .json, .svg or .png")
        if suffix == ".json":
            Path(path).write_text(json.dumps(_trace_events(self)), encoding="utf-8")
        else:
            self.figure().savefig(path, format=suffix[1:])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw a picture: what ran when, how long rows were idle, and micro-batches in flight.

        Without ``ax`` on a new figure, without pyplot: no window opens, and any thread may call it.
        """
        if ax is None:
            return self.figure().axes[0]
        picture, panels, axis = _panels({self.title: self})
        picture.paint(ax, panels[0], axis)
        return ax

    def figure(self) -> Figure:
        """The figure of :meth:`plot`."""
        return compare({self.title: self})

    def _repr_svg_(self) -> str | None:
        """The picture in notebooks, if matplotlib is installed."""
        file = StringIO()
        with suppress(ImportError):
            self.figure().savefig(file, format="svg")
        return file.getvalue() or None

    def __repr__(self) -> str:
        name = f"{type(self).__name__} {self.title!r}" if self.title else type(self).__name__
        return f"<{name}: {len(self.spans)} spans on {len(self.rows)} rows, {self.summary}>"


def compare(timelines: Mapping[str, Timeline], *, scale: bool = False) -> Figure:
    """Draw several timelines one above the other on one axis, each from its first start::

        compare({"simulated": simulated, "measured": trace}).savefig("both.svg")

    Args:
        timelines: by title.
        scale: stretch all to the same length, in percent of their own makespan. Otherwise all need
            the same unit.
    """
    units = list(dict.fromkeys(timeline.unit for timeline in timelines.values()))
    if not units:
        raise ValueError(f"timelines={timelines} is empty; give at least one, by title")
    if len(units) > 1 and not scale:
        raise ValueError(
            f"timelines have the units {', '.join(units)}: scale=True draws each by its makespan"
        )
    picture, panels, axis = _panels(timelines, scale)
    figure: Figure = picture.draw(panels, axis)
    return figure


def _panels(timelines: Mapping[str, Timeline], scale: bool = False) -> tuple[Any, list[Any], str]:
    """The module that draws, panels of the timelines, and the label of the axis."""
    try:
        import matplotlib.figure  # noqa: F401  # checked here, needed there

        from syncpipe.timeline import picture
    except ImportError as error:
        raise ImportError(
            f'a picture needs matplotlib: pip install "syncpipe[plot]" ({error})'
        ) from error
    longest = max(timelines.values(), key=lambda timeline: timeline.makespan)
    factor, unit = time_unit(longest.unit, longest.makespan)
    panels = []
    for title, timeline in timelines.items():
        # A single timeline keeps its times, several start at 0.
        start = min((s.start for s in timeline.spans), default=0.0) if len(timelines) > 1 else 0.0
        share = 100 / (timeline.makespan or 1.0) if scale else factor
        moved = [
            replace(s, start=(s.start - start) * share, end=(s.end - start) * share)
            for s in timeline.spans
        ]
        facts = timeline.summary if moved else "nothing ran"
        panels.append(picture.Panel(title, facts, Timeline(moved, timeline.rows)))
    return picture, panels, "time (% of the makespan)" if scale else f"time ({unit})"


def _union(intervals: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return tuple(result)


def _total_length(intervals: Iterable[tuple[float, float]]) -> float:
    return math.fsum(end - start for start, end in intervals)


def _idle_fraction(busy: float, time: float) -> float:
    """The fraction of ``time`` that is not busy; 0 without time."""
    return max(0.0, 1 - busy / time) if time else 0.0


def _host_time(spans: Sequence[Span]) -> float | None:
    """CPU time of threads in these spans; None where unknown."""
    known = [span.host for span in spans if span.host is not None]
    return math.fsum(known) if known else None


def _trace_events(timeline: Timeline) -> dict[str, Any]:
    """Chrome's trace event format: complete events ("X"), and metadata ("M") that name threads."""
    events: list[dict[str, Any]] = []

    def name(what: str, tid: int, **args: str | int) -> None:
        events.append({"ph": "M", "name": what, "pid": 1, "tid": tid, "args": args})

    threads: list[tuple[str, list[Span]]] = []
    for row, label in enumerate(timeline.rows):
        own = [span for span in timeline.spans if span.row == row]
        threads.append((label, [span for span in own if span.kind != "transfer"]))
        # Viewers nest spans that overlap on a thread, so each lane is a thread of its own.
        placed = lanes(span for span in own if span.kind == "transfer")
        for lane in range(1 + max((lane for lane, _ in placed), default=-1)):
            number = f" {lane + 1}" if lane else ""
            threads.append((f"{label} transfers{number}", [s for k, s in placed if k == lane]))
    name("process_name", 0, name=timeline.title or "syncpipe")
    microseconds = SECONDS.get(timeline.unit, 1.0) * 1e6
    # From 2, as viewers take thread 1 of process 1 for the main thread.
    for tid, (label, spans) in enumerate(threads, start=2):
        name("thread_name", tid, name=label)
        name("thread_sort_index", tid, sort_index=tid)
        for span in spans:
            args: dict[str, Any] = {"i": span.i, "j": span.j, "step": span.step}
            if span.kind == "transfer":
                args |= {"target": span.target, "backward": span.backward}
            if span.host is not None:
                args["host us"] = span.host * microseconds
            times = {"ts": span.start * microseconds, "dur": span.duration * microseconds}
            event = {"ph": "X", "name": f"{span.kind} {span.i}", "cat": span.kind, "pid": 1}
            events.append({**event, "tid": tid, **times, "args": args})
    return {"traceEvents": events, "otherData": {"unit": timeline.unit}}
