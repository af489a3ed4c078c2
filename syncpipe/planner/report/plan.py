"""``Plan``: how to cut a model and how to run it, with what it will take, and against what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from syncpipe.balance.profile import Profile
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.report.page import page
from syncpipe.planner.report.rivals import Rival
from syncpipe.planner.report.stages import StagePlan, stages_of
from syncpipe.planner.search.candidate import Candidate
from syncpipe.schedules.simulation import Simulation
from syncpipe.timeline.timeline import Timeline

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """What :func:`syncpipe.plan` chose. ``print(plan)`` explains it.

    Attributes:
        profile: what the layers cost.
        machine: the devices.
        batch_size: samples in a mini-batch.
        chosen: the plan itself, and its simulation.
        rivals: what else could be done, with what it would take.
        devices: the real devices to run on; None if they were only described.
        fixed: what was not to be chosen, of ``"chunks"``, ``"stages"`` and ``"schedule"``.
    """

    profile: Profile
    machine: Machine
    batch_size: int
    chosen: Candidate
    rivals: tuple[Rival, ...]
    devices: tuple[Any, ...] | None = None
    fixed: frozenset[str] = frozenset()

    @property
    def balance(self) -> list[int]:
        """For each stage the number of its layers."""
        return list(self.chosen.balance)

    @property
    def chunks(self) -> int:
        """The number of micro-batches."""
        return self.chosen.chunks

    @property
    def schedule(self) -> str:
        """The name of the schedule: ``"gpipe"`` or ``"1f1b"``."""
        return self.chosen.schedule

    @property
    def slots(self) -> list[int] | None:
        """For each stage the most micro-batches in flight; None under GPipe, where it is all."""
        return None if self.chosen.slots is None else list(self.chosen.slots)

    @property
    def checkpoint(self) -> list[str]:
        """For each stage the checkpoint mode.

        A stage that re-materializes does so for all micro-batches under 1F1B, where the last one
        stored would be beside one that is being recomputed, and under GPipe for all but the last,
        which goes back at once.
        """
        mode = "except_last" if self.schedule == "gpipe" else "always"
        return [mode if recomputes else "never" for recomputes in self.chosen.recomputes]

    @property
    def simulation(self) -> Simulation:
        """The schedule, played through with the times of the profile, in seconds."""
        return self.chosen.simulation

    @property
    def step_time(self) -> float:
        """Seconds for forward and backward of one mini-batch, simulated; without the optimizer."""
        return self.chosen.time

    @property
    def samples_per_second(self) -> float:
        """What that makes."""
        return self.batch_size / self.step_time if self.step_time else math.inf

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time in which they are idle."""
        return self.simulation.bubble

    @property
    def bound(self) -> float:
        """Seconds that this cut takes at least with these micro-batches and slots, by the formula
        of its schedule.
        """
        return self.chosen.bound

    @property
    def least(self) -> float:
        """Seconds that nothing the search looked for falls short of: any cut, number of stages and
        of micro-batches, slots and re-materialization, under GPipe and 1F1B, on the devices in this
        order.
        """
        return self.chosen.least

    @property
    def certificate(self) -> float:
        """Simulated time by the bound: 1 is perfect."""
        return self.chosen.certificate

    @property
    def interpreter_time(self) -> float:
        """Seconds of Python in the forwards of all stages, which no two threads do at a time.

        No step is shorter, but for free-threaded builds of CPython, where it is 0. As measured by
        :mod:`syncpipe.balance.interpreter`; what the pipe itself does for each cell comes on top.
        """
        return self.chosen.interpreter

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """What each stage has and does."""
        return stages_of(self.profile, self.machine, self.chosen)

    def options(self) -> dict[str, Any]:
        """The arguments of a pipe that runs this plan::

        pipe = Pipe(model, **plan.options(), devices=plan.devices)

        The devices are not among them: a plan may be run on others than it was made for.
        """
        return {
            "balance": self.balance,
            "chunks": self.chunks,
            "checkpoint": self.checkpoint,
            "schedule": self.schedule,
            "slots": self.slots,
        }

    def timeline(self) -> Timeline:
        """The simulated step, to be shown or saved as a picture or for Perfetto."""
        rows = [stage.device for stage in self.stages]
        title = f"{self.schedule}, {self.chunks} micro-batches, planned"
        return Timeline.of(self.simulation, title, rows=_told_apart(rows), unit="s")

    def as_dict(self) -> dict[str, Any]:
        """The plan as numbers and strings, for JSON. Times are in seconds, memory in bytes."""
        return {
            "batch_size": self.batch_size,
            "balance": self.balance,
            "chunks": self.chunks,
            "schedule": self.schedule,
            "slots": self.slots,
            "checkpoint": self.checkpoint,
            "step_time": self.step_time,
            "samples_per_second": _finite(self.samples_per_second),
            "bubble": self.bubble,
            "bound": self.bound,
            "certificate": self.certificate,
            "interpreter_time": self.interpreter_time,
            "stages": [
                {**vars(stage), "layers": list(stage.layers), "limit": _finite(stage.limit)}
                for stage in self.stages
            ],
            "rivals": [vars(rival) for rival in self.rivals],
        }

    def __str__(self) -> str:
        return page(
            self.profile, self.machine, self.batch_size, self.chosen, self.rivals, self.fixed
        )

    def __repr__(self) -> str:
        return (
            f"<Plan balance={self.balance} chunks={self.chunks} schedule={self.schedule!r} "
            f"step_time={self.step_time:.4g} s certificate={self.certificate:.3f}>"
        )


def _told_apart(names: Sequence[str]) -> list[str]:
    """Names with numbers where two are the same."""
    return [f"{name} ({k})" if names.count(name) > 1 else name for k, name in enumerate(names)]


def _finite(number: float) -> float | None:
    """JSON knows no infinity."""
    return number if math.isfinite(number) else None
