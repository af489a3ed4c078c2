"""``Draft``: one way to run the layers as a pipeline, under any schedule, with what it takes.

There is one account of time, the player, and one of memory, :meth:`.Chain.account`. What a device
with several stages holds is their sum at its fullest moment:

    cell, whole backward        F|===== held =====|B--|
    recomputed                  F|- its inputs ---|=R=B--|          R: recomputation
    backward in halves          F|===== held =====|I+++++++++|W|    +: and gradients of outputs

Between its halves a cell keeps what the weight half needs, inputs of layers and gradients of their
outputs. All that it held stands for the first, which is more than true for layers of many parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from syncpipe.balance.profile import Profile, interpolate
from syncpipe.planner.chain import Chain, Mode, costs_of, ends_of
from syncpipe.planner.machine import Machine
from syncpipe.planner.sizes import sizes_of
from syncpipe.runtime.worker import has_lock
from syncpipe.schedules import one_f_one_b
from syncpipe.schedules.player import Costs, Simulation, play
from syncpipe.schedules.schedule import KINDS, Kind, Schedule, devices_of

__all__ = ["Draft", "Footprint", "Form", "Terms", "levels", "one_f_one_b_form"]

#: Of a layer's backward, where its halves were not measured: both products of a linear layer's
#: backward have as many multiplications.
_HALF = 0.5

#: Of a device, three numbers for each of its stages: micro-batches held, of these those that go
#: back, of these those between their halves.
Load = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """A schedule, to be tried with many cuts.

    Attributes:
        schedule: without replicas.
        slots: under 1F1B what it was asked for; else None.
    """

    schedule: Schedule
    slots: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """That of the schedule."""
        return self.schedule.name

    @property
    def m(self) -> int:
        """The number of micro-batches."""
        return self.schedule.m

    @property
    def n(self) -> int:
        """The number of stages."""
        return self.schedule.n

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.schedule.actions)

    @cached_property
    def device_of(self) -> tuple[int, ...]:
        """For each stage the index of its device."""
        return tuple(devices_of(self.schedule.device_of, j)[0] for j in range(self.n))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage the most micro-batches in flight."""
        return self.schedule.in_flight

    @property
    def split(self) -> bool:
        """Whether backwards come in halves."""
        return bool(self.schedule.splits)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """For each device its stages."""
        stages = range(self.n)
        return tuple(
            tuple(j for j in stages if self.device_of[j] == d) for d in range(self.devices)
        )

    def recomputed(self, mode: Mode) -> int:
        """How many micro-batches a stage recomputes: under GPipe all but the last, which goes back
        at once.
        """
        return (self.m - (self.name == "gpipe")) * (mode == "recompute")

    @cached_property
    def loads(self) -> list[list[Load]]:
        """What each device holds at its fullest moments."""
        if self.devices == self.n and not self.split:
            return [[(q, 1, 0)] for q in self.in_flight]
        found: list[list[Load]] = []
        for d in range(self.devices):
            kept: list[Load] = []
            for load in sorted({during for during, _ in self.moments(d)}, key=sum, reverse=True):
                if not any(all(map(int.__ge__, other, load)) for other in kept):
                    kept.append(load)
            found.append(kept)
        return found

    def moments(self, d: int) -> Iterator[tuple[Load, Load]]:
        """What a device holds during each of its actions, and after it."""
        place = {j: 3 * k for k, j in enumerate(self.stages_of[d])}
        counts = [0] * (3 * len(place))
        for kind, _, j in self.schedule.actions[d]:
            k, half = place[j], kind == "backward_input"
            if kind == "forward":
                counts[k] += 1
            elif KINDS[kind].sends == "gradient":
                counts[k + 1] += 1
                counts[k + 2] += half
            during = tuple(counts)
            if KINDS[kind].alive < 0:
                counts[k] -= 1
                counts[k + 1] -= 1
                counts[k + 2] -= kind == "backward_weight"
            yield during, tuple(counts)


@lru_cache(maxsize=1024)
def one_f_one_b_form(m: int, slots: tuple[int, ...]) -> Form:
    """1F1B with so many slots for each stage, none with more than the one before it."""
    return Form(one_f_one_b(m, len(slots), slots=slots), slots)


class Footprint(NamedTuple):
    """Bytes that a stage takes: all the time; more while one of its actions runs; for each
    micro-batch from its forward on; more from where its backward begins; and between its halves.
    """

    fixed: float
    transient: float
    held: float
    backward: float
    halves: float


def _base(own: Sequence[Footprint]) -> float:
    """What a device with these stages holds all the time; of its stages only one runs."""
    return sum(x.fixed for x in own) + max(x.transient for x in own)


def _sum(load: Load, own: Sequence[Footprint]) -> float:
    return sum(
        load[3 * k] * x.held + load[3 * k + 1] * x.backward + load[3 * k + 2] * x.halves
        for k, x in enumerate(own)
    )


def levels(
    form: Form, simulation: Simulation, stages: Sequence[Footprint]
) -> list[list[tuple[float, float]]]:
    """For each device the times at which what it holds changes, and the bytes from then on."""
    found = []
    for d, numbers in enumerate(form.stages_of):
        own = [stages[j] for j in numbers]
        steps = [(0.0, _base(own))]
        spans = [s for s in simulation.spans if s.row == d and s.kind != "recompute"]
        for span, (during, after) in zip(spans, form.moments(d), strict=True):
            steps.append((span.start, _base(own) + _sum(during, own)))
            steps.append((span.end, _base(own) + _sum(after, own)))
        found.append(steps)
    return found


@dataclass(frozen=True)
class Draft:
    """A pipeline.

    Attributes:
        form: its schedule.
        balance: layers of each stage.
        modes: for each stage what it does with activations.
        time: seconds for one mini-batch, played through; no less than one interpreter needs for it.
        memory: bytes that each stage takes at most.
        on_device: bytes that each device takes at most, all of its stages together.
        excess: the largest factor by which a device lacks memory; 1 if all fits.
        interpreter: seconds that all forwards hold the interpreter's lock, recomputed ones twice.
        bound: seconds that no order of these actions falls short of.
    """

    form: Form = field(repr=False)
    balance: tuple[int, ...]
    modes: tuple[Mode, ...]
    time: float
    memory: tuple[float, ...]
    on_device: tuple[float, ...]
    excess: float
    interpreter: float
    bound: float

    @property
    def schedule(self) -> str:
        """The name of its schedule."""
        return self.form.name

    @property
    def chunks(self) -> int:
        """The number of micro-batches."""
        return self.form.m

    @property
    def rank(self) -> tuple[float, float, int, float, int]:
        """The better of two drafts has the lesser one."""
        time = float(f"{self.time:.8e}")
        return self.excess, time, len(self.balance), max(self.on_device), self.chunks


class Terms:
    """What all drafts of one search have in common.

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
        self._places: dict[tuple[int, ...], Machine] = {}
        self._footprints: dict[tuple[object, ...], Footprint] = {}
        #: Under 1F1B: what became of micro-batches, slots and balance, or the bound alone.
        self._known: dict[tuple[object, ...], Draft | float] = {}
        others: tuple[Mode, ...] = ("recompute", "offload")
        #: What a stage can do in place of storing its activations.
        self.others = others if machine.host else others[:1]

    def chain(self, chunks: int) -> Chain:
        """The layers, for one of so many micro-batches: any but the last, which may be smaller."""
        return self._of(sizes_of(self.batch_size, chunks)[0])

    def _of(self, samples: int) -> Chain:
        if samples not in self._chains:
            scale = self.param_scale
            self._chains[samples] = Chain.of(self.profile, samples, scale, self.batch_size)
        return self._chains[samples]

    def on(self, machine: Machine) -> Terms:
        """The same for other devices."""
        other = Terms(self.profile, machine, self.batch_size, self.param_scale)
        other._chains = self._chains
        return other

    def costs(self, form: Form, balance: Sequence[int]) -> Costs:
        """What the stages of a cut take."""
        if form.device_of not in self._places:
            self._places[form.device_of] = self.machine.ordered(form.device_of)
        places = self._places[form.device_of]
        size, rest = sizes_of(self.batch_size, form.m)
        costs = costs_of(self._of(size), places, balance)
        if rest < size:
            costs = replace(costs, last=costs_of(self._of(rest), places, balance))
        return self._halved(costs, form.m, balance) if form.split else costs

    def _halved(self, costs: Costs, m: int, balance: Sequence[int]) -> Costs:
        """Costs of whole backwards as those of both halves."""
        back = self.chain(m).backward
        later = [0.0, *accumulate(b * share for b, share in zip(back, self.shares, strict=True))]
        whole = self.chain(m).sums["backward"]
        parts = [
            (later[j] - later[i]) / (whole[j] - whole[i]) if whole[j] > whole[i] else 0.0
            for i, j in ends_of(balance)
        ]
        weights = tuple(b * part for b, part in zip(costs.backward_input, parts, strict=True))
        inputs = tuple(b * (1 - part) for b, part in zip(costs.backward_input, parts, strict=True))
        last = costs.last and self._halved(costs.last, m, balance)
        return replace(costs, backward_input=inputs, backward_weight=weights, last=last)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """For each layer what its weight half is of its backward."""
        layers = self.profile.layers
        known = (_HALF if layer.weight_share is None else layer.weight_share for layer in layers)
        trained = (layer.parameter_bytes > layer.frozen_bytes for layer in layers)
        return tuple(share * own for share, own in zip(known, trained, strict=True))

    @property
    def guessed(self) -> bool:
        """Whether the halves of some backward were not measured."""
        return any(
            layer.weight_share is None and layer.parameter_bytes > layer.frozen_bytes
            for layer in self.profile.layers
        )

    def footprint(self, form: Form, s: int, i: int, j: int, mode: Mode) -> Footprint:
        """What stage ``s`` with the layers ``[i, j)`` takes."""
        q, q0, speed = form.in_flight[s], form.in_flight[0], self.machine.speed[form.device_of[s]]
        key = (form.m, q, q0, speed, i, j, mode, form.split)
        if key not in self._footprints:
            chain = self.chain(form.m)
            run = chain.run(i, j)
            held = chain.account(run, q, q0, mode, self.machine.host * run.forward / speed)
            each = run.stored if mode == "store" else run.inputs
            more = max(0.0, held.stored - q * each) if mode != "store" else 0.0
            fixed, halves = held.fixed + held.arrived + held.waiting, 0.0
            if form.split:
                samples = sizes_of(self.batch_size, form.m)[0]
                last = interpolate(self.profile.layers[-1].output_bytes, samples)
                sent = zip((*chain.inputs[1:], last)[i:j], self.shares[i:j], strict=True)
                halves = sum(size for size, share in sent if share)
            found = Footprint(fixed, held.transient, each, more, halves)
            self._footprints[key] = found
        return self._footprints[key]

    def footprints(
        self, form: Form, balance: Sequence[int], modes: Sequence[Mode]
    ) -> list[Footprint]:
        """What the stages of a cut take."""
        return [
            self.footprint(form, s, i, j, modes[s]) for s, (i, j) in enumerate(ends_of(balance))
        ]

    def device_memory(self, form: Form, d: int, stages: Sequence[Footprint]) -> float:
        """The most that a device holds."""
        own = [stages[j] for j in form.stages_of[d]]
        return _base(own) + max(_sum(load, own) for load in form.loads[d])

    def _stage_memory(self, form: Form, j: int, stages: Sequence[Footprint]) -> float:
        """The most that a stage holds, of what its device holds."""
        d = form.device_of[j]
        k = 3 * form.stages_of[d].index(j)
        most = max(_sum(load[k : k + 3], [stages[j]]) for load in form.loads[d])
        return _base([stages[j]]) + most

    def link_time(self, m: int, stored: Any) -> Any:
        """Seconds in a step that the link to the host takes for so many bytes of each micro-batch,
        there and back.
        """
        return 2 * m * stored / self.machine.host

    def interpreter(self, form: Form, balance: Sequence[int], modes: Sequence[Mode]) -> float:
        """Seconds that a step takes at least, as only one thread at a time can run Python.

        Nothing without the lock, in a free-threaded build.
        """
        sums = self.chain(form.m).sums["interpreter"]
        if not has_lock() or not sums[-1]:
            return 0.0
        return math.fsum(
            (sums[j] - sums[i]) * (form.m + form.recomputed(modes[s]))
            for s, (i, j) in enumerate(ends_of(balance))
        )

    def draft(
        self,
        form: Form,
        balance: Sequence[int],
        modes: Sequence[Mode] | None = None,
        at_most: float = math.inf,
    ) -> Draft | None:
        """What a cut takes, with recomputation or offload where it does not fit otherwise.

        Args:
            form: the schedule.
            balance: layers of each stage.
            modes: for each stage; by default what fits, and of that what takes the least time.
            at_most: seconds.

        Returns:
            The draft, whether it fits or not (``excess``); None if its bound exceeds ``at_most``.
        """
        if form.slots is None or modes is not None:
            found = self._played(form, tuple(balance), modes, at_most)
        else:
            key = (form.m, form.slots, tuple(balance))
            found = self._known.get(key, 0.0)
            if isinstance(found, float) and found <= at_most:
                found = self._known[key] = self._played(form, tuple(balance), None, at_most)
        return None if isinstance(found, float) or found.bound > at_most else found

    def _played(
        self, form: Form, balance: tuple[int, ...], modes: Sequence[Mode] | None, at_most: float
    ) -> Draft | float:
        """The draft, or its bound if that exceeds ``at_most``."""
        costs = self.costs(form, balance)
        modes = tuple(self._modes(form, balance, costs) if modes is None else modes)
        python = self.interpreter(form, balance, modes)
        bound = max(python, self.bound(form, balance, costs, modes))
        if bound > at_most:
            return bound
        stages = self.footprints(form, balance, modes)
        on_device = tuple(self.device_memory(form, d, stages) for d in range(form.devices))
        shares = (a / b for a, b in zip(on_device, self.machine.memory, strict=False))
        counts = [form.recomputed(mode) for mode in modes]
        time = play(form.schedule.actions, form.m, form.device_of, costs, counts).makespan
        time = bound if bound > time * (1 + 1e-9) else time
        memory = tuple(on_device[d] for d in form.device_of)
        if form.devices < form.n:
            memory = tuple(self._stage_memory(form, j, stages) for j in range(form.n))
        excess = max(1.0, *shares)
        return Draft(
            form, balance, modes, time, memory, on_device, excess, python, min(bound, time)
        )

    def bound(
        self, form: Form, balance: Sequence[int], costs: Costs, modes: Sequence[Mode]
    ) -> float:
        """No order of these actions takes less: see docs/planning.md.

        A device waits until a micro-batch has come through the stages before its own, has all of
        its work to do, and its last gradient goes back through them.
        """
        m, last, ends = form.m, costs.last or costs, ends_of(balance)
        heads, tails, head, tail = [], [], 0.0, 0.0
        for j in range(form.n):
            heads.append(head)
            tails.append(tail)
            way = 0.0
            if j + 1 < form.n and form.device_of[j] != form.device_of[j + 1]:
                way = min(costs.transfer[j], last.transfer[j])
            back: Kind = "backward_input" if form.split else "backward"
            head += min(each.times["forward"][j] for each in (costs, last)) + way
            tail += min(each.times[back][j] for each in (costs, last)) + way
        bound = 0.0
        for own in form.stages_of:
            work = late = link = 0.0
            for j in own:
                count = form.recomputed(modes[j])
                work += (m - 1) * (costs.forward[j] + costs.backward_input[j])
                work += last.forward[j] + last.backward_input[j]
                work += min(count, m - 1) * costs.recompute[j] + (count == m) * last.recompute[j]
                late += (m - 1) * costs.backward_weight[j] + last.backward_weight[j]
                if modes[j] == "offload":
                    link += self.link_time(m, self.chain(m).run(*ends[j]).stored)
            first = own[0]
            # Nothing waits for weight halves.
            after = max(tails[first], late) if form.split else tails[first] + late
            bound = max(bound, heads[first] + work + after, heads[first] + link + tails[first])
        return bound

    def _modes(self, form: Form, balance: Sequence[int], costs: Costs) -> list[Mode]:
        """For each stage what it does with activations: first those that save most for their time,
        until the device fits; where nothing is enough, what needs least.
        """
        ends, m = ends_of(balance), form.m
        chosen: list[Mode] = ["store"] * form.n
        stages = self.footprints(form, balance, chosen)
        for d, own in enumerate(form.stages_of):
            needs, limit = self.device_memory(form, d, stages), self.machine.memory[d]
            left = [(j, mode) for j in own for mode in self.others]
            while needs > limit and left:
                ways = []
                for j, mode in left:
                    other = self.footprint(form, j, *ends[j], mode)
                    less = self.device_memory(form, d, [*stages[:j], other, *stages[j + 1 :]])
                    time = m * costs.forward[j]
                    if mode == "offload":
                        link = self.link_time(m, self.chain(m).run(*ends[j]).stored)
                        both = costs.times["forward"][j] + costs.times["backward"][j]
                        time = max(0.0, link - m * both)
                    gain = (needs - less) / (time or 1e-30)
                    ways.append((less > limit, time if less <= limit else -gain, less, j, mode))
                _, _, less, j, mode = min(ways)
                left.remove((j, mode))
                if less < needs:
                    chosen[j], needs = mode, less
                    stages[j] = self.footprint(form, j, *ends[j], mode)
        return chosen
