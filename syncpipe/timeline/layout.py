"""Where everything goes in a picture of timelines, in inches.

The vertical coordinate is inches from the top, so that text and boxes fit each other whatever is
drawn. From top to bottom, for each timeline:

    title, and below it what it is and how long it took
             ____________________________________________
    row 0   |_0_||_1_||_2_|______________|__2__||__1__|__|     boxes on a grey lane: where grey
                ---- ---- ----                                 shows, the row idles
                                  ---- ----                    strips: activations below the row
             ____________________________________________      that sends them, gradients above
    row 1   |_____|_0_||_1_||_2_||__2__||__1__|__________|
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from matplotlib.textpath import TextPath

from syncpipe.timeline.span import Span, lanes

__all__ = ["Label", "Panel", "columns", "look", "smaller", "text_width", "width_of_axes"]

POINT = 1 / 72
# Inches: from top to bottom, then from left to right.
HEADING, NO_TITLE, ROW, GAP, STRIP, STRIPS, PAD, END = 0.56, 0.2, 0.4, 0.06, 0.065, 0.4, 0.03, 0.12
MARGIN, NARROWEST, WIDEST, COMFORTABLE = 0.12, 6.5, 20.0, 0.27
# Points: of titles, names and notes, and of what stands in boxes.
TITLE, NAME, TEXT, SMALL, SIZES = 11.0, 9.0, 8.0, 7.0, (9.0, 8.0, 7.0, 6.0, 5.0)
# How much of a legend is not text, for each column, in ems.
HANDLE, HANDLE_PAD, COLUMN_PAD = 2.2, 0.6, 1.8


class Label(NamedTuple):
    """Text in a box."""

    span: Span
    lines: list[str]
    x: float
    size: float
    upright: bool


@dataclass
class Panel:
    """One timeline, as it is to be drawn.

    Attributes:
        title: above it.
        facts: below the title.
        rows: names.
        idle: for each row a fraction.
        spans: what to draw.
        windows: when rows could have worked.
        start: the time that is drawn as 0.
        factor: what times are multiplied with.
        actions: all spans but transfers.
        stages: of each row.
        tops: where rows begin.
        strips: for each transfer that takes time where it begins, and its height.
        heading: the height of title and facts.
        height: of the panel.
    """

    title: str
    facts: str
    rows: Sequence[str]
    idle: Sequence[float]
    spans: Sequence[Span]
    windows: Sequence[tuple[float, float]]
    start: float
    factor: float
    actions: list[Span] = field(init=False)
    stages: list[list[int]] = field(init=False)
    tops: list[float] = field(init=False)
    strips: list[tuple[Span, float, float]] = field(init=False)
    heading: float = field(init=False)
    height: float = field(init=False)

    def __post_init__(self) -> None:
        self.actions = [span for span in self.spans if span.kind != "transfer"]
        found: list[set[int]] = [set() for _ in self.rows]
        for span in self.actions:
            found[span.row].add(span.j)
        self.stages = [sorted(stages) for stages in found]
        self.heading = HEADING if self.title else HEADING - NO_TITLE
        self.strips, self.tops, y = [], [], self.heading
        for row in range(len(self.rows)):
            y = self._place_strips(row, "gradient", y)
            self.tops.append(y)
            y = self._place_strips(row, "activation", y + ROW) + GAP
        self.height = y + END

    def _place_strips(self, row: int, what: str, y: float) -> float:
        """Finds room for transfers, as many below each other as run at once; returns its end."""
        placed = lanes(s for s in self.spans if s.row == row and look(s) == what and s.duration)
        if not placed:
            return y
        count = 1 + max(lane for lane, _ in placed)
        pitch = min(STRIP, STRIPS / count)
        y += PAD
        self.strips += [(span, y + lane * pitch, 0.8 * pitch) for lane, span in placed]
        return y + count * pitch + PAD

    def x(self, time: float) -> float:
        """Where a time is on the axis."""
        return (time - self.start) * self.factor

    @property
    def left(self) -> float:
        """The width of what stands left of the rows."""
        names = [text_width(name, NAME) for name in self.rows]
        notes = [text_width(note, SMALL) for note in self.notes]
        return max([*names, *notes], default=0.0)

    @property
    def notes(self) -> list[str]:
        """For each row its stages, in words."""
        words = [", ".join(map(str, stages)) for stages in self.stages]
        return [f"stage{'s' * (',' in word)} {word}" if word else "" for word in words]

    def labels(self, inch: float) -> Iterator[Label]:
        """What stands in boxes, where there is room: the micro-batch, and one of several stages.

        Side by side lines are all in one size; a box too narrow for them gets one line upwards.

        Args:
            inch: how much time is an inch.
        """
        parts = [
            (span, self._lines(span), start, (end - start) * self.factor / inch)
            for span, start, end in self._free()
        ]
        flat = [(text, room) for _, text, _, room in parts if _fits(text, room, SIZES[-1])]
        size = _common_size(SIZES, flat, _fits)
        steep = [(text, room) for _, text, _, room in parts if not _fits(text, room, size)]
        steep = [(text, room) for text, room in steep if _fits_upright(text, room, SIZES[-1])]
        upright = _common_size(SIZES[2:], steep, _fits_upright)
        for span, text, start, room in parts:
            middle = self.x(start) + room * inch / 2
            if _fits(text, room, size):
                yield Label(span, text, middle, size, upright=False)
            elif _fits_upright(text, room, upright):
                yield Label(span, [" ".join(text)], middle, upright, upright=True)

    def _free(self) -> Iterator[tuple[Span, float, float]]:
        """Actions, each with the longest part that no other hides, from when to when.

        A recomputation may be part of a backward.
        """
        for row in range(len(self.rows)):
            own = sorted(
                (span for span in self.actions if span.row == row),
                key=lambda span: (span.start, -span.end),
            )
            for k, span in enumerate(own, start=1):
                start, free = span.start, [(span.start, span.start)]
                while k < len(own) and own[k].start < span.end:
                    free.append((start, max(start, own[k].start)))
                    start = max(start, own[k].end)
                    k += 1
                free.append((start, max(start, span.end)))
                yield span, *max(free, key=lambda part: part[1] - part[0])

    def _lines(self, span: Span) -> list[str]:
        return [str(span.i), *([f"s{span.j}"] if len(self.stages[span.row]) > 1 else [])]


def _fits(lines: list[str], room: float, size: float) -> bool:
    sizes = (size, smaller(size))
    return max(map(text_width, lines, sizes)) + PAD / 2 <= room


def _fits_upright(lines: list[str], room: float, size: float) -> bool:
    digit = 0.73 * size * POINT  # its height
    return digit + PAD / 2 <= room and text_width(" ".join(lines), size) + PAD <= ROW


def _common_size(
    sizes: Sequence[float],
    texts: Sequence[tuple[list[str], float]],
    fits: Callable[[list[str], float, float], bool],
) -> float:
    """The largest in which nearly all texts fit, or the smallest of all."""
    for size in sizes:
        if sum(fits(lines, room, size) for lines, room in texts) >= 0.95 * len(texts):
            return size
    return sizes[-1]


def smaller(size: float) -> float:
    """The size of the second line."""
    return max(0.75 * size, SIZES[-1])


def look(span: Span) -> str:
    """What a span looks like: its kind, or what it transfers."""
    if span.kind != "transfer":
        return span.kind
    return "gradient" if span.backward else "activation"


@lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Of a text whose size is in points, at most: renderers round the width of letters up."""
    if not text.strip():  # matplotlib has no path for it
        return 0.0
    path = TextPath((0, 0), text.replace("$", r"\$"), size=size)  # dollars are no mathematics
    return 1.1 * POINT * float(path.get_extents().width)


def width_of_axes(panels: Sequence[Panel], time: float) -> float:
    """So wide that most boxes have room for a number, within reason, and titles for themselves."""
    widths = sorted(s.duration * panel.factor for panel in panels for s in panel.actions)
    widths = [width for width in widths if width > 0]
    titles = max(1.2 * text_width(panel.title, TITLE) - panel.left for panel in panels)  # bold
    facts = max(text_width(panel.facts, NAME) - panel.left for panel in panels)
    wanted = COMFORTABLE * time / widths[len(widths) // 5] if widths else 0.0
    return max(NARROWEST, titles, facts, min(wanted, WIDEST))


def columns(labels: Sequence[str], width: float) -> int:
    """In how many columns a legend fits; matplotlib fills them one after another."""
    pads = (HANDLE + HANDLE_PAD + COLUMN_PAD) * TEXT * POINT
    for count in range(len(labels), 1, -1):
        short, longer = divmod(len(labels), count)
        ends = [short * k + min(k, longer) for k in range(count + 1)]
        parts = [labels[start:end] for start, end in pairwise(ends)]
        if sum(pads + max(text_width(label, TEXT) for label in part) for part in parts) <= width:
            return count
    return 1
