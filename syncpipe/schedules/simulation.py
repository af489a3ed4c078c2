"""Plays a schedule through in time, given how long everything takes.

Pure Python. A device performs its actions in order, each as soon as the device is free and what the
action needs has arrived. What goes from one device to another takes the link between the two, one
direction of it, and one thing after another; computing goes on meanwhile.

    device 0   F0--F1--F2                 B0--      What F0 made is on the link 0 > 1 while F1 is
    link 0>1       ~~  ~~  ~~                       being computed, and B0 waits for the gradient
    device 1         F0--B0----F1--B1----           on the link 1 > 0.
    link 1>0                   ~~
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from syncpipe.schedules.kinds import KINDS, Kind
from syncpipe.schedules.schedule import Action, Program, Schedule, training_program, validate

__all__ = ["Costs", "Simulation", "TimedAction", "Transfer", "simulate"]


@dataclass(frozen=True)
class Costs:
    """How long things take for one micro-batch, in any unit of time.

    Attributes:
        forward: for each stage.
        backward_input: for each stage, the gradient of its inputs.
        backward_weight: for each stage, the gradients of its parameters. A whole backward takes as
            long as its two halves.
        transfer: for each but the last stage, the way of its output to the next stage, and of the
            gradient back. Nothing, if the two are on one device, whatever stands here. Empty means
            no time at all.
        skips: for each pair (stage that stashes, stage that pops) the same.
        recompute: for each stage, a forward that is done once more before a backward. Empty means
            as long as the forward.
        last: what the last micro-batch takes, where it is smaller than the others; None if not.
        update: for each stage, an update of its weights (see ``simulate(update_every=)``). Empty
            means no time at all.

    Raises:
        ValueError: if lengths do not match, a time is no number or negative, or a skip leads
            nowhere.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: tuple[float, ...] = ()
    skips: Mapping[tuple[int, int], float] = field(default_factory=dict)
    recompute: tuple[float, ...] = ()
    last: Costs | None = None
    update: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.forward)
        if n == 0:
            raise ValueError("costs are for at least one stage, but forward is empty")
        lengths = dict.fromkeys(("forward", "backward_input", "backward_weight"), n)
        lengths |= {"transfer": n - 1, "recompute": n, "update": n}
        for name in lengths:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.transfer:
            object.__setattr__(self, "transfer", (0.0,) * (n - 1))
        if not self.recompute:
            object.__setattr__(self, "recompute", self.forward)
        if not self.update:
            object.__setattr__(self, "update", (0.0,) * n)
        object.__setattr__(self, "skips", dict(self.skips))
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} times, but forward is for {n} stages; "
                    f"give it {length}"
                )
            _check_times(name, getattr(self, name))
        _check_times("skips", self.skips.values())
        for source, target in self.skips:
            if not 0 <= source < target < n:
                raise ValueError(f"a skip from stage {source} to {target} is none, with {n} stages")
        if self.last is not None and len(self.last.forward) != n:
            raise ValueError(
                f"last is for {len(self.last.forward)} stages, but forward is for {n}: give it {n}"
            )

    @classmethod
    def even(
        cls,
        n: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        transfer: float = 0.0,
        update: float = 0.0,
    ) -> Costs:
        """The same for each of ``n`` stages."""
        between = (transfer,) * (n - 1)
        kinds = (forward,) * n, (backward_input,) * n, (backward_weight,) * n
        return cls(*kinds, transfer=between, update=(update,) * n)

    def of(self, action: Action) -> float:
        """How long an action takes, for any but the last micro-batch."""
        return self._times[action.kind][action.j]

    def at(self, i: int, m: int) -> Costs:
        """Those of micro-batch ``i`` of ``m``."""
        return self if self.last is None or i < m - 1 else self.last

    @cached_property
    def _times(self) -> dict[Kind, list[float]]:
        """For each kind and stage."""
        parts = {kind: [getattr(self, part) for part in KINDS[kind].takes] for kind in KINDS}
        return {kind: list(map(sum, zip(*times, strict=True))) for kind, times in parts.items()}


def _check_times(name: str, times: Iterable[float]) -> None:
    for time in times:
        if not (math.isfinite(time) and time >= 0):
            raise ValueError(f"{name} has the time {time}; times are finite and not negative")


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
    """Plays a schedule through.

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
    counts = (0,) * schedule.n if rematerialized is None else tuple(rematerialized)
    if len(counts) != schedule.n or not all(0 <= count <= schedule.m for count in counts):
        raise ValueError(
            f"rematerialized={counts}: give it a number from 0 to m={schedule.m} for each of the "
            f"{schedule.n} stages"
        )
    if update_every is not None and update_every < 1:
        raise ValueError(f"update_every={update_every}: give it at least 1, or None for no updates")
    return _Simulator(schedule, costs, counts, update_every).run()


class _Simulator:
    """The state of one simulation. Time goes from one end of something to the next."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        rematerialized: tuple[int, ...],
        update_every: int | None,
    ) -> None:
        self._schedule = schedule
        self._costs = costs
        self._rematerialized = rematerialized
        self._rows: Program = training_program(schedule, rematerialized, update_every)
        self._next = [0] * len(schedule.actions)
        self._free = [True] * len(schedule.actions)
        self._on_device: list[TimedAction | None] = [None] * len(schedule.actions)  # the latest
        self._on_link: dict[tuple[int, int], Transfer] = {}  # the latest, by devices
        self._cause: dict[_Step, _Step | None] = {}  # what it had to wait for
        self._missing: dict[Action, int] = {}  # how much of what it needs has not arrived
        self._arrived: dict[Action, _Step] = {}  # the latest of what it needs
        self._ends: list[tuple[float, int, _Step]] = []
        for row in self._rows:
            for action in row:
                self._missing[action] = 0
                if action.kind in ("recompute", "update"):
                    continue  # its row brings it after its forward, or backward
                self._missing[action] = len(schedule.predecessors(action))
                for source, target in costs.skips:
                    if _crosses(action, source, target):
                        self._missing[action] += 1

    def run(self) -> Simulation:
        for d in range(len(self._next)):
            self._start_next(d)
        while self._ends:
            _, _, over = heapq.heappop(self._ends)
            if isinstance(over, Transfer):
                self._arrive(self._receiver(over.action, over.target), over)
            else:
                self._free[over.device] = True
                self._send(over)
                self._start_next(over.device)
        spans = [what for what in self._cause if isinstance(what, TimedAction)]
        transfers = [what for what in self._cause if isinstance(what, Transfer)]
        transfers.sort(key=lambda transfer: transfer.start)  # some stood in a queue first
        last = max(spans, key=lambda span: span.end)
        path: list[_Step] = []
        step: _Step | None = last
        while step is not None:
            path.append(step)
            step = self._cause[step]
        return Simulation(
            self._schedule,
            self._costs,
            tuple(spans),
            tuple(transfers),
            tuple(reversed(path)),
            last.end,
            self._rematerialized,
        )

    def _start_next(self, d: int) -> None:
        """Starts the next action of a free device, if everything is there."""
        row, position, before = self._rows[d], self._next[d], self._on_device[d]
        if not self._free[d] or position == len(row) or self._missing[row[position]]:
            return
        action = row[position]
        cause = _later(before, self._arrived.get(action))
        start = cause.end if cause else 0.0
        costs = self._costs.at(action.i, self._schedule.m)
        span = TimedAction(action, d, start, start + costs.of(action))
        self._on_device[d] = span
        self._free[d] = False
        self._next[d] += 1
        self._begin(span, cause)

    def _send(self, span: TimedAction) -> None:
        """What the end of an action sets off, on its own device and on others."""
        schedule, (kind, i, j) = self._schedule, span.action
        costs = self._costs.at(i, schedule.m)
        sends = KINDS[kind].sends
        if kind == "forward":
            self._arrive(schedule.backward_of(i, j), span)
        if kind == "backward_input":
            self._arrive(Action("backward_weight", i, j), span)
        if sends == "activation" and j + 1 < schedule.n:
            self._transfer(span, j + 1, costs.transfer[j], False)
        if sends == "gradient" and j > 0:
            self._transfer(span, j - 1, costs.transfer[j - 1], False)
        for (source, target), time in costs.skips.items():
            if sends == "activation" and j == source:
                self._transfer(span, target, time, True)
            if sends == "gradient" and j == target:
                self._transfer(span, source, time, True)

    def _transfer(self, span: TimedAction, target: int, time: float, skip: bool) -> None:
        """Puts the result of an action on its way to another stage."""
        there = self._schedule.device(span.action.i, target)
        if there == span.device:
            self._arrive(self._receiver(span.action, target), span)
            return
        link = (span.device, there)
        cause = _later(span, self._on_link.get(link))
        assert cause is not None  # there is at least the span
        transfer = Transfer(span.action, target, skip, cause.end, cause.end + time)
        self._on_link[link] = transfer
        self._begin(transfer, cause)

    def _receiver(self, action: Action, target: int) -> Action:
        if KINDS[action.kind].sends == "activation":
            return Action("forward", action.i, target)
        return self._schedule.backward_of(action.i, target)

    def _arrive(self, action: Action, what: _Step) -> None:
        """Something that an action needs is there."""
        self._missing[action] -= 1
        self._arrived[action] = what  # time does not go back: this is the latest
        self._start_next(self._schedule.device(action.i, action.j))

    def _begin(self, what: _Step, cause: _Step | None) -> None:
        heapq.heappush(self._ends, (what.end, len(self._cause), what))
        self._cause[what] = cause


def _crosses(action: Action, source: int, target: int) -> bool:
    """Whether an action needs what comes over a skip, in forward or back."""
    return (
        action.j == {"activation": target, "gradient": source, "": None}[KINDS[action.kind].sends]
    )


def _later(a: _Step | None, b: _Step | None) -> _Step | None:
    if a is None or b is None:
        return a or b
    return b if b.end >= a.end else a
