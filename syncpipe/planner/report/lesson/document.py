"""The whole picture, as an SVG or as a page of HTML that needs nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from syncpipe.balance.profile import Profile, in_bytes
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.report.lesson.canvas import WIDTH, Canvas, clean, fitted
from syncpipe.planner.report.lesson.considered import draw_considered
from syncpipe.planner.report.lesson.layers import draw_layers
from syncpipe.planner.report.lesson.step import draw_memory, draw_step
from syncpipe.planner.report.page import bounded, introduction
from syncpipe.planner.report.rivals import Rival, duration
from syncpipe.planner.report.stages import on_devices
from syncpipe.planner.schedules.footprint import base, over_time
from syncpipe.planner.schedules.layouts import TITLES, placement
from syncpipe.planner.schedules.setting import Scheduled, Setting
from syncpipe.planner.search.candidate import Candidate, Terms

__all__ = ["Shown", "save", "svg"]


@dataclass(frozen=True)
class Shown:
    """A plan, as far as it is shown; each as in :class:`syncpipe.planner.Plan`."""

    profile: Profile
    machine: Machine
    batch_size: int
    param_scale: float
    chosen: Candidate
    rivals: tuple[Rival, ...]
    others: tuple[Scheduled, ...]


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 12px; max-width: {width}px; background: #ffffff; color: #1d1f24;
        font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }}
svg {{ display: block; max-width: 100%; height: auto; }}
pre {{ overflow-x: auto; font-size: 12px; line-height: 1.35; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181d; color: #e8eaf0; }} }}
</style>
</head>
<body>
{picture}
<details><summary>The same as text</summary>
<pre>{text}</pre>
</details>
</body>
</html>
"""


def save(path: str | os.PathLike[str], plan: Shown, text: str) -> None:
    """Writes the picture.

    Args:
        path: ends in ``.html`` or ``.svg``.
        plan: to be shown.
        text: the page of the plan, which comes along in HTML.

    Raises:
        ValueError: it ends in something else.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".html", ".svg"):
        raise ValueError(f"path={os.fspath(path)!r} must end in .html or .svg")
    picture = svg(plan)
    if suffix == ".html":
        title = introduction(plan.batch_size, len(plan.machine))
        picture = _PAGE.format(title=clean(title), width=WIDTH, picture=picture, text=clean(text))
    Path(path).write_text(picture, encoding="utf-8")


def svg(plan: Shown) -> str:
    """The model, the cut, the step, the memory, and what else was considered."""
    chosen, machine = plan.chosen, plan.machine
    terms = Terms(plan.profile, machine, plan.batch_size, plan.param_scale)
    chain = terms.chain(chosen.chunks)
    schedule = chosen.simulation.schedule
    stages = Setting(terms, chosen.schedule, schedule).footprints(chosen.balance, chosen.recomputes)
    fixed = [
        base(stages[j] for j, device in enumerate(placement(schedule)) if device == d)
        for d in range(len(schedule.actions))
    ]
    canvas = Canvas()
    _head(canvas, plan)
    pace = waits = ""
    if len(chosen.balance) > 1:
        pace = (
            "The slowest stage sets the pace, so stages should take about the same time; the "
            "number between the bars is what each takes."
        )
        waits = (
            ": a device waits for its first micro-batch, and for gradients. More micro-batches "
            "make it smaller"
        )
    canvas.heading(
        "The model, layer by layer, and where it is cut",
        "Time and memory of each layer, for " + _one_of(chosen.chunks) + ". " + pace,
    )
    draw_layers(canvas, chain, [layer.name for layer in plan.profile.layers], chosen)
    canvas.heading(
        "One training step",
        "Each box is one micro-batch on its way forward or back, in a colour of its own. Grey is "
        f"the bubble, {chosen.simulation.bubble:.1%} of the devices' time{waits}.",
    )
    draw_step(canvas, machine, chosen)
    canvas.heading(
        "What each device holds meanwhile",
        "Parameters and what goes with them are there all the time; a micro-batch adds what its "
        "backward needs, until it has gone back. A stage that recomputes keeps its input only.",
    )
    draw_memory(canvas, machine, chosen, over_time(chosen.simulation, stages), fixed)
    canvas.heading("What else was considered", _about_rivals(plan))
    mine = f"{TITLES[chosen.schedule]}, {in_bytes(max(on_devices(chosen)))} at most"
    draw_considered(canvas, chosen.time, mine, plan.rivals, plan.others, machine)
    return canvas.svg(introduction(plan.batch_size, len(machine)))


def _head(canvas: Canvas, plan: Shown) -> None:
    """Title, and the figures."""
    chosen = plan.chosen
    canvas.y = 36
    canvas.text(16, canvas.y, introduction(plan.batch_size, len(plan.machine)), "h1 ink")
    used, n = max(placement(chosen.simulation.schedule)) + 1, len(chosen.balance)
    way = (
        f"{TITLES[chosen.schedule]}: {n} stages on {used} devices" if n > 1 else "one device alone"
    )
    again = sum(chosen.recomputes)
    recomputes = f", {again} of the stages recompute" if again else ""
    canvas.text(16, canvas.y + 22, f"{way}, {_many(chosen.chunks)}{recomputes}", "faint")
    source = f"layers {plan.profile.how or 'as profiled'}"
    canvas.text(WIDTH - 16, canvas.y + 22, fitted(source, 600, 12), "end faint", source)
    canvas.y += 54
    figures = [
        (duration(chosen.time), "step, without loss and optimizer"),
        (f"{plan.batch_size / chosen.time:,.4g}" if chosen.time else "-", "samples per second"),
        (f"{chosen.simulation.bubble:.1%}", "bubble"),
        (in_bytes(max(on_devices(chosen))), "most memory on a device"),
        (f"{chosen.certificate:.3f}", f"times the bound, {duration(chosen.bound)}"),
    ]
    x = 16
    for number, what in figures:
        canvas.text(x, canvas.y, number, "big ink")
        canvas.text(x, canvas.y + 17, what, "small faint")
        x += 222
    canvas.y += 34
    canvas.text(16, canvas.y, f"The bound is one for {bounded(chosen)}; other plans have "
                "bounds of their own.", "small faint")  # fmt: skip


def _many(chunks: int) -> str:
    return "1 micro-batch" if chunks == 1 else f"{chunks} micro-batches"


def _one_of(chunks: int) -> str:
    return "the one micro-batch" if chunks == 1 else f"one of {chunks} micro-batches"


def _about_rivals(plan: Shown) -> str:
    if plan.others and plan.others[0].guessed:
        return (
            "Step times, simulated likewise. Halves of backwards are estimated: half of it for "
            "each layer that has weights."
        )
    return "Step times, simulated likewise."
