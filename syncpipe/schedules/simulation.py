"""Plays a schedule through in time, given how long everything takes, and says what ran when."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from syncpipe.schedules.kinds import KINDS
from syncpipe.schedules.player import Costs, counted, play, validate
from syncpipe.schedules.schedule import Action, Schedule, training_program

__all__ = ["Costs", "Simulation", "TimedAction", "Transfer", "simulate"]


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action, and when it ran on which device."""

    action: Action
    device: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """The result of an action on its way to stage ``target``, on another device."""

    action: Action
    target: int
    skip: bool
    start: float
    end: float


_Step = TimedAction | Transfer


@dataclass(frozen=True)
class Simulation:
    """What happened when.

    Attributes:
        schedule: what was simulated.
        costs: with these times.
        rematerialized: for each stage so many micro-batches, the first ones, were recomputed.
        spans: all actions, in the order in which they started.
        transfers: everything that went between devices, in the order in which it started.
        critical_path: what the makespan consists of: actions and transfers, each of which starts
            when the one before it ends. Whatever takes longer here makes everything longer.
        makespan: when the last action ended; the first started at 0.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[TimedAction, ...]
    transfers: tuple[Transfer, ...]
    critical_path: tuple[TimedAction | Transfer, ...]
    makespan: float
    rematerialized: tuple[int, ...] = ()

    @property
    def busy(self) -> tuple[float, ...]:
        """For each device the time that it spent on actions."""
        times: list[list[float]] = [[] for _ in self.schedule.actions]
        for span in self.spans:
            costs = self.costs.at(span.action.i, self.schedule.m)
            times[span.device].append(costs.of(span.action))
        return tuple(map(math.fsum, times))

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time in which they were idle."""
        if self.makespan == 0:
            return 0.0
        return max(0.0, 1 - math.fsum(self.busy) / (len(self.busy) * self.makespan))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage the largest number of micro-batches alive at once."""
        return self.schedule.in_flight


def simulate(
    schedule: Schedule,
    costs: Costs,
    rematerialized: Sequence[int] | None = None,
    *,
    update_every: int | None = None,
) -> Simulation:
    """Play a schedule through with times.

    Args:
        schedule: what each device does in which order.
        costs: how long it takes; for as many stages.
        rematerialized: for each stage how many micro-batches, the first ones, are recomputed before
            they go back. A recomputation waits for no gradient. None: nothing is recomputed.
        update_every: each stage updates its weights whenever so many micro-batches have gone back,
            without waiting for the others, as ``Pipe.train_stream`` does. None: never.

    Raises:
        ValueError: if the schedule is not valid, or the costs or the numbers of recomputed
            micro-batches are for another number of stages.
    """
    validate(schedule)
    if len(costs.forward) != schedule.n:
        raise ValueError(
            f"the costs are for {len(costs.forward)} stages, but schedule {schedule.name!r} has "
            f"{schedule.n}"
        )
    counts = counted(rematerialized, schedule.m, schedule.n)
    if update_every is not None and update_every < 1:
        raise ValueError(f"update_every={update_every}: give it at least 1, or None for no updates")
    none = (0,) * schedule.n
    rows = training_program(schedule, none, update_every)
    played = play(rows, schedule.m, schedule.device_of, costs, counts)
    order = [(d, action) for d, start, end in played.runs for action in rows[d][start:end]]
    causes = _causes(schedule, costs, counts, order)
    spans = [what for what in causes if isinstance(what, TimedAction)]
    transfers = [what for what in causes if isinstance(what, Transfer)]
    path: list[_Step] = []
    step: _Step | None = max(spans, key=lambda span: span.end)
    while step is not None:
        path.append(step)
        step = causes[step]
    return Simulation(
        schedule,
        costs,
        tuple(sorted(spans, key=lambda span: span.start)),
        tuple(sorted(transfers, key=lambda transfer: transfer.start)),
        tuple(reversed(path)),
        played.makespan,
        counts,
    )


def _causes(
    schedule: Schedule, costs: Costs, counts: Sequence[int], order: Sequence[tuple[int, Action]]
) -> dict[_Step, _Step | None]:
    """When everything ran, and for each what it had to wait for, in the order of the player."""
    causes: dict[_Step, _Step | None] = {}
    latest: dict[object, _Step] = {}  # on each device, on each link, and for each cell
    ways: dict[tuple[str, int], list[tuple[tuple[int, int, bool], int]]] = defaultdict(list)
    for edge in costs.edges:
        ways["activation", edge[0]].append((edge, edge[1]))
        ways["gradient", edge[1]].append((edge, edge[0]))

    def begin(d: int, action: Action, cause: _Step | None) -> TimedAction:
        start = cause.end if cause else 0.0
        time = costs.at(action.i, schedule.m).of(action)
        span = latest[d] = TimedAction(action, d, start, start + time)
        causes[span] = cause
        return span

    for d, action in order:
        kind, i, j = action
        sends = KINDS[kind].sends
        if sends == "gradient" and i < counts[j]:
            begin(d, Action("recompute", i, j), latest.get(d))
        span = begin(d, action, _later(latest.get(d), latest.get((sends, i, j))))
        for edge, target in ways[sends, j]:
            there = schedule.device(i, target)
            if there == d:
                continue
            cause = _later(span, latest.get((d, there)))
            assert cause is not None  # there is at least the span
            time = costs.at(i, schedule.m).edges.get(edge, 0.0)
            transfer = Transfer(action, target, edge[2], cause.end, cause.end + time)
            latest[d, there] = transfer
            latest[sends, i, target] = _later(latest.get((sends, i, target)), transfer) or transfer
            causes[transfer] = cause
    return causes


def _later(a: _Step | None, b: _Step | None) -> _Step | None:
    if a is None or b is None:
        return a or b
    return b if b.end >= a.end else a
