"""Layers that sleep: what there is to gain without a flush, where cores are no limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import Part, Spread, number, rounds
from benchmarks.group import Options
from benchmarks.schedules.sleeping.naps import Naps
from benchmarks.schedules.sleeping.replicas import napping
from syncpipe import Pipe
from syncpipe.schedules import Costs, one_f_one_b, simulate

STAGES, BATCH = 4, 8
#: A mini-batch takes a stage so long forward, half of the time of its backward.
SECONDS, QUICK_SECONDS = 0.08, 0.004
TARGET = 1.05
#: For each way micro-batches in a mini-batch, and what train_stream is given; None: 1F1B.
WAYS: dict[str, tuple[int, str | None]] = {
    "1F1B, 4 micro-batches": (4, None),
    "1F1B, 8 micro-batches": (8, None),
    "stream, stashing": (1, "stashing"),
    "stream, vertical_sync": (1, "vertical_sync"),
    "stream, 2bw, 4 micro-batches": (4, "2bw"),
}


def run(options: Options) -> Part:
    """Measures it."""
    seconds = QUICK_SECONDS if options.quick else SECONDS
    steps, repeats = (3, options.rounds(5)) if options.quick else (16, options.rounds(5))
    part = Part(
        "Without a flush on emulated devices",
        f"{STAGES} stages of one layer that sleeps {number(1e3 * seconds)} ms forward and "
        f"{number(2e3 * seconds)} ms backward for a mini-batch, a CPU worker each; {steps} "
        f"mini-batches of {BATCH} samples one after another; {repeats} rounds.",
        {
            "ms": "all of it, over the number of mini-batches.",
            "simulated ms": "the same by syncpipe.schedules: 1F1B with a flush after each "
            "mini-batch, or 1F1B over all micro-batches of the stream. Updates take none.",
            "over simulated": "one over the other.",
            "over no bubble": f"time over {number(3e3 * seconds)} ms, what a stage works.",
            "versions": "of its weights that the first stage holds.",
        },
    )
    jobs = {name: _job(*way, seconds, steps) for name, way in WAYS.items()}
    samples = rounds(jobs, repeats, "bubble")
    kept = {"stashing": STAGES, "vertical_sync": STAGES, "2bw": 2, None: 1}
    for name, (chunks, versions) in WAYS.items():
        costs = Costs.even(STAGES, *[seconds / chunks] * 3)
        count = 1 if versions is None else steps
        schedule = one_f_one_b(chunks * count, STAGES, slots="textbook")
        simulated = simulate(schedule, costs).makespan / count
        times = samples[name]
        ratio = Spread.ratio(times, [simulated] * len(times))
        part.rows.append(
            {
                "way": name,
                "ms": Spread.of([1e3 * took for took in times]),
                "simulated ms": 1e3 * simulated,
                "over simulated": ratio,
                "over no bubble": Spread.ratio(times, [3 * seconds] * len(times)),
                "versions": kept[versions],
            }
        )
        if versions is not None:
            part.aim(
                f"{name}: at most {TARGET} times the simulation",
                ratio.median <= TARGET,
                f"{number(ratio.median)} times",
            )
    return part


def _job(chunks: int, versions: Any, seconds: float, steps: int) -> Callable[[], float]:
    nap = seconds / chunks
    problem = napping([Naps(nap, nap, nap) for _ in range(STAGES)], BATCH)
    pipe = Pipe(
        problem.model,
        [1] * STAGES,
        devices=[f"cpu:{j}" for j in range(STAGES)],
        chunks=chunks,
        checkpoint="never",
    )
    made = partial(torch.optim.SGD, lr=0.01)
    data = [(problem.x, problem.target)] * steps
    optimizer = made(pipe.parameters())

    def job() -> float:
        begin = time.perf_counter()
        if versions is None:
            for x, target in data:
                optimizer.zero_grad()
                pipe.train_batch(x, target, loss_fn=F.mse_loss, slots="textbook", verify=False)
                optimizer.step()
        else:
            pipe.train_stream(data, optimizer=made, loss_fn=F.mse_loss, versions=versions)
        return (time.perf_counter() - begin) / steps

    return job
