"""PipeDream's stages and replicas as a synchronous pipe runs them: chunks, memory, simulated step.

A replica has parameters and gradients of its own, but no optimizer's state: that is where the
parameters are, with the first one. Once a step the others are sent the parameters and send back
gradients; these overlap with the rest of the step, or stand at its ends, and count in full here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from syncpipe.balance.profile import Profile
from syncpipe.options import consecutive
from syncpipe.planner.costs.chain import Chain, costs_of
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.replicas import Replicas
from syncpipe.schedules import one_f_one_b
from syncpipe.schedules.simulation import simulate

__all__ = ["runnable"]

_MOST_CHUNKS = 256


def runnable(
    plan: Replicas, profile: Profile, machine: Machine, batch_size: int, param_scale: float
) -> Replicas:
    """The same with what a pipe needs: the number of micro-batches with the shortest step.

    Among those that fit into memory; where none does, that which takes the least of it.

    Args:
        plan: stages and replicas.
        profile: what the layers cost.
        machine: the devices, all alike.
        batch_size: samples in a mini-batch of all devices together.
        param_scale: bytes for each byte of a parameter that is trained, on the first replica.
    """
    layers = profile.of(batch_size)
    found = []
    for chunks in _counts(batch_size, max(plan.replicas)):
        candidate = _candidate(plan, layers, machine, batch_size, chunks, param_scale)
        over = max(
            0.0, max(m - limit for m, limit in zip(candidate.memory, machine.memory, strict=True))
        )
        found.append((over, candidate.step, chunks, candidate))
    return min(found)[-1]


def _counts(batch_size: int, least: int) -> Iterator[int]:
    """Numbers of micro-batches of one size, with something to do for each replica."""
    even = [m for m in range(1, min(batch_size, _MOST_CHUNKS) + 1) if batch_size % m == 0]
    yield from [m for m in even if m >= least] or even[-1:]


def _candidate(
    plan: Replicas,
    profile: Profile,
    machine: Machine,
    batch_size: int,
    chunks: int,
    param_scale: float,
) -> Replicas:
    chain = Chain.of(profile, batch_size / chunks, param_scale)
    schedule = one_f_one_b(chunks, consecutive(plan.replicas))
    simulation = simulate(schedule, costs_of(chain, machine, plan.balance))
    memory: list[float] = []
    exchanged = 0.0
    stages = pairwise(accumulate(plan.balance, initial=0))
    for j, ((first, last), replicas) in enumerate(zip(stages, plan.replicas, strict=True)):
        flight = schedule.in_flight[j], schedule.in_flight[0]
        owner = chain.memory(first, last, *flight, False)
        layers = profile.layers[first:last]
        trained = math.fsum(layer.parameter_bytes - layer.frozen_bytes for layer in layers)
        more = sum(layer.memory(2.0) - layer.memory(param_scale) for layer in layers)
        memory += [owner + trained * (replicas > 1), *[owner + more] * (replicas - 1)]
        exchanged = max(exchanged, 2 * (replicas - 1) * trained / plan.bandwidth)
    step = simulation.makespan + exchanged
    return replace(plan, chunks=chunks, step=step, memory=tuple(memory))
