"""PipeDream's planner: stages that run on several machines at once.

A stage on ``m'`` machines has each of them take every ``m'``-th mini-batch, and they exchange the
gradients of their parameters. Several stages in a row, a "2-1-1", have several mini-batches in
flight, and what counts is the slowest stage or link:

    machine 0  | layers 0-7, mini-batches 0 2 4 .. | >
    machine 1  | layers 0-7, mini-batches 1 3 5 .. | >  | layers 8-12 | > | layers 13-15 |

Sources: Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training" (2018), and
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019),
section 3.1. PipeDream trains without a flush, on weights of different age; the times here are its
times, of that steady state. What a synchronous pipe makes of these stages is in ``options()`` and
``step``.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from syncpipe.balance.profile import Profile, in_bytes, interpolate
from syncpipe.options import consecutive
from syncpipe.planner.chain import Chain, costs_of, doubles, ends_of
from syncpipe.planner.machine import Machine
from syncpipe.planner.search import least_largest
from syncpipe.planner.words import columns, count, duration, layers_named
from syncpipe.schedules import one_f_one_b
from syncpipe.schedules.player import play

__all__ = ["Replicas", "replicated", "runnable"]

_MOST_CHUNKS = 256


@dataclass(frozen=True)
class Replicas:
    """Stages and how many machines each of them is on.

    All times are in seconds for one mini-batch, of the size that one machine gets.

    Attributes:
        stages: for each its first layer, the layer after its last, and on how many machines it is.
        names: of all layers.
        compute: for each stage, computing shared by its replicas.
        synchronization: for each stage, its replicas exchanging gradients, meanwhile.
        transfer: for each stage, activations on their way in and gradients on their way out.
        parameter_bytes: for each stage, of the parameters that are trained.
        times: the best for 1, 2, .. machines, each number used in full; the last is this one.
        data_parallel: all layers on each of the machines.
        bandwidth: bytes per second of a machine's network.
        samples: in a mini-batch; None if unknown.
        chunks: micro-batches with which a synchronous pipe is fastest; 0 if not asked for.
        step: seconds that its step takes under 1F1B, with gradients exchanged.
        memory: bytes that it takes on each device, those of the first stage first.
    """

    stages: tuple[tuple[int, int, int], ...]
    names: tuple[str, ...]
    compute: tuple[float, ...]
    synchronization: tuple[float, ...]
    transfer: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    times: tuple[float, ...]
    data_parallel: float
    bandwidth: float
    samples: int | None
    chunks: int = 0
    step: float = 0.0
    memory: tuple[float, ...] = ()

    @property
    def balance(self) -> list[int]:
        """For each stage the number of its layers."""
        return [last - first for first, last, _ in self.stages]

    @property
    def replicas(self) -> list[int]:
        """For each stage how many machines, or devices, it is on."""
        return [replicas for _, _, replicas in self.stages]

    def options(self) -> dict[str, Any]:
        """The arguments of a pipe that has these stages, on one machine with as many devices::

        pipe = Pipe(model, **plan.options(), devices=[...])
        """
        chunks = self.chunks or self.machines
        return {"balance": self.balance, "replicas": self.replicas, "chunks": chunks}

    @property
    def machines(self) -> int:
        """How many machines are used."""
        return sum(self.replicas)

    @property
    def configuration(self) -> str:
        """Replicas of each stage, as in the papers: "2-1-1"; "8" alone is data parallelism."""
        return "-".join(map(str, self.replicas))

    @property
    def time(self) -> float:
        """Of the slowest stage or link."""
        return max(*self.compute, *self.synchronization, *self.transfer)

    @property
    def one_machine(self) -> float:
        """All layers on one machine."""
        return self.times[0]

    @property
    def speedup(self) -> float:
        """How many times faster than data parallelism on as many machines."""
        return self.data_parallel / self.time if self.time else 1.0

    @property
    def bottleneck(self) -> str:
        """What the time is the time of, in words."""
        words = "computing in", "exchanging gradients between the replicas of", "transfers to"
        parts = zip(words, (self.compute, self.synchronization, self.transfer), strict=True)
        what, times = max(parts, key=lambda part: max(part[1]))
        return f"{what} stage {times.index(max(times))}"

    def as_dict(self) -> dict[str, Any]:
        """The same as numbers and strings, for JSON."""
        names = "configuration time data_parallel one_machine speedup samples step"
        return {name: getattr(self, name) for name in names.split()} | {
            "stages": [
                {"layers": self.names[first:last], "replicas": replicas}
                for first, last, replicas in self.stages
            ],
            "options": self.options(),
            "memory": list(self.memory),
        }

    def __str__(self) -> str:
        n, shape = self.machines, f"configuration {self.configuration}"
        if len(self.stages) == 1:
            shape = "data parallelism, all layers on each of them" if n > 1 else "all layers on it"
        link = "no time" if self.bandwidth == math.inf else f"{in_bytes(self.bandwidth)}/s"
        of = "as profiled" if self.samples is None else f"of {self.samples} samples"
        rows = [["stage", "layers", "replicas", "computing", "gradients", "transfers"]]
        times = zip(self.compute, self.synchronization, self.transfer, strict=True)
        for j, ((i, end, replicas), taken) in enumerate(zip(self.stages, times, strict=True)):
            layers = layers_named(self.names[i:end])
            rows.append([str(j), layers, str(replicas), *map(duration, taken)])
        lines = [f"{count(n, 'machine')}, {link} between them, mini-batches {of} each: {shape}"]
        lines += [*columns(rows, left=(1,)), ""]
        lines.append(f"{duration(self.time)} for each mini-batch, which is {self.bottleneck}")
        if len(self.stages) > 1:
            other = duration(self.data_parallel)
            lines.append(f"{self.speedup:.2f} times as fast as data parallelism ({other})")
        if n > 1:
            ratio = self.one_machine / self.time if self.time else 1.0
            lines.append(f"{ratio:.2f} times as fast as one machine ({duration(self.one_machine)})")
            lines.append("in PipeDream's steady state: no flush, weights of different age")
        if self.chunks:
            lines.append(
                f"as a synchronous pipe, {count(self.chunks, 'micro-batch', 'es')}: "
                f"{duration(self.step)} a step, {in_bytes(max(self.memory))} on a device at most"
            )
        best = min(self.times)
        if best < self.times[-1]:
            fewer = count(self.times.index(best) + 1, "machine")
            lines.append(f"{fewer} alone would be faster: {duration(best)}")
        return "\n".join(lines)


def replicated(
    profile: Profile, machines: int, bandwidth: float, *, samples: int | None = None
) -> Replicas:
    """The stages and replicas with which PipeDream's formula is fastest, exactly.

    With ``A(j, m)`` the time for the first ``j`` layers on ``m`` machines::

        T(i..j, m) = 1/m max( sum T_l, 4 (m-1) sum |w_l| / (m bandwidth) )
        A(j, m) = min( T(1..j, m), min max( A(s, m-m'), 2 a_s / (bandwidth m'), T(s+1..j, m') ) )
                                   s, m'

    ``T_l`` is forward and backward of layer ``l``; ``a_s`` the bytes of activations that cross the
    cut, and as many bytes of gradients come back; ``|w_l|`` the bytes of parameters that are
    trained. With the parameters spread over the replicas as servers, each sends gradients of all
    but its own share, receives those of its share, and the same again with the new parameters:
    4 (m-1)/m of the bytes. Among the fastest it takes one with the fewest stages, and of these the
    one with the fewest bytes between stages.

    Args:
        profile: what the layers cost. A skip counts at every cut that it crosses.
        machines: how many there are; all are used.
        bandwidth: bytes per second of a machine's network; ``math.inf`` for no time.
        samples: in the mini-batch of one machine; the largest that was measured by default.

    Raises:
        ValueError: a number that is none, or not greater than 0.
    """
    if operator.index(machines) < 1:
        raise ValueError(f"machines={machines}: there is at least one")
    if isinstance(bandwidth, bool) or not bandwidth > 0:
        raise ValueError(
            f"bandwidth={bandwidth!r} must be a number of bytes per second, or math.inf"
        )
    if samples is not None and operator.index(samples) < 1:
        raise ValueError(f"samples={samples}: a mini-batch has at least one")
    if samples is None and not profile.whole:
        samples = profile.sizes[-1]
    size = 1 if samples is None else samples
    profile = profile if samples is None else profile.of(samples)
    layers, number = profile.layers, len(profile.layers)
    took = [interpolate(x.forward, size) + interpolate(x.backward, size) for x in layers]
    trained = [float(x.parameter_bytes - x.frozen_bytes) for x in layers]
    work, weights = (doubles(accumulate(each, initial=0.0)) for each in (took, trained))
    crossing = doubles([0.0, *(interpolate(x.output_bytes, size) for x in layers[:-1])])
    for skip in profile.skips:
        crossing[skip.stash + 1 : skip.pop + 1] += interpolate(skip.bytes, size)

    def parts(m: int) -> Tensor:
        """Computing, exchange and transfer of stages on ``m`` machines, ``[3, first, end]``."""
        exchanged = 4 * (m - 1) * (weights - weights[:-1, None]) / (m * bandwidth) / m
        sent = (2 * crossing[:, None] / (bandwidth * m)).expand_as(exchanged)
        return torch.stack([(work - work[:-1, None]) / m, exchanged, sent])

    costs = [parts(m).amax(0) for m in range(1, machines + 1)]
    table, _ = least_largest(number, machines, machines, lambda _, m: costs[m - 1])
    # What differs by rounding alone is as fast: the fewest stages, and then the fewest bytes.
    limit = float(table[machines, number]) * (1 + 1e-12)
    each = 1 + crossing[:, None] / (2 * float(crossing.sum()) or 1.0)
    counted = [each.masked_fill(cost > limit, math.inf) for cost in costs]
    _, stages_of = least_largest(number, machines, machines, lambda _, m: counted[m - 1], torch.add)
    stages = stages_of(machines)
    told = zip(*(parts(m)[:, i, j].tolist() for i, j, m in stages), strict=True)
    compute, synchronization, transfer = map(tuple, told)
    return Replicas(
        stages=stages,
        names=tuple(layer.name for layer in layers),
        compute=compute,
        synchronization=synchronization,
        transfer=transfer,
        parameter_bytes=tuple(int(weights[j] - weights[i]) for i, j, _ in stages),
        times=tuple(table[1:, number].tolist()),
        data_parallel=float(costs[-1][0, number]),
        bandwidth=bandwidth,
        samples=samples,
    )


def runnable(
    plan: Replicas, profile: Profile, machine: Machine, batch_size: int, param_scale: float
) -> Replicas:
    """The same with what a pipe needs: the number of micro-batches with the shortest step.

    Among those that fit into memory; where none does, that which takes the least of it. A replica
    has parameters and gradients of its own, but no optimizer's state: that is with the first one.
    Once a step the others are sent the parameters and send back gradients, which counts in full.

    The devices are all alike, and ``batch_size`` is that of all of them together.
    """
    layers = profile.of(batch_size)
    even = [m for m in range(1, min(batch_size, _MOST_CHUNKS) + 1) if batch_size % m == 0]
    found = []
    for chunks in [m for m in even if m >= max(plan.replicas)] or even[-1:]:
        chain = Chain.of(layers, batch_size // chunks, param_scale)
        schedule = one_f_one_b(chunks, consecutive(plan.replicas))
        costs = costs_of(chain, machine, plan.balance)
        step = play(schedule.actions, chunks, schedule.device_of, costs).makespan
        flight, memory, exchanged = schedule.in_flight, [], 0.0
        for j, ((i, end), r) in enumerate(zip(ends_of(plan.balance), plan.replicas, strict=True)):
            owner, own = chain.memory(i, end, flight[j], flight[0], "store"), layers.layers[i:end]
            trained = math.fsum(layer.parameter_bytes - layer.frozen_bytes for layer in own)
            more = sum(layer.memory(2.0) - layer.memory(param_scale) for layer in own)
            memory += [owner + trained * (r > 1), *[owner + more] * (r - 1)]
            exchanged = max(exchanged, 2 * (r - 1) * trained / plan.bandwidth)
        over = max(0.0, *(a - b for a, b in zip(memory, machine.memory, strict=True)))
        found.append((over, step + exchanged, chunks, tuple(memory)))
    _, step, chunks, memory_of = min(found)
    return replace(plan, chunks=chunks, step=step, memory=memory_of)
