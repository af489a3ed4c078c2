"""Schedules as data: the order in which each device works on its cells (micro-batch, stage).

A backward may be split: ``backward_input`` computes the gradient that the previous stage waits for,
``backward_weight`` those of the parameters. Kinds without a letter are added when compiling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Literal, NamedTuple

__all__ = ["Action", "Devices", "Kind", "Schedule", "devices_of", "from_csv", "stages_on", "to_csv"]

Kind = Literal[
    "forward", "backward", "backward_input", "backward_weight", "recompute", "reduce", "update"
]  # fmt: skip


class KindInfo(NamedTuple):
    letter: str  # in CSV files; empty for kinds that no schedule contains
    shade: float  # in pictures: mixes the micro-batch's colour with white, or with black if < 0
    in_flight_change: int  # change in the number of micro-batches in flight on the stage
    sends: Literal["activation", "gradient", ""]  # what other stages receive from it
    costs: tuple[Kind, ...]  # the fields of Costs whose sum is its duration
    label: str  # in legends


HALVES: tuple[Kind, ...] = ("backward_input", "backward_weight")

#: In the order of tables and legends.
KINDS: dict[Kind, KindInfo] = {
    "forward": KindInfo("F", 0.62, +1, "activation", ("forward",), "forward"),
    "backward": KindInfo("B", 0.0, -1, "gradient", HALVES, "backward"),
    "backward_input": KindInfo("I", 0.25, 0, "gradient", HALVES[:1],
                            "backward, input half: the previous stage waits"),
    "backward_weight": KindInfo("W", -0.36, -1, "", HALVES[1:],
                             "backward, weight half: no stage waits"),
    "recompute": KindInfo("", 0.62, 0, "", ("recompute",), "recomputation of the forward"),
    "reduce": KindInfo("", -0.6, 0, "", (), "gradients of replicas summed"),
    "update": KindInfo("", -0.75, 0, "", ("update",), "update of weights, without a flush"),
}  # fmt: skip

#: The kinds that a schedule can contain, by letter.
LETTERS: dict[str, Kind] = {info.letter: kind for kind, info in KINDS.items() if info.letter}


class Action(NamedTuple):
    """One action of a schedule: what to do with micro-batch ``i`` on stage ``j``."""

    kind: Kind
    i: int
    j: int

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Sort key: the order of a fill-drain schedule, forwards first."""
        back = self.kind != "forward"
        return back, self.i - self.j if back else self.i + self.j, self.j

    def __str__(self) -> str:
        """Stage, letter and micro-batch, as in CSV files: ``2F0`` is micro-batch 0 on stage 2."""
        return f"{self.j}{KINDS[self.kind].letter if self.kind in KINDS else '?'}{self.i}"


#: For each stage the index of its device, or a tuple of those of its replicas.
Devices = tuple[int | tuple[int, ...], ...]


def devices_of(device_of: Devices, j: int) -> tuple[int, ...]:
    """The devices of a stage: of ``r`` devices, number ``i % r`` runs micro-batch ``i``."""
    devices = device_of[j]
    return devices if isinstance(devices, tuple) else (devices,)


@lru_cache(maxsize=256)
def stages_on(device_of: Devices) -> list[list[int]]:
    """For each device its stages."""
    places = [devices_of(device_of, j) for j in range(len(device_of))]
    devices = 1 + max(chain.from_iterable(places), default=-1)
    return [[j for j, place in enumerate(places) if d in place] for d in range(devices)]


@dataclass(frozen=True)
class Schedule:
    """For each device the ordered actions of one mini-batch.

    Each device follows its own list and waits only for the inputs of its next action. The
    constructor checks nothing, see :func:`validate`. Comparison ignores the name.

    Attributes:
        m: number of micro-batches.
        device_of: for each stage the index of its device, or a tuple of those of its replicas,
            which take micro-batches in turn: of ``r`` replicas, number ``i % r`` takes micro-batch
            ``i``.
        actions: for each device its actions in order.
        name: label in messages and tables.
    """

    m: int
    device_of: Devices
    actions: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)

    def __hash__(self) -> int:
        return hash((self.m, self.device_of))  # hashing all actions is slow

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
        """The cells ``(i, j)`` whose backward is split into two halves."""
        return frozenset((a.i, a.j) for row in self.actions for a in row if a.kind in HALVES)

    def recomputing(self, counts: Sequence[int]) -> list[list[Action]]:
        """For each device its actions, with recomputations right before the backwards.

        The first ``counts[j]`` micro-batches of stage ``j`` are recomputed.
        """
        rows: list[list[Action]] = [[] for _ in self.actions]
        for row, actions in zip(rows, self.actions, strict=True):
            for action in actions:
                if action.i < counts[action.j] and KINDS[action.kind].sends == "gradient":
                    row.append(Action("recompute", action.i, action.j))
                row.append(action)
        return rows

    def predecessors(self, action: Action) -> tuple[Action, ...]:
        """The actions that must end before this one can start, skips aside."""
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

        They live until the end of the backward or its weight half. With replicas the fullest one
        counts.
        """
        peaks = []
        for j in range(self.n):
            rows = [self.actions[d] for d in devices_of(self.device_of, j)]
            alive = ((KINDS[a.kind].in_flight_change for a in row if a.j == j) for row in rows)
            peaks.append(max(max(accumulate(own, initial=0)) for own in alive))
        return tuple(peaks)


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as text, which :func:`from_csv` reads.

    One row for each device, in order, without a header; one field for each action: stage, letter,
    micro-batch. ``F`` is a forward, ``B`` a whole backward, ``I`` and ``W`` its input and weight
    halves. This is the "compute only" format of ``torch.distributed.pipelining``.
    """
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Read the text that :func:`to_csv` writes; see :func:`syncpipe.schedules.validate` for checks.

    Spaces around a field, empty fields and empty lines at the end are ignored.

    Raises:
        ValueError: a field is no action, or a stage is on no device or on several.
    """
    rows: list[list[Action]] = []
    device_of: dict[int, int] = {}
    for d, line in enumerate(text.rstrip().splitlines()):
        rows.append([])
        for cell in filter(None, map(str.strip, line.split(","))):
            match = re.fullmatch(rf"(\d+)([{''.join(LETTERS)}])(\d+)", cell, re.ASCII)
            if match is None:
                raise ValueError(
                    f"line {d + 1}: {cell!r} is not an action; write stage, letter "
                    f"({', '.join(LETTERS)}) and micro-batch, for example '2F0'"
                )
            action = Action(LETTERS[match[2]], int(match[3]), int(match[1]))
            rows[d].append(action)
            if device_of.setdefault(action.j, d) != d:
                raise ValueError(
                    f"stage {action.j} is on lines {device_of[action.j] + 1} and {d + 1}; "
                    "a line is a device, so put each stage on one line"
                )
    missing = set(range(max(1, len(device_of)))) - set(device_of)
    if missing:
        raise ValueError(f"stages {missing} have no action; write for example '0F0,0B0'")
    m = 1 + max(action.i for row in rows for action in row)
    stages = tuple([device_of[j] for j in sorted(device_of)])
    return Schedule(m, stages, tuple(map(tuple, rows)), name)
