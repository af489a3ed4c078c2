"""What the exact searches have in common: a network of stages, gone through twice.

A state is a border that so many stages lead to, an edge is one more stage. The first walk goes from
the left and notes for each state the least that the stages so far allow the step time to be; what
exceeds a limit is left out. The second walk goes from the right with labels, which say all about
the stages from a border on that matters to those before it (gpipe.py, one_f_one_b.py), and drops a
label when another is nowhere worse, or when it and the notes of the first walk exceed the limit.

The limit starts near a lower bound and grows until a walk gets through; a second walk with few
labels finds a good cut, whose value is the limit of the last one, with all labels. So a stage is
looked at only if a cut as good as that could contain it, and nothing better is ever left out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from syncpipe.planner.costs.chain import Chain, way
from syncpipe.planner.costs.machine import Machine

__all__ = ["SLACK", "Cut", "CutSearch", "Edge", "Network", "even_cut"]

#: A stage: the layer after its last, forward, backward, whether it recomputes.
Edge = tuple[int, float, float, bool]

#: Sums of floats in another order differ by less than this, relative to the step time.
SLACK = 1e-11
_STEPS = (1.01, 1.03, 1.07, 1.15, 1.3, 1.6, 2.2, 4.0, 10.0, math.inf)
_FEW = 3


@dataclass(frozen=True)
class Cut:
    """A way to cut the layers, the stages that recompute, and the step time in seconds."""

    balance: tuple[int, ...]
    recomputes: tuple[bool, ...]
    value: float


@dataclass(frozen=True)
class Network:
    """What the first walk leaves.

    Attributes:
        edges: for each stage and each border where it may start the stages that are possible.
        least: for each stage and border the least step time that the stages before it allow.
        transfers: the least time for the ways between these, there and back.
    """

    edges: list[dict[int, list[Edge]]]
    least: list[dict[int, float]]
    transfers: list[dict[int, float]]


class CutSearch(ABC):
    """Cuts of a chain into ``n`` stages on the first ``n`` devices.

    Args:
        chain: the layers, for one micro-batch.
        machine: at least ``n`` devices.
        m: number of micro-batches.
        slots: micro-batches in flight, for each stage.
    """

    def __init__(self, chain: Chain, machine: Machine, m: int, slots: Sequence[int]) -> None:
        self.chain, self.machine, self.m = chain, machine, m
        self.slots = tuple(slots)
        self.n = len(self.slots)
        self._growing = all(a >= b for a, b in zip(chain.stored, chain.shared, strict=True))

    def minimise(self, at_most: float = math.inf) -> Cut | None:
        """The cut with the least step time, or None if there is none within ``at_most`` seconds."""
        if self.n > min(len(self.chain), len(self.machine)):
            return None
        start = even_cut(self.chain.time_to, self.n)
        known = self.valued(start)
        lowest = self.lowest(max(_loads(self.chain, start)))
        ceiling = min(at_most, known.value if known else math.inf)
        for step in _STEPS:
            limit = min(ceiling, step * lowest)
            found = self._within(limit)
            if found:
                return found
            if limit == ceiling:
                return None
        return None

    def valued(self, balance: Sequence[int]) -> Cut | None:
        """A cut with its step time; None if it does not fit."""
        recomputes = []
        for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0))):
            edges = self._stages(s, i, j, j)
            if not edges:
                return None
            recomputes.append(edges[0][3])
        return Cut(tuple(balance), tuple(recomputes), self.value(balance, recomputes))

    def transfer(self, s: int, i: int) -> float:
        """Seconds from stage ``s - 1`` to stage ``s``, if that starts with layer ``i``."""
        return way(self.machine, self.chain.inputs[i], s - 1, s) if s else 0.0

    @abstractmethod
    def value(self, balance: Sequence[int], recomputes: Sequence[bool]) -> float:
        """The step time of a cut in seconds, by the closed form."""

    @abstractmethod
    def lowest(self, load: float) -> float:
        """A step time that no cut falls short of, if its largest stage takes ``load`` or more."""

    @abstractmethod
    def farthest(self, time: float, limit: float) -> float:
        """Where a stage ends at the latest, in seconds of work from the left, as it starts at
        ``time``; never earlier for a later one.
        """

    @abstractmethod
    def nearest(self, time: float, limit: float) -> float:
        """The inverse of :meth:`farthest`: where a stage that ends at ``time`` starts at best."""

    @abstractmethod
    def least(self, s: int, i: int, transfers: float, edges: Sequence[Edge]) -> list[float]:
        """For each stage ``s`` from border ``i`` the least step time with it.

        ``transfers`` is the least time for the ways between the stages before it, both directions.
        """

    @abstractmethod
    def walk_back(self, network: Network, limit: float, few: int | None) -> list[Edge] | None:
        """The stages of the best cut within a limit, with at most ``few`` labels on a state."""

    def _within(self, limit: float) -> Cut | None:
        network = self._walk(limit * (1 + SLACK))
        if network is None:
            return None
        stages = self.walk_back(network, limit * (1 + SLACK), _FEW)
        if stages is None:
            if limit == math.inf:
                return None
            # Few labels may miss what all of them find; what is within the limit is the best.
            stages = self.walk_back(network, limit * (1 + SLACK), None)
            return self._cut(stages) if stages else None
        good = self._cut(stages)
        best = self.walk_back(network, good.value * (1 + SLACK), None)
        return min([good, self._cut(best)], key=lambda cut: cut.value) if best else good

    def _cut(self, stages: Sequence[Edge]) -> Cut:
        ends = [0, *(edge[0] for edge in stages)]
        balance = tuple(j - i for i, j in pairwise(ends))
        recomputes = tuple(edge[3] for edge in stages)
        return Cut(balance, recomputes, self.value(balance, recomputes))

    def _walk(self, limit: float) -> Network | None:
        """The first walk, from the left."""
        times, n, count = self.chain.time_to, self.n, len(self.chain)
        early = [count]  # where the last stages may start at best, from the right
        for s in reversed(range(n)):
            earliest = self.nearest(times[early[-1]], limit) - SLACK * times[-1]
            by_time = min(bisect_left(times, earliest), early[-1])
            early.append(max(by_time, self._first_that_fits(s, early[-1])))
        early.reverse()
        if early[0] > 0:
            return None
        least: list[dict[int, float]] = [{0: 0.0}]
        transfers: list[dict[int, float]] = [{0: 0.0}]
        edges: list[dict[int, list[Edge]]] = []
        for s in range(n):
            possible: dict[int, list[Edge]] = {}
            after: dict[int, float] = {}
            ways: dict[int, float] = {}
            for i, before in least[s].items():
                latest = self.farthest(times[i], limit) + SLACK * times[-1]
                j1 = min(count - (n - 1 - s), bisect_right(times, latest) - 1)
                j0 = count if s == n - 1 else max(i + 1, early[s + 1])
                found = self._stages(s, i, j0, j1)
                if not found:
                    continue
                way = transfers[s][i] + 2 * self.transfer(s, i)
                kept = []
                for edge, time in zip(found, self.least(s, i, transfers[s][i], found), strict=True):
                    j = edge[0]
                    time = before if before > time else time
                    if time > limit:
                        continue
                    kept.append(edge)
                    if time < after.get(j, math.inf):
                        after[j] = time
                    if way < ways.get(j, math.inf):
                        ways[j] = way
                if kept:
                    possible[i] = kept
            if not possible:
                return None
            edges.append(possible)
            least.append(after)
            transfers.append(ways)
        return Network(edges, least, transfers)

    @cached_property
    def _held_to(self) -> list[float]:
        """What layers hold at least, before each border."""
        return [w + z for w, z in zip(self.chain.fixed_to, self.chain.stored_to, strict=True)]

    def _first_that_fits(self, s: int, j: int) -> int:
        """A stage that ends at ``j`` starts here or later: more does not fit on device ``s``."""
        if not self._growing:
            return 0
        held = self._held_to
        return min(bisect_left(held, held[j] - self.machine.memory[s] - SLACK * held[-1]), j)

    def fits(self) -> tuple[int, ...] | None:
        """Any cut that fits; None if there is none."""
        n, count = self.n, len(self.chain)
        if n > min(count, len(self.machine)):
            return None
        early = [count]
        for s in reversed(range(n)):
            early.append(self._first_that_fits(s, early[-1]))
        early.reverse()
        came_from: list[dict[int, int]] = [{0: 0}]
        for s in range(n):
            after: dict[int, int] = {}
            for i in sorted(came_from[s], reverse=True):
                j0 = count if s == n - 1 else max(i + 1, early[s + 1])
                for edge in self._stages(s, i, j0, count - (n - 1 - s)):
                    after.setdefault(edge[0], i)
            came_from.append(after)
        if count not in came_from[n]:
            return None
        ends = [count]
        for s in reversed(range(n)):
            ends.append(came_from[s + 1][ends[-1]])
        return tuple(j - i for i, j in pairwise(reversed(ends)))

    def _stages(self, s: int, i: int, j0: int, j1: int) -> list[Edge]:
        """The stages from border ``i`` to one of ``j0`` to ``j1`` that fit on device ``s``."""
        chain, q = self.chain, self.slots[s]
        forward, backward = chain.forward_to, chain.backward_to
        f, b = forward[i], backward[i]
        limit = self.machine.memory[s]
        if limit == math.inf:
            return [(j, forward[j] - f, backward[j] - b, False) for j in range(j0, j1 + 1)]
        fixed, stored, waiting = chain.fixed_to, chain.stored_to, chain.waiting(i)
        w, z, inputs = fixed[i], stored[i] - chain.shared[i], q * chain.inputs[i]
        edges = []
        for j in range(j0, j1 + 1):
            base = fixed[j] - w
            each = stored[j] - z
            if base + each > limit and self._growing:
                break
            if waiting:
                base += self.slots[0] * waiting[j]
            if base + q * each <= limit:
                edges.append((j, forward[j] - f, backward[j] - b, False))
            elif base + inputs + each <= limit:
                edges.append((j, forward[j] - f, backward[j] - b, True))
        return edges


def even_cut(times: Sequence[float], n: int) -> tuple[int, ...]:
    """Cuts into ``n`` stages, none empty, with the largest as small as may be (but for rounding).

    Args:
        times: the sum of everything before each border.
        n: at most as many as there are layers.
    """
    count = len(times) - 1
    low, high = max(times[-1] / n, max(b - a for a, b in pairwise(times))), times[-1]
    best = _packed(times, n, high)
    for _ in range(60):
        load = (low + high) / 2
        ends = _packed(times, n, load)
        if ends[-1] == count:
            best, high = ends, load
        else:
            low = load
    return tuple(j - i for i, j in pairwise(best))


def _packed(times: Sequence[float], n: int, load: float) -> list[int]:
    """Borders of stages that take as much as they may; the last of them if it works out."""
    count = len(times) - 1
    ends = [0]
    for s in range(n):
        i = ends[-1]
        j = bisect_right(times, times[i] + load * (1 + SLACK)) - 1
        ends.append(min(max(j, i + 1), count - (n - 1 - s)))
    return ends


def _loads(chain: Chain, balance: Sequence[int]) -> list[float]:
    times = chain.time_to
    return [times[j] - times[i] for i, j in pairwise(accumulate(balance, initial=0))]
