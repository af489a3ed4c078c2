"""What the zero-bubble schedule with its fused weight gradients gains over 1f1b."""

from __future__ import annotations

from benchmarks.common import Part, Spread, number, rounds, timed
from benchmarks.group import Options
from benchmarks.schedules.ideal import DEVICES
from benchmarks.schedules.model import big, reported
from syncpipe.schedules import one_f_one_b, zb_h1
from syncpipe.schedules.simulation import Costs, simulate

#: By label: devices, schedule and slots.
SUBJECTS = {
    "naive": (DEVICES, "naive", None),
    "1f1b, textbook slots": (DEVICES, "1f1b", "textbook"),
    "1f1b, overlap slots": (DEVICES, "1f1b", "overlap"),
    "zb_h1": (DEVICES, "zb_h1", None),
    "1f1b, one worker": (("cpu", "cpu"), "1f1b", None),
    "zb_h1, one worker": (("cpu", "cpu"), "zb_h1", None),
}


def run(options: Options) -> Part:
    """Measures it."""
    problem, name, chunks = big(options)
    repeats = options.rounds(21)
    n = len(DEVICES)
    part = Part(
        "Zero bubble",
        f"{name}, two CPU workers with one intra-op thread each, checkpoint='never'; "
        f"{repeats} rounds.",
        {
            "ms": "one training step, from gradients of None.",
            "over the loop": "time over that of the plain loop over the same micro-batches, on one "
            "thread, in the same round.",
            "over 1f1b": "time over that of 1f1b with its default slots (overlap) in the same "
            "round.",
            "over ideal of 1f1b": "time over (m+n-1)/(m n) of the plain loop's, n = 2.",
            "one worker": "both stages on one thread: what fused weight gradients alone are worth, "
            "without any bubble to fill.",
        },
    )
    for m in chunks:
        jobs = {"plain loop": timed(problem.loop(m)), **problem.jobs(m, SUBJECTS)}
        _report(part, m, n, rounds(jobs, repeats, f"zero_bubble, m={m}"))
        even = Costs.even(n)
        gain = simulate(zb_h1(m, n), even).makespan / simulate(one_f_one_b(m, n), even).makespan
        part.notes.append(
            f"By simulation, with even stages and halves and {m} micro-batches, the smaller "
            f"bubble alone makes zb_h1 {number(gain)} times 1f1b."
        )
    return part


def _report(part: Part, m: int, n: int, samples: dict[str, list[float]]) -> None:
    """A row for each job, and the targets."""
    loop, other = samples["plain loop"], samples["1f1b, overlap slots"]
    for label, times, row in reported(part, m, samples):
        if label in SUBJECTS and "one worker" not in label:
            row["over 1f1b"] = Spread.ratio(times, other)
            row["over ideal of 1f1b"] = Spread.ratio(times, loop, (m + n - 1) / (m * n))
    for against, column in (
        ("1f1b", "over 1f1b"),
        ("the ideal of 1f1b", "over ideal of 1f1b"),
    ):
        ratio = next(row[column] for row in part.rows if (row["m"], row["what"]) == (m, "zb_h1"))
        aim = f"zb_h1, {m} micro-batches: faster than {against}"
        part.aim(aim, ratio.median < 1, f"{number(ratio.median)} times")
