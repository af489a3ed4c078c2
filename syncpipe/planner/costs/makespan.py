"""How long a pipeline takes, in a tenth of the simulator's time: just the number."""

from __future__ import annotations

from collections.abc import Sequence

from syncpipe.schedules.simulation import Costs

__all__ = ["makespan"]


def makespan(
    m: int, slots: Sequence[int] | None, costs: Costs, recomputes: Sequence[bool]
) -> float:
    """What :func:`~syncpipe.schedules.simulation.simulate` says, but without skips.

    Args:
        m: number of micro-batches.
        slots: for 1F1B; None for GPipe.
        costs: of the stages, each on its own device.
        recomputes: for each stage whether it does.
    """
    n, last = len(costs.forward), m - 1
    rows = [_row(m, None if slots is None else min(m, slots[s])) for s in range(n)]
    first = m - 1 if slots is None else m  # so many micro-batches are recomputed
    there = [[0.0] * m] + [[-1.0] * m for _ in range(n - 1)]  # when inputs arrive; < 0: not yet
    back = [[-1.0] * m for _ in range(n - 1)] + [[0.0] * m]  # and gradients
    position, free = [0] * n, [0.0] * n
    link, link_back = [0.0] * n, [0.0] * n
    usual, smaller = _times(costs, recomputes), _times(costs.last or costs, recomputes)
    over, s, step = 0, 0, 1
    while over < n:
        row, now, k = rows[s], free[s], position[s]
        large, small = usual[s], smaller[s]
        mine, gradients = there[s], back[s]
        while k < len(row):
            i = row[k]
            if i >= 0:
                if mine[i] < 0:
                    break
                f, _, _, way, _ = large if i < last else small
                now = max(now, mine[i]) + f
                if s + 1 < n:
                    link[s] = max(now, link[s]) + way
                    there[s + 1][i] = link[s]
            else:
                i = ~i
                if gradients[i] < 0:
                    break
                _, b, again, _, way = large if i < last else small
                ready = now + again if i < first else now
                now = max(ready, gradients[i]) + b
                if s > 0:
                    link_back[s] = max(now, link_back[s]) + way
                    back[s - 1][i] = link_back[s]
            k += 1
        if k == len(row) and position[s] < k:
            over += 1
        position[s], free[s] = k, now
        if not 0 <= s + step < n:
            step = -step
        s = min(max(s + step, 0), n - 1)
    return max(free)


def _times(costs: Costs, recomputes: Sequence[bool]) -> list[tuple[float, ...]]:
    """For each stage forward, backward, recomputation, and the ways to the right and to the left."""
    ways = (0.0, *costs.transfer, 0.0)
    return [
        (
            costs.forward[s],
            costs.backward_input[s] + costs.backward_weight[s],
            costs.recompute[s] if again else 0.0,
            ways[s + 1],
            ways[s],
        )
        for s, again in enumerate(recomputes)
    ]


def _row(m: int, q: int | None) -> list[int]:
    """What a device does: ``i`` is a forward, ``~i`` a backward."""
    if q is None:
        return [*range(m), *(~i for i in reversed(range(m)))]
    row = list(range(q))
    for i in range(m):
        row.append(~i)
        if i + q < m:
            row.append(i + q)
    return row
