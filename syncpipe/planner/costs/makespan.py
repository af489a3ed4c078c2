"""How long a pipeline takes, in a tenth of the simulator's time: just the number."""

from __future__ import annotations

from collections.abc import Sequence

from syncpipe.schedules.simulation import Costs

__all__ = ["makespan"]

#: Forward, backward, recomputation, and the ways to the right and to the left.
_Times = tuple[float, float, float, float, float]


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
    n = len(costs.forward)
    # When inputs and gradients arrive, in the order in which they do.
    there: list[list[float]] = [[0.0] * m] + [[] for _ in range(n - 1)]
    back: list[list[float]] = [[] for _ in range(n - 1)] + [[0.0] * m]
    usual, smaller = _times(costs, recomputes), _times(costs.last or costs, recomputes)
    # Under GPipe the last micro-batch goes back first, and is not recomputed.
    odd = 0 if slots is None else m - 1
    forwards, backwards, free = [0] * n, [0] * n, [0.0] * n
    link, link_back = [0.0] * n, [0.0] * n
    left, s, step = n, 0, 1
    while left:
        done, over, now = forwards[s], backwards[s], free[s]
        q = m if slots is None else slots[s]
        f, b, again, way, way_back = usual[s]
        inputs, gradients = there[s], back[s]
        here, gone, gone_back = len(inputs), link[s], link_back[s]
        returned = len(gradients)
        sent = there[s + 1] if s + 1 < n else None
        sent_back = back[s - 1] if s else None
        unfinished = over < m
        while over < m:
            if done < m and done - over < q:
                if done == here:
                    break
                if done == m - 1:
                    f, _, _, way, _ = smaller[s]
                ready = inputs[done]
                now = (ready if ready > now else now) + f
                if sent is not None:
                    gone = (now if now > gone else gone) + way
                    sent.append(gone)
                done += 1
            else:
                if over == returned:
                    break
                if over == odd:
                    _, b, again, _, way_back = smaller[s]
                    again = 0.0 if slots is None else again
                now += again
                ready = gradients[over]
                now = (ready if ready > now else now) + b
                if sent_back is not None:
                    gone_back = (now if now > gone_back else gone_back) + way_back
                    sent_back.append(gone_back)
                if over == odd:
                    _, b, again, _, way_back = usual[s]
                over += 1
        if unfinished and over == m:
            left -= 1
        forwards[s], backwards[s], free[s] = done, over, now
        link[s], link_back[s] = gone, gone_back
        if not 0 <= s + step < n:
            step = -step
        s = min(max(s + step, 0), n - 1)
    return max(free)


def _times(costs: Costs, recomputes: Sequence[bool]) -> list[_Times]:
    """For each stage."""
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
