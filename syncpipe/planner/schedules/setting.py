"""One schedule for so many micro-batches and stages, to be tried with many cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.schedules.footprint import Footprint, Load, base, footprints, loads, peak
from syncpipe.planner.schedules.halves import Halves
from syncpipe.planner.schedules.layouts import placement
from syncpipe.planner.search.candidate import Candidate, Terms
from syncpipe.schedules.auto import Problem, lower_bound
from syncpipe.schedules.player import play
from syncpipe.schedules.schedule import Schedule
from syncpipe.schedules.simulation import Costs, simulate

__all__ = ["Draft", "Scheduled", "Setting"]


@dataclass(frozen=True)
class Scheduled(Candidate):
    """A pipeline under any schedule, simulated.

    ``memory`` is what each stage takes at most, and no order of the same actions takes less time
    than ``bound``, in whatever memory.

    Attributes:
        on_device: bytes that each device takes at most, all of its stages together.
        guessed: whether the halves of backwards were not measured.
    """

    on_device: tuple[float, ...] = ()
    guessed: bool = False

    def fits(self, machine: Machine) -> bool:
        """Whether each device has memory enough."""
        return all(a <= b for a, b in zip(self.on_device, machine.memory, strict=False))


@dataclass(frozen=True, order=True)
class Draft:
    """What a cut takes under a schedule; the better one is the lesser one.

    Attributes:
        excess: the largest factor by which a device lacks memory; 1 if all fits.
        time: seconds, played through.
        balance: layers of each stage.
        recomputes: for each stage whether it re-materializes.
    """

    excess: float
    time: float
    balance: tuple[int, ...]
    recomputes: tuple[bool, ...] = field(compare=False)


class Setting:
    """A schedule and what it needs to know of the layers.

    Args:
        terms: layers and devices.
        name: of the schedule.
        schedule: itself.
    """

    def __init__(self, terms: Terms, name: str, schedule: Schedule) -> None:
        self.terms, self.name, self.schedule = terms, name, schedule
        self.m, self.n = schedule.m, schedule.n
        self.chain = terms.chain(self.m)
        self.halves = Halves.of(terms.profile, terms.batch_size / self.m)
        self.device_of = placement(schedule)
        self._places = terms.on(terms.machine.ordered(self.device_of))
        self._limits = terms.machine.memory
        self._stages = [
            [j for j in range(self.n) if self.device_of[j] == d]
            for d in range(len(schedule.actions))
        ]
        self._in_flight = schedule.in_flight

    @property
    def work(self) -> int:
        """Actions that have to be played to try a cut."""
        return sum(map(len, self.schedule.actions))

    @cached_property
    def _loads(self) -> tuple[tuple[Load, ...], ...]:
        return loads(self.schedule)

    def costs(self, balance: Sequence[int]) -> Costs:
        """What the stages of a cut take."""
        costs = self._places.costs(balance, self.m)
        return self.halves.split(costs, self.chain, balance)

    def footprints(
        self, balance: Sequence[int], recomputes: Sequence[bool]
    ) -> tuple[Footprint, ...]:
        """What the stages of a cut hold."""
        return footprints(self.chain, balance, self._in_flight, recomputes, self.halves.outputs)

    def draft(self, balance: Sequence[int]) -> Draft:
        """What a cut takes, with recomputation where it does not fit otherwise."""
        costs = self.costs(balance)
        recomputes, excess = self._recomputing(balance, costs)
        counts = [self.m * again for again in recomputes]
        time = play(self.schedule.actions, self.m, self.device_of, costs, counts).makespan
        python = self.terms.interpreter(balance, self.m, self.name, recomputes)
        return Draft(excess, max(time, python), tuple(balance), recomputes)

    def candidate(self, draft: Draft) -> Scheduled:
        """A draft with its simulation."""
        costs, counts = self.costs(draft.balance), [self.m * r for r in draft.recomputes]
        simulation = simulate(self.schedule, costs, counts)
        stages = self.footprints(draft.balance, draft.recomputes)
        python = self.terms.interpreter(draft.balance, self.m, self.name, draft.recomputes)
        bound = lower_bound(self._problem(costs, draft.recomputes)) * self.terms.sound(self.m)
        own = (
            peak(tuple((load[k],) for load in self._loads[d]), (stages[j],))
            for j, d in enumerate(self.device_of)
            for k in [self._stages[d].index(j)]
        )
        return Scheduled(
            schedule=self.name,
            balance=draft.balance,
            chunks=self.m,
            slots=None,
            recomputes=draft.recomputes,
            bound=max(python, min(bound, simulation.makespan)),
            simulation=simulation,
            memory=tuple(own),
            interpreter=python,
            on_device=self._peaks(stages),
            guessed=bool(self.schedule.splits) and not self.halves.measured,
        )

    def _peaks(self, stages: Sequence[Footprint]) -> tuple[float, ...]:
        return tuple(
            peak(self._loads[d], [stages[j] for j in own]) for d, own in enumerate(self._stages)
        )

    def _recomputing(self, balance: Sequence[int], costs: Costs) -> tuple[tuple[bool, ...], float]:
        """Stages that re-materialize, those first that save most for their time; what is lacking.

        Where not even that is enough, a device recomputes what makes it need least.
        """
        chosen = [False] * self.n
        kept = self.footprints(balance, chosen)
        again = self.footprints(balance, [True] * self.n)
        excess = 1.0
        for d, own in enumerate(self._stages):
            needs = peak(self._loads[d], [kept[j] for j in own])
            saved = {j: kept[j].held - again[j].held for j in own}
            order = sorted(own, key=lambda j: -saved[j] / (costs.forward[j] or math.ulp(0.0)))
            for j in order:
                if needs <= self._limits[d]:
                    break
                chosen[j] = True
                less = peak(self._loads[d], [(again if chosen[k] else kept)[k] for k in own])
                chosen[j], needs = less < needs, min(less, needs)
            if needs > self._limits[d]:
                excess = max(excess, needs / self._limits[d])
        return tuple(chosen), excess

    def _problem(self, costs: Costs, recomputes: Sequence[bool]) -> Problem:
        """The order of actions as numbers, whatever they hold."""
        return Problem(
            self.m,
            self.device_of,
            costs,
            tuple(self.m * bool(again) for again in recomputes),
            (1.0,) * self.n,
            (1.0,) * self.n,
            (math.inf,) * len(self._stages),
            split=bool(self.schedule.splits),
        )

    def memory(self, draft: Draft, *, split: bool) -> dict[str, list[float]]:
        """What :func:`syncpipe.schedules.auto` has to know; in halves a little on the safe side."""
        stages = self.footprints(draft.balance, draft.recomputes)
        return {
            "activations": [f.held + f.again + f.halves * split for f in stages],
            "inputs": [f.held for f in stages],
            "memory": [
                max(0.0, self._limits[d] - base(stages[j] for j in own))
                for d, own in enumerate(self._stages)
            ],
        }
