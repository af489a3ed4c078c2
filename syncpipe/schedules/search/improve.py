"""From schedules that are there to a shorter one: by listing them again, and move by move.

Four ways, one after another, until the bound is reached or the budget is used up:

- the best starts go forth and back through list scheduling, with several patiences, as long as that
  makes them shorter;
- single codes on the critical path of the best are moved past those that they wait for: between two
  hand-overs from device to device, the last one might come earlier, and the first one later;
- the urgencies of the best are shaken, and it is listed again;
- any codes are moved a little, and sometimes for the worse, less and less so (simulated annealing).

Chance comes from a generator of its own, and the budget is counted in actions, not in seconds: the
same problem has the same result, on any machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import groupby, product

from syncpipe.schedules.search.listing import Direction, Urgencies, listed
from syncpipe.schedules.search.problem import ROUNDING, Played, Problem, Rows

__all__ = ["BUDGET", "improved"]

#: So many actions are placed or played: a second or two.
BUDGET = 300_000

#: What it takes to begin, in actions.
_BEGIN = 50
#: A schedule that is longer than the bound by less, relative, is good enough.
_CLOSE = 1e-3
_PATIENCE = (0.0, 1.0, 0.5, 2.0)
#: How far urgencies are shaken, relative to the makespan.
_SHAKES = (0.01, 0.03, 0.1)
#: A code on the critical path is moved past so many runs of equal codes, at most.
_RUNS = 4
#: So many starts are listed, until so much of the budget is left; and so much for annealing.
_STARTS, _LISTED, _ANNEALED = 3, 0.5, 0.3
#: How far annealing moves a code, and how much longer than it was a schedule may be at first.
_FAR, _WARM = 8, 1e-3


def improved(problem: Problem, starts: Iterable[Rows], bound: float, budget: int) -> Rows:
    """The shortest rows that are found, none of them longer than the best start.

    Args:
        problem: how long everything takes, and what fits.
        starts: rows that fit, at least one.
        bound: nothing is shorter.
        budget: of actions that may be placed or played.
    """
    search = _Search(problem, bound, budget)
    found = sorted((search.offered(rows) for rows in starts), key=lambda played: played.makespan)
    urgencies: list[Urgencies] = [search.by_kind(), *(played.ends for played in found[:_STARTS])]
    for patience, each, careful in product(_PATIENCE, urgencies, search.cares):
        if search.left > _LISTED * budget:
            search.back_and_forth(each, patience, careful, 2)
    search.moves()
    cold = _ANNEALED * search.left
    while not search.over and search.left > cold:
        before = search.best
        search.shake()
        if search.best is not before:
            search.moves()
    search.anneal()
    return search.rows


class _Search:
    """The best so far, and what is left of the budget."""

    def __init__(self, problem: Problem, bound: float, budget: int) -> None:
        self._problem, self._bound, self.left = problem, bound, budget
        self._forth, self._back = Direction(problem, back=False), Direction(problem, back=True)
        self._actions = problem.m * len(problem.codes) + _BEGIN
        self._random = random.Random(0)
        #: Whether to be careful with memory; in vain, where nothing needs to be left.
        self.cares = (True, False) if any(self._forth.reserve) else (False,)
        self.rows: Rows = []
        self.best: Played | None = None

    @property
    def over(self) -> bool:
        """Whether the best is good enough, or there was enough of it."""
        if self.left <= 0:
            return True
        return self.best is not None and self.best.makespan <= self._bound * (1 + _CLOSE)

    def offered(self, rows: Rows) -> Played:
        """Plays rows that fit, and keeps them if they are the best."""
        self.left -= self._actions // 3
        played = self._problem.play(rows)
        if self.best is None or played.makespan < self.best.makespan * (1 - ROUNDING):
            self.rows, self.best = rows, played
        return played

    def by_kind(self) -> Urgencies:
        """What brings gradients on first, then forwards, then weight halves, each in turn."""
        problem = self._problem
        rank = (1, 0, 2)
        return [
            [float(rank[c // problem.n] * problem.m + i) for i in range(problem.m)]
            for c in problem.codes
        ]

    def back_and_forth(
        self, urgencies: Urgencies, patience: float, careful: bool, rounds: int
    ) -> None:
        """Lists again and again, until it was of no use for so many rounds."""
        least, useless = float("inf"), 0
        while useless < rounds and not self.over:
            useless += 1
            for direction in (self._forth, self._back):
                self.left -= self._actions
                found = listed(direction, urgencies, patience, careful=careful)
                if found is None:
                    return
                rows, over = found
                played = self.offered(rows)
                if played.makespan < least * (1 - ROUNDING):
                    least, useless = played.makespan, 0
                # What ends last in this direction is the first in the other one.
                ends = over if direction is self._back else played.ends
                urgencies = [[-end for end in reversed(row)] for row in ends]

    def shake(self) -> None:
        """Lists the best again, somewhat disturbed."""
        assert self.best is not None
        shift = self._random.choice(_SHAKES) * self.best.makespan
        kinds = self._random.random() < 0.5  # whole codes as well
        urgencies = []
        for ends in self.best.ends:
            whole = self._random.uniform(-shift, shift) * 2 if kinds else 0.0
            urgencies.append([end + whole + self._random.uniform(-shift, shift) for end in ends])
        patience, careful = self._random.choice(_PATIENCE), self._random.choice(self.cares)
        self.back_and_forth(urgencies, patience, careful, 1)

    def anneal(self) -> None:
        """Moves codes at random, as long as the budget lasts."""
        if self.best is None or self.over:
            return
        problem, chance, whole = self._problem, self._random, self.left
        rows, time = self.rows, self.best.makespan
        while not self.over:
            self.left -= self._actions // 6
            d = chance.randrange(problem.devices)
            row = list(rows[d])
            source = chance.randrange(len(row))
            target = min(max(source + chance.randint(-_FAR, _FAR), 0), len(row) - 1)
            if row[source] == row[target]:
                continue
            row.insert(target, row.pop(source))
            if not problem.fits_on(d, problem.actions(row)):
                continue
            moved = [*rows[:d], row, *rows[d + 1 :]]
            worse = self.offered(moved).makespan - time  # inf, if it cannot be
            warmth = _WARM * time * self.left / whole
            if worse <= 0 or (warmth > 0 and chance.random() < math.exp(-worse / warmth)):
                rows, time = moved, time + worse

    def moves(self) -> None:
        """Moves codes on the critical path, as long as that helps."""
        problem, moved = self._problem, True
        while moved:
            moved = False
            moves = list(self._critical_moves())
            self._random.shuffle(moves)
            for d, source, target in moves:
                if self.over:
                    return
                row = list(self.rows[d])
                row.insert(target, row.pop(source))
                if problem.fits_on(d, problem.actions(row)):
                    before = self.best
                    self.offered([*self.rows[:d], row, *self.rows[d + 1 :]])
                    if self.best is not before:
                        moved = True
                        break

    def _critical_moves(self) -> Iterator[tuple[int, int, int]]:
        """Device, from where in its row, to where."""
        for d, first, last in self._critical_blocks():
            row = self.rows[d]
            for source, step, end in ((last, -1, first), (first, 1, last)):
                target, runs = source, 0
                while target != end and runs < _RUNS:
                    passed = row[target + step]
                    while target != end and row[target + step] == passed:
                        target += step
                    if passed != row[source]:
                        runs += 1
                        yield d, source, target

    def _critical_blocks(self) -> Iterator[tuple[int, int, int]]:
        """Device, first and last position of each part of the critical path."""
        path = sorted(self._critical_path())
        for (d, _), group in groupby(
            enumerate(path), key=lambda entry: (entry[1][0], entry[1][1] - entry[0])
        ):
            positions = [position for _, (_, position) in group]
            yield d, positions[0], positions[-1]

    def _critical_path(self) -> Iterator[tuple[int, int]]:
        """Device and position of each code on it, the last one first."""
        problem, played = self._problem, self.best
        assert played is not None
        cells: list[list[tuple[int, int]]] = []
        places: dict[tuple[int, int], tuple[int, int]] = {}
        for d, row in enumerate(self.rows):
            counts = [0] * len(problem.codes)
            cells.append([])
            for position, c in enumerate(row):
                cells[d].append((c, counts[c]))
                places[c, counts[c]] = d, position
                counts[c] += 1

        def end(d: int, position: int) -> float:
            c, i = cells[d][position]
            return played.ends[c][i]

        place: tuple[int, int] | None = max(
            ((d, len(row) - 1) for d, row in enumerate(self.rows)), key=lambda last: end(*last)
        )
        while place is not None:
            yield place
            d, position = place
            c, i = cells[d][position]
            latest = end(d, position - 1) if position else 0.0
            latest += problem.again_times[c] if i < problem.again[c] else 0.0
            place = (d, position - 1) if position else None
            for e in problem.needs[c]:
                if played.arrivals[e][i] > latest:
                    latest, place = played.arrivals[e][i], places[problem.edges[e].source, i]
