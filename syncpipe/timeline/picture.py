"""Draw timelines with matplotlib, without pyplot, which keeps global state.

A row, from top to bottom:

                ---- ----                             transfers of its gradients
    |_0_||_1_||_2_|______________|__2__||__1__|__|    boxes on a grey lane: grey is idle time
       ---- ----                                      transfers of its activations
    ___-----=====-------------------------____        number of micro-batches in flight
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from syncpipe.schedules.player import Span, lanes
from syncpipe.schedules.schedule import KINDS

__all__ = ["Panel", "draw", "paint"]

#: Cyclic, by micro-batch. Neighbours differ for colour-blind readers too, also in light shades
#: (smallest CIELAB distance: 37, with Machado's models).
PALETTE = (
    "#2F6DB5", "#A89A1C", "#5AAFE0", "#C8483C", "#7B62B8", "#1A9A87", "#E9822B", "#8A5A36",
)  # fmt: skip

#: Top and bottom of the parts of a row, in row heights.
ROW_PARTS = {"gradient": (0.0, 0.1), "box": (0.12, 0.56), "activation": (0.58, 0.68)}
MEMORY = (0.72, 0.97)

#: By appearance: the label, and how far to mix the micro-batch's colour with white.
APPEARANCES = {kind: (info.label, info.shade) for kind, info in KINDS.items()} | {
    "activation": ("activations sent, below their sender", 0.35),
    "gradient": ("gradients sent, above their sender", 0.0),
}
INK, FAINT, IDLE, IN_FLIGHT, HATCH = "#222222", "#666666", "#E6E7EA", "#8E94A3", "////"

#: Inches: height of a row and of the space above rows, width of a readable box, and of the axes.
ROW, HEADING, BOX_WIDTH, NARROWEST, WIDEST = 0.7, 0.72, 0.27, 6.5, 20.0
#: Points: titles, names, notes, text in boxes.
TITLE, NAME, SMALL, SMALLEST = 11.0, 9.0, 8.0, 7.0
_LEGEND: dict[str, Any] = {
    "handler_map": {tuple: HandlerTuple(ndivide=None, pad=0.0)}, "fontsize": SMALL,
    "labelcolor": INK, "frameon": False, "columnspacing": 1.6,
}  # fmt: skip


class Panel:
    """A timeline prepared for drawing, in the unit of the axis; ``facts`` is a subtitle."""

    def __init__(self, title: str, facts: str, timeline: Any) -> None:
        self.title, self.facts = title, facts
        self.rows: Sequence[str] = timeline.rows
        self.spans: Sequence[Span] = timeline.spans
        self.windows: Sequence[tuple[float, float]] = timeline.windows
        self.idle: Sequence[float] = timeline.idle
        #: For each row its spans without transfers.
        self.actions: list[list[Span]] = [[] for _ in self.rows]
        for span in self.spans:
            if span.kind != "transfer":
                self.actions[span.row].append(span)

    def stages(self, row: int) -> str:
        word = ", ".join(map(str, sorted({span.j for span in self.actions[row]})))
        return f"stage{'s' * (',' in word)} {word}" if word else ""

    def in_flight(self, row: int) -> list[tuple[float, int]]:
        """The number of micro-batches in flight as (time, number); empty without backwards."""
        found = [(KINDS[s.kind].in_flight_change, s) for s in self.actions[row]]  # type: ignore[index]
        changes = sorted((s.start if k > 0 else s.end, k) for k, s in found if k)
        times, alive = [time for time, _ in changes], [k for _, k in changes]
        return list(zip(times, accumulate(alive), strict=True)) if -1 in alive else []


def draw(panels: Sequence[Panel], axis: str) -> Figure:
    """A figure of panels, one above the other on a time axis with the label ``axis``."""
    spans = [s for panel in panels for s in panel.spans if s.kind != "transfer" and s.duration > 0]
    widths = sorted(span.duration for span in spans)
    first, last = _limits(panels)
    wanted = BOX_WIDTH * (last - first) / widths[len(widths) // 5] if widths else 0.0
    inner = max(NARROWEST, min(wanted, WIDEST))
    names = [_text_width(name, NAME) for panel in panels for name in panel.rows]
    width = max([0.6, *names]) + inner + 1.2
    legend = _legend(panels)
    columns = max(1, int(width / 2.9))
    rows = [max(1, len(panel.rows)) for panel in panels]
    height = ROW * sum(rows) + HEADING * len(rows) + 0.5 + 0.2 * -(-len(legend) // columns)
    figure = Figure((width, height), dpi=150, facecolor="white", layout="constrained")
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, panel in zip(every, panels, strict=True):
        _paint(axes, panel, panels, inner)
    every[-1].set_xlabel(axis, fontsize=NAME, color=INK)
    figure.legend(*zip(*legend, strict=True), loc="outside lower left", ncols=columns, **_LEGEND)
    return figure


def paint(axes: Axes, panel: Panel, axis: str) -> None:
    """Draw a panel onto existing axes, with its own legend."""
    inches = axes.get_position().width * axes.figure.get_figwidth()  # type: ignore[union-attr]
    _paint(axes, panel, [panel], inches)
    axes.set_xlabel(axis)
    handles, words = zip(*_legend([panel]), strict=True)
    below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.12)}
    axes.legend(handles, words, ncols=max(1, int(inches / 2.9)), **below, **_LEGEND)


def _paint(axes: Axes, panel: Panel, panels: Sequence[Panel], inches: float) -> None:
    """Draw one panel with the limits, and the memory scale, of all ``panels``."""
    rows, limits = panel.rows, _limits(panels)
    inch = (limits[1] - limits[0]) / inches
    axes.set(xlim=limits, ylim=(max(1, len(rows)), 0.0), facecolor="none")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(axis="x", labelsize=SMALL, colors=FAINT)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.xaxis.set_major_locator(MaxNLocator(max(4, int(inches)), steps=[1, 2, 5, 10]))
    names = ["\n".join(filter(None, [name, panel.stages(row)])) for row, name in enumerate(rows)]
    places = [row + 0.38 for row in range(len(rows))]
    axes.set_yticks(places, names, fontsize=SMALL, parse_math=False)
    facts = textwrap.fill(panel.facts, max(20, int(inches / _text_width("m", NAME))))
    title = textwrap.fill(panel.title, max(20, int(inches / _text_width("m", TITLE) / 1.1)))
    left: dict[str, Any] = {"loc": "left", "parse_math": False}
    axes.set_title(facts, fontsize=NAME, color=FAINT, pad=5, **left)
    if title:
        axes.annotate(
            title, (0, 1), (0, 9 + 1.35 * NAME * (1 + facts.count("\n"))), fontsize=TITLE,
            xycoords="axes fraction", textcoords="offset points", fontweight="bold", color=INK,
            parse_math=False,
        )  # fmt: skip
    _paint_rows(axes, panel, panels)
    boxes: dict[tuple[str, int, float, float], list[tuple[float, float]]] = defaultdict(list)
    for span, top, bottom in drawn_boxes(panel.spans):
        hair = min(0.005 * inch, 0.1 * span.duration)  # gap to the neighbours
        place = appearance(span), span.i % len(PALETTE), top, bottom - top
        boxes[place].append((span.start + hair, span.duration - 2 * hair))
    for (what, i, *y), x in boxes.items():
        # Edges without width, for the colour of hatches.
        colours: dict[str, Any]
        colours = {"facecolor": _colour(what, i), "edgecolor": _colour("backward", i)}
        hatch = HATCH if what == "recompute" else None
        axes.broken_barh(x, (y[0], y[1]), lw=0, hatch=hatch, **colours)
    for span, text in _labels(panel, inch):
        middle = (span.start + span.end) / 2, span.row + sum(ROW_PARTS["box"]) / 2
        colour = _colour(appearance(span), span.i)
        red, green, blue = (c**2.2 for c in to_rgb(colour))
        dark = 0.21 * red + 0.72 * green + 0.07 * blue < 0.29  # its luminance
        # A number is hard to read on hatches.
        effects = [withStroke(linewidth=2.5, foreground=colour)] * (span.kind == "recompute")
        axes.text(
            *middle, text, fontsize=SMALLEST, linespacing=0.95, ha="center", path_effects=effects,
            color="white" if dark else INK,
            va="center" if "\n" in text else "center_baseline",
        )  # fmt: skip


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    times = [t for panel in panels for window in panel.windows for t in window] or [0.0]
    return min(times), max(times) if max(times) > min(times) else min(times) + 1.0


def _paint_rows(axes: Axes, panel: Panel, panels: Sequence[Panel]) -> None:
    """Draw idle lanes, micro-batches in flight, and a note of both at the right."""
    top, bottom = ROW_PARTS["box"]
    every = [each.in_flight(row) for each in panels for row in range(len(each.rows))]
    most = max([1, *(count for changes in every for _, count in changes)])
    lane = [(start, end - start) for start, end in panel.windows]
    for row, idle in enumerate(panel.idle):
        note = f"{round(idle, 9):.0%} idle"
        axes.broken_barh(lane, (row + top, bottom - top), facecolor=IDLE, lw=0)
        if changes := panel.in_flight(row):
            height = (MEMORY[1] - MEMORY[0]) / most
            times, counts = zip(*changes, strict=True)
            levels = [row + MEMORY[1] - height * count for count in counts]
            axes.fill_between(times, row + MEMORY[1], levels, step="post", color=IN_FLIGHT, lw=0)
            note += f"\n{max(counts)} in memory"
        axes.annotate(
            note, (1, row + (top + bottom) / 2), (6, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=SMALL, color=FAINT, verticalalignment="center",
        )  # fmt: skip


def drawn_boxes(spans: Sequence[Span]) -> Iterator[tuple[Span, float, float]]:
    """All visible spans with their top and bottom, in row heights."""
    transfers: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind != "transfer":
            yield span, span.row + ROW_PARTS["box"][0], span.row + ROW_PARTS["box"][1]
        elif span.duration:
            transfers[span.row, appearance(span)].append(span)
    for (row, what), group in transfers.items():
        placed, (top, bottom) = lanes(group), ROW_PARTS[what]
        pitch = (bottom - top) / (1 + max(lane for lane, _ in placed))
        for lane, span in placed:
            yield span, row + top + lane * pitch, row + top + (lane + 0.9) * pitch


def _labels(panel: Panel, inch: float) -> Iterator[tuple[Span, str]]:
    """The text of boxes with room for it: the micro-batch, and the stage if a row has several."""
    for own in panel.actions:
        several = len({span.j for span in own}) > 1
        for span in own:
            lines = [str(span.i), *([f"s{span.j}"] if several else [])]
            if span.duration / inch >= max(_text_width(line, SMALLEST) for line in lines):
                yield span, "\n".join(lines)


def _legend(panels: Sequence[Panel]) -> list[tuple[Any, str]]:
    """Handles and labels of what the panels contain; shades are shown for the first colour."""
    seen = {appearance(span) for panel in panels for span, _, _ in drawn_boxes(panel.spans)}
    rows = [(panel, row) for panel in panels for row in range(len(panel.rows))]
    entries: list[tuple[Any, str]] = []
    if seen:
        colours = tuple([Patch(facecolor=_colour("backward", i)) for i in range(4)])
        many = any("," in panel.stages(row) for panel, row in rows)
        entries.append((colours, "micro-batch" + ", s: stage" * many))
    for what, (words, _) in APPEARANCES.items():
        handle: Any = Patch(facecolor=_colour(what, 0))
        if what in ("activation", "gradient"):
            handle = Line2D([], [], color=_colour(what, 0), lw=3.5, solid_capstyle="butt")
        if what == "recompute":
            handle.set(hatch=HATCH, edgecolor=_colour("backward", 0), linewidth=0)
        entries += [(handle, words)] * (what in seen)
    entries.append((Patch(facecolor=IDLE), "idle: the bubble"))
    if any(panel.in_flight(row) for panel, row in rows):
        entries.append((Patch(facecolor=IN_FLIGHT), "memory: micro-batches in flight"))
    return entries


def appearance(span: Span) -> str:
    """The key in ``APPEARANCES``: the kind of a span, or what it transfers."""
    sent = "gradient" if span.backward else "activation"
    return sent if span.kind == "transfer" else span.kind


def _text_width(text: str, size: float) -> float:
    """Approximate width of a text, in inches."""
    return 0.65 * size / 72 * len(text)


def _colour(what: str, i: int) -> str:
    """The colour of micro-batch ``i``, mixed with white, or with black for a negative shade."""
    shade = APPEARANCES[what][1]
    rgb = to_rgb(PALETTE[i % len(PALETTE)])
    red, green, blue = (c + ((shade > 0) - c) * abs(shade) for c in rgb)
    return to_hex((red, green, blue))
