"""What a schedule made to measure gains on uneven stages, simulated, and how long it is sought."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median

from benchmarks.common import Part, Spread, number
from benchmarks.group import Options
from syncpipe.schedules import Costs, auto
from syncpipe.schedules.auto import Report

#: At least so many times as long for the best named schedule, and at most so many seconds.
GAIN, SECONDS = 1.02, 2.0


@dataclass(frozen=True)
class Setting:
    """What is drawn.

    Attributes:
        devices: how many.
        each: stages on each of them, going round.
        m: number of micro-batches.
        memory: of each device in micro-batches of all of its stages; None for the default.
        recomputed: whether all micro-batches are recomputed, of which a quarter stays meanwhile.
    """

    devices: int
    each: int
    m: int
    memory: float | None = None
    recomputed: bool = False

    def report(self, seed: int) -> tuple[Report, float]:
        """Of the schedule for costs that are drawn, and the CPU seconds that it took."""
        n = self.devices * self.each
        costs = drawn(n, random.Random(seed))
        memory = None if self.memory is None else self.memory * self.each
        again = {"rematerialized": [self.m] * n, "inputs": [0.25] * n} if self.recomputed else {}
        places = [*range(self.devices)] * self.each
        start = time.process_time()
        schedule = auto(self.m, places, costs=costs, memory=memory, **again)
        return schedule.report, time.process_time() - start

    def row(self) -> dict[str, object]:
        """What stands before what was found."""
        return {
            "devices": self.devices,
            "stages each": self.each,
            "m": self.m,
            "recomputed": "all" if self.recomputed else "",
            "memory": "default" if self.memory is None else number(self.memory),
        }


def settings(quick: bool) -> list[Setting]:
    """From small to large, by default, with the memory of ZB-H1, and with half of that."""
    sizes = [(2, 4)] if quick else [(4, 8), (8, 16), (8, 64)]
    found = [Setting(n, 1, m, memory) for n, m in sizes for memory in (None, float(n), n / 2)]
    n, m = sizes[0]
    found += [Setting(n, 2, 2 * m, memory) for memory in (None, float(n), n / 2)]
    n, m = sizes[-1]
    return [*found, Setting(n, 1, m // 2, n / 2, recomputed=True)]


def drawn(n: int, chance: random.Random) -> Costs:
    """Stages from half to one and a half, halves of different length, transfers of a tenth."""
    forward = [chance.uniform(0.5, 1.5) for _ in range(n)]
    return Costs(
        tuple(forward),
        tuple(time * chance.uniform(0.8, 1.2) for time in forward),
        tuple(time * chance.uniform(0.7, 1.1) for time in forward),
        tuple(chance.uniform(0.05, 0.15) for _ in range(n - 1)),
    )


def run(options: Options) -> Part:
    """Measures it."""
    draws = options.rounds(9)
    part = Part(
        "Made to measure",
        f"Uneven stages, simulated: forward 0.5 to 1.5, input half 0.8 to 1.2 times and weight "
        f"half 0.7 to 1.1 times that, transfers 0.05 to 0.15; {draws} draws, which stand for "
        "rounds.",
        {
            "memory": "micro-batches that each device may hold, of all of its stages; by default "
            "as many as under 1f1b (overlap slots) or under zb_h1, whichever has more there. Of "
            "what is recomputed a quarter is held until then.",
            "best named": "the schedule with a name that was most often the shortest of those "
            "that fit. 1f1b is there with overlap slots and with textbook slots, fewer in "
            "proportion where memory is short.",
            "named over auto": "the step of the shortest named schedule over that of auto.",
            "1f1b over auto": "the same for the shortest 1f1b.",
            "auto over bound": "its step over the lower bound for these costs and this memory.",
            "named over bound": "the same of the shortest named schedule: what there was to gain.",
            "search s": "seconds of one CPU that auto took.",
        },
    )
    for setting in settings(options.quick):
        found = [setting.report(seed) for seed in range(draws)]
        reports = [report for report, _ in found]
        best = [report.best for report in reports]
        row = setting.row()
        row["best named"] = max(sorted(set(best)), key=best.count)
        gains = [report.gain for report in reports]
        row["named over auto"] = Spread.of(gains)
        row["1f1b over auto"] = Spread.of([_usual(report) / report.step for report in reports])
        row["named over bound"] = Spread.of([r.gain * r.over_bound for r in reports])
        row["auto over bound"] = Spread.of([report.over_bound for report in reports])
        row["search s"] = Spread.of([seconds for _, seconds in found])
        part.rows.append(row)
        _aim(part, setting, gains, median(seconds for _, seconds in found))
    return part


def _usual(report: Report) -> float:
    """The step of the shortest 1f1b; with one slot for each stage that is naive."""
    steps = [step for name, step in report.named.items() if name.startswith("1f1b")]
    return min(steps, default=report.named["naive"])


def _aim(part: Part, setting: Setting, gains: list[float], seconds: float) -> None:
    what = ", ".join(f"{name} {value}" for name, value in setting.row().items() if value)
    part.aim(
        f"{what}: never longer than a named schedule, half of the time {GAIN} times shorter",
        min(gains) >= 1 and median(gains) >= GAIN,
        f"at least {number(min(gains))}, median {number(median(gains))}",
    )
    if (setting.devices, setting.m) == (8, 64):
        part.aim(
            f"{what}: at most {number(SECONDS)} seconds of one CPU",
            seconds <= SECONDS,
            f"{number(seconds)} s",
        )
