"""A schedule for known costs and memory: greedy passes, alternately forward and backward in time.

The end times of one pass are the priorities of the next, so each pass corrects what the previous
one could not see (Li and Willis 1992, An iterative scheduling technique for resource-constrained
project scheduling). Micro-batches of a stage cost the same, so none overtakes another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

from syncpipe.schedules.greedy import ROUNDING, ListSchedule, Priorities, Problem
from syncpipe.schedules.named import SCHEDULES, build, naive, one_f_one_b, zb_h1
from syncpipe.schedules.player import Costs, checked_counts, heads_and_tails, lower_bound
from syncpipe.schedules.schedule import HALVES, Action, Kind, Schedule, stages_on

__all__ = ["AutoSchedule", "Report", "auto", "bound_with_memory"]

_CLOSE = 1e-3  # relative; a schedule this close to the bound ends the search
_LOOKAHEADS = (0.0, 1.0, 0.5, 2.0)  # of the passes, in this order (see syncpipe.schedules.greedy)
_Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Report:
    """Simulated steps, in the unit of the costs, and memory, in that of the activations."""

    step: float  # of the schedule
    bound: float  # lower bound of the step for these costs and this memory
    named: Mapping[str, float]  # steps of the named schedules that fit into memory
    memory: tuple[float, ...]  # for each device the most that it holds at once
    limits: tuple[float, ...]  # for each device the most that it may hold

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
    """A schedule by :func:`syncpipe.schedules.auto`, with a ``report`` on its step and memory."""

    report: Report = field(default=Report(0.0, 0.0, {}, (), ()), repr=False)


def auto(
    m: int, device_of: int | Sequence[int], *, costs: Costs,
    rematerialized: Sequence[int] | None = None, activations: Sequence[float] | None = None,
    inputs: Sequence[float] | None = None, memory: float | Sequence[float] | None = None,
    split: bool = True, starts: Iterable[Schedule] = (),
) -> AutoSchedule:  # fmt: skip
    """Make a schedule for given costs: in simulation no named one in the same memory is shorter::

        with pipe.trace() as trace:
            pipe.train_batch(input, target, loss_fn=loss_fn, schedule="zb_h1")
        schedule = auto(8, 4, costs=trace.costs)
        print(schedule.report)

    The result is deterministic. Each stage runs micro-batches forward and backward from the first
    to the last, unless only a named schedule with another order is as short. So without ``split``,
    gradients equal those of 1F1B to the last bit, whatever the costs.

    Args:
        m: number of micro-batches.
        device_of: number of stages, or for each stage the index of its device.
        costs: durations, for example of a trace (``trace.costs``).
        rematerialized: for each stage how many micro-batches, the first ones, are recomputed.
        activations: for each stage the memory of a micro-batch from its forward to the end of its
            backward or weight half. Default 1: memory counts micro-batches.
        inputs: the memory of a recomputed micro-batch until its backward. Default: ``activations``.
        memory: for each device, or for all, the limit of activations, in the same unit. Default:
            what ``"1f1b"`` takes, or with ``split`` what ``"zb_h1"`` takes if that is more.
        split: whether backwards may be split into two halves.
        starts: schedules to start from, in addition to the named ones.

    Raises:
        ValueError: an argument does not fit the others, or memory is too small for one micro-batch.
    """
    devices = tuple(range(device_of)) if isinstance(device_of, int) else tuple(device_of)
    usual = one_f_one_b(m, devices)
    n, d = len(devices), len(usual.actions)
    if len(costs.forward) != n:
        raise ValueError(f"costs are for {len(costs.forward)} stages, but there are {n}")
    stored = _checked_sizes("activations", (1.0,) * n if activations is None else activations, n)
    kept = _checked_sizes("inputs", stored if inputs is None else inputs, n)
    if any(size > most for size, most in zip(kept, stored, strict=True)):
        raise ValueError(f"inputs={kept} must not be larger than activations={stored}")
    split = split and any(costs.backward_weight)
    counts, free = checked_counts(rematerialized, m, n), (math.inf,) * d
    p = Problem(m, devices, costs, counts, stored, kept, free, split)
    if memory is None:
        pairs = zip(usual.actions, (zb_h1(m, devices) if split else usual).actions, strict=True)
        memory = [max(map(p.peak, pair)) for pair in pairs]
    elif not isinstance(memory, Sequence):
        memory = [memory] * d
    p = replace(p, limits=_checked_sizes("memory", memory, d))
    known = _initial_schedules(p, starts)
    steps = {name: p.play(schedule.actions).makespan for name, schedule in known.items()}
    shortest, bound = min(steps.values()), bound_with_memory(p)
    rows, step = known[min(steps, key=lambda name: steps[name])].actions, math.inf
    for time, found in _list_schedules(p):
        if time < step * (1 - ROUNDING) and time <= shortest * (1 + ROUNDING):
            rows, step = found, time
        if step <= bound * (1 + _CLOSE):
            break
    report = Report(min(step, shortest), bound, steps, tuple(map(p.peak, rows)), tuple(p.limits))
    return AutoSchedule(m, devices, rows, "auto", report)


def _checked_sizes(name: str, sizes: Sequence[float], n: int) -> tuple[float, ...]:
    if len(sizes) != n or not all(size >= 0 for size in sizes):
        each = "device" if name == "memory" else "stage"
        raise ValueError(f"{name}={tuple(sizes)}: give {n} numbers >= 0, one for each {each}")
    return tuple(sizes)


def _initial_schedules(p: Problem, starts: Iterable[Schedule]) -> dict[str, Schedule]:
    """The schedules to start from: those of ``starts`` and the named ones that fit into memory."""
    found = {f"{made.name}, given": made for made in starts}
    for name in SCHEDULES:
        with suppress(ValueError):  # the schedule is for other stages
            found[name] = build(name, p.m, p.device_of)
    fitting = {
        name: schedule
        for name, schedule in found.items()
        if (p.split or not schedule.splits) and p.fits(schedule.actions)
    }
    if not fitting:
        peaks = tuple(map(p.peak, naive(p.m, p.device_of).actions))
        raise ValueError(
            f"memory={p.limits}: one micro-batch at a time takes {peaks}: give each device at "
            "least as much memory, or recompute"
        )
    return fitting


def _list_schedules(p: Problem) -> Iterator[tuple[float, _Rows]]:
    """Schedules and their steps, by passes in both directions while these gain."""
    # Actions that let gradients flow come first, then forwards, then weight halves.
    ranks: dict[Kind, int] = {"backward": 0, "backward_input": 0, "forward": 1, HALVES[1]: 2}
    stages, numbers = range(len(p.device_of)), range(p.m)
    lists = [
        [[Action(kind, i, j) for i in numbers] for kind in p.kinds for j in own]
        for own in stages_on(p.device_of)
    ]
    both = (True, False) if any(p.finish_reserve + p.recompute_reserve) else (False,)
    for lookahead, careful in product(_LOOKAHEADS, both):
        priorities: Priorities = {
            kind: [[float(rank * p.m + i) for i in numbers] for _ in stages]
            for kind, rank in ranks.items()
        }
        least, useless, mirrored = math.inf, 0, False
        while useless < 4:
            made = ListSchedule(p, lists, priorities, lookahead, careful, mirrored=mirrored)
            if made.stuck:
                break
            rows = tuple([tuple(row[:: -1 if mirrored else 1]) for row in made.rows])
            time = p.play(rows).makespan
            yield time, rows
            useless += 1
            if time < least * (1 - ROUNDING):
                least, useless = time, mirrored
            # The last action in this direction is the first in the other one.
            priorities = {
                kind: [[-end for end in cell.ends] for cell in row]
                for kind, row in made.table.items()
            }
            mirrored = not mirrored


def bound_with_memory(p: Problem) -> float:
    """Lower bound of the makespan of any schedule of this problem.

    A micro-batch holds memory from its forward until its gradient can be back, so by Little's law a
    device needs the sum of these holding times, divided by its memory.
    """
    last, taken = p.costs.last or p.costs, list[float]()
    heads, tails = heads_and_tails(p.device_of, p.costs, p.split)
    backs = list(map(min, p.costs.times[p.kinds[1]], last.times[p.kinds[1]]))
    there = heads[-1] + min(p.costs.forward[-1], last.forward[-1]) + backs[-1] + tails[-1]
    for own, limit in zip(stages_on(p.device_of), p.limits, strict=True):
        kept = 0.0
        for j in own:
            kept += p.held(0, j) * (there - heads[j] - tails[j] - backs[j])
            kept += p.activations[j] * backs[j]
        taken.append(p.m * kept / (limit * (1 + ROUNDING)) if kept else 0.0)
    return lower_bound(p.m, p.device_of, p.costs, p.recomputed, p.split, taken)
