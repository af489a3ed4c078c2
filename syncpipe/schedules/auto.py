"""A schedule for costs and memory that are known: greedy passes, forth and back in time.

The times of one pass are the urgencies of the next, in the other direction, so that each makes good
what the other could not see (Li and Willis 1992, An iterative scheduling technique for
resource-constrained project scheduling). Nothing is drawn and no clock is read.

All micro-batches of a stage cost the same, so it does not pay that one overtakes another: on each
stage they go forward from the first to the last, and back likewise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, product

from syncpipe.schedules.build import SCHEDULES, build
from syncpipe.schedules.greedy import Lister, Node, Work, edges_of
from syncpipe.schedules.named import naive, one_f_one_b, zb_h1
from syncpipe.schedules.player import Costs, counted, play
from syncpipe.schedules.schedule import HALVES, KINDS, Action, Kind, Schedule

__all__ = ["AutoSchedule", "Problem", "Report", "auto", "lower_bound"]

#: Of floats that differ by less, relative, neither is the greater one.
_ROUNDING = 1e-9
#: A schedule that is longer than the bound by less, relative, is good enough.
_CLOSE = 1e-3
#: Of passes, one after another (see :mod:`syncpipe.schedules.greedy`).
_PATIENCE = (0.0, 1.0, 0.5, 2.0)

_Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Report:
    """Simulated steps, in the unit of the costs, and memory, in that of the activations."""

    step: float  # of the schedule
    bound: float  # no schedule for these costs and this memory has a shorter one
    named: Mapping[str, float]  # steps of the schedules with names that fit, the shortest first
    memory: tuple[float, ...]  # for each device the most that it holds at once
    limits: tuple[float, ...]  # for each device what it may

    @property
    def best(self) -> str:
        """The named schedule with the shortest step."""
        return next(iter(self.named))

    @property
    def gain(self) -> float:
        """The step of the best named schedule over this one: at least 1."""
        return self.named[self.best] / self.step if self.step else 1.0

    @property
    def over_bound(self) -> float:
        """The step over the bound: 1 where nothing is left to be found."""
        return max(1.0, self.step / self.bound) if self.bound else 1.0  # less is rounding

    def __str__(self) -> str:
        named = ", ".join(f"{name} {step:.4g}" for name, step in self.named.items())
        pairs = zip(self.memory, self.limits, strict=True)
        return (
            f"step {self.step:.4g}, {self.over_bound:.3f} times the bound {self.bound:.4g}; "
            f"{self.best} takes {self.gain:.3f} times as long\n"
            f"named schedules that fit: {named}\n"
            f"memory of each device: {', '.join(f'{a:.4g} of {b:.4g}' for a, b in pairs)}"
        )


@dataclass(frozen=True, eq=False)
class AutoSchedule(Schedule):
    """A schedule by :func:`syncpipe.schedules.auto`; its ``report`` says what it is worth."""

    report: Report = field(default=Report(0.0, 0.0, {}, (), ()), repr=False)


@dataclass(frozen=True)
class Problem:
    """What a schedule is sought for: the arguments of :func:`auto`, checked."""

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

    @cached_property
    def times(self) -> list[float]:
        """For each code, without recomputation."""
        return [time for kind in self.kinds for time in self.costs.times[kind]]

    @cached_property
    def edges(self) -> list[tuple[int, int, float]]:
        """Those between codes, without time on one device."""
        codes, where = len(self.times), self.device_of * 3
        edges = [edge for edge in edges_of(self.costs) if max(edge[:2]) < codes]
        return [(a, b, time * (where[a] != where[b])) for a, b, time in edges]

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
        m, n, whole = self.m, self.n, self.activations
        last = len(self.kinds) - 1

        def table(value: Callable[[int, int, int], float]) -> list[list[float]]:
            codes = product(range(last + 1), range(n))
            return [[value(row, i, j) for i in range(m)] for row, j in codes]

        def again(row: int, i: int, j: int) -> float:
            return self.costs.recompute[j] if row == 1 and i < self.recomputed[j] else 0.0

        def takes(row: int, i: int, j: int) -> float:
            return (self.held(i, j), whole[j] - self.held(i, j), 0.0)[row]

        # What must be left over to lead one micro-batch through all later stages on the device, so
        # that it does not get stuck, and what a recomputation takes on besides.
        extra = [whole[j] - self.held(0, j) for j in range(n)]
        forth, back = [], []
        for j, d in enumerate(self.device_of):
            own = self.stages(d)
            later = [k for k in own if k > j]
            need = math.fsum(max(self.held(0, k), self.held(m - 1, k)) for k in later)
            forth.append(need + max(extra[k] for k in own))
            back.append(need + max([0.0, *(extra[k] - extra[j] for k in later)]))
        work = Work(
            [
                [[(row * n + j, i) for i in range(m)] for row in range(last + 1) for j in own]
                for own in map(self.stages, range(len(self.limits)))
            ],
            self.edges,
            [(d,) for d in self.device_of] * (last + 1),
            table(lambda row, i, j: self.times[row * n + j] + again(row, i, j)),
            table(again),
            table(takes),
            table(lambda row, _, j: whole[j] if row == last else 0.0),
            forth + [0.0] * n * last,
            [limit * (1 + _ROUNDING) for limit in self.limits],
        )
        return work, work.mirrored(back * (last + 1))


def auto(
    m: int,
    device_of: int | Sequence[int],
    *,
    costs: Costs,
    rematerialized: Sequence[int] | None = None,
    activations: Sequence[float] | None = None,
    inputs: Sequence[float] | None = None,
    memory: float | Sequence[float] | None = None,
    split: bool = True,
    starts: Iterable[Schedule] = (),
) -> AutoSchedule:
    """Make a schedule to measure: none with a name is shorter in the same memory, simulated.

    It begins with the named schedules that fit, and lists all actions anew by their times, forth
    and back, until it is within a thousandth of a lower bound or nothing becomes shorter::

        with pipe.trace() as trace:
            pipe.train_batch(input, target, loss_fn=loss_fn, schedule="zb_h1")
        schedule = auto(8, 4, costs=trace.costs)
        print(schedule.report)
        pipe.train_batch(input, target, loss_fn=loss_fn, schedule=schedule)

    The same arguments give the same schedule. On each stage micro-batches go forward and back from
    the first to the last (unless nothing in this order is as short as a named schedule that has
    another one), so without halves gradients are those of 1F1B to the last bit, whatever the costs.

    Args:
        m: number of micro-batches.
        device_of: number of stages, or for each stage the index of its device.
        costs: how long everything takes, as a trace has it (``trace.costs``).
        rematerialized: for each stage how many micro-batches, the first ones, are recomputed. None:
            nothing is recomputed.
        activations: for each stage the memory that a micro-batch takes from its forward to the end
            of its backward, or of its weight half. By default 1, so that memory counts
            micro-batches.
        inputs: for each stage the memory that a micro-batch that is recomputed takes until then;
            no more than its activations, and by default as much.
        memory: for each device, or for all, what activations may take, in the same unit;
            ``math.inf`` for no limit. By default what ``"1f1b"`` takes, or with halves ``"zb_h1"``
            if that is more.
        split: whether backwards may come in two halves.
        starts: schedules to begin with, beside those with names.

    Returns:
        The schedule; its ``report`` has the simulated step, the bound and the named schedules.

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
    steps = dict(sorted(steps.items(), key=lambda item: item[1]))
    shortest, bound = min(steps.values()), lower_bound(p)
    rows, step = known[next(iter(steps))].actions, math.inf
    for time, found in _found(p, [known[name] for name in steps]):
        if time < step * (1 - _ROUNDING) and time <= shortest * (1 + _ROUNDING):
            rows, step = found, time
        if step <= bound * (1 + _CLOSE):
            break
    report = Report(min(step, shortest), bound, steps, tuple(map(p.peak, rows)), p.limits)
    return AutoSchedule(m, devices, rows, "auto", report)


def _sizes(name: str, sizes: Sequence[float], n: int) -> tuple[float, ...]:
    if len(sizes) != n or not all(size >= 0 for size in sizes):
        each = "device" if name == "memory" else "stage"
        raise ValueError(
            f"{name}={tuple(sizes)}: give {n} numbers, one for each {each}, none of them negative"
        )
    return tuple(sizes)


def _known(p: Problem, starts: Iterable[Schedule]) -> dict[str, Schedule]:
    """The schedules to begin with: all that fit, those with names and those given."""
    found: dict[str, Schedule] = {}
    for name in sorted(SCHEDULES, key=len):  # of names for the same one the short one is kept
        with suppress(ValueError):  # it is for other stages
            schedule = build(name, p.m, p.device_of)
            if schedule not in found.values():
                found[name] = schedule
    found |= {f"{made.name}, given": made for made in starts if made not in found.values()}
    fitting = {
        name: schedule
        for name, schedule in found.items()
        if (p.split or not schedule.splits) and p.fits(schedule.actions)
    }
    if fitting:
        return fitting
    peaks = tuple(map(p.peak, naive(p.m, p.device_of).actions))
    d = next(d for d, peak in enumerate(peaks) if peak > p.limits[d])
    raise ValueError(
        f"memory={p.limits}: device {d} has {p.limits[d]:.4g}, but one micro-batch at a time takes "
        f"{peaks[d]:.4g} there; give each device at least {peaks}, or recompute"
    )


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
            urgencies.append([ends for kind in p.kinds for ends in played.ends[kind]])
    careful = p.work()
    free = [replace(work, reserve=[0.0] * len(p.times)) for work in careful]
    ways = [careful, free] if any(careful[0].reserve) else [free]
    for patience, each, works in product(_PATIENCE, urgencies[:2], ways):
        yield from _back_and_forth(p, works, each, patience)


def _back_and_forth(
    p: Problem, works: Sequence[Work], urgencies: Sequence[Sequence[float]], patience: float
) -> Iterator[tuple[float, _Rows]]:
    """Lists again and again, until that was of no use twice."""

    def actions(row: Iterable[Node]) -> tuple[Action, ...]:
        return tuple([Action(p.kinds[c // p.n], i, c % p.n) for c, i in row])

    least, useless = math.inf, 0
    while useless < 2:
        useless += 1
        for work, step in zip(works, (1, -1), strict=True):
            found = Lister(work, urgencies, patience)
            if found.stuck:
                return
            rows = tuple([actions(row[::step]) for row in found.rows])
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

    It is the longest of three: the way of one micro-batch, and what each device and each memory
    needs for all of them. A device cannot begin before the first micro-batch has come to its first
    stage, has all of its work to do, and may have to idle twice more: until the first gradient is
    there it can go forward only, with no more micro-batches than its memory holds; and while the
    last gradient goes on from it to stage 0, only weight halves are left to it, those of
    micro-batches that it still holds::

        device 1    ......F0F1F2F3      I0F4W0I1F5W1I2 ...... I7W5W6W7      |
                    head        middle                              tail

    Memory has a bound of its own (Little's law): each micro-batch takes a place on the device from
    its forward until its gradient can be back at the earliest, and there are only so many places.
    """
    head, tail = _ways(p)
    alone = max(begin + time for begin, time in zip(head, p.times, strict=True))
    bounds = [bound(p, d, head, tail) for bound in (_of_device, _of_memory)
              for d in range(len(p.limits))]  # fmt: skip
    return max(alone, *bounds)


def _ways(p: Problem) -> tuple[list[float], list[float]]:
    """For each code the longest way of a micro-batch to its start, and from its end."""
    n, times = p.n, p.times
    codes = [*range(n), *reversed(range(n, 2 * n)), *range(2 * n, len(times))]
    # A recomputation that not all micro-batches have, the quickest one does not have.
    again = [p.costs.recompute[j] * (p.recomputed[j] == p.m) for j in range(n)]
    ways = [(a, b, time + again[a] if b == a + n < 2 * n else time) for a, b, time in p.edges]
    head, tail = [0.0] * len(times), [0.0] * len(times)
    for c in codes:
        head[c] = max([0.0, *(head[a] + times[a] + time for a, b, time in ways if b == c)])
    for c in reversed(codes):
        tail[c] = max([0.0, *(time + times[b] + tail[b] for a, b, time in ways if a == c)])
    return head, tail


def _of_device(p: Problem, d: int, head: list[float], tail: list[float]) -> float:
    """Its work, and when it must idle."""
    n, stages = p.n, p.stages(d)
    recompute = p.costs.recompute
    work = p.m * math.fsum(p.times[c] for c in range(len(p.times)) if c % n in stages)
    work += math.fsum(p.recomputed[j] * recompute[j] for j in stages)
    first, last = stages[0], stages[-1]
    middle = head[n + last] - head[first]
    middle -= max((recompute[j] for j in stages if p.recomputed[j]), default=0.0)
    middle -= _most(p, d, {j: p.times[j] for j in stages}, {j: p.held(0, j) for j in stages})
    back = [(b, time) for a, b, time in p.edges if a == n + first and b < 2 * n]
    idle = max((time + p.times[b] + tail[b] for b, time in back), default=0.0)
    weights = {j: p.times[2 * n + j] for j in stages} if p.split else {}
    idle -= _most(p, d, weights, {j: p.activations[j] for j in stages})
    return head[first] + work + max(0.0, middle) + max(0.0, idle)


def _most(p: Problem, d: int, times: dict[int, float], sizes: dict[int, float]) -> float:
    """The longest that the memory of a device lets it go on, nothing being given back."""
    left, most = p.limits[d] * (1 + _ROUNDING), 0.0
    for j in sorted(times, key=lambda j: -times[j] / sizes[j] if sizes[j] else -math.inf):
        count: float = p.m
        if sizes[j] * count > left:
            count = left / sizes[j]
            if len(times) == 1:
                count = math.floor(count)
        most += count * times[j]
        left -= count * sizes[j]
    return most


def _of_memory(p: Problem, d: int, head: list[float], tail: list[float]) -> float:
    """How often its places can be taken."""
    n, memory, stages = p.n, p.limits[d] * (1 + _ROUNDING), p.stages(d)
    held = []
    for j in stages:
        back = math.fsum(p.times[j + n :: n])
        taken, whole = p.held(0, j), p.activations[j]
        held.append(taken * (head[n + j] - head[j] + back) + (whole - taken) * back)
    first = stages[0]
    turns = p.m * math.fsum(held) / memory if any(held) else 0.0
    if len(stages) == 1 and held[0] and p.held(0, first) == p.activations[first]:
        places = max(1, math.floor(min(p.m, memory / p.activations[first])))
        turns = math.ceil(p.m / places) * held[0] / p.activations[first]
    return head[first] + turns + (0.0 if p.split else tail[n + first])
