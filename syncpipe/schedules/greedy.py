"""Greedy list scheduling: a free device takes the startable action of highest priority.

With *lookahead*, a device may leave the action that it could start now, if an action of higher
priority arrives soon. It waits for at most ``lookahead`` times the delay that the other action
would suffer, or does something that ends before.

Actions of one list keep their order, and the resulting order has been played through once. So
results have no deadlock.
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


#: For each kind, stage and micro-batch; the lowest number is done first.
Priorities = dict[Kind, list[Times]]
#: Priority, times, the action, memory that it takes, that must be left, that it gives back.
_Node = tuple[float, ActionTimes, Action, float, float, float]
#: Floats that differ by less, relatively, count as equal.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Problem:
    """The task of the scheduler; for sizes see :func:`.auto`."""

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
        """The kinds of actions, in their order within a cell."""
        return ("forward", *HALVES) if self.split else ("forward", "backward")

    @cached_property
    def finish_reserve(self) -> list[float]:
        """For each stage the memory that must be left when a micro-batch starts there: enough for
        all later stages on the device, so the device cannot get stuck.
        """
        sizes = [max(self.held(0, j), self.held(self.m - 1, j)) for j in range(len(self.device_of))]
        rows = stages_on(self.device_of)
        later = {j: sum(sizes[k] for k in own if k > j) for own in rows for j in own}
        return [later[j] for j in range(len(sizes))]

    @cached_property
    def recompute_reserve(self) -> list[float]:
        """For each device the additional memory of a recomputation."""
        rows = stages_on(self.device_of)
        return [max(self.activations[j] - self.held(0, j) for j in own) for own in rows]

    def held(self, i: int, j: int) -> float:
        """The memory of a cell from its forward on, until its recomputation."""
        return self.inputs[j] if i < self.recomputed[j] else self.activations[j]

    def memory(self, action: Action) -> tuple[float, float]:
        """The memory that an action takes at its start and gives back at its end."""
        kind, i, j = action
        stored, kept = self.activations[j], self.held(i, j)
        takes = {"activation": kept, "gradient": stored - kept, "": 0.0}[KINDS[kind].sends]
        return takes, stored * (KINDS[kind].in_flight_change < 0)

    def peak(self, row: Iterable[Action]) -> float:
        """The maximum memory that a device holds."""
        held = peak = 0.0
        for takes, gives in map(self.memory, row):
            held += takes
            peak = max(peak, held)
            held -= gives
        return peak

    def fits(self, rows: Iterable[Iterable[Action]]) -> bool:
        limits = zip(map(self.peak, rows), self.limits, strict=True)
        return all(peak <= limit * (1 + ROUNDING) for peak, limit in limits)

    def play(self, rows: Sequence[Sequence[Action]]) -> Played:
        return play(rows, self.m, self.device_of, self.costs, self.recomputed)


class ListSchedule:
    """The actions of ``lists``, some for each device, in one order: ``rows``.

    ``table`` has their end times. If ``stuck``, actions are left, for lack of memory or because
    lists wait for each other. ``mirrored`` reverses time: the last actions come first, and memory
    is taken where it is given back.
    """

    def __init__(
        self, problem: Problem, lists: Sequence[Sequence[Sequence[Action]]], priorities: Priorities,
        lookahead: float = 0.0, careful: bool = False, *, mirrored: bool = False,
    ) -> None:  # fmt: skip
        p, devices = problem, range(len(lists))
        self.table = table = time_table(p.m, p.device_of, p.costs, p.recomputed, mirrored=mirrored)
        self.rows: list[list[Action]] = [[] for _ in devices]
        self._next_check = [0.0 for _ in devices]  # for startable actions
        self._free, self._memory = [0.0 for _ in devices], [0.0 for _ in devices]
        self._links = [[0.0 for _ in devices] for _ in devices]
        self._limits = [limit * (1 + ROUNDING) for limit in p.limits]

        def node(action: Action) -> _Node:
            kind, i, j = action
            takes, gives = p.memory(action)[:: -1 if mirrored else 1]
            spare = p.finish_reserve[j] if careful and (mirrored or kind == "forward") else 0.0
            return priorities[kind][j][i], table[kind][j], action, takes, spare, gives

        # The next action of a list is its last entry.
        step = 1 if mirrored else -1
        self._unscheduled = [[list(map(node, each[::step])) for each in own] for own in lists]
        # Memory reserved while recomputations are left, and the number of these.
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
        """Actions that can start now: (priority, end, list); and later: (start, priority)."""
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
    """Merge orders into one for each device, in which a free device takes the most urgent action.

    Each order stays as it is, except that orders for several devices are split. A forward takes one
    unit of time, a half backward too, transfers none. At most ``limit`` cells are in flight
    on a device; the orders must not need more.
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
    # Actions that let gradients flow, forwards, the rest; among these the nearest to their end.
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
    """Distribute a schedule to replicas: each takes every ``r``-th micro-batch, in the same order.

    Args:
        schedule: a valid one. Stages on one device have the same replicas.
        device_of: for each stage the index of its device, or those of its replicas.
    """
    return merge_orders(schedule.name, schedule.m, device_of, schedule.actions)
