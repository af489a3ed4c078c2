"""What a pipe costs beside its layers: microseconds per cell (micro-batch, stage) of tiny layers.

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

import syncpipe
from benchmarks.common import Group, Options, Part, Spread, number
from benchmarks.peers import CPU, LIBRARIES, MODES, gathered, measured
from benchmarks.tasks import CALL, LOOP, OURS, Peer, Task, called, linears, ours

WORKERS = (1, 2, 4, 8)
#: Micro-batches, samples in each of these, width of the layers.
CHUNKS, ROWS, FEATURES = 16, 16, 8
#: By what is measured and the number of workers: at most so many times the plain loop.
TARGETS = {("train_batch 1f1b", 1): 2.0, ("train_batch 1f1b", 4): 4.0, (CALL, 1): 1.2}
_PACKAGE = str(Path(syncpipe.__file__).parent)


def tiny(stages: int) -> Task:
    """So many layers that compute next to nothing."""
    return linears(stages, FEATURES, CHUNKS * ROWS, CHUNKS, stages)


def peers(task: Task, workers: int) -> Iterator[Peer]:
    """Our own on so many workers; a plain loop with one backward first."""
    stages = len(task.balance)
    joined = called(lambda x: torch.cat([task.model(c) for c in x.chunk(task.chunks)]), task.loss)
    yield Peer(LOOP, CALL, "", "", joined)
    devices = [f"cpu:{j * workers // stages}" for j in range(stages)]
    place = "1 worker" if workers == 1 else f"{workers} workers"
    yield from ours(task, {place: devices if workers > 1 else ["cpu"] * stages}, MODES)


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
    cells = task.chunks * stages
    found = gathered(task, part, peers(task, workers), CPU, MODES if workers == 1 else ())
    first = {"stages": stages}
    rows = measured(part, task, found, repeats, "overhead", first=first, least=least)
    loops = {row["how"]: row["ms"].samples for row in rows if row["library"] == LOOP}
    mine = {tuple(peer.columns.values()): peer for peer in found if peer.library == OURS}
    for row in rows:
        row["us/cell"] = Spread.of([1e3 * took / cells for took in row["ms"].samples])
        row["over the loop"] = Spread.ratio(row["ms"].samples, loops[CALL * (row["how"] == CALL)])
        peer = mine.get(tuple(row[name] for name in ("library", "how", "workers", "checkpoint")))
        if workers == 1 and peer is not None:
            row["calls/cell"] = calls_per_cell(partial(task.step, peer), cells)


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
                times = [each["us/cell"].median for each in (row, other)]
                told = " us and ".join(map(number, times)) + " us"
                part.aim(f"{who}: below {other['library']}", times[0] < times[1], told)


GROUP = Group(
    "overhead",
    "What a pipe costs for each micro-batch and stage",
    {"overhead": run},
    versions=tuple(LIBRARIES),
)
