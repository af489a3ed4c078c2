"""Recomputation by layer: which layers of a stage are stored, and which runs are recomputed.

A stage that recomputes as a whole keeps one input and runs all its layers twice. In between it
stores some layers, and recomputes runs of the others, each from its own input::

    layers       0      1      2      3      4      5
                 store  |-- run --|   store  |-- run -|
    kept         stored input         stored input

Backward goes from the right to the left. In a run it needs what the layers before it keep, and all
that the layers of the run store. From left to right, those ways to a layer are followed that no
other one surpasses in seconds, in bytes kept and in the peak (a knapsack).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from syncpipe.planner.candidates import Candidate, Problem, ScheduleShape
from syncpipe.planner.chain import Chain, Mode, Spans, ends_of

__all__ = ["Refinement"]

_ENDS = 24  # where runs of a stage may begin and end, if it has more layers
_WAYS = 48  # to a layer, that are followed


class Way(NamedTuple):
    """How the first layers of a stage run.

    ``again``: seconds of recomputation. ``kept``: bytes of a micro-batch from forward to backward.
    ``peak``: bytes of the micro-batch that goes back. ``stored``: whether the last layer is stored.
    """

    again: float
    kept: float
    peak: float
    spans: Spans
    stored: bool


class Refinement:
    """Candidates under 1F1B whose stages recompute by layer."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._ways: dict[tuple[int, int, int], list[Way]] = {}

    def modes(self, shape: ScheduleShape, balance: Sequence[int]) -> list[Mode] | None:
        """For each stage of a cut the mode that fits and takes the fewest seconds; None if for one
        stage none fits.
        """
        problem, ends = self.problem, ends_of(balance)

        def fits(s: int, mode: Mode) -> bool:
            needs = problem.needs(shape, s, ends, mode).peak(shape.in_flight[s])
            return bool(needs <= problem.machine.memory[s])

        found = list[Mode]()
        for s, (i, j) in enumerate(ends):
            fitting = (mode for mode in self._by_seconds(shape.m, i, j) if fits(s, mode))
            found += [mode for mode in [next(fitting, None)] if mode is not None]
            if len(found) == s:
                return None
        return found

    def _by_seconds(self, m: int, i: int, j: int) -> Iterator[Mode]:
        """Modes of layers ``[i, j)`` with ``m`` micro-batches, the fastest first."""
        yield "store"
        if (m, i, j) not in self._ways:
            found = ways(self.problem.chain(m), i, j)
            self._ways[m, i, j] = [way for way in found if way.spans]
        for way in self._ways[m, i, j]:
            yield "recompute" if way.spans == ((i, j),) else way.spans

    def evaluate(
        self, shape: ScheduleShape, balance: Sequence[int], at_most: float
    ) -> Candidate | None:
        """The candidate of a cut with these modes; None if it does not fit, or if its bound exceeds
        ``at_most`` seconds. A stage recomputes as a whole, which does not wait for the gradient, if
        that is faster.
        """
        problem, stored = self.problem, cast("list[Mode]", ["store"] * shape.n)
        if problem.bound(shape, balance, problem.costs(shape, balance), stored) > at_most:
            return None
        modes = self.modes(shape, balance)
        best = problem.evaluate(shape, balance, modes, at_most) if modes else None
        for s in range(shape.n):
            if best and isinstance(best.modes[s], tuple):
                whole: list[Mode] = [*best.modes[:s], "recompute", *best.modes[s + 1 :]]
                other = problem.evaluate(shape, balance, whole, best.time)
                best = other if other and other.rank < best.rank else best
        return best


def ways(chain: Chain, i: int, j: int) -> list[Way]:
    sums, ends = chain.sums["forward"], [*range(i, j, -(-(j - i) // _ENDS)), j]
    renorms = chain.sums["renorms"]
    ways: dict[int, list[Way]] = {end: [] for end in ends} | {i: [Way(0.0, 0.0, 0.0, (), False)]}
    for k, at in enumerate(ends[:-1], 1):
        for way in _best(ways.pop(at)):
            runs = ((end, True) for end in ends[k:] if renorms[end] == renorms[at])
            for to, recomputed in ((ends[k], False), *runs):
                kept, peak = chain.held(at, to, way.stored, recomputed)
                ways[to].append(
                    Way(
                        way.again + (sums[to] - sums[at]) * recomputed,
                        way.kept + kept,
                        max(way.peak, way.kept + peak),
                        (*way.spans, (at, to)) if recomputed else way.spans,
                        not recomputed,
                    )
                )
    return _best(ways[j])


def _best(ways: list[Way]) -> list[Way]:
    """Those that no other one surpasses in all, the fastest first; of many some."""
    best: list[Way] = []
    stairs: list[tuple[float, float]] = []  # bytes kept, ascending, and the least peak up to there
    for way in sorted(ways):
        at = bisect_right(stairs, (way.kept, math.inf))
        if not at or stairs[at - 1][1] > way.peak:
            best.append(way)
            end = at
            while end < len(stairs) and stairs[end][1] >= way.peak:
                end += 1
            stairs[at:end] = [(way.kept, way.peak)]
    if len(best) <= _WAYS:
        return best
    return [best[k * (len(best) - 1) // (_WAYS - 1)] for k in range(_WAYS)]
