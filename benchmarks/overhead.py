"""What a pipe costs beside its layers: microseconds per cell (micro-batch, stage) of tiny layers.

    python -m benchmarks.overhead [--quick] [--repeats N] [--json FILE] [--markdown FILE]

The layers compute next to nothing, so nearly all of the time is bookkeeping. Each stage is one
``Linear``; the same micro-batches go through

    loop          the plain model:  torch.cat([model(c) for c in x.chunk(m)])
    Pipe          on one worker, and on several CPU workers
    torchgpipe    where it is installed (extra ``bench``)

forward alone (a graph is recorded, and dropped) and forward with backward. All of them are measured
in every round, in an order that changes from round to round, so that whatever else the machine does
meets them alike. The loop never re-materializes, so ``always`` pays for a second forward as well.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Part, Spread, number, rounds, timed
from benchmarks.group import Group, Options
from syncpipe import Pipe

MODES = ("never", "always")
WORKERS = (1, 2, 4)
PASSES = ("forward", "forward+backward")
LOOP = "loop"
#: Stages, micro-batches, samples in each of these, width of the layers.
STAGES, CHUNKS, ROWS, FEATURES = 4, 8, 1, 4
#: At most this many times the loop, for a pipe on one worker that re-materializes nothing.
ONE_WORKER_TARGET = 1.3

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Attributes:
        name: the library.
        workers: how many CPU workers; 0 for the plain loop.
        checkpoint: the mode of re-materialization.
        model: from a mini-batch to its output.
    """

    name: str
    workers: int
    checkpoint: str
    model: Model

    @property
    def label(self) -> str:
        """The first column of the table."""
        if not self.workers:
            return self.name
        plural = "" if self.workers == 1 else "s"
        return f"{self.name}, {self.workers} worker{plural}, {self.checkpoint}"


# -- what is measured -----------------------------------------------------------------------------


def loop(model: nn.Module, chunks: int) -> Model:
    """The plain model, fed the micro-batches one after another."""
    return lambda x: torch.cat([model(c) for c in x.chunk(chunks)])


def subjects(model: nn.Sequential, chunks: int) -> list[Subject]:
    """The loop first; each has a copy of the model of its own."""
    n = len(model)
    found = [Subject(LOOP, 0, "never", loop(copy.deepcopy(model), chunks))]
    for workers in (w for w in WORKERS if w <= n):
        devices = [f"cpu:{j * workers // n}" for j in range(n)] if workers > 1 else ["cpu"] * n
        for mode in MODES:
            pipe = Pipe(
                copy.deepcopy(model), [1] * n, devices=devices, chunks=chunks, checkpoint=mode
            )
            found.append(Subject("Pipe", workers, mode, pipe))
    found += [
        Subject("torchgpipe", 1, mode, gpipe)
        for mode in MODES
        if (gpipe := torchgpipe(copy.deepcopy(model), chunks, mode)) is not None
    ]
    return found


def torchgpipe(model: nn.Sequential, chunks: int, mode: str) -> Model | None:
    """The same by torchgpipe, which serves all CPU partitions by one thread; None without it."""
    try:
        from torchgpipe import GPipe
    except ImportError:
        return None
    n = len(model)
    gpipe: Model = GPipe(model, [1] * n, devices=["cpu"] * n, chunks=chunks, checkpoint=mode)
    return gpipe


def step(subject: Subject, what: str, x: Tensor) -> None:
    """One forward, or one forward and backward."""
    output = subject.model(x)
    if what != "forward":
        output.sum().backward()  # type: ignore[no-untyped-call]


def check(every: Sequence[Subject], x: Tensor) -> None:
    """Refuses to measure something that computes something else.

    Raises:
        SystemExit: an output differs from the loop's.
    """
    expected = every[0].model(x)
    for subject in every[1:]:
        if not torch.equal(subject.model(x), expected):
            raise SystemExit(f"{subject.label}: the output is not the loop's; nothing measured")


# -- measuring ------------------------------------------------------------------------------------


def run(options: Options) -> Part:
    """Measures all subjects, forward and with backward, round after round."""
    repeats, least = options.rounds(21), 0.002 if options.quick else 0.05
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(STAGES)))
    x = torch.randn(CHUNKS * ROWS, FEATURES)
    every = subjects(model, CHUNKS)
    check(every, x)
    jobs = {
        f"{what} {subject.label}": job(partial(step, subject, what, x), least)
        for what in PASSES
        for subject in every
    }
    samples = rounds(jobs, repeats, "overhead")
    part = Part(
        "Overhead",
        f"{STAGES} stages of Linear({FEATURES}, {FEATURES}), {CHUNKS} micro-batches of {ROWS} "
        f"samples, {repeats} rounds of {least} s.",
        {
            "us/cell": "microseconds for each micro-batch and stage",
            "over the loop": "time over the loop's in the same round",
        },
    )
    for subject in every:
        row: dict[str, Any] = {"what": subject.label}
        for what in PASSES:
            times = samples[f"{what} {subject.label}"]
            row[f"{what}, us/cell"] = Spread.of([1e6 * took / CHUNKS / STAGES for took in times])
            row[f"{what}, over the loop"] = Spread.ratio(times, samples[f"{what} {LOOP}"])
        part.rows.append(row)
    _targets(part, every)
    return part


def job(step: Callable[[], None], least: float) -> Callable[[], float]:
    """For ``rounds``: the mean of so many steps that they take about so many seconds."""
    for _ in range(10):
        step()
    start = time.perf_counter()
    for _ in range(5):
        step()
    return timed(step, max(1, round(5 * least / (time.perf_counter() - start))))


def _targets(part: Part, every: Sequence[Subject]) -> None:
    """What was aimed for, and what was measured."""
    rows = {row["what"]: row for row in part.rows}
    for what in PASSES:
        for subject in every:
            if subject.name != "Pipe":
                continue
            row = rows[subject.label]
            if (subject.workers, subject.checkpoint) == (1, "never"):
                ratio = row[f"{what}, over the loop"].median
                aim = f"{what}: {subject.label}: at most {ONE_WORKER_TARGET} times the loop"
                part.aim(aim, ratio <= ONE_WORKER_TARGET, f"{number(ratio)} times")
            for other in every:
                if (other.name, other.checkpoint) == ("torchgpipe", subject.checkpoint):
                    ours, theirs = (
                        rows[found.label][f"{what}, us/cell"].median for found in (subject, other)
                    )
                    told = f"{number(ours)} us and {number(theirs)} us"
                    part.aim(f"{what}: {subject.label}: below torchgpipe", ours < theirs, told)


GROUP = Group(
    "overhead",
    "What a pipe costs beside its layers",
    __doc__,
    {"overhead": run},
    rounds="21",
    versions=("torchgpipe",),
    one_thread=False,
)

if __name__ == "__main__":
    sys.exit(GROUP.main())
