"""Pictures: of what was measured, and of the schedules.

Of a table in a report: a panel for each ratio, a bar for each line. The schedules for the README
are drawn by ``python -m benchmarks.pictures [FILE]``. They are simulated: four devices, eight
micro-batches; a forward takes one unit of time, a backward two, and transfers none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.common import Part, Spread
from syncpipe.schedules import Costs, gpipe, one_f_one_b, simulate
from syncpipe.timeline import Timeline, save_comparison

__all__ = ["draw", "save"]

#: At most so many panels beside each other; a table may have more columns.
_PANELS = 3
_BAR, _PALE, _LINE = "#3b6ea5", "#c9d8e8", "#b03a2e"


# -- of a table ------------------------------------------------------------------------------------


def ratios(part: Part) -> list[str]:
    """The columns that are ratios: medians and quartiles, of one thing over another."""
    columns = list(dict.fromkeys(column for row in part.rows for column in row))
    return [
        column
        for column in columns
        if "over" in column and any(isinstance(row.get(column), Spread) for row in part.rows)
    ]


def draw(part: Part) -> Figure | None:
    """A picture of the ratios in a part; None if it has none."""
    columns = ratios(part)[:_PANELS]
    if not columns:
        return None
    rows = [row for row in part.rows if any(isinstance(row.get(c), Spread) for c in columns)]
    figure = Figure(
        figsize=(2.6 + 2.8 * len(columns), 1.3 + 0.28 * len(rows)), layout="constrained"
    )
    FigureCanvasSVG(figure)
    every = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, column in zip(every, columns, strict=True):
        _panel(axes, column, [row.get(column) for row in rows])
    every[0].set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    every[0].invert_yaxis()
    figure.suptitle(part.title, fontsize=10)
    return figure


def _panel(axes: Any, column: str, spreads: Sequence[Any]) -> None:
    """Bars to the median, a line from quartile to quartile, and where both are the same."""
    for y, spread in enumerate(spreads):
        if not isinstance(spread, Spread):
            continue
        axes.barh(y, spread.median, height=0.62, color=_PALE, edgecolor=_BAR, linewidth=0.6)
        axes.plot([spread.low, spread.high], [y, y], color=_BAR, linewidth=2)
        axes.annotate(
            f"{spread.median:.2f}", (0, y), xytext=(3, 0), textcoords="offset points",
            fontsize=7, verticalalignment="center",
        )  # fmt: skip
    axes.axvline(1.0, color=_LINE, linewidth=0.8)
    axes.set_title(column, fontsize=9)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label(row: dict[str, Any]) -> str:
    """The first cells, which say what was measured."""
    words = [str(value) for value in row.values() if isinstance(value, str)]
    return " ".join(words[:2])[:44]


def save(part: Part, folder: Path, name: str) -> str | None:
    """Writes the picture of a part; returns the file's name, None if there is nothing to show."""
    figure = draw(part)
    if figure is None:
        return None
    file = f"{name}.svg"
    figure.savefig(folder / file, metadata={"Date": None})
    return file


# -- of the schedules ------------------------------------------------------------------------------


def timelines() -> dict[str, Timeline]:
    """What each device does, and holds, under GPipe and under 1F1B."""
    costs = Costs.even(4)
    return {
        title: Timeline.of(simulate(schedule, costs))
        for title, schedule in [
            ("GPipe: all forwards first, so all eight micro-batches are in memory", gpipe(8, 4)),
            (
                "1F1B: the same time, and at most four in memory",
                one_f_one_b(8, 4, slots="textbook"),
            ),
        ]
    }


if __name__ == "__main__":
    default = Path(__file__).parent / "results" / "schedules.svg"
    save_comparison(sys.argv[1] if len(sys.argv) > 1 else default, timelines())
