"""A schedule for costs and memory that are known: greedy passes, forth and back in time.

The times of one pass are the urgencies of the next, in the other direction, so that each makes good
what the other could not see (Li and Willis 1992, An iterative scheduling technique for
resource-constrained project scheduling). Nothing is drawn and no clock is read: the same problem
has the same result, on any machine.

All micro-batches of a stage cost the same, so it does not pay that one overtakes another: on each
stage they go forward from the first to the last, and back likewise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, count, product

from syncpipe.schedules.build import SCHEDULES, build
from syncpipe.schedules.kinds import HALVES, KINDS, Kind
from syncpipe.schedules.lister import Node, Work, edges_of, listed
from syncpipe.schedules.named import naive, one_f_one_b, zb_h1
from syncpipe.schedules.player import Costs, counted, play
from syncpipe.schedules.schedule import Action, Schedule

__all__ = ["AutoSchedule", "Problem", "Report", "auto", "lower_bound"]

#: Of floats that differ by less, relative, neither is the greater one.
_ROUNDING = 1e-9
#: A schedule that is longer than the bound by less, relative, is good enough.
_CLOSE = 1e-3
#: Of passes, one after another (see :mod:`syncpipe.schedules.lister`).
_PATIENCE = (0.0, 1.0, 0.5, 2.0)


@dataclass(frozen=True)
class Report:
    """Simulated steps, in the unit of the costs, and memory, in that of the activations.

    Attributes:
        step: of the schedule.
        bound: no schedule for these costs and this memory has a shorter one.
        named: steps of the schedules with names that fit, the shortest first.
        memory: for each device the most that it holds at once.
        limits: for each device what it may.
    """

    step: float
    bound: float
    named: Mapping[str, float]
    memory: tuple[float, ...]
    limits: tuple[float, ...]

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
        memory = ", ".join(
            f"{held:.4g} of {limit:.4g}"
            for held, limit in zip(self.memory, self.limits, strict=True)
        )
        return (
            f"step {self.step:.4g}, {self.over_bound:.3f} times the bound {self.bound:.4g}; "
            f"{self.best} takes {self.gain:.3f} times as long\n"
            f"named schedules that fit: {named}\n"
            f"memory of each device: {memory}"
        )


@dataclass(frozen=True, eq=False)
class AutoSchedule(Schedule):
    """A schedule by :func:`syncpipe.schedules.auto`; equal to any with the same actions.

    Attributes:
        report: what it is worth.
    """

    report: Report = field(default=Report(0.0, 0.0, {}, (), ()), repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        mine, theirs = ((each.m, each.device_of, each.actions) for each in (self, other))
        return mine == theirs

    __hash__ = Schedule.__hash__


@dataclass(frozen=True)
class Problem:
    """What a schedule is sought for.

    Attributes:
        m: number of micro-batches.
        device_of: for each stage the index of its device.
        costs: how long everything takes.
        recomputed: for each stage so many micro-batches, the first ones, are recomputed.
        activations: for each stage the memory of one micro-batch from its forward (or, if it is
            recomputed, from there) to the end of its backward, or of its weight half.
        inputs: for each stage the memory of one that is recomputed, from its forward on.
        limits: for each device its memory.
        split: whether backwards come in two halves.
    """

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
        """Of the codes of :mod:`syncpipe.schedules.lister`, row by row."""
        return ("forward", *HALVES) if self.split else ("forward", "backward")

    @cached_property
    def times(self) -> list[float]:
        """For each code, without recomputation."""
        return [time for kind in self.kinds for time in self.costs.times[kind]]

    @cached_property
    def edges(self) -> list[tuple[int, int, float]]:
        """As :func:`syncpipe.schedules.lister.edges_of`, without time on one device."""
        codes, where = len(self.times), self.device_of * 3
        edges = [edge for edge in edges_of(self.costs) if max(edge[:2]) < codes]
        return [(a, b, time * (where[a] != where[b])) for a, b, time in edges]

    def stages(self, d: int) -> list[int]:
        """Those of a device."""
        return [j for j in range(self.n) if self.device_of[j] == d]

    def held(self, i: int, j: int) -> float:
        """The memory of a cell from its forward on."""
        return self.inputs[j] if i < self.recomputed[j] else self.activations[j]

    def play(self, actions: Sequence[Sequence[Action]]) -> float:
        """The step of a schedule."""
        return play(actions, self.m, self.device_of, self.costs, self.recomputed).makespan

    def peak(self, actions: Iterable[Action]) -> float:
        """The most that a device holds at once."""
        held = peak = 0.0
        for kind, i, j in actions:
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
        """Whether no device ever holds more than it may, given what each of them does."""
        limits = zip(map(self.peak, rows), self.limits, strict=True)
        return all(peak <= limit * (1 + _ROUNDING) for peak, limit in limits)

    def actions(self, row: Iterable[Node]) -> tuple[Action, ...]:
        """What nodes stand for."""
        return tuple([Action(self.kinds[c // self.n], i, c % self.n) for c, i in row])

    def work(self) -> tuple[Work, Work]:
        """What is to be listed, forth and back in time.

        A reserve is what must be left over to lead one micro-batch through all later stages on the
        device, so that it does not get stuck, and what a recomputation takes on besides.
        """
        m, n, whole = self.m, self.n, self.activations
        codes, last = range(len(self.times)), len(self.times) // n - 1
        cells = [[(c // n, i, c % n) for i in range(m)] for c in codes]
        again = [
            [self.costs.recompute[j] * (row == 1 and i < self.recomputed[j]) for row, i, j in cell]
            for cell in cells
        ]
        held = [[self.held(i, j) for i in range(m)] for j in range(n)]
        rest = [[whole[j] - first for first in held[j]] for j in range(n)]
        none = [[0.0] * m for _ in range(n)]
        extra = [whole[j] - self.held(0, j) for j in range(n)]
        forth, back = [0.0 for _ in codes], [0.0 for _ in codes]
        for c in codes:
            own = self.stages(self.device_of[c % n])
            later = [k for k in own if k > c % n]
            need = math.fsum(max(self.held(0, k), self.held(m - 1, k)) for k in later)
            back[c] = need + max([0.0, *(extra[k] - extra[c % n] for k in later)])
            forth[c] = need + max(extra[k] for k in own) if c < n else 0.0
        work = Work(
            [
                [[(row * n + j, i) for i in range(m)] for row in range(last + 1) for j in own]
                for own in map(self.stages, range(len(self.limits)))
            ],
            self.edges,
            [(self.device_of[c % n],) for c in codes],
            [[time + more for more in row] for time, row in zip(self.times, again, strict=True)],
            again,
            [*held, *rest, *none][: len(codes)],
            [*none, *none, *none][: n * last] + [[size] * m for size in whole],
            forth,
            [limit * (1 + _ROUNDING) for limit in self.limits],
        )
        return work, work.mirrored(back)


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
    n = len(devices)
    _check("costs", costs.forward, n)
    counts = counted(rematerialized, m, n)
    whole = _sizes("activations", (1.0,) * n if activations is None else activations, n)
    first = _sizes("inputs", whole if inputs is None else inputs, n)
    for j in range(n):
        if first[j] > whole[j]:
            raise ValueError(
                f"inputs={first} are part of activations={whole}, but larger on stage {j}"
            )
    split = split and any(costs.backward_weight)
    free = (math.inf,) * len(usual.actions)
    problem = Problem(m, devices, costs, counts, whole, first, free, split)
    if memory is None:
        others = zb_h1(m, devices) if split else usual
        pairs = zip(usual.actions, others.actions, strict=True)
        memory = [max(map(problem.peak, pair)) for pair in pairs]
    elif not isinstance(memory, Sequence):
        memory = [memory] * len(free)
    return _made(replace(problem, limits=_sizes("memory", memory, len(free))), starts)


def _sizes(name: str, sizes: Sequence[float], n: int) -> tuple[float, ...]:
    checked = tuple(sizes)
    _check(name, checked, n)
    if not all(size >= 0 for size in checked):
        raise ValueError(f"{name}={checked}: sizes are numbers, and not negative")
    return checked


def _check(name: str, values: Sequence[object], n: int) -> None:
    if len(values) != n:
        what = "devices" if name == "memory" else "stages"
        raise ValueError(f"{name} has {len(values)} numbers, but there are {n} {what}")


def _made(problem: Problem, starts: Iterable[Schedule]) -> AutoSchedule:
    m, devices = problem.m, problem.device_of
    named = _named(problem)
    named |= {f"{made.name}, given": made for made in starts if made not in named.values()}
    known = {
        name: made
        for name, made in named.items()
        if (problem.split or not made.splits) and problem.fits(made.actions)
    }
    if not known:
        raise ValueError(_shortage(problem))
    steps = {name: problem.play(made.actions) for name, made in known.items()}
    steps = {name: steps[name] for name in sorted(steps, key=lambda name: steps[name])}
    named_step, bound = min(steps.values()), lower_bound(problem)
    actions, step = known[next(iter(steps))].actions, math.inf
    for time, found in _found(problem, [known[name] for name in steps]):
        if time < step * (1 - _ROUNDING) and time <= named_step * (1 + _ROUNDING):
            actions, step = found, time
        if step <= bound * (1 + _CLOSE):
            break
    memory = tuple(map(problem.peak, actions))
    report = Report(min(step, named_step), bound, steps, memory, problem.limits)
    return AutoSchedule(m, devices, actions, "auto", report)


_Actions = tuple[tuple[Action, ...], ...]


def _found(problem: Problem, starts: Iterable[Schedule]) -> Iterator[tuple[float, _Actions]]:
    """Schedules and their steps: those given, with micro-batches in order, and lists of these."""
    m, n = problem.m, problem.n
    # What brings gradients on first, then forwards, then weight halves.
    urgencies = [[[float(rank * m + i) for i in range(m)] for rank in (1, 0, 2) for _ in range(n)]]
    for schedule in starts:
        actions = _in_order(problem, schedule)
        if problem.fits(actions):
            played = play(actions, m, problem.device_of, problem.costs, problem.recomputed)
            yield played.makespan, actions
            urgencies.append([ends for kind in problem.kinds for ends in played.ends[kind]])
    forth, back = problem.work()
    careful = [(forth, back)] if any(forth.reserve) else []
    free = tuple(replace(work, reserve=[0.0] * len(problem.times)) for work in (forth, back))
    for patience, each, works in product(_PATIENCE, urgencies[:2], [*careful, free]):
        yield from _back_and_forth(problem, works, each, patience)


def _back_and_forth(
    problem: Problem, works: Sequence[Work], urgencies: Sequence[Sequence[float]], patience: float
) -> Iterator[tuple[float, _Actions]]:
    """Lists again and again, until that was of no use twice."""
    least, useless = math.inf, 0
    while useless < 2:
        useless += 1
        for work, step in zip(works, (1, -1), strict=True):
            found = listed(work, urgencies, patience)
            if found is None:
                return
            actions = tuple([problem.actions(row[::step]) for row in found.rows])
            time = problem.play(actions)
            yield time, actions
            if time < least * (1 - _ROUNDING):
                least, useless = time, 0
            # What ends last in this direction is the first in the other one.
            urgencies = [[-end for end in ends] for ends in found.ends]


def _in_order(problem: Problem, schedule: Schedule) -> _Actions:
    """The same kinds in the same order, with the micro-batches of each stage in theirs."""
    numbers: dict[tuple[Kind, int], Iterator[int]] = defaultdict(count)
    kinds: dict[Kind, tuple[Kind, ...]] = {"backward": HALVES}
    if not problem.split:
        kinds = {HALVES[0]: ("backward",), HALVES[1]: ()}
    return tuple(
        tuple(
            [
                Action(kind, next(numbers[kind, j]), j)
                for old, _, j in row
                for kind in kinds.get(old, (old,))
            ]
        )
        for row in schedule.actions
    )


def _named(problem: Problem) -> dict[str, Schedule]:
    """Schedules to begin with: all that have a name and suit, and 1F1B with slots made to fit."""
    m, devices = problem.m, problem.device_of
    makers: dict[str, Callable[[int, tuple[int, ...]], Schedule]]
    makers = {name: partial(build, name) for name in SCHEDULES}
    makers["naive"] = naive
    for slots in ("textbook", "overlap"):
        fewer = _fewer(problem, one_f_one_b(m, devices, slots=slots))
        makers[f"1f1b, {slots} slots made to fit"] = partial(one_f_one_b, slots=fewer)
    found: dict[str, Schedule] = {}
    for name in sorted(makers, key=len):  # of names for the same one the short one is kept
        try:
            schedule = makers[name](m, devices)
        except ValueError:  # it is for other stages
            continue
        if schedule not in found.values():
            found[name] = schedule
    return found


def _fewer(problem: Problem, usual: Schedule) -> list[int]:
    """Slots as usual, but if memory is short fewer on all stages, in proportion.

    Equal ones would not do: who has as many as the stage before waits for it after each backward.
    """
    whole, share = problem.activations, 1.0
    for d, slots in zip(problem.device_of, usual.in_flight, strict=True):
        own, limit = problem.stages(d), problem.limits[d] * (1 + _ROUNDING)
        each = math.fsum(problem.held(problem.m - 1, j) for j in own)
        extra = max(whole[j] - problem.held(0, j) for j in own)
        if each * slots + extra > limit:
            share = min(share, (limit - extra) // each / slots)
    scaled = [max(1, math.ceil(share * slots - _ROUNDING)) for slots in usual.in_flight]
    return list(accumulate(scaled, min))


def _shortage(problem: Problem) -> str:
    peaks = tuple(map(problem.peak, naive(problem.m, problem.device_of).actions))
    d = next(d for d, peak in enumerate(peaks) if peak > problem.limits[d])
    return (
        f"memory={problem.limits}: device {d} has {problem.limits[d]:.4g}, but one "
        f"micro-batch at a time takes {peaks[d]:.4g} there; give each device at least {peaks}, or "
        "recompute"
    )


def lower_bound(problem: Problem) -> float:
    """No schedule of this problem has a shorter makespan.

    It is the longest of four: the way of one micro-batch, and what each device, each memory and
    each link needs for all of them. A device cannot begin before the first micro-batch has come to
    its first stage, has all of its work to do, and may have to idle twice more: until the first
    gradient is there it can go forward only, with no more micro-batches than its memory holds; and
    while the last gradient goes on from it to stage 0, only weight halves are left to it, those of
    micro-batches that it still holds::

        device 1    ......F0F1F2F3      I0F4W0I1F5W1I2 ...... I7W5W6W7      |
                    head        middle                              tail

    Memory has a bound of its own (Little's law): each micro-batch takes a place on the device from
    its forward until its gradient can be back at the earliest, and there are only so many places.
    """
    head, tail = _ways(problem)
    devices = range(len(problem.limits))
    return max(
        max(begin + time for begin, time in zip(head, problem.times, strict=True)),
        *(_of_device(problem, d, head, tail) for d in devices),
        *(_of_memory(problem, d, head, tail) for d in devices),
        *_of_links(problem, head, tail),
    )


def _ways(problem: Problem) -> tuple[list[float], list[float]]:
    """For each code the longest way of a micro-batch to its start, and from its end."""
    n, times = problem.n, problem.times
    codes = [*range(n), *reversed(range(n, 2 * n)), *range(2 * n, len(times))]
    ways = []
    for a, b, time in problem.edges:
        # A recomputation that not all micro-batches have, the quickest one does not have.
        again = a < n and b == a + n and problem.recomputed[a] == problem.m
        ways.append((a, b, time + problem.costs.recompute[a % n] * again))
    head, tail = [0.0] * len(times), [0.0] * len(times)
    for c in codes:
        ready = [head[a] + times[a] + time for a, b, time in ways if b == c]
        head[c] = max(ready, default=0.0)
    for c in reversed(codes):
        after = [time + times[b] + tail[b] for a, b, time in ways if a == c]
        tail[c] = max(after, default=0.0)
    return head, tail


def _of_device(p: Problem, d: int, head: list[float], tail: list[float]) -> float:
    """Its work, and when it must idle."""
    n, stages = p.n, p.stages(d)
    recompute, taken = p.costs.recompute, {j: p.held(0, j) for j in stages}
    work = p.m * math.fsum(p.times[c] for c in range(len(p.times)) if c % n in stages)
    work += math.fsum(p.recomputed[j] * recompute[j] for j in stages)
    first, last = stages[0], stages[-1]
    middle = head[n + last] - head[first]
    middle -= max((recompute[j] for j in stages if p.recomputed[j]), default=0.0)
    middle -= _most(p, d, {j: p.times[j] for j in stages}, taken)
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


def _of_links(p: Problem, head: list[float], tail: list[float]) -> Iterator[float]:
    """Everything that each carries, one after another."""
    links = defaultdict(list)
    where = p.device_of * 3
    for a, b, time in p.edges:
        if where[a] != where[b]:
            links[where[a], where[b]].append((a, b, time))
    for edges in links.values():
        begin = min(head[a] + p.times[a] for a, _, _ in edges)
        end = min(p.times[b] + tail[b] for _, b, _ in edges)
        yield begin + p.m * math.fsum(time for _, _, time in edges) + end
