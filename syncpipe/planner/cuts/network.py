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

__all__ = ["SLACK", "Cut", "CutSearch", "Edge", "Network", "even_cut", "least_load"]

#: A stage: the layer after its last, forward, backward, whether it recomputes, its slots.
Edge = tuple[int, float, float, bool, int]

#: Sums of floats in another order differ by less than this, relative to the step time.
SLACK = 1e-11
_STEPS = (1.01, 1.03, 1.07, 1.15, 1.3, 1.6, 2.2, 4.0, 10.0, math.inf)
_FEW = 3


@dataclass(frozen=True)
class Cut:
    """A way to cut the layers, the stages that recompute, the step time in seconds, the slots."""

    balance: tuple[int, ...]
    recomputes: tuple[bool, ...]
    value: float
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """What the first walk leaves.

    Attributes:
        edges: for each stage and each border where it may start the stages that are possible.
        least: for each stage and border the least step time that the stages before it allow.
        before: the least time that one micro-batch spends in these and on the ways between them,
            there and back.
    """

    edges: list[dict[int, list[Edge]]]
    least: list[dict[int, float]]
    before: list[dict[int, float]]


class CutSearch(ABC):
    """Cuts of a chain into ``n`` stages on the first ``n`` devices.

    Args:
        chain: the layers, for one micro-batch.
        machine: at least ``n`` devices.
        m: number of micro-batches.
        slots: micro-batches in flight, for each stage.
        free: each stage may have fewer than these, and recompute to have more: the best of all is
            found, which no choice of slots falls short of.
    """

    def __init__(
        self,
        chain: Chain,
        machine: Machine,
        m: int,
        slots: Sequence[int],
        *,
        free: bool = False,
    ) -> None:
        self.chain, self.machine, self.m, self.free = chain, machine, m, free
        self.slots = tuple(slots)
        self.n = len(self.slots)
        self.speed = speed = machine.speed[: self.n]
        self.fastest = max(speed)
        #: The fastest device from each stage on.
        self._fast = [*reversed(list(accumulate(reversed(speed), max))), self.fastest]
        #: One micro-batch takes no less.
        self.least_total = chain.total / self.fastest
        self._growing = all(a >= b for a, b in zip(chain.stored, chain.shared, strict=True))

    def minimise(self, at_most: float = math.inf) -> Cut | None:
        """The cut with the least step time, or None if there is none within ``at_most`` seconds."""
        if self.n > min(len(self.chain), len(self.machine)):
            return None
        known = self.valued(even_cut(self.chain.time_to, self.n, self.speed))
        lowest = self.lowest(least_load(self.chain.time_to, self.speed))
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
        stages = []
        for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0))):
            edges = self._stages(s, i, j, j)
            if not edges:
                return None
            stages.append(edges[0])
        return self._cut(stages)

    def value(self, balance: Sequence[int], recomputes: Sequence[bool]) -> float:
        """The step time of a cut in seconds, by the closed form, for the slots of the search."""
        chain, stages = self.chain, []
        for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0))):
            f = (chain.forward_to[j] - chain.forward_to[i]) / self.speed[s]
            b = (chain.backward_to[j] - chain.backward_to[i]) / self.speed[s]
            stages.append((j, f, b, bool(recomputes[s]), self.slots[s]))
        return self.value_of(stages)

    def transfer(self, s: int, i: int) -> float:
        """Seconds from stage ``s - 1`` to stage ``s``, if that starts with layer ``i``."""
        return way(self.machine, self.chain.inputs[i], s - 1, s) if s else 0.0

    def right(self, s: int, i: int) -> float:
        """The least that one micro-batch takes from border ``i`` on, there and back, if stage
        ``s`` starts there.
        """
        return (self.chain.total - self.chain.time_to[i]) / self._fast[s]

    @abstractmethod
    def value_of(self, stages: Sequence[Edge]) -> float:
        """The step time of a cut in seconds, by the closed form."""

    @abstractmethod
    def lowest(self, load: float) -> float:
        """A step time that no cut falls short of, if its largest stage takes ``load`` or more."""

    @abstractmethod
    def farthest(self, s: int, time: float, limit: float) -> float:
        """Where stage ``s`` ends at the latest, in seconds of work from the left, as it starts at
        ``time``; never earlier for a later one.
        """

    @abstractmethod
    def nearest(self, s: int, time: float, limit: float) -> float:
        """The inverse of :meth:`farthest`: where a stage that ends at ``time`` starts at best."""

    @abstractmethod
    def least(self, s: int, i: int, before: float, edges: Sequence[Edge]) -> list[float]:
        """For each stage ``s`` from border ``i`` the least step time with it.

        ``before`` is the least time of one micro-batch to the left, as in :class:`Network`.
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
        recomputes, slots = tuple(edge[3] for edge in stages), tuple(edge[4] for edge in stages)
        return Cut(balance, recomputes, self.value_of(stages), slots)

    def _walk(self, limit: float) -> Network | None:
        """The first walk, from the left."""
        times, n, count = self.chain.time_to, self.n, len(self.chain)
        early = [count]  # where the last stages may start at best, from the right
        for s in reversed(range(n)):
            earliest = self.nearest(s, times[early[-1]], limit) - SLACK * times[-1]
            by_time = min(bisect_left(times, earliest), early[-1])
            early.append(max(by_time, self._first_that_fits(s, early[-1])))
        early.reverse()
        if early[0] > 0:
            return None
        least: list[dict[int, float]] = [{0: 0.0}]
        before: list[dict[int, float]] = [{0: 0.0}]
        edges: list[dict[int, list[Edge]]] = []
        for s in range(n):
            possible: dict[int, list[Edge]] = {}
            after: dict[int, float] = {}
            passed: dict[int, float] = {}
            for i, so_far in least[s].items():
                latest = self.farthest(s, times[i], limit) + SLACK * times[-1]
                j1 = min(count - (n - 1 - s), bisect_right(times, latest) - 1)
                j0 = count if s == n - 1 else max(i + 1, early[s + 1])
                found = self._stages(s, i, j0, j1)
                if not found:
                    continue
                way = before[s][i] + 2 * self.transfer(s, i)
                kept = []
                for edge, time in zip(found, self.least(s, i, before[s][i], found), strict=True):
                    j = edge[0]
                    time = so_far if so_far > time else time
                    if time > limit:
                        continue
                    kept.append(edge)
                    if time < after.get(j, math.inf):
                        after[j] = time
                    through = way + edge[1] + edge[2]
                    if through < passed.get(j, math.inf):
                        passed[j] = through
                if kept:
                    possible[i] = kept
            if not possible:
                return None
            edges.append(possible)
            least.append(after)
            before.append(passed)
        return Network(edges, least, before)

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
        chain, q, speed = self.chain, self.slots[s], self.speed[s]
        forward, backward = chain.forward_to, chain.backward_to
        f, b = forward[i], backward[i]
        limit = self.machine.memory[s]
        if limit == math.inf:
            return [
                (j, (forward[j] - f) / speed, (backward[j] - b) / speed, False, q)
                for j in range(j0, j1 + 1)
            ]
        fixed, stored, waiting = chain.fixed_to, chain.stored_to, chain.waiting(i)
        w, z, given = fixed[i], stored[i] - chain.shared[i], chain.inputs[i]
        edges = []
        for j in range(j0, j1 + 1):
            base = fixed[j] - w
            each = stored[j] - z
            if base + each > limit and self._growing:
                break
            times = (forward[j] - f) / speed, (backward[j] - b) / speed
            if self.free:
                skips = waiting[j] if waiting else 0.0  # stage 0 has as many slots at least
                most = _most(limit - base, each + skips, q)
                if most:
                    edges.append((j, *times, False, most))
                again = _most(limit - base - each, given + skips, q)
                if again > most:
                    edges.append((j, *times, True, again))
                continue
            if waiting:
                base += self.slots[0] * waiting[j]
            if base + q * each <= limit:
                edges.append((j, *times, False, q))
            elif base + q * given + each <= limit:
                edges.append((j, *times, True, q))
        return edges


def _most(room: float, each: float, most: int) -> int:
    """How many fit, at most ``most``; rather one too many than one too few."""
    room += SLACK * abs(room)
    if room >= most * each:
        return most
    return max(0, int(room / each)) if each > 0 else 0


def even_cut(times: Sequence[float], n: int, speed: Sequence[float] = ()) -> tuple[int, ...]:
    """Cuts into ``n`` stages, none empty, with the largest as small as may be (but for rounding,
    and nearly so for devices of different speed).

    Args:
        times: the sum of everything before each border.
        n: at most as many as there are layers.
        speed: of the device of each stage, by which its time is divided; empty for equal ones.
    """
    speed, count = speed or (1.0,) * n, len(times) - 1
    load = least_load(times, speed)
    ends = [0]
    for s, v in enumerate(speed):
        i = ends[-1]
        ends.append(min(max(_far(times, i, load * v), i + 1), count - (n - 1 - s)))
    ends[-1] = count
    return tuple(j - i for i, j in pairwise(ends))


def least_load(times: Sequence[float], speed: Sequence[float]) -> float:
    """What the largest stage of any cut takes at least, and of the best one for equal devices.

    Args:
        times: the sum of everything before each border.
        speed: of the device of each stage.
    """
    longest, count = max(b - a for a, b in pairwise(times)), len(times) - 1
    low = max(times[-1] / math.fsum(speed), longest / max(speed))
    high = times[-1] / max(speed)
    load = low
    for _ in range(60):
        i = 0
        for v in speed:
            i = _far(times, i, load * v)
        if i == count:
            high = load
        else:
            low = load
        load = (low + high) / 2
    return high


def _far(times: Sequence[float], i: int, load: float) -> int:
    """Where a stage from border ``i`` ends, if it takes as much as it may."""
    return bisect_right(times, times[i] + load * (1 + SLACK)) - 1
