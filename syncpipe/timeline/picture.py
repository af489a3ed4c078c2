"""Draws timelines with matplotlib; where things go is in :mod:`syncpipe.timeline.layout`.

Nothing of pyplot takes part, which keeps global state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from syncpipe.schedules.kinds import KINDS
from syncpipe.timeline.colours import PALETTE
from syncpipe.timeline.layout import (
    COLUMN_PAD,
    HANDLE,
    HANDLE_PAD,
    MARGIN,
    NAME,
    POINT,
    ROW,
    SMALL,
    TEXT,
    TITLE,
    Label,
    Panel,
    columns,
    look,
    smaller,
    text_width,
    width_of_axes,
)
from syncpipe.timeline.span import Span

__all__ = ["draw"]

#: By what a span looks like: in words, and how far that is from the colour of its micro-batch.
LOOKS = {kind: (about.words, about.shade) for kind, about in KINDS.items()} | {
    "activation": ("activations sent, below their sender", 0.35),
    "gradient": ("gradients sent, above their sender", 0.0),
}
INK, FAINT, IDLE, HATCH = "#222222", "#666666", "#E6E7EA", "////"
AXIS, LINE = 0.5, 0.2  # inches: the time axis, and a line of the legend

Colour = tuple[float, float, float]
Corners = list[tuple[float, float]]


def draw(panels: Sequence[Panel], axis: str) -> Figure:
    """Panels one above the other on one time axis.

    Args:
        panels: from top to bottom.
        axis: what stands at the time axis.
    """
    times = [panel.x(time) for panel in panels for window in panel.windows for time in window]
    first, last = (min(times), max(times)) if times else (0.0, 1.0)
    last = last if last > first else first + 1.0
    left = 2 * MARGIN + max(panel.left for panel in panels)
    right = 2 * MARGIN + text_width("100% idle", SMALL)
    width = width_of_axes(panels, last - first)
    height = sum(panel.height for panel in panels)
    inch = (last - first) / width
    legend = _legend(panels)
    figure, axes = _blank(left, width, right, height, legend)
    axes.set(xlim=(first, last), ylim=(height, 0.0))
    axes.set_xlabel(axis, fontsize=NAME, color=INK)
    y = 0.0
    for panel in panels:
        _Brush(axes, panel, y, inch).paint(left)
        y += panel.height
    return figure


def _blank(
    left: float, inner: float, right: float, height: float, legend: list[tuple[Any, str]]
) -> tuple[Figure, Axes]:
    """A figure with a legend below empty axes; all in inches."""
    width, labels = left + inner + right, [label for _, label in legend]
    count = columns(labels, width - 2 * MARGIN)
    below = AXIS + LINE * -(-len(legend) // count) + MARGIN
    whole = height + below
    figure = Figure(figsize=(width, whole), facecolor="white")
    axes = figure.add_axes((left / width, below / whole, inner / width, height / whole))
    axes.set_facecolor("none")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=TEXT, colors=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(max(4, int(inner)), steps=[1, 2, 5, 10]))
    figure.legend(
        [handle for handle, _ in legend],
        labels,
        loc="lower left",
        bbox_to_anchor=(MARGIN / width, MARGIN / whole),
        ncols=count,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        fontsize=TEXT,
        labelcolor=INK,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        labelspacing=0.5,
        handlelength=HANDLE,
        handletextpad=HANDLE_PAD,
        columnspacing=COLUMN_PAD,
    )
    return figure, axes


def _legend(panels: Sequence[Panel]) -> list[tuple[Any, str]]:
    """What the picture consists of; shades are shown in the first colour."""
    seen = {look(span) for panel in panels for span in panel.actions}
    seen |= {look(span) for panel in panels for span, _, _ in panel.strips}
    entries: list[tuple[Any, str]] = []
    if seen:
        colours = tuple(Patch(facecolor=_colour("backward", i)) for i in range(4))
        entries.append((colours, "colour and number: micro-batch"))
    if any(len(stages) > 1 for panel in panels for stages in panel.stages):
        sign = Line2D([], [], marker=r"$\mathrm{s0}$", color=INK, markersize=8)
        sign.set(linestyle="", markeredgewidth=0)
        entries.append((sign, "stage"))
    entries += [(_handle(what), words) for what, (words, _) in LOOKS.items() if what in seen]
    return [*entries, (Patch(facecolor=IDLE), "idle: the bubble")]


def _handle(what: str) -> Any:
    if what in ("activation", "gradient"):
        return Line2D([], [], color=_colour(what, 0), lw=3.5, solid_capstyle="butt")
    if what != "recompute":
        return Patch(facecolor=_colour(what, 0))
    return Patch(
        facecolor=_colour(what, 0), edgecolor=_colour("backward", 0), hatch=HATCH, linewidth=0
    )


def _colour(what: str, i: int) -> Colour:
    if what == "idle":
        share, goal, colour = 0.0, 0.0, IDLE
    else:
        share, goal = abs(LOOKS[what][1]), float(LOOKS[what][1] > 0)
        colour = PALETTE[i % len(PALETTE)]
    red, green, blue = (c + share * (goal - c) for c in to_rgb(colour))
    return red, green, blue


class _Brush:
    """Paints a panel onto axes, whose vertical coordinate is inches from the top.

    Args:
        axes: to paint on.
        panel: what to paint.
        y: where the panel begins.
        inch: how much time is an inch.
    """

    def __init__(self, axes: Axes, panel: Panel, y: float, inch: float) -> None:
        self._axes, self._panel, self._y, self._inch = axes, panel, y, inch

    def paint(self, left: float) -> None:
        """Everything, from back to front; the figure begins so many inches left of the axes."""
        panel = self._panel
        first = panel.heading
        self._beside(0, MARGIN - left, first - 0.39, panel.title, TITLE, INK, "bold")
        self._beside(0, MARGIN - left, first - 0.18, panel.facts, NAME, FAINT)
        for row, top in enumerate(panel.tops):
            self._paint_row(row, top)
        boxes: dict[tuple[str, int], list[Corners]] = defaultdict(list)
        for span in panel.actions:
            boxes[look(span), span.i].append(self._box(span, panel.tops[span.row], ROW))
        for span, top, height in panel.strips:
            boxes[look(span), span.i].append(self._box(span, top, height))
        # A recomputation may be part of a backward.
        for (what, i), corners in sorted(boxes.items(), key=lambda item: item[0][0] == "recompute"):
            self._fill(corners, what, i)
        for label in panel.labels(self._inch):
            self._paint_label(label)

    def _paint_row(self, row: int, top: float) -> None:
        panel, middle, note = self._panel, top + ROW / 2, self._panel.notes[row]
        for start, end in panel.windows:
            self._fill([self._corners(start, end, top, ROW)], "idle", 0)
        self._beside(0, -MARGIN, middle - 0.075 * bool(note), panel.rows[row], NAME, INK)
        self._beside(0, -MARGIN, middle + 0.085, note, SMALL, FAINT)
        self._beside(1, MARGIN, middle, f"{round(panel.idle[row], 9):.0%} idle", SMALL, FAINT)

    def _paint_label(self, label: Label) -> None:
        y = self._panel.tops[label.span.row] + ROW / 2
        number, *stage = label.lines
        self._paint_line(label, y - 0.06 * len(stage), number, label.size)
        for text in stage:
            self._paint_line(label, y + 0.095, text, smaller(label.size))

    def _paint_line(self, label: Label, y: float, text: str, size: float) -> None:
        span = label.span
        colour = _colour(look(span), span.i)
        red, green, blue = (c**2.2 for c in colour)
        dark = 0.21 * red + 0.72 * green + 0.07 * blue < 0.29  # its luminance
        # Over hatches a number needs quiet ground.
        effects = [withStroke(linewidth=2.5, foreground=colour)] * (span.kind == "recompute")
        self._axes.text(
            label.x,
            self._y + y,
            text,
            fontsize=size,
            color="white" if dark else INK,
            horizontalalignment="center",
            verticalalignment="center_baseline",
            path_effects=effects,
        )

    def _beside(
        self,
        side: int,
        inches: float,
        y: float,
        text: str,
        size: float,
        colour: str,
        weight: str = "normal",
    ) -> None:
        """Text so many inches right of the left (0) or right (1) edge of the axes."""
        self._axes.annotate(
            text,
            (side, self._y + y),
            (inches / POINT, 0.0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=size,
            color=colour,
            horizontalalignment="right" if inches == -MARGIN else "left",
            verticalalignment="center",
            parse_math=False,
            fontweight=weight,
        )

    def _box(self, span: Span, top: float, height: float) -> Corners:
        """The corners of a box that leaves a hair's breadth to its neighbours."""
        hair = min(0.005 * self._inch, 0.1 * span.duration * self._panel.factor)
        return self._corners(span.start, span.end, top, height, hair)

    def _corners(
        self, start: float, end: float, top: float, height: float, hair: float = 0.0
    ) -> Corners:
        left, right = self._panel.x(start) + hair, self._panel.x(end) - hair
        top += self._y
        return [(left, top), (right, top), (right, top + height), (left, top + height)]

    def _fill(self, corners: list[Corners], what: str, i: int) -> None:
        boxes = PolyCollection(
            corners,
            facecolors=[_colour(what, i)],
            edgecolors=[_colour("backward", i)],  # the colour of hatches; edges have no width
            linewidths=[0.0],
            hatch=HATCH if what == "recompute" else None,
        )
        self._axes.add_collection(boxes, autolim=False)
