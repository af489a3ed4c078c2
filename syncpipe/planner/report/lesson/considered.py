"""What else was considered: bars of step times, and why some are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from syncpipe.balance.profile import in_bytes
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.report.lesson.canvas import WIDTH, Canvas, fitted
from syncpipe.planner.report.rivals import Rival, duration
from syncpipe.planner.schedules.layouts import TITLES
from syncpipe.planner.schedules.setting import Scheduled

__all__ = ["draw_considered"]

_ROW, _NAME, _BARS, _NOTE = 21, 400, 220, 775
#: Bars of what takes longer than so many times the plan's own end there.
_LONG = 2.5


class _Row(NamedTuple):
    name: str
    time: float | None
    note: str


def draw_considered(
    canvas: Canvas,
    time: float,
    mine: str,
    rivals: tuple[Rival, ...],
    others: tuple[Scheduled, ...],
    machine: Machine,
) -> None:
    """A bar for the plan and for everything that it was compared with.

    Args:
        canvas: to draw on.
        time: of the plan.
        mine: its schedule, and what it takes, in words.
        rivals: other ways.
        others: other schedules.
        machine: the devices.
    """
    rows = [_Row("this plan", time, mine), *_rows(rivals, others, machine)]
    most = min(max(row.time or 0.0 for row in rows), _LONG * time) or 1.0
    for row in rows:
        y = canvas.y
        own = row.name == "this plan"
        look = "ink bold" if own else "ink"
        canvas.text(_NAME - 12, y + 14, fitted(row.name, _NAME - 20, 12), f"end {look}", row.name)
        if row.time is None:
            canvas.text(_NAME, y + 14, "does not fit", "alarm")
        else:
            width = _BARS * min(1.0, row.time / most)
            canvas.box(_NAME, y + 3, width, _ROW - 7, "mine" if own else "other")
            longer = " .." if row.time > most else ""
            percent = round(100 * (row.time / time - 1)) if time else 0
            said = f"{longer} {duration(row.time)}" + (f", {percent:+d} %" if percent else "")
            canvas.text(_NAME + width + 6, y + 14, said, look)
        canvas.text(_NOTE, y + 14, fitted(row.note, WIDTH - _NOTE - 12, 11), "small faint",
                    row.note)  # fmt: skip
        canvas.y += _ROW


def _rows(
    rivals: tuple[Rival, ...], others: tuple[Scheduled, ...], machine: Machine
) -> Iterator[_Row]:
    for rival in rivals:
        yield _Row(rival.name, rival.time, rival.note)
    for other in others:
        note = f"{in_bytes(max(other.on_device))} at most, {len(other.balance)} stages"
        fits = other.fits(machine)
        yield _Row(f"schedule {TITLES[other.schedule]}", other.time if fits else None, note)
