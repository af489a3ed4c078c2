"""``Candidate``: a way to run the layers as a pipeline under any schedule, with time and memory.

:func:`.play` gives the time and :meth:`.Chain.needs` the memory of each stage. The peak of a device
with several stages is the largest sum over its stages at any moment:

    entire backward             F|==== stored ====|B--|
    recomputed                  F|---- inputs ----|=R=B--|          R: recomputation
    recomputed by layer         F|==== inputs and stored layers ====|=R=B--|
    backward in halves          F|==== stored ====|I+++++++++|W|    +: inputs of products with
                                                                       weights, and gradients
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from syncpipe.balance.profile import Profile
from syncpipe.planner.chain import Chain, Mode, StageMemory, costs_of, doubles, ends_of, sizes_of
from syncpipe.planner.machine import Machine
from syncpipe.progress import NO_BAR
from syncpipe.runtime.worker import has_lock
from syncpipe.schedules import one_f_one_b
from syncpipe.schedules.player import Costs, heads_and_tails, lower_bound, play
from syncpipe.schedules.schedule import KINDS, Action, Kind, Schedule, devices_of, stages_on

__all__ = ["ADAM", "Candidate", "Problem", "ScheduleShape", "one_f_one_b_shape", "slots_bound"]

#: ``param_scale`` for the parameter, its gradient and Adam's two moments. A step of Adam takes the
#: size of the parameters once more in PyTorch's kernels for lists, the default on accelerators.
ADAM = 4.0


class ScheduleShape:
    """A schedule to try with many cuts, and the slots of its stages under 1F1B without replicas."""

    def __init__(self, schedule: Schedule, slots: tuple[int, ...] | None = None) -> None:
        self.schedule, self.slots = schedule, slots
        self.name, self.m, self.n = schedule.name, schedule.m, schedule.n
        self.in_flight = slots or schedule.in_flight
        self.split = not slots and bool(schedule.splits)
        self.devices = len(schedule.actions)
        #: The devices of each stage, the first device of each stage, the stages of each device.
        self.places = tuple([devices_of(schedule.device_of, j) for j in range(self.n)])
        self.device_of = tuple([place[0] for place in self.places])
        self.replicas = list(map(len, self.places))
        self.stages_of = stages_on(schedule.device_of)
        self._times = lru_cache(self._played)  # they live as long as the shape
        self.waiting = lru_cache(maxsize=1024)(self._waiting)

    def recomputed(self, modes: Sequence[Mode]) -> list[int]:
        """The micro-batches that each stage recomputes; GPipe keeps the last one."""
        return [(self.m - (self.name == "gpipe")) * (mode == "recompute") for mode in modes]

    def levels(self, d: int, stages: Mapping[int, StageMemory]) -> Iterator[float]:
        """Bytes of these stages on device ``d`` during each action, of which one runs at a time,
        and during the optimizer's step.
        """
        held, begun = sum(x.fixed - x.varying for x in stages.values()), set[int]()
        messages = [
            (size, self.waiting(kind, source, j, d, again=bool(x.once)))
            for j, x in stages.items()
            for kind, source, size in x.messages
        ]
        for k, (kind, _, j) in enumerate(self.schedule.actions[d]):
            if x := stages.get(j):
                most, held = x.levels(kind, held, j in begun)
                yield most + sum(size * counts[k] for size, counts in messages)
                if kind in ("backward", "backward_weight"):
                    begun.add(j)
        yield sum(x.update for x in stages.values())

    def _played(self, again: bool) -> list[dict[Action, tuple[float, float]]]:
        """When each device begins and ends its actions, if all stages take the same time, and all
        or none recompute.
        """
        rows, costs = self.schedule.actions, Costs.even(self.n)
        counts = [self.m * again] * self.n
        table = play(rows, self.m, self.schedule.device_of, costs, counts).table
        ends = {a: table[a.kind][a.j].ends[a.i] for row in rows for a in row}
        takes = {
            kind: costs.times[kind][0] + again * (KINDS[kind].sends == "gradient") for kind in table
        }
        return [{a: (ends[a] - takes[a.kind], ends[a]) for a in row} for row in rows]

    def _waiting(
        self, kind: Kind, source: int, target: int, d: int, again: bool = False
    ) -> list[int]:
        """How many activations or gradients from stage ``source`` wait at stage ``target`` on
        device ``d``, during each of its actions.
        """
        times, schedule, sent, begun = self._times(again), self.schedule, list[float](), []
        for action, (begin, _) in times[d].items():
            i, back = action.i, KINDS[action.kind].sends == "gradient"
            if action.j == target and (back if kind == "backward" else action.kind == kind):
                begun.append(begin)
                sender = schedule.backward_of(i, source) if back else Action(kind, i, source)
                sent.append(times[schedule.device(i, source)][sender][1])
        sent.sort()
        begun.sort()
        spans = times[d].values()
        return [bisect_left(sent, end) - bisect_right(begun, begin) for begin, end in spans]

    def most_waiting(self, kind: Kind, source: int, target: int) -> int:
        """The most that wait, on the first device of stage ``target``."""
        if self.slots and kind == "backward":
            return (self.slots[target] - self.slots[source] + 1) // 2
        return max(self.waiting(kind, source, target, self.device_of[target]))

    def peak(self, d: int, stages: Mapping[int, StageMemory]) -> float:
        """The peak bytes of these stages on device ``d``."""
        if self.devices == self.n and not self.split:
            return max(float(x.peak(self.in_flight[j])) for j, x in stages.items())
        return max(self.levels(d, stages))


@lru_cache(maxsize=1024)
def one_f_one_b_shape(m: int, slots: tuple[int, ...]) -> ScheduleShape:
    """1F1B with these slots for each stage; no stage has more slots than the one before it."""
    return ScheduleShape(one_f_one_b(m, len(slots), slots=slots), slots)


@dataclass(frozen=True)
class Candidate:
    """A pipeline, whether it fits or not.

    Attributes:
        time: seconds for one mini-batch, simulated, and at least ``interpreter``.
        memory: peak bytes of each stage.
        on_device: peak bytes of each device, all its stages together.
        excess: the largest ratio of needed memory to the limit of a device; 1 if everything fits.
        interpreter: seconds of Python in all forwards.
        bound: seconds below which no order of the same actions falls.
    """

    shape: ScheduleShape = field(repr=False)
    balance: tuple[int, ...]
    modes: tuple[Mode, ...]
    time: float
    memory: tuple[float, ...]
    on_device: tuple[float, ...]
    excess: float
    interpreter: float
    bound: float

    @property
    def ends(self) -> list[tuple[int, int]]:
        return ends_of(self.balance)

    @property
    def rank(self) -> tuple[float, float, int, float, int]:
        """A sort key: the better of two candidates has the smaller rank."""
        time = float(f"{self.time:.8e}")
        return self.excess, time, len(self.balance), max(self.on_device), self.shape.m


class Problem:
    """The inputs of a search: layers, machine, mini-batch and optimizer, as ``plan`` takes them."""

    def __init__(
        self, profile: Profile, machine: Machine, batch_size: int, param_scale: float,
        update: float | None = None,
    ) -> None:  # fmt: skip
        self.profile = profile.of(batch_size)
        self.machine, self.batch_size, self.param_scale = machine, batch_size, param_scale
        self.bar: Any = NO_BAR
        #: Bytes of the optimizer's step per byte of a parameter, besides the optimizer's state.
        self.update = float(param_scale >= ADAM) if update is None else update
        #: By the samples of a micro-batch: the layers, and the layers in this mini-batch.
        self._sizes: dict[int, Chain] = {}
        self._chains: dict[int, Chain] = {}
        #: Candidates under 1F1B by number of micro-batches, slots and balance.
        self._cache: dict[tuple[object, ...], Candidate] = {}
        self.modes: tuple[Mode, ...] = ("store", "recompute")
        self.modes += ("offload",) if machine.host else ()
        trained = (x.parameter_bytes - x.frozen_bytes for x in self.profile.layers)
        self._trained = list(accumulate(trained, initial=0.0))

    def chain(self, chunks: int, last: int = 0) -> Chain:
        """The layers for one of ``chunks`` micro-batches; ``last``: for the last, smaller one."""
        samples = sizes_of(self.batch_size, chunks)[last]
        if samples not in self._chains:
            if samples not in self._sizes:
                args = self.profile, samples, self.param_scale, 0, self.update
                self._sizes[samples] = Chain.of(*args)
            chain, batch = self._sizes[samples], self.batch_size
            self._chains[samples] = chain.in_batch(self.profile, samples, batch)
        return self._chains[samples]

    def on(self, machine: Machine, batch_size: int = 0) -> Problem:
        """The same problem on other devices, or with another mini-batch."""
        batch = batch_size or self.batch_size
        other = Problem(self.profile, machine, batch, self.param_scale, self.update)
        other.bar, other._sizes = self.bar, self._sizes
        if batch == self.batch_size:
            other._chains = self._chains
        return other

    @lru_cache(maxsize=8)  # noqa: B019
    def _shared_machine(self, places: tuple[tuple[int, ...], ...]) -> Machine:
        return self.machine.shared(places)

    def costs(
        self, shape: ScheduleShape, balance: Sequence[int], modes: Sequence[Mode] = ()
    ) -> Costs:
        """The times of the stages of a cut. Recomputation by layer is a part of backward."""
        places, last = self._shared_machine(shape.places), self.batch_size % shape.m > 0
        chains = [self.chain(shape.m, which) for which in range(1 + last)]
        found = [costs_of(chain, places, balance, shape.split) for chain in chains]
        if any(isinstance(mode, tuple) for mode in modes):
            for k, chain in enumerate(chains):
                shares = _shares(chain.sums["forward"], balance, modes)
                parts = zip(found[k].backward_input, found[k].forward, shares, strict=True)
                again = tuple(b + f * share for b, f, share in parts)
                found[k] = replace(found[k], backward_input=again)
        return replace(found[0], last=found[1]) if last else found[0]

    def needs(
        self, shape: ScheduleShape, s: int, ends: Sequence[tuple[int, int]], mode: Mode
    ) -> StageMemory:
        """The memory of stage ``s``, given the layers of all stages."""
        chain, q = self.chain(shape.m), shape.in_flight[s]
        q0 = shape.in_flight[0] if shape.slots else q + shape.most_waiting("forward", 0, s)
        (i, j), speed = ends[s], self.machine.speed[shape.device_of[s]]
        run, returned, summed, shared = chain.run(i, j), 0.0, 0.0, 0.0
        crossing = bool(chain.skips or chain.ties)
        stages = [t for t, (a, b) in enumerate(ends) for _ in range((b - a) * crossing)]
        messages = list[tuple[Kind, int, float]]()
        sent = [*chain.skips, *((a, b, size) for a, others, _, size in chain.ties for b in others)]
        for stash, pop, size in sent:
            if i <= stash < j <= pop:
                returned += size * shape.most_waiting("backward", stages[pop], s)
                messages.append(("backward", stages[pop], size))
        for stash, pop, size in chain.skips:
            if stash < i <= pop < j:
                messages.append(("forward", stages[stash], size))
        for owner, others, size, trained in chain.ties:
            if i <= owner < j <= others[-1]:
                summed += trained  # the sum of its own gradient and that of a copy
            copied = owner < i and any(i <= k < j for k in others)
            if copied and shape.device_of[stages[owner]] == shape.device_of[s]:
                shared += size + trained  # there is no copy, and its gradient stays
        early = shape.most_waiting("forward", s - 1, s) if s and not shape.slots else None
        taken = self.machine.host * run.forward / speed
        found = chain.needs(run, q, q0, mode, taken, returned - shared, early)
        here = shape.device_of[s]
        if s and mode == "store" and shape.device_of[s - 1] == here:
            found = found._replace(each=found.each - chain.shared[i])  # the stage before has it
        if isinstance(mode, tuple):
            kept, peak = chain.by_layer(i, j, mode)
            found = found._replace(each=kept, once=peak - kept - run.transient)
        found = found._replace(
            transient=found.transient + summed,
            halves=chain.sums["halves"][j] - chain.sums["halves"][i],
        )
        if not chain.peaks:
            return found
        if s:
            kept = chain.shared[i] if shape.device_of[s - 1] == here else 0.0
            messages.append(("forward", s - 1, chain.inputs[i] - min(kept, chain.inputs[i])))
        if s + 1 < shape.n:
            messages.append(("backward", s + 1, chain.inputs[j]))
        if mode == "recompute":  # the skips that it popped are among its inputs
            each, once = found.each + run.popped, found.once - run.popped
            found = found._replace(each=each, once=once, copied=run.copied)
        during, gradients = chain.during(i, j), self.trained(i, j)
        more = {what: getattr(during, what) + summed for what in ("backward", "first", "input")}
        steady = run.fixed + chain.batch * run.first - shared
        return found._replace(
            varying=found.fixed - steady + gradients, gradients=gradients,
            messages=tuple(messages), during=during._replace(**more),
        )  # fmt: skip

    def _on_replica(
        self, d: int, shape: ScheduleShape, j: int, ends: tuple[int, int], held: StageMemory
    ) -> StageMemory:
        """The memory of a stage on device ``d``, one of its replicas. The first replica receives
        all gradients and has the optimizer; the others hold parameters and gradients only.
        """
        if shape.replicas[j] == 1:
            return held
        trained = self.trained(*ends)
        if d == shape.device_of[j]:
            return held._replace(fixed=held.fixed + (shape.replicas[j] - 1) * trained)
        less = max(0.0, self.param_scale - 2) * trained
        return held._replace(fixed=held.fixed - less, update=0.0)

    def stages(
        self, shape: ScheduleShape, balance: Sequence[int], modes: Sequence[Mode]
    ) -> list[StageMemory]:
        """The memory of each stage of a cut."""
        ends = ends_of(balance)
        return [self.needs(shape, s, ends, mode) for s, mode in enumerate(modes)]

    def on_device(
        self,
        d: int,
        shape: ScheduleShape,
        balance: Sequence[int],
        modes: Sequence[Mode] | Mapping[int, Mode],
    ) -> dict[int, StageMemory]:
        """The memory of each stage of device ``d``."""
        ends, stages = ends_of(balance), shape.stages_of[d]
        held = {j: self.needs(shape, j, ends, modes[j]) for j in stages}
        return {j: self._on_replica(d, shape, j, ends[j], held[j]) for j in stages}

    def trained(self, i: int, j: int) -> float:
        """Bytes of the parameters that layers ``[i, j)`` train."""
        return self._trained[j] - self._trained[i]

    def link_time(self, m: float, stored: Any) -> Any:
        """Seconds in a step to move ``stored`` bytes of each micro-batch to the host and back."""
        return 2 * m * stored / self.machine.host

    def interpreter(self, m: int, balance: Sequence[int], recomputed: Sequence[float]) -> float:
        """Seconds of Python in all forwards, a lower bound: one thread at a time runs Python."""
        sums = self.chain(m).sums["interpreter"]
        pairs = zip(ends_of(balance), recomputed, strict=True)
        return has_lock() * math.fsum((sums[j] - sums[i]) * (m + count) for (i, j), count in pairs)

    def evaluate(
        self,
        shape: ScheduleShape,
        balance: Sequence[int],
        modes: Sequence[Mode] | None = None,
        at_most: float = math.inf,
    ) -> Candidate | None:
        """The candidate of a cut, which need not fit (``excess``); None if its bound exceeds
        ``at_most`` seconds. By default each stage gets the fastest mode that fits.
        """
        key = (shape.m, shape.slots, tuple(balance))
        cached = shape.slots is not None and modes is None
        if cached and key in self._cache:
            return self._cache[key] if self._cache[key].bound <= at_most else None
        self.bar.update()
        costs, none = self.costs(shape, balance), [0] * shape.n
        if at_most < math.inf and not shape.slots:  # before the modes, which take longer to find
            device_of = shape.schedule.device_of
            if lower_bound(shape.m, device_of, costs, none, shape.split) > at_most:
                return None
        modes = self._modes(shape, balance, costs) if modes is None else modes
        renorms = (self.chain(shape.m).run(i, j).renorms for i, j in ends_of(balance))
        modes = tuple([
            "store" if mode == "recompute" and never else mode
            for mode, never in zip(modes, renorms, strict=True)
        ])  # fmt: skip
        counts = shape.recomputed(modes)
        again: list[float] = [*counts]
        if any(isinstance(mode, tuple) for mode in modes):
            costs = self.costs(shape, balance, modes)
            shares = _shares(self.chain(shape.m).sums["interpreter"], balance, modes)
            again = [count + shape.m * x for count, x in zip(counts, shares, strict=True)]
        python = self.interpreter(shape.m, balance, again)
        if _bound_of(shape, costs, counts) > at_most:
            return None
        bound = max(python, self.bound(shape, balance, costs, modes))
        if bound > at_most:
            return None
        device_of = shape.schedule.device_of
        time = play(shape.schedule.actions, shape.m, device_of, costs, counts).makespan
        # Once per step the replicas receive parameters and send gradients.
        exchange, links = 0.0, self.machine.bandwidth
        for (first, *others), (i, j) in zip(shape.places, ends_of(balance), strict=True):
            each = (1 / links[first][d] + 1 / links[d][first] for d in others)
            exchange = max(exchange, self.trained(i, j) * sum(each))
        time = (bound if bound > time * (1 + 1e-9) else time) + exchange
        parts = [self.on_device(d, shape, balance, modes) for d in range(shape.devices)]
        on_device = tuple(shape.peak(d, own) for d, own in enumerate(parts))
        memory = (shape.peak(d, {j: parts[d][j]}) for j, d in enumerate(shape.device_of))
        shares = (a / b for a, b in zip(on_device, self.machine.memory, strict=False))
        candidate = Candidate(
            shape, tuple(balance), modes, time, tuple(memory), on_device, max(1.0, *shares), python,
            min(bound + exchange, time),
        )  # fmt: skip
        if cached:
            self._cache[key] = candidate
        return candidate

    def bound(
        self, shape: ScheduleShape, balance: Sequence[int], costs: Costs, modes: Sequence[Mode]
    ) -> float:
        """Seconds below which no order of these actions falls (:func:`.lower_bound`)."""
        taken = []
        for own in shape.stages_of if "offload" in modes else ():
            sent = (self.chain(shape.m).run(*ends_of(balance)[j]).stored / shape.replicas[j]
                    for j in own if modes[j] == "offload")  # fmt: skip
            taken.append(self.link_time(shape.m, sum(sent)))
        counts, device_of = shape.recomputed(modes), shape.schedule.device_of
        return lower_bound(shape.m, device_of, costs, counts, shape.split, taken)

    def _modes(self, shape: ScheduleShape, balance: Sequence[int], costs: Costs) -> list[Mode]:
        """The fastest modes that fit on each device, or those with the least memory if none fit."""
        ends, m = ends_of(balance), shape.m
        chosen: list[Mode] = ["store"] * shape.n

        def longer(j: int, mode: Mode) -> float:
            forward = m * costs.forward[j]
            if mode == "offload":
                link: float = self.link_time(m, self.chain(m).run(*ends[j]).stored)
                return max(0.0, link - forward - m * costs.times["backward"][j])
            return forward * (mode == "recompute")

        for d, own in enumerate(shape.stages_of):
            if d not in shape.device_of:  # another replica, which needs less than the first
                continue
            best, limit = (True, math.inf), self.machine.memory[d]
            for modes in product(self.modes, repeat=len(own)):
                pairs = [*zip(own, modes, strict=True)]
                needs = shape.peak(d, self.on_device(d, shape, balance, dict(pairs)))
                rank = needs > limit, needs if needs > limit else sum(longer(*x) for x in pairs)
                if rank < best:
                    best = rank
                    for j, mode in pairs:
                        chosen[j] = mode
                if best == (False, 0.0):
                    break
        return chosen


def _shares(
    sums: Sequence[float], balance: Sequence[int], modes: Sequence[Mode]
) -> Iterator[float]:
    """For each stage, the part that is recomputed by layer, by sums over all layers."""
    for (i, j), mode in zip(ends_of(balance), modes, strict=True):
        again = sum(sums[b] - sums[a] for a, b in (mode if isinstance(mode, tuple) else ()))
        yield again / (sums[j] - sums[i]) if again else 0.0


def slots_bound(m: float, count: int, q: Any, f: Any, b: Any, after: Any, again: Any) -> Tensor:
    """Lower bounds of a step under 1F1B, less the time of one micro-batch before each stage.

    For a stage with ``q`` slots let ``F`` be its forward, ``B`` its backward, ``R`` its backward
    with recomputation, ``pre`` the time of one micro-batch in the stages before it, forward and
    backward, and ``D`` the same in the stages after it. Then::

        m > q:   T >= pre + m (F+R) + [D - (q-1) F]+ + [D - (q-1) R]+
        m <= q:  T >= pre + max( m (F+R),  F + D + B + (m-1) R,  m F + D + B )
        always:  T >= pre + ceil(m / q) (F + D + B)

    Args:
        m: micro-batches, of which a smaller last one counts as a fraction; ``count`` whole ones.
        q: slots, a number or a tensor.
        f, b, after: ``F``, ``B`` and ``D`` of one stage or of many, as tensors.
        again: seconds of recomputation, which begins while the gradient is on its way.
    """
    r = b + again
    work = m * (f + r)

    def some() -> Any:
        rest = (after - again).clamp(min=0)
        return work + (rest - (q - 1) * f).clamp(min=0) + (rest - (q - 1) * r).clamp(min=0)

    def every() -> Any:
        return torch.maximum(work, torch.maximum(f + (m - 1) * r, m * f) + after + b)

    if isinstance(q, Tensor):
        own = torch.where(q < count, some(), every())
    else:
        own = some() if q < count else every()
    turns = -(-math.floor(m) // q)
    return torch.maximum(own, turns * (f + after + b))


def _bound_of(shape: ScheduleShape, costs: Costs, counts: Sequence[int]) -> float:
    """The lower bound for 1F1B with the slots of a shape; 0 for others."""
    if not shape.slots or costs.last:
        return 0.0
    heads, tails = (doubles(row) for row in heads_and_tails(shape.device_of, costs, False))
    f, b = doubles(costs.forward), doubles(costs.times["backward"])
    pre, again = heads + tails, doubles(costs.recompute) * (torch.tensor(counts) > 0)
    after = (pre + f + b)[-1] - pre - f - b
    own = slots_bound(shape.m, shape.m, doubles(shape.slots), f, b, after, again)
    return float((pre + own).max()) * (1 - 1e-9)
