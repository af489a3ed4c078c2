"""A schedule on threads that only sleep and wait for each other: what the system itself takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from benchmarks.common import Part, Spread, number, rounds, timed
from syncpipe.schedules.schedule import Action, Schedule
from syncpipe.schedules.simulation import Costs, Simulation, simulate

__all__ = ["COLUMNS", "Bare", "beside_bare"]

#: What :func:`beside_bare` finds.
COLUMNS = {
    "simulated ms": "makespan by syncpipe.schedules with exactly these times; transfers and sums "
    "of gradients take none.",
    "ms": "one training step by train_batch.",
    "over simulated": "time over the simulated makespan.",
    "bare threads over simulated": "the same for threads that walk the schedule's lists, sleep as "
    "long, wait for each other, and do nothing else: what the system's timer and Python's threads "
    "take.",
    "over bare threads": "time over that of the bare threads in the same round.",
}


class Bare:
    """A step without a pipe, to be called.

    Args:
        schedule: its lists of actions, a thread for each.
        costs: how long each action sleeps.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule, costs
        self._threads = ThreadPoolExecutor(len(schedule.actions))

    def __call__(self) -> None:
        """Runs it once."""
        over = {action: Event() for row in self._schedule.actions for action in row}

        def walk(row: Sequence[Action]) -> None:
            for action in row:
                for needed in self._schedule.predecessors(action):
                    over[needed].wait()
                time.sleep(self._costs.of(action))
                over[action].set()

        for walking in [self._threads.submit(walk, row) for row in self._schedule.actions]:
            walking.result()


def beside_bare(
    part: Part, runs: Sequence[Any], repeats: int, label: str, target: float
) -> Iterator[tuple[Any, Simulation, dict[str, Any]]]:
    """Measures runs in turns; each with its simulation and the columns of its row.

    Args:
        part: gets a target for each run: at most so many times the simulated makespan.
        runs: with a ``label``, a ``schedule``, its ``costs``, the ``step`` of a pipe, and ``bare``.
        repeats: number of rounds.
        label: of the bar that shows how far it is.
        target: see above.
    """
    jobs: dict[str, Callable[[], float]] = {}
    for run in runs:
        jobs[run.label], jobs[f"bare {run.label}"] = timed(run.step), timed(run.bare)
    samples = rounds(jobs, repeats, label)
    for run in runs:
        simulation = simulate(run.schedule, run.costs)
        times, bare = samples[run.label], samples[f"bare {run.label}"]
        simulated = [simulation.makespan] * len(times)
        ratio, floor = Spread.ratio(times, simulated), Spread.ratio(bare, simulated)
        row = {
            "simulated ms": 1e3 * simulation.makespan,
            "ms": Spread.of([1e3 * took for took in times]),
            "over simulated": ratio,
            "bare threads over simulated": floor,
            "over bare threads": Spread.ratio(times, bare),
        }
        part.aim(
            f"{run.label}: at most {target} times the simulated makespan",
            ratio.median <= target,
            f"{number(ratio.median)} times; bare threads {number(floor.median)} times",
        )
        yield run, simulation, row
