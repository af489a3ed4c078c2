"""What a schedule that was made to measure is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from syncpipe.schedules.schedule import Schedule

__all__ = ["AutoSchedule", "Report"]


@dataclass(frozen=True)
class Report:
    """Simulated steps, in the unit of the costs, and memory, in that of the activations.

    Attributes:
        step: of the schedule.
        bound: no schedule for these costs and this memory has a shorter one.
        named: steps of the schedules with names that fit, the shortest first.
        memory: for each device the most that it holds at once.
        limits: for each device what it may.
    """

    step: float
    bound: float
    named: Mapping[str, float]
    memory: tuple[float, ...]
    limits: tuple[float, ...]

    @property
    def best(self) -> str:
        """The named schedule with the shortest step."""
        return next(iter(self.named))

    @property
    def gain(self) -> float:
        """The step of the best named schedule over this one: at least 1."""
        return self.named[self.best] / self.step if self.step else 1.0

    @property
    def over_bound(self) -> float:
        """The step over the bound: 1 where nothing is left to be found."""
        return max(1.0, self.step / self.bound) if self.bound else 1.0  # less is rounding

    def __str__(self) -> str:
        named = ", ".join(f"{name} {step:.4g}" for name, step in self.named.items())
        memory = ", ".join(
            f"{held:.4g} of {limit:.4g}"
            for held, limit in zip(self.memory, self.limits, strict=True)
        )
        return (
            f"step {self.step:.4g}, {self.over_bound:.3f} times the bound {self.bound:.4g}; "
            f"{self.best} takes {self.gain:.3f} times as long\n"
            f"named schedules that fit: {named}\n"
            f"memory of each device: {memory}"
        )


@dataclass(frozen=True, eq=False)
class AutoSchedule(Schedule):
    """A schedule by :func:`syncpipe.schedules.auto`; equal to any with the same actions.

    Attributes:
        report: what it is worth.
    """

    report: Report = field(default=Report(0.0, 0.0, {}, (), ()), repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        mine, theirs = ((each.m, each.device_of, each.actions) for each in (self, other))
        return mine == theirs

    __hash__ = Schedule.__hash__
