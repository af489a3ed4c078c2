"""From several orders to one for each device, by playing them through in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from syncpipe.schedules.kinds import KINDS, Kind
from syncpipe.schedules.schedule import Action, Devices, Schedule, device_count

__all__ = ["dealt", "onto_devices", "played"]


def onto_devices(
    name: str, m: int, device_of: Devices, rows: Sequence[Sequence[tuple[Kind, int]]]
) -> Schedule:
    """Merges the orders of the stages into one for each device.

    Args:
        name: of the schedule.
        m: number of micro-batches.
        device_of: for each stage the index of its device, or of those of its replicas.
        rows: for each stage the kinds and micro-batches of its actions, in an order that works
            when each stage has a device of its own.
    """
    lists = [[Action(kind, i, j) for kind, i in row] for j, row in enumerate(rows)]
    return _merged(name, m, device_of, lists)


@lru_cache(maxsize=128)
def dealt(schedule: Schedule, device_of: Devices) -> Schedule:
    """Deals a schedule out to replicas: each takes every ``r``-th micro-batch, in the same order.

    What can be done in one order can be done by more hands in the same order.

    Args:
        schedule: a valid one. Stages that are on one device have the same replicas, too.
        device_of: for each stage the index of its device, or of those of its replicas.
    """
    return _merged(schedule.name, schedule.m, device_of, schedule.actions)


def _merged(name: str, m: int, device_of: Devices, rows: Iterable[Sequence[Action]]) -> Schedule:
    where = Schedule(m, device_of, (), name).device
    lists: list[list[Action]] = []
    for row in rows:
        hands: dict[int, list[Action]] = {}
        for action in row:
            hands.setdefault(where(action.i, action.j), []).append(action)
        lists += hands.values()
    alone: list[tuple[Action, ...]] = [()] * device_count(device_of)
    for actions in lists:
        d = where(actions[0].i, actions[0].j)
        if alone[d]:
            return played(name, m, device_of, lists)
        alone[d] = tuple(actions)
    return Schedule(m, device_of, tuple(alone), name)


def played(
    name: str,
    m: int,
    device_of: Devices,
    lists: Sequence[Sequence[Action]],
    room: int | None = None,
) -> Schedule:
    """Plays lists of actions through in time, and so makes one order for each device.

    A forward takes one unit of time, and so does half a backward. A free device takes the most
    urgent action among the next ones of its lists that can start. Whatever it takes, the order of
    each list is kept, and that in which things happened is one in which they can happen again: no
    deadlock.

    Args:
        name: of the schedule.
        m: number of micro-batches.
        device_of: for each stage the index of its device, or of those of its replicas.
        lists: any number of them for each device, which together can be carried out.
        room: so many cells may be in flight on a device, and a forward waits until there is room
            for its own. Not less than the lists need. None: any number.
    """
    rows = [list(reversed(row)) for row in lists if row]  # the next action is the last
    whole = Schedule(m, device_of, tuple(map(tuple, rows)), name)
    needs = whole.predecessors
    rows_of: list[list[list[Action]]] = [[] for _ in range(device_count(device_of))]
    for row in rows:
        rows_of[whole.device(row[0].i, row[0].j)].append(row)
    merged: list[list[Action]] = [[] for _ in rows_of]
    free_at, alive = [0] * len(merged), [0] * len(merged)
    over_at: dict[Action, int] = {}
    tick, left = 0, sum(map(len, rows))
    while left:
        for d, taken in enumerate(merged):
            if free_at[d] > tick:
                continue
            full = room is not None and alive[d] >= room
            ready = [
                row[-1]
                for row in rows_of[d]
                if row
                and not (full and row[-1].kind == "forward")
                and all(over_at.get(needed, tick + 1) <= tick for needed in needs(row[-1]))
            ]
            if ready:
                action = min(ready, key=_first)
                next(row for row in rows_of[d] if row and row[-1] == action).pop()
                taken.append(action)
                left -= 1
                alive[d] += KINDS[action.kind].alive
                free_at[d] = over_at[action] = tick + len(KINDS[action.kind].takes)
        tick += 1
        assert tick <= max(free_at), "the lists wait for each other"
    return Schedule(m, device_of, tuple(map(tuple, merged)), name)


def _first(action: Action) -> tuple[int, int]:
    """What to do first: the urgent, and then whatever is nearest to the end of its way."""
    kind, _, j = action
    return KINDS[kind].urgency, -j if kind == "forward" else j
