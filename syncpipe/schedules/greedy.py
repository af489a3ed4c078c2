"""Greedy list scheduling: a device that is free takes the most urgent of what can start.

It looks ahead: what has begun elsewhere has a known end, so if something more urgent is about to
arrive, the device may wait for it, or do something short meanwhile. How long it waits is its
*patience*: at most so many times the delay that this spares the other.

Whatever a device takes, the order of each of its lists is kept, and the order in which things
happened is one in which they can happen again. So no result has a deadlock.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter

from syncpipe.schedules.player import Costs
from syncpipe.schedules.schedule import KINDS, Action, Devices, Schedule, devices_of

__all__ = ["Lister", "Work", "dealt", "edges_of", "merged"]

#: For each code and micro-batch. Of ``n`` stages, code ``j`` is a forward of stage ``j``, ``n + j``
#: its backward or input half, and ``2 n + j`` its weight half.
Table = list[list[float]]
Node = tuple[int, int, Action]  # by code and micro-batch


def edges_of(costs: Costs) -> list[tuple[int, int, float]]:
    """What waits for what in a pipeline, by code, and for how long it is on a link."""
    n = len(costs.forward)
    edges = [(row * n + j, (row + 1) * n + j, 0.0) for row in (0, 1) for j in range(n)]
    for (a, b, _), time in costs.edges.items():
        edges += [(a, b, time), (n + b, n + a, time)]
    return edges


class Work:
    """What is to be put in order: lists of actions for each device; memory is as in :func:`.auto`.

    Part of a recomputation's time, the early one, comes before anything arrives. A cell takes
    memory at the start of its actions, of which the reserve must be left over, and gives it back.
    """

    def __init__(
        self, m: int, device_of: Devices, costs: Costs, lists: Sequence[Sequence[list[Action]]],
        limits: Sequence[float], activations: Sequence[float], inputs: Sequence[float],
        recomputed: Sequence[int], reserve: Sequence[float],
    ) -> None:  # fmt: skip
        n = len(device_of)
        self.limits, self.reserve = limits, [*reserve, *[0.0] * (2 * n)]
        self.devices = [devices_of(device_of, j) for j in range(n)] * 3
        tables: list[Table] = [[[0.0] * m for _ in range(3 * n)] for _ in range(4)]
        self.times, self.early, self.takes, self.gives = tables

        def node(action: Action) -> Node:
            kind, i, j = action
            row = {"forward": 0, "backward_weight": 2}.get(kind, 1)
            c, again = row * n + j, i < recomputed[j]
            first = inputs[j] if again else activations[j]
            self.early[c][i] = costs.recompute[j] if again and row == 1 else 0.0
            self.times[c][i] = costs.times[kind][j] + self.early[c][i]
            self.takes[c][i] = (first, activations[j] - first, 0.0)[row]
            self.gives[c][i] = activations[j] if KINDS[kind].alive < 0 else 0.0
            return c, i, action

        self.lists = [[list(map(node, each)) for each in own] for own in lists]
        codes = {c for own in self.lists for each in own for c, _, _ in each}
        self.edges = [(a, b, time) for a, b, time in edges_of(costs) if {a, b} <= codes]

    def mirrored(self) -> Work:
        """The same back in time: what ends last comes first, and gives are takes."""
        back = copy.copy(self)
        back.lists = [[each[::-1] for each in own] for own in self.lists]
        back.edges = [(b, a, time) for a, b, time in self.edges]
        back.early = [[0.0] * len(row) for row in self.early]
        back.takes, back.gives = self.gives, self.takes
        back.reserve = self.reserve[: len(self.reserve) // 3] * 3
        return back


class Lister:
    """Puts everything in an order: of what can start, what has the least urgency is done first.

    ``rows`` are the actions of each device in order, ``ends`` is for each code and micro-batch, and
    if ``stuck`` something is left, for want of memory or because lists wait for each other.
    """

    def __init__(
        self, work: Work, urgencies: Table, patience: float = 0.0, careful: bool = False
    ) -> None:
        self._work, self._urgencies, self._careful = work, urgencies, careful
        devices, codes = range(len(work.lists)), range(len(work.times))
        self.rows: list[list[Action]] = [[] for _ in devices]
        self.ends = [[0.0] * len(row) for row in work.times]
        self._wake = [0.0 for _ in devices]  # when each looks for something to do next
        self._left = [[each[::-1] for each in own] for own in work.lists]
        self._free, self._held = [0.0 for _ in devices], [0.0 for _ in devices]
        self._links = [[0.0 for _ in devices] for _ in devices]
        self._needs: list[list[list[float]]] = [[] for _ in codes]
        self._sends: list[list[tuple[list[float], tuple[int, ...], float]]] = [[] for _ in codes]
        for a, b, time in work.edges:
            arrivals = [-1.0] * len(work.times[a])  # < 0: unknown yet
            self._sends[a].append((arrivals, work.devices[b], time))
            self._needs[b].append(arrivals)
        while (now := min(self._wake)) < math.inf:
            d = self._wake.index(now)
            ready, ahead = self._look(d, now)
            self._wake[d] = min(ahead)[0] if ahead else math.inf
            if ready and ahead and patience:
                urgency, end, _ = min(ready, key=itemgetter(0))
                worth = [
                    later
                    for later, other in ahead
                    if other < urgency and later - now < patience * (end - later)
                ]
                ready = [each for each in ready if not worth or each[1] <= min(worth)]
            if ready:
                self._begin(d, now, *min(ready, key=itemgetter(0))[2].pop())
        self.stuck = any(map(any, self._left))

    def _look(
        self, d: int, now: float
    ) -> tuple[list[tuple[float, float, list[Node]]], list[tuple[float, float]]]:
        """What a free device can do: how urgent it is, when it would end, and the list that it is
        in; and what can start later: when, and how urgent it is.
        """
        work, held, limit = self._work, self._held[d], self._work.limits[d]
        found, ahead = [], []
        for nodes in filter(None, self._left[d]):
            c, i, _ = nodes[-1]
            ready = 0.0
            for arrivals in self._needs[c]:
                there = arrivals[i]
                if there < 0.0:
                    break
                if there > ready:
                    ready = there
            else:
                takes = work.takes[c][i]
                if takes and held + takes + work.reserve[c] * self._careful > limit:
                    continue
                urgency = self._urgencies[c][i]
                ready -= work.early[c][i]
                if ready > now:
                    ahead.append((ready, urgency))
                else:
                    found.append((urgency, now + work.times[c][i], nodes))
        return found, ahead

    def _begin(self, d: int, now: float, c: int, i: int, action: Action) -> None:
        work, links = self._work, self._links[d]
        ready = max([now + work.early[c][i], *(arrivals[i] for arrivals in self._needs[c])])
        end = ready + work.times[c][i] - work.early[c][i]
        self.rows[d].append(action)
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
    name: str, m: int, device_of: Devices, orders: Iterable[Sequence[Action]],
    limit: float = math.inf,
) -> Schedule:  # fmt: skip
    """Merges orders into one for each device, as if whoever is free took the most urgent action.

    A forward takes one unit of time, and so does half a backward; transfers take none. Each order
    stays as it is; what is for several devices is taken apart. No more cells than the limit, which
    is not less than the orders need, are in flight on a device.
    """
    n, whole = len(device_of), Schedule(m, device_of, (), name)
    devices = 1 + max(d for j in range(n) for d in devices_of(device_of, j))
    lists: list[list[list[Action]]] = [[] for _ in range(devices)]
    for order in orders:
        own: dict[int, list[Action]] = {}
        for action in order:
            own.setdefault(whole.device(action.i, action.j), []).append(action)
        for d, actions in own.items():
            lists[d].append(actions)
    if all(len(some) == 1 for some in lists):
        return replace(whole, actions=tuple([tuple(some[0]) for some in lists]))
    ones, none = (1.0,) * n, (0,) * n
    limits = [limit] * devices
    work = Work(m, device_of, Costs.even(n), lists, limits, ones, ones, none, none)
    # What brings gradients on, forwards, the rest; and what is nearest to the end of its way.
    ranks = [*(2 * n - 1 - j for j in range(n)), *range(n), *range(2 * n, 3 * n)]
    found = Lister(work, [[float(rank)] * m for rank in ranks])
    assert not found.stuck, "the orders wait for each other"
    return replace(whole, actions=tuple(map(tuple, found.rows)))


@lru_cache(maxsize=128)
def dealt(schedule: Schedule, device_of: Devices) -> Schedule:
    """Deals a schedule out to replicas: each takes every ``r``-th micro-batch, in the same order.

    Args:
        schedule: a valid one. Stages that are on one device have the same replicas, too.
        device_of: for each stage the index of its device, or of those of its replicas.
    """
    return merged(schedule.name, schedule.m, device_of, schedule.actions)
