"""The orders of torch.distributed.pipelining are ours: theirs without processes, as data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from syncpipe.schedules import Schedule, build, simulate
from syncpipe.schedules.player import Costs
from syncpipe.schedules.schedule import Action, Kind
from tests.schedules.layouts import LAYOUTS

#: By our name; they have two stages on each device.
THEIRS = {
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}


def theirs(name: str, m: int, devices: int) -> Schedule:
    """Their schedule for the stages of the first process, which knows the order of all others."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(module, THEIRS[name]):
        pytest.skip(f"this PyTorch has no {THEIRS[name]}")
    stage: Any = SimpleNamespace(
        group_size=devices,
        group_rank=0,
        num_stages=2 * devices,
        stage_index=0,
        submod=nn.Identity(),
        is_first=True,
        is_last=False,
    )
    order = getattr(module, THEIRS[name])([stage, stage], m).pipeline_order
    rows = []
    for rank in range(devices):
        row: list[Action] = []
        for cell in order[rank]:
            for one in () if cell is None else getattr(cell, "sub_actions", None) or (cell,):
                kind = KINDS[one.computation_type.name]
                row.append(Action(kind, one.microbatch_index, one.stage_index))
        rows.append(tuple(row))
    return Schedule(m, LAYOUTS[name](devices), tuple(rows), THEIRS[name])


@pytest.mark.parametrize(("m", "devices"), [(4, 1), (4, 2), (9, 3), (8, 4), (16, 4), (32, 8)])
@pytest.mark.parametrize("name", THEIRS)
def test_the_order_is_that_of_pytorch(name: str, m: int, devices: int) -> None:
    other = theirs(name, m, devices)
    ours = build(name, m, other.device_of)

    def order(schedule: Schedule) -> list[list[Action | str]]:
        """Of which stage a weight half is makes no difference: nobody waits for it."""
        return [
            [a if a.kind != "backward_weight" else "W" for a in row] for row in schedule.actions
        ]

    assert order(ours) == order(other)
    costs = Costs.even(ours.n)
    assert simulate(ours, costs).makespan == simulate(other, costs).makespan
    assert ours.in_flight_on_device == other.in_flight_on_device


@pytest.mark.parametrize("m", range(1, 7))
def test_so_is_that_of_zbv_for_few_micro_batches(m: int) -> None:
    test_the_order_is_that_of_pytorch("zbv", m, 4)
