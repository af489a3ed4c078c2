"""Other ways to use the same devices, for comparison with a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from syncpipe.balance import balance_cost
from syncpipe.format import count, duration, in_bytes
from syncpipe.planner.candidates import Candidate, Problem, ScheduleShape
from syncpipe.planner.search import TITLES, search, search_schedules, search_shared
from syncpipe.schedules import gpipe

__all__ = ["Alternative", "alternatives_of", "other_schedules"]

_NO_PIPE = "no pipe at all"
_COPIES = "torch.nn.parallel.DistributedDataParallel, a process for each device"
_COPIES_OF_PIPES = "DistributedDataParallel around pipes"
_SHARDS = "torch.distributed.fsdp.fully_shard, a process for each device"


@dataclass(frozen=True)
class Alternative:
    """Another way to train.

    Attributes:
        name: a title.
        time: seconds for one mini-batch; None if it does not fit.
        note: its memory and settings, or why it does not fit.
        instead: what to use for it in place of a pipe; empty if a pipe can run it.
        draft: the pipeline, or one of its copies; None if no pipeline was found.
    """

    name: str
    time: float | None
    note: str = ""
    instead: str = ""
    draft: Candidate | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and strings, for JSON: seconds, and bytes on the fullest device."""
        found: dict[str, Any] = {"name": self.name, "pipeline": not self.instead}
        found |= {"fits": self.time is not None, "time": self.time, "note": self.note}
        if (candidate := self.draft) is not None:
            found |= {"schedule": candidate.shape.name, "memory": max(candidate.on_device)}
            found |= {"balance": list(candidate.balance), "chunks": candidate.shape.m}
        return found


def alternatives_of(problem: Problem, chosen: Candidate) -> tuple[Alternative, ...]:
    """An equal split, torchgpipe's way, one device, stages with replicas, data parallelism; and
    FSDP where one device is too small.
    """
    machine, found = problem.machine, list[Alternative]()
    devices, layers, candidate = len(machine), len(problem.profile.layers), chosen
    n, m = len(chosen.balance), chosen.shape.m
    if n > 1 and (chosen.shape.slots or chosen.shape.name == "gpipe"):
        times = [b - a for a, b in pairwise(problem.chain(m).sums["time"])]
        equal = problem.evaluate(chosen.shape, balance_cost([1] * layers, n))
        even = problem.evaluate(
            ScheduleShape(gpipe(m, n)), balance_cost(times, n), ["recompute"] * n
        )
        way = "torchgpipe's way (even in time, GPipe, all but one micro-batch recomputed)"
        ways = {"an equal number of layers for each stage": equal, way: even}
        found += [_entry(problem, name, candidate) for name, candidate in ways.items() if candidate]
    if n > 1:
        alone = (_copies(problem, "one device", [kind[:1]], _NO_PIPE) for kind in machine.kinds)
        found.append(min(alone, key=_time))
        if found[-1].time is None and len(machine.kinds) == 1:
            found.append(_sharded(problem))
        if len(machine.kinds) == 1 and problem.batch_size >= devices:
            candidate = search_shared(problem)[1]
    if max(candidate.shape.replicas) > max(chosen.shape.replicas):
        replicas = "-".join(map(str, candidate.shape.replicas))
        found.append(
            _entry(problem, f"stages with replicas, {replicas} (replicas=True)", candidate)
        )
    copied = []
    for d in range(2, devices + 1) if len(machine.kinds) == 1 else ():
        n = devices // d
        if devices % d == problem.batch_size % d == 0 and n <= layers:
            name = f"data parallelism, {d} copies" + f" of a pipeline of {n} stages" * (n > 1)
            instead = _COPIES if n == 1 else _COPIES_OF_PIPES
            # Neighbours run the stages of one copy, or the copies of one stage.
            every = [*range(devices)]
            layouts = [[tuple(every[k::n]) for k in range(n)]]
            layouts += [[tuple(every[k * d : k * d + d]) for k in range(n)]] * (
                not machine.even_links
            )
            tried = (_copies(problem, name, places, instead) for places in layouts)
            copied.append(min(tried, key=_time))
    return (*found, *sorted(copied, key=_time)[:2])


def _sharded(problem: Problem) -> Alternative:
    """FSDP over all devices, with one micro-batch on each.

    While it computes, a device sends ``3 (d-1) / d`` of the parameters' bytes: they are gathered
    for forward and for backward, and gradients are scattered (Rajbhandari et al. 2020, ZeRO,
    section 7.2.2). Two layers are whole at a time.
    """
    machine, layers, d = problem.machine, problem.profile.layers, len(problem.machine)
    name, everything = f"FSDP over {d} devices", tuple(range(d))
    if problem.batch_size % d:
        return Alternative(name, None, f"batch_size is no multiple of {d}", _SHARDS)
    whole = 2 * max(layer.parameter_bytes for layer in layers)
    one = machine.shared([everything])
    limit = max(0.0, one.memory[0] - whole)
    part = Problem(
        problem.profile, replace(one, memory=(limit,)), problem.batch_size // d,
        problem.param_scale / d, problem.update / d,
    )  # fmt: skip
    best = next(iter(search(part, chunks=1, stages=1, improve=False)), None)
    if best is None:
        return Alternative(name, None, f"{in_bytes(one.memory[0])} is too little", _SHARDS)
    rate = min(machine.bandwidth[a][b] for a, b in pairwise((*everything, 0)))
    sent = 3 * (d - 1) / d * sum(layer.parameter_bytes for layer in layers) / rate
    note = f"{duration(sent)} to send parameters and gradients, overlapped"
    note += f"; {in_bytes(best.on_device[0] + whole)} at most"
    return Alternative(name, max(best.time, sent), note, _SHARDS, best)


def _time(one: Alternative) -> float:
    return math.inf if one.time is None else one.time


def other_schedules(problem: Problem, chosen: Candidate) -> tuple[Alternative, ...]:
    """The best candidate for each other schedule, on as many devices and micro-batches; first those
    that fit, the fastest first.
    """
    names = [name for name in TITLES if name not in (chosen.shape.name, "1f1b")]
    candidates = search_schedules(
        problem, [chosen], names, [(chosen.shape.devices, chosen.shape.m)]
    )
    candidates.sort(key=lambda other: (other.excess > 1, other.time))
    found = []
    for candidate in candidates:
        bits = " (with other last bits of gradients)" * candidate.shape.split
        found.append(_entry(problem, f"schedule={candidate.shape.name!r}{bits}", candidate))
    return tuple(found)


def _entry(problem: Problem, name: str, candidate: Candidate, instead: str = "") -> Alternative:
    """An alternative with the memory of a candidate, or the first device that is too small."""
    machine, note = problem.machine, f"{in_bytes(max(candidate.on_device))} at most"
    for d, (needs, limit) in enumerate(zip(candidate.on_device, machine.memory, strict=False)):
        if needs > limit and candidate.excess > 1:
            note = f"{machine.names[d]} would need {in_bytes(needs, up=True)}"
            break
    note += f"; balance={list(candidate.balance)}, chunks={candidate.shape.m}"
    recomputed = sum(mode not in ("store", "offload") for mode in candidate.modes)
    note += f", recomputes {count(recomputed, 'stage')}" * bool(recomputed)
    return Alternative(
        name, candidate.time if candidate.excess <= 1 else None, note, instead, candidate
    )


def _copies(
    problem: Problem, name: str, places: Sequence[tuple[int, ...]], instead: str
) -> Alternative:
    """Copies of a pipeline that share the mini-batch, or one copy. ``places``: for each stage the
    devices of its copies.

    A ring all-reduce over ``d`` copies sends ``2 (d-1) / d`` of the gradients of a stage at the
    rate of its slowest link.
    """
    copies, machine = len(places[0]), problem.machine.shared(places)
    part = problem.on(machine, problem.batch_size // copies)
    best = next(iter(search(part, stages=len(places), improve=False)), None)
    if best is None:
        return Alternative(name, None, f"{in_bytes(max(machine.memory))} is too little", instead)
    found = _entry(part, name, best, instead)
    if copies > 1:
        rings = (zip(place, (*place[1:], place[0]), strict=True) for place in places)
        rates = (min(problem.machine.bandwidth[a][b] for a, b in ring) for ring in rings)
        sent = (part.trained(i, j) / rate for (i, j), rate in zip(best.ends, rates, strict=True))
        average = 2 * (copies - 1) / copies * max(sent)
        note = f"{duration(average)} of it to average gradients, not overlapped"
        found = replace(found, time=best.time + average, note=f"{note}; {found.note}")
    return found
