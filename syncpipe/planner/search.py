"""``search``: the cuts, micro-batches, slots and schedules with the shortest simulated step.

Under 1F1B, :class:`.CutFinder` finds the cut with the least bound for several choices of slots:
the most slots that fit need not be the fastest, because too many forwards delay gradients. The best
candidates are simulated, then improved by moving single layers and slots.

Other schedules are tried with the numbers of devices and micro-batches of the best plans for 1F1B,
starting from their cuts and from even ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, combinations, islice, pairwise, product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from syncpipe.balance import balance_cost
from syncpipe.format import in_bytes
from syncpipe.options import consecutive
from syncpipe.planner.by_layer import Refinement
from syncpipe.planner.candidates import Candidate, Problem, ScheduleShape, one_f_one_b_shape
from syncpipe.planner.chain import chunk_counts, doubles, ends_of, within
from syncpipe.planner.cuts import BOUNDARIES, NOTICED, Balance, CutFinder, Slots, least_largest
from syncpipe.planner.machine import Machine
from syncpipe.schedules import SCHEDULES, auto, one_f_one_b
from syncpipe.schedules.named import round_sizes

__all__ = [
    "ANY", "AUTO", "LAYOUTS", "TITLES", "NoPlan", "check_schedule", "choose", "search",
    "search_orders", "search_schedules", "search_shared", "shortage",
]  # fmt: skip

#: Budgets of simulated actions for a schedule that was asked for, and for a comparison; and the
#: most cells of a schedule.
_LONG, _SHORT, _CELLS = 300_000, 30_000, 4096
#: The candidates to improve, and the simulated actions for all and for each; and those added for
#: what is near the best.
_IMPROVED, _WORK, _EACH, _MORE = 32, 600_000, 100_000, 300_000
#: How many times slower than the best a candidate may be to be improved, if there can be as many
#: moves at least; with fewer moves less.
_PROMISING, _MOVES = 1.3, 30
#: Candidates that are refined by layer, and the simulated actions for each.
_STARTS, _REFINED = 4, 100_000
#: The parts of memory for which cuts are made that recompute by layer.
_PARTLY = (1.0, 0.9, 1.1)
#: Slots added on each stage to those of a good candidate.
_NEAR = (0, 1, 2, -1)
#: Divisors of the textbook's slots.
_PARTS = (1, 1.25, 1.5, 2, 3, 4)
#: How many times slower a move may make the best candidate to be followed by a second move; and the
#: shares of memory that are tried in place of all.
_HARDLY, _LESS = 1.05, (0.94, 0.85, 0.7)
_MOST_DEVICES = 64  # in the advice of an error
_LAYOUTS = 200  # layouts with shared stages; if there are more, only some are tried
_EXCHANGED = 16  # devices; with more, no two change places
_MOST_BOUNDARIES = 1024  # if the first search finds nothing

Evaluate = Callable[..., Candidate | None]
#: An order of the devices, and the candidates that fit on them.
Ordered = tuple[tuple[int, ...], list[Candidate]]
Chunks = int | Iterable[int] | None

_rank = attrgetter("rank")


class NoPlan(ValueError):
    """No plan fits into memory."""


# -- 1F1B ------------------------------------------------------------------------------------------


def search(
    problem: Problem, *, chunks: Chunks = None, stages: int | None = None, improve: bool = True,
    boundaries: int = BOUNDARIES,
) -> list[Candidate]:  # fmt: skip
    """The candidates under 1F1B that fit, the fastest first.

    Numbers of micro-batches and stages are tried in the order of their lower bounds, until a bound
    exceeds the best time. The candidates of one pair depend only on the pair and the first devices,
    so the candidates for more devices include those for fewer. One stage runs on one device.

    The best candidate of each cut and choice of modes is improved. Then follow candidates for less
    memory, cuts for slots near those of the best one while that helps, and single moves of it.

    Returns:
        The best candidate for each number of stages that can be the fastest; empty if nothing fits.

    Raises:
        ValueError: a number of micro-batches or stages is impossible.
    """
    layers = len(problem.profile.layers)
    counts = _stage_counts(problem, stages)
    numbers = chunk_counts(problem.batch_size, chunks)
    finders = {m: CutFinder(problem, m, boundaries) for m in numbers}
    tasks = list[tuple[float, int, int]]()
    for m, finder in finders.items():
        python = problem.interpreter(m, (layers,), [0])
        tasks += [(_rounded_down(max(finder.lowest(n), python)), m, n) for n in counts]
    found, fastest = list[Candidate](), math.inf
    for low, m, n in sorted(tasks):
        if low < fastest * (1 - NOTICED) and (value := finders[m].cut(n)[0]) < fastest:
            found += _candidates(
                problem, finders[m], n, _slot_choices(n, m), max(low, _rounded_down(value))
            )
            fastest = min([fastest, *(candidate.time for candidate in found)])
    coarse = not found and boundaries < min(layers, _MOST_BOUNDARIES)
    if coarse and any(_least_share(problem, max(numbers), n)[0] <= 1 for n in counts):
        choice: dict[str, Any] = {"chunks": chunks, "stages": stages, "improve": improve}
        return search(problem, **choice, boundaries=_MOST_BOUNDARIES)
    best, before, work, moved = dict[int, Candidate](), math.inf, _WORK, False
    while found:
        cuts = dict[Any, Candidate]()
        for candidate in sorted(found, key=_rank):
            cuts.setdefault((candidate.shape.m, candidate.balance, candidate.modes), candidate)
            best.setdefault(len(candidate.balance), candidate)
        for candidate in [*cuts.values()][:_IMPROVED] if improve else ():
            m, n = candidate.shape.m, candidate.shape.n
            if candidate.time < fastest * _promising(m, n):
                each = min(work, _EACH)
                candidate, left = improved(problem, candidate, each)
                work, fastest = work - each + left, min(fastest, candidate.time)
                best[n] = min(best[n], candidate, key=_rank)
        first, found = min(best.values(), key=_rank), []
        work += _MORE * (before == math.inf)
        m, n, own = first.shape.m, first.shape.n, first.shape.in_flight
        better, gap = first.time < before, first.time > first.bound * (1 + NOTICED)
        if improve and gap and better:
            near = [(*(min(m, max(1, q + step)) for q in own[:-1]), own[-1]) for step in _NEAR]
            found = _candidates(problem, finders[m], n, near * (n > 1), 0.0, first.time)
            for one in sorted(best.values(), key=_rank)[:2] if before == math.inf else ():
                found += _with_less_memory(problem, one.shape.m, one.shape.n, boundaries, fastest)
        elif improve and gap and work > 0 and not moved:
            # Moves that make it hardly slower: a second move may make it faster.
            at_most = first.time * _HARDLY
            moves = (
                problem.evaluate(one_f_one_b_shape(m, slots or ()), balance, at_most=at_most)
                for balance, slots in islice(_neighbours(problem, first), work // (m * n * 2))
            )
            found = [x for x in moves if x and x.excess <= 1 and x.time <= at_most]
            work -= len(found) * m * n * 2
        moved = not better
        before = first.time
    return sorted(best.values(), key=_rank)


def _with_less_memory(
    problem: Problem, m: int, n: int, boundaries: int, fastest: float
) -> Iterator[Candidate]:
    """The candidates for less and less memory, while their bound is below ``fastest``. Without
    them a plan could be slower with more memory.
    """
    for part in _LESS if min(problem.machine.memory) < math.inf else ():
        finder = CutFinder(_with_part(problem, part), m, boundaries)
        if finder.cut(n)[0] >= fastest:
            return
        yield from _candidates(problem, finder, n, _slot_choices(n, m), 0.0, fastest)


def _with_part(problem: Problem, part: float) -> Problem:
    """The problem with this part of the memory."""
    memory = tuple([part * size for size in problem.machine.memory])
    return problem.on(replace(problem.machine, memory=memory))


def _stage_counts(problem: Problem, stages: int | None) -> list[int]:
    """The numbers of stages to try; ValueError if ``stages`` is impossible."""
    layers, devices = len(problem.profile.layers), len(problem.machine)
    every = [*range(1, min(layers, devices) + 1)]
    if stages is None or stages in every:
        return every if stages is None else [stages]
    raise ValueError(
        f"stages={stages} is impossible with {devices} devices and {layers} layers: give from 1 to "
        f"{every[-1]}"
    )


def _rounded_down(bound: float) -> float:
    """A bound without rounding errors, so that equal bounds are ordered by micro-batches."""
    return float(f"{bound * (1 - NOTICED):.9e}")


def _promising(m: int, n: int) -> float:
    """How many times slower than the best a candidate may be to be improved."""
    moves = _EACH / (2 * m * n)
    return 1 + (_PROMISING - 1) * min(1.0, moves / _MOVES)


def _slot_choices(n: int, m: int) -> list[Slots]:
    """The choices of slots to try: as many as fit (empty), slots that hide transfers, halfway to
    the textbook's ``n - s``, these, parts of them, and one.
    """
    more = [tuple(min(m, n - s + (n - s - 1) // part) for s in range(n)) for part in (1, 2)]
    less = [tuple(min(m, math.ceil((n - s) / part)) for s in range(n)) for part in _PARTS]
    return list(dict.fromkeys([(), *more, *less, (1,) * n])) if n > 1 else [(1,)]


def _candidates(
    problem: Problem, finder: CutFinder, n: int, choices: Iterable[Slots], enough: float,
    fastest: float = math.inf,
) -> list[Candidate]:  # fmt: skip
    """The candidates that fit, of the cuts with the least bounds for each of these choices of
    slots, with several slots each; until a candidate takes at most ``enough`` seconds.
    """
    m, found = finder.count, list[Candidate]()
    sent = (False, True) if finder.chain.skips else (False,)
    for slots, skips in product(dict.fromkeys(choices), sent):
        at_most, balance = fastest * _promising(m, n), Balance()
        if fastest > enough * (1 + NOTICED) and finder.lowest(n, slots) < at_most:
            balance = finder.cut(n, slots, skips)[1]
        caps = (slots or (m,) * n, *_slot_choices(n, m)[1:4])
        fitting = (
            _most_slots(finder.problem, balance, m, part, cap)
            for cap in caps
            for part in (0, 0.5, 1)
        )
        for some in dict.fromkeys(filter(None, fitting)):
            at_most = fastest * _promising(m, n)
            candidate = problem.evaluate(one_f_one_b_shape(m, some), balance, at_most=at_most)
            if candidate is not None and candidate.excess <= 1:
                found.append(candidate)
                fastest = min(fastest, candidate.time)
    return found


def _most_slots(
    problem: Problem, balance: Balance, m: int, part: float, limits: Slots
) -> Slots | None:
    """As many slots as fit on each stage, at most those of the stage before; None if none fit. A
    stage recomputes if it could store only less than ``part`` of its slots.
    """
    chain, slots = problem.chain(m), list[int]()
    for s, (i, j) in enumerate(ends_of(balance)):
        most = min([limits[s], *slots[-1:]])
        for mode in problem.modes[:2]:
            q = most
            while q and chain.memory(i, j, q, (*slots, q)[0], mode) > problem.machine.memory[s]:
                q -= 1
            if q >= part * most:
                break
        if not q:
            return None
        slots.append(q)
    return tuple(slots)


def search_orders(problem: Problem, **choice: Any) -> list[Ordered]:
    """Orders of the devices, each with the result of :func:`search`; first the one with the fastest
    candidate, or the given one if nothing fits.

    Tries the orders of :meth:`.Machine.orders` and, if links differ, exchanges of two devices that
    make the best candidate faster.
    """
    machine, known = problem.machine, list[Ordered]()

    def step(each: Ordered) -> float:
        return _rounded_down(each[1][0].time) if each[1] else math.inf

    orders, exchanged = machine.orders(), not machine.even_links and len(machine) <= _EXCHANGED
    while orders:
        known += [(order, search(problem.on(machine.ordered(order)), **choice)) for order in orders]
        known.sort(key=step)
        orders = [_exchange(problem, *known[0])] if exchanged and known[0][1] else []
        orders = [order for order in orders if order not in dict(known)]
    return known


def _exchange(problem: Problem, order: tuple[int, ...], found: list[Candidate]) -> tuple[int, ...]:
    """The best order for one of these candidates, by exchanges of two devices at a time."""
    machine, best = problem.machine, (math.inf, order)
    for candidate in found[:3]:
        n = candidate.shape.devices

        def rank(
            order: tuple[int, ...], candidate: Candidate = candidate
        ) -> tuple[float, tuple[int, ...]]:
            there = problem.on(machine.ordered(order))
            other = there.evaluate(candidate.shape, candidate.balance)
            return (other.time if other and other.excess <= 1 else math.inf), order

        for start in dict.fromkeys((order, machine.linked(n))):
            least, better = rank(start), True
            while better:
                now = least[1]
                pairs = ((a, b) for a in range(n) for b in range(a + 1, len(now)))
                swapped = (
                    (*now[:a], now[b], *now[a + 1 : b], now[a], *now[b + 1 :]) for a, b in pairs
                )
                other = min(map(rank, swapped), default=least)
                better = other[0] < least[0] * (1 - NOTICED)
                least = other if better else least
            if least[0] < best[0] * (1 - NOTICED):
                best = least
    return best[1]


def improved(
    problem: Problem, candidate: Candidate, work: int, evaluate: Evaluate | None = None
) -> tuple[Candidate, int]:
    """A candidate at least as good, by moves of single layers and slots under any schedule; and the
    rest of ``work``, a budget of simulated actions.
    """
    actions, changed = sum(map(len, candidate.shape.schedule.actions)), candidate.shape.n > 1
    evaluate = evaluate or problem.evaluate
    while changed:
        changed = False
        for balance, slots in _neighbours(problem, candidate):
            if work <= 0 or (candidate.time <= candidate.bound * (1 + NOTICED) and not slots):
                return candidate, work
            shape = one_f_one_b_shape(candidate.shape.m, slots) if slots else candidate.shape
            at_most = candidate.time if candidate.excess <= 1 else math.inf
            other = evaluate(shape, balance, at_most=at_most)
            work -= actions if other else actions // 16
            if other and other.rank < candidate.rank:
                candidate, changed = other, True
    return candidate, work


def refined(
    problem: Problem, found: Sequence[Candidate], chunks: Chunks = None, stages: int | None = None
) -> Candidate | None:
    """The best of these candidates under 1F1B, or a faster one whose stages recompute by layer;
    None if nothing fits.

    Starts are the cuts of the candidates, those that need the least memory, and those with the
    least bounds if a stage may recompute as large a part as it has to, with a little less or more
    memory, too: the bound knows no single layers. The best of them are improved by single moves.
    """
    if min(problem.machine.memory) == math.inf:
        return found[0]
    refinement, counts = Refinement(problem), chunk_counts(problem.batch_size, chunks)
    near = [*found[:_STARTS]]
    if not found or set(found[0].modes) != {"store"}:
        m = counts[-1]
        for n in [one.shape.n for one in near] or _stage_counts(problem, stages):
            shape, balance = one_f_one_b_shape(m, (1,) * n), _least_share(problem, m, n)[1]
            other = refinement.evaluate(shape, balance, math.inf)
            near += [other] if other else []
    if not near:
        return None
    starts, best = [*near], min(near, key=_rank)
    small = len(problem.profile.layers) <= BOUNDARIES
    others = [_with_part(problem, part) for part in (_PARTLY if small else (1.0,))]
    for start in near:
        at, n = counts.index(start.shape.m), start.shape.n
        for m in counts[max(0, at - 1) : at + 2]:
            finders = [CutFinder(other, m, BOUNDARIES, by_layer=True) for other in others]
            own = (start.shape.in_flight,) if m == start.shape.m else ()
            for slots in dict.fromkeys((*own, *_slot_choices(n, m)[1:])):
                at_most, cuts = best.time * _HARDLY, [start.balance]
                for finder in finders if finders[0].lowest(n, slots) < at_most else ():
                    value, balance = finder.cut(n, slots)
                    cuts += [balance] * (value < at_most)
                shape = one_f_one_b_shape(m, slots)
                made = (refinement.evaluate(shape, cut, at_most) for cut in dict.fromkeys(cuts))
                starts += filter(None, made)
                best = min(starts, key=_rank)
    cuts_of = dict[Any, Candidate]()
    for start in sorted(starts, key=_rank):
        cuts_of.setdefault((start.shape.m, start.balance), start)
    for start in [*cuts_of.values()][:_STARTS]:
        if start.time < best.time * _HARDLY:
            best = min(best, improved(problem, start, _REFINED, refinement.evaluate)[0], key=_rank)
    return best


def _neighbours(problem: Problem, candidate: Candidate) -> Iterator[tuple[Balance, Slots | None]]:
    """Other slots and balances.

    Slots, under 1F1B: a few more or fewer on one stage (no stage has more than the one before it),
    or one more or fewer on all stages up to one. Balances: a layer moves to another stage and all
    boundaries between move along; under 1F1B with the same slots, and with as many as fit.
    """
    balance, shape = candidate.balance, candidate.shape
    slots, n, m = shape.slots, shape.n, shape.m
    for s in range(n if slots else 0):
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
                    fewer = slots and _most_slots(problem, tuple(moved), m, 0, slots)
                    if fewer and fewer != slots:
                        yield tuple(moved), fewer


# -- other schedules -------------------------------------------------------------------------------

#: The names for the fastest of all schedules, and for a schedule made to measure.
ANY, AUTO = "any", "auto"

_LINE = "a stage on each device"
_ROUNDS = "two stages or more on each device"
_V = "two stages on each device"
#: The title of each schedule in its paper, and the places of its stages: one on each device,
#: several in rounds, or two in a V.
LAYOUTS = {
    "gpipe": ("GPipe", _LINE),
    "interleaved_1f1b": ("interleaved 1F1B", _ROUNDS),
    "looped_bfs": ("looped BFS", _ROUNDS),
    "zb_h1": ("ZB-H1", _LINE),
    "zb_h2": ("ZB-H2", _LINE),
    "interleaved_zero_bubble": ("interleaved zero bubble", _ROUNDS),
    "zbv": ("ZBV", _V),
    "v_half": ("V-Half", _V),
    "v_min": ("V-Min", _V),
    "dualpipev": ("DualPipeV", _V),
    AUTO: ("made to measure", _LINE),
}
TITLES = {"1f1b": "1F1B"} | {name: title for name, (title, _) in LAYOUTS.items()}


def check_schedule(schedule: Any) -> None:
    """Raise TypeError if ``schedule`` is not a name, ValueError if the planner lacks it."""
    names = (*TITLES, ANY)
    if schedule is not None and schedule not in names:
        kind = ValueError if isinstance(schedule, str) else TypeError
        raise kind(f"schedule={schedule!r} is not one of the names {', '.join(names)}")


def choose(
    problem: Problem, schedule: str | None, *, chunks: Chunks, stages: int | None, replicas: bool
) -> tuple[tuple[int, ...], Candidate]:
    """The order of the devices and the best candidate, under a schedule by name (None for 1F1B), or
    with replicas of stages.

    Raises:
        NoPlan: nothing fits into memory; the message names what would fit.
        ValueError: the schedule is impossible with these devices and layers.
    """
    usual = schedule in (None, "1f1b")
    choice: dict[str, Any] = {"chunks": chunks, "stages": stages if usual else None}
    usually, how = list[Candidate](), f"schedule={schedule!r}"
    orders = search_orders(problem, **choice)
    order, found = orders[0]
    for each, fitting in orders:  # by layer another order may be the fastest
        candidate = refined(problem.on(problem.machine.ordered(each)), fitting, **choice)
        if candidate and (not usually or candidate.rank < usually[0].rank):
            order, found, usually = each, fitting, [candidate]
    made = usually
    if replicas:
        other, candidate = search_shared(problem, chunks)
        if not made or candidate.rank < made[0].rank:
            order, made, how = other, [candidate], "replicas=True"
    there = problem.on(problem.machine.ordered(order))
    if not usual and schedule is not None:
        names = LAYOUTS if schedule == ANY else [schedule]
        sizes = _sizes_to_try(problem, found, chunks, stages)
        made = search_schedules(there, found, names, sizes, _LONG, stages)
        if schedule == ANY:
            usually += found
            made += [candidate for candidate in usually if stages in (None, candidate.shape.n)]
        if not made and (usually or schedule not in (ANY, AUTO)):
            wanted = f" stages={stages} with" if stages is not None else ""
            raise ValueError(
                f"{how} is impossible for{wanted} {len(order)} devices and "
                f"{len(problem.profile.layers)} layers: it needs {LAYOUTS[schedule][1]}, none empty"
            )
    best = min(made, key=_rank, default=None)
    if best is None or (best.excess > 1 and (schedule == ANY or not usually)):
        text = f"no plan fits {len(order)} devices and batch_size={problem.batch_size}"
        raise NoPlan(shortage(problem, **choice) or text)
    if best.excess > 1:
        ways = [f"leave out {how}, because plain 1F1B needs the least"]
        raise NoPlan(_no_fit_message(there, best, f" with {how} that was tried", ways))
    return order, best


def _no_fit_message(problem: Problem, candidate: Candidate, how: str, ways: Sequence[str]) -> str:
    """A message: the candidate nearest to fitting, the bytes that it lacks, and the ways to fit."""
    machine, layers, shape = problem.machine, problem.profile.layers, candidate.shape
    d = max(
        range(candidate.shape.devices), key=lambda d: candidate.on_device[d] / machine.memory[d]
    )
    needs, has, own = candidate.on_device[d], machine.memory[d], candidate.shape.stages_of[d]
    layers_of = []
    for i, j in (candidate.ends[s] for s in own):
        first, last = repr(layers[i].name), repr(layers[j - 1].name)
        layers_of.append(f"layer {first}" if j - i == 1 else f"layers {first} to {last}")
    what = f"stage {own[0]}" if len(own) == 1 else f"stages {', '.join(map(str, own))}"
    modes = {"store": "", "recompute": ", recomputing its forward", "offload": ", offloading"}
    mode = str(candidate.modes[own[0]])
    return (
        f"no plan{how} fits into memory. Nearest is balance={list(candidate.balance)} with "
        f"chunks={shape.m} under {shape.name!r}: {what} ({' and '.join(layers_of)}) needs "
        f"{in_bytes(needs, up=True)}{modes.get(mode, '')}, "
        f"{in_bytes(needs - has, up=True)} more than the {in_bytes(has)} of {machine.names[d]}. "
        f"It would fit with {', or '.join(ways)}"
    )


def search_shared(problem: Problem, chunks: Chunks = None) -> tuple[tuple[int, ...], Candidate]:
    """The order of the devices and the best candidate under 1F1B in which devices of one kind share
    stages.

    If links differ, the devices of a stage are neighbours, or a fixed distance apart.
    """
    devices, speed = len(problem.machine), max(problem.machine.speed)
    found = list[tuple[Any, tuple[int, ...], Candidate]]()
    strides = [k for k in range(1, devices) if devices % k == 0]
    for stride in strides if not problem.machine.even_links else [1]:
        order = tuple([d for k in range(stride) for d in range(k, devices, stride)])
        there, candidates = problem.on(problem.machine.ordered(order)), list[Candidate]()
        counts = chunk_counts(problem.batch_size, chunks)
        counts, work = tuple(m for m in counts if m * devices <= _CELLS) or counts[-1:], _WORK
        for m in sorted(counts, key=lambda m: abs(math.log(m / (4 * devices)))):
            sums = there.chain(m).sums["time"]
            for replicas, balance in _layouts(there, m) if work > 0 else ():
                best = min((one.time for one in candidates if one.excess <= 1), default=math.inf)
                stages = zip(replicas, ends_of(balance), strict=True)
                if max((sums[j] - sums[i]) * ((m - 1) // r) for r, (i, j) in stages) > best * speed:
                    continue
                for slots in ("overlap", "textbook"):
                    shape = ScheduleShape(one_f_one_b(m, consecutive(replicas), slots=slots))
                    candidate = there.evaluate(shape, balance, at_most=best)
                    candidates += [candidate] if candidate else []
                    work -= 2 * m * len(replicas) * bool(candidate)
                    if not candidate or candidate.excess <= 1:
                        break
        for candidate in sorted(candidates, key=_rank)[:2]:
            candidate, _ = improved(there, candidate, _SHORT)
            found.append((candidate.rank, order, candidate))
    _, order, candidate = min(found, key=lambda each: each[:2])
    return order, candidate


def _layouts(problem: Problem, m: int) -> Iterator[tuple[tuple[int, ...], Balance]]:
    """Pairs of replicas and balance to try: all pairs if there are few, else those whose most
    costly stage costs least, for several limits on the devices that share a stage.
    """
    layers, devices = len(problem.profile.layers), len(problem.machine)
    numbers = range(1, min(layers, devices) + 1)
    if sum(math.comb(layers - 1, n - 1) * math.comb(devices, n) for n in numbers) <= _LAYOUTS:
        for n in numbers:
            for ends in combinations(range(1, layers), n - 1):
                for used in combinations(range(1, min(devices, n * m) + 1), n):
                    replicas = tuple(b - a for a, b in pairwise((0, *used)))
                    yield replicas, tuple(b - a for a, b in pairwise((0, *ends, layers)))
        return
    chain, limit = problem.chain(m), min(problem.machine.memory)
    at = (*range(0, layers, -(-layers // BOUNDARIES)), layers)
    run, sent = chain.runs(at, False), chain.tensors["inputs"][[*at[:-1]], None]
    reach = within(len(at) - 1, len(at) - 1)
    rate = min(map(min, problem.machine.bandwidth))
    one, trained = torch.ones_like(run.forward), doubles(problem.trained(0, end) for end in at)
    held = [chain.needs(run, one, one, mode).peak(1) for mode in problem.modes[:2]]
    work = (run.forward + run.backward).masked_fill(torch.stack(held).amin(0) > limit, math.inf)
    exchange = 2 * (trained[reach] - trained[:-1, None]) / rate

    @lru_cache
    def costs(d: int) -> Tensor:
        return torch.maximum(-(-m // d) * work, m * sent / rate) + (d - 1) * exchange

    found = dict[Any, None]()
    for most in (1, 2, 4, 8, devices):
        cut = least_largest(reach, devices, min(devices, most), lambda _, d: costs(d))
        for k in {devices, devices - 1, most} if most <= devices else ():
            _, stages = cut(k)
            layout = tuple(r for *_, r in stages), tuple(at[j] - at[i] for i, j, _ in stages)
            found |= {layout: None} if stages else {}
    yield from found


def search_schedules(
    problem: Problem, found: Sequence[Candidate], names: Iterable[str],
    sizes: Sequence[tuple[int, int]], work: int = _SHORT, stages: int | None = None,
) -> list[Candidate]:  # fmt: skip
    """The fastest candidate that fits, or the nearest to fitting, for each schedule. Leaves out
    schedules that the devices or stages rule out, and ``"auto"`` if it would take too long.

    ``found``: candidates under 1F1B, the fastest first. ``sizes``: the numbers of devices and
    micro-batches to try. ``work``: simulated actions for each schedule.
    """
    names, found = [*names], [candidate for candidate in found if len(candidate.balance) > 1]
    best = dict[str, Candidate]()
    for name in LAYOUTS if AUTO in names else names:
        candidates = list[Candidate]()
        if name == AUTO:
            fitting = sorted((one for one in best.values() if one.excess <= 1), key=_rank)
            starts = [one for one in [*found[:1], *fitting[:2]] if stages in (None, one.shape.n)]
            small = all(one.shape.m * one.shape.n * 50 <= work for one in starts)
            candidates = [one for start in starts if small for one in _custom_made(problem, start)]
        for p, m in sizes if name != AUTO else ():
            line = tuple(range(p))
            places = {_LINE: [line], _V: [line + line[::-1]], _ROUNDS: [line * 2, line * 3]}
            for device_of in places[LAYOUTS[name][1]]:
                n = len(device_of)
                if n > len(problem.profile.layers) or stages not in (None, n):
                    continue
                make: Any = SCHEDULES[name]
                rounds = round_sizes(m, p) if name.startswith("interleaved") else []
                made = [make(m, device_of, size=size) for size in rounds] or [make(m, device_of)]
                for shape in map(ScheduleShape, made):
                    cuts = dict.fromkeys(_initial_cuts(problem, shape, found))
                    own = (problem.evaluate(shape, balance) for balance in cuts)
                    candidates.append(min(filter(None, own), key=_rank))
        if name != AUTO:
            tried = sorted(candidates, key=_rank)[:3]
            candidates = [improved(problem, one, work // 3)[0] for one in tried]
        if candidates:
            best[name] = min(candidates, key=_rank)
    return [best[name] for name in names if name in best]


def _sizes_to_try(
    problem: Problem, found: Sequence[Candidate], chunks: Chunks, stages: int | None
) -> list[tuple[int, int]]:
    """The numbers of devices and micro-batches to try, near those in ``found``."""
    most, counts = len(problem.machine), chunk_counts(problem.batch_size, chunks)
    devices = {most, *(candidate.shape.devices for candidate in found[:2])}
    if stages is not None:  # a device may have several stages
        devices = {p for p in range(1, most + 1) if stages % p == 0}
    if chunks is None:
        counts = tuple(m for m in counts if m * most <= _CELLS) or counts[:1]
        near = [bisect_left(counts, candidate.shape.m) for candidate in found[:2]] or [len(counts)]
        counts = tuple({m for at in near for m in counts[max(0, at - 2) : at + 2]})
    few = sorted((p for p in devices if p > 1 or most == 1), reverse=True)
    return [*product(few, sorted(counts))]


def _initial_cuts(
    problem: Problem, shape: ScheduleShape, found: Sequence[Candidate]
) -> Iterator[Balance]:
    """The initial cuts: of even time, of even memory, and those of ``found`` for as many
    devices, extended by one layer for each further stage to avoid new slow transfers.
    """
    sums, n, layers = problem.chain(shape.m).sums, shape.n, len(problem.profile.layers)
    held = list(map(sum, zip(sums["fixed"], sums["stored"], strict=True)))
    yield tuple(balance_cost([b - a for a, b in pairwise(sums["time"])], n))
    if held == sorted(held) and held[-1] > 0:
        yield tuple(balance_cost([b - a for a, b in pairwise(held)], n))
    for candidate in found:
        if len(candidate.balance) == shape.devices:
            ends = [*accumulate(candidate.balance), *[layers] * (n - shape.devices)]
            ends = [min(end, layers - n + k) for k, end in enumerate(ends, 1)]
            yield tuple(b - a for a, b in pairwise([0, *ends]))


def _custom_made(problem: Problem, start: Candidate) -> Iterator[Candidate]:
    """The candidates that fit for a cut: with its own schedule, and with one made to measure."""
    shape = start.shape
    made = [replace(shape.schedule, name=AUTO)]
    stages = problem.stages(shape, start.balance, start.modes)
    limits = []
    for own, limit in zip(shape.stages_of, problem.machine.memory, strict=False):
        base = sum(stages[j].fixed for j in own) + max(stages[j].transient for j in own)
        limits.append(max(0.0, limit - base))
    with suppress(ValueError):  # auto() may find that nothing fits: it overestimates memory
        made.append(auto(
            shape.m,
            shape.device_of,
            costs=problem.costs(shape, start.balance, start.modes),
            rematerialized=[shape.m * (mode == "recompute") for mode in start.modes],
            activations=[max(s.each + s.once, s.halves) for s in stages],
            inputs=[s.each for s in stages],
            memory=limits,
            split=shape.split,
            starts=[shape.schedule],
        ))  # fmt: skip
    for schedule in made:
        candidate = problem.evaluate(ScheduleShape(schedule), start.balance, start.modes)
        if candidate is not None and candidate.excess <= 1:
            yield candidate


# -- nothing fits ----------------------------------------------------------------------------------


def _least_share(problem: Problem, m: int, n: int) -> tuple[float, Balance]:
    """The least peak share of a device's memory with ``n`` stages of one slot each, and its cut."""
    chain, machine, count = problem.chain(m), problem.machine, len(problem.profile.layers)
    at = (*range(0, count, max(1, min(-(-count // _MOST_BOUNDARIES), count // n))), count)

    @lru_cache
    def needs(first: bool, speed: float) -> Tensor:
        run = chain.runs(at, first)
        one, taken = torch.ones_like(run.forward), machine.host * run.forward / speed
        held = [chain.needs(run, one, one, mode, taken).peak(1) for mode in problem.modes]
        return torch.stack(held).amin(0)

    def share(k: int, _: int) -> Tensor:
        return needs(k == n, machine.speed[n - k]) / machine.memory[n - k]

    least, stages = least_largest(within(len(at) - 1, len(at) - 1), n, 1, share)(n)
    return least, tuple(at[j] - at[i] for i, j, _ in stages)


def shortage(problem: Problem, *, chunks: Chunks = None, stages: int | None = None) -> str | None:
    """Why :func:`search` finds nothing, with the same arguments; None if a plan fits.

    Considers the smallest micro-batches, one slot for each stage, and the mode with the least
    memory. The message names the candidate nearest to fitting and what would fit: more memory, more
    such devices (up to 64), a smaller mini-batch.

    Raises:
        ValueError: a number of micro-batches or stages is impossible.
    """
    machine, layers, batch = problem.machine, problem.profile.layers, problem.batch_size
    counts = _stage_counts(problem, stages)
    wanted = () if chunks is None else chunk_counts(batch, chunks)

    def nearest(batch_size: int) -> tuple[float, int, Balance]:
        """The share of memory, the micro-batches and the balance nearest to fitting."""
        smaller = problem.on(machine, batch_size)
        asked = [m for m in wanted if batch_size % m == 0] or None
        m = max(chunk_counts(batch_size, asked))
        share, balance = min(_least_share(smaller, m, n) for n in counts)
        return share, m, balance

    value, m, balance = nearest(batch)
    if value <= 1:
        return None
    candidate = problem.evaluate(one_f_one_b_shape(m, (1,) * len(balance)), balance)
    assert candidate is not None
    ways = []
    if machine.uniform:
        more = in_bytes(candidate.excess * max(machine.memory) * (1 + 1e-9), up=True)
        ways.append(f"{more} on each device")
    if machine.uniform and stages is None:
        many = problem.on(Machine.even(_MOST_DEVICES, min(machine.memory), host=machine.host))
        some = range(1, min(_MOST_DEVICES, len(layers)) + 1)
        k = bisect_left(some, True, key=lambda n: _least_share(many, m, n)[0] <= 1)
        ways += [f"{n} such devices" for n in some[k : k + 1]]
    # Memory grows with the mini-batch: find the first that does not fit, in micro-batches.
    step = max(wanted or (1,))
    k = bisect_left(range(step, batch, step), True, key=lambda size: nearest(size)[0] > 1)
    ways += [f"batch_size={k * step}"] * (k > 0)
    ways.append("a smaller param_scale (an optimizer with less state)")
    ways += ["the devices in another order"] * (not machine.uniform)
    return _no_fit_message(problem, candidate, "", ways)
