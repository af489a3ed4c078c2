"""Greedy list scheduling: a device that is free takes the most urgent of what can start.

It looks ahead: what has begun elsewhere has a known end, so if something more urgent is about to
arrive, the device may wait for it, or do something short meanwhile. How long it waits is its
*patience*: at most so many times the delay that this spares the other.

Whatever a device takes, the order of each of its lists is kept, and the order in which things
happened is one in which they can happen again. So no result has a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from syncpipe.schedules.player import Costs

__all__ = ["Listed", "Node", "Work", "edges_of", "listed"]

#: A code and a micro-batch. Of ``n`` stages, code ``j`` is a forward of stage ``j``, ``n + j`` its
#: backward or input half, and ``2 n + j`` its weight half.
Node = tuple[int, int]

#: For each code and micro-batch.
Table = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Work:
    """What is to be put in order.

    Attributes:
        lists: for each device, lists of nodes.
        edges: what one code waits for: of which other one, and how long the result takes on a link.
        devices: for each code the devices that have its micro-batches in turn.
        times: how long nodes take, ``early`` included.
        early: so much of that can be done before anything arrives.
        takes: memory at the start of a node.
        gives: memory that the end of a node gives back.
        reserve: for each code, memory that must be left over when it takes some.
        limits: for each device its memory.
    """

    lists: Sequence[Sequence[Sequence[Node]]]
    edges: Sequence[tuple[int, int, float]]
    devices: Sequence[tuple[int, ...]]
    times: Table
    early: Table
    takes: Table
    gives: Table
    reserve: Sequence[float]
    limits: Sequence[float]

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


@dataclass(frozen=True)
class Listed:
    """What came of it.

    Attributes:
        rows: for each device its nodes in order.
        ends: for each code and micro-batch.
    """

    rows: list[list[Node]]
    ends: list[list[float]]


def edges_of(costs: Costs) -> list[tuple[int, int, float]]:
    """What waits for what in a pipeline, by code, and for how long it is on a link."""
    n = len(costs.forward)
    edges = [(row * n + j, (row + 1) * n + j, 0.0) for row in (0, 1) for j in range(n)]
    for (a, b, _), time in costs.edges.items():
        edges += [(a, b, time), (n + b, n + a, time)]
    return edges


def listed(work: Work, urgencies: Table, patience: float = 0.0) -> Listed | None:
    """Puts everything in an order.

    Args:
        work: what there is to do.
        urgencies: for each code and micro-batch; the least is done first.
        patience: see above.

    Returns:
        The order; None if it got stuck, for want of memory or because lists wait for each other.
    """
    lister = _Lister(work, urgencies, patience)
    while (now := min(lister.wake)) < math.inf:
        lister.step(lister.wake.index(now), now)
    if any(map(any, lister.left)):
        return None
    return Listed(lister.rows, lister.ends)


class _Lister:
    """The state of one pass.

    Attributes:
        wake: for each device when it looks for something to do next.
        left: for each device its lists, the next node last.
    """

    def __init__(self, work: Work, urgencies: Table, patience: float) -> None:
        self._work, self._urgencies, self._patience = work, urgencies, patience
        devices, codes = range(len(work.lists)), range(len(work.times))
        self.rows: list[list[Node]] = [[] for _ in devices]
        self.ends = [[0.0] * len(row) for row in work.times]
        self.wake = [0.0 for _ in devices]
        self.left = [[[*reversed(each)] for each in own] for own in work.lists]
        self._free, self._held = [0.0 for _ in devices], [0.0 for _ in devices]
        self._links = [[0.0 for _ in devices] for _ in devices]
        self._needs: list[list[list[float]]] = [[] for _ in codes]
        self._sends: list[list[tuple[list[float], tuple[int, ...], float]]] = [[] for _ in codes]
        for a, b, time in work.edges:
            arrivals = [-1.0] * len(work.times[a])  # < 0: unknown yet
            self._sends[a].append((arrivals, work.devices[b], time))
            self._needs[b].append(arrivals)

    def step(self, d: int, now: float) -> None:
        """Lets a free device begin something, or wait."""
        self.wake[d] = math.inf
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
            self.wake[d] = min(ahead)[0]

    def _look(
        self, d: int, now: float, until: float
    ) -> tuple[list[Node], float, list[tuple[float, float]]]:
        """The list whose next node is the most urgent that can start now and is over by then.

        Also how urgent that is, and what can start later: when, and how urgent it is.
        """
        work, held, limit = self._work, self._held[d], self._work.limits[d]
        chosen: list[Node] = []
        least, ahead = math.inf, []
        for nodes in self.left[d]:
            if not nodes:
                continue
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
        ready = now + work.early[c][i]
        for arrivals in self._needs[c]:
            ready = max(ready, arrivals[i])
        end = ready + work.times[c][i] - work.early[c][i]
        self.rows[d].append((c, i))
        self.ends[c][i] = self._free[d] = self.wake[d] = end
        self._held[d] += work.takes[c][i] - work.gives[c][i]
        for arrivals, devices, time in self._sends[c]:
            to = devices[i % len(devices)]
            if to == d:
                arrivals[i] = end
                continue
            arrivals[i] = links[to] = max(end, links[to]) + time
            self.wake[to] = min(self.wake[to], max(end, self._free[to]))
