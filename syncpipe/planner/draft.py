"""``Draft``: one way to run the layers as a pipeline, under any schedule, with what it takes.

There is one account of time, the player, and one of memory, :meth:`.Chain.held`. What a device with
several stages holds is their sum at its fullest moment:

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
from typing import Any

from syncpipe.balance.profile import Profile
from syncpipe.planner.chain import Chain, Held, Mode, costs_of, ends_of, sizes_of
from syncpipe.planner.machine import Machine
from syncpipe.runtime.worker import has_lock
from syncpipe.schedules import one_f_one_b
from syncpipe.schedules.player import Costs, Simulation, play
from syncpipe.schedules.schedule import KINDS, Kind, Schedule, devices_of

__all__ = ["Draft", "Form", "Terms", "levels", "one_f_one_b_form"]

#: Of a device, three numbers for each of its stages: micro-batches held, of these those that go
#: back, of these those between their halves.
Load = tuple[int, ...]


class Form:
    """A schedule, to be tried with many cuts; with its slots under 1F1B without replicas."""

    def __init__(self, schedule: Schedule, slots: tuple[int, ...] | None = None) -> None:
        self.schedule, self.slots = schedule, slots
        self.name, self.m, self.n = schedule.name, schedule.m, schedule.n
        self.in_flight = slots or schedule.in_flight
        self.split = not slots and bool(schedule.splits)
        self.devices, stages = len(schedule.actions), range(self.n)
        #: For each stage its devices, and the first of them; for each device its stages.
        self.places = [devices_of(schedule.device_of, j) for j in stages]
        self.device_of = tuple([place[0] for place in self.places])
        self.replicas = list(map(len, self.places))
        self.stages_of = [[j for j in stages if d in self.places[j]] for d in range(self.devices)]

    def recomputed(self, modes: Sequence[Mode]) -> list[int]:
        """How many micro-batches each stage recomputes: under GPipe all but the last, which goes
        back at once.
        """
        return [(self.m - (self.name == "gpipe")) * (mode == "recompute") for mode in modes]

    @cached_property
    def loads(self) -> list[list[Load]]:
        """What each device holds at its fullest moments."""
        if self.devices == self.n and not self.split:
            return [[(q, 1, 0)] for q in self.in_flight]
        found: list[list[Load]] = []
        for d in range(self.devices):
            kept: list[Load] = []  # of a replica that gets no micro-batch nothing
            for load in sorted({during for during, _ in self.moments(d)}, key=sum, reverse=True):
                if not any(all(map(int.__ge__, other, load)) for other in kept):
                    kept.append(load)
            found.append(kept or [(0, 0, 0)])
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


def _total(load: Load, own: Sequence[Held]) -> float:
    """What a device with these stages holds; of its stages only one runs."""
    moving = (
        load[3 * k] * x.each + load[3 * k + 1] * x.once + load[3 * k + 2] * x.halves
        for k, x in enumerate(own)
    )
    return float(sum(x.fixed for x in own) + max(x.transient for x in own) + sum(moving))


def levels(
    form: Form, simulation: Simulation, stages: Sequence[Held]
) -> list[list[tuple[float, float]]]:
    """For each device the times at which what it holds changes, and the bytes from then on."""
    found = []
    for d, numbers in enumerate(form.stages_of):
        own = [stages[j] for j in numbers]
        steps = [(0.0, _total((0,) * 3 * len(own), own))]
        spans = [s for s in simulation.spans if s.row == d and s.kind != "recompute"]
        for span, (during, after) in zip(spans, form.moments(d), strict=True):
            steps += [(span.start, _total(during, own)), (span.end, _total(after, own))]
        found.append(steps)
    return found


@dataclass(frozen=True)
class Draft:
    """A pipeline. Its time for one mini-batch is played through, and no less than one interpreter
    needs for all forwards; ``bound``: no order of these actions takes less. Memory is that of each
    stage at most, and of all stages on a device together; ``excess`` is the largest factor by which
    a device lacks memory, 1 if all fits.
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
        return self.form.name

    @property
    def chunks(self) -> int:
        return self.form.m

    @property
    def ends(self) -> list[tuple[int, int]]:
        """For each stage its first layer and the layer after its last."""
        return ends_of(self.balance)

    @property
    def rank(self) -> tuple[float, float, int, float, int]:
        """The better of two drafts has the lesser one."""
        time = float(f"{self.time:.8e}")
        return self.excess, time, len(self.balance), max(self.on_device), self.chunks


class Terms:
    """What all drafts of one search have in common; the arguments are those of ``plan``."""

    def __init__(
        self, profile: Profile, machine: Machine, batch_size: int, param_scale: float
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a mini-batch has at least one sample")
        self.profile = profile.of(batch_size)
        self.machine, self.batch_size, self.param_scale = machine, batch_size, param_scale
        self._chains: dict[int, Chain] = {}
        self._held: dict[tuple[object, ...], Held] = {}
        #: Under 1F1B: what became of micro-batches, slots and balance.
        self._known: dict[tuple[object, ...], Draft] = {}
        #: What a stage can do with its activations.
        self.modes: tuple[Mode, ...] = ("store", "recompute")
        self.modes += ("offload",) if machine.host else ()
        trained = (x.parameter_bytes - x.frozen_bytes for x in self.profile.layers)
        self._trained = list(accumulate(trained, initial=0.0))

    def chain(self, chunks: int, last: int = 0) -> Chain:
        """The layers, for one of so many micro-batches, or the last, which may be smaller."""
        samples = sizes_of(self.batch_size, chunks)[last]
        if samples not in self._chains:
            scale = self.param_scale
            self._chains[samples] = Chain.of(self.profile, samples, scale, self.batch_size)
        return self._chains[samples]

    def on(self, machine: Machine) -> Terms:
        """The same for other devices."""
        other = Terms(self.profile, machine, self.batch_size, self.param_scale)
        other._chains = self._chains
        return other

    @lru_cache(maxsize=8)  # noqa: B019
    def _placed(self, device_of: tuple[int, ...]) -> Machine:
        return self.machine.ordered(device_of)

    def costs(self, form: Form, balance: Sequence[int]) -> Costs:
        """What the stages of a cut take."""
        places, last = self._placed(form.device_of), self.batch_size % form.m > 0
        chains = [self.chain(form.m, which) for which in range(1 + last)]
        found = [costs_of(chain, places, balance, form.split) for chain in chains]
        return replace(found[0], last=found[1]) if last else found[0]

    def held(self, form: Form, s: int, i: int, j: int, mode: Mode) -> Held:
        """What stage ``s`` with the layers ``[i, j)`` takes."""
        q, q0, speed = form.in_flight[s], form.in_flight[0], self.machine.speed[form.device_of[s]]
        shared = form.replicas[s] > 1
        key = (form.m, q, q0, speed, i, j, mode, form.split, shared)
        if key not in self._held:
            chain = self.chain(form.m)
            run = chain.run(i, j)
            found = chain.held(run, q, q0, mode, self.machine.host * run.forward / speed)
            if form.split:
                sent = zip(chain.inputs[i + 1 : j + 1], chain.weight[i:j], strict=True)
                found = found._replace(halves=sum(size for size, later in sent if later))
            if shared:  # gradients of the other replicas, which arrive where the optimizer is
                found = found._replace(fixed=found.fixed + self.trained(i, j))
            self._held[key] = found
        return self._held[key]

    def stages(self, form: Form, balance: Sequence[int], modes: Sequence[Mode]) -> list[Held]:
        """What the stages of a cut take."""
        ends = enumerate(ends_of(balance))
        return [self.held(form, s, i, j, modes[s]) for s, (i, j) in ends]

    def _on_device(self, form: Form, d: int, stages: Sequence[Held]) -> float:
        own = [stages[j] for j in form.stages_of[d]]
        return max(_total(load, own) for load in form.loads[d])

    def trained(self, i: int, j: int) -> float:
        """Bytes of the parameters that layers ``[i, j)`` train."""
        return self._trained[j] - self._trained[i]

    def _exchange(self, form: Form, balance: Sequence[int]) -> float:
        """Seconds in which replicas are sent parameters and send back gradients, once a step."""
        pairs = zip(form.replicas, ends_of(balance), strict=True)
        sizes = [2 * (r - 1) * self.trained(i, j) for r, (i, j) in pairs]
        return max(sizes) / self.machine.bandwidth[0][-1]

    def link_time(self, m: float, stored: Any) -> Any:
        """Seconds in a step for so many bytes of each micro-batch to the host and back."""
        return 2 * m * stored / self.machine.host

    def interpreter(self, m: int, balance: Sequence[int], recomputed: Sequence[int]) -> float:
        """Seconds that a step takes at least, as only one thread at a time can run Python."""
        sums, pairs = (
            self.chain(m).sums["interpreter"],
            zip(ends_of(balance), recomputed, strict=True),
        )
        return has_lock() * math.fsum((sums[j] - sums[i]) * (m + count) for (i, j), count in pairs)

    def draft(
        self,
        form: Form,
        balance: Sequence[int],
        modes: Sequence[Mode] | None = None,
        at_most: float = math.inf,
    ) -> Draft | None:
        """What a cut takes, whether it fits or not (``excess``); None if its bound exceeds
        ``at_most`` seconds. By default each stage does with its activations what fits, and of that
        what takes the least time.
        """
        key = (form.m, form.slots, tuple(balance))
        cached = form.slots is not None and modes is None
        if cached and key in self._known:
            return self._known[key] if self._known[key].bound <= at_most else None
        costs = self.costs(form, balance)
        modes = tuple(self._modes(form, balance, costs) if modes is None else modes)
        counts = form.recomputed(modes)
        python = self.interpreter(form.m, balance, counts)
        bound = max(python, self.bound(form, balance, costs, modes))
        if bound > at_most:
            return None
        device_of = form.schedule.device_of
        time = play(form.schedule.actions, form.m, device_of, costs, counts).makespan
        exchange = self._exchange(form, balance)
        time = (bound if bound > time * (1 + 1e-9) else time) + exchange
        stages = self.stages(form, balance, modes)
        on_device = tuple(self._on_device(form, d, stages) for d in range(form.devices))
        memory = [on_device[d] for d in form.device_of]
        for j in range(form.n) if form.devices < form.n else ():
            d = form.device_of[j]
            k = 3 * form.stages_of[d].index(j)
            memory[j] = max(_total(load[k : k + 3], [stages[j]]) for load in form.loads[d])
        shares = (a / b for a, b in zip(on_device, self.machine.memory, strict=False))
        draft = Draft(
            form, tuple(balance), modes, time, tuple(memory), on_device, max(1.0, *shares), python,
            min(bound + exchange, time),
        )  # fmt: skip
        if cached:
            self._known[key] = draft
        return draft

    def bound(
        self, form: Form, balance: Sequence[int], costs: Costs, modes: Sequence[Mode]
    ) -> float:
        """No order of these actions takes less: see docs/planning.md.

        A device waits until a micro-batch has come through the stages before its own, has all of
        its work to do, and its last gradient goes back through them.
        """
        m, last, counts = form.m, costs.last or costs, form.recomputed(modes)
        back: Kind = "backward_input" if form.split else "backward"

        def whole(part: str) -> list[float]:
            """Seconds for all micro-batches; one of several replicas has its share at least."""
            both = zip(getattr(costs, part), getattr(last, part), form.replicas, strict=True)
            return [((m - 1) * one + end) / r for one, end, r in both]

        work = list(map(sum, zip(whole("forward"), whole("backward_input"), strict=True)))
        late, heads, tails = whole("backward_weight"), [0.0], [0.0]
        for j, (count, r) in enumerate(zip(counts, form.replicas, strict=True)):
            again = min(count, m - 1) * costs.recompute[j] + (count == m) * last.recompute[j]
            work[j] += again / r
        for j, way in enumerate(map(min, costs.transfer, last.transfer)):
            way *= form.device_of[j] != form.device_of[j + 1]
            heads.append(heads[j] + min(x.times["forward"][j] for x in (costs, last)) + way)
            tails.append(tails[j] + min(x.times[back][j] for x in (costs, last)) + way)
        bound = 0.0
        for own in form.stages_of:
            stored = [self.chain(m).run(*ends_of(balance)[j]).stored / form.replicas[j]
                      for j in own if modes[j] == "offload"]  # fmt: skip
            after = sum(late[j] for j in own)
            # Nothing waits for weight halves.
            after = max(tails[own[0]], after) if form.split else tails[own[0]] + after
            link = self.link_time(m, sum(stored)) + tails[own[0]] if stored else 0.0
            bound = max(bound, heads[own[0]] + max(sum(work[j] for j in own) + after, link))
        return bound

    def _modes(self, form: Form, balance: Sequence[int], costs: Costs) -> list[Mode]:
        """For each stage what it does with activations: first those that save most for their time,
        until the device fits; where nothing is enough, what needs least.
        """
        ends, m = ends_of(balance), form.m
        chosen: list[Mode] = ["store"] * form.n
        stages = self.stages(form, balance, chosen)
        for d, own in enumerate(form.stages_of):
            needs, limit = self._on_device(form, d, stages), self.machine.memory[d]
            left = [(j, mode) for j in own for mode in self.modes[1:]]
            while needs > limit and left:
                ways = []
                for j, mode in left:
                    other = self.held(form, j, *ends[j], mode)
                    less = self._on_device(form, d, [*stages[:j], other, *stages[j + 1 :]])
                    time = m * costs.forward[j]
                    if mode == "offload":
                        link = self.link_time(m, self.chain(m).run(*ends[j]).stored)
                        time = max(0.0, link - time - m * costs.times["backward"][j])
                    gain = (needs - less) / (time or 1e-30)
                    ways.append((less > limit, time if less <= limit else -gain, less, j, mode))
                _, _, less, j, mode = min(ways)
                left.remove((j, mode))
                if less < needs:
                    chosen[j], needs = mode, less
                    stages[j] = self.held(form, j, *ends[j], mode)
        return chosen
