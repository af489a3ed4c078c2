"""A schedule on threads that only sleep and wait for each other: what the system itself takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from syncpipe.schedules.schedule import Action, Schedule
from syncpipe.schedules.simulation import Costs

__all__ = ["Bare"]


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
