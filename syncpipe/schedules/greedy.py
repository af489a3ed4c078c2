"""Greedy list scheduling: a device that is free takes the most urgent of what can start.

It looks ahead: what has begun elsewhere has a known end, so if something more urgent is about to
arrive, the device may wait for it, or do something short meanwhile. How long it waits is its
*lookahead*: at most so many times the delay that this spares the other.

Whatever a device takes, the order of each of its lists is kept, and the order in which things
happened is one in which they can happen again. So no result has a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter

from syncpipe.schedules.player import ActionTimes, Costs, Played, Times, play, time_table
from syncpipe.schedules.schedule import HALVES, KINDS, Action, Devices, Kind, Schedule, stages_on

__all__ = ["ROUNDING", "ListSchedule", "Priorities", "Problem", "merge_orders", "round_robin"]


#: For each kind, stage and micro-batch; what has the least is done first.
Priorities = dict[Kind, list[Times]]
#: How urgent an action is, what it is one of, what it takes, what must be left over, what it gives.
_Node = tuple[float, ActionTimes, Action, float, float, float]
#: Of floats that differ by less, relative, neither is the greater one.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Problem:
    """What a schedule is made for; sizes are those of :func:`.auto`."""

    m: int
    device_of: Devices
    costs: Costs
    recomputed: Sequence[int]
    activations: Sequence[float]
    inputs: Sequence[float]
    limits: Sequence[float]
    split: bool = True

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of the actions, in the order in which those of a cell happen."""
        return ("forward", *HALVES) if self.split else ("forward", "backward")

    @cached_property
    def finish_reserve(self) -> list[float]:
        """For each stage the memory that must be left over when a micro-batch comes to it, to lead
        it through all later stages on the device, so that it does not get stuck.
        """
        sizes = [max(self.held(0, j), self.held(self.m - 1, j)) for j in range(len(self.device_of))]
        rows = stages_on(self.device_of)
        later = {j: sum(sizes[k] for k in own if k > j) for own in rows for j in own}
        return [later[j] for j in range(len(sizes))]

    @cached_property
    def recompute_reserve(self) -> list[float]:
        """For each device what a recomputation takes on besides: it must be left over, too, until
        the last one is done.
        """
        rows = stages_on(self.device_of)
        return [max(self.activations[j] - self.held(0, j) for j in own) for own in rows]

    def held(self, i: int, j: int) -> float:
        """The memory of a cell from its forward on; that of its activations from its backward."""
        return self.inputs[j] if i < self.recomputed[j] else self.activations[j]

    def memory(self, action: Action) -> tuple[float, float]:
        """What an action takes when it starts, and what it gives back when it ends."""
        kind, i, j = action
        whole, first = self.activations[j], self.held(i, j)
        takes = {"activation": first, "gradient": whole - first, "": 0.0}[KINDS[kind].sends]
        return takes, whole * (KINDS[kind].in_flight_change < 0)

    def peak(self, row: Iterable[Action]) -> float:
        """The most that a device holds at once."""
        held = peak = 0.0
        for takes, gives in map(self.memory, row):
            held += takes
            peak = max(peak, held)
            held -= gives
        return peak

    def fits(self, rows: Iterable[Iterable[Action]]) -> bool:
        """Whether no device ever holds more than it may."""
        limits = zip(map(self.peak, rows), self.limits, strict=True)
        return all(peak <= limit * (1 + ROUNDING) for peak, limit in limits)

    def play(self, rows: Sequence[Sequence[Action]]) -> Played:
        """Plays a schedule through."""
        return play(rows, self.m, self.device_of, self.costs, self.recomputed)


class ListSchedule:
    """Puts everything in an order: of what can start, what has the least priority is done first.

    ``rows`` are the actions of each device in order, ``cells`` say when they ended, and if
    ``stuck`` something is left, for want of memory or because lists wait for each other. Mirrored
    is back in time: what ends last comes first, and gives are takes.
    """

    def __init__(
        self, problem: Problem, lists: Sequence[Sequence[Sequence[Action]]], priorities: Priorities,
        lookahead: float = 0.0, careful: bool = False, *, mirrored: bool = False,
    ) -> None:  # fmt: skip
        p, devices = problem, range(len(lists))
        self.table = table = time_table(p.m, p.device_of, p.costs, p.recomputed, mirrored=mirrored)
        self.rows: list[list[Action]] = [[] for _ in devices]
        self._next_check = [0.0 for _ in devices]  # when each looks for something to do next
        self._free, self._memory = [0.0 for _ in devices], [0.0 for _ in devices]
        self._links = [[0.0 for _ in devices] for _ in devices]
        self._limits = [limit * (1 + ROUNDING) for limit in p.limits]

        def node(action: Action) -> _Node:
            kind, i, j = action
            takes, gives = p.memory(action)[:: -1 if mirrored else 1]
            spare = p.finish_reserve[j] if careful and (mirrored or kind == "forward") else 0.0
            return priorities[kind][j][i], table[kind][j], action, takes, spare, gives

        # The next one is the last of its list.
        step = 1 if mirrored else -1
        self._unscheduled = [[list(map(node, each[::step])) for each in own] for own in lists]
        # What is kept for recomputations, and how many of them are still to come.
        self._reserve = p.recompute_reserve if careful and not mirrored else [0.0 for _ in devices]
        self._recomputed = p.recomputed
        self._to_recompute = [sum(p.recomputed[j] for j in own) for own in stages_on(p.device_of)]
        while (now := min(self._next_check)) < math.inf:
            d = self._next_check.index(now)
            ready, ahead = self._startable(d, now)
            self._next_check[d] = min(ahead)[0] if ahead else math.inf
            if ready and ahead and lookahead:
                priority, end, _ = min(ready, key=itemgetter(0))
                worth = [
                    later
                    for later, other in ahead
                    if other < priority and later - now < lookahead * (end - later)
                ]
                ready = [each for each in ready if not worth or each[1] <= min(worth)]
            if ready:
                self._start(d, now, min(ready, key=itemgetter(0))[2].pop())
        self.stuck = any(map(any, self._unscheduled))

    def _startable(
        self, d: int, now: float
    ) -> tuple[list[tuple[float, float, list[_Node]]], list[tuple[float, float]]]:
        """What a free device can do: how urgent it is, when it would end, and the list that it is
        in; and what can start later: when, and how urgent it is.
        """
        held, limit = self._memory[d], self._limits[d]
        extra = self._reserve[d] * bool(self._to_recompute[d])
        found, ahead = [], []
        for nodes in filter(None, self._unscheduled[d]):
            priority, cell, (kind, i, _), takes, spare, _ = nodes[-1]
            spare += extra * (kind == "forward")
            ready = 0.0
            for arrivals in cell.needs:
                there = arrivals[i]
                if there < 0.0:
                    break
                if there > ready:
                    ready = there
            else:
                if takes and held + takes + spare > limit:
                    continue
                ready -= cell.recompute[i]
                if ready > now:
                    ahead.append((ready, priority))
                else:
                    found.append((priority, now + cell.takes[i] + cell.recompute[i], nodes))
        return found, ahead

    def _start(self, d: int, now: float, node: _Node) -> None:
        _, (ends, needs, sends, takes, recompute), action, taken, _, given = node
        i, links = action.i, self._links[d]
        back = KINDS[action.kind].sends == "gradient"
        self._to_recompute[d] -= back and i < self._recomputed[action.j]
        end = max([now + recompute[i], *(arrivals[i] for arrivals in needs)]) + takes[i]
        self.rows[d].append(action)
        ends[i] = self._free[d] = self._next_check[d] = end
        self._memory[d] += taken - given
        for _, arrivals, devices, times in sends:
            to = devices[i]
            if to == d:
                arrivals[i] = end
                continue
            arrivals[i] = links[to] = max(end, links[to]) + times[i]
            self._next_check[to] = min(self._next_check[to], max(end, self._free[to]))


def merge_orders(
    name: str, m: int, device_of: Devices, orders: Iterable[Sequence[Action]],
    limit: float = math.inf,
) -> Schedule:  # fmt: skip
    """Merges orders into one for each device, as if whoever is free took the most urgent action.

    A forward takes one unit of time, and so does half a backward; transfers take none. Each order
    stays as it is; what is for several devices is taken apart. No more cells than the limit, which
    is not less than the orders need, are in flight on a device.
    """
    n, whole, orders = len(device_of), Schedule(m, device_of, (), name), list(orders)
    if [order[0].j for order in orders] == list(range(n)) == list(device_of):
        return replace(whole, actions=tuple(map(tuple, orders)))
    devices = len(stages_on(device_of))
    lists: list[list[list[Action]]] = [[] for _ in range(devices)]
    for order in orders:
        own: dict[int, list[Action]] = {}
        for action in order:
            own.setdefault(whole.device(action.i, action.j), []).append(action)
        for d, actions in own.items():
            lists[d].append(actions)
    if all(len(some) == 1 for some in lists):
        return replace(whole, actions=tuple([tuple(some[0]) for some in lists]))
    # What brings gradients on, forwards, the rest; and what is nearest to the end of its way.
    ranks: dict[Kind, range] = {
        "forward": range(2 * n - 1, n - 1, -1), "backward": range(n), "backward_input": range(n),
        "backward_weight": range(2 * n, 3 * n),
    }  # fmt: skip
    priorities = {kind: [[float(rank)] * m for rank in row] for kind, row in ranks.items()}

    ones = (1.0,) * n
    problem = Problem(m, device_of, Costs.even(n), (0,) * n, ones, ones, [limit] * devices)
    found = ListSchedule(problem, lists, priorities)
    assert not found.stuck, "the orders wait for each other"
    return replace(whole, actions=tuple(map(tuple, found.rows)))


@lru_cache(maxsize=128)
def round_robin(schedule: Schedule, device_of: Devices) -> Schedule:
    """Deals a schedule out to replicas: each takes every ``r``-th micro-batch, in the same order.

    Args:
        schedule: a valid one. Stages that are on one device have the same replicas, too.
        device_of: for each stage the index of its device, or of those of its replicas.
    """
    return merge_orders(schedule.name, schedule.m, device_of, schedule.actions)
