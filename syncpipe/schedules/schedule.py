"""What a schedule is: the order in which each device works on its cells (micro-batch, stage).

Pure Python: nothing here knows of tensors, threads or devices. The schedules that one can ask for
by name are in :mod:`syncpipe.schedules`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from syncpipe.schedules.kinds import HALVES, KINDS, LETTERS, Kind

__all__ = [
    "Action",
    "Devices",
    "Program",
    "Schedule",
    "device_count",
    "devices_of",
    "from_csv",
    "to_csv",
    "training_program",
]


class Action(NamedTuple):
    """One cell of a schedule: what to do with micro-batch ``i`` on stage ``j``."""

    kind: Kind
    i: int
    j: int

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Orders actions by when a fill-drain schedule performs them, forwards first."""
        back = self.kind != "forward"
        return back, self.i - self.j if back else self.i + self.j, self.j

    def __str__(self) -> str:
        """Stage, letter and micro-batch, as in CSV files: ``2F0`` is micro-batch 0 on stage 2."""
        return f"{self.j}{LETTERS.get(self.kind) or f'<{self.kind}>'}{self.i}"


#: For each worker the actions that it performs, in order.
Program = list[list[Action]]

#: For each stage the index of its device; or of several, if it has replicas, to which micro-batches
#: are dealt in turn.
Devices = tuple[int | tuple[int, ...], ...]


def devices_of(device_of: Devices, j: int) -> tuple[int, ...]:
    """The devices of a stage: micro-batch ``i`` is on number ``i % r`` of ``r``."""
    devices = device_of[j]
    return devices if isinstance(devices, tuple) else (devices,)


def device_count(device_of: Devices) -> int:
    """How many devices there are, if each of them has a stage."""
    return 1 + max(max(devices_of(device_of, j)) for j in range(len(device_of)))


@dataclass(frozen=True)
class Schedule:
    """For each device the actions that it performs, in order, for one mini-batch.

    Devices run free: each walks its own list, and waits only until what the next action needs is
    there. Nothing is checked here; see :func:`validate`.

    Attributes:
        m: number of micro-batches.
        device_of: for each stage the index of the device that it is on; of one with replicas those
            of all of them, micro-batch ``i`` being on number ``i % r`` of ``r``.
        actions: for each device its actions in order.
        name: what people call it; two schedules are equal whatever their names.
    """

    m: int
    device_of: Devices
    actions: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)

    def __hash__(self) -> int:
        return hash((self.m, self.device_of))  # of all actions it would take its time

    @property
    def n(self) -> int:
        """Number of stages."""
        return len(self.device_of)

    def device(self, i: int, j: int) -> int:
        """The device of a cell."""
        devices = self.device_of[j]
        return devices[i % len(devices)] if isinstance(devices, tuple) else devices

    @cached_property
    def splits(self) -> frozenset[tuple[int, int]]:
        """The cells ``(i, j)`` whose backward is split into its two halves."""
        return frozenset((a.i, a.j) for row in self.actions for a in row if a.kind in HALVES)

    def predecessors(self, action: Action) -> tuple[Action, ...]:
        """The actions that must be over before this one can start.

        A skip adds nothing: from a stage to one further right, its way is always behind the one
        through the stages between them.
        """
        kind, i, j = action
        if kind == "forward":
            return (Action("forward", i, j - 1),) if j > 0 else ()
        if kind == "backward_weight":
            return (Action("backward_input", i, j),)
        forward = Action("forward", i, j)
        return (forward, self.backward_of(i, j + 1)) if j + 1 < self.n else (forward,)

    def backward_of(self, i: int, j: int) -> Action:
        """The action that computes the gradient of the inputs of a cell."""
        return Action("backward_input" if (i, j) in self.splits else "backward", i, j)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage the largest number of micro-batches whose activations are alive at once.

        From the start of the forward to the end of the backward, or of its weight half. A cell
        stays on one device, so the order alone decides this and the duration of actions does not.
        Of a stage with replicas it is the number on any one of them.
        """
        peaks = [0] * self.n
        for row in self.actions:
            alive = [0] * self.n
            for action in row:
                alive[action.j] += KINDS[action.kind].alive
                peaks[action.j] = max(peaks[action.j], alive[action.j])
        return tuple(peaks)

    @cached_property
    def in_flight_on_device(self) -> tuple[int, ...]:
        """The same for each device: cells of all of its stages that are alive at once."""
        peaks = []
        for row in self.actions:
            alive = peak = 0
            for action in row:
                alive += KINDS[action.kind].alive
                peak = max(peak, alive)
            peaks.append(peak)
        return tuple(peaks)


@lru_cache(maxsize=128)
def training_program(
    schedule: Schedule, rematerialized: tuple[int, ...], update_every: int | None = None
) -> Program:
    """A schedule as what the engine runs (do not modify).

    A recomputation comes right before the backward of its cell, as an action of its own: it needs
    nothing from anybody, so it begins before the gradient is there.

    Args:
        schedule: a valid one.
        rematerialized: for each stage so many micro-batches, the first ones, are recomputed.
        update_every: a stage updates its weights whenever so many micro-batches have gone back.
    """
    program: Program = []
    for row in schedule.actions:
        program.append([])
        for action in row:
            kind, i, j = action
            if i < rematerialized[j] and KINDS[kind].sends == "gradient":
                program[-1].append(Action("recompute", i, j))
            program[-1].append(action)
            if update_every and KINDS[kind].alive < 0 and (i + 1) % update_every == 0:
                program[-1].append(Action("update", i, j))
    return program


# -- as text ---------------------------------------------------------------------------------------

_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_CELL = re.compile(rf"(\d+)([{''.join(_KINDS)}])(\d+)", re.ASCII)


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as text, which :func:`from_csv` reads.

    A row for each device, in order, without a header; a cell for each action, in order: stage,
    letter, micro-batch. ``F`` is a forward, ``B`` a whole backward, ``I`` and ``W`` its input and
    weight halves. Cells are separated by commas, without spaces or quotes, and each row ends in a
    newline. The name is not written.

    This is the "compute only" format of ``torch.distributed.pipelining``, which can load it.
    """
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Read what :func:`to_csv` writes.

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
