"""What else one could do with the same devices, so that a plan can be believed, or left alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from syncpipe.balance.profile import Profile, in_bytes
from syncpipe.planner.costs.chain import Chain
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.cuts.heuristics import block_partitions, even_split
from syncpipe.planner.hybrid import runnable
from syncpipe.planner.replicas import replicated
from syncpipe.planner.schedules.layouts import TITLES
from syncpipe.planner.search.candidate import SCHEDULES
from syncpipe.planner.search.search import Candidate, evaluate, search

__all__ = ["Rival", "duration", "rivals_of"]


@dataclass(frozen=True)
class Rival:
    """Another way to train.

    Attributes:
        name: what it is.
        time: seconds for one mini-batch; None if it does not fit.
        note: how it would be done, or why it does not fit.
        pipeline: whether a pipe can run it.
    """

    name: str
    time: float | None
    note: str = ""
    pipeline: bool = True


def rivals_of(
    profile: Profile,
    machine: Machine,
    batch_size: int,
    *,
    chosen: Candidate,
    found: Sequence[Candidate],
    param_scale: float,
) -> tuple[Rival, ...]:
    """The even split, torchgpipe's ways, the other schedule, one device, data parallelism.

    Args:
        profile: what the layers cost.
        machine: the devices.
        batch_size: samples in a mini-batch.
        chosen: the plan that they are compared with.
        found: other plans that fit.
        param_scale: as for :func:`syncpipe.plan`.
    """
    rivals = []
    n = len(chosen.balance)
    if n > 1 and chosen.schedule in SCHEDULES:
        rivals += _other_cuts(profile, machine, batch_size, chosen, param_scale)
    for schedule in SCHEDULES:
        other = next((c for c in found if c.schedule == schedule and len(c.balance) > 1), None)
        if n > 1 and other is not None and schedule != chosen.schedule:
            name = f"the best plan under {TITLES[schedule]}"
            rivals.append(Rival(name, other.time, _described(other)))
    if n > 1:
        rivals.append(_one_device(profile, machine, batch_size, param_scale))
        rivals += _shared_stages(profile, machine, batch_size, param_scale)
    rivals += _replicas(profile, machine, batch_size, param_scale)
    return tuple(rivals)


def _other_cuts(
    profile: Profile, machine: Machine, batch_size: int, chosen: Candidate, param_scale: float
) -> list[Rival]:
    """The same schedule with the layers cut as others would."""
    n, chunks = len(chosen.balance), chosen.chunks
    chain = Chain.of(profile, batch_size / chunks, param_scale)
    times = [f + b for f, b in zip(chain.forward, chain.backward, strict=True)]
    blocks = block_partitions(times, n)
    rivals = []
    for name, balance, schedule in (
        ("an equal number of layers for each stage", even_split(len(chain), n), chosen.schedule),
        ("torchgpipe's balance", blocks, chosen.schedule),
        ("torchgpipe (its balance, GPipe, all but one re-materialized)", blocks, "gpipe"),
    ):
        own = schedule == chosen.schedule and "its balance" not in name
        candidate = evaluate(
            profile,
            machine,
            batch_size,
            balance=balance,
            chunks=chunks,
            schedule=schedule,
            slots=chosen.slots if own else None,
            recomputes=None if own else [True] * n,
            param_scale=param_scale,
        )
        rivals.append(_rival(name, candidate, machine))
    return rivals


def _rival(name: str, candidate: Candidate, machine: Machine) -> Rival:
    balance = _listed(candidate.balance)
    for s, (memory, limit) in enumerate(zip(candidate.memory, machine.memory, strict=False)):
        if memory > limit:
            return Rival(
                name,
                None,
                f"balance={balance}: stage {s} needs {in_bytes(memory)} of {in_bytes(limit)}",
            )
    return Rival(name, candidate.time, f"balance={balance}")


def _one_device(profile: Profile, machine: Machine, batch_size: int, param_scale: float) -> Rival:
    """The fastest of those into which all fits."""
    kinds = {kind: d for d, kind in enumerate(zip(machine.memory, machine.speed, strict=True))}
    found = [
        search(profile, machine.ordered([d]), batch_size, param_scale=param_scale)[:1]
        for d in kinds.values()
    ]
    best = min((one for (one,) in filter(None, found)), key=lambda one: one.time, default=None)
    if best is None:
        largest = in_bytes(max(machine.memory))
        return Rival("one device", None, f"does not fit into {largest}", False)
    return Rival("one device", best.time, _described(best), False)


def _shared_stages(
    profile: Profile, machine: Machine, batch_size: int, param_scale: float
) -> list[Rival]:
    """PipeDream's stages on several devices each, as a pipe runs them."""
    devices = len(machine)
    if devices == 1 or not machine.uniform or batch_size < devices:
        return []
    found = replicated(profile, devices, machine.bandwidth[0][1], samples=batch_size // devices)
    if max(found.replicas) == 1:
        return []
    found = runnable(found, profile, machine, batch_size, param_scale)
    name = f"stages with replicas, {found.configuration} (replicas=True)"
    largest = max(found.memory)
    if any(a > b for a, b in zip(found.memory, machine.memory, strict=True)):
        return [Rival(name, None, f"a device would need {in_bytes(largest)}")]
    note = f"{in_bytes(largest)} at most, chunks={found.chunks}"
    return [Rival(name, found.step, note)]


def _replicas(
    profile: Profile, machine: Machine, batch_size: int, param_scale: float
) -> list[Rival]:
    """Copies of the model, or of a shorter pipeline, on equal devices; gradients averaged.

    A ring all-reduce over ``d`` copies sends ``2 (d-1) / d`` of the gradients of a stage.
    """
    devices = len(machine)
    if devices == 1 or not machine.uniform:
        return []
    rivals = []
    bandwidth = machine.bandwidth[0][1]
    for d in range(2, devices + 1):
        n = devices // d
        if devices % d or batch_size % d or n > len(profile.layers):
            continue
        share = search(profile, machine.head(n), batch_size // d, param_scale=param_scale, stages=n)
        name = f"data parallelism, {d} copies" + (f" of a pipeline of {n} stages" if n > 1 else "")
        if not share:
            rivals.append(
                Rival(name, None, f"does not fit into {in_bytes(machine.memory[0])}", False)
            )
            continue
        best = share[0]
        trained = [layer.parameter_bytes - layer.frozen_bytes for layer in profile.layers]
        stages = pairwise(accumulate(best.balance, initial=0))
        largest = max(math.fsum(trained[i:j]) for i, j in stages)
        average = 2 * (d - 1) / d * largest / bandwidth
        note = f"{duration(average)} of it to average gradients, not overlapped"
        rivals.append(Rival(name, best.time + average, note, False))
    return sorted(rivals, key=lambda rival: math.inf if rival.time is None else rival.time)[:2]


def duration(seconds: float) -> str:
    """Three digits and a unit: 12.3 ms."""
    for unit, one in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= one * 0.9995 or unit == "us":
            value = seconds / one
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    raise AssertionError


def _listed(balance: Sequence[int]) -> str:
    """A balance, the middle of a long one left out."""
    if len(balance) <= 16:
        return str(list(balance))
    first, last = (", ".join(map(str, part)) for part in (balance[:8], balance[-4:]))
    return f"[{first}, .., {last}]"


def _described(candidate: Candidate) -> str:
    text = f"balance={_listed(candidate.balance)}, chunks={candidate.chunks}"
    again = [s for s, recomputes in enumerate(candidate.recomputes) if recomputes]
    return text + (f", recomputes stages {again}" if again else "")
