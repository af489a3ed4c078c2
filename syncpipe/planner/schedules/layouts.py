"""Where the stages of a schedule are: in a line, round the devices, or there and back in a V."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from syncpipe.schedules.schedule import Schedule, devices_of

__all__ = ["ANY", "AUTO", "LAYOUTS", "TITLES", "Layout", "placement", "placements"]

#: Asks for the fastest plan, whatever its schedule.
ANY = "any"
#: Asks for a schedule made to measure.
AUTO = "auto"


@dataclass(frozen=True)
class Layout:
    """Where a schedule wants its stages, and what it is called on paper.

    Attributes:
        title: its name in the papers.
        shape: a stage on each device; several, going round; or two, there and back.
        halves: whether its backwards come in halves.
    """

    title: str
    shape: Literal["line", "rounds", "v"]
    halves: bool


#: By name, beside ``"gpipe"`` and ``"1f1b"``.
LAYOUTS = {
    "interleaved_1f1b": Layout("interleaved 1F1B", "rounds", False),
    "looped_bfs": Layout("looped BFS", "rounds", False),
    "zb_h1": Layout("ZB-H1", "line", True),
    "zb_h2": Layout("ZB-H2", "line", True),
    "interleaved_zero_bubble": Layout("interleaved zero bubble", "rounds", True),
    "zbv": Layout("ZBV", "v", True),
    "v_half": Layout("V-Half", "v", True),
    "v_min": Layout("V-Min", "v", True),
    "dualpipev": Layout("DualPipeV", "v", True),
    AUTO: Layout("made to measure", "line", True),
}

#: What people call the schedules that a plan can have.
TITLES = {"gpipe": "GPipe", "1f1b": "1F1B"} | {
    name: layout.title for name, layout in LAYOUTS.items()
}


def placements(
    name: str, devices: int, layers: int, *, most: int = 2, stages: int | None = None
) -> Iterator[tuple[int, ...]]:
    """For each way to lay out the stages of a schedule the device of each stage.

    Args:
        name: of the schedule.
        devices: use so many.
        layers: there are so many; no stage is empty.
        most: stages on each device, at most, where they go round.
        stages: if they are to be so many.
    """
    line = tuple(range(devices))
    shape = LAYOUTS[name].shape
    if shape == "line":
        made = [line]
    elif shape == "v":
        made = [line + line[::-1]]
    else:
        made = [line * v for v in range(2, most + 1)]
    for device_of in made:
        if len(device_of) <= layers and stages in (None, len(device_of)):
            yield device_of


def placement(schedule: Schedule) -> tuple[int, ...]:
    """For each stage of a plan its device; none of them has replicas."""
    return tuple(devices_of(schedule.device_of, j)[0] for j in range(schedule.n))
