"""The same model and schedules under ``torch.distributed.pipelining``: a process for each stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F

from benchmarks.common import Part, Spread, check, number, rounds, timed
from benchmarks.group import Options
from benchmarks.ranks import BRIDGE, RANKS, Ranks, Work, missing
from benchmarks.ranks import SCHEDULES as THEIRS
from benchmarks.schedules.ideal import SUBJECTS as OURS
from benchmarks.schedules.model import big, reported


def run(options: Options) -> Part:
    """Measures it; without gloo there is nothing but a note."""
    problem, name, chunks = big(options)
    repeats = options.rounds(21)
    part = Part(
        "Beside torch.distributed.pipelining",
        f"{name}; theirs: two processes (gloo, loopback), ours: two CPU workers; one intra-op "
        f"thread each; {repeats} rounds, in which both take turns.",
        {
            "ms": "one training step, from gradients of None; of theirs that of the rank that took "
            "longer, both having started from a barrier.",
            "over the loop": "time over that of the plain loop over the same micro-batches, on one "
            "thread, in the same round.",
            "ours over theirs": "time over that of their schedule of the same kind in the same "
            "round.",
        },
        notes=[
            "Theirs: PipelineStage with ScheduleGPipe and Schedule1F1B, the loss divided by the "
            "number of micro-batches and scale_grads=False (cheaper than their default), no "
            "outputs returned. stage: the same by syncpipe.distributed.stage, which agrees on the "
            "arguments before each step, checks what is sent, and returns no outputs either."
        ],
    )
    why = missing()
    if why is not None:
        part.notes = [f"Not measured: {why}."]
        return part
    with Ranks(1, _work, options) as ranks:
        for m in chunks:
            expected = problem.expected(m)
            jobs: dict[str, Callable[[], float]] = {"plain loop": timed(problem.loop(m))}
            for schedule in THEIRS:
                label = f"torch {schedule}"
                check(label, ranks.outcome(schedule, m), expected)
                jobs[label] = partial(ranks.step, schedule, m)
                label = f"{BRIDGE}{schedule}"
                check(label, ranks.outcome(label, m), expected)
                jobs[label] = partial(ranks.step, label, m)
            jobs |= problem.jobs(m, OURS)
            _report(part, m, rounds(jobs, repeats, f"distributed, m={m}"))
    return part


def _work(options: Options) -> Work:
    """In a process of its own."""
    problem, _, _ = big(options)
    return Work(problem.model, problem.x, problem.target, F.mse_loss, len(problem.model) // RANKS)


def _report(part: Part, m: int, samples: dict[str, list[float]]) -> None:
    """A row for each job, a target for each of ours."""
    for label, times, row in reported(part, m, samples):
        if label.startswith(BRIDGE):
            theirs = f"torch {label.removeprefix(BRIDGE)}"
            row["ours over theirs"] = Spread.ratio(times, samples[theirs])
        if label in OURS:
            theirs = f"torch {OURS[label][1]}"
            ratio = row["ours over theirs"] = Spread.ratio(times, samples[theirs])
            aim = f"{label}, {m} micro-batches: faster than {theirs}"
            part.aim(aim, ratio.median < 1, f"{number(ratio.median)} times")
