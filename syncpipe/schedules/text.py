"""Schedules as CSV files: one row for each device, one cell for each action.

1F1B with three micro-batches on two devices:

    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
"""

from __future__ import annotations

import re

from syncpipe.schedules.kinds import LETTERS
from syncpipe.schedules.schedule import Action, Schedule

__all__ = ["from_csv", "to_csv"]

_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_CELL = re.compile(rf"(\d+)([{''.join(_KINDS)}])(\d+)", re.ASCII)


def to_csv(schedule: Schedule) -> str:
    """A schedule as text; :func:`from_csv` reads it back.

    A row for each device, in order, without a header; a cell for each action, in order: stage,
    letter, micro-batch. ``F`` is a forward, ``B`` a whole backward, ``I`` and ``W`` its input and
    weight halves. Cells are separated by commas, without spaces or quotes, and each row ends in a
    newline. The name is not written.

    This is the "compute only" format of ``torch.distributed.pipelining``, which can load it.
    """
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Reads what :func:`to_csv` writes.

    Space around a cell, empty cells (idle time, to those who align columns) and empty lines at the
    end mean nothing. The numbers of micro-batches and stages are one more than the largest that
    occur. Whether the result can run is for :func:`syncpipe.schedules.schedule.validate` to say.

    Args:
        text: the contents of the file.
        name: what to call the schedule.

    Raises:
        ValueError: on a cell that is no action, and on a stage that is on two devices or none.
    """
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.rstrip().splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        rows.append(tuple(_parse(cell, number) for cell in cells if cell))
    device_of: dict[int, int] = {}
    for device, row in enumerate(rows):
        for action in row:
            if device_of.setdefault(action.j, device) != device:
                raise ValueError(
                    f"stage {action.j} is on lines {device_of[action.j] + 1} and {device + 1}; "
                    "a line is a device, and each stage is on one of them"
                )
    if not device_of:
        raise ValueError("there is no action in this schedule; write for example '0F0,0B0'")
    n = max(device_of) + 1
    for j in range(n):
        if j not in device_of:
            raise ValueError(f"stage {j} has no action, but stage {n - 1} has")
    m = max(action.i for row in rows for action in row) + 1
    return Schedule(m, tuple(device_of[j] for j in range(n)), tuple(rows), name)


def _parse(cell: str, line: int) -> Action:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(
            f"line {line}: {cell!r} is no action; write stage, letter ({', '.join(_KINDS)}) and "
            "micro-batch, as in '2F0'"
        )
    j, letter, i = match.groups()
    return Action(_KINDS[letter], int(i), int(j))
