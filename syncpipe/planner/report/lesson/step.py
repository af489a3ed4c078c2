"""One step: what each device does when, and what it holds meanwhile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from syncpipe.balance.profile import in_bytes
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.report.lesson.canvas import GUTTER, RIGHT, WIDTH, Canvas, fitted
from syncpipe.planner.report.rivals import duration
from syncpipe.planner.schedules.layouts import placement
from syncpipe.planner.search.candidate import Candidate
from syncpipe.schedules.kinds import KINDS, Kind
from syncpipe.timeline.colours import PALETTE, shaded

__all__ = ["draw_memory", "draw_step"]

_LANE, _GAP, _FILL = 26, 6, 46
#: Boxes narrower than this have no number, in pixels; and there are no more numbers than so many.
_ROOM, _NUMBERS = 13, 3000
#: A limit is on the scale if somebody takes so much of it.
_NEAR = 0.25


def draw_step(canvas: Canvas, machine: Machine, chosen: Candidate) -> None:
    """A lane for each device, a box for each action, in the colour of its micro-batch."""
    simulation = chosen.simulation
    scale = (WIDTH - GUTTER - RIGHT) / (simulation.makespan or 1.0)
    boxes: dict[tuple[Kind, int], list[tuple[float, float, float, float]]] = defaultdict(list)
    numbers: list[tuple[float, float, str, str]] = []
    tops = [canvas.y + d * (_LANE + _GAP) for d in range(len(simulation.schedule.actions))]
    for d, (y, busy) in enumerate(zip(tops, simulation.busy, strict=True)):
        canvas.box(GUTTER, y, simulation.makespan * scale, _LANE, "lane")
        name = machine.name(d)
        canvas.text(GUTTER - 10, y + 17, fitted(name, GUTTER - 14, 12), "end ink", name)
        idle = 1 - busy / simulation.makespan if simulation.makespan else 0.0
        canvas.text(WIDTH - RIGHT + 12, y + 17, f"{max(0.0, idle):.0%} idle", "faint")
    several = max(map(len, _stages(chosen))) > 1
    for span in simulation.spans:
        kind, i, j = span.action
        x, width = GUTTER + span.start * scale, (span.end - span.start) * scale
        y = tops[span.device]
        boxes[kind, i % len(PALETTE)].append((x, y, max(0.3, width - 0.5), _LANE))
        if width >= _ROOM:
            look = "light" if KINDS[kind].shade < 0.3 else "dark"
            word = f"{i}" if not several or width < 2.2 * _ROOM else f"{i} s{j}"
            numbers.append((x + width / 2, y + 17, word, f"small mid {look}"))
    for (kind, k), found in boxes.items():
        look = f"{kind.replace('_', '-')}-{k}"
        canvas.style(f".{look} {{ fill: {shaded(PALETTE[k], KINDS[kind].shade)}; }}")
        canvas.boxes(found, look)
        if kind == "recompute":
            canvas.boxes(found, "hatched")
    if len(numbers) <= _NUMBERS:
        for number in numbers:
            canvas.text(*number)
    canvas.y = tops[-1] + _LANE + 4
    _axis(canvas, simulation.makespan, scale)
    x = float(GUTTER)
    for kind in (kind for kind in KINDS if any(k == kind for k, _ in boxes)):
        for look in (f"{kind.replace('_', '-')}-0", *["hatched"] * (kind == "recompute")):
            canvas.boxes([(x, canvas.y + 8, 11, 11)], look)
        words = KINDS[kind].words
        canvas.text(x + 16, canvas.y + 18, words, "small ink")
        x += 34 + 6.2 * len(words)
    canvas.y += 22


def draw_memory(
    canvas: Canvas,
    machine: Machine,
    chosen: Candidate,
    levels: Sequence[Sequence[tuple[float, float]]],
    fixed: Sequence[float],
) -> None:
    """What each device holds, on the same axis of time, and its limit.

    Args:
        canvas: to draw on.
        machine: knows the limits.
        chosen: the plan.
        levels: for each device when what it holds changes, and the bytes from then on.
        fixed: for each device what it holds all the time.
    """
    makespan = chosen.simulation.makespan
    scale = (WIDTH - GUTTER - RIGHT) / (makespan or 1.0)
    peaks = [max(level for _, level in row) for row in levels]
    limits = machine.memory[: len(peaks)]
    near = any(peak > _NEAR * limit for peak, limit in zip(peaks, limits, strict=True))
    most = max(limit for limit in limits if not math.isinf(limit)) if near else 0.0
    most = max(most, 1.1 * max(peaks)) or 1.0
    for d, row in enumerate(levels):
        top = canvas.y + d * (_FILL + _GAP)
        floor, name = top + _FILL, machine.name(d)
        canvas.box(GUTTER, top, makespan * scale, _FILL, "lane")

        def y(level: float, floor: float = floor) -> float:
            return floor - _FILL * level / most

        points = [(GUTTER + time * scale, y(level)) for time, level in row]
        points.append((GUTTER + makespan * scale, points[-1][1]))
        canvas.steps(_thinned(points), floor, "held")
        canvas.box(GUTTER, y(fixed[d]), makespan * scale, floor - y(fixed[d]), "fixed")
        canvas.text(GUTTER - 10, top + 20, fitted(name, GUTTER - 14, 12), "end ink", name)
        canvas.text(WIDTH - RIGHT + 12, top + 18, in_bytes(peaks[d]), "bold ink")
        limit = limits[d]
        if limit <= most:
            canvas.line([(GUTTER, y(limit)), (GUTTER + makespan * scale, y(limit))], "limit")
        if not math.isinf(limit):
            share = f"of {in_bytes(limit)} ({peaks[d] / limit:.0%})"
            canvas.text(WIDTH - RIGHT + 12, top + 33, share, "small faint")
    canvas.y += len(levels) * (_FILL + _GAP) + 2
    _axis(canvas, makespan, scale)
    x = float(GUTTER)
    for look, word in (
        ("held", "activations and what is kept for backward"),
        ("fixed", "parameters, gradients, optimizer, and what is alive for a moment"),
    ):
        canvas.box(x, canvas.y + 8, 11, 11, look)
        canvas.text(x + 16, canvas.y + 18, word, "small ink")
        x += 34 + 6.2 * len(word)
    if near:
        canvas.line([(x, canvas.y + 14), (x + 26, canvas.y + 14)], "limit")
        canvas.text(x + 32, canvas.y + 18, "limit", "small ink")
    canvas.y += 22


def _stages(chosen: Candidate) -> list[list[int]]:
    device_of = placement(chosen.simulation.schedule)
    return [[j for j, d in enumerate(device_of) if d == k] for k in range(max(device_of) + 1)]


def _axis(canvas: Canvas, makespan: float, scale: float) -> None:
    """Times below the lanes."""
    y = canvas.y
    canvas.line([(GUTTER, y), (WIDTH - RIGHT, y)], "rule")
    if not makespan:
        return
    step = 10 ** math.floor(math.log10(makespan / 4))
    step *= next(k for k in (1, 2, 5, 10) if makespan / (step * k) <= 8)
    for k in range(int(makespan / step) + 1):
        x = GUTTER + k * step * scale
        canvas.line([(x, y), (x, y + 4)], "rule")
        canvas.text(x, y + 16, duration(k * step) if k else "0", "small mid faint")
    canvas.y += 20


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points that a pixel cannot tell apart the highest."""
    if len(points) <= 4 * WIDTH:
        return points
    kept = [points[0]]
    for x, y in points[1:-1]:
        if x - kept[-1][0] < 0.25:
            kept[-1] = kept[-1][0], min(y, kept[-1][1])
        else:
            kept.append((x, y))
    return [*kept, points[-1]]
