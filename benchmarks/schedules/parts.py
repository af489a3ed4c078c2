"""What schedules reach: wall time beside the ideal and beside the simulation.

Two parts: ``ideal`` (gpipe, 1f1b and zb_h1 on two workers, beside the plain loop and the ideal) and
``emulated`` (layers that sleep, wall time beside the simulated makespan). Everything is measured in
every round, in an order that changes from round to round, after it was seen to give the plain
loop's gradients. What a cell costs beside its layers is ``overhead``.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.common import Group, Options, Part, Spread, number, rounds, timed
from benchmarks.schedules.model import Halves, big, reported
from benchmarks.schedules.sleeping import emulated

#: At most this many times the ideal.
TARGET = 1.08
DEVICES = ("cpu:0", "cpu:1")
#: By label: devices, schedule and slots.
SUBJECTS = {
    "gpipe": (DEVICES, "gpipe", None),
    "1f1b, textbook slots": (DEVICES, "1f1b", "textbook"),
    "1f1b, overlap slots": (DEVICES, "1f1b", "overlap"),
    "zb_h1": (DEVICES, "zb_h1", None),
}


def ideal(options: Options) -> Part:
    """How near two CPU workers come to the ideal of their schedule."""
    problem, name, chunks = big(options)
    repeats = options.rounds(21)
    part = Part(
        "Two workers beside the ideal",
        f"{name}, two CPU workers with one intra-op thread each, checkpoint='never'; "
        f"{repeats} rounds.",
        {
            "ms": "one training step, from gradients of None; of the plain ones on one thread.",
            "over the loop": "time over that of the plain loop over the same micro-batches, on one "
            "thread, in the same round.",
            "over ideal": "time over (m+n-1)/(m n) of the plain loop's, n = 2: the ideal of 1F1B, "
            "which zb_h1 may go below.",
            "over measured ideal": "time over (m+n-1)/m of 'both halves at once', the ideal of two "
            "cores as they are.",
            "machine": "'both halves at once' over the longer of the two alone: 1 if the second "
            "core (and the memory they share) gives all it has, 2 if nothing.",
            "both halves at once": "the plain loops over the two halves of the model, with inputs "
            "and gradients that are there already, at the same time in two threads.",
        },
        notes=[
            "The first stage computes no gradient of its input, so the stages are about 11 to 12, "
            "not even. That is part of 'over ideal', and of 'both halves at once'."
        ],
    )
    for m in chunks:
        jobs: dict[str, Callable[[], float]] = {
            "plain full batch": timed(problem.loop(1)),
            "plain loop": timed(problem.loop(m)),
            **Halves(problem, m).jobs(),
            **problem.jobs(m, SUBJECTS),
        }
        _report(part, m, rounds(jobs, repeats, f"ideal, m={m}"))
    return part


def _report(part: Part, m: int, samples: dict[str, list[float]]) -> None:
    """A row for each job, a target for each schedule."""
    n = len(DEVICES)
    loop, halves = samples["plain loop"], samples["both halves at once"]
    alone = list(map(max, samples["first half alone"], samples["second half alone"]))
    for label, times, row in reported(part, m, samples):
        if label == "both halves at once":
            row["machine"] = Spread.ratio(times, alone)
        if label in SUBJECTS:
            ideal = row["over ideal"] = Spread.ratio(times, loop, (m + n - 1) / (m * n))
            measured = row["over measured ideal"] = Spread.ratio(times, halves, (m + n - 1) / m)
            part.aim(
                f"{label}, {m} micro-batches: at most {TARGET} times the ideal",
                ideal.median <= TARGET,
                f"{number(ideal.median)} times; {number(measured.median)} times the measured ideal",
            )


GROUP = Group(
    "schedules",
    "What schedules reach",
    __doc__,
    {"ideal": ideal, "emulated": emulated.run},
)
