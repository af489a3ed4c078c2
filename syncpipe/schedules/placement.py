"""Where the stages are: what all schedules are given, the layouts that some want, and how orders of
stages become one order for each device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Literal

from syncpipe.schedules.kinds import KINDS
from syncpipe.schedules.lister import Node, Work, edges_of, listed
from syncpipe.schedules.player import Costs
from syncpipe.schedules.schedule import Action, Devices, Schedule, device_count, devices_of

__all__ = [
    "Placement",
    "dealt",
    "laid_out",
    "merged",
    "placed",
    "replicas_of",
]

#: A number of stages, each on a device of its own; or for each stage the index of its device, or
#: those of its replicas in a tuple.
Placement = int | Sequence[int] | Devices


def placed(m: int, device_of: Placement) -> Devices:
    """The devices of each stage, checked.

    Raises:
        ValueError: if there is no micro-batch, or a device has no stage.
    """
    devices = tuple(range(device_of)) if isinstance(device_of, int) else tuple(device_of)
    if m < 1:
        raise ValueError(f"a schedule needs at least one micro-batch, but m={m}")
    there = set(chain.from_iterable(devices_of(devices, j) for j in range(len(devices))))
    if not there or there != set(range(max(there) + 1)):
        raise ValueError(
            f"device_of={device_of} must name, for each stage, one of the devices 0, 1, ..., and "
            "each of these at least once"
        )
    return devices


def replicas_of(device_of: Devices) -> list[int]:
    """For each stage how many devices serve it."""
    return [len(devices_of(device_of, j)) for j in range(len(device_of))]


def laid_out(
    name: str, shape: Literal["rounds", "v"], m: int, device_of: Placement
) -> tuple[int, ...]:
    """As :func:`placed`, for stages on one device each that go round, 0, 1, ..., and again from 0;
    or in a V, two on each device, 0, 1, ..., and back to 0.

    Raises:
        ValueError: if one has replicas, or they are elsewhere, with a layout that does.
    """
    devices = placed(m, device_of)
    single = tuple([device for device in devices if isinstance(device, int)])
    for j, device in enumerate(devices):
        if isinstance(device, tuple):
            raise ValueError(
                f"{name} is made for stages on one device each, but stage {j} is on {device}: make "
                "it for one of them, and deal that by syncpipe.schedules.dealt(schedule, device_of)"
            )
    line = tuple(range(max(single) + 1))
    wanted = line + line[::-1] if shape == "v" else line * (len(single) // len(line))
    if single != wanted:
        where = (
            f"two stages on each device, which go there and back; on {len(line)} devices that is"
        )
        if shape == "rounds":
            wanted, where = line * 2, "stages that go round the devices evenly, such as"
        raise ValueError(
            f"{name} needs {where} devices={list(wanted)}, but device_of={list(single)}"
        )
    return single


@lru_cache(maxsize=128)
def dealt(schedule: Schedule, device_of: Devices) -> Schedule:
    """Deals a schedule out to replicas: each takes every ``r``-th micro-batch, in the same order.

    What can be done in one order can be done by more hands in the same order.

    Args:
        schedule: a valid one. Stages that are on one device have the same replicas, too.
        device_of: for each stage the index of its device, or of those of its replicas.
    """
    return merged(schedule.name, schedule.m, device_of, schedule.actions)


def merged(
    name: str,
    m: int,
    device_of: Devices,
    orders: Iterable[Sequence[Action]],
    limit: float = float("inf"),
) -> Schedule:
    """Merges orders into one for each device, as if whoever is free took the most urgent action.

    A forward takes one unit of time, and so does half a backward; transfers take none.

    Args:
        name: of the schedule.
        m: number of micro-batches.
        device_of: for each stage the index of its device, or of those of its replicas.
        orders: of actions that together can be carried out, if each of them has a device of its
            own. Each stays as it is; what is for several devices is taken apart.
        limit: so many cells may be in flight on a device. Not less than the orders need.
    """
    whole = Schedule(m, device_of, (), name)
    lists: list[list[list[Action]]] = [[] for _ in range(device_count(device_of))]
    for order in orders:
        own: dict[int, list[Action]] = {}
        for action in order:
            own.setdefault(whole.device(action.i, action.j), []).append(action)
        for d, actions in own.items():
            lists[d].append(actions)
    if all(len(some) == 1 for some in lists):
        return Schedule(m, device_of, tuple(tuple(some[0]) for some in lists), name)
    n = whole.n
    actions_of: dict[Node, Action] = {}
    tables = [[[0.0] * m for _ in range(3 * n)] for _ in range(4)]
    times, takes, gives, urgencies = tables
    for action in chain.from_iterable(chain.from_iterable(lists)):
        kind, i, j = action
        c = {"forward": 0, "backward_weight": 2}.get(kind, 1) * n + j
        actions_of[c, i] = action
        times[c][i] = len(KINDS[kind].takes)
        takes[c][i], gives[c][i] = max(0, KINDS[kind].alive), max(0, -KINDS[kind].alive)
        # What brings gradients on, and then whatever is nearest to the end of its way.
        urgencies[c][i] = KINDS[kind].urgency * n + (n - 1 - j if kind == "forward" else j)
    nodes = {action: node for node, action in actions_of.items()}
    work = Work(
        [[[nodes[action] for action in own] for own in some] for some in lists],
        edges_of(Costs.even(n)),
        [devices_of(device_of, j) for j in range(n)] * 3,
        times,
        [[0.0] * m] * (3 * n),
        takes,
        gives,
        [0.0] * (3 * n),
        [limit] * len(lists),
    )
    found = listed(work, urgencies)
    assert found is not None, "the orders wait for each other"
    rows = [tuple([actions_of[node] for node in row]) for row in found.rows]
    return Schedule(m, device_of, tuple(rows), name)
