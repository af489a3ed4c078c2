"""List scheduling with look-ahead, forth and back in time.

A device that is free takes the most urgent of what is there. It looks ahead: what has begun
elsewhere has a known end, so if something more urgent is about to come, the device may wait for it,
or do something short meanwhile. How long it waits is its *patience*: at most so many times the
delay that this spares the other.

Back in time the same is done from the end: whatever comes last is placed first, as late as it can
be. The times of one way are the urgencies of the next, in the other direction: so each makes good
what the other could not see (Li and Willis 1992, An iterative scheduling technique for
resource-constrained project scheduling).

A forward takes memory and the end of its backward gives it back; back in time it is the other way
round. Who is careful takes nothing unless there stays enough to lead one micro-batch through all
stages that are still to come on this device, and does not get stuck. Who is not may find more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from syncpipe.schedules.search.problem import ROUNDING, Problem, Rows

__all__ = ["Direction", "Urgencies", "listed"]

#: For each code and micro-batch: the least is done first.
Urgencies = Sequence[Sequence[float]]


class Direction:
    """A problem seen forth or back in time.

    Micro-batches, and all that is first, next and later, are in the order of this direction.

    Attributes:
        needs: for each code the edges that it waits for.
        sends: for each code the edges that wait for it.
        lasts: for each code and micro-batch how long it takes, recomputation included.
        early: likewise, so much of it needs nothing that comes over edges.
        takes: likewise, memory at its begin.
        gives: likewise, memory at its end.
        reserve: for each code the memory that must be left when it takes some.
    """

    def __init__(self, problem: Problem, *, back: bool) -> None:
        self.problem, self.back = problem, back
        self.needs, self.sends = problem.needs, problem.sends
        self.target = [edge.target for edge in problem.edges]
        if back:
            self.needs, self.sends = self.sends, self.needs
            self.target = [edge.source for edge in problem.edges]
        order = range(problem.m)[:: -1 if back else 1]
        facts = [[self._facts(c, i) for i in order] for c in problem.codes]
        self.lasts, self.early, self.takes, self.gives = (
            [[fact[k] for fact in row] for row in facts] for k in range(4)
        )
        self.reserve = [self._reserve(c) for c in problem.codes]

    def _facts(self, c: int, i: int) -> tuple[float, float, float, float]:
        problem, (kind, j) = self.problem, divmod(c, self.problem.n)
        again = problem.again_times[c] if i < problem.again[c] else 0.0
        first = problem.memory.held(j, i < problem.rematerialized[j])
        whole = problem.memory.activations[j]
        takes = {0: first, 1: whole - first}.get(kind, 0.0)
        gives = whole if kind == len(problem.kinds) - 1 else 0.0
        lasts = problem.times[c] + again
        if not self.back:
            return lasts, again, takes, gives
        return lasts, 0.0, gives, takes

    def _reserve(self, c: int) -> float:
        """What the later stages here take on, and what a recomputation takes besides."""
        problem, memory, j = self.problem, self.problem.memory, c % self.problem.n
        here = [k for k in range(problem.n) if problem.device_of[k] == problem.device_of[j]]
        counts = problem.rematerialized
        later = [k for k in here if k > j]
        taken = [max(memory.held(k, i < counts[k]) for i in (0, problem.m - 1)) for k in later]
        extra = {k: memory.activations[k] - memory.held(k, counts[k] > 0) for k in here}
        if self.back:
            return math.fsum(taken) + max([0.0, *(extra[k] - extra[j] for k in later)])
        return math.fsum(taken) + max(extra.values()) if c < problem.n else 0.0


def listed(
    direction: Direction, urgencies: Urgencies, patience: float, *, careful: bool
) -> tuple[Rows, list[list[float]]] | None:
    """What comes of these urgencies.

    Args:
        direction: of the problem.
        urgencies: with micro-batches in the order of the direction.
        patience: see above.
        careful: likewise.

    Returns:
        Rows, forth in time, and for each code when each of its micro-batches was over, as the
        direction has it. None if it got stuck for want of memory.
    """
    return _Listing(direction, urgencies, patience, careful).run()


class _Listing:
    def __init__(
        self, direction: Direction, urgencies: Urgencies, patience: float, careful: bool
    ) -> None:
        problem = direction.problem
        self._direction, self._urgencies, self._patience = direction, urgencies, patience
        arrivals = [[-1.0] * problem.m for _ in problem.edges]  # < 0: nobody knows yet
        self._needs = [[arrivals[e] for e in direction.needs[c]] for c in problem.codes]
        self._sends = [
            [
                (arrivals[e], edge.link, edge.time, problem.device[direction.target[e]])
                for e, edge in ((e, problem.edges[e]) for e in direction.sends[c])
            ]
            for c in problem.codes
        ]
        self._over: list[list[float]] = [[] for _ in problem.codes]
        self._rows: Rows = [[] for _ in range(problem.devices)]
        self._free, self._held = [0.0] * problem.devices, [0.0] * problem.devices
        self._reserve = direction.reserve if careful else [0.0 for _ in problem.codes]
        self._limits = [limit * (1 + ROUNDING) for limit in problem.memory.limits]
        self._links = [0.0 for _ in problem.links]
        self._events = [(0.0, d) for d in range(problem.devices)]

    def run(self) -> tuple[Rows, list[list[float]]] | None:
        events, free = self._events, self._free
        while events:
            now, d = heapq.heappop(events)
            if free[d] > now:
                continue  # it has begun something meanwhile, and comes back when that is over
            chosen, urgency, ahead = self._choose(d, now, math.inf)
            if ahead and chosen >= 0 and self._patience:
                chosen = self._or_wait(d, now, chosen, urgency, ahead)
            if chosen >= 0:
                self._begin(d, now, chosen)
            elif ahead:
                heapq.heappush(events, (min(ahead)[0], d))
        problem = self._direction.problem
        if sum(map(len, self._over)) < problem.m * len(problem.codes):
            return None
        if self._direction.back:
            for row in self._rows:
                row.reverse()
        return self._rows, self._over

    def _choose(
        self, d: int, now: float, until: float
    ) -> tuple[int, float, list[tuple[float, float]]]:
        """The most urgent of what can begin now and is over by then; -1 for none.

        Also how urgent it is, and what can begin later: when, and how urgent that is.
        """
        direction, m = self._direction, self._direction.problem.m
        chosen, least = -1, math.inf
        ahead = []
        for c in direction.problem.codes_of[d]:
            i = len(self._over[c])
            if i == m:
                continue
            ready = 0.0
            for arrived in self._needs[c]:
                there = arrived[i]
                if there < 0.0:
                    break
                if there > ready:
                    ready = there
            else:
                takes = direction.takes[c][i]
                if takes and self._held[d] + takes + self._reserve[c] > self._limits[d]:
                    continue
                urgency = self._urgencies[c][i]
                ready -= direction.early[c][i]
                if ready > now:
                    ahead.append((ready, urgency))
                elif urgency < least and now + direction.lasts[c][i] <= until:
                    chosen, least = c, urgency
        return chosen, least, ahead

    def _or_wait(
        self, d: int, now: float, chosen: int, urgency: float, ahead: list[tuple[float, float]]
    ) -> int:
        """What was chosen; or what is over before the first of those worth waiting for; or -1."""
        end = now + self._direction.lasts[chosen][len(self._over[chosen])]
        worth = [
            ready
            for ready, other in ahead
            if other < urgency and ready - now < self._patience * (end - ready)
        ]
        if not worth:
            return chosen
        return self._choose(d, now, min(worth))[0]

    def _begin(self, d: int, now: float, c: int) -> None:
        direction, i = self._direction, len(self._over[c])
        ready = now + direction.early[c][i]
        for arrived in self._needs[c]:
            ready = max(ready, arrived[i])
        end = ready + direction.lasts[c][i] - direction.early[c][i]
        self._rows[d].append(c)
        self._over[c].append(end)
        self._free[d] = end
        self._held[d] += direction.takes[c][i] - direction.gives[c][i]
        heapq.heappush(self._events, (end, d))
        for arrived, link, way, target in self._sends[c]:
            if link < 0:
                arrived[i] = end
                continue
            arrived[i] = self._links[link] = max(end, self._links[link]) + way
            if self._free[target] <= end:  # who is busy comes back anyhow
                heapq.heappush(self._events, (end, target))
