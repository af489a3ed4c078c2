"""``schedule="auto"``: the first calls of a pipe are measured, the others have a schedule for it.

What a backward takes depends on whether it comes in halves, which is not free: layers are then
called in a way of their own. So both are measured, and the better of two schedules is taken, one
for whole backwards and one for halves, each with what was measured for it.

    call        0         1         2         3         4 ...
    schedule    1f1b      1f1b      halves    halves    auto
                warm up   measured  warm up   measured
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncpipe.schedules import AutoSchedule, auto, one_f_one_b
from syncpipe.schedules.auto import halved
from syncpipe.timeline.costs import costs_of, rematerialized_in
from syncpipe.timeline.trace import Trace

__all__ = ["Measured"]

#: Halves change the last bits of gradients, so they have to be worth it.
_WORTH = 0.98

#: A call: where it was recorded, and as which step.
_Call = tuple[Trace, int]

#: What calls are measured for: number of micro-batches, device of each stage, and how it is run.
Key = tuple[Any, ...]


class Measured:
    """What the calls of one pipe took, and the schedules that were made of it."""

    def __init__(self) -> None:
        self._calls: dict[Key, list[_Call]] = {}
        self._made: dict[Key, AutoSchedule] = {}

    @property
    def schedules(self) -> dict[int, AutoSchedule]:
        """Those that were made, the last one for each number of micro-batches."""
        return {schedule.m: schedule for schedule in self._made.values()}

    def run(
        self, m: int, device_of: tuple[int, ...], how: Key, trace: Trace, train: Callable[..., Any]
    ) -> Any:
        """One call.

        Args:
            m: number of micro-batches.
            device_of: for each stage the index of its device.
            how: whatever else times depend on.
            trace: where to record it, if it is to be measured.
            train: runs a step, given ``schedule=`` and ``recorder=``.
        """
        key = (m, device_of, *how)
        calls = self._calls.setdefault(key, [])
        if len(calls) >= 4 and key not in self._made:  # before the step: what fails now leaves none
            self._made[key] = _better(m, device_of, calls[1], calls[3])
            calls.clear()
        if key in self._made:
            return train(schedule=self._made[key])
        usual = one_f_one_b(m, device_of)
        recorder = trace.recorder()
        result = train(schedule=usual if len(calls) < 2 else halved(usual), recorder=recorder)
        calls.append((trace, recorder.step))
        return result


def _better(m: int, device_of: tuple[int, ...], whole: _Call, halves: _Call) -> AutoSchedule:
    """The schedule of whole backwards, or that of halves."""
    made = []
    for split, (trace, step) in enumerate((whole, halves)):
        spans = [span for span in trace.spans if span.step == step]
        costs, counts = costs_of(spans), rematerialized_in(spans)
        made.append(auto(m, device_of, costs=costs, rematerialized=counts, split=bool(split)))
    return made[made[1].report.step < _WORTH * made[0].report.step]
