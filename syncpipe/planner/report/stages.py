"""What each stage of a plan has and does."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from syncpipe.balance.profile import Profile
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.schedules.layouts import placement
from syncpipe.planner.schedules.setting import Scheduled
from syncpipe.planner.search.candidate import Candidate

__all__ = ["StagePlan", "on_devices", "stages_of"]


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        layers: the names of its layers.
        device: what its device is called.
        forward: seconds, for one micro-batch.
        backward: seconds, for one micro-batch, without recomputation.
        send: seconds, for the output of one micro-batch on its way to the next stage.
        in_flight: the largest number of its micro-batches that are alive at once.
        recomputes: whether it re-materializes.
        memory: bytes, at most.
        limit: bytes, that its device has for this and its other stages.
        gradients: bytes, more than ``memory``, if a step finds gradients (no ``zero_grad()``
            before): it copies them, to put them back if it fails.
    """

    layers: tuple[str, ...]
    device: str
    forward: float
    backward: float
    send: float
    in_flight: int
    recomputes: bool
    memory: float
    limit: float
    gradients: float


def stages_of(profile: Profile, machine: Machine, chosen: Candidate) -> tuple[StagePlan, ...]:
    """The stages of a pipeline on the devices of a machine."""
    costs = chosen.simulation.costs
    names = [layer.name for layer in profile.layers]
    sends = (*costs.transfer, 0.0)
    device_of = placement(chosen.simulation.schedule)
    return tuple(
        StagePlan(
            layers=tuple(names[i:j]),
            device=machine.name(device_of[s]),
            forward=costs.forward[s],
            backward=costs.backward_input[s] + costs.backward_weight[s],
            send=sends[s],
            in_flight=chosen.simulation.in_flight[s],
            recomputes=chosen.recomputes[s],
            memory=chosen.memory[s],
            limit=machine.memory[device_of[s]],
            gradients=sum(x.parameter_bytes - x.frozen_bytes for x in profile.layers[i:j]),
        )
        for s, (i, j) in enumerate(pairwise(accumulate(chosen.balance, initial=0)))
    )


def on_devices(chosen: Candidate) -> tuple[float, ...]:
    """Bytes that each device takes at most, all of its stages together."""
    return chosen.on_device if isinstance(chosen, Scheduled) else chosen.memory
