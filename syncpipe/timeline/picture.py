"""Draws timelines with matplotlib. Nothing of pyplot takes part, which keeps global state.

A row, from top to bottom:

                ---- ----                             gradients that it sends
    |_0_||_1_||_2_|______________|__2__||__1__|__|    boxes on a grey lane: grey is idle time
       ---- ----                                      activations that it sends
    ___-----=====-------------------------____        how many micro-batches its memory holds
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, zip_longest
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from syncpipe.schedules.kinds import KINDS
from syncpipe.timeline.span import Span, lanes

__all__ = ["PARTS", "Panel", "draw", "paint"]

#: By micro-batch, again and again. Chosen so that neighbours differ for the colour-blind, too (the
#: least CIELAB distance is 37 with Machado's models), and also in light shades.
PALETTE = (
    "#2F6DB5", "#A89A1C", "#5AAFE0", "#C8483C", "#7B62B8", "#1A9A87", "#E9822B", "#8A5A36",
)  # fmt: skip

#: Where parts of a row begin and end, in heights of a row.
PARTS = {"gradient": (0.0, 0.1), "box": (0.12, 0.56), "activation": (0.58, 0.68)}
MEMORY = (0.72, 0.97)

#: By what a span looks like: in words, and how far that is from the colour of its micro-batch.
LOOKS = {kind: (about.words, about.shade) for kind, about in KINDS.items()} | {
    "activation": ("activations sent, below their sender", 0.35),
    "gradient": ("gradients sent, above their sender", 0.0),
}
INK, FAINT, IDLE, HELD, HATCH = "#222222", "#666666", "#E6E7EA", "#8E94A3", "////"

#: Inches: of a row, of what stands above rows, and of boxes and of a whole that are easy to read.
ROW, HEADING, COMFORTABLE, NARROWEST, WIDEST = 0.7, 0.72, 0.27, 6.5, 20.0
#: Points: of titles, names and notes, and of what stands in boxes. A character is 0.65 as wide.
TITLE, NAME, SMALL, SIZES = 11.0, 9.0, 8.0, (9.0, 8.0, 7.0, 6.0, 5.0)

Corners = list[tuple[float, float]]


class Panel(NamedTuple):
    """A timeline as it is to be drawn.

    Attributes:
        title: stands above it.
        facts: stands below the title.
        rows: their names.
        idle: for each row a fraction.
        spans: what ran when.
        windows: when rows could have worked.
        start: the time that is drawn as 0.
        factor: what times are multiplied with.
    """

    title: str
    facts: str
    rows: Sequence[str]
    idle: Sequence[float]
    spans: Sequence[Span]
    windows: Sequence[tuple[float, float]]
    start: float
    factor: float

    def x(self, time: float) -> float:
        """Where a time is on the axis."""
        return (time - self.start) * self.factor

    @property
    def actions(self) -> list[Span]:
        """All spans but transfers."""
        return [span for span in self.spans if span.kind != "transfer"]

    def held(self, row: int) -> list[tuple[float, int]]:
        """From which time on how many micro-batches are in flight; empty if none goes back."""
        changes = []
        for span in self.actions:
            alive = KINDS[span.kind].alive if span.row == row else 0  # type: ignore[index]
            if alive:
                changes.append((self.x(span.start if alive > 0 else span.end), alive))
        changes.sort()
        counts = accumulate(alive for _, alive in changes)
        held = [(time, count) for (time, _), count in zip(changes, counts, strict=True)]
        return held if any(alive < 0 for _, alive in changes) else []


def draw(panels: Sequence[Panel], axis: str) -> Figure:
    """Panels one above the other on one time axis.

    Args:
        panels: from top to bottom.
        axis: what stands at the time axis.
    """
    widths = sorted(s.duration * panel.factor for panel in panels for s in panel.actions)
    widths = [width for width in widths if width > 0]
    first, last = _limits(panels)
    wanted = COMFORTABLE * (last - first) / widths[len(widths) // 5] if widths else 0.0
    inner = max(NARROWEST, min(wanted, WIDEST))
    names = [_wide(name, NAME) for panel in panels for name in panel.rows]
    width = max([0.6, *names]) + inner + 1.2
    legend = _legend(panels)
    columns = max(1, int(width / 2.9))
    rows = [max(1, len(panel.rows)) for panel in panels]
    height = ROW * sum(rows) + HEADING * len(rows) + 0.5 + 0.2 * -(-len(legend) // columns)
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, panel in zip(every, panels, strict=True):
        paint(axes, panel, panels, inner)
    every[-1].set_xlabel(axis, fontsize=NAME, color=INK)
    figure.legend(*zip(*legend, strict=True), loc="outside lower left", ncols=columns, **_STYLE)
    return figure


def paint(axes: Axes, panel: Panel, panels: Sequence[Panel] = (), width: float = 0.0) -> None:
    """Paints a panel onto axes.

    Args:
        axes: to paint on.
        panel: what to paint.
        panels: what it is to be compared with, itself among them, and has one legend with. Empty:
            it is alone, and has its own.
        width: of the axes, in inches; 0 if it is for them to say.
    """
    rows, limits = panel.rows, _limits(panels or [panel])
    inches = width or axes.get_position().width * axes.figure.get_figwidth()  # type: ignore[union-attr]
    inch = (limits[1] - limits[0]) / inches
    axes.set(xlim=limits, ylim=(max(1, len(rows)), 0.0), facecolor="none")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(axis="x", labelsize=SMALL, colors=FAINT)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.xaxis.set_major_locator(MaxNLocator(max(4, int(inches)), steps=[1, 2, 5, 10]))
    names = ["\n".join(filter(None, [name, _stages(panel, row)])) for row, name in enumerate(rows)]
    axes.set_yticks(
        [row + 0.38 for row in range(len(rows))], names, fontsize=SMALL, parse_math=False
    )
    _head(axes, panel, inches)
    _paint_rows(axes, panel, panels or [panel])
    _paint_boxes(axes, panel, inch)
    for span, text, x, size in _labels(panel, inch):
        _paint_label(axes, span, text, x, size)
    if not panels:
        handles, words = zip(*_legend([panel]), strict=True)
        below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.12)}
        axes.legend(handles, words, ncols=max(1, int(inches / 2.9)), **below, **_STYLE)


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    times = [panel.x(t) for panel in panels for window in panel.windows for t in window]
    first, last = (min(times), max(times)) if times else (0.0, 1.0)
    return first, last if last > first else first + 1.0


def _head(axes: Axes, panel: Panel, inches: float) -> None:
    """Title and facts, in as many lines as they need."""
    facts = textwrap.fill(panel.facts, max(20, int(inches / _wide("m", NAME))))
    title = textwrap.fill(panel.title, max(20, int(inches / _wide("mm", TITLE) * 2 / 1.1)))
    options: dict[str, Any] = {"loc": "left", "parse_math": False}
    axes.set_title(facts, fontsize=NAME, color=FAINT, pad=5, **options)
    if title:
        pad = 9 + 1.35 * NAME * (1 + facts.count("\n"))
        axes.annotate(
            title, (0, 1), (0, pad), xycoords="axes fraction", textcoords="offset points",
            fontsize=TITLE, fontweight="bold", color=INK, parse_math=False,
        )  # fmt: skip


def _paint_rows(axes: Axes, panel: Panel, panels: Sequence[Panel]) -> None:
    """Grey lanes, what memory holds, and a note of both at the right."""
    top, bottom = PARTS["box"]
    every = [each.held(row) for each in panels for row in range(len(each.rows))]
    most = max([1, *(count for held in every for _, count in held)])
    for row, idle in enumerate(panel.idle):
        note = f"{round(idle, 9):.0%} idle"
        for start, end in panel.windows:
            lane = [_corners(panel.x(start), panel.x(end), row + top, row + bottom)]
            _fill(axes, lane, IDLE)
        if changes := panel.held(row):
            height = (MEMORY[1] - MEMORY[0]) / most
            times, counts = zip(*changes, strict=True)
            levels = [row + MEMORY[1] - height * count for count in counts]
            axes.fill_between(times, row + MEMORY[1], levels, step="post", color=HELD, lw=0)
            note += f"\n{max(counts)} in memory"
        axes.annotate(
            note, (1, row + (top + bottom) / 2), (6, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=SMALL, color=FAINT, verticalalignment="center",
        )  # fmt: skip


def _paint_boxes(axes: Axes, panel: Panel, inch: float) -> None:
    boxes: dict[tuple[str, int], list[Corners]] = defaultdict(list)
    for span, top, bottom in boxes_of(panel.spans):
        hair = min(0.005 * inch, 0.1 * span.duration * panel.factor)  # to its neighbours
        corners = _corners(panel.x(span.start) + hair, panel.x(span.end) - hair, top, bottom)
        boxes[look(span), span.i].append(corners)
    # A recomputation may be part of a backward.
    for (what, i), some in sorted(boxes.items(), key=lambda item: item[0][0] == "recompute"):
        _fill(axes, some, _colour(what, i), _colour("backward", i), what == "recompute")


def boxes_of(spans: Sequence[Span]) -> Iterator[tuple[Span, float, float]]:
    """All spans that are drawn, with their top and bottom; one row is one high."""

    def place(span: Span) -> tuple[int, str]:
        return span.row, look(span)

    for span in spans:
        if span.kind != "transfer":
            yield span, span.row + PARTS["box"][0], span.row + PARTS["box"][1]
    ways = [span for span in spans if span.kind == "transfer" and span.duration]
    for (row, what), group in groupby(sorted(ways, key=place), key=place):
        placed, (top, bottom) = lanes(group), PARTS[what]
        pitch = (bottom - top) / (1 + max(lane for lane, _ in placed))
        for lane, span in placed:
            yield span, row + top + lane * pitch, row + top + (lane + 0.9) * pitch


def _labels(panel: Panel, inch: float) -> Iterator[tuple[Span, str, float, float]]:
    """What stands in boxes: the micro-batch, and which of several stages; all in one size.

    The size is the largest in which nearly all fit that have room at all; others are left out.
    """
    found = []
    for row in range(len(panel.rows)):
        several = len({span.j for span in panel.actions if span.row == row}) > 1
        own = sorted((a for a in panel.actions if a.row == row), key=lambda a: (a.start, -a.end))
        for span, after in zip_longest(own, own[1:]):
            # A recomputation may be part of a backward, and hides it.
            end = min(span.end, after.start) if after else span.end
            left, right = panel.x(span.start), panel.x(end)
            lines = [str(span.i), *([f"s{span.j}"] if several else [])]
            room = (right - left) / inch / max(map(len, lines))
            if room >= _wide("0", SIZES[-1]):
                found.append((span, "\n".join(lines), (left + right) / 2, room))
    rooms = sorted(room for *_, room in found)
    fitting = [size for size in SIZES if rooms and rooms[len(rooms) // 20] >= _wide("0", size)]
    size = max(fitting, default=SIZES[-1])
    for span, text, x, room in found:
        if room >= _wide("0", size):
            yield span, text, x, size


def _paint_label(axes: Axes, span: Span, text: str, x: float, size: float) -> None:
    colour = _colour(look(span), span.i)
    red, green, blue = (c**2.2 for c in to_rgb(colour))
    dark = 0.21 * red + 0.72 * green + 0.07 * blue < 0.29  # its luminance
    # Over hatches a number needs quiet ground.
    effects = [withStroke(linewidth=2.5, foreground=colour)] * (span.kind == "recompute")
    axes.text(
        x, span.row + sum(PARTS["box"]) / 2, text, fontsize=size, linespacing=0.95,
        color="white" if dark else INK, ha="center", va="center_baseline" if "\n" not in text
        else "center", path_effects=effects,
    )  # fmt: skip


_STYLE: dict[str, Any] = {
    "handler_map": {tuple: HandlerTuple(ndivide=None, pad=0.0)},
    "fontsize": SMALL,
    "labelcolor": INK,
    "frameon": False,
    "columnspacing": 1.6,
}


def _legend(panels: Sequence[Panel]) -> list[tuple[Any, str]]:
    """What the picture consists of; shades are shown in the first colour."""
    seen = {look(span) for panel in panels for span, _, _ in boxes_of(panel.spans)}
    entries: list[tuple[Any, str]] = []
    if seen:
        colours = tuple(Patch(facecolor=_colour("backward", i)) for i in range(4))
        many = any("," in _stages(panel, row) for panel in panels for row in range(len(panel.rows)))
        entries.append((colours, "micro-batch" + ", s: stage" * many))
    for what, (words, _) in LOOKS.items():
        handle: Any = Patch(facecolor=_colour(what, 0))
        if what in ("activation", "gradient"):
            handle = Line2D([], [], color=_colour(what, 0), lw=3.5, solid_capstyle="butt")
        if what == "recompute":
            handle.set(hatch=HATCH, edgecolor=_colour("backward", 0), linewidth=0)
        entries += [(handle, words)] * (what in seen)
    entries.append((Patch(facecolor=IDLE), "idle: the bubble"))
    if any(panel.held(row) for panel in panels for row in range(len(panel.rows))):
        entries.append((Patch(facecolor=HELD), "memory: micro-batches in flight"))
    return entries


def look(span: Span) -> str:
    """What a span looks like: its kind, or what it transfers."""
    if span.kind != "transfer":
        return span.kind
    return "gradient" if span.backward else "activation"


def _stages(panel: Panel, row: int) -> str:
    """The stages of a row, in words."""
    word = ", ".join(map(str, sorted({span.j for span in panel.actions if span.row == row})))
    return f"stage{'s' * (',' in word)} {word}" if word else ""


def _wide(text: str, size: float) -> float:
    """About how many inches a text takes."""
    return 0.65 * size / 72 * len(text)


def _colour(what: str, i: int) -> str:
    """That of a micro-batch, so far on the way to white, or, below 0, to black."""
    shade = LOOKS[what][1]
    rgb = to_rgb(PALETTE[i % len(PALETTE)])
    red, green, blue = (c + ((shade > 0) - c) * abs(shade) for c in rgb)
    return to_hex((red, green, blue))


def _corners(left: float, right: float, top: float, bottom: float) -> Corners:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _fill(
    axes: Axes, corners: list[Corners], face: str, edge: str = INK, hatch: bool = False
) -> None:
    """Boxes of one colour; that of edges, which have no width, is for hatches."""
    boxes = PolyCollection(
        corners, facecolors=[face], edgecolors=[edge], linewidths=[0.0],
        hatch=HATCH if hatch else None,
    )  # fmt: skip
    axes.add_collection(boxes, autolim=False)
