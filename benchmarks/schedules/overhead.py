"""What ``train_batch`` costs beside its layers: microseconds for each (micro-batch, stage)."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import nn

from benchmarks.common import Part, Spread, rounds, timed
from benchmarks.group import Options
from benchmarks.schedules.model import Problem, mlp

WORKERS = (1, 2, 4, 8)
#: By label: schedule, slots, and how many stages each worker has.
SCHEDULES: dict[str, tuple[str, str | None, int]] = {
    "naive": ("naive", None, 1),
    "gpipe": ("gpipe", None, 1),
    "1f1b, textbook slots": ("1f1b", "textbook", 1),
    "1f1b, overlap slots": ("1f1b", "overlap", 1),
    "zb_h1": ("zb_h1", None, 1),
    "interleaved_1f1b": ("interleaved_1f1b", None, 2),
}
WIDTH = 4


def run(options: Options) -> Part:
    """Measures it."""
    m = 4 if options.quick else 16
    repeats, least = options.rounds(21), 0.002 if options.quick else 0.05
    part = Part(
        "Overhead",
        f"Each stage is one Linear({WIDTH}, {WIDTH}), one on each worker (interleaved_1f1b: two), "
        f"{m} micro-batches of one sample, checkpoint='never'; {repeats} rounds of {least} s.",
        {
            "us/cell": "wall time of a training step (forward, loss, backward, from gradients of "
            "None) over micro-batches x stages.",
            "overhead us/cell": "that, less the plain loop's over the same layers in the same "
            "round.",
            "over the loop": "time over that of the plain loop, in the same round.",
        },
        notes=[
            "Layers this small compute next to nothing, so that workers can only be in each "
            "other's way: one Python interpreter runs one of them at a time."
        ],
    )
    for workers in WORKERS[:2] if options.quick else WORKERS:
        for stages in (1, 2) if workers > 1 else (2,):
            _measure(part, workers, stages, m, repeats, least)
    return part


def _measure(part: Part, workers: int, each: int, m: int, repeats: int, least: float) -> None:
    """All schedules of so many workers with so many stages on each, beside one loop."""
    n = workers * each
    problem = linears(n, m)
    devices = [f"cpu:{j % workers}" for j in range(n)] if workers > 1 else ["cpu"] * n
    expected = problem.expected(m)
    jobs: dict[str, Callable[[], float]] = {"plain loop": calibrated(problem.loop(m), least)}
    for label, (schedule, slots, stages) in SCHEDULES.items():
        if stages == each or workers == 1:
            step = problem.pipe(devices, m, schedule, slots).checked(label, expected)
            jobs[label] = calibrated(step, least)
    samples = rounds(jobs, repeats, f"overhead, {workers} workers, {n} stages")
    cells = m * n
    loop = samples["plain loop"]
    for label, times in samples.items():
        part.rows.append(
            {
                "workers": workers,
                "stages": n,
                "what": label,
                "us/cell": Spread.of([1e6 * took / cells for took in times]),
                "overhead us/cell": None
                if times is loop
                else Spread.of(
                    [1e6 * (a - b) / cells for a, b in zip(times, loop, strict=True)],
                ),
                "over the loop": Spread.ratio(times, loop),
            }
        )


def linears(n: int, batch: int) -> Problem:
    """So many layers that compute next to nothing."""
    problem = mlp(n, WIDTH, batch)
    layers = [layer for layer in problem.model if isinstance(layer, nn.Linear)]
    return Problem(nn.Sequential(*layers), problem.x, problem.target)


def calibrated(step: Callable[[], object], least: float) -> Callable[[], float]:
    """A job of as many steps as take about ``least`` seconds."""
    for _ in range(3):
        step()
    start = time.perf_counter()
    for _ in range(5):
        step()
    once = (time.perf_counter() - start) / 5
    return timed(step, max(1, round(least / once)))
