"""``search``: the cuts, micro-batches and slots with the shortest step.

For 1F1B a program over boundaries finds the cut with the least bound, once for each family of
slots: as many as fit hold more than the stages to the right can bear, and whoever goes forward too
eagerly lets gradients wait. The player decides between what is found, and single layers and slots
are moved as long as that helps.

The program goes from the right, stage by stage. For a stage with ``q`` slots let ``F`` and ``R`` be
its forward and all that it does to go back, ``pre`` what happens to one micro-batch to its left,
there and back, and ``D`` what happens to its right. Then

    m > q:   T >= pre + m (F+R) + [D - (q-1) F]+ + [D - (q-1) R]+
    m <= q:  T >= pre + max( m (F+R),  F + D + B + (m-1) R,  m F + D + B )

A label of a boundary is the least of the largest of these over the stages to its right, without
what is to its left, and the time ``D`` of these stages. Of storing, recomputing and offloading a
stage does what has the least bound.

What is found for 1F1B says how many devices and micro-batches are worth a look under other
schedules. For these the layers are cut anew, evenly at first, and moved one by one as long as the
played step becomes shorter.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from syncpipe.balance import balance_cost
from syncpipe.balance.profile import in_bytes
from syncpipe.planner.chain import Mode, chunk_counts, doubles, ends_of, sizes_of, stage_counts
from syncpipe.planner.draft import Draft, Form, Terms, one_f_one_b_form
from syncpipe.planner.machine import Machine
from syncpipe.schedules import SCHEDULES, auto

__all__ = [
    "ANY", "AUTO", "LAYOUTS", "TITLES", "NoPlan", "Program", "check_schedule", "choose",
    "families", "least_largest", "search", "search_orders", "shortage", "variants",
]  # fmt: skip

#: So many actions are played for another schedule, and for a line of a comparison; and so many
#: cells it has at most.
_LONG, _SHORT, _CELLS = 300_000, 30_000, 4096
#: So many of the best drafts for each number of stages are improved, with so many actions to play:
#: at first one of each cut, and others of it with what is left.
_IMPROVED, _WORK = 32, 400_000
#: if they are at most so many times as slow as the best.
_PROMISING = 1.2
#: So many of those that are cut anew near the best one are improved, with so many actions each.
_AROUND, _EACH = 5, 200_000
_MOST_DEVICES = 64

#: Differences below this, relative, are rounding.
NOTICED = 1e-9
#: A limit on memory as sums in another order may meet it.
_ROUNDED = 1 + 1e-12
#: How far above the lower bound cuts are looked for, step by step.
_STEPS = (1.05, 1.3, 2.0, 4.0, math.inf)

Slots = tuple[int, ...]
Balance = tuple[int, ...]
Chunks = int | Iterable[int] | None


class NoPlan(ValueError):
    """Nothing fits into memory."""


def _rank(draft: Draft) -> tuple[float, ...]:
    return draft.rank


class Cut(NamedTuple):
    """Its bound (or share of memory), the balance, and the slots of each stage."""

    value: float
    balance: tuple[int, ...]
    slots: tuple[int, ...]


class Program:
    """The program for one number of micro-batches."""

    def __init__(self, terms: Terms, m: int) -> None:
        self.terms, self.count = terms, m
        self.chain, self.machine = terms.chain(m), terms.machine
        #: The last one may be smaller, and counts as the part of the others that it is.
        self.m = terms.batch_size / sizes_of(terms.batch_size, m)[0]
        self._sums = self.chain.sums["time"]
        self._times = doubles(self._sums)
        self._inputs = doubles((*self.chain.inputs, 0.0))
        grows = all(a >= b for a, b in zip(self.chain.stored, self.chain.shared, strict=True))
        least = zip(self.chain.sums["fixed"], self.chain.sums["stored"], strict=True)
        #: What layers hold at least, before each boundary; empty if more layers may hold less.
        self._least = [fixed + stored for fixed, stored in least] if grows else []

    def lowest(self, n: int) -> float:
        """Seconds that no cut into ``n`` stages falls short of.

        A stage has all of its work to do after a micro-batch has come to it, and before the last
        goes on from it: of what is left to the right of ``pre`` it takes an m-th of the rest at
        most.
        """
        speed, m = self.machine.speed[:n], self.m
        shared = self._sums[-1] / max(speed) / (1 - (1 - 1 / m) ** n)
        longest = max(b - a for a, b in pairwise(self._sums)) / max(speed)
        return max(shared, m * longest, m * self._sums[-1] / sum(speed)) * (1 - NOTICED)

    def minimise(
        self, n: int, slots: Sequence[int], at_most: float = math.inf, low: float = 0.0
    ) -> Cut | None:
        """The cut into ``n`` stages with the least bound, for these slots (empty: as many as fit);
        None if there is none within ``at_most`` seconds. ``low``: a bound that is known.
        """
        low = max(low, self.lowest(n))
        for step in _STEPS:
            limit = min(at_most, step * low)
            found = self._cut(n, slots, limit * (1 + NOTICED))
            if found is not None or limit == at_most:
                return found
        return None

    def _windows(self, n: int, limit: float) -> list[tuple[int, int]]:
        """Where stages can begin and end, if none of them has more work than the limit, and none
        that begins later holds less than those to its right."""
        sums, count = self._sums, len(self.chain)
        speed, fastest, slack = self.machine.speed[:n], max(self.machine.speed[:n]), NOTICED
        late, early = [0], [count]
        for v in speed:
            time = sums[late[-1]]  # that many seconds are gone before its first micro-batch
            time += v * (limit - time / fastest) / self.m + slack * sums[-1]
            late.append(min(count - (n - len(late)), bisect_right(sums, time) - 1))
        for v, memory in zip(reversed(speed), reversed(self.machine.memory[:n]), strict=True):
            end, rest = early[-1], 1 - v / (self.m * fastest)
            time = (sums[end] - v * limit / self.m) / rest - slack * sums[-1] if rest > 0 else 0.0
            start = bisect_left(sums, time)
            if self._least:
                held = self._least[end] - memory * (1 + slack) - self._least[-1] * slack
                start = max(start, bisect_left(self._least, held))
            early.append(max(n - len(early), min(start, end - 1)))
        return [*zip(reversed(early), late, strict=True)]

    def _cut(self, n: int, slots: Sequence[int], limit: float) -> Cut | None:
        """One run of the program, within ``limit`` seconds."""
        windows, count = self._windows(n, limit), len(self.chain)
        if windows[0][0] > 0 or windows[n][1] < count or any(a > b for a, b in windows):
            return None
        value = right = doubles([0.0])
        path: list[tuple[Tensor, Tensor]] = []
        for s in reversed(range(n)):
            i, j = (slice(low, high + 1) for low, high in windows[s : s + 2])
            way = doubles([0.0])[:, None]
            if s:
                way = self._inputs[i, None] * self.machine.transfer(1.0, s - 1, s)
            asked = (slots[s], slots[0]) if slots else None
            own, q, recomputed = self._stage(s, i, j, asked, right, s == n - 1)
            once = (self._times[j] - self._times[i, None]) / self.machine.speed[s]
            after = right + once + 2 * way + recomputed * (s == n - 1)
            total = torch.maximum(value + once, own) + 2 * way
            total = torch.maximum(total, after + (self.m - 1) * way)
            left = self._times[i, None] / max(self.machine.speed[:s], default=1.0)
            total = total.masked_fill(total + left > limit, math.inf)
            # Of equally good ones that where this stage has least.
            arg = (total + 1e-7 * own).argmin(1)
            rows = torch.arange(len(arg))
            value, right = total[rows, arg], after[rows, arg]
            if not value.isfinite().any():
                return None
            path.append((arg + windows[s + 1][0], q[rows, arg]))
        if not value[0] <= limit:
            return None
        ends, found = [0], []
        for (low, _), (end, q) in zip(windows, reversed(path), strict=False):
            at = ends[-1] - low
            found.append(int(q[at]))
            ends.append(int(end[at]))
        held = tuple(accumulate(found, min))  # more than the stage before has are of no use
        return Cut(float(value[0]), tuple(b - a for a, b in pairwise(ends)), held)

    def _stage(
        self, s: int, i: slice, j: slice, asked: tuple[int, int] | None, right: Tensor, last: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For stage ``s`` from each ``i`` to each ``j`` the least bound without what is to its
        left, the slots for it, and what it recomputes.

        ``asked``: its slots and those of stage 0, or None for as many as fit. ``right``: the time
        of one micro-batch to the right of each end, there and back.
        """
        chain, m, speed = self.chain, self.m, self.machine.speed[s]
        limit, run = self.machine.memory[s] * _ROUNDED, chain.runs(i, j, s == 0)
        f, b = run.forward / speed, run.backward / speed
        boundaries = torch.arange(len(self._times))
        cap = torch.full_like(f, asked[0] if asked else self.count)
        best, slots, recomputed = torch.full_like(f, math.inf), torch.ones_like(f), f * 0
        for mode in self.terms.modes if limit < math.inf else self.terms.modes[:1]:

            def over(q: Tensor, mode: Mode = mode) -> Tensor:
                # Where any slots are possible no more skips wait than are sure to.
                q0 = torch.full_like(q, asked[1]) if s and asked else q
                held = chain.held(run, q, q0, mode, self.machine.host * f)
                found: Tensor = held.most(q) - limit
                return found

            q, more = cap, over(cap)
            if not asked and bool((more > 0).any()):
                one, least = torch.ones_like(f), over(torch.ones_like(f))
                for _ in range(3):  # memory grows in two or three straight lines
                    each = ((more - least) / (q - 1).clamp(min=1)).clamp(min=1e-30)
                    fewer = torch.minimum(1 + (-least / each).floor(), q - 1).clamp(min=1)
                    q = torch.where(more > 0, fewer, q)
                    more = over(q)
                    if bool((more <= 0).all()):
                        break
                q, more = torch.where(more > 0, one, q), torch.where(more > 0, least, more)
            possible = more <= 0
            r = b + f if mode == "recompute" else b
            rest = right - f if mode == "recompute" and not last else right
            waits = (rest - (q - 1) * f).clamp(min=0) + (rest - (q - 1) * r).clamp(min=0)
            few = torch.maximum(f + (m - 1) * r, m * f) + right + b
            work = m * (f + r)
            own = torch.where(q < self.count, work + waits, torch.maximum(work, few))
            if mode == "offload":
                own = torch.maximum(own, self.terms.link_time(m, run.stored))
            own = own.masked_fill(~possible, math.inf)
            better = own < best
            best, slots = torch.where(better, own, best), torch.where(better, q, slots)
            recomputed = torch.where(better, r - b, recomputed)
            if mode == "store" and bool((possible & (q == cap)).all()):
                break
        return best.masked_fill(boundaries[j] <= boundaries[i, None], math.inf), slots, recomputed

    def shares(self, n: int) -> list[Cut]:
        """For each number of stages up to ``n`` the cut whose largest share of memory is least."""
        count, host = len(self.chain), self.machine.host

        def share(stage: int, _: int) -> Tensor:
            speed, limit = self.machine.speed[stage - 1], self.machine.memory[stage - 1]
            run = self.chain.runs(slice(0, count), slice(0, count + 1), stage == 1)
            one, taken = torch.ones_like(run.forward), host * run.forward / speed
            held = [self.chain.held(run, one, one, mode, taken) for mode in self.terms.modes]
            return torch.stack([each.most(1) for each in held]).min(0)[0] / limit

        values, stages = least_largest(count, n, 1, share)
        return [
            Cut(float(values[k, count]), tuple(j - i for i, j, _ in stages(k)), (1,) * k)
            for k in range(1, n + 1)
        ]


def least_largest(
    layers: int,
    devices: int,
    width: int,
    cost: Callable[[int, int], Tensor],
    both: Callable[[Tensor, Tensor], Tensor] = torch.maximum,
) -> tuple[Tensor, Callable[[int], tuple[tuple[int, int, int], ...]]]:
    """The cuts whose most costly stage costs least, by the number of devices that are used.

    ``width`` devices at most share a stage. ``cost`` is that of stages that end with so many
    devices used, on so many of these: ``[L, L + 1]``, of the layers from ``i`` up to ``j``;
    ``both`` that of a stage and those before it.

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


# -- 1F1B ------------------------------------------------------------------------------------------


def search(
    terms: Terms, *, chunks: Chunks = None, stages: int | Iterable[int] | None = None
) -> list[Draft]:
    """The ways to run the layers under 1F1B that fit, the fastest first.

    Best first: what is known of a number of micro-batches and one of stages is a step time that it
    cannot fall short of. What is found for it depends on nothing but itself and the first devices:
    so a plan on fewer devices is among those for more, and the numbers of micro-batches are the
    same for any memory. One stage is one device that takes micro-batches one after another.

    Returns:
        The best for each number of stages that was not left out; empty if nothing fits.

    Raises:
        ValueError: such numbers of micro-batches or stages are not possible.
    """
    layers = len(terms.profile.layers)
    usual, extra = chunk_counts(terms.profile, len(terms.machine), terms.batch_size, chunks)
    counts = stage_counts(layers, len(terms.machine), stages)
    programs = {m: Program(terms, m) for m in (*usual, *extra)}
    tasks: list[tuple[float, int, int, bool]] = []
    for m, program in programs.items():
        python = terms.interpreter(m, (layers,), [0])
        tasks += [(_rounded(max(program.lowest(n), python)), m, n, False) for n in counts]
    heapq.heapify(tasks)
    found: dict[int, dict[Draft, float]] = {}
    fastest = math.inf
    while tasks and tasks[0][0] < fastest * (1 - NOTICED):
        low, m, n, bounded = heapq.heappop(tasks)
        if bounded:
            for draft in _drafts(programs[m], n, low):
                found.setdefault(n, {})[draft] = low
                fastest = min(fastest, draft.time)
        elif cut := programs[m].minimise(n, (), at_most=fastest * (1 + 1e-6), low=low):
            heapq.heappush(tasks, (max(low, _rounded(cut.value)), m, n, True))
    best = {n: min(drafts, key=_rank) for n, drafts in found.items()}
    left = 2 * _WORK
    for n in sorted(best, key=lambda n: best[n].rank):
        work = min(_WORK, left)
        left -= work
        ranked = sorted(found[n], key=_rank)[:_IMPROVED]
        cuts: dict[tuple[int, Balance], Draft] = {}
        for draft in ranked:
            cuts.setdefault((draft.chunks, draft.balance), draft)
        for draft in dict.fromkeys([*cuts.values(), *ranked]):
            if draft.time < fastest * _PROMISING and found[n][draft] < fastest * (1 - NOTICED):
                better, work = improved(terms, draft, work)
                best[n] = min(best[n], better, key=_rank)
                fastest = min(fastest, better.time)
        left += work
    if best:
        n = min(best, key=lambda n: best[n].rank)
        best[n] = _around(programs[best[n].chunks], best[n])
    return sorted(best.values(), key=_rank)


def _rounded(bound: float) -> float:
    """So that of what takes as long fewer micro-batches come first."""
    return float(f"{bound * (1 - NOTICED):.9e}")


def families(n: int, m: int) -> list[Slots]:
    """Slots of each stage: as many as fit (empty), those that hide transfers, the textbook's, half
    of these, a third, a quarter, and one.
    """
    parts = [tuple(min(m, -(-(n - s) // part)) for s in range(n)) for part in (1, 2, 3, 4)]
    return [(), tuple(min(m, 2 * (n - s) - 1) for s in range(n)), *parts, (1,) * n]


def _drafts(program: Program, n: int, low: float) -> Iterator[Draft]:
    """What becomes of the cuts of all families, with the slots found and with those that suit."""
    fastest = math.inf
    for family in dict.fromkeys(families(n, program.count)) if n > 1 else [(1,)]:
        slots = family
        for _ in range(2):
            if fastest <= low * (1 + NOTICED):
                return
            own = _cut_anew(program, n, slots, fastest, low)
            yield from own
            if n == 1 or not own:
                break
            best = min(own, key=_rank)
            fastest, slots = min(fastest, best.time), best.form.in_flight


def _cut_anew(
    program: Program, n: int, slots: Slots, at_most: float, low: float = 0.0, *others: Slots
) -> list[Draft]:
    """The cut with the least bound for these slots: what fits of it with them, with others, and
    with those that suit it, as many of them as fit.
    """
    terms, m = program.terms, program.count
    cut = program.minimise(n, slots, at_most=at_most, low=low)
    if cut is None:
        return []
    suiting = (*families(n, m)[1:3], _suiting(terms, cut.balance, m))
    fitting = (_fitting(terms, cut.balance, m, modes, some) for some in suiting for modes in (1, 2))
    every = dict.fromkeys((cut.slots, *others, *filter(None, fitting)))
    drafts = (terms.draft(one_f_one_b_form(m, some), cut.balance) for some in every)
    return [draft for draft in drafts if draft is not None and draft.excess <= 1]


def _suiting(terms: Terms, balance: Balance, m: int) -> Slots:
    """Slots that keep the stages of a cut busy until their first micro-batch is back.

    If that takes ``D`` to the end and back, and one leaves the pipeline every ``P`` seconds, there
    are ``1 + D / P`` on their way, rounded up: the textbook's numbers for even stages.
    """
    costs = terms.costs(one_f_one_b_form(m, (1,) * len(balance)), balance)
    times = costs.times["backward"]
    times = [f + b for f, b in zip(costs.forward, times, strict=True)]
    pace = max(*times, *costs.transfer, 1e-30)
    ways = zip(times[1:], costs.transfer, strict=True)
    trips = accumulate((time + 2 * way for time, way in reversed([*ways])), initial=0.0)
    slots = [min(m, 1 + math.ceil(trip / pace - NOTICED)) for trip in trips]
    return tuple(reversed(slots))


def _fitting(
    terms: Terms, balance: Balance, m: int, modes: int, limits: Sequence[int]
) -> Slots | None:
    """For each stage as many slots as fit where it stores, or recomputes if two modes are possible;
    never more than for the stage before.
    """
    chain, slots = terms.chain(m), list[int]()
    for s, (i, j) in enumerate(ends_of(balance)):
        most = min([limits[s], *slots[-1:]])
        for mode in terms.modes[:modes]:
            q = most
            while q and chain.memory(i, j, q, (*slots, q)[0], mode) > terms.machine.memory[s]:
                q -= 1
            if q == most:
                break
        if not q:
            return None
        slots.append(q)
    return tuple(slots)


def _around(program: Program, best: Draft) -> Draft:
    """The best after cutting anew for slots near its own."""
    m, n, before = program.count, len(best.balance), math.inf
    while n > 1 and best.time < before and best.time > best.bound * (1 + NOTICED):
        before, found, own = best.time, dict[Draft, None](), best.form.in_flight
        for step in (0, 1, 2, -1):
            slots = tuple(min(m, max(1, q + step)) for q in own[:-1]) + own[-1:]
            found |= dict.fromkeys(_cut_anew(program, n, slots, best.time, 0.0, own))
        for draft in sorted(found, key=_rank)[:_AROUND]:
            best = min(best, improved(program.terms, draft, _EACH)[0], key=_rank)
    return best


def search_orders(terms: Terms, **choice: Any) -> tuple[tuple[int, ...], list[Draft]]:
    """The order of the devices (:meth:`.Machine.orders`) with the fastest plan, and what
    :func:`search` found for it; the order as given, and none, if nothing fits.
    """
    best: tuple[tuple[int, ...], list[Draft]] = (tuple(range(len(terms.machine))), [])
    for order in terms.machine.orders():
        found = search(terms.on(terms.machine.ordered(order)), **choice)
        if found and (not best[1] or found[0].time < best[1][0].time * (1 - NOTICED)):
            best = order, found
    return best


def improved(terms: Terms, draft: Draft, work: int) -> tuple[Draft, int]:
    """A draft at least as good, by moving single layers and slots, under any schedule; and what is
    left of the actions that may be played for it.
    """
    actions, changed = sum(map(len, draft.form.schedule.actions)), draft.form.n > 1
    while changed:
        changed = False
        for balance, slots in _neighbours(terms, draft):
            if work <= 0 or (draft.time <= draft.bound * (1 + NOTICED) and not slots):
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
    fewer = sum(draft.form.in_flight) < sum(than.form.in_flight)
    return draft.time < than.time * (1 - NOTICED) or (draft.time <= than.time and fewer)


def _neighbours(terms: Terms, draft: Draft) -> Iterator[tuple[Balance, Slots | None]]:
    """Other slots under 1F1B: a few more or fewer on one stage, and so that none has more than the
    one before it; one more or fewer on several, from the first on. Other balances: a layer from one
    stage to another, boundaries between move along; under 1F1B with the same slots, and with as
    many of them as fit without recomputation.
    """
    balance, slots, n, m = draft.balance, draft.form.slots, draft.form.n, draft.chunks
    for s in range(n) if slots else ():
        assert slots
        for step in (-1, 1, 2, 4, -2):
            q = slots[s] + step
            if 1 <= q <= m:
                left, right = slots[:s], slots[s + 1 :]
                yield balance, (*(max(q, x) for x in left), q, *(min(q, x) for x in right))
        for step in (-1, 1) if s else ():
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
                    yield tuple(moved), slots
                    fewer = slots and _fitting(terms, tuple(moved), m, 1, slots)
                    if fewer and fewer != slots:
                        yield tuple(moved), fewer


# -- other schedules -------------------------------------------------------------------------------

#: Asks for the fastest plan, whatever its schedule; and for a schedule made to measure.
ANY, AUTO = "any", "auto"

_Shape = Literal["line", "rounds", "v"]
#: What schedules are called in the papers, and where they want their stages: one on each device,
#: several going round, or two, there and back.
LAYOUTS: dict[str, tuple[str, _Shape]] = {
    "gpipe": ("GPipe", "line"),
    "interleaved_1f1b": ("interleaved 1F1B", "rounds"),
    "looped_bfs": ("looped BFS", "rounds"),
    "zb_h1": ("ZB-H1", "line"),
    "zb_h2": ("ZB-H2", "line"),
    "interleaved_zero_bubble": ("interleaved zero bubble", "rounds"),
    "zbv": ("ZBV", "v"),
    "v_half": ("V-Half", "v"),
    "v_min": ("V-Min", "v"),
    "dualpipev": ("DualPipeV", "v"),
    AUTO: ("made to measure", "line"),
}
_SHAPES = {
    "line": "a stage on each device",
    "rounds": "two stages or more on each device",
    "v": "two stages on each device",
}
TITLES = {"1f1b": "1F1B"} | {name: title for name, (title, _) in LAYOUTS.items()}
_NAMES = ("1f1b", *LAYOUTS, ANY)


def check_schedule(schedule: Any) -> None:
    """Refuses what there are no plans for: a TypeError for no name, a ValueError for another."""
    if schedule is not None and schedule not in _NAMES:
        kind = ValueError if isinstance(schedule, str) else TypeError
        raise kind(f"schedule={schedule!r}: plans are made for the names {', '.join(_NAMES)}")


def choose(
    terms: Terms, schedule: str | None, *, chunks: Chunks, stages: int | None
) -> tuple[tuple[int, ...], Draft]:
    """The order of the devices, and the plan, under a schedule by name; None for 1F1B.

    Raises:
        NoPlan: nothing fits into memory; it says what would.
        ValueError: an argument does not fit.
    """
    usual = schedule in (None, "1f1b")
    choice: dict[str, Any] = {"chunks": chunks, "stages": stages if usual else None}
    order, found = search_orders(terms, **choice)
    machine, made = terms.machine.ordered(order), found[:1]
    if not usual and schedule is not None:
        names = LAYOUTS if schedule == ANY else [schedule]
        sizes = _sizes(terms, found, chunks, stages)
        made = variants(terms.on(machine), found, names, sizes, _LONG, stages)
        if schedule == ANY:
            made += [draft for draft in found if stages in (None, len(draft.balance))]
        if not made and (found or schedule not in (ANY, AUTO)):
            wanted = f" stages={stages} with" if stages is not None else ""
            raise ValueError(
                f"schedule={schedule!r} is not possible for{wanted} {len(machine)} devices and "
                f"{len(terms.profile.layers)} layers: it needs {_SHAPES[LAYOUTS[schedule][1]]}, "
                "none of them empty"
            )
    best = min(made, key=_rank, default=None)
    if best is None or (best.excess > 1 and schedule == ANY):
        text = f"no plan fits {len(machine)} devices and batch_size={terms.batch_size}"
        raise NoPlan(shortage(terms, **choice) or text)
    if best.excess > 1:
        d = max(range(best.form.devices), key=lambda d: best.on_device[d] / machine.memory[d])
        needs, has = best.on_device[d], machine.memory[d]
        raise NoPlan(
            f"no plan under schedule={schedule!r} that was looked at fits into memory. Nearest "
            f"comes balance={list(best.balance)} with chunks={best.chunks}: {machine.name(d)} "
            f"needs {in_bytes(needs, up=True)}, {in_bytes(needs - has, up=True)} more than its "
            f"{in_bytes(has)}. Leave out the schedule: 1F1B takes the least, and a shortage is "
            "explained there"
        )
    return order, best


def variants(
    terms: Terms,
    found: Sequence[Draft],
    names: Iterable[str],
    sizes: Sequence[tuple[int, int]],
    work: int = _SHORT,
    stages: int | None = None,
) -> list[Draft]:
    """For each schedule the fastest plan that fits, or what comes nearest to fitting; without those
    that cannot be laid out on the devices, or take too long to be made to measure.

    ``found`` are plans under 1F1B, the fastest first; ``sizes`` the numbers of devices and
    micro-batches to try. For each schedule so many actions may be played.
    """
    found = [draft for draft in found if len(draft.balance) > 1]
    known: dict[str, Draft | None] = {}

    def best(name: str) -> Draft | None:
        if name not in known and name != AUTO:
            forms = _forms(terms, name, sizes, stages)
            known[name] = _best_cut(terms, forms, found, work)
        elif name not in known:
            named = [best(other) for other in LAYOUTS if other != AUTO]
            fitting = sorted((one for one in named if one and one.excess <= 1), key=_rank)
            starts = [one for one in [*found[:1], *fitting[:2]] if stages in (None, one.form.n)]
            small = all(one.chunks * one.form.n * 50 <= work for one in starts)
            made = [one for start in starts if small for one in _made_to_measure(terms, start)]
            known[name] = min(made, key=_rank, default=None)
        return known[name]

    return [draft for name in names if (draft := best(name)) is not None]


def _sizes(
    terms: Terms, found: Sequence[Draft], chunks: Chunks, stages: int | None
) -> list[tuple[int, int]]:
    """Devices and micro-batches to try: those of the plans found, some fewer and more."""
    usual, extra = chunk_counts(terms.profile, len(terms.machine), terms.batch_size, chunks)
    counts, most = sorted(usual), len(terms.machine)
    devices = [*(draft.form.devices for draft in found[:2] if draft.form.n > 1), most]
    if stages is not None:  # of which a device may have several
        devices = [p for p in range(most, 0, -1) if stages % p == 0]
    near = {*counts[-2:], *extra[:3]}
    if chunks is not None:
        near = set(counts)
    elif found:
        before = [draft.chunks for draft in found[:2]]
        near = {m for b in before for m in (b, *[m for m in counts if m < b][-2:])}
        near |= {m for b in before for m in [m for m in counts if m > b][:1]}
    sizes = []
    for p in dict.fromkeys(devices):
        cells = [m for m in (*counts, *extra) if m * p <= _CELLS]
        for m in near if p > 1 or most == 1 else ():
            sizes.append((p, m if chunks is not None else min(m, max(cells, default=m))))
    return sorted(set(sizes), key=lambda size: (-size[0], size[1]))


def _forms(
    terms: Terms, name: str, sizes: Iterable[tuple[int, int]], stages: int | None
) -> Iterator[Form]:
    """A schedule in all sizes that can be laid out on the devices."""
    for p, m in sizes:
        line = tuple(range(p))
        shapes = {"line": [line], "v": [line + line[::-1]], "rounds": [line * 2, line * 3]}
        for device_of in shapes[LAYOUTS[name][1]]:
            if len(device_of) <= len(terms.profile.layers) and stages in (None, len(device_of)):
                yield Form(SCHEDULES[name](m, device_of))


def _best_cut(
    terms: Terms, forms: Iterable[Form], found: Sequence[Draft], work: int
) -> Draft | None:
    """The best cut for the most promising forms."""
    tried: list[Draft] = []
    forms = list(forms)
    for starts, most in ((_even, 2), (_extended, 1)):
        drafts = []
        for form in forms:
            cuts = (terms.draft(form, balance) for balance in starts(terms, form, found))
            drafts += sorted((one for one in cuts if one is not None), key=_rank)[:1]
        tried += sorted(drafts, key=_rank)[:most]
    work //= max(1, len(tried))
    return min((improved(terms, one, work)[0] for one in tried), key=_rank, default=None)


def _even(terms: Terms, form: Form, found: Sequence[Draft]) -> Iterator[Balance]:
    """Cuts of even time, of even memory, and what the search found."""
    sums = terms.chain(form.m).sums
    yield tuple(balance_cost([b - a for a, b in pairwise(sums["time"])], form.n))
    if form.n == form.devices:
        yield from {draft.balance for draft in found if len(draft.balance) == form.n}
    held = list(map(sum, zip(sums["fixed"], sums["stored"], strict=True)))
    if held == sorted(held) and held[-1] > 0:
        yield tuple(balance_cost([b - a for a, b in pairwise(held)], form.n))


def _extended(terms: Terms, form: Form, found: Sequence[Draft]) -> Iterator[Balance]:
    """What the search found for as many devices, and a layer for each stage that is left: so what
    takes long to send crosses no more often than there.
    """
    layers, n = len(terms.profile.layers), form.n
    for balance in {draft.balance for draft in found}:
        if len(balance) == form.devices < n:
            ends = [*accumulate(balance), *[layers] * (n - len(balance))]
            ends = [min(end, layers - n + k) for k, end in enumerate(ends, 1)]
            yield tuple(b - a for a, b in pairwise([0, *ends]))


def _made_to_measure(terms: Terms, start: Draft) -> Iterator[Draft]:
    """Schedules for a cut that fits: its own, and one made to measure; those that fit, too."""
    form = start.form
    made = [replace(form.schedule, name=AUTO)]
    stages = terms.stages(form, start.balance, start.modes)
    limits = []
    for own, limit in zip(form.stages_of, terms.machine.memory, strict=False):
        base = sum(stages[j].fixed for j in own) + max(stages[j].transient for j in own)
        limits.append(max(0.0, limit - base))
    with suppress(ValueError):  # its account of memory is on the safe side
        made.append(auto(
            form.m,
            form.device_of,
            costs=terms.costs(form, start.balance),
            rematerialized=[form.m * (mode == "recompute") for mode in start.modes],
            activations=[s.each + s.once + s.halves for s in stages],
            inputs=[s.each for s in stages],
            memory=limits,
            split=form.split,
            starts=[form.schedule],
        ))  # fmt: skip
    for schedule in made:
        draft = terms.draft(Form(schedule), start.balance, start.modes)
        if draft is not None and draft.excess <= 1:
            yield draft


# -- nothing fits ----------------------------------------------------------------------------------


def shortage(
    terms: Terms, *, chunks: Chunks = None, stages: int | Iterable[int] | None = None
) -> str | None:
    """Why :func:`search` finds nothing, with the same arguments; None if there is a plan that fits.

    The least memory is taken with the smallest micro-batches, one slot for each stage, and with
    recomputation or offload where that helps; so only these are looked at. It says what comes
    nearest to fitting, and what would fit: more memory, the fewest devices like these (up to 64), a
    smaller mini-batch.

    Raises:
        ValueError: an argument does not fit.
    """
    machine, layers = terms.machine, terms.profile.layers
    counts = stage_counts(len(layers), len(machine), stages)

    def nearest(batch_size: int) -> tuple[float, int, Balance]:
        """The share of memory, micro-batches and balance of what comes nearest."""
        smaller = Terms(terms.profile, machine, batch_size, terms.param_scale)
        asked = wanted and tuple(m for m in wanted if batch_size % m == 0)
        m = max(sum(chunk_counts(terms.profile, len(machine), batch_size, asked), ()))
        found = Program(smaller, m).shares(max(counts))
        cut = min((found[n - 1] for n in counts), key=lambda cut: cut.value)
        return cut.value, m, cut.balance

    wanted = None
    if chunks is not None:
        wanted = chunk_counts(terms.profile, len(machine), terms.batch_size, chunks)[0]
    value, m, balance = nearest(terms.batch_size)
    if value <= 1:
        return None
    draft = terms.draft(one_f_one_b_form(m, (1,) * len(balance)), balance)
    assert draft is not None
    s = max(range(len(balance)), key=lambda s: draft.memory[s] / machine.memory[s])
    i, j = ends_of(balance)[s]
    first, last = repr(layers[i].name), repr(layers[j - 1].name)
    which = f"layer {first}" if j - i == 1 else f"layers {first} to {last}"
    how = {"store": "", "recompute": ", recomputing its forward", "offload": ", offloading"}
    ways = []
    if machine.uniform:
        more = in_bytes(draft.excess * machine.memory[0] * (1 + 1e-9), up=True)
        ways.append(f"{more} on each device")
    if machine.uniform and stages is None:
        many = Machine.even(_MOST_DEVICES, machine.memory[0], host=machine.host)
        found = Program(terms.on(many), m).shares(min(_MOST_DEVICES, len(layers)))
        enough = [len(cut.balance) for cut in found if cut.value <= 1]
        ways += [f"{n} such devices" for n in enough[:1]]
    step = max(wanted or (1,))
    low, high = 0, -(-terms.batch_size // step)
    while high - low > 1:  # memory grows with the mini-batch
        k = (low + high) // 2
        low, high = (k, high) if nearest(k * step)[0] <= 1 else (low, k)
    ways += [f"batch_size={low * step}"] * (low > 0)
    ways.append("a smaller param_scale (an optimizer with less state)")
    ways += ["the devices in another order"] * (not machine.uniform)
    needs, has = draft.memory[s], machine.memory[s]
    return (
        f"no plan fits into memory. Nearest comes balance={list(balance)} with chunks={m} under "
        f"'1f1b': stage {s} ({which}) needs {in_bytes(needs, up=True)}{how[draft.modes[s]]}, "
        f"{in_bytes(needs - has, up=True)} more than the {in_bytes(has)} of {machine.name(s)}. "
        f"What would make it fit: {', or '.join(ways)}"
    )
