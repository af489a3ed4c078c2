"""What the search for a schedule works on: orders of codes, played through in a millisecond.

All micro-batches of a stage cost the same, so it does not pay that one overtakes another: the first
forward of a stage is that of micro-batch 0, the second that of micro-batch 1, and so are its
backwards. What is left to find is, for each device, the order of its *codes*, each of which it has
``m`` times: ``j`` is a forward of stage ``j``, ``n + j`` a backward or its input half, ``2 n + j``
a weight half. 1F1B for three micro-batches on two devices::

    0 0 2 0 2 2
    1 3 1 3 1 3
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from syncpipe.schedules.kinds import HALVES, KINDS, Kind
from syncpipe.schedules.schedule import Action, Schedule
from syncpipe.schedules.simulation import Costs

__all__ = ["ROUNDING", "Edge", "Memory", "Played", "Problem", "Rows"]

#: For each device its codes in order.
Rows = list[list[int]]

#: Of floats that differ by less, relative, neither is the greater one.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Memory:
    """What micro-batches take, and how much there is; in any unit.

    Attributes:
        activations: for each stage, one micro-batch from its forward (or, if it is recomputed, from
            there) to the end of its backward, or of its weight half.
        inputs: for each stage, one micro-batch that is recomputed, from its forward on.
        limits: for each device.
    """

    activations: tuple[float, ...]
    inputs: tuple[float, ...]
    limits: tuple[float, ...]

    def held(self, j: int, recomputed: bool) -> float:
        """From the forward of stage ``j`` on."""
        return self.inputs[j] if recomputed else self.activations[j]


@dataclass(frozen=True)
class Edge:
    """What one code hands to another.

    Attributes:
        source: the code that sends.
        target: the code that waits.
        link: one direction between two devices; -1 on one device.
        time: on the link.
    """

    source: int
    target: int
    link: int
    time: float


@dataclass(frozen=True)
class Played:
    """What was played through.

    Attributes:
        makespan: when the last code ended; ``math.inf`` if they wait for each other for ever.
        ends: for each code when each of its micro-batches was over.
        arrivals: for each edge when each of them arrived.
    """

    makespan: float
    ends: list[list[float]]
    arrivals: list[list[float]]


class Problem:
    """A number of micro-batches, stages on devices, times, and memory.

    Args:
        m: number of micro-batches.
        device_of: for each stage the index of its device.
        costs: how long everything takes.
        rematerialized: for each stage so many micro-batches, the first ones, are recomputed.
        memory: what fits.
        split: whether backwards come in two halves.
    """

    def __init__(
        self,
        m: int,
        device_of: tuple[int, ...],
        costs: Costs,
        rematerialized: tuple[int, ...],
        memory: Memory,
        *,
        split: bool,
    ) -> None:
        n = len(device_of)
        self.m, self.n, self.device_of = m, n, device_of
        self.costs, self.rematerialized, self.memory = costs, rematerialized, memory
        self.kinds: tuple[Kind, ...] = ("forward", *(HALVES if split else ("backward",)))
        self.split = split
        self.devices = max(device_of) + 1
        self.codes = range(len(self.kinds) * n)
        self.device = [device_of[c % n] for c in self.codes]
        self.times = [costs.of(Action(self.kinds[c // n], 0, c % n)) for c in self.codes]
        #: For each code how many of its micro-batches are recomputed before it, and how long.
        self.again = [rematerialized[c % n] if c // n == 1 else 0 for c in self.codes]
        self.again_times = [costs.recompute[c % n] for c in self.codes]
        self.codes_of: list[list[int]] = [[] for _ in range(self.devices)]
        for c in self.codes:
            self.codes_of[self.device[c]].append(c)
        self._links: dict[tuple[int, int], int] = {}
        self.edges = tuple(self._edges())
        self.links = range(len(self._links))
        self.needs: list[list[int]] = [[] for _ in self.codes]
        self.sends: list[list[int]] = [[] for _ in self.codes]
        for e, edge in enumerate(self.edges):
            self.needs[edge.target].append(e)
            self.sends[edge.source].append(e)

    def _edges(self) -> Iterator[Edge]:
        n = self.n
        for j, k in pairwise(range(n)):
            yield self._edge(j, k, self.costs.transfer[j])
            yield self._edge(n + k, n + j, self.costs.transfer[j])
        yield self._edge(n - 1, n + n - 1)
        for j in range(n if self.split else 0):
            yield self._edge(n + j, 2 * n + j)
        for (a, b), time in self.costs.skips.items():  # they leave after the others
            yield self._edge(a, b, time)
            yield self._edge(n + b, n + a, time)

    def _edge(self, source: int, target: int, time: float = 0.0) -> Edge:
        a, b = self.device[source], self.device[target]
        if a == b:
            return Edge(source, target, -1, 0.0)
        return Edge(source, target, self._links.setdefault((a, b), len(self._links)), time)

    # -- time -------------------------------------------------------------------------------------

    def play(self, rows: Rows) -> Played:
        """What :func:`~syncpipe.schedules.simulate` says, in a tenth of its time.

        Args:
            rows: each code ``m`` times, on its device.
        """
        arrivals = [[-1.0] * self.m for _ in self.edges]  # < 0: not yet
        ends: list[list[float]] = [[] for _ in self.codes]
        about = []
        for c in self.codes:
            needs = [arrivals[e] for e in self.needs[c]]
            sends = [(arrivals[e], self.edges[e]) for e in self.sends[c]]
            out = [(to, edge.link, edge.time, self.device[edge.target]) for to, edge in sends]
            about.append((ends[c], needs, out, self.times[c], self.again[c], self.again_times[c]))
        links = [0.0 for _ in self.links]
        position, free = [0] * self.devices, [0.0] * self.devices
        left, waiting = sum(map(len, rows)), [*range(self.devices)]
        while waiting:
            d = waiting.pop()
            now, p = free[d], position[d]
            left += p
            for c in rows[d][p:]:
                over, needs, out, time, again, again_time = about[c]
                i = len(over)
                ready = now + again_time if i < again else now
                for arrived in needs:
                    there = arrived[i]
                    if there < 0.0:
                        break
                    if there > ready:
                        ready = there
                else:
                    now = ready + time
                    over.append(now)
                    for arrived, link, way, target in out:
                        if link < 0:
                            arrived[i] = now
                        else:
                            busy = links[link]
                            arrived[i] = links[link] = (now if now > busy else busy) + way
                            if target not in waiting:
                                waiting.append(target)
                    p += 1
                    continue
                break
            free[d], position[d] = now, p
            left -= p
        return Played(math.inf if left else max(free), ends, arrivals)

    # -- memory -----------------------------------------------------------------------------------

    def peak(self, actions: Iterable[Action]) -> float:
        """The most that a device holds at once."""
        held = peak = 0.0
        for kind, i, j in actions:
            whole = self.memory.activations[j]
            first = self.memory.held(j, i < self.rematerialized[j])
            if kind == "forward":
                held += first
            if KINDS[kind].sends == "gradient":
                held += whole - first
            peak = max(peak, held)
            if KINDS[kind].alive < 0:
                held -= whole
        return peak

    def fits(self, rows: Iterable[Iterable[Action]]) -> bool:
        """Whether no device ever holds more than it may, given what each of them does."""
        return all(self.fits_on(d, actions) for d, actions in enumerate(rows))

    def fits_on(self, d: int, actions: Iterable[Action]) -> bool:
        """The same for one of them."""
        return self.peak(actions) <= self.memory.limits[d] * (1 + ROUNDING)

    # -- rows and schedules -----------------------------------------------------------------------

    def actions(self, row: Sequence[int]) -> Iterator[Action]:
        """What the codes of a device stand for."""
        counts = [0] * len(self.codes)
        for c in row:
            yield Action(self.kinds[c // self.n], counts[c], c % self.n)
            counts[c] += 1

    def rows(self, schedule: Schedule) -> Rows:
        """A schedule as codes, with micro-batches in order.

        Where backwards are split a whole one becomes its two halves, one after the other; where
        they are not, two halves become a whole one in place of the input half.
        """
        codes = {kind: [k] for k, kind in enumerate(self.kinds)}
        codes.setdefault("backward", [1, 2])
        codes.setdefault("backward_input", [1])
        codes.setdefault("backward_weight", [])
        return [
            [k * self.n + action.j for action in row for k in codes[action.kind]]
            for row in schedule.actions
        ]
