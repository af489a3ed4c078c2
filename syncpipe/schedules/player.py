"""Lets every device go on until something is missing: how long a schedule takes, and whether it can
be carried out at all.

A device performs its actions in order, each as soon as the device is free and what the action needs
has arrived. What goes from one device to another takes the link between the two, one direction of
it, and one thing after another, while computing goes on:

    device 0   F0--F1--F2                 B0--      What F0 made is on the link 0 > 1 while F1 is
    link 0>1       ~~  ~~  ~~                       being computed, and B0 waits for the gradient
    device 1         F0--B0----F1--B1----           on the link 1 > 0.
    link 1>0                   ~~

All that a link carries comes from one device, in the order of its actions. So devices can be played
one after another, each as far as what has arrived lets it go, and no clock is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from typing import NamedTuple

from syncpipe.schedules.kinds import HALVES, KINDS, LETTERS, Kind
from syncpipe.schedules.schedule import Action, Devices, Schedule, devices_of

__all__ = ["Costs", "Played", "counted", "play", "validate"]


@dataclass(frozen=True)
class Costs:
    """How long things take for one micro-batch, in any unit of time.

    Attributes:
        forward: for each stage.
        backward_input: for each stage, the gradient of its inputs.
        backward_weight: for each stage, the gradients of its parameters. A whole backward takes as
            long as its two halves.
        transfer: for each but the last stage, of its output to the next stage, and of the gradient
            back. Nothing, if the two are on one device, whatever stands here. Empty means no time
            at all.
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
        empty = {"transfer": (0.0,) * (n - 1), "recompute": self.forward, "update": (0.0,) * n}
        for name, length in lengths.items():
            times = tuple(getattr(self, name) or empty.get(name, ()))
            object.__setattr__(self, name, times)
            if len(times) != length:
                raise ValueError(
                    f"{name} has {len(times)} times, but forward is for {n} stages; "
                    f"give it {length}"
                )
            _check_times(name, times)
        object.__setattr__(self, "skips", dict(self.skips))
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
        return self.times[action.kind][action.j]

    def at(self, i: int, m: int) -> Costs:
        """Those of micro-batch ``i`` of ``m``."""
        return self if self.last is None or i < m - 1 else self.last

    @cached_property
    def times(self) -> dict[Kind, list[float]]:
        """For each kind of action and stage."""
        parts = {kind: [getattr(self, part) for part in KINDS[kind].takes] for kind in KINDS}
        return {kind: list(map(sum, zip(*times, strict=True))) for kind, times in parts.items()}

    @cached_property
    def edges(self) -> dict[tuple[int, int, bool], float]:
        """What travels, in the order in which it leaves: from stage to stage, whether as a skip."""
        ways = {(j, j + 1, False): time for j, time in enumerate(self.transfer)}
        return ways | {(a, b, True): time for (a, b), time in self.skips.items()}


def _check_times(name: str, times: Iterable[float]) -> None:
    for time in times:
        if not (math.isfinite(time) and time >= 0):
            raise ValueError(f"{name} has the time {time}; times are finite and not negative")


#: When something was there, for each micro-batch; less than 0 if never.
Times = list[float]

#: What is sent: when it arrives, the devices of the stage that it is for, the time on the link.
_Way = tuple[Times, tuple[int, ...], float]

#: Actions of a kind on a stage: when they end, what they need, what they send, how long they take;
#: so many of them, the first ones, come after a recomputation, which takes so long.
_Cell = tuple[Times, list[Times], list[_Way], float, int, float]


class Played(NamedTuple):
    """What became of it.

    Attributes:
        makespan: when the last action ended; ``math.inf`` if devices wait for each other for ever.
        ends: for each kind and stage, when the action of each micro-batch ended.
        done: for each device how many of its actions could be carried out.
        runs: which device went from where to where in its list, one after another: an order in
            which a single device can carry out everything.
    """

    makespan: float
    ends: dict[Kind, list[Times]]
    done: list[int]
    runs: list[tuple[int, int, int]]


def play(
    rows: Sequence[Sequence[tuple[Kind, int, int]]],
    m: int,
    device_of: Devices,
    costs: Costs,
    recomputed: Sequence[int] = (),
) -> Played:
    """Plays lists of actions through; nothing is checked.

    Args:
        rows: for each device its actions in order, recomputations left out.
        m: number of micro-batches.
        device_of: for each stage the index of its device, or those of its replicas.
        costs: how long everything takes.
        recomputed: for each stage how many micro-batches, the first ones, are recomputed before
            they go back, for which nothing has to arrive. Empty: none.
    """
    usual, last = _cells(m, device_of, costs, recomputed or (0,) * len(device_of))
    final = m - 1 if costs.last is not None else m
    done, free, runs = [0] * len(rows), [0.0] * len(rows), []
    links = [[0.0] * len(rows) for _ in rows]
    left = [iter(row) for row in rows]
    heads: list[list[tuple[Kind, int, int]]] = [[] for _ in rows]  # read, and not yet performed
    sweep = [*range(len(rows)), *reversed(range(len(rows)))]  # there and back, as what is sent
    moved = True
    while moved:
        moved = False
        for d in sweep:
            start, now, sent = done[d], free[d], links[d]
            p = start
            for kind, i, j in chain(heads[d], left[d]):
                ends, needs, sends, time, count, again = (usual if i < final else last)[kind][j]
                ready = now + again if i < count else now
                for arrivals in needs:
                    there = arrivals[i]
                    if there > ready:
                        ready = there
                    elif there < 0.0:
                        break
                else:
                    ends[i] = now = ready + time
                    for arrivals, devices, way in sends:
                        to = devices[i % len(devices)]
                        if to == d:
                            arrivals[i] = now
                        else:
                            busy = sent[to]
                            arrivals[i] = sent[to] = (now if now > busy else busy) + way
                    p += 1
                    continue
                heads[d] = [(kind, i, j)]
                break
            else:
                heads[d] = []
            if p > start:
                runs.append((d, start, p))
                done[d], free[d], moved = p, now, True
    over = all(p == len(row) for p, row in zip(done, rows, strict=True))
    ends_of = {kind: [cell[0] for cell in cells] for kind, cells in usual.items()}
    return Played(max(free) if over else math.inf, ends_of, done, runs)


def _cells(
    m: int, device_of: Devices, costs: Costs, recomputed: Sequence[int]
) -> list[dict[Kind, list[_Cell]]]:
    """For each kind and stage: of all micro-batches but the last, and of that."""
    stages = range(len(device_of))
    devices = [devices_of(device_of, j) for j in stages]
    kinds: tuple[Kind, ...] = ("forward", "backward", *HALVES, "update")
    ends = {kind: [[-1.0] * m for _ in stages] for kind in kinds}
    forwards = ends["forward"]
    there, back = ([[-1.0] * m for _ in costs.edges] for _ in range(2))
    needs: dict[Kind, list[list[Times]]] = {kind: [[] for _ in stages] for kind in kinds}
    needs["backward"] = needs["backward_input"] = [[forwards[j]] for j in stages]
    needs["backward_weight"] = [[ends["backward_input"][j]] for j in stages]
    for (a, b, _), activations, gradients in zip(costs.edges, there, back, strict=True):
        needs["forward"][b].append(activations)
        needs["backward"][a].append(gradients)
    none = (0,) * len(stages)
    tables = []
    for one in (costs, costs.last or costs):
        sends: dict[str, list[list[_Way]]] = {
            what: [[] for _ in stages] for what in ("activation", "gradient", "")
        }
        for edge, activations, gradients in zip(costs.edges, there, back, strict=True):
            a, b, time = *edge[:2], one.edges.get(edge, 0.0)
            sends["activation"][a].append((activations, devices[b], time))
            sends["gradient"][b].append((gradients, devices[a], time))
        again = {"gradient": (recomputed, one.recompute)}
        table: dict[Kind, list[_Cell]] = {}
        for kind in kinds:
            what = KINDS[kind].sends
            counts, times = again.get(what, (none, none))
            columns = ends[kind], needs[kind], sends[what], one.times[kind], counts, times
            table[kind] = list(zip(*columns, strict=True))
        tables.append(table)
    return tables


def counted(rematerialized: Sequence[int] | None, m: int, n: int) -> tuple[int, ...]:
    """How many micro-batches each stage recomputes, checked; None: none.

    Raises:
        ValueError: they are for another number of stages, or more than there are.
    """
    counts = (0,) * n if rematerialized is None else tuple(rematerialized)
    if len(counts) != n or not all(0 <= count <= m for count in counts):
        raise ValueError(
            f"rematerialized={counts}: give it a number from 0 to m={m} for each of the {n} stages"
        )
    return counts


def validate(schedule: Schedule) -> None:
    """Prove that free-running devices can carry out a schedule, and that it is a whole one.

    Each cell has one forward and one backward, whole or in two halves, on the device of its stage;
    everything that an action needs comes before it on the same device; and devices never wait for
    each other in a circle. Who passes has no deadlock, however long actions take: what a device
    waits for depends on the order alone.

    Raises:
        ValueError: naming the first action that is wrong, and why.
    """
    try:
        _check_placement(schedule)
        places = _check_cells(schedule)
        _check_complete(schedule, places)
        _check_progress(schedule, places)
    except ValueError as error:
        raise ValueError(f"schedule {schedule.name!r} is not valid: {error}") from None


def _check_placement(schedule: Schedule) -> None:
    if schedule.m < 1 or schedule.n < 1:
        raise ValueError(f"it needs micro-batches and stages, not m={schedule.m}, n={schedule.n}")
    devices = len(schedule.actions)
    there = [d for j in range(schedule.n) for d in devices_of(schedule.device_of, j)]
    if set(there) != set(range(devices)):
        raise ValueError(
            f"it has {devices} lists of actions, but device_of={schedule.device_of}; "
            "there is one list for each device, and each device has a stage"
        )


def _check_cells(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Returns where each action is: the device and the position in its list."""
    places: dict[Action, tuple[int, int]] = {}
    for d, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            where = f"{action}, action {position} of device {d}"
            kind, i, j = action
            if kind not in LETTERS:
                raise ValueError(f"{where}, has the kind {kind!r}; there are {', '.join(LETTERS)}")
            if not (0 <= i < schedule.m and 0 <= j < schedule.n):
                raise ValueError(f"{where}, is outside of m={schedule.m}, n={schedule.n}")
            if schedule.device(i, j) != d:
                raise ValueError(f"{where}, belongs on device {schedule.device(i, j)}")
            if action in places:
                raise ValueError(f"{where}, was already action {places[action][1]}")
            if kind == "backward" and (i, j) in schedule.splits:
                raise ValueError(f"{where}, is a whole backward, but that cell's is split as well")
            places[action] = d, position
    return places


def _check_complete(schedule: Schedule, places: dict[Action, tuple[int, int]]) -> None:
    whole: tuple[Kind, ...] = ("backward",)
    for i, j in product(range(schedule.m), range(schedule.n)):
        for kind in ("forward", *(HALVES if (i, j) in schedule.splits else whole)):
            action = Action(kind, i, j)
            if action not in places:
                d = schedule.device(i, j)
                raise ValueError(f"{action} is missing on device {d}: {kind} of cell {i, j}")


def _check_progress(schedule: Schedule, places: dict[Action, tuple[int, int]]) -> None:
    """Lets every device go as far as it can, until all are through or nobody can go on."""
    costs = Costs.even(schedule.n, 0.0, 0.0, 0.0)
    done = play(schedule.actions, schedule.m, schedule.device_of, costs).done
    waits = []
    for d, row in enumerate(schedule.actions):
        for action in row[done[d] : done[d] + 1]:
            where = f"{action}, action {done[d]} of device {d},"
            missing = {a: places[a] for a in schedule.predecessors(action)}
            missing = {a: (e, p) for a, (e, p) in missing.items() if p >= done[e]}
            for needed, (device, position) in missing.items():
                if device == d:
                    raise ValueError(
                        f"{where} comes before {needed}, action {position}, which it needs"
                    )
            waits.append(f"{where} waits for {' and '.join(map(str, missing))}")
    if waits:
        raise ValueError("deadlock: " + "; ".join(waits))
