"""The two programs over the boundaries between layers that find cuts.

The first finds, for 1F1B with given slots, the cut with the least bound on its step, from the
right, stage by stage. For a stage with ``q`` slots let ``F`` and ``R`` be its forward and all that
it does to go back, ``pre`` what happens to one micro-batch to its left, there and back, and ``D``
what happens to its right. Then

    m > q:   T >= pre + m (F+R) + [D - (q-1) F]+ + [D - (q-1) R]+
    m <= q:  T >= pre + max( m (F+R),  F + D + B + (m-1) R,  m F + D + B )

A label of a boundary is the least of the largest of these over the stages to its right, without
what is to its left, and the time ``D`` of these stages. Of storing, recomputing and offloading a
stage does what has the least bound.

The second finds the cut whose most costly stage costs least, from the left, for any cost of a stage
and any number of devices that may share one: the share of its memory that a stage takes
(:meth:`Program.shares`), or PipeDream's times (:mod:`.replicas`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from syncpipe.planner.chain import Mode
from syncpipe.planner.draft import Terms

__all__ = ["NOTICED", "Cut", "Program", "least_largest", "least_load"]

#: Differences below this, relative, are rounding.
NOTICED = 1e-9
#: A limit on memory as sums in another order may meet it.
_ROUNDED = 1 + 1e-12
#: How far above the lower bound cuts are looked for, step by step.
_STEPS = (1.02, 1.06, 1.15, 1.4, 2.0, 4.0, 16.0, math.inf)


@dataclass(frozen=True)
class Cut:
    """What a program found: its bound (or share), the balance, and the slots of each stage."""

    value: float
    balance: tuple[int, ...]
    slots: tuple[int, ...]


class Program:
    """The programs for one number of micro-batches.

    Args:
        terms: layers and devices.
        m: number of micro-batches.
    """

    def __init__(self, terms: Terms, m: int) -> None:
        self.terms, self.m = terms, m
        self.chain, self.machine = terms.chain(m), terms.machine
        sums = self.chain.sums
        self._times = torch.tensor(sums["time"], dtype=torch.float64)
        self._inputs = torch.tensor((*self.chain.inputs, 0.0), dtype=torch.float64)
        grows = all(a >= b for a, b in zip(self.chain.stored, self.chain.shared, strict=True))
        least = zip(sums["fixed"], sums["stored"], strict=True)
        #: What layers hold at least, before each boundary; empty if more layers may hold less.
        self._least = [w + z for w, z in least] if grows else []

    def lowest(self, n: int) -> float:
        """Seconds that no cut into ``n`` stages falls short of.

        A stage has all of its work to do after a micro-batch has come to it, and before the last
        goes on from it: of what is left to the right of ``pre`` it takes an m-th of the rest at
        most.
        """
        speed, times = self.machine.speed[:n], self.chain.sums["time"]
        shared = times[-1] / max(speed) / (1 - (1 - 1 / self.m) ** n)
        return max(shared, self.m * least_load(times, speed)) * (1 - NOTICED)

    def minimise(
        self, n: int, slots: Sequence[int], at_most: float = math.inf, low: float = 0.0
    ) -> Cut | None:
        """The cut into ``n`` stages with the least bound; None if there is none within ``at_most``.

        Args:
            n: at most as many as there are layers and devices.
            slots: of each stage; empty for as many as fit.
            at_most: seconds.
            low: a bound that is known.
        """
        lowest = max(self.lowest(n), low)
        for step in _STEPS:
            limit = min(at_most, step * lowest)
            found = self._cut(n, slots, limit)
            if found is not None and found.value <= limit * (1 + NOTICED):
                return found
            if limit == at_most:
                return None
        return None

    def _cut(self, n: int, slots: Sequence[int], limit: float) -> Cut | None:
        """One run of the program, within ``limit`` seconds."""
        windows = self._windows(n, limit)
        if windows is None:
            return None
        value = right = torch.zeros(1, dtype=torch.float64)
        path: list[tuple[Tensor, Tensor]] = []
        for s in reversed(range(n)):
            i, j = (slice(low, high + 1) for low, high in windows[s : s + 2])
            way = torch.zeros(1, 1, dtype=torch.float64)
            if s:
                way = self._inputs[i, None] * self.machine.transfer(1.0, s - 1, s)
            asked = (float(slots[s]), float(slots[0])) if slots else (0.0, 0.0)
            own, q, recomputed = self._stage(s, i, j, asked, right, s == n - 1)
            once = (self._times[j] - self._times[i, None]) / self.machine.speed[s]
            after = right + once + 2 * way + recomputed * (s == n - 1)
            total = torch.maximum(torch.maximum(value + once, own) + 2 * way,
                                  after + (self.m - 1) * way)  # fmt: skip
            left = self._times[i, None] / max(self.machine.speed[:s], default=1.0)
            total = total.masked_fill(total + left > limit * (1 + NOTICED), math.inf)
            # Of equally good ones that where this stage has least.
            arg = (total + 1e-7 * own).argmin(1)
            rows = torch.arange(len(arg))
            value, right = total[rows, arg], after[rows, arg]
            if not value.isfinite().any():
                return None
            path.append((arg + windows[s + 1][0], q[rows, arg]))
        ends, found = [0], []
        for (low, _), (end, q) in zip(windows, reversed(path), strict=False):
            at = ends[-1] - low
            found.append(int(q[at]))
            ends.append(int(end[at]))
        held = tuple(accumulate(found, min))  # more than the stage before has are of no use
        return Cut(float(value[0]), tuple(b - a for a, b in pairwise(ends)), held)

    def _windows(self, n: int, limit: float) -> list[tuple[int, int]] | None:
        """Where stages can end, if none of them takes longer than its share of the limit."""
        times, speed, m = self.chain.sums["time"], self.machine.speed[:n], self.m
        fastest, count, slack = max(speed), len(self.chain), NOTICED * times[-1]
        late, early = [0], [count]
        for s in range(n):
            time = times[late[-1]]
            time += speed[s] * (limit - time / fastest) / m + slack
            late.append(min(count - (n - 1 - s), bisect_right(times, time) - 1))
        for s in reversed(range(n)):
            rest = 1 - speed[s] / (m * fastest)
            time = times[early[-1]] - speed[s] * limit / m
            time = time / rest - slack if rest > 0 else -math.inf
            start = min(bisect_left(times, time), early[-1] - 1)
            if self._least:
                held = self._least[early[-1]] - self.machine.memory[s] * (1 + NOTICED)
                start = max(start, bisect_left(self._least, held - self._least[-1] * NOTICED))
            early.append(max(s, min(start, early[-1])))
        early.reverse()
        late[-1] = count if late[-1] >= count else -1
        windows = [*zip(early, late, strict=True)]
        fits = early[0] == 0 and all(a <= b for a, b in windows)
        return windows if fits else None

    def _stage(
        self, s: int, i: slice, j: slice, asked: tuple[float, float], right: Tensor, last: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For each stage from ``i`` to ``j`` the least bound without what is to its left, the slots
        for it, and what it recomputes.

        Args:
            s: the stage.
            i: where it may start.
            j: where it may end.
            asked: its slots, and those of stage 0; 0 for as many as fit.
            right: the time of one micro-batch to the right of each end, there and back.
            last: whether it is the last one.
        """
        chain, m, speed = self.chain, self.m, self.machine.speed[s]
        limit, run = self.machine.memory[s] * _ROUNDED, chain.runs(i, j, s == 0)
        f, b = run.forward / speed, run.backward / speed
        boundaries = torch.arange(len(self._times))
        impossible = boundaries[j] <= boundaries[i, None]
        cap, slots, recomputed = torch.full_like(f, asked[0] or m), torch.ones_like(f), f * 0
        best = torch.full_like(f, math.inf)
        modes: tuple[Mode, ...] = ("store", *self.terms.others)
        for mode in modes if limit < math.inf else modes[:1]:

            def memory(q: Tensor, mode: Mode = mode) -> Tensor:
                # With any slots no more wait than are sure to.
                q0 = torch.full_like(q, asked[1]) if s and asked[0] else q
                held: Tensor = sum(chain.account(run, q, q0, mode, self.machine.host * f))
                return held

            q, fits = cap, torch.ones_like(impossible)
            if limit < math.inf:
                least = memory(cap if asked[0] else torch.ones_like(f))
                q = cap if asked[0] else _most(cap, least, limit, memory)
                fits = least <= limit
            r = b + f if mode == "recompute" else b
            rest = right - f if mode == "recompute" and not last else right
            own = self._alone(f, b, r, q, right, rest)
            if mode == "offload":
                own = torch.maximum(own, self.terms.link_time(m, run.stored))
            own = own.masked_fill(~fits, math.inf)
            better = own < best
            best, slots = torch.where(better, own, best), torch.where(better, q, slots)
            recomputed = torch.where(better, r - b, recomputed)
            if mode == "store" and bool(((q == cap) & fits).all()):
                break
        return best.masked_fill(impossible, math.inf), slots, recomputed

    def _alone(
        self, f: Tensor, b: Tensor, r: Tensor, q: Tensor, right: Tensor, rest: Tensor
    ) -> Tensor:
        """The bound of one stage, without what is to its left."""
        m = self.m
        work = m * (f + r)
        waits = (rest - (q - 1) * f).clamp(min=0) + (rest - (q - 1) * r).clamp(min=0)
        few = torch.maximum(f + (m - 1) * r, m * f) + right + b
        return torch.where(q < m, work + waits, torch.maximum(work, few))

    def shares(self, n: int) -> dict[int, Cut]:
        """For each number of stages up to ``n`` the cut whose largest share of memory is least."""
        count, host = len(self.chain), self.machine.host
        every = slice(0, count), slice(0, count + 1)

        def share(stage: int, _: int) -> Tensor:
            speed, limit = self.machine.speed[stage - 1], self.machine.memory[stage - 1]
            run = self.chain.runs(*every, stage == 1)
            one, taken = torch.ones_like(run.forward), host * run.forward / speed
            modes: tuple[Mode, ...] = ("store", *self.terms.others)
            held = [sum(self.chain.account(run, one, one, mode, taken)) for mode in modes]
            return torch.stack(held).min(0)[0] / limit

        values, stages = least_largest(count, n, 1, share)
        found = {}
        for k in range(1, n + 1):
            balance = tuple(j - i for i, j, _ in stages(k))
            found[k] = Cut(float(values[k, count]), balance, (1,) * k)
        return found


def _most(cap: Tensor, least: Tensor, limit: float, memory: Callable[[Tensor], Tensor]) -> Tensor:
    """As many slots as fit, between one and ``cap``, given what one takes."""
    q, most = cap, memory(cap)
    for _ in range(3):
        if bool((most <= limit).all()):
            break
        # Memory grows in two or three straight lines.
        each = (most - least) / (q - 1).clamp(min=1)
        fewer = 1 + ((limit - least) / each.clamp(min=1e-30)).floor().clamp(min=0)
        q = torch.where(most <= limit, q, torch.minimum(fewer, q - 1).clamp(min=1))
        most = memory(q)
    return torch.where(most <= limit, q, torch.ones_like(q))


def least_largest(
    layers: int,
    devices: int,
    width: int,
    cost: Callable[[int, int], Tensor],
    both: Callable[[Tensor, Tensor], Tensor] = torch.maximum,
) -> tuple[Tensor, Callable[[int], tuple[tuple[int, int, int], ...]]]:
    """The second program: its state is a boundary and how many devices are used before it.

    Args:
        layers: how many there are.
        devices: at most.
        width: so many devices at most share a stage.
        cost: of stages that end with so many devices used, on so many of these: ``[L, L + 1]``, of
            the layers from ``i`` up to ``j``.
        both: what a stage and those before it cost together.

    Returns:
        For each number of devices and each boundary the least cost, ``[devices + 1, L + 1]``; and
        what tells the stages for a number of devices: first layer, end, devices.
    """
    empty = torch.ones(layers, layers + 1).tril().bool()
    none = torch.full((layers + 1,), math.inf, dtype=torch.float64)
    table, came = [none.index_fill(0, torch.tensor([0]), 0.0)], [(none, none)]
    for k in range(1, devices + 1):
        best, before, used = none, none, none
        for d in range(1, min(k, width) + 1):
            value, i = both(table[k - d][:-1, None], cost(k, d).masked_fill(empty, math.inf)).min(0)
            better = value < best
            best = torch.where(better, value, best)
            before, used = torch.where(better, i, before), torch.where(better, d, used)
        table.append(best)
        came.append((before, used))

    def stages(k: int) -> tuple[tuple[int, int, int], ...]:
        found, j = [], layers
        while j:
            i, d = (int(column[j]) for column in came[k])
            found.append((i, j, d))
            j, k = i, k - d
        return tuple(reversed(found))

    return torch.stack(table), stages


def least_load(times: Sequence[float], speed: Sequence[float]) -> float:
    """What the largest stage of any cut takes at least, and of the best one for equal devices.

    Args:
        times: the sum of everything before each boundary.
        speed: of the device of each stage.
    """
    longest, count = max(b - a for a, b in pairwise(times)), len(times) - 1
    low, high = max(times[-1] / math.fsum(speed), longest / max(speed)), times[-1] / max(speed)
    load = low
    for _ in range(60):
        i = 0
        for v in speed:
            i = bisect_right(times, times[i] + load * v * (1 + 1e-11)) - 1
        low, high = (low, load) if i == count else (load, high)
        load = (low + high) / 2
    return high
