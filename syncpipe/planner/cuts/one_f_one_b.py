"""The cut with the least bound of the step time under 1F1B; exact for the bound.

For a stage with ``q`` slots, ``F``, ``B`` and ``R`` as in gpipe.py, let ``pre`` be all that happens
to one micro-batch to its left, there and back, and ``D`` to its right. With ``e = F`` if the stage
recomputes and is not the last, else 0, and ``[x]+ = max(x, 0)``, the step takes no less than

    m > q:   pre + m (F+R) + [D - (q-1) F - e]+ + [D - (q-1) R - e]+
    m <= q:  pre + max( m (F+R),  F + D + B + (m-1) R,  m F + D + B )

and, as all micro-batches take each way between two stages, one after another, no less than
``K + X + off + (m-1) tx``: ``K`` and ``X`` are the work and the ways of one micro-batch, and
``off`` is the forward that the last stage does again, if it does. Skips may only make it longer
and are left out.

A label of a border: (Y = off + work and ways to its right, H = the largest of the bounds without
all that is to its left). All formulas grow with both.

More slots make no bound higher. So with as many as fit on each stage, and the better one of doing
without recomputation and of the slots that it makes room for, the least bound is one for all slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from syncpipe.planner.cuts.network import SLACK, CutSearch, Edge, Network

__all__ = ["FAMILIES", "Family", "OneFOneBCuts", "slots_of"]

#: How many slots: see :func:`syncpipe.schedules.one_f_one_b`. With a single one on each stage
#: micro-batches go one by one, with the least memory: for where nothing else fits.
Family = Literal["overlap", "textbook", "single"]
FAMILIES: tuple[Family, ...] = ("overlap", "textbook")

#: Y, H, bound of the step time, the stage that came last, the label before.
_Label = tuple[float, float, float, "Edge | None", "_Label | None"]


def slots_of(family: Family, n: int, m: int) -> tuple[int, ...]:
    """The slots of each of ``n`` stages for ``m`` micro-batches."""
    if family == "textbook":
        return tuple(min(m, n - s) for s in range(n))
    if family == "overlap":
        return tuple(min(m, 2 * (n - s) - 1) for s in range(n))
    if family == "single":
        return (1,) * n
    raise ValueError(f"slots={family!r}: use 'textbook', 'overlap' or 'single'")


class OneFOneBCuts(CutSearch):
    """The search for certain slots, at most as many as there are micro-batches.

    Stages that do not fit otherwise recompute, all micro-batches.
    """

    def value_of(self, stages: Sequence[Edge]) -> float:
        starts = [0, *(edge[0] for edge in stages[:-1])]
        y = h = 0.0
        for s in reversed(range(self.n)):
            _, f, b, recomputes, q = stages[s]
            h = max(h + f + b, self._alone(s, f, b, recomputes, q, y))
            if s == self.n - 1 and recomputes:
                y = f
            way = self.transfer(s, starts[s])
            y += f + b + 2 * way
            h = max(h + 2 * way, y + (self.m - 1) * way)
        return h

    def lowest(self, load: float) -> float:
        # A stage starts when those before it are through with a micro-batch, and then does all of
        # its work before they are through with the last: pre + m (F+B). So it takes an m-th of
        # T - pre at most, which leaves (1 - 1/m) of that, and so on until nothing is left to do.
        total = self.least_total
        return max(total / (1 - (1 - 1 / self.m) ** self.n), self.m * load) * (1 - SLACK)

    def farthest(self, s: int, time: float, limit: float) -> float:
        return time + self.speed[s] * (limit - time / self.fastest) / self.m

    def nearest(self, s: int, time: float, limit: float) -> float:
        left = 1 - self.speed[s] / (self.m * self.fastest)
        return (time - self.speed[s] * limit / self.m) / left if left > 0 else -math.inf

    def least(self, s: int, i: int, before: float, edges: Sequence[Edge]) -> list[float]:
        way = self.transfer(s, i)
        left = before + 2 * way
        base = left + (self.m - 1) * way + self.right(s, i)
        return [
            max(base, left + self._alone(s, f, b, recomputes, q, self.right(s + 1, j)))
            for j, f, b, recomputes, q in edges
        ]

    def _alone(self, s: int, f: float, b: float, recomputes: bool, q: int, right: float) -> float:
        """The bound of one stage, without what is to its left."""
        m = self.m
        r = b + f if recomputes else b
        if m <= q:
            first = f + right + b + (m - 1) * r
            return max(m * (f + r), first, m * f + right + b)
        bound = m * (f + r)
        rest = right - f if recomputes and s < self.n - 1 else right
        wait = rest - (q - 1) * f
        if wait > 0:
            bound += wait
        wait = rest - (q - 1) * r
        return bound + wait if wait > 0 else bound

    def walk_back(self, network: Network, limit: float, few: int | None) -> list[Edge] | None:
        chain, m, n = self.chain, self.m, self.n
        alone = self._alone
        labels: dict[int, list[_Label]] = {len(chain): [(0.0, 0.0, 0.0, None, None)]}
        for s in reversed(range(n)):
            least, before_it = network.least[s], network.before[s]
            here: dict[int, list[_Label]] = {}
            for i, edges in network.edges[s].items():
                way = self.transfer(s, i)
                base, lowest = before_it[i], least[i]
                found: list[_Label] = []
                for edge in edges:
                    j, f, b, recomputes, q = edge
                    before = labels.get(j)
                    if before is None:
                        continue
                    once = f + b + 2 * way
                    for label in before:
                        y, h = label[0], label[1] + f + b
                        own = alone(s, f, b, recomputes, q, y)
                        h = (own if own > h else h) + 2 * way
                        y += once
                        if recomputes and s == n - 1:
                            y += f
                        if h < y + (m - 1) * way:
                            h = y + (m - 1) * way
                        bound = base + h
                        if bound < lowest:
                            bound = lowest
                        if bound <= limit:
                            found.append((y, h, bound, edge, label))
                if found:
                    here[i] = _pareto(found)[:few]
            labels = here
        if not labels.get(0):
            return None
        final: _Label | None = min(labels[0], key=lambda label: label[2])
        stages = []
        while final is not None and final[3] is not None:
            stages.append(final[3])
            final = final[4]
        return stages


def _pareto(labels: list[_Label]) -> list[_Label]:
    """Those that no other is at least as good as in both, the most promising first."""
    labels.sort(key=lambda label: label[:2])
    kept: list[_Label] = []
    h = math.inf
    for label in labels:  # Y grows, so H has to fall
        if label[1] < h:
            kept.append(label)
            h = label[1]
    kept.sort(key=lambda label: label[2])
    return kept
