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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
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
    """Text in a box, of so many inches, around ``x``."""

    span: Span
    lines: list[str]
    x: float
    room: float
    size: float = 0.0

    def fits(self, size: float) -> bool:
        """Whether there is room for it in this size."""
        widest = max(map(text_width, self.lines, (size, smaller(size))))
        return widest + PAD / 2 <= self.room


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
        """What stands in boxes: the micro-batch, and which of several stages; all in one size.

        The size is the largest in which nearly all fit that have room at all; others are left out.

        Args:
            inch: how much time is an inch.
        """
        labels = [label for label in self._labels(inch) if label.fits(SIZES[-1])]
        fits = [sum(label.fits(size) for label in labels) >= 0.95 * len(labels) for size in SIZES]
        size = SIZES[fits.index(True)] if any(fits) else SIZES[-1]
        return (label._replace(size=size) for label in labels if label.fits(size))

    def _labels(self, inch: float) -> Iterator[Label]:
        for row, stages in enumerate(self.stages):
            own = sorted((a for a in self.actions if a.row == row), key=lambda a: (a.start, -a.end))
            for span, after in zip_longest(own, own[1:]):
                # A recomputation may be part of a backward, and hides it.
                end = min(span.end, after.start) if after else span.end
                room = (end - span.start) * self.factor
                lines = [str(span.i), *([f"s{span.j}"] if len(stages) > 1 else [])]
                yield Label(span, lines, self.x(span.start) + room / 2, room / inch)


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
    """In how many columns a legend fits: a line of its own, or columns of the widest label."""
    pads = (HANDLE + HANDLE_PAD + COLUMN_PAD) * TEXT * POINT
    widths = [text_width(label, TEXT) + pads for label in labels]
    return len(labels) if sum(widths) <= width else max(1, int(width / max(widths)))
