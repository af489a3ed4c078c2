"""Cuts of a chain of layers into stages, by dynamic programs over boundaries."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from syncpipe.planner.candidates import Problem, slots_bound
from syncpipe.planner.chain import Mode, doubles, sizes_of, within

__all__ = ["BOUNDARIES", "NOTICED", "Balance", "CutFinder", "Slots", "least_largest"]

#: Boundaries of a first search, which a finer one near its cut follows; and the most stages with a
#: wide finer search.
BOUNDARIES, _FEW = 256, 16
_SLOWER = 2  # times as slow as a lower bound a cut is expected to be at most
NOTICED = 1e-9  # smaller relative differences of time are rounding
_ROUNDED = 1 + 1e-12  # tolerance of a memory limit, for sums in another order

Slots = tuple[int, ...]
Balance = tuple[int, ...]


def least_largest(
    ends: Tensor, devices: int, width: int, cost: Callable[[int, int], Tensor],
    both: Callable[[Tensor, Tensor, int], Tensor] = lambda own, after, _: torch.maximum(own, after),
) -> Callable[[int], tuple[float, tuple[tuple[int, int, int], ...]]]:  # fmt: skip
    """For a number of devices, all in use, the cut whose most costly stage costs least.

    Args:
        ends: the layers after which a stage from each layer on may end (:func:`.within`).
        devices: the largest number of devices.
        width: the most devices that may share a stage.
        cost: called with the number of devices left where a stage begins and the number of devices
            of the stage; gives the costs of the stages as a tensor in the shape of ``ends``.
        both: combines the cost of a stage and that of the stages after it, given the number of
            devices left where the stage begins.

    Returns:
        A function that gives for a number of devices the cost, and for each stage its first layer,
        its end and its number of devices; no stages if the cost is infinite.
    """
    layers = len(ends)
    none = doubles([math.inf] * layers)
    #: By devices left and first layer: the least cost; the column of ``ends``, and the devices.
    table, went = [doubles([math.inf] * layers + [0.0])], [(none, none)]
    after = [table[0][ends]]
    for k in range(1, devices + 1):
        best, column, used = none, none, none
        for d in range(1, min(k, width) + 1):
            value, at = both(cost(k, d), after[k - d], k).min(1)
            better = value < best
            best = torch.where(better, value, best)
            column, used = torch.where(better, at, column), torch.where(better, d, used)
        table.append(torch.cat((best, none[:1])))
        after.append(table[k][ends])
        went.append((column, used))

    def cut(k: int) -> tuple[float, tuple[tuple[int, int, int], ...]]:
        least, found, i = float(table[k][0]), list[tuple[int, int, int]](), 0
        while i < layers and least < math.inf:
            at, r = (int(column[i]) for column in went[k])
            found.append((i, int(ends[i, at]), r))
            i, k = found[-1][1], k - r
        return least, tuple(found)

    return cut


class CutFinder:
    """Finds the cuts with the least bounds under 1F1B, for one number of micro-batches."""

    def __init__(self, problem: Problem, m: int, boundaries: int, by_layer: bool = False) -> None:
        self.problem, self.count, self.boundaries = problem, m, boundaries
        #: Whether a stage may recompute as large a part of its forward as it has to.
        self.by_layer = by_layer
        self.chain, self.machine = problem.chain(m), problem.machine
        #: Micro-batches, of which a smaller last one counts as a fraction.
        self.m = problem.batch_size / sizes_of(problem.batch_size, m)[0]
        sums, layers = [*accumulate(reversed(self.chain.inputs[:-1]))], len(self.chain)
        self._longest = max(b - a for a, b in pairwise(self.chain.sums["time"]))
        #: Mean bytes that cross each boundary from here on, in both directions.
        self.sent = doubles([2 * sums[k] / (k + 1) for k in reversed(range(layers))] + [0.0])
        self._runs = lru_cache(maxsize=4)(self.chain.runs)
        self._any, self._stage = (lru_cache(maxsize=4)(self._bounds) for _ in range(2))
        self.cut = lru_cache(maxsize=None)(self._cuts)

    def lowest(self, n: int, slots: Slots = ()) -> float:
        """Seconds below which no cut into ``n`` stages falls, with these slots.

        All work of a stage is between the arrival of the first micro-batch and the departure of the
        last one, so a stage can have at most an m-th of the remaining time as its own. Stage 0 has
        so many micro-batches in flight as it has slots, each of which passes all stages.
        """
        speed, m, sums = self.machine.speed[:n], self.m, self.chain.sums["time"]
        share = sums[-1] / max(speed) / (1 - (1 - 1 / m) ** n)
        turns = -(-math.floor(m) // slots[0]) * sums[-1] / max(speed) if slots else 0.0
        least = max(self._longest / max(speed), sums[-1] / sum(speed))
        return max(share, turns, m * least) * (1 - NOTICED)

    def _cuts(self, n: int, slots: Slots = (), skips: bool = False) -> tuple[float, Balance]:
        """The least bound of the cuts into ``n`` stages, infinite if nothing fits, and its cut. By
        default each stage has as many slots as fit.

        The bound leaves out transfers of skips, as it is unknown between which stages they are.
        With ``skips`` it has those that are likely to go to the next stage.
        """
        layers = len(self.chain)
        if n == 1:
            return self._cut(1, slots, skips, (0, layers))[0], (layers,)
        step = -(-layers // self.boundaries)
        value, ends = self._cut(n, slots, skips, (*range(0, layers, step), layers))
        while step > 1 and ends:
            finer = -(-step // 4)
            most = 2 * -(-step // finer) if n <= _FEW else 2
            near = {end + k * finer for end in ends for k in range(-most, most + 1)}
            value, ends = self._cut(n, slots, skips, tuple(sorted(near & {*range(layers + 1)})))
            step = finer
        return value, tuple(b - a for a, b in pairwise(ends))

    def _cut(
        self, n: int, slots: Slots, skips: bool, at: tuple[int, ...]
    ) -> tuple[float, list[int]]:
        """The least bound with cuts at the boundaries ``at``, and the boundaries of its stages."""
        machine, sums, count = self.machine, self.chain.tensors, len(at) - 1
        speed, memory = machine.speed[:n], machine.memory[:n]
        times, sent = sums["time"][[*at]], sums["inputs"].clone()
        for stash, pop, size in self.chain.skips if skips else ():
            if pop - stash <= 2 * len(self.chain) / n:
                sent[stash + 1 : pop + 1] += size
        sent = sent[[*at[:-1]], None]

        def ways(k: int) -> Tensor:
            return sent * (machine.transfer(1.0, n - k - 1, n - k) if k < n else 0.0)

        def cost(k: int, _: int) -> Tensor:
            s = n - k
            left, right = max(speed[:s], default=1.0), max(speed[s + 1 :], default=1.0)
            asked = (slots[s], slots[0]) if slots else None
            # The average transfer after this stage; the bound for any slots leaves it out.
            each = (k - 1) * machine.transfer(1.0, s, s + 1) if asked and k > 1 else 0.0
            stage = self._stage if asked else self._any
            own: Tensor = stage(at, width, asked, s == 0, memory[s], speed[s], left, right, each)
            least = doubles([self.chain.sums["time"][-1] / max(speed)])
            return torch.maximum(own, least + (self.m - 1) * ways(k))

        def both(own: Tensor, after: Tensor, k: int) -> Tensor:
            # In a tie this stage has the least work.
            return torch.maximum(own, after).add_(2 * ways(k)).add_(own, alpha=1e-7)

        value, most, width = math.inf, _SLOWER * self.lowest(n), 0
        while value > most and width < count:
            # All stages that could be part of a cut that takes at most so many seconds.
            far = torch.searchsorted(times, times + most * max(speed) / self.m, right=True)
            width = max(1, int((far - torch.arange(1, count + 2)).max()))
            value, stages = least_largest(within(count, width), n, 1, cost, both)(n)
            most = value if value < math.inf else _SLOWER * most
        return value * (1 - 1e-7 * n), [at[i] for i, _, _ in stages] + [at[-1]] * bool(stages)

    def _bounds(
        self, at: tuple[int, ...], width: int, asked: tuple[int, int] | None, first: bool,
        limit: float, speed: float, left: float, right: float, each: float,
    ) -> Tensor:  # fmt: skip
        """The lower bounds of a step that has a stage from each boundary to each of the next
        ``width``, without transfers; infinite if the stage does not fit.

        Args:
            at, width: the boundaries, and the most of them that a stage extends over.
            asked: the slots of the stage and of stage 0; None for as many as fit.
            first: whether the stage is stage 0.
            limit: bytes of its device.
            speed: of its device; ``left`` and ``right``: of the fastest device before and after it.
            each: seconds of the transfers after it, per byte of each transfer.
        """
        chain, m, run = self.chain, self.m, self._runs(at, first, width)
        f, b = run.forward / speed, run.backward / speed
        times = chain.tensors["time"][[*at]]
        rows = 1 if first else len(at) - 1
        before = times[:rows, None] / left
        after = (times[-1] - times) / right + each * self.sent[[*at]]
        after = after[within(len(at) - 1, width)[:rows]]
        best, taken = torch.full_like(f, math.inf), self.machine.host * f

        def over(q: Any, mode: Mode) -> Tensor:
            # With any slots, a bound: only the skips that are sure to wait.
            held = chain.needs(run, q, asked[1] if asked and not first else q, mode, taken)
            found: Tensor = held.peak(q) - limit * _ROUNDED
            return found

        q: Any = float(asked[0]) if asked else torch.full_like(f, self.count)
        if limit == math.inf:
            return slots_bound(m, self.count, q, f, b, after, 0.0) + before
        if self.by_layer and asked:
            more, least = (over(q, mode) for mode in self.problem.modes[:2])
            share = (more / (more - least).clamp(min=1e-30)).clamp(0, 1)
            own = slots_bound(m, self.count, q, f, b + f * share, after, 0.0)
            return own.masked_fill((more > 0) & (least > 0), math.inf) + before
        for mode in self.problem.modes:
            if not asked:
                q = torch.full_like(f, self.count)
            more = over(q, mode)
            least = more if asked else over(torch.ones_like(f), mode)
            for _ in range(0 if asked else 3):  # memory is linear in slots in 2 or 3 pieces
                grows = ((more - least) / (q - 1).clamp(min=1)).clamp(min=1e-30)
                fewer = torch.minimum(1 + (-least / grows).floor(), q - 1).clamp(min=1)
                q = torch.where(more > 0, fewer, q)
                more = over(q, mode)
            if not asked:
                q, more = torch.where(more > 0, 1.0, q), torch.where(more > 0, least, more)
            own = slots_bound(m, self.count, q, f, b, after, f * (mode == "recompute"))
            if mode == "offload":
                own = torch.maximum(own, self.problem.link_time(m, run.stored))
            best = torch.where(more > 0, best, torch.minimum(best, own))
            every = more <= 0 if asked else (more <= 0) & (q == q.max())
            if mode == "store" and bool(every.all()):
                break
        return best + before
