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
from typing import Any

from syncpipe.schedules.build import SCHEDULES, build
from syncpipe.schedules.greedy import Lister, Work, edges_of
from syncpipe.schedules.named import naive, one_f_one_b, zb_h1
from syncpipe.schedules.player import Costs, counted, play
from syncpipe.schedules.schedule import HALVES, KINDS, Action, Kind, Schedule

__all__ = ["AutoSchedule", "Problem", "Report", "auto", "lower_bound"]

_ROUNDING = 1e-9  # of floats that differ by less, relative, neither is the greater one
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


@dataclass(frozen=True)
class Problem:
    """The arguments of :func:`auto`, checked."""

    m: int
    device_of: tuple[int, ...]
    costs: Costs
    recomputed: tuple[int, ...]
    activations: tuple[float, ...]
    inputs: tuple[float, ...]
    limits: tuple[float, ...]
    split: bool

    @property
    def n(self) -> int:
        """Number of stages."""
        return len(self.device_of)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of the codes of :mod:`syncpipe.schedules.greedy`, row by row."""
        return ("forward", *HALVES) if self.split else ("forward", "backward")

    def stages(self, d: int) -> list[int]:
        """Those of a device."""
        return [j for j in range(self.n) if self.device_of[j] == d]

    def held(self, i: int, j: int) -> float:
        """The memory of a cell from its forward on; that of its activations from its backward."""
        return self.inputs[j] if i < self.recomputed[j] else self.activations[j]

    def play(self, rows: Sequence[Sequence[Action]]) -> float:
        """The step of a schedule."""
        return play(rows, self.m, self.device_of, self.costs, self.recomputed).makespan

    def peak(self, row: Iterable[Action]) -> float:
        """The most that a device holds at once."""
        held = peak = 0.0
        for kind, i, j in row:
            first = self.held(i, j)
            if kind == "forward":
                held += first
            if KINDS[kind].sends == "gradient":
                held += self.activations[j] - first
            peak = max(peak, held)
            if KINDS[kind].alive < 0:
                held -= self.activations[j]
        return peak

    def fits(self, rows: Iterable[Iterable[Action]]) -> bool:
        """Whether no device ever holds more than it may."""
        limits = zip(map(self.peak, rows), self.limits, strict=True)
        return all(peak <= limit * (1 + _ROUNDING) for peak, limit in limits)

    def work(self) -> tuple[Work, Work]:
        """What is to be listed, forth and back in time."""
        m, own = self.m, [self.stages(d) for d in range(len(self.limits))]
        lists = [
            [[Action(kind, i, j) for i in range(m)] for kind in self.kinds for j in stages]
            for stages in own
        ]
        # What must be left over to lead one micro-batch through all later stages on the device, so
        # that it does not get stuck, and what a recomputation takes on besides.
        reserve = []
        for j, d in enumerate(self.device_of):
            later = [max(self.held(0, k), self.held(m - 1, k)) for k in own[d] if k > j]
            extra = max(self.activations[k] - self.held(0, k) for k in own[d])
            reserve.append(math.fsum(later) + extra)
        limits = [limit * (1 + _ROUNDING) for limit in self.limits]
        memory = limits, self.activations, self.inputs, self.recomputed, reserve
        work = Work(m, self.device_of, self.costs, lists, *memory)
        return work, work.mirrored()


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
    steps = {name: p.play(schedule.actions) for name, schedule in known.items()}
    order = [known[name] for name in sorted(steps, key=lambda name: steps[name])]
    shortest, bound = min(steps.values()), lower_bound(p)
    rows, step = order[0].actions, math.inf
    for time, found in _found(p, order):
        if time < step * (1 - _ROUNDING) and time <= shortest * (1 + _ROUNDING):
            rows, step = found, time
        if step <= bound * (1 + _CLOSE):
            break
    report = Report(min(step, shortest), bound, steps, tuple(map(p.peak, rows)), p.limits)
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
    m, n = p.m, p.n
    # What brings gradients on first, then forwards, then weight halves.
    urgencies = [[[float(rank * m + i) for i in range(m)] for rank in (1, 0, 2) for _ in range(n)]]
    for schedule in starts:
        rows = _in_order(p, schedule)
        if p.fits(rows):
            played = play(rows, m, p.device_of, p.costs, p.recomputed)
            yield played.makespan, rows
            kinds = p.kinds if p.split else (*p.kinds, "backward")
            urgencies.append([ends for kind in kinds for ends in played.ends[kind]])
    works = p.work()
    for patience, each, careful in product(_PATIENCE, urgencies[:2], (True, False)):
        if not careful or any(works[0].reserve):
            yield from _back_and_forth(p, works, each, patience, careful)


def _back_and_forth(
    p: Problem, works: Sequence[Work], urgencies: list[list[float]], *how: Any
) -> Iterator[tuple[float, _Rows]]:
    """Lists again and again, until that was of no use twice."""
    least, useless = math.inf, 0
    while useless < 2:
        useless += 1
        for work, step in zip(works, (1, -1), strict=True):
            found = Lister(work, urgencies, *how)
            if found.stuck:
                return
            rows = tuple([tuple(row[::step]) for row in found.rows])
            time = p.play(rows)
            yield time, rows
            if time < least * (1 - _ROUNDING):
                least, useless = time, 0
            # What ends last in this direction is the first in the other one.
            urgencies = [[-end for end in ends] for ends in found.ends]


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


def lower_bound(p: Problem) -> float:
    """No schedule of this problem has a shorter makespan.

    It is the longest of three: the way of one micro-batch; for each device all of its work, which
    begins when the first micro-batch has come to it, and after which, where backwards are whole,
    the last gradient goes on to stage 0; and for each memory, by Little's law, how often its places
    are taken: a micro-batch keeps one from its forward until its gradient can be back.
    """
    n, m, again, where = p.n, p.m, p.costs.recompute, p.device_of * 3
    times = [time for kind in p.kinds for time in p.costs.times[kind]]
    times += [0.0] * (3 * n - len(times))
    # For each code the longest way of a micro-batch to its start, and from its end. The quickest
    # one is recomputed only where all are.
    head, tail = [0.0] * len(times), [0.0] * len(times)
    ways = []
    for a, b, time in edges_of(p.costs):
        recomputed = b == a + n < 2 * n and p.recomputed[a] == m
        ways.append((a, b, again[a] if recomputed else time * (where[a] != where[b])))
    codes = [*range(n), *reversed(range(n, 2 * n)), *range(2 * n, 3 * n)]
    for c in codes:
        head[c] = max([0.0, *(head[a] + times[a] + time for a, b, time in ways if b == c)])
    for c in reversed(codes):
        tail[c] = max([0.0, *(time + times[b] + tail[b] for a, b, time in ways if a == c)])
    bounds = [begin + time for begin, time in zip(head, times, strict=True)]
    for d, limit in enumerate(p.limits):
        own, memory = p.stages(d), limit * (1 + _ROUNDING)
        first, work, held = own[0], 0.0, 0.0
        for j in own:
            back = math.fsum(times[j + n :: n])
            work += m * (times[j] + back) + p.recomputed[j] * again[j]
            held += p.held(0, j) * (head[n + j] - head[j]) + p.activations[j] * back
        turns = m * held / memory if held else 0.0
        size = p.activations[first]
        if len(own) == 1 and held and p.held(0, first) == size:  # places are whole ones
            turns = math.ceil(m / max(1, math.floor(min(m, memory / size)))) * held / size
        bounds.append(head[first] + max(work, turns) + (0.0 if p.split else tail[n + first]))
    return max(bounds)
