"""``search``: the cuts, micro-batches and slots with the shortest step.

For 1F1B a program over boundaries finds a cut (:mod:`.cut`), once for each family of slots: as many
as fit hold more than the stages to the right can bear, and whoever goes forward too eagerly lets
gradients wait. The player decides between what is found, and single layers and slots are moved as
long as that helps.

What is found for 1F1B says how many devices and micro-batches are worth a look under other
schedules. For these the layers are cut anew, evenly at first, and moved one by one as long as the
played step becomes shorter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

from syncpipe.balance import balance_cost
from syncpipe.balance.profile import in_bytes
from syncpipe.planner.chain import ends_of
from syncpipe.planner.cut import NOTICED, Program
from syncpipe.planner.draft import Draft, Form, Terms, one_f_one_b_form
from syncpipe.planner.machine import Machine
from syncpipe.planner.sizes import MOST, chunk_counts, stage_counts
from syncpipe.schedules import SCHEDULES, auto

__all__ = [
    "ANY", "AUTO", "LAYOUTS", "TITLES", "NoPlan", "Shortage", "check_schedule", "choose",
    "families", "search", "search_orders", "shortage", "variants",
]  # fmt: skip

#: So many of the best drafts for each number of stages are improved, with so many actions to play.
_IMPROVED, _WORK = 32, 1_000_000
#: if they are at most so many times as slow as the best.
_PROMISING = 1.2
#: So many of those that are cut anew near the best one are improved.
_AROUND = 5
_MOST_DEVICES = 64

Slots = tuple[int, ...]
Balance = tuple[int, ...]


class NoPlan(ValueError):
    """Nothing fits into memory."""


# -- 1F1B ------------------------------------------------------------------------------------------


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
    layers = len(terms.profile.layers)
    usual, extra = chunk_counts(terms.profile, len(terms.machine), terms.batch_size, chunks)
    counts = stage_counts(layers, len(terms.machine), stages)
    programs = {m: Program(terms, m) for m in (*usual, *extra)}
    tasks: list[tuple[float, int, int, bool]] = []
    for m, program in programs.items():
        python = terms.interpreter(one_f_one_b_form(m, (1,)), (layers,), ["store"])
        tasks += [(_rounded(max(program.lowest(n), python)), m, n, False) for n in counts]
    heapq.heapify(tasks)
    found: dict[int, dict[Draft, None]] = {}
    fastest = math.inf
    while tasks and tasks[0][0] < fastest * (1 - NOTICED):
        low, m, n, bounded = heapq.heappop(tasks)
        if bounded:
            for draft in _drafts(programs[m], n, low):
                found.setdefault(n, {})[draft] = None
                fastest = min(fastest, draft.time)
        elif cut := programs[m].minimise(n, (), at_most=fastest * (1 + 1e-6), low=low):
            heapq.heappush(tasks, (max(low, _rounded(cut.value)), m, n, True))
    best = {n: min(drafts, key=lambda draft: draft.rank) for n, drafts in found.items()}
    left = 2 * _WORK
    for n in sorted(best, key=lambda n: best[n].rank):
        work = min(_WORK, left)
        left -= work
        for draft in sorted(found[n], key=lambda draft: draft.rank)[:_IMPROVED]:
            if draft.time < fastest * _PROMISING and draft.bound < fastest * (1 - NOTICED):
                better, work = improved(terms, draft, work)
                best[n] = min(best[n], better, key=lambda draft: draft.rank)
                fastest = min(fastest, better.time)
        left += work
    if best:
        n = min(best, key=lambda n: best[n].rank)
        best[n] = _around(programs[best[n].chunks], best[n])
    return sorted(best.values(), key=lambda draft: draft.rank)


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
    terms, m, fastest = program.terms, program.m, math.inf
    seen: set[tuple[Balance, Slots]] = set()
    for family in dict.fromkeys(families(n, m)) if n > 1 else [(1,)]:
        slots = family
        for _ in range(2):
            if fastest <= low * (1 + NOTICED):
                return
            cut = program.minimise(n, slots, at_most=fastest, low=low)
            if cut is None:
                break
            own = []
            for some in (cut.slots, *_suiting(terms, cut.balance, m)):
                if (cut.balance, some) not in seen:
                    seen.add((cut.balance, some))
                    draft = terms.draft(one_f_one_b_form(m, some), cut.balance)
                    own += [draft] if draft and draft.excess <= 1 else []
            yield from own
            if n == 1 or not own:
                break
            best = min(own, key=lambda draft: draft.rank)
            fastest, slots = min(fastest, best.time), best.form.in_flight


def _suiting(terms: Terms, balance: Balance, m: int) -> Iterator[Slots]:
    """Slots for a cut, as many of them as fit: those of families, and those that suit it.

    A stage needs to be busy until its first micro-batch is back. If that takes ``D`` to the end and
    back, and one leaves the pipeline every ``P`` seconds, so many more than one are on their way
    meanwhile: ``1 + D / P``, rounded up. Even stages without transfers give the textbook's numbers.
    """
    n = len(balance)
    found = families(n, m)[1:3]
    costs = terms.costs(one_f_one_b_form(m, (1,) * n), balance)
    for recomputes in (0, 1):
        pairs = zip(costs.forward, costs.backward_input, strict=True)
        times = [f * (1 + recomputes) + b for f, b in pairs]
        pace = max(*times, *costs.transfer, 1e-30)
        trip, most = 0.0, [1.0]
        for s in reversed(range(n - 1)):
            trip += times[s + 1] + 2 * costs.transfer[s]
            most.append(1 + math.ceil(trip / pace - NOTICED))
        for extra in (0, 1):
            slots = (q + extra * (s < n - 1) for s, q in enumerate(reversed(most)))
            found.append(tuple(int(min(m, q)) for q in slots))
    for limits in dict.fromkeys(found):
        for may in (False, True):
            if fitting := _fitting(terms, balance, m, may, limits):
                yield fitting


def _fitting(
    terms: Terms, balance: Balance, m: int, recomputes: bool, limits: Sequence[int]
) -> Slots | None:
    """For each stage as many slots as fit, never more than for the stage before.

    Where a stage stores and not one fits, it recomputes, if it may.
    """
    chain, slots = terms.chain(m), list[int]()
    for s, (i, j) in enumerate(ends_of(balance)):
        q = most = min([limits[s], *slots[-1:]])
        for mode in ("store", "recompute") if recomputes else ("store",):
            q = most
            while q and chain.memory(i, j, q, (*slots, q)[0], mode) > terms.machine.memory[s]:
                q -= 1
            if q and (mode == "recompute" or not recomputes or q == most):
                break
        if not q:
            return None
        slots.append(q)
    return tuple(slots)


def _around(program: Program, best: Draft) -> Draft:
    """The best after cutting anew for slots near its own."""
    terms, m, n, before = program.terms, program.m, len(best.balance), math.inf
    while n > 1 and best.time < before and best.time > best.bound * (1 + NOTICED):
        before, found = best.time, dict[Draft, None]()
        for step in (0, 1, 2, -1):
            more = [step] * (n - 1) + [0]
            near = zip(best.form.in_flight, more, strict=True)
            slots = tuple(min(m, max(1, q + extra)) for q, extra in near)
            cut = program.minimise(n, slots, at_most=best.time)
            if cut is not None:
                for some in (slots, best.form.in_flight, *_suiting(terms, cut.balance, m)):
                    draft = terms.draft(one_f_one_b_form(m, some), cut.balance)
                    if draft is not None and draft.excess <= 1:
                        found[draft] = None
        for draft in sorted(found, key=lambda draft: draft.rank)[:_AROUND]:
            best = min(best, improved(terms, draft, _WORK // 5)[0], key=lambda draft: draft.rank)
    return best


def search_orders(terms: Terms, **choice: Any) -> tuple[tuple[int, ...], list[Draft]]:
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
        found = search(terms.on(terms.machine.ordered(order)), **choice)
        if found and (not best[1] or found[0].time < best[1][0].time * (1 - NOTICED)):
            best = order, found
    return best


# -- moving layers and slots -----------------------------------------------------------------------


def improved(terms: Terms, draft: Draft, work: int) -> tuple[Draft, int]:
    """A draft at least as good, by moving single layers and slots.

    Args:
        terms: of the search.
        draft: under any schedule.
        work: so many actions may be played, more or less.

    Returns:
        The draft, and what is left of the work.
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
    if draft.time < than.time * (1 - NOTICED):
        return True
    fewer = sum(draft.form.in_flight) < sum(than.form.in_flight)
    return draft.time <= than.time and fewer


def _neighbours(terms: Terms, draft: Draft) -> Iterator[tuple[Balance, Slots | None]]:
    """Other slots under 1F1B: a few more or fewer on one stage, and so that none has more than the
    one before; one more or fewer on several, from the first on. Other balances: a layer from one
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
                    fewer = slots and _fitting(terms, tuple(moved), m, False, slots)
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
TITLES = {"1f1b": "1F1B"} | {name: title for name, (title, _) in LAYOUTS.items()}
_NAMES = ("1f1b", *LAYOUTS, ANY)


def check_schedule(schedule: Any) -> None:
    """Refuses what there are no plans for.

    Raises:
        TypeError: not a name.
        ValueError: an unknown name.
    """
    if schedule is not None and not isinstance(schedule, str):
        raise TypeError(f"schedule={schedule!r}: plans are made for names, {', '.join(_NAMES)}")
    if schedule is not None and schedule not in _NAMES:
        raise ValueError(f"schedule={schedule!r}: there are plans for {', '.join(_NAMES)}")


def choose(
    terms: Terms, schedule: str | None, *, chunks: int | Iterable[int] | None, stages: int | None
) -> tuple[tuple[int, ...], Draft]:
    """The order of the devices, and the plan.

    Args:
        terms: layers and devices.
        schedule: a name; None for 1F1B.
        chunks: the number of micro-batches, or those to choose from.
        stages: the number of stages.

    Raises:
        NoPlan: nothing fits into memory; it says what would.
        ValueError: an argument does not fit.
    """
    usual = schedule in (None, "1f1b")
    choice = {"chunks": chunks, "stages": stages if usual else None}
    order, found = search_orders(terms, **choice)
    made = found[:1]
    if not usual and schedule is not None:
        ordered = terms.on(terms.machine.ordered(order))
        names = LAYOUTS if schedule == ANY else [schedule]
        made = variants(ordered, found, names, wide=True, chunks=chunks, stages=stages)
        if schedule == ANY:
            made += [draft for draft in found if stages in (None, len(draft.balance))]
        if not made and (found or schedule not in (ANY, AUTO)):
            raise ValueError(_no_layout(terms, schedule, stages))
    best = min(made, key=lambda draft: draft.rank, default=None)
    if best is None or (best.excess > 1 and schedule == ANY):
        lack = shortage(terms, **choice)
        text = f"no plan fits {len(terms.machine)} devices and batch_size={terms.batch_size}"
        raise NoPlan(lack.explained(terms) if lack else text)
    if best.excess > 1:
        raise NoPlan(_lacking(best, ordered))
    return order, best


def _no_layout(terms: Terms, schedule: str, stages: int | None) -> str:
    devices, layers = len(terms.machine), len(terms.profile.layers)
    wanted = f" stages={stages} with" if stages is not None else ""
    shape = {
        "line": "a stage on each device",
        "rounds": "two stages or more on each device",
        "v": "two stages on each device",
    }[LAYOUTS[schedule][1]]
    return (
        f"schedule={schedule!r} is not possible for{wanted} {devices} devices and {layers} layers: "
        f"it needs {shape}, none of them empty"
    )


def _lacking(nearest: Draft, terms: Terms) -> str:
    """What the plan that comes nearest lacks."""
    limits = terms.machine.memory
    d = max(range(len(nearest.on_device)), key=lambda d: nearest.on_device[d] / limits[d])
    needs, has = nearest.on_device[d], limits[d]
    return (
        f"no plan under schedule={nearest.schedule!r} that was looked at fits into memory. Nearest "
        f"comes balance={list(nearest.balance)} with chunks={nearest.chunks}: "
        f"{terms.machine.name(d)} needs {in_bytes(needs, up=True)}, "
        f"{in_bytes(needs - has, up=True)} more than its {in_bytes(has)}. Leave out the schedule: "
        "1F1B takes the least, and a shortage is explained there"
    )


def variants(
    terms: Terms,
    found: Sequence[Draft],
    names: Iterable[str],
    *,
    wide: bool = False,
    chunks: int | Iterable[int] | None = None,
    stages: int | None = None,
) -> list[Draft]:
    """For each schedule the fastest plan that fits, or what comes nearest to fitting.

    Args:
        terms: layers and devices.
        found: plans under 1F1B, the fastest first; may be empty.
        names: of the schedules, of :data:`LAYOUTS`.
        wide: for a plan, not for a line of a comparison: look ten times as long, also at other
            numbers of devices and micro-batches than the first plan's.
        chunks: the number of micro-batches, or those to choose from.
        stages: the number of stages.

    Returns:
        In the order of ``names``; without those that cannot be laid out on the devices.

    Raises:
        ValueError: ``chunks`` does not fit.
    """
    looks = _Looks(terms, found, wide, chunks, stages)
    return [draft for name in names if (draft := looks.best(name)) is not None]


class _Looks:
    """All that is tried for one plan."""

    def __init__(
        self,
        terms: Terms,
        found: Sequence[Draft],
        wide: bool,
        chunks: int | Iterable[int] | None,
        stages: int | None,
    ) -> None:
        self._terms, self._wide, self._stages = terms, wide, stages
        self._found = [draft for draft in found if len(draft.balance) > 1]
        usual, extra = chunk_counts(terms.profile, len(terms.machine), terms.batch_size, chunks)
        self._counts, self._extra, self._asked = sorted(usual), extra, chunks is not None
        self._known: dict[str, Draft | None] = {}

    def best(self, name: str) -> Draft | None:
        """The best under a schedule; None if there is no way to lay it out."""
        if name not in self._known:
            self._known[name] = self._measured() if name == AUTO else self._named(name)
        return self._known[name]

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Devices and micro-batches to try: those of the plans found, some fewer and more."""
        most, near = len(self._terms.machine), []
        if self._found and not self._wide:
            devices, near = [self._found[0].form.devices], [self._found[0].chunks]
        elif self._stages is not None:  # of which a device may have several
            devices = [p for p in range(most, 0, -1) if self._stages % p == 0]
        else:
            devices = [*(draft.form.devices for draft in self._found[:2]), most]
        for draft in self._found[:2] if self._wide else ():
            near += [draft.chunks, *[m for m in self._counts if m < draft.chunks][-2:]]
            near += [m for m in self._counts if m > draft.chunks][:1]
        near = near or [*self._counts[-2:], *self._extra[:3]]
        if self._asked and self._wide:
            near = self._counts
        for p in dict.fromkeys(devices):
            if p > 1 or most == 1:
                cells = 4096 if self._wide else 2048  # not more than there is time for
                tried = [m for m in (*self._counts, *self._extra) if m * p <= cells]
                near = near if self._asked else [min(m, max(tried, default=m)) for m in near]
                yield from ((p, m) for m in sorted(set(near)))

    def _forms(self, name: str) -> Iterator[Form]:
        layers, shape = len(self._terms.profile.layers), LAYOUTS[name][1]
        for p, m in self._sizes():
            line = tuple(range(p))
            made = {
                "line": [line],
                "v": [line + line[::-1]],
                "rounds": [line * v for v in range(2, 5 if self._wide else 3)],
            }[shape]
            for device_of in made:
                if len(device_of) <= layers and self._stages in (None, len(device_of)):
                    yield Form(SCHEDULES[name](m, device_of))

    def _named(self, name: str) -> Draft | None:
        """The best cut for the most promising forms."""
        tried: list[Draft] = []
        forms = list(self._forms(name))
        for starts, most in ((self._even, 3 if self._wide else 1), (self._extended, 1)):
            drafts = []
            for form in forms:
                cuts = (self._terms.draft(form, balance) for balance in starts(form))
                some = [draft for draft in cuts if draft is not None]
                drafts += [min(some, key=lambda draft: draft.rank)] if some else []
            tried += sorted(drafts, key=lambda draft: draft.rank)[:most]
        work = (300_000 if self._wide else 30_000) // max(1, len(tried))
        better = (improved(self._terms, draft, work)[0] for draft in tried)
        return min(better, key=lambda draft: draft.rank, default=None)

    def _even(self, form: Form) -> Iterator[Balance]:
        """Cuts of even time, of even memory, and what the search found."""
        chain = self._terms.chain(form.m)
        yield tuple(balance_cost([b - a for a, b in pairwise(chain.sums["time"])], form.n))
        if form.n == form.devices:
            yield from {draft.balance for draft in self._found if len(draft.balance) == form.n}
        held = list(map(sum, zip(chain.sums["fixed"], chain.sums["stored"], strict=True)))
        if held == sorted(held) and held[-1] > 0:
            yield tuple(balance_cost([b - a for a, b in pairwise(held)], form.n))

    def _extended(self, form: Form) -> Iterator[Balance]:
        """What the search found for as many devices, and a layer for each stage that is left: so
        what takes long to send crosses no more often than there.
        """
        layers, n = len(self._terms.profile.layers), form.n
        for balance in {draft.balance for draft in self._found}:
            if len(balance) == form.devices < n:
                ends = [*accumulate(balance), *[layers] * (n - len(balance))]
                ends = [min(end, layers - n + k) for k, end in enumerate(ends, 1)]
                yield tuple(b - a for a, b in pairwise([0, *ends]))

    def _measured(self) -> Draft | None:
        """Made to measure: for the cuts of the search, and of the best named schedules."""
        named = [self.best(name) for name in LAYOUTS if name != AUTO]
        fitting = [draft for draft in named if draft is not None and draft.excess <= 1]
        fitting.sort(key=lambda draft: draft.rank)
        starts = [*self._found[:1], *fitting[: 2 if self._wide else 1]]
        starts = [draft for draft in starts if self._stages in (None, len(draft.balance))]
        if not self._wide and any(draft.chunks * draft.form.n > 512 for draft in starts):
            return None
        made = [draft for start in starts for draft in self._made(start) if draft.excess <= 1]
        return min(made, key=lambda draft: draft.rank, default=None)

    def _made(self, start: Draft) -> Iterator[Draft]:
        """Schedules for a cut that fits: its own, and one made to measure."""
        terms, form = self._terms, start.form
        made = [replace(form.schedule, name=AUTO)]
        stages = terms.footprints(form, start.balance, start.modes)
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
                activations=[s.held + s.backward + s.halves for s in stages],
                inputs=[s.held for s in stages],
                memory=limits,
                split=form.split,
                starts=[form.schedule],
            ))  # fmt: skip
        for schedule in made:
            draft = terms.draft(Form(schedule), start.balance, start.modes)
            if draft is not None:
                yield draft


# -- nothing fits ----------------------------------------------------------------------------------


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

    def explained(self, terms: Terms) -> str:
        """Which stage misses by how much, and what would make it fit."""
        draft, s, machine = self.draft, self.stage, terms.machine
        i, j = ends_of(draft.balance)[s]
        first, last = (repr(terms.profile.layers[k].name) for k in (i, j - 1))
        layers = f"layer {first}" if j - i == 1 else f"layers {first} to {last}"
        how = {"store": "", "recompute": ", recomputing its forward", "offload": ", offloading"}
        more = in_bytes(draft.excess * max(self.limits) * (1 + 1e-9), up=True)
        ways = [f"{more} on each device"] if machine.uniform else []
        ways += [f"{self.devices} such devices"] if self.devices is not None else []
        ways += [f"batch_size={self.batch_size}"] if self.batch_size is not None else []
        ways.append("a smaller param_scale (an optimizer with less state)")
        ways += [] if machine.uniform else ["the devices in another order"]
        return (
            f"no plan fits into memory. Nearest comes balance={list(draft.balance)} with "
            f"chunks={draft.chunks} under '1f1b': stage {s} ({layers}) needs "
            f"{in_bytes(draft.memory[s], up=True)}{how[draft.modes[s]]}, "
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
    usual, extra = chunk_counts(terms.profile, len(machine), terms.batch_size, chunks)
    m, counts = max(usual + extra), stage_counts(layers, len(machine), stages)
    found = Program(terms, m).shares(max(counts))
    nearest = min((found[n] for n in counts), key=lambda cut: cut.value)
    if nearest.value <= 1:
        return None
    draft = terms.draft(one_f_one_b_form(m, nearest.slots), nearest.balance)
    assert draft is not None
    limits = machine.memory[: len(nearest.balance)]
    shares = [a / b for a, b in zip(draft.memory, limits, strict=True)]
    enough = None
    if stages is None and machine.uniform:
        many = terms.on(Machine.even(_MOST_DEVICES, machine.memory[0], host=machine.host))
        more = Program(many, m).shares(min(_MOST_DEVICES, layers))
        enough = next((n for n in sorted(more) if n > len(machine) and more[n].value <= 1), None)
    batch = _largest_batch(terms, counts, None if chunks is None else usual)
    return Shortage(draft, limits, shares.index(max(shares)), enough, batch)


def _largest_batch(terms: Terms, counts: Sequence[int], chunks: Sequence[int] | None) -> int | None:
    """The largest mini-batch that fits, a multiple of the number of micro-batches if that is given.

    Memory grows with the mini-batch; so bisection finds it.
    """
    wanted: Sequence[int | None] = chunks or (None,)
    if (
        chunks is None and terms.batch_size > MOST
    ):  # micro-batches of one sample, or as many as may be
        wanted = (MOST, None)
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
