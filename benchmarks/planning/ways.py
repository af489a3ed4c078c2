"""The ways to run a model that are predicted and measured, each as a job for rounds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from benchmarks.common import timed
from benchmarks.planning.profiles import given
from benchmarks.schedules.model import PipeStep, Problem
from benchmarks.schedules.sleeping.naps import NappingLinear, Naps
from syncpipe import Pipe, Plan
from syncpipe.balance import balance_cost
from syncpipe.planner.alternatives import block_partitions
from syncpipe.planner.draft import Draft

ALONE, AT_ONCE = "one copy alone", "two copies at once"


def other_ways(plan: Plan, devices: Sequence[str], chunks: Sequence[int]) -> dict[str, Plan]:
    """The plan, and others for the same model on these devices; each way once."""
    n, layers = min(len(devices), len(plan.profile.layers)), len(plan.profile.layers)
    size = plan.profile.sizes[-1]
    times = [layer.forward[size] + layer.backward[size] for layer in plan.profile.layers]
    schedule, m = plan.schedule, plan.chunks
    # What is left to 1F1B are its default slots, those that hide transfers.
    choices: dict[str, dict[str, Any]] = {
        "equal numbers of layers": {"balance": tuple(balance_cost([1] * layers, n))},
        "torchgpipe's balance": {"balance": block_partitions(times, n)},
        "one layer each, the rest last": {"balance": (1,) * (n - 1) + (layers - n + 1,)},
        "the rest first, one layer each": {"balance": (layers - n + 1,) + (1,) * (n - 1)},
        "the plan's cut, gpipe": {"schedule": "gpipe"},
        "the plan's cut, 1f1b": {"schedule": "1f1b"},
        "the plan's cut, re-materialized": {"modes": ("recompute",) * len(plan.balance)},
        **{f"the plan's cut, {k} micro-batches": {"m": k} for k in chunks if k != m},
    }
    ways = {"the plan": plan}
    for label, choice in choices.items():
        full = {"balance": plan.balance, "m": m, "schedule": schedule, **choice}
        candidate = given(plan.terms, **full)
        way = Plan(plan.profile, plan.machine, plan.batch_size, candidate, (), tuple(devices))
        if all(_essence(candidate) != _essence(other.chosen) for other in ways.values()):
            ways[label] = way
    # A plan for a machine that is described does not know the devices it is run on.
    ways["the plan"] = Plan(
        plan.profile, plan.machine, plan.batch_size, plan.chosen, plan.alternatives, tuple(devices)
    )
    return ways


def _essence(candidate: Draft) -> tuple[Any, ...]:
    """What makes two of them the same."""
    return (
        candidate.schedule,
        candidate.balance,
        candidate.chunks,
        candidate.form.schedule.actions,
        candidate.modes,
    )


def loop_of(m: int) -> str:
    """What the plain loop over so many micro-batches is called."""
    return f"plain loop, {m} micro-batches"


def steps(
    problem: Problem, ways: Mapping[str, Plan], processors: Mapping[str, list[float]]
) -> dict[str, Callable[[], float]]:
    """A step of each way, after it was seen to do what the plain loop does; and these loops.

    How many processors a way has had on average is added to ``processors``, for each time.
    """
    counts = dict.fromkeys(plan.chunks for plan in ways.values())
    jobs: dict[str, Callable[[], float]] = {loop_of(m): warmed(problem.loop(m)) for m in counts}
    for label, plan in ways.items():
        pipe = Pipe(copy.deepcopy(problem.model), **plan.options(), devices=plan.devices)
        step = PipeStep(pipe, problem.x, problem.target, plan.schedule, plan.slots)
        checked = step.checked(label, problem.expected(plan.chunks))
        jobs[label] = warmed(checked, processors[label])
    return jobs


def warmed(step: Callable[[], Any], processors: list[float] | None = None) -> Callable[[], float]:
    """A job that takes the time of a second step: the caches are those of a training, not those
    that another job has left."""
    job = timed(step)

    def second() -> float:
        step()
        before = time.process_time()
        took = job()
        if processors is not None:
            processors.append((time.process_time() - before) / took)
        return took

    return second


def two_at_once(problem: Problem, m: int) -> dict[str, Callable[[], float]]:
    """What two threads take from each other."""
    threads = ThreadPoolExecutor(2, "copy", torch.set_num_threads, (1,))
    loops = [problem.loop(m) for _ in range(2)]

    def running(*some: Callable[[], Any]) -> Callable[[], None]:
        def step() -> None:
            for future in [threads.submit(loop) for loop in some]:
                future.result()

        return step

    return {ALONE: warmed(running(loops[0])), AT_ONCE: warmed(running(*loops))}


def asleep(quick: bool) -> Problem:
    """Layers that sleep, backward twice as long as forward."""
    naps = (1, 2, 1, 4) if quick else (3, 1, 7, 2, 2, 5, 1, 1, 9, 2, 4, 1)
    width, batch = 4, 16
    torch.manual_seed(0)
    seconds = [1e-3 * milliseconds for milliseconds in naps]
    layers = [NappingLinear(width, Naps(took, took, took), splits=False) for took in seconds]
    return Problem(nn.Sequential(*layers), *(torch.randn(batch, width) for _ in range(2)))
