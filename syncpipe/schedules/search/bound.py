"""What no schedule can beat: the way of one micro-batch, the busiest device, link and memory.

A device cannot begin before the first micro-batch has come to its first stage, has all of its work
to do, and may have to idle twice more: until the first gradient is there it can go forward only,
with no more micro-batches than its memory holds; and while the last gradient goes on from it to
stage 0, only weight halves are left to it, those of micro-batches that it still holds.

    device 1    ......F0F1F2F3      I0F4W0I1F5W1I2 ...... I7W5W6W7      |
                head        middle                              tail

Memory has a bound of its own (Little's law): each micro-batch takes a place on the device from its
forward until its gradient can be back at the earliest, and there are only so many places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from syncpipe.schedules.search.problem import ROUNDING, Problem

__all__ = ["lower_bound"]


def lower_bound(problem: Problem) -> float:
    """No schedule of this problem has a shorter makespan."""
    ways = _Ways(problem)
    return max(
        max(head + time for head, time in zip(ways.head, problem.times, strict=True)),
        *(ways.of_device(d) for d in range(problem.devices)),
        *(ways.of_memory(d) for d in range(problem.devices)),
        *(ways.of_link(link) for link in problem.links),
    )


class _Ways:
    """For each code the longest way of a micro-batch to it and from it."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        n, edges, times = problem.n, problem.edges, problem.times
        # A recomputation that not all micro-batches have, the quickest one does not have.
        again = [
            time if count == problem.m else 0.0
            for count, time in zip(problem.again, problem.again_times, strict=True)
        ]
        order = [*range(n), *reversed(range(n, 2 * n)), *range(2 * n, len(problem.codes))]
        self.head = [0.0] * len(order)
        for c in order:
            if c // n == 1:
                self.head[c] = self.head[c - n] + times[c - n] + again[c]
            for edge in (edges[e] for e in problem.needs[c]):
                wait = again[c] if edge.source == c - n else 0.0
                ready = self.head[edge.source] + times[edge.source] + edge.time + wait
                self.head[c] = max(self.head[c], ready)
        self.tail = [0.0] * len(order)
        for c in reversed(order):
            for edge in (edges[e] for e in problem.sends[c]):
                after = edge.time + times[edge.target] + self.tail[edge.target]
                self.tail[c] = max(self.tail[c], after)

    def of_device(self, d: int) -> float:
        """Its work, and when it must idle."""
        p, n = self._problem, self._problem.n
        codes = p.codes_of[d]
        stages = [c for c in codes if c < n]
        forwards = {j: p.times[j] for j in stages}
        weights = {j: p.times[2 * n + j] for j in stages} if p.split else {}
        again = [p.again_times[j] for j in stages if p.rematerialized[j]]
        work = p.m * math.fsum(p.times[c] for c in codes)
        work += math.fsum(p.again[n + j] * p.again_times[j] for j in stages)
        first, last = stages[0], stages[-1]
        middle = self.head[n + last] - self.head[first] - max(again, default=0.0)
        middle -= self._most(d, forwards, self._taken())
        back = [p.edges[e] for e in p.sends[n + first]]
        tail = max(
            (e.time + p.times[e.target] + self.tail[e.target] for e in back if e.target < 2 * n),
            default=0.0,
        )
        tail -= self._most(d, weights, p.memory.activations)
        return self.head[first] + work + max(0.0, middle) + max(0.0, tail)

    def of_memory(self, d: int) -> float:
        """How often its places can be taken."""
        p, n = self._problem, self._problem.n
        memory, taken = p.memory.limits[d] * (1 + ROUNDING), self._taken()
        stages = [c for c in p.codes_of[d] if c < n]
        held = []
        for j in stages:
            back = p.times[n + j] + (p.times[2 * n + j] if p.split else 0.0)
            whole = self.head[n + j] - self.head[j] + back
            held.append(taken[j] * whole + (p.memory.activations[j] - taken[j]) * back)
        turns = p.m * math.fsum(held) / memory if any(held) else 0.0
        if len(stages) == 1 and held[0] and taken[stages[0]] == p.memory.activations[stages[0]]:
            j = stages[0]
            places = max(1, math.floor(min(p.m, memory / taken[j])))
            turns = math.ceil(p.m / places) * held[0] / taken[j]
        tail = 0.0 if p.split else self.tail[n + stages[0]]
        return self.head[stages[0]] + turns + tail

    def of_link(self, link: int) -> float:
        """Everything that it carries, one after another."""
        p = self._problem
        edges = [edge for edge in p.edges if edge.link == link]
        head = min(self.head[edge.source] + p.times[edge.source] for edge in edges)
        tail = min(p.times[edge.target] + self.tail[edge.target] for edge in edges)
        return head + p.m * math.fsum(edge.time for edge in edges) + tail

    def _taken(self) -> list[float]:
        """For each stage the least that a micro-batch takes before it goes back."""
        p = self._problem
        return [p.memory.held(j, p.rematerialized[j] > 0) for j in range(p.n)]

    def _most(self, d: int, times: dict[int, float], sizes: Sequence[float]) -> float:
        """The longest that its memory lets it go on, nothing being freed."""
        left, most = self._problem.memory.limits[d] * (1 + ROUNDING), 0.0
        for j in sorted(times, key=lambda j: -times[j] / sizes[j] if sizes[j] else -math.inf):
            count: float = self._problem.m
            if sizes[j] * count > left:
                count = left / sizes[j]
                if len(times) == 1:
                    count = math.floor(count)
            most += count * times[j]
            left -= count * sizes[j]
        return most
