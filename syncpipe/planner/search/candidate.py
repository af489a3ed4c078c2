"""``Candidate``: one way to run the layers as a pipeline, with what it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from syncpipe.balance.profile import Profile
from syncpipe.planner.costs.chain import Chain, costs_of
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.cuts.gpipe import GPipeCuts
from syncpipe.planner.cuts.one_f_one_b import FAMILIES, Family, OneFOneBCuts, slots_of
from syncpipe.planner.search.sizes import sizes_of
from syncpipe.runtime.free_threading import has_lock
from syncpipe.schedules import gpipe, one_f_one_b
from syncpipe.schedules.simulation import Costs, Simulation, simulate

__all__ = ["SCHEDULES", "Candidate", "Terms", "evaluate"]

SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Candidate:
    """A pipeline, simulated.

    Attributes:
        schedule: ``"gpipe"`` or ``"1f1b"``.
        balance: layers of each stage; stage ``s`` is on device ``s``.
        chunks: number of micro-batches.
        slots: under 1F1B the most micro-batches in flight on each stage; None under GPipe.
        recomputes: for each stage whether it re-materializes: all micro-batches under 1F1B, all but
            the last under GPipe.
        bound: seconds that this cut takes at least with these slots and micro-batches, by the
            closed form.
        simulation: in seconds.
        memory: bytes that each stage takes at most.
        interpreter: seconds that all forwards hold the interpreter's lock, recomputed ones twice.
        least: seconds that nothing falls short of that the search looked for, under any schedule
            that it was given; 0 where nobody searched.
    """

    schedule: str
    balance: tuple[int, ...]
    chunks: int
    slots: tuple[int, ...] | None
    recomputes: tuple[bool, ...]
    bound: float
    simulation: Simulation
    memory: tuple[float, ...]
    interpreter: float = 0.0
    least: float = field(default=0.0, compare=False)

    @property
    def time(self) -> float:
        """Seconds for one mini-batch, simulated; no less than one interpreter needs for it."""
        return max(self.simulation.makespan, self.interpreter)

    @property
    def certificate(self) -> float:
        """Simulated time by bound: 1 where the schedule does all that the formula hopes for."""
        return self.time / self.bound if self.bound else 1.0

    def fits(self, machine: Machine) -> bool:
        """Whether each stage has memory enough."""
        return all(a <= b for a, b in zip(self.memory, machine.memory, strict=False))


class Terms:
    """What all candidates of one search have in common.

    Args:
        profile: what the layers cost.
        machine: the devices.
        batch_size: samples in a mini-batch.
        param_scale: bytes for each byte of a parameter that is trained.
    """

    def __init__(
        self, profile: Profile, machine: Machine, batch_size: int, param_scale: float
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a mini-batch has at least one sample")
        self.profile = profile.of(batch_size)
        self.machine, self.batch_size, self.param_scale = machine, batch_size, param_scale
        self._chains: dict[int, Chain] = {}
        self._sound: dict[int, float] = {}

    def chain(self, chunks: int) -> Chain:
        """The layers, for one of so many micro-batches: any but the last, which may be smaller."""
        return self._of(sizes_of(self.batch_size, chunks)[0])

    def _of(self, samples: int) -> Chain:
        if samples not in self._chains:
            self._chains[samples] = Chain.of(self.profile, samples, self.param_scale)
        return self._chains[samples]

    def costs(self, balance: Sequence[int], chunks: int) -> Costs:
        """What the simulator needs to know of a cut."""
        size, rest = sizes_of(self.batch_size, chunks)
        costs = costs_of(self._of(size), self.machine, balance)
        if rest < size:
            costs = replace(costs, last=costs_of(self._of(rest), self.machine, balance))
        return costs

    def sound(self, chunks: int) -> float:
        """The part of a bound that holds if the last micro-batch is smaller: it may be left out, or
        all may be taken for as small.
        """
        if chunks not in self._sound:
            size, rest = sizes_of(self.batch_size, chunks)
            part = 1.0
            if rest < size:
                whole, small = self._of(size), self._of(rest)
                pairs = [
                    pair
                    for what in ("forward", "backward", "inputs")
                    for pair in zip(getattr(small, what), getattr(whole, what), strict=True)
                ]
                least = min((a / b for a, b in pairs if b > 0), default=1.0)
                part = min(1.0, max(1 - 1 / chunks, least))
            self._sound[chunks] = part
        return self._sound[chunks]

    def on(self, machine: Machine) -> Terms:
        """The same for other devices."""
        other = Terms(self.profile, machine, self.batch_size, self.param_scale)
        other._chains = self._chains
        return other

    def cuts(
        self, schedule: str, chunks: int, slots: Sequence[int], *, free: bool = False
    ) -> GPipeCuts | OneFOneBCuts:
        """The exact search for these slots, one number for each stage."""
        search = GPipeCuts if schedule == "gpipe" else OneFOneBCuts
        return search(self.chain(chunks), self.machine, chunks, slots, free=free)

    def recomputing(
        self, balance: Sequence[int], chunks: int, slots: Sequence[int]
    ) -> tuple[bool, ...]:
        """Stages that need to recompute; what does not fit at all takes what needs less."""
        chain, decided = self.chain(chunks), []
        for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0))):
            kept, again = (chain.memory(i, j, slots[s], slots[0], r) for r in (False, True))
            decided.append(kept > self.machine.memory[s] and again < kept)
        return tuple(decided)

    def interpreter(
        self, balance: Sequence[int], chunks: int, schedule: str, recomputes: Sequence[bool]
    ) -> float:
        """Seconds that a step takes at least, as only one thread at a time can run Python.

        Nothing without the lock, in a free-threaded build.
        """
        if not has_lock():
            return 0.0
        again = chunks - 1 if schedule == "gpipe" else chunks
        sums = self.chain(chunks).interpreter_to
        return math.fsum(
            (sums[j] - sums[i]) * (chunks + again * bool(recomputes[s]))
            for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0)))
        )

    def candidate(
        self,
        balance: Sequence[int],
        chunks: int,
        schedule: str,
        slots: Sequence[int],
        recomputes: Sequence[bool] | None = None,
    ) -> Candidate:
        """Simulates a cut. ``slots`` is a number for each stage, for GPipe as well."""
        chain, n = self.chain(chunks), len(balance)
        if recomputes is None:
            recomputes = self.recomputing(balance, chunks, slots)
        if schedule == "gpipe":
            plan, again = gpipe(chunks, n), chunks - 1
        else:
            plan, again = one_f_one_b(chunks, n, slots=list(slots)), chunks
        counts = [again * bool(r) for r in recomputes]
        costs = self.costs(balance, chunks)
        simulation = simulate(plan, costs, counts)
        bound = self.cuts(schedule, chunks, slots).value(balance, recomputes)
        if costs.last is not None:
            bound = max(bound * self.sound(chunks), _work(costs, costs.last, counts, chunks))
        python = self.interpreter(balance, chunks, schedule, recomputes)
        memory = tuple(
            chain.memory(i, j, slots[s], slots[0], recomputes[s])
            for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0)))
        )
        return Candidate(
            schedule=schedule,
            balance=tuple(balance),
            chunks=chunks,
            slots=None if schedule == "gpipe" else tuple(slots),
            recomputes=tuple(map(bool, recomputes)),
            bound=min(max(bound, python), max(simulation.makespan, python)),  # but for rounding
            simulation=simulation,
            memory=memory,
            interpreter=python,
        )


def _work(costs: Costs, last: Costs, recomputed: Sequence[int], m: int) -> float:
    """What no step falls short of in which the last micro-batch is smaller: the work of a stage,
    and the way of a whole micro-batch to it and of a small one back.
    """
    bound = way = 0.0
    for s, count in enumerate(recomputed):
        once, small = (c.forward[s] + c.backward_input[s] for c in (costs, last))
        again = min(count, m - 1) * costs.recompute[s] + (count == m) * last.recompute[s]
        bound = max(bound, way + (m - 1) * once + small + again)
        way += costs.forward[s] + last.backward_input[s]
        way += sum(c.transfer[s] for c in (costs, last)) if s + 1 < len(recomputed) else 0.0
    return bound


def evaluate(
    profile: Profile,
    machine: Machine,
    batch_size: int,
    *,
    balance: Sequence[int],
    chunks: int,
    schedule: str,
    slots: Family | Sequence[int] | None = None,
    recomputes: Sequence[bool] | None = None,
    param_scale: float,
) -> Candidate:
    """What any given cut would take, whether it fits or not (:meth:`Candidate.fits`).

    Args:
        profile: what the layers cost.
        machine: stage ``s`` is on device ``s``.
        batch_size: samples in a mini-batch.
        balance: layers of each stage.
        chunks: number of micro-batches; the last may be smaller, as ``torch.chunk`` cuts.
        schedule: ``"gpipe"`` or ``"1f1b"``.
        slots: for 1F1B as for :func:`syncpipe.schedules.one_f_one_b`; by default ``"overlap"``.
        recomputes: for each stage whether it re-materializes; by default those that do not fit
            otherwise.
        param_scale: bytes for each byte of a parameter that is trained.

    Raises:
        ValueError: an argument does not fit the others.
    """
    terms = Terms(profile, machine, batch_size, param_scale)
    balance, layers, n = tuple(balance), len(profile.layers), len(tuple(balance))
    if not balance or min(balance) < 1 or sum(balance) != layers:
        raise ValueError(f"balance={list(balance)} does not cut {layers} layers into stages")
    if n > len(machine):
        raise ValueError(f"balance={list(balance)} has {n} stages for {len(machine)} devices")
    sizes_of(batch_size, chunks)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: there are plans for 'gpipe' and for '1f1b'")
    if schedule == "gpipe":
        if slots is not None:
            raise ValueError(f"slots={slots!r}: GPipe's schedule has none; use schedule='1f1b'")
        counts: tuple[int, ...] = (chunks,) * n
    elif slots is None or isinstance(slots, str):
        counts = slots_of(slots or FAMILIES[0], n, chunks)
    else:
        counts = tuple(min(chunks, q) for q in slots)
    if len(counts) != n or (recomputes is not None and len(recomputes) != n):
        raise ValueError(
            f"slots={slots!r} and recomputes={recomputes!r} are for each of {n} stages, if given"
        )
    return terms.candidate(balance, chunks, schedule, counts, recomputes)
