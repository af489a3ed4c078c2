"""Eight stages whose layers sleep: does a schedule take as long as its simulation says?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.common import Options, Outcome, Part, Spread, number, rounds, timed
from benchmarks.schedules.model import PipeStep, Problem
from benchmarks.schedules.sleeping.naps import (
    FORWARD,
    INPUT,
    WEIGHT,
    WHOLE,
    NappingLinear,
    Naps,
    splitting_naps,
)
from syncpipe import Pipe
from syncpipe.schedules import build, one_f_one_b
from syncpipe.schedules.build import ScheduleLike
from syncpipe.schedules.schedule import Schedule
from syncpipe.schedules.simulation import Costs, simulate

#: At most so much more than the simulated makespan.
TARGET = 1.05
WIDTH = 4


@dataclass(frozen=True)
class Emulated:
    """A schedule, and how it is emulated.

    Attributes:
        label: what it is called.
        schedule: its name.
        slots: of 1f1b.
        stages_each: how many stages a device has.
        splits: whether the backward of the layers can be split.
    """

    label: str
    schedule: str
    slots: str | None = None
    stages_each: int = 1
    splits: bool = True


SUBJECTS = (
    Emulated("naive", "naive"),
    Emulated("gpipe", "gpipe"),
    Emulated("1f1b, textbook slots", "1f1b", "textbook"),
    Emulated("1f1b, overlap slots", "1f1b", "overlap"),
    Emulated("interleaved_1f1b, 2 stages each", "interleaved_1f1b", stages_each=2),
    Emulated("zb_h1", "zb_h1"),
    Emulated("zb_h1, layers that cannot be split", "zb_h1", splits=False),
)


class Run:
    """One schedule on its pipe."""

    def __init__(self, subject: Emulated, n: int, m: int, seconds: float) -> None:
        self.label = subject.label
        self._naps = Naps(seconds, seconds, seconds)
        devices = n // subject.stages_each
        device_of = [j % devices for j in range(n)]
        kind: ScheduleLike = subject.schedule
        if subject.slots is not None:
            kind = partial(one_f_one_b, slots=subject.slots)
        self.schedule: Schedule = build(kind, m, device_of)
        halves = bool(self.schedule.splits) and subject.splits
        self._halves = m * n if halves else 0
        # A layer that cannot be split does all of its backward in the input half.
        back = (seconds, seconds) if halves else (2 * seconds, 0.0)
        self.costs = Costs.even(n, seconds, *back)
        problem = napping(n, m, self._naps, splits=subject.splits)
        pipe = Pipe(
            problem.model,
            [1] * n,
            devices=[f"cpu:{d}" for d in device_of],
            chunks=m,
            checkpoint="never",
        )
        self.step = PipeStep(pipe, problem.x, problem.target, subject.schedule, subject.slots)

    def check(self, expected: Outcome) -> None:
        """The gradients are right, and the naps are those of the simulation."""
        label, cells = self.label, self.schedule.m * self.schedule.n
        self.step.checked(label, expected)
        whole = cells - self._halves
        wanted = {FORWARD: cells, WHOLE: whole, INPUT: self._halves, WEIGHT: self._halves}
        taken = {kinds: self._naps.taken.count(kinds) for kinds in wanted}
        if taken != wanted:
            raise SystemExit(f"{label}: took naps {taken}, not {wanted}; nothing measured")
        self._naps.taken.clear()


def run(options: Options) -> Part:
    """Measures it."""
    n, m, seconds = (4, 4, 0.001) if options.quick else (8, 32, 0.004)
    repeats = options.rounds(7)
    ms = number(1e3 * seconds)
    part = Part(
        "Emulated devices",
        f"{n} stages of one layer that sleeps {ms} ms forward and {number(2e3 * seconds)} ms "
        f"backward (halves: {ms} and {ms} ms), {n} CPU workers, interleaved_1f1b {n // 2}; {m} "
        f"micro-batches; {repeats} rounds.",
        {
            "simulated ms": "makespan by syncpipe.schedules with exactly these times; transfers "
            "and sums of gradients take none.",
            "ms": "one training step by train_batch.",
            "over simulated": "time over the simulated makespan.",
            "zb_h1": "the layer comes with a rule by which syncpipe splits its backward; "
            "'layers that cannot be split' do all of it in the input half, and the simulation has "
            "the same.",
        },
    )
    with splitting_naps():
        expected = napping(n, m, Naps(0.0, 0.0, 0.0), splits=True).expected(m)
        runs = [Run(subject, n, m, seconds) for subject in SUBJECTS]
        for each in runs:
            each.check(expected)
        samples = rounds({each.label: timed(each.step) for each in runs}, repeats, "emulated")
    for each in runs:
        makespan, times = simulate(each.schedule, each.costs).makespan, samples[each.label]
        ratio = Spread.ratio(times, [makespan] * len(times))
        part.rows.append(
            {
                "what": each.label,
                "simulated ms": 1e3 * makespan,
                "ms": Spread.of([1e3 * took for took in times]),
                "over simulated": ratio,
            }
        )
        aim = f"{each.label}: at most {TARGET} times the simulated makespan"
        part.aim(aim, ratio.median <= TARGET, f"{number(ratio.median)} times")
    return part


def napping(n: int, batch: int, naps: Naps, *, splits: bool) -> Problem:
    """So many layers that nap; the same weights and data every time."""
    torch.manual_seed(0)
    layers = [NappingLinear(WIDTH, naps, splits=splits) for _ in range(n)]
    data: list[Tensor] = [torch.randn(batch, WIDTH) for _ in range(2)]
    return Problem(nn.Sequential(*layers), *data)
