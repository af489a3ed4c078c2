"""``auto``: a schedule for costs and memory that are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from syncpipe.schedules.build import SCHEDULES, build
from syncpipe.schedules.builtin import naive, one_f_one_b, zb_h1
from syncpipe.schedules.kinds import HALVES, Kind
from syncpipe.schedules.schedule import Action, Schedule
from syncpipe.schedules.search.bound import lower_bound
from syncpipe.schedules.search.improve import BUDGET, improved
from syncpipe.schedules.search.problem import ROUNDING, Memory, Problem
from syncpipe.schedules.search.report import AutoSchedule, Report
from syncpipe.schedules.simulation import Costs, simulate

__all__ = ["auto", "halved"]


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
    budget: int = BUDGET,
) -> AutoSchedule:
    """A schedule made to measure: none with a name is shorter in the same memory, simulated.

    It begins with the named schedules that fit, and makes the best of them by list scheduling with
    look-ahead, forth and back in time, and by moves on the critical path, until it is within a
    thousandth of a lower bound or a second or two are over::

        schedule = auto(8, 4, costs=Costs(...))
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
        budget: so many actions are placed or played, at most; by default a second or two.

    Returns:
        The schedule; its ``report`` has the simulated step, the bound and the named schedules.

    Raises:
        ValueError: an argument does not fit the others, or not one micro-batch fits into memory.
    """
    devices = tuple(range(device_of)) if isinstance(device_of, int) else tuple(device_of)
    usual = one_f_one_b(m, devices)
    n = len(devices)
    _check("costs", costs.forward, n)
    counts = (0,) * n if rematerialized is None else tuple(rematerialized)
    _check("rematerialized", counts, n)
    whole = _sizes("activations", (1.0,) * n if activations is None else activations, n)
    first = _sizes("inputs", whole if inputs is None else inputs, n)
    for j in range(n):
        if first[j] > whole[j]:
            raise ValueError(
                f"inputs={first} are part of activations={whole}, but larger on stage {j}"
            )
    split = split and any(costs.backward_weight)

    def problem(limits: Sequence[float]) -> Problem:
        return Problem(m, devices, costs, counts, Memory(whole, first, tuple(limits)), split=split)

    if memory is None:
        free = problem([math.inf] * len(usual.actions))
        others = zb_h1(m, devices) if split else usual
        pairs = zip(usual.actions, others.actions, strict=True)
        memory = [max(map(free.peak, pair)) for pair in pairs]
    elif not isinstance(memory, Sequence):
        memory = [memory] * len(usual.actions)
    return _made(problem(_sizes("memory", memory, len(usual.actions))), starts, budget)


def halved(schedule: Schedule) -> Schedule:
    """The same with each backward in two halves, one right after the other."""
    rows = [[half for action in row for half in _halves(action)] for row in schedule.actions]
    name = f"{schedule.name} in halves"
    return Schedule(schedule.m, schedule.device_of, tuple(map(tuple, rows)), name)


def _halves(action: Action) -> Iterator[Action]:
    kinds: tuple[Kind, ...] = HALVES if action.kind == "backward" else (action.kind,)
    for kind in kinds:
        yield Action(kind, action.i, action.j)


def _made(problem: Problem, starts: Iterable[Schedule], budget: int) -> AutoSchedule:
    m, devices, costs = problem.m, problem.device_of, problem.costs
    named = _named(problem)
    named |= {f"{made.name}, given": made for made in starts if made not in named.values()}
    known = {
        name: made
        for name, made in named.items()
        if (problem.split or not made.splits) and problem.fits(made.actions)
    }
    if not known:
        raise ValueError(_shortage(problem))
    spans = {name: simulate(made, costs, problem.rematerialized) for name, made in known.items()}
    steps = {name: spans[name].makespan for name in sorted(spans, key=lambda k: spans[k].makespan)}
    best, step = next(iter(steps.items()))
    actions, bound = known[best].actions, lower_bound(problem)
    ordered = [problem.rows(made) for made in known.values()]
    begin = [rows for rows in ordered if problem.fits(map(problem.actions, rows))]
    if begin:
        rows = improved(problem, begin, bound, budget)
        found = problem.play(rows).makespan
        if found <= step * (1 + ROUNDING):
            actions, step = tuple(tuple(problem.actions(row)) for row in rows), min(found, step)
    held, limits = tuple(map(problem.peak, actions)), problem.memory.limits
    report = Report(step, bound, steps, held, limits)
    return AutoSchedule(m, devices, actions, "auto", report)


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
    memory, counts, share = problem.memory, problem.rematerialized, 1.0
    for d, slots in zip(problem.device_of, usual.in_flight, strict=True):
        here = [j for j in range(problem.n) if problem.device_of[j] == d]
        each = math.fsum(memory.held(j, counts[j] == problem.m) for j in here)
        extra = max(memory.activations[j] - memory.held(j, counts[j] > 0) for j in here)
        if each * slots + extra > memory.limits[d] * (1 + ROUNDING):
            share = min(share, (memory.limits[d] - extra) * (1 + ROUNDING) // each / slots)
    scaled = [max(1, math.ceil(share * slots - ROUNDING)) for slots in usual.in_flight]
    return list(accumulate(scaled, min))


def _shortage(problem: Problem) -> str:
    peaks = tuple(map(problem.peak, naive(problem.m, problem.device_of).actions))
    d = next(d for d, peak in enumerate(peaks) if peak > problem.memory.limits[d])
    return (
        f"memory={problem.memory.limits}: device {d} has {problem.memory.limits[d]:.4g}, but one "
        f"micro-batch at a time takes {peaks[d]:.4g} there; give each device at least {peaks}, or "
        "recompute"
    )


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
