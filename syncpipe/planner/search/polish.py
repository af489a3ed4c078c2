"""Slots that suit a cut, and small changes of both that make the simulated time shorter.

The bound that a cut is chosen by depends on the slots. Those of a family suit even stages; what a
stage needs is to keep busy until its first micro-batch is back. If a micro-batch takes ``D`` from
the stage to the end and back, and one leaves the pipeline every ``P`` seconds, so many more than
one are on their way meanwhile::

    slots = 1 + D / P, rounded up

Even stages without transfers give the textbook's numbers. More is not only more memory: whoever
goes forward too eagerly lets gradients wait. So these slots are tried, the cut is sought again for
them, and then single layers and slots are moved as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from syncpipe.planner.costs.makespan import makespan
from syncpipe.planner.cuts.one_f_one_b import slots_of
from syncpipe.planner.search.candidate import Candidate, Terms

__all__ = ["Draft", "drafted", "fitted", "polished", "refitted"]

#: Differences below this, relative, are rounding.
_NOTICED = 1e-9


@dataclass(frozen=True)
class Draft:
    """A candidate without its simulation; ``time`` does not know of skips."""

    schedule: str
    balance: tuple[int, ...]
    chunks: int
    slots: tuple[int, ...]
    recomputes: tuple[bool, ...]
    time: float

    def candidate(self, terms: Terms) -> Candidate:
        """With the simulation."""
        return terms.candidate(
            self.balance, self.chunks, self.schedule, self.slots, self.recomputes
        )


def drafted(
    terms: Terms,
    schedule: str,
    balance: Sequence[int],
    chunks: int,
    slots: Sequence[int],
    at_most: float = math.inf,
) -> Draft | None:
    """What a cut takes; None if it does not fit, or its bound exceeds the limit."""
    cut = terms.cuts(schedule, chunks, slots).valued(balance)
    if cut is None or cut.value * terms.sound(chunks) > at_most:
        return None
    costs = terms.costs(balance, chunks)
    fixed = None if schedule == "gpipe" else slots
    time = makespan(chunks, fixed, costs, cut.recomputes)
    time = max(time, terms.interpreter(balance, chunks, schedule, cut.recomputes))
    return Draft(schedule, tuple(balance), chunks, tuple(slots), cut.recomputes, time)


def refitted(terms: Terms, draft: Draft) -> Draft:
    """A draft for 1F1B with slots that suit it, and the best cut for these, if that is faster."""
    best = draft
    for _ in range(2):
        m, before = best.chunks, best
        textbook = terms.recomputing(best.balance, m, slots_of("textbook", len(best.balance), m))
        suitable = {
            slots
            for recomputes in {best.recomputes, textbook}
            for slots in _suitable(terms, best.balance, m, recomputes)
        }
        drafts = [
            drafted(terms, "1f1b", best.balance, m, slots)
            for slots in sorted(suitable - {best.slots})
        ]
        suited = min((d for d in drafts if d), key=lambda d: d.time, default=None)
        if suited is None:
            break
        cut = terms.cuts("1f1b", m, suited.slots).minimise(at_most=best.time)
        moved = drafted(terms, "1f1b", cut.balance, m, suited.slots) if cut else None
        for other in (suited, moved):
            if other and other.time < best.time * (1 - _NOTICED):
                best = other
        if best is before:
            break
    return best


def polished(terms: Terms, draft: Draft, work: int, lowest: float = 0.0) -> tuple[Draft, int]:
    """A draft at least as good.

    Args:
        terms: of the search.
        draft: one that fits.
        work: so many cells (micro-batch, stage) may be played through, more or less.
        lowest: seconds that are good enough, as nothing takes less.

    Returns:
        The draft, and what is left of the work.
    """
    cells, best = len(draft.balance) * draft.chunks, draft
    improved = len(draft.balance) > 1 and draft.chunks > 1
    while improved:
        improved = False
        for balance, slots in _neighbours(terms, best):
            if work <= 0 or best.time <= lowest * (1 + _NOTICED):
                return best, work
            other = drafted(terms, best.schedule, balance, best.chunks, slots, best.time)
            work -= cells
            if other and _better(other, best):
                best, improved = other, True
    return best, work


def _better(draft: Draft, than: Draft) -> bool:
    """Faster, or as fast with fewer in flight."""
    if draft.time < than.time * (1 - _NOTICED):
        return True
    return draft.time <= than.time and sum(draft.slots) < sum(than.slots)


def fitted(
    terms: Terms,
    balance: Sequence[int],
    m: int,
    recomputes: Sequence[bool],
    most: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """Slots to begin with: those of both families, those that suit the cut, and as many as fit."""
    n = len(balance)
    ways = [slots_of("textbook", n, m), slots_of("overlap", n, m), tuple(most)]
    found = {slots: None for way in ways if (slots := _fitting(terms, balance, m, recomputes, way))}
    found |= dict.fromkeys(_suitable(terms, balance, m, recomputes))
    yield from found


def _suitable(
    terms: Terms, balance: Sequence[int], m: int, recomputes: Sequence[bool]
) -> Iterator[tuple[int, ...]]:
    """Slots by the way of a micro-batch to the end and back, as many as fit."""
    costs = terms.costs(balance, m)
    times = [
        f * (2 if again else 1) + b
        for f, b, again in zip(costs.forward, costs.backward_input, recomputes, strict=True)
    ]
    pace = max(*times, *costs.transfer)
    if pace <= 0:
        return
    n, round_trip, most = len(balance), 0.0, [1]
    for s in reversed(range(n - 1)):
        round_trip += times[s + 1] + 2 * costs.transfer[s]
        most.append(min(m, 1 + math.ceil(round_trip / pace - _NOTICED)))
    for extra in (0, 1):
        slots = [min(m, q + extra * (s < n - 1)) for s, q in enumerate(reversed(most))]
        fitting = _fitting(terms, balance, m, recomputes, slots)
        if fitting:
            yield fitting


def _fitting(
    terms: Terms,
    balance: Sequence[int],
    m: int,
    recomputes: Sequence[bool],
    most: Sequence[int],
) -> tuple[int, ...] | None:
    """For each stage as many slots as fit, never more than for the stage before."""
    chain = terms.chain(m)
    slots: list[int] = []
    for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0))):
        q = min(most[s], slots[-1]) if slots else most[s]
        q0 = slots[0] if slots else q  # no skip comes to the first stage
        while q and chain.memory(i, j, q, q0, recomputes[s]) > terms.machine.memory[s]:
            q -= 1
        if q == 0:
            return None
        slots.append(q)
    return tuple(slots)


def _neighbours(terms: Terms, draft: Draft) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Other balances: a layer from one stage to another, borders between move along; with the same
    slots, and with as many of them as fit without recomputation. Other slots: a few more or fewer
    on one stage, and so that none has more than the one before; one more or fewer on several, from
    the first on.
    """
    balance, slots, n, m = draft.balance, draft.slots, len(draft.balance), draft.chunks
    pipelined = draft.schedule == "1f1b"
    if pipelined:
        for s in range(n):
            for step in (-1, 1, 2, 4, -2):
                q = slots[s] + step
                if 1 <= q <= m:
                    left = [max(q, other) for other in slots[:s]]
                    right = [min(q, other) for other in slots[s + 1 :]]
                    yield balance, (*left, q, *right)
        for s in range(1, n):
            for step in (-1, 1):
                most = [q + step for q in slots[: s + 1]]
                if most[-1] >= max((1, *slots[s + 1 : s + 2])) and most[0] <= m:
                    yield balance, (*most, *slots[s + 1 :])
    for distance in range(1, min(n, 4)):
        for s in range(n - distance):
            for a, b in ((s, s + distance), (s + distance, s)):
                if balance[a] > 1:
                    moved = list(balance)
                    moved[a] -= 1
                    moved[b] += 1
                    other = tuple(moved)
                    yield other, slots
                    kept = _fitting(terms, other, m, (False,) * n, slots) if pipelined else None
                    if kept and kept != slots:
                        yield other, kept
