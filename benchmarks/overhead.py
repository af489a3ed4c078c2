"""What a pipe costs beside its layers: microseconds per cell (micro-batch, stage) of tiny layers.

    python -m benchmarks.overhead [--quick] [--repeats N] [--json FILE] [--markdown FILE]

The layers compute next to nothing, so nearly all of the time is bookkeeping. Each stage is one
``Linear``. A training step is forward, loss and backward of a mini-batch, of the same micro-batches
and into gradients of None:

    plain loop    the plain model, micro-batch by micro-batch: the floor. With a backward for each
                  micro-batch, and with one for all, as after ``pipe(x)``
    syncpipe      ``pipe(x)`` with ``backward()``, and ``train_batch`` under 1F1B and others, on one
                  worker and on several CPU workers
    torchgpipe, fairscale    where they are installed (extra ``bench``); on one worker, they know no
                  other on CPUs

All of them are measured in every round, in an order that changes from round to round, so that
whatever else the machine does meets them alike. Time depends on the machine; how many Python
functions of syncpipe are called for a cell does not, and a test keeps that number from growing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncpipe
from benchmarks.common import Part, Spread, calibrated, number, rounds
from benchmarks.group import Group, Options
from benchmarks.peers.libraries import (
    CALL,
    LIBRARIES,
    LOOP,
    OURS,
    Peer,
    Task,
    called,
    missing,
    ours,
    plain,
    theirs,
)

MODES = ("never", "always")
WORKERS = (1, 2, 4, 8)
#: Micro-batches, samples in each of these, width of the layers.
CHUNKS, ROWS, FEATURES = 16, 16, 8
#: By what is measured and the number of workers: at most so many times the plain loop.
TARGETS = {("train_batch 1f1b", 1): 2.0, ("train_batch 1f1b", 4): 4.0, (CALL, 1): 1.2}
_PACKAGE = str(Path(syncpipe.__file__).parent)


def tiny(stages: int) -> Task:
    """So many layers that compute next to nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(stages)))
    x, target = torch.randn(2, CHUNKS * ROWS, FEATURES)
    return Task(model, x, target, F.mse_loss, CHUNKS, [1] * stages)


def peers(task: Task, workers: int) -> Iterator[Peer]:
    """All who train it on so many workers; the two plain loops first."""
    stages = len(task.balance)
    yield plain(task)[0]
    joined = called(lambda x: torch.cat([task.model(c) for c in x.chunk(task.chunks)]), task.loss)
    yield Peer(LOOP, CALL, "", "", joined)
    devices = [f"cpu:{j * workers // stages}" for j in range(stages)]
    place = "1 worker" if workers == 1 else f"{workers} workers"
    yield from ours(task, {place: devices if workers > 1 else ["cpu"] * stages}, MODES, MODES)
    for library in LIBRARIES if workers == 1 else ():
        if missing(library) is None:
            yield from theirs(task, library, torch.device("cpu"), MODES)


def calls_per_cell(step: Callable[[], object], cells: int) -> float:
    """How many Python functions of syncpipe a step on the calling thread calls for each cell.

    Args:
        step: made at least twice before: a first one learns about the layers.
        cells: micro-batches x stages.
    """
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(_PACKAGE)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count / cells


# -- measuring ------------------------------------------------------------------------------------


def run(options: Options) -> Part:
    """Measures all of them, round after round."""
    repeats, least = options.rounds(21), 0.002 if options.quick else 0.05
    part = Part(
        "Overhead",
        f"Each stage is one Linear({FEATURES}, {FEATURES}), {CHUNKS} micro-batches of {ROWS} "
        f"samples; {repeats} rounds of {least} s.",
        {
            "us/cell": "microseconds of a training step for each micro-batch and stage.",
            "over the loop": "time over that of the plain loop in the same round, with one "
            "backward for all micro-batches where it is so here.",
            "calls/cell": "Python functions of syncpipe that are called for each micro-batch and "
            "stage, on one worker.",
        },
        notes=[
            "Layers this small compute next to nothing, so that workers can only be in each "
            "other's way: one Python interpreter runs one of them at a time."
        ],
    )
    for workers in WORKERS[:2] if options.quick else WORKERS:
        _measure(part, workers, max(4, workers), repeats, least)
    _targets(part)
    return part


def _measure(part: Part, workers: int, stages: int, repeats: int, least: float) -> None:
    task = tiny(stages)
    found = list(peers(task, workers))
    _check(task, found)
    steps = {peer.label: partial(task.step, peer) for peer in found}
    jobs = {label: calibrated(step, least) for label, step in steps.items()}
    samples = rounds(jobs, repeats, f"overhead, {workers} workers")
    cells = task.chunks * stages
    loops = [samples[peer.label] for peer in found[:2]]
    for peer in found:
        times, loop = samples[peer.label], loops[peer.how == CALL]
        counted = workers == 1 and peer.library == OURS
        part.rows.append(
            {
                "stages": stages,
                **peer.columns,
                "us/cell": Spread.of([1e6 * took / cells for took in times]),
                "over the loop": Spread.ratio(times, loop),
                "calls/cell": calls_per_cell(steps[peer.label], cells) if counted else None,
            }
        )


def _check(task: Task, found: list[Peer]) -> None:
    """Refuses to measure something that computes something else.

    Raises:
        SystemExit: a loss or a gradient differs from the plain loop's beyond rounding.
    """

    def outcome(peer: Peer) -> list[Tensor]:
        loss = task.step(peer)
        return [loss, *(p.grad.clone() for p in task.model.parameters() if p.grad is not None)]

    expected = outcome(found[0])
    for peer in found[1:]:
        if not all(map(torch.allclose, outcome(peer), expected)):
            raise SystemExit(f"{peer.label}: the step is not the loop's; nothing was measured")


def _targets(part: Part) -> None:
    """What was aimed for, and what was measured."""
    for row in part.rows:
        if row["library"] != OURS:
            continue
        who = f"{row['how']}, {row['workers']}, {row['checkpoint']}"
        aim = TARGETS.get((row["how"], int(row["workers"].split()[0])))
        ratio = row["over the loop"].median
        if aim is not None and row["checkpoint"] == "never":
            part.aim(f"{who}: at most {aim} times the loop", ratio <= aim, f"{number(ratio)} times")
        for other in part.rows:
            both = (row["stages"], row["checkpoint"]) == (other["stages"], other["checkpoint"])
            if other["library"] in LIBRARIES and both:
                times = [found["us/cell"].median for found in (row, other)]
                told = " us and ".join(map(number, times)) + " us"
                part.aim(f"{who}: below {other['library']}", times[0] < times[1], told)


GROUP = Group(
    "overhead",
    "What a pipe costs for each micro-batch and stage",
    __doc__,
    {"overhead": run},
    rounds="21",
    versions=tuple(LIBRARIES),
    one_thread=True,
)

if __name__ == "__main__":
    sys.exit(GROUP.main())
