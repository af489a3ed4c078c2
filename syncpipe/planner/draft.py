"""``Draft``: one way to run the layers as a pipeline, under any schedule, with what it takes.

There is one account of time, the player, and one of memory, :meth:`.Chain.held`. What a device
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
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, cast

from syncpipe.balance.profile import Profile, interpolate
from syncpipe.planner.chain import Chain, Mode, costs_of
from syncpipe.planner.machine import Machine
from syncpipe.planner.sizes import sizes_of
from syncpipe.runtime.free_threading import has_lock
from syncpipe.schedules import one_f_one_b
from syncpipe.schedules.kinds import KINDS, Kind
from syncpipe.schedules.player import Costs, play
from syncpipe.schedules.schedule import Schedule, devices_of
from syncpipe.schedules.simulation import Simulation

__all__ = ["Draft", "Form", "Terms", "levels", "one_f_one_b_form"]

T = TypeVar("T", bound=Any)

#: Of a layer's backward, where its halves were not measured: both products of a linear layer's
#: backward have as many multiplications.
_HALF = 0.5


class Footprint(NamedTuple):
    """Bytes that a stage takes: all the time; more while one of its actions runs; for each
    micro-batch from its forward on; more from where its backward begins; and between its halves.
    """

    fixed: float
    transient: float
    held: float
    again: float
    halves: float


@dataclass(frozen=True)
class Form:
    """A schedule for so many micro-batches and stages, to be tried with many cuts.

    Attributes:
        name: of the schedule.
        m: number of micro-batches.
        device_of: for each stage the index of its device.
        in_flight: for each stage the most micro-batches in flight.
        rows: for each device its actions in order.
        slots: under 1F1B what the schedule was asked for; else None.
        made: the schedule itself; None under 1F1B.
    """

    name: str
    m: int
    device_of: tuple[int, ...]
    in_flight: tuple[int, ...]
    rows: tuple[tuple[tuple[Kind, int, int], ...], ...]
    slots: tuple[int, ...] | None = None
    made: Schedule | None = None

    @classmethod
    def of(cls, name: str, schedule: Schedule) -> Form:
        """That of a schedule without replicas."""
        device_of = tuple(devices_of(schedule.device_of, j)[0] for j in range(schedule.n))
        rows = tuple(map(tuple, schedule.actions))
        return cls(name, schedule.m, device_of, schedule.in_flight, rows, made=schedule)

    @property
    def n(self) -> int:
        """The number of stages."""
        return len(self.device_of)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.rows)

    @property
    def schedule(self) -> Schedule:
        """The schedule itself."""
        return self.made or one_f_one_b(self.m, self.n, slots=list(self.in_flight))

    @cached_property
    def split(self) -> bool:
        """Whether backwards come in halves."""
        return self.made is not None and bool(self.made.splits)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """For each device its stages."""
        return tuple(
            tuple(j for j, device in enumerate(self.device_of) if device == d)
            for d in range(self.devices)
        )

    def again(self, mode: Mode) -> int:
        """How many micro-batches a stage recomputes: under GPipe all but the last, which goes back
        at once.
        """
        return (self.m - (self.name == "gpipe")) * (mode == "recompute")

    @cached_property
    def loads(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each device what it holds at its fullest moments, three numbers for each of its
        stages: micro-batches held, of these those that go back, of these those between halves.
        """
        if self.made is None:
            return tuple(((q, 1, 0),) for q in self.in_flight)
        made = []
        for d, stages in enumerate(self.stages_of):
            seen = dict.fromkeys(counts for counts, _ in self._moments(d, stages))
            kept: list[tuple[int, ...]] = []
            for load in sorted(seen, key=sum, reverse=True):
                if not any(all(map(int.__ge__, other, load)) for other in kept):
                    kept.append(load)
            made.append(tuple(kept))
        return tuple(made)

    def _moments(
        self, d: int, stages: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """What is held during each action of a device, and after it."""
        place = {j: 3 * k for k, j in enumerate(stages)}
        counts = [0] * (3 * len(stages))
        for kind, _, j in self.rows[d]:
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


@lru_cache(maxsize=4096)
def one_f_one_b_form(m: int, slots: tuple[int, ...]) -> Form:
    """1F1B with so many slots for each stage, none with more than the one before it."""
    rows = []
    for j, q in enumerate(slots):
        row: list[tuple[Kind, int, int]] = [("forward", i, j) for i in range(q)]
        for i in range(m):
            row.append(("backward", i, j))
            if i + q < m:
                row.append(("forward", i + q, j))
        rows.append(tuple(row))
    return Form("1f1b", m, tuple(range(len(slots))), slots, tuple(rows), slots)


def levels(
    form: Form, simulation: Simulation, stages: Sequence[Footprint]
) -> list[list[tuple[float, float]]]:
    """For each device the times at which what it holds changes, and the bytes from then on."""
    made = []
    for d, own in enumerate(form.stages_of):
        base = _base(stages, own)
        steps = [(0.0, base)]
        spans = [s for s in simulation.spans if s.device == d and s.action.kind != "recompute"]
        for span, (during, after) in zip(spans, form._moments(d, own), strict=True):
            steps.append((span.start, base + _sum(during, stages, own)))
            steps.append((span.end, base + _sum(after, stages, own)))
        made.append(steps)
    return made


def _base(stages: Sequence[Footprint], own: Sequence[int]) -> float:
    """What a device holds all the time; of its stages only one runs."""
    return sum(stages[j].fixed for j in own) + max(stages[j].transient for j in own)


def _sum(load: Sequence[int], stages: Sequence[Footprint], own: Sequence[int]) -> float:
    return sum(
        load[3 * k] * stages[j].held
        + load[3 * k + 1] * stages[j].again
        + load[3 * k + 2] * stages[j].halves
        for k, j in enumerate(own)
    )


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
        return self._halved(costs, form, balance) if form.split else costs

    def _halved(self, costs: Costs, form: Form, balance: Sequence[int]) -> Costs:
        """Costs of whole backwards as those of both halves."""
        back = self.chain(form.m).backward
        later = [0.0, *accumulate(b * share for b, share in zip(back, self.shares, strict=True))]
        whole = self.chain(form.m).backward_to
        ends = list(pairwise(accumulate(balance, initial=0)))
        parts = [
            (later[j] - later[i]) / (whole[j] - whole[i]) if whole[j] > whole[i] else 0.0
            for i, j in ends
        ]
        weights = tuple(b * part for b, part in zip(costs.backward_input, parts, strict=True))
        inputs = tuple(b * (1 - part) for b, part in zip(costs.backward_input, parts, strict=True))
        last = costs.last and self._halved(costs.last, form, balance)
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
        chain, flight, device = self.chain(form.m), form.in_flight, form.device_of[s]
        speed = self.machine.speed[device]
        taken = self.machine.host * (chain.forward_to[j] - chain.forward_to[i]) / speed
        held = chain.held(i, j, flight[s], flight[0], mode, taken)
        each = held.stored / flight[s] if mode == "store" else chain.inputs[i]
        halves = 0.0
        if form.split:
            sent = (*chain.inputs[1:], 0.0)
            last = self.profile.layers[-1].output_bytes
            sizes = [*sent[:-1], interpolate(last, sizes_of(self.batch_size, form.m)[0])]
            halves = sum(size for size, share in zip(sizes[i:j], self.shares[i:j], strict=True)
                         if share)  # fmt: skip
        return Footprint(
            fixed=held.fixed + held.arrived + held.waiting,
            transient=held.transient,
            held=each,
            again=max(0.0, held.stored - flight[s] * each) if mode != "store" else 0.0,
            halves=halves,
        )

    def footprints(
        self, form: Form, balance: Sequence[int], modes: Sequence[Mode]
    ) -> list[Footprint]:
        """What the stages of a cut take."""
        ends = pairwise(accumulate(balance, initial=0))
        return [self.footprint(form, s, i, j, modes[s]) for s, (i, j) in enumerate(ends)]

    def device_memory(self, form: Form, d: int, stages: Sequence[Footprint]) -> float:
        """The most that a device holds."""
        own = form.stages_of[d]
        return _base(stages, own) + max(_sum(load, stages, own) for load in form.loads[d])

    def _alone(self, form: Form, j: int, stages: Sequence[Footprint]) -> float:
        """The most that a stage holds, of what its device holds."""
        d = form.device_of[j]
        k = 3 * form.stages_of[d].index(j)
        most = max(_sum(load[k : k + 3], stages, (j,)) for load in form.loads[d])
        return _base(stages, (j,)) + most

    def link_time(self, m: int, stored: T) -> T:
        """Seconds in a step that the link to the host takes for so many bytes of each micro-batch,
        there and back.
        """
        return cast("T", 2 * m * stored / self.machine.host)

    def interpreter(self, form: Form, balance: Sequence[int], modes: Sequence[Mode]) -> float:
        """Seconds that a step takes at least, as only one thread at a time can run Python.

        Nothing without the lock, in a free-threaded build.
        """
        sums = self.chain(form.m).interpreter_to
        if not has_lock() or not sums[-1]:
            return 0.0
        return math.fsum(
            (sums[j] - sums[i]) * (form.m + form.again(modes[s]))
            for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0)))
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
        balance = tuple(balance)
        ends = list(pairwise(accumulate(balance, initial=0)))
        costs = self.costs(form, balance)
        if modes is None:
            modes = self._modes(form, ends, costs)
        modes = tuple(modes)
        python = self.interpreter(form, balance, modes)
        bound = max(python, self._bound(form, ends, costs, modes))
        if bound > at_most:
            return None
        stages = self.footprints(form, balance, modes)
        on_device = tuple(self.device_memory(form, d, stages) for d in range(form.devices))
        shares = (a / b for a, b in zip(on_device, self.machine.memory, strict=False))
        again = [form.again(mode) for mode in modes]
        time = play(form.rows, form.m, form.device_of, costs, again).makespan
        time = bound if bound > time * (1 + 1e-9) else time
        memory = tuple(on_device[d] for d in form.device_of)
        if form.devices < form.n:
            memory = tuple(self._alone(form, j, stages) for j in range(form.n))
        return Draft(
            form,
            balance,
            modes,
            time,
            memory,
            on_device,
            max(1.0, *shares),
            python,
            min(bound, time),
        )

    def _bound(
        self,
        form: Form,
        ends: Sequence[tuple[int, int]],
        costs: Costs,
        modes: Sequence[Mode],
    ) -> float:
        """No order of these actions takes less: see docs/planning.md.

        A device waits until a micro-batch has come through the stages before its own, has all of
        its work to do, and its last gradient goes back through them.
        """
        m, last = form.m, costs.last or costs
        heads, tails, head, tail = [], [], 0.0, 0.0
        for j in range(form.n):
            heads.append(head)
            tails.append(tail)
            ways = [0.0, 0.0]
            if j + 1 < form.n and form.device_of[j] != form.device_of[j + 1]:
                ways = [costs.transfer[j], last.transfer[j]]
            whole = [c.backward_input[j] + (0.0 if form.split else c.backward_weight[j])
                     for c in (costs, last)]  # fmt: skip
            head += min(costs.forward[j], last.forward[j]) + min(ways)
            tail += min(whole) + min(ways)
        bound = 0.0
        for own in form.stages_of:
            work = late = link = 0.0
            for j in own:
                count = form.again(modes[j])
                work += (m - 1) * (costs.forward[j] + costs.backward_input[j])
                work += last.forward[j] + last.backward_input[j]
                work += min(count, m - 1) * costs.recompute[j] + (count == m) * last.recompute[j]
                late += (m - 1) * costs.backward_weight[j] + last.backward_weight[j]
                if modes[j] == "offload":
                    stored = self.chain(m).stored_in(*ends[j])
                    link += self.link_time(m, stored)
            first = min(own)
            if form.split:  # nobody waits for weight halves
                found = heads[first] + work + max(tails[first], late)
            else:
                found = heads[first] + work + late + tails[first]
            bound = max(bound, found, heads[first] + link + tails[first])
        return bound

    def _modes(self, form: Form, ends: Sequence[tuple[int, int]], costs: Costs) -> list[Mode]:
        """For each stage what it does with activations: first those that save most for their time,
        until the device fits; where nothing is enough, what needs least.
        """
        chosen: list[Mode] = ["store"] * form.n
        stages = [self.footprint(form, s, i, j, "store") for s, (i, j) in enumerate(ends)]
        for d, own in enumerate(form.stages_of):
            needs, limit = self.device_memory(form, d, stages), self.machine.memory[d]
            others: tuple[Mode, ...] = ("recompute", "offload")
            left = [(j, mode) for j in own for mode in others[: 1 + bool(self.machine.host)]]
            while needs > limit and left:
                ways = []
                for j, mode in left:
                    other = self.footprint(form, j, *ends[j], mode)
                    tried = [*stages[:j], other, *stages[j + 1 :]]
                    less = self.device_memory(form, d, tried)
                    time = form.m * costs.forward[j]
                    if mode == "offload":
                        back = costs.backward_input[j] + costs.backward_weight[j]
                        stored = self.chain(form.m).stored_in(*ends[j])
                        link = self.link_time(form.m, stored)
                        time = max(0.0, link - form.m * (costs.forward[j] + back))
                    gain = (needs - less) / (time or 1e-30)
                    ways.append((less > limit, time if less <= limit else -gain, less, j, mode))
                _, _, less, j, mode = min(ways)
                left.remove((j, mode))
                if less < needs:
                    chosen[j], needs = mode, less
                    stages[j] = self.footprint(form, j, *ends[j], mode)
        return chosen
