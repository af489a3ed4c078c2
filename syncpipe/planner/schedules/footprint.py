"""What each device holds while a schedule runs: at most, and at each moment.

    cell, whole backward        F|===== held =====|B--|
    recomputed                  F|- its inputs ---|=R=B--|          R: the forward again
    backward in halves          F|===== held =====|I+++++++++|W|    +: and gradients of outputs

Between its halves a cell keeps what the weight half needs, inputs of layers and gradients of their
outputs. All that it held stands for the first, which is more than true for layers of many parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from syncpipe.planner.costs.chain import Chain
from syncpipe.schedules.kinds import KINDS
from syncpipe.schedules.schedule import Action, Schedule
from syncpipe.schedules.simulation import Simulation

__all__ = ["Footprint", "Load", "base", "footprints", "loads", "over_time", "peak"]


@dataclass(frozen=True)
class Footprint:
    """Bytes that a stage takes.

    Attributes:
        fixed: all the time.
        moment: more while one of its actions runs; of a device's stages only one does.
        held: for each micro-batch, from its forward on.
        again: more for each that is recomputed, from there on.
        halves: more for each between the halves of its backward.
    """

    fixed: float
    moment: float
    held: float
    again: float
    halves: float


#: For each stage of a device: cells held, of these those that go back, of these those in halves.
Load = tuple[tuple[int, int, int], ...]


def footprints(
    chain: Chain,
    balance: Sequence[int],
    in_flight: Sequence[int],
    recomputes: Sequence[bool],
    put_off: Sequence[float] = (),
) -> tuple[Footprint, ...]:
    """What each stage takes, by the account that the search keeps (:meth:`.Chain.held`).

    Args:
        chain: the layers, for one micro-batch.
        balance: layers of each stage.
        in_flight: for each stage its micro-batches in flight, at most.
        recomputes: for each stage whether it re-materializes.
        put_off: for each layer the gradients of outputs that it keeps between its halves.
    """
    made = []
    stages = pairwise(accumulate(balance, initial=0))
    for (i, j), q, again in zip(stages, in_flight, recomputes, strict=True):
        held = chain.held(i, j, q, in_flight[0], again)
        each = chain.inputs[i] if again else held.stored / q
        made.append(
            Footprint(
                fixed=held.fixed + held.arrived + held.waiting,
                moment=held.moment,
                held=each,
                again=max(0.0, held.stored - q * each) if again else 0.0,
                halves=sum(put_off[i:j]),
            )
        )
    return tuple(made)


def base(stages: Iterable[Footprint]) -> float:
    """What a device with these stages holds all the time."""
    stages = list(stages)
    return sum(stage.fixed for stage in stages) + max(stage.moment for stage in stages)


def loads(schedule: Schedule) -> tuple[tuple[Load, ...], ...]:
    """For each device what it holds at its fullest moments: all those that no other one covers."""
    made = []
    for d, row in enumerate(schedule.actions):
        stages = [j for j in range(schedule.n) if schedule.device_of[j] == d]
        seen = dict.fromkeys(_moments(row, stages))
        ordered = sorted(seen, key=lambda load: -sum(map(sum, load)))
        kept: list[Load] = []
        for load in ordered:
            if not any(_covers(other, load) for other in kept):
                kept.append(load)
        made.append(tuple(kept))
    return tuple(made)


def _moments(row: Iterable[Action], stages: Sequence[int]) -> Iterator[Load]:
    """What is held during each action of a device."""
    place = {j: k for k, j in enumerate(stages)}
    counts = [[0, 0, 0] for _ in stages]
    for kind, _, j in row:
        cell = counts[place[j]]
        half = kind == "backward_input"
        if kind == "forward":
            cell[0] += 1
        elif KINDS[kind].sends == "gradient":
            cell[1] += 1
            cell[2] += half
        yield tuple((held, back, halves) for held, back, halves in counts)
        if KINDS[kind].alive < 0:
            cell[0] -= 1
            cell[1] -= 1
            cell[2] -= kind == "backward_weight"


def _covers(load: Load, other: Load) -> bool:
    return all(a >= b for x, y in zip(load, other, strict=True) for a, b in zip(x, y, strict=True))


def peak(loads: Iterable[Load], stages: Sequence[Footprint]) -> float:
    """The most that a device holds, given the footprints of its stages."""
    return base(stages) + max(
        sum(
            held * stage.held + back * stage.again + halves * stage.halves
            for (held, back, halves), stage in zip(load, stages, strict=True)
        )
        for load in loads
    )


def over_time(
    simulation: Simulation, stages: Sequence[Footprint]
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """For each device the times at which what it holds changes, and the bytes from then on."""
    device_of = simulation.schedule.device_of
    made = []
    for d in range(len(simulation.schedule.actions)):
        level = base(stages[j] for j, device in enumerate(device_of) if device == d)
        steps = [(0.0, level)]
        back: set[tuple[int, int]] = set()
        for span in simulation.spans:
            (kind, i, j), stage = span.action, stages[span.action.j]
            if span.device != d:
                continue
            again = stage.again if i < _recomputed(simulation, j) else 0.0
            # What is not recomputed on a stage that recomputes is held whole from its forward on.
            held = stage.held + (stage.again if stage.again and not again else 0.0)
            if kind == "forward":
                level += held
            elif (i, j) not in back and kind != "backward_weight":
                back.add((i, j))
                level += again
            if kind == "backward_input":
                level += stage.halves
            steps.append((span.start, level))
            if KINDS[kind].alive < 0:
                level -= held + again + (stage.halves if kind == "backward_weight" else 0.0)
                steps.append((span.end, level))
        made.append(tuple(steps))
    return tuple(made)


def _recomputed(simulation: Simulation, j: int) -> int:
    return simulation.rematerialized[j] if simulation.rematerialized else 0
