"""The cut with the least step time under GPipe's schedule; exact.

With ``m`` micro-batches, ``F`` and ``B`` the times of a stage for one of them, ``R`` its backward
and, if it recomputes, its forward once more, ``tx`` the way of its input to it (no skips):

    T = sum(F + B) + 2 sum(tx) + (m-1) (max of all F and tx  +  max of all R and tx)

The last micro-batch goes back first and is not recomputed (``checkpoint="except_last"``). Without
recomputation this is exactly what the simulation says; with it, where a stage may recompute while
it waits, it is a lower bound.

A label of a border: (largest F, largest R, sum of F + B + 2 tx) of the stages to its right. ``T``
grows with each of the three, so a label that is nowhere better than another leads to nothing
better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from syncpipe.planner.cuts.network import SLACK, CutSearch, Edge, Network, least_load

__all__ = ["GPipeCuts"]

#: Largest F, largest R, times and ways of one micro-batch, bound of the step time, the stage that
#: came last, the label before.
_Label = tuple[float, float, float, float, "Edge | None", "_Label | None"]


class GPipeCuts(CutSearch):
    """The search for one number of stages and one of micro-batches, all of them in flight at once.

    Stages that do not fit otherwise recompute, all micro-batches but the last.
    """

    def value_of(self, stages: Sequence[Edge]) -> float:
        starts = [0, *(edge[0] for edge in stages[:-1])]
        ways = [self.transfer(s, i) for s, i in enumerate(starts)]
        forward = [edge[1] for edge in stages]
        backward = [edge[2] + edge[1] if edge[3] else edge[2] for edge in stages]
        pace = max(*forward, *ways) + max(*backward, *ways)
        once = [edge[1] + edge[2] + 2 * way for edge, way in zip(stages, ways, strict=True)]
        return math.fsum(once) + (self.m - 1) * pace

    def lowest(self, load: float) -> float:
        return self.least_total + (self.m - 1) * load

    def farthest(self, s: int, time: float, limit: float) -> float:
        return time + self._largest(s, limit)

    def nearest(self, s: int, time: float, limit: float) -> float:
        return time - self._largest(s, limit)

    def _largest(self, s: int, limit: float) -> float:
        if self.m == 1:
            return math.inf
        return self.speed[s] * (limit - self.least_total) / (self.m - 1)

    def least(self, s: int, i: int, before: float, edges: Sequence[Edge]) -> list[float]:
        # Without the ways: walk_back knows all of them, and adds them.
        way, times, total = self.transfer(s, i), self.m - 1, self.least_total
        return [
            total + times * (max(f, way) + max(b + f if recomputes else b, way))
            for _, f, b, recomputes, _ in edges
        ]

    def walk_back(self, network: Network, limit: float, few: int | None) -> list[Edge] | None:
        chain, times = self.chain, self.m - 1
        # No cut has less than these, so nothing is lost if no label has.
        f_least = least_load(chain.forward_to, self.speed) * (1 - SLACK)
        r_least = least_load(chain.backward_to, self.speed) * (1 - SLACK)
        labels: dict[int, list[_Label]] = {len(chain): [(f_least, r_least, 0.0, 0.0, None, None)]}
        for s in reversed(range(self.n)):
            least, before_it = network.least[s], network.before[s]
            others = math.fsum(self.speed[:s])
            here: dict[int, list[_Label]] = {}
            for i, edges in network.edges[s].items():
                way = self.transfer(s, i)
                left = before_it[i] + 2 * way
                slowest = least[i] - self.least_total
                # The stages to the left have these to do, and one of them the mean at least.
                f_left = chain.forward_to[i] / others if s else way
                r_left = chain.backward_to[i] / others if s else way
                f_here, r_here = max(f_left, way), max(r_left, way)
                found: list[_Label] = []
                for edge in edges:
                    before = labels.get(edge[0])
                    if before is None:
                        continue
                    _, f, b, recomputes, _ = edge
                    once = f + b + 2 * way
                    base = left + f + b
                    r = b + f if recomputes else b
                    f = f if f > f_here else f_here
                    r = r if r > r_here else r_here
                    for label in before:
                        f_max = f if f > label[0] else label[0]
                        r_max = r if r > label[1] else label[1]
                        bound = times * (f_max + r_max)
                        if bound < slowest:
                            bound = slowest
                        bound += base + label[2]
                        if bound <= limit:
                            found.append((f_max, r_max, label[2] + once, bound, edge, label))
                if found:
                    here[i] = _pareto(found, times)[:few]
            labels = here
        if not labels.get(0):
            return None
        final: _Label | None = min(labels[0], key=lambda label: label[3])
        stages = []
        while final is not None and final[4] is not None:
            stages.append(final[4])
            final = final[5]
        return stages


def _pareto(labels: list[_Label], times: int) -> list[_Label]:
    """Those that no other is at least as good as in everything, the most promising first."""
    if times == 0:  # then only what happens once counts
        return [min(labels, key=lambda label: label[2])]
    labels.sort(key=lambda label: label[:4])
    kept: list[_Label] = []
    for label in labels:
        r, ways = label[1], label[2]
        for other in kept:  # none of these has a larger F
            if other[1] <= r and other[2] <= ways:
                break
        else:
            kept.append(label)
    kept.sort(key=lambda label: label[3])
    return kept
