"""A schedule for costs and memory that are known: greedy passes, forth and back in time.

The times of one pass are the urgencies of the next, in the other direction, so that each makes good
what the other could not see (Li and Willis 1992, An iterative scheduling technique for
resource-constrained project scheduling). Micro-batches of a stage cost the same, so none overtakes
another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, product
from operator import add
from typing import Any

from syncpipe.schedules.greedy import ROUNDING, Lister, Problem, Urgencies
from syncpipe.schedules.named import SCHEDULES, build, naive, one_f_one_b, zb_h1
from syncpipe.schedules.player import Costs, counted, play
from syncpipe.schedules.schedule import HALVES, Action, Kind, Schedule

__all__ = ["AutoSchedule", "Report", "auto", "lower_bound"]

_CLOSE = 1e-3  # a schedule that is longer than the bound by less, relative, is good enough
_PATIENCE = (0.0, 1.0, 0.5, 2.0)  # of passes, one after another (syncpipe.schedules.greedy)
_Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Report:
    """Simulated steps, in the unit of the costs, and memory, in that of the activations."""

    step: float  # of the schedule
    bound: float  # no schedule for these costs and this memory has a shorter one
    named: Mapping[str, float]  # steps of the schedules with names that fit
    memory: tuple[float, ...]  # for each device the most that it holds at once
    limits: tuple[float, ...]  # for each device what it may

    def __str__(self) -> str:
        named = sorted((step, name) for name, step in self.named.items())
        shown = ", ".join(f"{name} {step:.4g}" for step, name in named)
        pairs = zip(self.memory, self.limits, strict=True)
        return (
            f"step {self.step:.4g}, {self.step / (self.bound or 1):.3f} times the bound "
            f"{self.bound:.4g}\nnamed schedules that fit: {shown}\n"
            f"memory of each device: {', '.join(f'{a:.4g} of {b:.4g}' for a, b in pairs)}"
        )


@dataclass(frozen=True, eq=False)
class AutoSchedule(Schedule):
    """A schedule by :func:`syncpipe.schedules.auto`; its ``report`` says what it is worth."""

    report: Report = field(default=Report(0.0, 0.0, {}, (), ()), repr=False)


def auto(
    m: int, device_of: int | Sequence[int], *, costs: Costs,
    rematerialized: Sequence[int] | None = None, activations: Sequence[float] | None = None,
    inputs: Sequence[float] | None = None, memory: float | Sequence[float] | None = None,
    split: bool = True, starts: Iterable[Schedule] = (),
) -> AutoSchedule:  # fmt: skip
    """Make a schedule to measure: none with a name is shorter in the same memory, simulated::

        with pipe.trace() as trace:
            pipe.train_batch(input, target, loss_fn=loss_fn, schedule="zb_h1")
        schedule = auto(8, 4, costs=trace.costs)
        print(schedule.report)

    The same arguments give the same schedule. On each stage micro-batches go forward and back from
    the first to the last (unless nothing in this order is as short as a named schedule that has
    another one), so without halves gradients are those of 1F1B to the last bit, whatever the costs.

    Args:
        m: number of micro-batches.
        device_of: number of stages, or for each stage the index of its device.
        costs: how long everything takes, as a trace has it (``trace.costs``).
        rematerialized: for each stage how many micro-batches, the first ones, are recomputed.
        activations: for each stage the memory that a micro-batch takes from its forward to the end
            of its backward, or of its weight half. By default 1: memory counts micro-batches.
        inputs: the same for one that is recomputed, until then; by default the same.
        memory: for each device, or for all, what activations may take, in the same unit. By default
            what ``"1f1b"`` takes, or with halves ``"zb_h1"`` if that is more.
        split: whether backwards may come in two halves.
        starts: schedules to begin with, beside those with names.

    Raises:
        ValueError: an argument does not fit the others, or not one micro-batch fits into memory.
    """
    devices = tuple(range(device_of)) if isinstance(device_of, int) else tuple(device_of)
    usual = one_f_one_b(m, devices)
    n, d = len(devices), len(usual.actions)
    if len(costs.forward) != n:
        raise ValueError(f"costs are for {len(costs.forward)} stages, but there are {n}")
    whole = _sizes("activations", (1.0,) * n if activations is None else activations, n)
    first = _sizes("inputs", whole if inputs is None else inputs, n)
    if any(size > most for size, most in zip(first, whole, strict=True)):
        raise ValueError(f"inputs={first} are part of activations={whole}, and no larger")
    split = split and any(costs.backward_weight)
    counts, free = counted(rematerialized, m, n), (math.inf,) * d
    p = Problem(m, devices, costs, counts, whole, first, free, split)
    if memory is None:
        pairs = zip(usual.actions, (zb_h1(m, devices) if split else usual).actions, strict=True)
        memory = [max(map(p.peak, pair)) for pair in pairs]
    elif not isinstance(memory, Sequence):
        memory = [memory] * d
    p = replace(p, limits=_sizes("memory", memory, d))
    known = _known(p, starts)
    steps = {name: p.play(schedule.actions).makespan for name, schedule in known.items()}
    order = [known[name] for name in sorted(steps, key=lambda name: steps[name])]
    shortest, bound = min(steps.values()), lower_bound(p)
    rows, step = order[0].actions, math.inf
    for time, found in _found(p, order):
        if time < step * (1 - ROUNDING) and time <= shortest * (1 + ROUNDING):
            rows, step = found, time
        if step <= bound * (1 + _CLOSE):
            break
    report = Report(min(step, shortest), bound, steps, tuple(map(p.peak, rows)), tuple(p.limits))
    return AutoSchedule(m, devices, rows, "auto", report)


def _sizes(name: str, sizes: Sequence[float], n: int) -> tuple[float, ...]:
    if len(sizes) != n or not all(size >= 0 for size in sizes):
        each = "device" if name == "memory" else "stage"
        raise ValueError(f"{name}={tuple(sizes)}: give {n} numbers >= 0, one for each {each}")
    return tuple(sizes)


def _known(p: Problem, starts: Iterable[Schedule]) -> dict[str, Schedule]:
    """The schedules to begin with: all that fit, those given and those with names."""
    found = {f"{made.name}, given": made for made in starts}
    for name in SCHEDULES:
        with suppress(ValueError):  # it is for other stages
            found[name] = build(name, p.m, p.device_of)
    fitting = {
        name: schedule
        for name, schedule in found.items()
        if (p.split or not schedule.splits) and p.fits(schedule.actions)
    }
    if not fitting:
        peaks = tuple(map(p.peak, naive(p.m, p.device_of).actions))
        raise ValueError(
            f"memory={p.limits}: one micro-batch at a time takes {peaks}; give each device at "
            "least as much, or recompute"
        )
    return fitting


def _found(p: Problem, starts: Iterable[Schedule]) -> Iterator[tuple[float, _Rows]]:
    """Schedules and their steps: those given, with micro-batches in order, and lists of these."""
    # What brings gradients on first, then forwards, then weight halves.
    ranks: dict[Kind, int] = {"backward": 0, "backward_input": 0, "forward": 1, HALVES[1]: 2}
    stages = range(len(p.device_of))
    urgencies: list[Urgencies] = [
        {kind: [[float(rank * p.m + i) for i in range(p.m)] for _ in stages]
         for kind, rank in ranks.items()}
    ]  # fmt: skip
    for schedule in starts:
        rows = _in_order(p, schedule)
        if p.fits(rows):
            played = p.play(rows)
            yield played.makespan, rows
            urgencies.append(played.ends)
    lists = [
        [[Action(kind, i, j) for i in range(p.m)] for kind in p.kinds for j in p.stages(d)]
        for d in range(len(p.limits))
    ]
    for patience, each, careful in product(_PATIENCE, urgencies[:2], (True, False)):
        if not careful or any(p.spare):
            yield from _back_and_forth(p, lists, each, patience, careful)


def _back_and_forth(
    p: Problem, lists: Sequence[Sequence[list[Action]]], urgencies: Urgencies, *how: Any
) -> Iterator[tuple[float, _Rows]]:
    """Lists again and again, until that was of no use twice."""
    least, useless = math.inf, 0
    while useless < 2:
        useless += 1
        for mirrored in (False, True):
            found = Lister(p, lists, urgencies, *how, mirrored=mirrored)
            if found.stuck:
                return
            rows = tuple([tuple(row[:: -1 if mirrored else 1]) for row in found.rows])
            time = p.play(rows).makespan
            yield time, rows
            if time < least * (1 - ROUNDING):
                least, useless = time, 0
            # What ends last in this direction is the first in the other one.
            urgencies = {
                kind: [[-end for end in ends] for ends in row] for kind, row in found.ends.items()
            }


def _in_order(p: Problem, schedule: Schedule) -> _Rows:
    """The same kinds in the same order, with the micro-batches of each stage in theirs."""
    numbers: dict[tuple[Kind, int], Iterator[int]] = defaultdict(count)
    kinds: dict[Kind, tuple[Kind, ...]] = {"backward": HALVES}
    if not p.split:
        kinds = {HALVES[0]: ("backward",), HALVES[1]: ()}
    rows = []
    for row in schedule.actions:
        each = [(kind, j) for old, _, j in row for kind in kinds.get(old, (old,))]
        rows.append(tuple([Action(kind, next(numbers[kind, j]), j) for kind, j in each]))
    return tuple(rows)


def _least(costs: Costs) -> Costs:
    """What each micro-batch takes at least."""
    last = costs.last or costs
    times = {
        name: tuple(map(min, getattr(costs, name), getattr(last, name)))
        for name in ("forward", "backward_input", "backward_weight", "transfer", "recompute")
    }
    skips = {skip: min(time, last.skips.get(skip, 0.0)) for skip, time in costs.skips.items()}
    return replace(costs, last=None, skips=skips, **times)


def lower_bound(p: Problem) -> float:
    """No schedule of this problem has a shorter makespan.

    It is the longest of three: the way of one micro-batch; for each device all of its work, which
    begins when the first micro-batch has come to it, and after which, where backwards are whole,
    the last gradient goes on to stage 0; and for each memory, by Little's law, how often its places
    are taken: a micro-batch keeps one from its forward until its gradient can be back.
    """
    # The way of one micro-batch, whose weight halves nobody waits for; the quickest one is
    # recomputed only where all are.
    own, costs = [p.stages(d) for d in range(len(p.limits))], _least(p.costs)
    kinds = p.kinds[:2]
    rows = [
        [Action(kind, 0, j) for kind in kinds for j in sorted(stages, reverse=kind != "forward")]
        for stages in own
    ]
    way = play(rows, 1, p.device_of, costs, [count == p.m for count in p.recomputed])
    there, back = (
        [ends[0] - time for ends, time in zip(way.ends[kind], costs.times[kind], strict=True)]
        for kind in kinds
    )  # when it starts
    bounds: list[float] = list(map(add, back, costs.times["backward"]))
    for stages, limit in zip(own, p.limits, strict=True):
        first, memory, work, held = stages[0], limit * (1 + ROUNDING), 0.0, 0.0
        for j in stages:
            whole = costs.times["backward"][j]
            work += p.m * (costs.forward[j] + whole) + p.recomputed[j] * costs.recompute[j]
            held += p.held(0, j) * (back[j] - there[j]) + p.activations[j] * whole
        turns = p.m * held / memory if held else 0.0
        size = p.activations[first]
        if len(stages) == 1 and held and p.held(0, first) == size:  # places are whole ones
            turns = math.ceil(p.m / max(1, math.floor(min(p.m, memory / size)))) * held / size
        after = [
            costs.times["backward"][j] + costs.transfer[j] * (p.device_of[j] != p.device_of[j + 1])
            for j in range(0 if p.split else first)
        ]
        bounds.append(there[first] + max(work, turns) + math.fsum(after))
    return max(bounds)
