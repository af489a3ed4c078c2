"""Greedy list scheduling: a device that is free takes the most urgent of what can start.

It looks ahead: what has begun elsewhere has a known end, so if something more urgent is about to
arrive, the device may wait for it, or do something short meanwhile. How long it waits is its
*patience*: at most so many times the delay that this spares the other.

Whatever a device takes, the order of each of its lists is kept, and the order in which things
happened is one in which they can happen again. So no result has a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from syncpipe.schedules.player import Costs
from syncpipe.schedules.schedule import KINDS, Action, Devices, Schedule, devices_of

__all__ = ["Lister", "Node", "Work", "dealt", "edges_of", "merged"]

#: A code and a micro-batch. Of ``n`` stages, code ``j`` is a forward of stage ``j``, ``n + j`` its
#: backward or input half, and ``2 n + j`` its weight half.
Node = tuple[int, int]

#: For each code and micro-batch.
Table = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Work:
    """What is to be put in order."""

    lists: Sequence[Sequence[Sequence[Node]]]  # for each device
    edges: Sequence[tuple[int, int, float]]  # from code to code, and the time on a link
    devices: Sequence[tuple[int, ...]]  # for each code those that have its micro-batches in turn
    times: Table  # ``early`` included
    early: Table  # so much of that can be done before anything arrives
    takes: Table  # memory at the start of a node
    gives: Table  # memory that the end of a node gives back
    reserve: Sequence[float]  # for each code, memory that must be left over when it takes some
    limits: Sequence[float]  # for each device its memory

    def mirrored(self, reserve: Sequence[float]) -> Work:
        """The same back in time: what ends last comes first, and gives are takes."""
        return replace(
            self,
            lists=[[each[::-1] for each in own] for own in self.lists],
            edges=[(b, a, time) for a, b, time in self.edges],
            early=[[0.0] * len(row) for row in self.early],
            takes=self.gives,
            gives=self.takes,
            reserve=reserve,
        )


def edges_of(costs: Costs) -> list[tuple[int, int, float]]:
    """What waits for what in a pipeline, by code, and for how long it is on a link."""
    n = len(costs.forward)
    edges = [(row * n + j, (row + 1) * n + j, 0.0) for row in (0, 1) for j in range(n)]
    for (a, b, _), time in costs.edges.items():
        edges += [(a, b, time), (n + b, n + a, time)]
    return edges


class Lister:
    """Puts everything in an order.

    Args:
        work: what there is to do.
        urgencies: for each code and micro-batch; the least is done first.
        patience: see above.

    Attributes:
        rows: for each device its nodes in order.
        ends: for each code and micro-batch.
        stuck: something is left, for want of memory or because lists wait for each other.
    """

    def __init__(self, work: Work, urgencies: Table, patience: float = 0.0) -> None:
        self._work, self._urgencies, self._patience = work, urgencies, patience
        devices, codes = range(len(work.lists)), range(len(work.times))
        self.rows: list[list[Node]] = [[] for _ in devices]
        self.ends = [[0.0] * len(row) for row in work.times]
        self._wake = [0.0 for _ in devices]  # when each looks for something to do next
        self._left = [[[*reversed(each)] for each in own] for own in work.lists]
        self._free, self._held = [0.0 for _ in devices], [0.0 for _ in devices]
        self._links = [[0.0 for _ in devices] for _ in devices]
        self._needs: list[list[list[float]]] = [[] for _ in codes]
        self._sends: list[list[tuple[list[float], tuple[int, ...], float]]] = [[] for _ in codes]
        for a, b, time in work.edges:
            arrivals = [-1.0] * len(work.times[a])  # < 0: unknown yet
            self._sends[a].append((arrivals, work.devices[b], time))
            self._needs[b].append(arrivals)
        while (now := min(self._wake)) < math.inf:
            self._step(self._wake.index(now), now)
        self.stuck = any(map(any, self._left))

    def _step(self, d: int, now: float) -> None:
        """Lets a free device begin something, or wait."""
        self._wake[d] = math.inf
        chosen, urgency, ahead = self._look(d, now, math.inf)
        if chosen and ahead and self._patience:
            c, i = chosen[-1]
            end = now + self._work.times[c][i]
            worth = [
                ready
                for ready, other in ahead
                if other < urgency and ready - now < self._patience * (end - ready)
            ]
            if worth:
                chosen, _, _ = self._look(d, now, min(worth))
        if chosen:
            self._begin(d, now, *chosen.pop())
        elif ahead:
            self._wake[d] = min(ahead)[0]

    def _look(
        self, d: int, now: float, until: float
    ) -> tuple[list[Node], float, list[tuple[float, float]]]:
        """The list whose next node is the most urgent that can start now and is over by then.

        Also how urgent that is, and what can start later: when, and how urgent it is.
        """
        work, held, limit = self._work, self._held[d], self._work.limits[d]
        chosen: list[Node] = []
        least, ahead = math.inf, []
        for nodes in filter(None, self._left[d]):
            c, i = nodes[-1]
            ready = 0.0
            for arrivals in self._needs[c]:
                there = arrivals[i]
                if there < 0.0:
                    break
                if there > ready:
                    ready = there
            else:
                takes = work.takes[c][i]
                if takes and held + takes + work.reserve[c] > limit:
                    continue
                urgency = self._urgencies[c][i]
                ready -= work.early[c][i]
                if ready > now:
                    ahead.append((ready, urgency))
                elif urgency < least and now + work.times[c][i] <= until:
                    chosen, least = nodes, urgency
        return chosen, least, ahead

    def _begin(self, d: int, now: float, c: int, i: int) -> None:
        work, links = self._work, self._links[d]
        ready = max([now + work.early[c][i], *(arrivals[i] for arrivals in self._needs[c])])
        end = ready + work.times[c][i] - work.early[c][i]
        self.rows[d].append((c, i))
        self.ends[c][i] = self._free[d] = self._wake[d] = end
        self._held[d] += work.takes[c][i] - work.gives[c][i]
        for arrivals, devices, time in self._sends[c]:
            to = devices[i % len(devices)]
            if to == d:
                arrivals[i] = end
                continue
            arrivals[i] = links[to] = max(end, links[to]) + time
            self._wake[to] = min(self._wake[to], max(end, self._free[to]))


def merged(
    name: str,
    m: int,
    device_of: Devices,
    orders: Iterable[Sequence[Action]],
    limit: float = math.inf,
) -> Schedule:
    """Merges orders into one for each device, as if whoever is free took the most urgent action.

    A forward takes one unit of time, and so does half a backward; transfers take none.

    Args:
        name: of the schedule.
        m: number of micro-batches.
        device_of: for each stage the index of its device, or those of its replicas.
        orders: of actions that together can be carried out, if each of them has a device of its
            own. Each stays as it is; what is for several devices is taken apart.
        limit: so many cells may be in flight on a device. Not less than the orders need.
    """
    n, whole = len(device_of), Schedule(m, device_of, (), name)
    devices = [devices_of(device_of, j) for j in range(n)]
    lists: list[list[list[Action]]] = [[] for _ in range(1 + max(chain.from_iterable(devices)))]
    for order in orders:
        own: dict[int, list[Action]] = {}
        for action in order:
            own.setdefault(whole.device(action.i, action.j), []).append(action)
        for d, actions in own.items():
            lists[d].append(actions)
    if all(len(some) == 1 for some in lists):
        return replace(whole, actions=tuple([tuple(some[0]) for some in lists]))
    times, takes, gives, urgencies = ([[0.0] * m for _ in range(3 * n)] for _ in range(4))
    nodes: dict[Action, Node] = {}
    for action in chain.from_iterable(chain.from_iterable(lists)):
        kind, i, j = action
        row = {"forward": 0, "backward_weight": 2}.get(kind, 1)
        c, i = nodes[action] = row * n + j, i
        times[c][i] = len(KINDS[kind].takes)
        takes[c][i], gives[c][i] = row == 0, KINDS[kind].alive < 0
        # What brings gradients on, forwards, the rest; and what is nearest to the end of its way.
        urgencies[c][i] = (2 * n - 1 - j, j, 2 * n + j)[row]
    found = Lister(
        Work(
            [[[nodes[action] for action in own] for own in some] for some in lists],
            edges_of(Costs.even(n)),
            devices * 3,
            times,
            [[0.0] * m] * (3 * n),
            takes,
            gives,
            [0.0] * (3 * n),
            [limit] * len(lists),
        ),
        urgencies,
    )
    assert not found.stuck, "the orders wait for each other"
    action_of = {node: action for action, node in nodes.items()}
    rows = tuple([tuple([action_of[node] for node in row]) for row in found.rows])
    return replace(whole, actions=rows)


@lru_cache(maxsize=128)
def dealt(schedule: Schedule, device_of: Devices) -> Schedule:
    """Deals a schedule out to replicas: each takes every ``r``-th micro-batch, in the same order.

    What can be done in one order can be done by more hands in the same order.

    Args:
        schedule: a valid one. Stages that are on one device have the same replicas, too.
        device_of: for each stage the index of its device, or of those of its replicas.
    """
    return merged(schedule.name, schedule.m, device_of, schedule.actions)
