"""``Plan``: how to cut a model and how to run it, with what it will take, and against what."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from syncpipe.balance.profile import Profile
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.report.lesson.document import Shown, save
from syncpipe.planner.report.page import page
from syncpipe.planner.report.rivals import Rival
from syncpipe.planner.report.stages import StagePlan, on_devices, stages_of
from syncpipe.planner.schedules.layouts import AUTO, LAYOUTS, placement
from syncpipe.planner.schedules.setting import Scheduled
from syncpipe.planner.schedules.variants import GLANCE, variants
from syncpipe.planner.search.candidate import Candidate, Terms
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
        devices: the real devices to run on, as a pipe takes them; None if they were only described.
        fixed: what was not to be chosen, of ``"chunks"``, ``"stages"`` and ``"schedule"``.
        param_scale: bytes for each byte of a parameter that is trained.
    """

    profile: Profile
    machine: Machine
    batch_size: int
    chosen: Candidate
    rivals: tuple[Rival, ...]
    devices: tuple[Any, ...] | None = None
    fixed: frozenset[str] = frozenset()
    param_scale: float = 4.0

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
        """The name of the schedule; ``"auto"`` for one that was made to measure."""
        return self.chosen.schedule

    @property
    def slots(self) -> list[int] | None:
        """For each stage the most micro-batches in flight under 1F1B; None for other schedules."""
        return None if self.chosen.slots is None else list(self.chosen.slots)

    @property
    def checkpoint(self) -> list[str]:
        """For each stage the checkpoint mode.

        A stage that re-materializes does so for all micro-batches, as the last one stored would be
        beside one that is being recomputed, but under GPipe for all but the last, which goes back
        at once.
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
        """Seconds that this plan's own cut takes at least, with its micro-batches and slots.

        It says how well the schedule does what it could, not that no other plan is faster: another
        cut, or another number of micro-batches, has a bound of its own. Under a schedule other
        than GPipe's and 1F1B, no order of the same actions takes less.
        """
        return self.chosen.bound

    @property
    def least(self) -> float:
        """Seconds that nothing the search looked for falls short of: any cut, number of stages and
        of micro-batches, slots and re-materialization, under GPipe and 1F1B, on the devices in this
        order. 0 for a plan under another schedule.
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
        :mod:`syncpipe.balance.profiling.interpreter`; what the pipe itself does for each cell comes
        on top.
        """
        return self.chosen.interpreter

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """What each stage has and does."""
        return stages_of(self.profile, self.machine, self.chosen)

    @cached_property
    def others(self) -> tuple[Scheduled, ...]:
        """The other schedules on as many devices, with as many micro-batches; the fastest first.

        Some may not fit into memory, and none is more than looked at: ``plan(schedule=...)`` looks
        longer. They are looked for when they are first asked for, as by ``print``.
        """
        if len(self.balance) == 1:
            return ()
        terms = Terms(self.profile, self.machine, self.batch_size, self.param_scale)
        names = [name for name in LAYOUTS if name != self.schedule]
        found = variants(terms, [self.chosen], names, GLANCE)
        return tuple(sorted(found, key=lambda other: (not other.fits(self.machine), other.time)))

    @property
    def device_of(self) -> list[int]:
        """For each stage the index of its device; some schedules want several stages on each."""
        return list(placement(self.simulation.schedule))

    def on(self, devices: Sequence[Any]) -> list[Any]:
        """For each stage its device, as a pipe takes them::

        pipe = Pipe(model, **plan.options(), devices=plan.on(["cuda:0", "cuda:1"]))

        Args:
            devices: as many as the plan uses, or more.

        Raises:
            ValueError: these are too few.
        """
        if len(devices) <= max(self.device_of):
            raise ValueError(
                f"devices={list(devices)}: this plan uses {max(self.device_of) + 1} devices"
            )
        return [devices[d] for d in self.device_of]

    def options(self) -> dict[str, Any]:
        """The arguments of a pipe that runs this plan::

        pipe = Pipe(model, **plan.options(), devices=plan.devices)

        The devices are not among them: a plan may be run on others than it was made for
        (:meth:`on`).
        """
        return {
            "balance": self.balance,
            "chunks": self.chunks,
            "checkpoint": self.checkpoint,
            "schedule": self.simulation.schedule if self.schedule == AUTO else self.schedule,
            "slots": self.slots,
        }

    def timeline(self) -> Timeline:
        """The simulated step, to be shown or saved as a picture or for Perfetto."""
        rows = [self.machine.name(d) for d in range(max(self.device_of) + 1)]
        title = f"{self.schedule}, {self.chunks} micro-batches, planned"
        return Timeline.of(self.simulation, title, rows=_told_apart(rows), unit="s")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as one picture, to be looked at in a browser.

        The model as bars of time and memory, layer by layer; where it is cut; the simulated step;
        what each device holds meanwhile, and its limit; what else was considered. The file needs
        nothing else, and follows the reader's choice of light or dark.

        Args:
            path: ends in ``.html`` or ``.svg``.

        Raises:
            ValueError: it ends in something else.
        """
        shown = Shown(
            self.profile,
            self.machine,
            self.batch_size,
            self.param_scale,
            self.chosen,
            self.rivals,
            self.others,
        )
        save(path, shown, str(self))

    def as_dict(self) -> dict[str, Any]:
        """The plan as numbers and strings, for JSON. Times are in seconds, memory in bytes."""
        return {
            "batch_size": self.batch_size,
            "balance": self.balance,
            "chunks": self.chunks,
            "schedule": self.schedule,
            "slots": self.slots,
            "device_of": self.device_of,
            "checkpoint": self.checkpoint,
            "step_time": self.step_time,
            "samples_per_second": _finite(self.samples_per_second),
            "bubble": self.bubble,
            "bound": self.bound,
            "certificate": self.certificate,
            "least": self.least,
            "interpreter_time": self.interpreter_time,
            "stages": [
                {**vars(stage), "layers": list(stage.layers), "limit": _finite(stage.limit)}
                for stage in self.stages
            ],
            "memory_of_devices": list(on_devices(self.chosen)),
            "rivals": [vars(rival) for rival in self.rivals],
            "schedules": [
                {
                    "schedule": other.schedule,
                    "time": other.time,
                    "memory_of_devices": list(other.on_device),
                    "fits": other.fits(self.machine),
                    "balance": list(other.balance),
                    "chunks": other.chunks,
                }
                for other in self.others
            ],
        }

    def __str__(self) -> str:
        return page(
            self.profile,
            self.machine,
            self.batch_size,
            self.chosen,
            self.rivals,
            self.others,
            self.fixed,
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
