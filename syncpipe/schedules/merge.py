"""From an order for each stage to an order for each device, where a device has several stages."""

from __future__ import annotations

from collections.abc import Sequence

from syncpipe.schedules.kinds import KINDS, Kind
from syncpipe.schedules.schedule import Action, Schedule

__all__ = ["onto_devices"]


def onto_devices(
    name: str, m: int, device_of: tuple[int, ...], rows: Sequence[Sequence[tuple[Kind, int]]]
) -> Schedule:
    """Merges the orders of the stages into one for each device.

    The stages are played through in time, and a free device takes the most urgent action among the
    next ones of its stages that can start. Whatever it takes, the stages' own orders are kept, so
    their numbers in flight are too, and the order in which things happened is one in which they
    can happen again: no deadlock.

    Args:
        name: of the schedule.
        m: number of micro-batches.
        device_of: for each stage the index of its device.
        rows: for each stage the kinds and micro-batches of its actions, in an order that works
            when each stage has a device of its own.
    """
    lists = [[Action(kind, i, j) for kind, i in row] for j, row in enumerate(rows)]
    alone = Schedule(m, tuple(range(len(rows))), tuple(map(tuple, lists)), name)
    merged: list[list[Action]] = [[] for _ in range(max(device_of) + 1)]
    if len(merged) == len(lists):
        for j, row in enumerate(lists):
            merged[device_of[j]] = row
        return Schedule(m, device_of, tuple(map(tuple, merged)), name)
    for row in lists:
        row.reverse()  # the next action is the last
    free_at = [0] * len(merged)
    over_at: dict[Action, int] = {}
    tick, left = 0, sum(map(len, lists))
    while left:
        for d, taken in enumerate(merged):
            if free_at[d] > tick:
                continue
            ready = [
                row[-1]
                for j, row in enumerate(lists)
                if device_of[j] == d
                and row
                and all(
                    over_at.get(needed, tick + 1) <= tick for needed in alone.predecessors(row[-1])
                )
            ]
            if ready:
                action = min(ready, key=_first)
                lists[action.j].pop()
                taken.append(action)
                left -= 1
                free_at[d] = over_at[action] = tick + len(KINDS[action.kind].takes)
        tick += 1
    return Schedule(m, device_of, tuple(map(tuple, merged)), name)


def _first(action: Action) -> tuple[int, int]:
    """What to do first: the urgent, and then whatever is nearest to the end of its way."""
    kind, _, j = action
    return KINDS[kind].urgency, -j if kind == "forward" else j
