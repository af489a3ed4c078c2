"""``search``: the cuts, micro-batches and slots with the shortest step under 1F1B.

One program over boundaries finds a cut, from the right, stage by stage. For a stage with ``q``
slots let ``F`` and ``R`` be its forward and all that it does to go back, ``pre`` what happens to
one micro-batch to its left, there and back, and ``D`` what happens to its right. Then

    m > q:   T >= pre + m (F+R) + [D - (q-1) F]+ + [D - (q-1) R]+
    m <= q:  T >= pre + max( m (F+R),  F + D + B + (m-1) R,  m F + D + B )

A label of a boundary is the least of the largest of these over the stages to its right, without
what is to its left, and the time ``D`` of these stages. The program runs once for each family of
slots: as many as fit hold more than the stages to the right can bear, and whoever goes forward too
eagerly lets gradients wait. Of storing, recomputing and offloading a stage does what has the least
bound. The player decides between what is found, and single layers and slots are moved as long as
that helps.

Where nothing fits, the same program runs over the largest share of its memory that a stage takes,
from the left: so one run tells it for every number of stages.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from syncpipe.balance.profile import in_bytes
from syncpipe.planner.chain import AHEAD, Mode, doubles
from syncpipe.planner.draft import Draft, Terms, one_f_one_b_form
from syncpipe.planner.machine import Machine
from syncpipe.planner.sizes import MOST, chunk_counts, stage_counts

__all__ = ["Shortage", "even_cut", "search", "search_orders", "shortage"]

#: Differences below this, relative, are rounding.
_NOTICED = 1e-9
#: A limit on memory as sums in another order may meet it.
_ROUNDED = 1 + 1e-12
#: So many of the best drafts for each number of stages are improved, with so many actions to play.
_IMPROVED, _WORK = 32, 1_000_000
#: if they are at most so many times as slow as the best.
_PROMISING = 1.2
#: So many of those that are cut anew near the best one are improved.
_AROUND = 5
#: How far above the lower bound cuts are looked for, step by step.
_STEPS = (1.02, 1.06, 1.15, 1.4, 2.0, 4.0, 16.0, math.inf)
_MOST_DEVICES = 64


@dataclass(frozen=True)
class Cut:
    """What the program found: its bound (or share), the balance, and the slots of each stage."""

    value: float
    balance: tuple[int, ...]
    slots: tuple[int, ...]


def families(n: int, m: int) -> Iterator[tuple[int, ...]]:
    """Slots of each stage: as many as fit (empty), those that hide transfers, the textbook's, half
    of these, a third, a quarter, and one.
    """
    yield ()
    yield tuple(min(m, 2 * (n - s) - 1) for s in range(n))
    for part in (1, 2, 3, 4):
        yield tuple(min(m, -(-(n - s) // part)) for s in range(n))
    yield (1,) * n


class Program:
    """The program for one number of micro-batches.

    Args:
        terms: layers and devices.
        m: number of micro-batches.
    """

    def __init__(self, terms: Terms, m: int) -> None:
        self.terms, self.m = terms, m
        self.chain, self.machine = terms.chain(m), terms.machine
        chain = self.chain
        self._forward, self._backward = doubles(chain.forward_to), doubles(chain.backward_to)
        self._fixed, self._stored = doubles(chain.fixed_to), doubles(chain.stored_to)
        self._shared, self._inputs = doubles([*chain.shared, 0]), doubles([*chain.inputs, 0])
        self._times = self._forward + self._backward
        grows = all(a >= b for a, b in zip(chain.stored, chain.shared, strict=True))
        #: What layers hold at least, before each boundary; empty if more layers may hold less.
        self._least = (self._fixed + self._stored).tolist() if grows else []

    def lowest(self, n: int) -> float:
        """Seconds that no cut into ``n`` stages falls short of.

        A stage has all of its work to do after a micro-batch has come to it, and before the last
        goes on from it: of what is left to the right of ``pre`` it takes an m-th of the rest at
        most.
        """
        speed, times = self.machine.speed[:n], self.chain.time_to
        shared = times[-1] / max(speed) / (1 - (1 - 1 / self.m) ** n)
        return max(shared, self.m * least_load(times, speed)) * (1 - _NOTICED)

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
            found = self.cut(n, slots, limit)
            if found is not None and found.value <= limit * (1 + _NOTICED):
                return found
            if limit == at_most:
                return None
        return None

    def cut(self, n: int, slots: Sequence[int], limit: float) -> Cut | None:
        """One run of the program, within ``limit`` seconds."""
        windows = self._windows(n, limit)
        if windows is None:
            return None
        first = float(slots[0]) if slots else 0.0
        value = right = torch.zeros(1, dtype=torch.float64)
        path: list[tuple[Tensor, Tensor]] = []
        for s in reversed(range(n)):
            i, j = (slice(low, high + 1) for low, high in windows[s : s + 2])
            ways = self._inputs[i] * self.machine.transfer(1.0, s - 1, s) if s else None
            way = torch.zeros(1, dtype=torch.float64)[:, None] if ways is None else ways[:, None]
            asked, last = (float(slots[s]) if slots else 0.0), s == n - 1
            own, q, again = self._stage(s, i, j, asked, first, right, last)
            once = (self._times[j] - self._times[i, None]) / self.machine.speed[s]
            after = right + once + 2 * way + again * last
            total = torch.maximum(torch.maximum(value + once, own) + 2 * way,
                                  after + (self.m - 1) * way)  # fmt: skip
            left = self._times[i, None] / self._fastest(0, s)
            total = total.masked_fill(total + left > limit * (1 + _NOTICED), math.inf)
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

    def shares(self, n: int) -> dict[int, Cut]:
        """For each number of stages up to ``n`` the cut whose largest share of memory is least."""
        count, found, low = len(self.chain), dict[int, Cut](), 0
        value = torch.zeros(1, dtype=torch.float64)
        path: list[tuple[int, Tensor]] = []
        for s in range(n):
            i, j = slice(low, low + len(value)), slice(s + 1, count + 1)
            none = torch.zeros(1, dtype=torch.float64)
            own, _, _ = self._stage(s, i, j, 1.0, 1.0, none, False, share=True)
            value, arg = torch.maximum(value[:, None], own).min(0)
            path.append((low, arg))
            ends = [count]
            for k in reversed(range(s + 1)):
                ends.append(path[k][0] + int(path[k][1][ends[-1] - (k + 1)]))
            balance = tuple(b - a for a, b in pairwise(reversed(ends)))
            found[s + 1] = Cut(float(value[-1]), balance, (1,) * (s + 1))
            low, value = s + 1, value[:-1]  # the next stage has a layer, too
        return found

    def _fastest(self, a: int, b: int) -> float:
        """Speed of the fastest device of some stages."""
        return max(self.machine.speed[a:b], default=1.0)

    def _windows(self, n: int, limit: float) -> list[tuple[int, int]] | None:
        """Where stages can end, if none of them takes longer than its share of the limit."""
        times, speed, m = self.chain.time_to, self.machine.speed[:n], self.m
        fastest, count, slack = max(speed), len(self.chain), _NOTICED * times[-1]
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
                held = self._least[early[-1]] - self.machine.memory[s] * (1 + _NOTICED)
                start = max(start, bisect_left(self._least, held - self._least[-1] * _NOTICED))
            early.append(max(s, min(start, early[-1])))
        early.reverse()
        late[-1] = count if late[-1] >= count else -1
        windows = [*zip(early, late, strict=True)]
        fits = early[0] == 0 and all(a <= b for a, b in windows)
        return windows if fits else None

    def _stage(
        self,
        s: int,
        i: slice,
        j: slice,
        asked: float,
        first: float,
        right: Tensor,
        last: bool,
        *,
        share: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For each stage from ``i`` to ``j`` the least bound without what is to its left, the slots
        for it, and what it recomputes; or the least share of the memory.

        Args:
            s: the stage.
            i: where it may start.
            j: where it may end.
            asked: its slots; 0 for as many as fit.
            first: those of stage 0.
            right: the time of one micro-batch to the right of each end, there and back.
            last: whether it is the last one.
            share: find shares of memory.
        """
        chain, m, speed = self.chain, self.m, self.machine.speed[s]
        limit, known = self.machine.memory[s], bool(chain.peaks)
        f = (self._forward[j] - self._forward[i, None]) / speed
        b = (self._backward[j] - self._backward[i, None]) / speed
        boundaries = torch.arange(len(self._times))
        possible = boundaries[j] > boundaries[i, None]
        cap, none = torch.full_like(f, asked or m), torch.zeros_like(f)
        if limit == math.inf and not share:
            own = self._alone(f, b, b, cap, right, right)
            return own.masked_fill(~possible, math.inf), cap, none
        given = self._inputs[i, None]
        stored = self._stored[j] - self._stored[i, None] + self._shared[i, None]
        fixed = self._fixed[j] - self._fixed[i, None]
        fixed = fixed + chain.transient[i, j] if known else fixed
        popped = chain.popped[i, j] if chain.skips else None

        def memory(q: Tensor, mode: Mode) -> Tensor:
            # With any slots no more wait than are sure to.
            q0 = torch.full_like(q, first) if s and asked else q
            needs = fixed + q * (stored if mode == "store" else given)
            if mode != "store":
                needs = needs + stored - given if known else needs + stored
            if mode == "offload":
                late = (stored - self.machine.host * f).clamp(min=0)
                needs = needs + (q - 1).clamp(max=1) * stored + (q - 2).clamp(min=0) * late
            if known and s:
                needs = needs + (q0 - q).clamp(min=0, max=AHEAD) * given
            elif known:
                needs = needs + (chain.batch - q * given).clamp(min=0)
            if popped is not None:
                waits = (q0 - q).clamp(min=0) if known and mode == "store" else q0
                needs = needs + waits * popped
            return needs

        best = torch.full_like(f, math.inf)
        slots, again = torch.ones_like(f), none
        modes: tuple[Mode, ...] = ("store", "recompute", "offload")
        one = torch.ones_like(f)
        for mode in modes[: 2 + bool(self.machine.host)]:
            least = memory(cap if asked else one, mode)
            if share:
                own, q = least / limit, one
            else:
                q = cap if asked else self._most(cap, least, limit, lambda q: memory(q, mode))  # noqa: B023
                r = b + f if mode == "recompute" else b
                rest = right - f if mode == "recompute" and not last else right
                own = self._alone(f, b, r, q, right, rest)
                if mode == "offload":
                    own = torch.maximum(own, self.terms.link_time(m, stored))
                own = own.masked_fill(least > limit * _ROUNDED, math.inf)
            better = own < best
            best, slots = torch.where(better, own, best), torch.where(better, q, slots)
            again = torch.where(better, f if mode == "recompute" else none, again)
            if (
                mode == "store"
                and not share
                and bool(((q == cap) & (least <= limit * _ROUNDED)).all())
            ):
                break
        return best.masked_fill(~possible, math.inf), slots, again

    def _most(self, cap: Tensor, least: Tensor, limit: float, memory: object) -> Tensor:
        """As many slots as fit, between one and ``cap``, given what one takes."""
        assert callable(memory)
        limit *= _ROUNDED
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

    def _alone(
        self, f: Tensor, b: Tensor, r: Tensor, q: Tensor, right: Tensor, rest: Tensor
    ) -> Tensor:
        """The bound of one stage, without what is to its left."""
        m = self.m
        work = m * (f + r)
        waits = (rest - (q - 1) * f).clamp(min=0) + (rest - (q - 1) * r).clamp(min=0)
        few = torch.maximum(f + (m - 1) * r, m * f) + right + b
        return torch.where(q < m, work + waits, torch.maximum(work, few))


# -- the search -----------------------------------------------------------------------------------


def search(
    terms: Terms,
    *,
    chunks: int | Iterable[int] | None = None,
    stages: int | Iterable[int] | None = None,
) -> list[Draft]:
    """The ways to run the layers under 1F1B that fit, the fastest first.

    Best first: what is known of a number of micro-batches and one of stages is a step time that it
    cannot fall short of. What is found for it depends on nothing but itself and the first devices:
    so a plan on fewer devices is among those for more, and the numbers of micro-batches are the
    same for any memory. One stage is one device that takes micro-batches one after another.

    Args:
        terms: layers and devices; stage ``s`` is on device ``s``.
        chunks: the number of micro-batches, or those to choose from; by default those of
            :func:`.chunk_counts`.
        stages: the number of stages, or those to choose from; by default all up to the number of
            devices.

    Returns:
        The best for each number of stages that was not left out; empty if nothing fits.

    Raises:
        ValueError: an argument does not fit.
    """
    machine, layers = terms.machine, len(terms.profile.layers)
    usual, extra = chunk_counts(terms.profile, len(machine), terms.batch_size, chunks)
    counts = stage_counts(layers, len(machine), stages)
    programs = {m: Program(terms, m) for m in (*usual, *extra)}
    tasks: list[tuple[float, int, int, bool]] = []
    for m, program in programs.items():
        python = terms.interpreter(one_f_one_b_form(m, (1,)), (layers,), ["store"])
        tasks += [(_rounded(max(program.lowest(n), python)), m, n, False) for n in counts]
    heapq.heapify(tasks)
    found: dict[int, dict[Draft, None]] = {}
    fastest = math.inf
    while tasks:
        low, m, n, bounded = heapq.heappop(tasks)
        if low >= fastest * (1 - _NOTICED):
            break
        program = programs[m]
        if not bounded:
            cut = program.minimise(n, () if n > 1 else (1,), at_most=fastest * (1 + 1e-6), low=low)
            if cut is not None:
                heapq.heappush(tasks, (max(low, _rounded(cut.value)), m, n, True))
            continue
        for draft in _drafts(program, n, low):
            found.setdefault(n, {})[draft] = None
            fastest = min(fastest, draft.time)
    best = {n: min(drafts, key=lambda draft: draft.rank) for n, drafts in found.items()}
    lead = sorted(best, key=lambda n: best[n].rank)
    left = 2 * _WORK
    for n in lead:
        work = min(_WORK, left)
        left -= work
        for draft in sorted(found[n], key=lambda draft: draft.rank)[:_IMPROVED]:
            if draft.time < fastest * _PROMISING and draft.bound < fastest * (1 - _NOTICED):
                better, work = improved(terms, draft, work)
                best[n] = min(best[n], better, key=lambda draft: draft.rank)
                fastest = min(fastest, better.time)
            if work <= 0:
                break
        left += work
    if lead:
        n = min(best, key=lambda n: best[n].rank)
        best[n] = _around(programs[best[n].chunks], best[n])
    return sorted(best.values(), key=lambda draft: draft.rank)


def _around(program: Program, best: Draft) -> Draft:
    """The best after cutting anew for slots near its own."""
    terms, m, n, before = program.terms, program.m, len(best.balance), math.inf
    while n > 1 and best.time < before and best.time > best.bound * (1 + _NOTICED):
        before, found = best.time, dict[Draft, None]()
        for step in (0, 1, 2, -1):
            more = [step] * (n - 1) + [0]
            near = zip(best.form.in_flight, more, strict=True)
            slots = [min(m, max(1, q + extra)) for q, extra in near]
            cut = program.minimise(n, slots, at_most=best.time)
            if cut is None:
                continue
            for other in (tuple(slots), best.form.in_flight, *fitted(terms, cut.balance, m)):
                draft = terms.draft(one_f_one_b_form(m, other), cut.balance)
                if draft is not None and draft.excess <= 1:
                    found[draft] = None
        for draft in sorted(found, key=lambda draft: draft.rank)[:_AROUND]:
            best = min(best, improved(terms, draft, _WORK // 5)[0], key=lambda draft: draft.rank)
    return best


def _rounded(bound: float) -> float:
    """So that of what takes as long fewer micro-batches come first."""
    return float(f"{bound * (1 - _NOTICED):.9e}")


def _drafts(program: Program, n: int, low: float) -> Iterator[Draft]:
    """What becomes of the cuts of all families, with the slots found and with those that suit."""
    terms, m, fastest = program.terms, program.m, math.inf
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def tried(balance: tuple[int, ...], slots: Sequence[int]) -> Draft | None:
        nonlocal fastest
        if (balance, tuple(slots)) in seen:
            return None
        seen.add((balance, tuple(slots)))
        draft = terms.draft(one_f_one_b_form(m, tuple(slots)), balance)
        if draft is None or draft.excess > 1:
            return None
        fastest = min(fastest, draft.time)
        return draft

    for limits in dict.fromkeys(families(n, m)) if n > 1 else [(1,)]:
        if fastest <= low * (1 + _NOTICED):
            return
        cut = program.minimise(n, limits, at_most=fastest, low=low)
        for _ in range(2):
            if cut is None:
                break
            own = [draft] if (draft := tried(cut.balance, cut.slots)) else []
            own += [
                d for slots in fitted(terms, cut.balance, m) if (d := tried(cut.balance, slots))
            ]
            yield from own
            if n == 1 or not own or fastest <= low * (1 + _NOTICED):
                break
            slots = min(own, key=lambda draft: draft.rank).form.in_flight
            cut = program.minimise(n, slots, at_most=fastest, low=low)


def fitted(terms: Terms, balance: Sequence[int], m: int) -> Iterator[tuple[int, ...]]:
    """Slots for a cut, as many of them as fit: those of families, and those that suit it.

    A stage needs to be busy until its first micro-batch is back. If that takes ``D`` to the end and
    back, and one leaves the pipeline every ``P`` seconds, so many more than one are on their way
    meanwhile: ``1 + D / P``, rounded up. Even stages without transfers give the textbook's numbers.
    """
    n = len(balance)
    found = [*families(n, m)][1:3]
    costs = terms.costs(one_f_one_b_form(m, (1,) * n), balance)
    for again in (0, 1):
        times = [f * (1 + again) + b for f, b in zip(costs.forward, costs.backward_input,
                 strict=True)]  # fmt: skip
        pace = max(*times, *costs.transfer, 1e-30)
        trip, most = 0.0, [1.0]
        for s in reversed(range(n - 1)):
            trip += times[s + 1] + 2 * costs.transfer[s]
            most.append(1 + math.ceil(trip / pace - _NOTICED))
        for extra in (0, 1):
            found.append(tuple(
                int(min(m, q + extra * (s < n - 1))) for s, q in enumerate(reversed(most))
            ))  # fmt: skip
    for limits in dict.fromkeys(found):
        for recomputes in (False, True):
            if slots := _fitting(terms, balance, m, recomputes, limits):
                yield slots


def _fitting(
    terms: Terms, balance: Sequence[int], m: int, recomputes: bool, limits: Sequence[int]
) -> tuple[int, ...] | None:
    """For each stage as many slots as fit, never more than for the stage before.

    Where a stage stores and not one fits, it recomputes, if it may.
    """
    chain, slots = terms.chain(m), list[int]()
    for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0))):
        most = min(limits[s], slots[-1]) if slots else limits[s]
        for mode in ("store", "recompute") if recomputes else ("store",):
            q = most
            while q:
                q0 = slots[0] if slots else q
                if chain.memory(i, j, q, q0, mode) <= terms.machine.memory[s]:
                    break
                q -= 1
            if q and (mode == "recompute" or not recomputes or q == most):
                break
        if not q:
            return None
        slots.append(q)
    return tuple(slots)


def improved(terms: Terms, draft: Draft, work: int) -> tuple[Draft, int]:
    """A draft at least as good, by moving single layers and slots.

    Args:
        terms: of the search.
        draft: one that fits, under any schedule.
        work: so many actions may be played, more or less.

    Returns:
        The draft, and what is left of the work.
    """
    actions, changed = sum(map(len, draft.form.rows)), draft.form.n > 1
    while changed:
        changed = False
        for balance, slots in _neighbours(terms, draft):
            if work <= 0 or (draft.time <= draft.bound * (1 + _NOTICED) and not slots):
                return draft, work
            form = one_f_one_b_form(draft.chunks, slots) if slots else draft.form
            at_most = draft.time if draft.excess <= 1 else math.inf
            other = terms.draft(form, balance, at_most=at_most)
            work -= actions if other else actions // 16
            if other and _better(other, draft):
                draft, changed = other, True
    return draft, work


def _better(draft: Draft, than: Draft) -> bool:
    """Fits better, is faster, or as fast with fewer in flight."""
    if draft.excess != than.excess:
        return draft.excess < than.excess
    if draft.time < than.time * (1 - _NOTICED):
        return True
    fewer = sum(draft.form.in_flight) < sum(than.form.in_flight)
    return draft.time <= than.time and fewer


def _neighbours(
    terms: Terms, draft: Draft
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """Other balances: a layer from one stage to another, boundaries between move along; under 1F1B
    with the same slots, and with as many of them as fit without recomputation. Other slots: a few
    more or fewer on one stage, and so that none has more than the one before; one more or fewer on
    several, from the first on.
    """
    balance, slots, n, m = draft.balance, draft.form.slots, draft.form.n, draft.chunks
    if slots:
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
    for far in range(1, min(n, 4)):
        for s in range(n - far):
            for a, b in ((s, s + far), (s + far, s)):
                if balance[a] > 1:
                    moved = list(balance)
                    moved[a] -= 1
                    moved[b] += 1
                    other = tuple(moved)
                    yield other, slots
                    if slots:
                        fewer = _fitting(terms, other, m, False, slots)
                        if fewer and fewer != slots:
                            yield other, fewer


def search_orders(terms: Terms, **choice: object) -> tuple[tuple[int, ...], list[Draft]]:
    """The order of the devices with the fastest plan, and what was found for it.

    Args:
        terms: layers and devices, of which :meth:`.Machine.orders` are tried.
        choice: as for :func:`search`.

    Returns:
        The order, and the plans for ``machine.ordered(order)``; the order as given, and none, if
        nothing fits.
    """
    best: tuple[tuple[int, ...], list[Draft]] = (tuple(range(len(terms.machine))), [])
    for order in terms.machine.orders():
        found = search(terms.on(terms.machine.ordered(order)), **choice)  # type: ignore[arg-type]
        if found and (not best[1] or found[0].time < best[1][0].time * (1 - _NOTICED)):
            best = order, found
    return best


# -- nothing fits ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shortage:
    """The placement that comes nearest to fitting, and what would make one fit.

    Attributes:
        draft: the placement.
        limits: bytes that each device has.
        stage: the one that exceeds its limit by the largest factor.
        devices: the smallest number of devices like these that would do, up to 64; None if that
            is too few, or these are not alike.
        batch_size: a large one that fits on these devices, the largest of those that were tried;
            None if none does.
    """

    draft: Draft
    limits: tuple[float, ...]
    stage: int
    devices: int | None
    batch_size: int | None

    @property
    def missing(self) -> float:
        """Bytes that the stage lacks."""
        return self.draft.memory[self.stage] - self.limits[self.stage]

    @property
    def memory_per_device(self) -> float:
        """Bytes on the largest device that would do, if all grow by the same factor."""
        return self.draft.excess * max(self.limits)

    def explained(self, terms: Terms) -> str:
        """Which stage misses by how much, and what would make it fit."""
        draft, s, machine = self.draft, self.stage, terms.machine
        start = sum(draft.balance[:s])
        names = [layer.name for layer in terms.profile.layers[start : start + draft.balance[s]]]
        layers = (
            f"layer {names[0]!r}" if len(names) == 1 else f"layers {names[0]!r} to {names[-1]!r}"
        )
        again = {"store": "", "recompute": ", recomputing its forward", "offload": ", offloading"}
        more = in_bytes(self.memory_per_device * (1 + 1e-9), up=True)
        ways = [f"{more} on each device"] if machine.uniform else []
        if self.devices is not None:
            ways.append(f"{self.devices} such devices")
        if self.batch_size is not None:
            ways.append(f"batch_size={self.batch_size}")
        ways.append("a smaller param_scale (an optimizer with less state)")
        if not machine.uniform:
            ways.append("the devices in another order")
        return (
            f"no plan fits into memory. Nearest comes balance={list(draft.balance)} with "
            f"chunks={draft.chunks} under '1f1b': stage {s} ({layers}) needs "
            f"{in_bytes(draft.memory[s], up=True)}{again[draft.modes[s]]}, "
            f"{in_bytes(self.missing, up=True)} more than the {in_bytes(self.limits[s])} of "
            f"{machine.name(s)}. What would make it fit: {', or '.join(ways)}"
        )


def shortage(
    terms: Terms,
    *,
    chunks: int | Iterable[int] | None = None,
    stages: int | Iterable[int] | None = None,
) -> Shortage | None:
    """Explains why :func:`search` finds nothing, with the same arguments.

    The least memory is taken with the smallest micro-batches, one slot for each stage, and with
    recomputation or offload where that helps; so only these are looked at.

    Returns:
        The placement that comes nearest; None if there is one that fits.

    Raises:
        ValueError: an argument does not fit.
    """
    machine, layers = terms.machine, len(terms.profile.layers)
    chunks = chunks if chunks is None or isinstance(chunks, int) else tuple(chunks)
    usual, extra = chunk_counts(terms.profile, len(machine), terms.batch_size, chunks)
    m = max(usual + extra)
    counts = stage_counts(layers, len(machine), stages)
    found = Program(terms, m).shares(max(counts))
    nearest = min((found[n] for n in counts), key=lambda cut: cut.value)
    if nearest.value <= 1:
        return None
    draft = terms.draft(one_f_one_b_form(m, (1,) * len(nearest.balance)), nearest.balance)
    assert draft is not None
    limits = machine.memory[: len(nearest.balance)]
    shares = [a / b for a, b in zip(draft.memory, limits, strict=True)]
    enough = None
    if stages is None and machine.uniform:
        many = terms.on(Machine.even(_MOST_DEVICES, machine.memory[0], host=machine.host))
        more = Program(many, m).shares(min(_MOST_DEVICES, layers))
        enough = next((n for n in sorted(more) if n > len(machine) and more[n].value <= 1), None)
    return Shortage(
        draft, limits, shares.index(max(shares)), enough, _largest_batch(terms, counts, chunks)
    )


def _largest_batch(
    terms: Terms, counts: Sequence[int], chunks: int | Sequence[int] | None
) -> int | None:
    """The largest mini-batch that fits, a multiple of the number of micro-batches if that is given.

    Memory grows with the mini-batch; so bisection finds it.
    """
    wanted: Sequence[int | None]
    if chunks is None:  # micro-batches of one sample, or as many as may be
        wanted = (None,) if terms.batch_size <= MOST else (MOST, None)
    else:
        wanted = (chunks,) if isinstance(chunks, int) else chunks
    best = 0
    for m in wanted:
        low, high = 0, terms.batch_size // m if m else min(terms.batch_size, MOST + 1)
        while high - low > 1:
            k = (low + high) // 2
            size, number = (k * m, m) if m else (k, k)
            smaller = Terms(terms.profile, terms.machine, size, terms.param_scale)
            found = Program(smaller, number).shares(max(counts))
            fits = any(found[n].value <= 1 for n in counts)
            low, high = (k, high) if fits else (low, k)
        best = max(best, low * (m or 1))
    return best or None


# -- even cuts ------------------------------------------------------------------------------------


def even_cut(times: Sequence[float], n: int, speed: Sequence[float] = ()) -> tuple[int, ...]:
    """Cuts into ``n`` stages, none empty, with the largest as small as may be (but for rounding,
    and nearly so for devices of different speed).

    Args:
        times: the sum of everything before each boundary.
        n: at most as many as there are layers.
        speed: of the device of each stage, by which its time is divided; empty for equal ones.
    """
    speed, count = speed or (1.0,) * n, len(times) - 1
    load, ends = least_load(times, speed), [0]
    for s, v in enumerate(speed):
        i = ends[-1]
        ends.append(min(max(_far(times, i, load * v), i + 1), count - (n - 1 - s)))
    ends[-1] = count
    return tuple(j - i for i, j in pairwise(ends))


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
            i = _far(times, i, load * v)
        low, high = (low, load) if i == count else (load, high)
        load = (low + high) / 2
    return high


def _far(times: Sequence[float], i: int, load: float) -> int:
    """Where a stage from boundary ``i`` ends, if it takes as much as it may."""
    return bisect_right(times, times[i] + load * (1 + 1e-11)) - 1
