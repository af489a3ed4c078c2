"""PipeDream's planner: stages with replicas.

Each of the ``r`` replicas of a stage takes every ``r``-th micro-batch, and the replicas exchange
the gradients of their parameters. The slowest stage or link determines the time. A "2-1-1":

    device 0   | layers 0-7, micro-batches 0 2 4 .. | >
    device 1   | layers 0-7, micro-batches 1 3 5 .. | >  | layers 8-12 | > | layers 13-15 |

Sources: Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training" (2018), and
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019),
section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from syncpipe.balance.profile import Profile
from syncpipe.planner.chain import Chain, doubles

__all__ = ["least_largest", "replicated"]


def replicated(
    profile: Profile, machines: int, bandwidth: float, *, samples: int
) -> tuple[tuple[int, int, int], ...]:
    """The stages and replicas that minimize PipeDream's formula exactly.

    With ``A(i, m)`` the time for the layers from ``i`` on, on ``m`` machines::

        T(i..j, m) = 1/m max( sum T_l, 4 (m-1) sum |w_l| / (m bandwidth) )
        A(i, m) = min( T(i..L, m), min max( T(i..j, m'), 2 a_i / (bandwidth m'), A(j, m-m') ) )
                                   j, m'

    ``T_l`` is the time of forward and backward of layer ``l``, ``a_i`` the bytes of activations
    that cross the cut (gradients of the same size come back), and ``|w_l|`` the bytes of trained
    parameters. Each replica is a server for an m-th of the parameters: it sends all other
    gradients, receives its own, and does the same with the new parameters, 4 (m-1)/m of the bytes
    in total. Ties are decided by fewer stages, then by fewer bytes between stages.

    Args:
        profile: the costs of the layers. A skip counts at every cut that it crosses.
        machines: the number of machines; all are used.
        bandwidth: bytes per second of a machine's network; ``math.inf`` for no transfer time.
        samples: the samples in the mini-batch of one machine.

    Returns:
        For each stage its first layer, the layer after its last, and its number of machines.
    """
    profile = profile.of(samples)
    chain, number = Chain.of(profile, samples, 1.0), len(profile.layers)
    trained = (float(x.parameter_bytes - x.frozen_bytes) for x in profile.layers)
    work, weights = doubles(chain.sums["time"]), doubles(accumulate(trained, initial=0.0))
    crossing = doubles([0.0, *chain.inputs[1:number]])
    for stash, pop, size in chain.skips:
        crossing[stash + 1 : pop + 1] += size

    def cost(m: int) -> Tensor:
        """The time of stages on ``m`` machines: the longest of computing, exchange, transfer."""
        exchanged = 4 * (m - 1) * (weights - weights[:-1, None]) / (m * bandwidth) / m
        sent = 2 * crossing[:, None] / (bandwidth * m)
        return torch.maximum(torch.maximum((work - work[:-1, None]) / m, exchanged), sent)

    costs = [cost(m) for m in range(1, machines + 1)]
    least, _ = least_largest(number, machines, machines, lambda _, m: costs[m - 1])
    # Among costs that are equal up to rounding: the fewest stages, and then the fewest bytes.
    limit = least * (1 + 1e-12)
    each = 1 + crossing[:, None] / (2 * float(crossing.sum()) or 1.0)
    counted = [each.masked_fill(cost > limit, math.inf) for cost in costs]
    _, stages = least_largest(
        number, machines, machines, lambda _, m: counted[m - 1], lambda own, after, _: own + after
    )
    return stages


def least_largest(
    layers: int, devices: int, width: int, cost: Callable[[int, int], Tensor],
    both: Callable[[Tensor, Tensor, int], Tensor] = lambda own, after, _: torch.maximum(own, after),
) -> tuple[float, tuple[tuple[int, int, int], ...]]:  # fmt: skip
    """The cut whose most costly stage costs least, with all devices in use.

    Args:
        layers: the number of layers, ``L``.
        devices: the number of devices.
        width: the most devices that may share a stage.
        cost: called with the number of devices left where a stage begins and the number of devices
            of the stage; gives the costs of layers ``[i, j)`` as a tensor ``[L, L + 1]``.
        both: combines the cost of a stage and that of the stages after it, given the number of
            devices left where the stage begins.

    Returns:
        The cost, and for each stage its first layer, its end and its number of devices; no stages
        if the cost is infinite.
    """
    empty = torch.ones(layers, layers + 1).tril().bool()
    none = torch.full((layers + 1,), math.inf, dtype=torch.float64)
    table, went = [none.index_fill(0, torch.tensor([layers]), 0.0)], [(none, none)]
    for k in range(1, devices + 1):
        best, end, used = none.clone(), none.clone(), none.clone()
        for d in range(1, min(k, width) + 1):
            own = cost(k, d).masked_fill(empty, math.inf)
            value, at = both(own, table[k - d], k).min(1)
            better = value < best[:-1]
            best[:-1] = torch.where(better, value, best[:-1])
            end[:-1] = torch.where(better, at, end[:-1])
            used[:-1] = torch.where(better, d, used[:-1])
        table.append(best)
        went.append((end, used))
    least, found, i, k = float(table[devices][0]), list[tuple[int, int, int]](), 0, devices
    while i < layers and least < math.inf:
        j, r = (int(column[i]) for column in went[k])
        found.append((i, j, r))
        i, k = j, k - r
    return least, tuple(found)
