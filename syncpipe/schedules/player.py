"""Simulate a schedule: how long it takes, and whether it can run at all.

A device performs its actions in order, each as soon as the device is free and the inputs have
arrived. Between two devices there is one link in each direction, which carries one transfer after
another while the devices compute:

    device 0   F0--F1--F2                 B0--      The output of F0 is on the link 0>1 while F1 is
    link 0>1       ~~  ~~  ~~                       being computed. B0 waits for the gradient on
    device 1         F0--B0----F1--B1----           the link 1>0.
    link 1>0                   ~~

All transfers of a link come from one device, in the order of its actions. So no clock is needed:
devices are played one after another, each as far as the transfers that have arrived allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import add
from typing import NamedTuple

from syncpipe.schedules.schedule import (
    HALVES,
    KINDS,
    LETTERS,
    Action,
    Devices,
    Kind,
    Schedule,
    devices_of,
    stages_on,
)

__all__ = [
    "ActionTimes", "Costs", "Simulation", "Span", "Times", "checked_counts", "heads_and_tails",
    "lanes", "lower_bound", "play", "simulate", "time_table", "validate",
]  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Durations for one micro-batch, in any unit of time.

    Attributes:
        forward: for each stage.
        backward_input, backward_weight: for each stage, the gradients of its inputs and of its
            parameters. A whole backward takes the sum of both.
        transfer: for each stage but the last, its output to the next stage, and the gradient back.
            Transfers within a device take no time. Empty: none.
        skips: the same for each pair (stage that stashes, stage that pops).
        recompute: for each stage, the forward during recomputation. Empty: as ``forward``.
        last: durations for the last micro-batch, if it is smaller than the others.
        update: for each stage, an update of its weights. Empty: none.

    Raises:
        ValueError: lengths differ, a time is negative or not finite, or a skip has no such stages.
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
            raise ValueError("forward is empty: give costs for at least one stage")
        object.__setattr__(self, "skips", dict(self.skips))
        empty = {"transfer": (0.0,) * (n - 1), "recompute": self.forward, "update": (0.0,) * n}
        every = {"skips": tuple(self.skips.values())}
        for name in ("forward", *HALVES, *empty):
            times = every[name] = tuple(getattr(self, name) or empty.get(name, ()))
            length = n - (name == "transfer")
            if len(times) != length:
                raise ValueError(
                    f"{name} has {len(times)} times, but forward has {n} stages: give {length}"
                )
            object.__setattr__(self, name, times)
        for name, times in every.items():
            for time in times:
                if not (math.isfinite(time) and time >= 0):
                    raise ValueError(f"{name} contains {time}: give finite times, not negative")
        for source, target in self.skips:
            if not 0 <= source < target < n:
                raise ValueError(f"no skip leads from stage {source} to {target} of {n} stages")
        if self.last is not None and len(self.last.forward) != n:
            raise ValueError(f"last has {len(self.last.forward)} stages, but forward has {n}")

    @classmethod
    def even(
        cls, n: int, forward: float = 1.0, backward_input: float = 1.0,
        backward_weight: float = 1.0, transfer: float = 0.0, update: float = 0.0,
    ) -> Costs:  # fmt: skip
        """The same durations for each of ``n`` stages."""
        kinds = (forward,) * n, (backward_input,) * n, (backward_weight,) * n
        return cls(*kinds, transfer=(transfer,) * (n - 1), update=(update,) * n)

    @cached_property
    def times(self) -> dict[Kind, list[float]]:
        """Durations by kind of action and stage."""
        parts = {kind: [getattr(self, part) for part in KINDS[kind].costs] for kind in KINDS}
        return {kind: list(map(sum, zip(*times, strict=True))) for kind, times in parts.items()}

    @cached_property
    def edges(self) -> dict[tuple[int, int, bool], float]:
        """Transfer times by (source, target, whether it is a skip), in the order of sending."""
        transfers = {(j, j + 1, False): time for j, time in enumerate(self.transfer)}
        return transfers | {(a, b, True): time for (a, b), time in self.skips.items()}


#: A time for each micro-batch; negative if the event has not happened.
Times = list[float]


class ActionTimes(NamedTuple):
    """Times of the actions of one kind on one stage; each list has an entry per micro-batch."""

    ends: Times  # shared by both kinds of backward, as a micro-batch has one of them
    needs: list[Times]  # arrival times of their inputs
    sends: list[tuple[int, Times, tuple[int, ...], list[float]]]  # stage, arrivals, devices, times
    takes: list[float]  # their durations
    recompute: list[float]  # durations of the recomputations before them


TimeTable = dict[Kind, list[ActionTimes]]


def time_table(
    m: int, device_of: Devices, costs: Costs, recomputed: Sequence[int] = (),
    more: tuple[Kind, ...] = (), *, mirrored: bool = False,
) -> TimeTable:  # fmt: skip
    """The times of all actions before any has run: for the kinds of schedules, and ``more``.

    ``mirrored`` reverses time: senders wait for receivers, a recomputation is part of its backward.
    """
    last, counts, none = costs.last or costs, recomputed or (0,) * len(device_of), [0.0] * m
    table: TimeTable = {}
    for kind in (*LETTERS.values(), *more):
        table[kind] = []
        for j, count in enumerate(counts):
            takes = [costs.times[kind][j]] * (m - 1) + [last.times[kind][j]]
            recompute = none
            if count and KINDS[kind].sends == "gradient":
                recompute = ([costs.recompute[j]] * (m - 1) + [last.recompute[j]])[:count]
                recompute += none[count:]
            if mirrored:
                takes, recompute = list(map(add, takes, recompute)), none
            ends = table["backward"][j].ends if kind == "backward_input" else [-1.0] * m
            table[kind].append(ActionTimes(ends, [], [], takes, recompute))
    forwards, whole, inputs, weights = (table[kind] for kind in LETTERS.values())
    for first, then in ((forwards, whole), (forwards, inputs), (inputs, weights)):
        for pair in zip(first, then, strict=True):
            before, after = reversed(pair) if mirrored else pair
            after.needs.append(before.ends)
    for edge, time in costs.edges.items():
        times = [time] * (m - 1) + [last.edges.get(edge, 0.0)]
        for kinds, link in (((forwards,), edge[:2]), ((whole, inputs), edge[1::-1])):
            source, target = reversed(link) if mirrored else link
            arrivals, devices = [-1.0] * m, devices_of(device_of, target)
            for row in kinds:
                row[source].sends.append((target, arrivals, (devices * m)[:m], times))
                row[target].needs.append(arrivals)
    return table


class Played(NamedTuple):
    makespan: float  # end of the last action; math.inf in a deadlock
    table: TimeTable
    waiting: list[Action | None]  # for each device the first action that cannot run


def play(
    rows: Sequence[Sequence[Action]], m: int, device_of: Devices, costs: Costs,
    recomputed: Sequence[int] = (), more: tuple[Kind, ...] = (),
) -> Played:  # fmt: skip
    """Simulate lists of actions, one for each device, without any checks.

    The first ``recomputed[j]`` micro-batches of stage ``j`` are recomputed before their backward.
    """
    table = time_table(m, device_of, costs, recomputed, more)
    plain = {kind: list(map(tuple, row)) for kind, row in table.items()}  # faster to unpack
    left, free = list(map(iter, rows)), [0.0] * len(rows)
    waiting: list[Action | None] = [next(row, None) for row in left]
    links = [[0.0] * len(rows) for _ in rows]
    sweep = [*range(len(rows)), *reversed(range(len(rows)))]  # both directions
    moved = True
    while moved:
        moved = False
        for d in sweep:
            first, now, sent = waiting[d], free[d], links[d]
            if first is None:
                continue
            for action in chain((first,), left[d]):
                kind, i, j = action
                ends, needs, sends, takes, recompute = plain[kind][j]
                ready = now + recompute[i]
                for arrivals in needs:
                    there = arrivals[i]
                    if there > ready:
                        ready = there
                    elif there < 0.0:
                        break
                else:
                    ends[i] = now = ready + takes[i]
                    for _, arrivals, devices, times in sends:
                        to = devices[i]
                        if to == d:
                            arrivals[i] = now
                        else:
                            busy = sent[to]
                            arrivals[i] = sent[to] = (now if now > busy else busy) + times[i]
                    continue
                waiting[d] = action
                break
            else:
                waiting[d] = None
            if waiting[d] is not first:
                free[d], moved = now, True
    return Played(math.inf if any(waiting) else max(free), table, waiting)


def heads_and_tails(
    device_of: Devices, costs: Costs, split: bool
) -> tuple[list[float], list[float]]:
    """Lower bounds for each stage: a micro-batch's way to it, a gradient's way back to stage 0."""
    last, heads, tails = costs.last or costs, [0.0], [0.0]
    back: Kind = "backward_input" if split else "backward"
    for j, transfer in enumerate(map(min, costs.transfer, last.transfer)):
        transfer *= device_of[j] != device_of[j + 1]
        heads.append(heads[j] + min(costs.forward[j], last.forward[j]) + transfer)
        tails.append(tails[j] + min(costs.times[back][j], last.times[back][j]) + transfer)
    return heads, tails


def lower_bound(
    m: int, device_of: Devices, costs: Costs, recomputed: Sequence[int], split: bool,
    taken: Sequence[float] = (),
) -> float:  # fmt: skip
    """Lower bound of the makespan of any order of these actions; see docs/planning.md.

    A device waits for the first micro-batch, does all its work, and its last gradient goes back to
    the first stage. ``taken``: for each device another bound of its work, used if it is larger.
    """
    last, work, late = costs.last or costs, list[float](), list[float]()
    for j, count in enumerate(recomputed):
        r = len(devices_of(device_of, j))  # the busiest replica has at least this share
        forward, back, weight = (
            ((m - 1) * costs.times[kind][j] + last.times[kind][j]) / r
            for kind in ("forward", *HALVES)
        )
        recompute = min(count, m - 1) * costs.recompute[j] + (count == m) * last.recompute[j]
        work.append(forward + back + recompute / r)
        late.append(weight)
    heads, tails = heads_and_tails(device_of, costs, split)
    bound = 0.0
    for d, own in enumerate(stages_on(device_of)):
        tail, rest = tails[own[0]], sum(late[j] for j in own)
        after = max(tail, rest) if split else tail + rest  # no stage waits for weight halves
        whole = sum(work[j] for j in own) + after
        bound = max(bound, heads[own[0]] + max([whole, *(x + tail for x in taken[d : d + 1])]))
    return bound


def validate(schedule: Schedule) -> None:
    """Check that a schedule is complete and that devices can carry it out.

    A valid schedule has no deadlock, whatever the durations: this depends on the order alone.

    Raises:
        ValueError: the schedule is invalid; names the first wrong action and the reason.
    """
    for problem in _problems(schedule):
        raise ValueError(f"schedule {schedule.name!r} is not valid: {problem}")


def _problems(schedule: Schedule) -> Iterator[str]:
    """The reasons why a schedule is invalid; each check relies on the previous ones."""
    m, n, rows, device_of = schedule.m, schedule.n, schedule.actions, schedule.device_of
    if m < 1 or n < 1:
        yield f"m={m}, n={n}, but both must be at least 1"
    if {d for j in range(n) for d in devices_of(device_of, j)} != set(range(len(rows))):
        yield f"it has {len(rows)} lists of actions, one for each device, but {device_of=}"

    def kinds(i: int, j: int) -> tuple[Kind, ...]:
        return ("forward", *HALVES) if (i, j) in schedule.splits else ("forward", "backward")

    place: dict[Action, tuple[int, int]] = {}
    for d, row in enumerate(rows):
        for p, action in enumerate(row):
            kind, i, j = action
            own = 0 <= i < m and 0 <= j < n and schedule.device(i, j) == d
            if action in place or not own or kind not in kinds(i, j):
                why = "is a duplicate" if action in place else "does not belong there, or is split"
                yield f"{action}, action {p} of device {d}, {why}: {m=}, {device_of=}"
            place[action] = p, d
    every = (Action(kind, i, j) for i in range(m) for j in range(n) for kind in kinds(i, j))
    for action in (action for action in every if action not in place):
        d = schedule.device(action.i, action.j)
        yield f"{action} is missing on device {d}: {action.kind} of {action[1:]}"
    waiting = play(rows, m, device_of, Costs.even(n, 0.0, 0.0, 0.0)).waiting
    reached = [math.inf if action is None else place[action][0] for action in waiting]
    stuck = []
    for action in filter(None, waiting):
        needed = [(a, *place[a]) for a in schedule.predecessors(action)]
        missing = " and ".join(f"{a}, action {p} of {d}" for a, p, d in needed if p >= reached[d])
        p, d = place[action]
        stuck.append(f"{action}, action {p} of device {d}, waits for {missing}")
    if stuck:
        yield f"deadlock: {'; '.join(stuck)}"


def checked_counts(rematerialized: Sequence[int] | None, m: int, n: int) -> tuple[int, ...]:
    """The number of micro-batches that each stage recomputes, checked; none by default."""
    counts = (0,) * n if rematerialized is None else tuple(rematerialized)
    if len(counts) != n or not all(0 <= count <= m for count in counts):
        raise ValueError(f"rematerialized={counts}: give {n} numbers from 0 to m={m}")
    return counts


@dataclass(frozen=True, slots=True)
class Span:
    """A timed event on one row of a timeline."""

    kind: str  # of the action, or "transfer"
    i: int  # micro-batch
    j: int  # stage; of a transfer the source
    row: int  # index of the worker or device; of a transfer that of the source
    start: float  # seconds since the start of the timeline; in a simulation the unit of the costs
    end: float  # as start
    target: int | None = None  # of a transfer the stage that it goes to
    step: int = 0  # index of the call of the pipe (mini-batch)
    backward: bool = False  # of a transfer, whether it carries a gradient
    host: float | None = None  # CPU time of its thread, if known

    @property
    def duration(self) -> float:
        """End minus start."""
        return self.end - self.start


def lanes(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """Spans by start, each with its lane; spans on the same lane do not overlap."""
    ends: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda span: span.start):
        lane = next((k for k, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        placed.append((lane, span))
    return placed


@dataclass(frozen=True)
class Simulation:
    """All actions, and all transfers between devices, each in the order of their starts."""

    schedule: Schedule
    costs: Costs
    spans: tuple[Span, ...]
    transfers: tuple[Span, ...]
    makespan: float  # end of the last action; the first one starts at 0
    rematerialized: tuple[int, ...] = ()

    @property
    def busy(self) -> tuple[float, ...]:
        """For each device the time that it spent on actions."""
        rows = range(len(self.schedule.actions))
        return tuple([math.fsum(s.duration for s in self.spans if s.row == row) for row in rows])

    @property
    def bubble(self) -> float:
        """The idle fraction of the devices' time, from 0 to 1."""
        whole = len(self.schedule.actions) * self.makespan
        return max(0.0, 1 - math.fsum(self.busy) / whole) if whole else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage the largest number of micro-batches in flight."""
        return self.schedule.in_flight


def simulate(
    schedule: Schedule, costs: Costs, rematerialized: Sequence[int] | None = None, *,
    update_every: int | None = None,
) -> Simulation:  # fmt: skip
    """Simulate a schedule with durations.

    Args:
        schedule: what each device does, in order.
        costs: durations, for the same number of stages.
        rematerialized: for each stage how many micro-batches, the first ones, are recomputed before
            their backward. A recomputation does not wait for the gradient.
        update_every: each stage updates its weights after this many backwards, without waiting for
            the others, as ``Pipe.train_stream`` does.

    Raises:
        ValueError: the schedule is invalid, or arguments are for different numbers of stages.
    """
    validate(schedule)
    if (n := len(costs.forward)) != schedule.n:
        name = f"schedule {schedule.name!r}"
        raise ValueError(f"costs have {n} stages, but {name} has {schedule.n}")
    if update_every is not None and update_every < 1:
        raise ValueError(f"update_every={update_every}: give it at least 1, or None for no updates")
    counts = checked_counts(rematerialized, schedule.m, schedule.n)
    every = sorted(_spans(schedule, costs, counts, update_every or 0), key=lambda span: span.start)
    spans = tuple([span for span in every if span.kind != "transfer"])
    transfers = tuple([span for span in every if span.kind == "transfer"])
    return Simulation(schedule, costs, spans, transfers, max(span.end for span in spans), counts)


def _spans(schedule: Schedule, costs: Costs, counts: Sequence[int], every: int) -> Iterator[Span]:
    """The spans of all actions and transfers, device by device."""
    rows = schedule.recomputing(counts)
    for row in rows if every else ():
        for p in reversed(range(len(row))):
            kind, i, j = row[p]
            if KINDS[kind].in_flight_change < 0 and (i + 1) % every == 0:
                row.insert(p + 1, Action("update", i, j))
    more: tuple[Kind, ...] = ("recompute", "update")
    table = play(rows, schedule.m, schedule.device_of, costs, more=more).table
    for d, row in enumerate(rows):
        now, busy = 0.0, [0.0] * len(rows)
        for kind, i, j in row:
            ends, needs, sends, _, _ = table[kind][j]
            start = max([now, *(arrivals[i] for arrivals in needs)])
            now = ends[i]
            yield Span(kind, i, j, d, start, now)
            for target, arrivals, devices, _ in sends:
                if (to := devices[i]) != d:
                    start, busy[to] = max(now, busy[to]), arrivals[i]
                    back = KINDS[kind].sends == "gradient"
                    yield Span("transfer", i, j, d, start, busy[to], target, backward=back)
