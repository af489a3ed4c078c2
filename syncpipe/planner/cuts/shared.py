"""The tables of PipeDream's planner: cuts for stages that share several machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from syncpipe.balance.profile import Profile, interpolate

__all__ = ["SharedCosts", "least_times", "stages_within"]


class SharedCosts:
    """The times of PipeDream's formula, as :func:`syncpipe.planner.replicas.replicated` has it.

    Layers are counted from 0, and ``j`` is the one after the last. ``i``, ``cut`` and ``m`` are
    numbers, or a slice and a column of numbers, for tables of all of them.
    """

    def __init__(self, profile: Profile, bandwidth: float, samples: int) -> None:
        self.layers = len(profile.layers)
        self._bandwidth = bandwidth
        times = [
            interpolate(layer.forward, samples) + interpolate(layer.backward, samples)
            for layer in profile.layers
        ]
        weights = [layer.parameter_bytes - layer.frozen_bytes for layer in profile.layers]
        self._times = _doubles(list(accumulate(times, initial=0.0)))
        self._weights = _doubles(list(accumulate(weights, initial=0)))
        #: Bytes that cross the cut before each layer; nothing before the first.
        self.bytes = _doubles(
            [0.0, *(interpolate(x.output_bytes, samples) for x in profile.layers[:-1])]
        )
        for skip in profile.skips:
            self.bytes[skip.stash + 1 : skip.pop + 1] += interpolate(skip.bytes, samples)

    def compute(self, i: int | slice, j: int, m: int | Tensor) -> Tensor:
        """Seconds of the layers' forward and backward, shared by ``m`` machines."""
        return (self._times[j] - self._times[i]) / m

    def synchronization(self, i: int | slice, j: int, m: int | Tensor) -> Tensor:
        """Seconds in which ``m`` machines add up the gradients of the layers."""
        return 4 * (m - 1) * self.weights(i, j) / (m * self._bandwidth) / m

    def weights(self, i: int | slice, j: int) -> Tensor:
        """Bytes of the parameters that are trained."""
        return self._weights[j] - self._weights[i]

    def transfer(self, cut: int | slice, m: int | Tensor) -> Tensor:
        """Seconds to send activations over a cut to ``m`` machines, and gradients back."""
        return 2 * self.bytes[cut] / (self._bandwidth * m)

    def stage(self, i: int | slice, j: int, m: int | Tensor) -> Tensor:
        """T(i..j, m)."""
        return torch.maximum(self.compute(i, j, m), self.synchronization(i, j, m))


def _doubles(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class _Shares:
    """All ways to share machines out, some to the last stage, the rest to those before it.

    Args:
        machines: at most so many in all.

    Attributes:
        all: numbers of machines from 1, as a column.
        last: machines of the last stage, ``[ways]``.
        rest: those of the others, ``[ways]``.
    """

    def __init__(self, machines: int) -> None:
        self.all = _doubles(range(1, machines + 1))[:, None]
        ways = [(last, m - last) for m in range(2, machines + 1) for last in range(1, m)]
        self.last, self.rest = torch.tensor(ways, dtype=torch.int64).reshape(-1, 2).T
        self._sum = self.last + self.rest

    def least(self, of: Tensor, whole: Tensor) -> Tensor:
        """The least for each number of machines, ``[machines + 1]``.

        Args:
            of: for each way and each cut, ``[ways, cuts]``.
            whole: without a cut, ``[machines + 1]``.
        """
        return whole.scatter_reduce(0, self._sum, of.amin(-1), "amin") if of.numel() else whole

    def each(self, of: Tensor) -> Tensor:
        """What there is for the machines of each way, ``[ways, 1]``."""
        return of[self._sum][:, None]


def least_times(costs: SharedCosts, machines: int) -> list[list[float]]:
    """A(j, m), as ``table[m][j]`` for all ``m`` from 1."""
    shares = _Shares(machines)
    transfers = costs.transfer(slice(None), shares.all)
    table = torch.full((machines + 1, costs.layers + 1), math.inf, dtype=torch.float64)
    for j in range(1, costs.layers + 1):
        stage = costs.stage(slice(j), j, shares.all)
        table[1:, j] = stage[:, 0]
        before = torch.maximum(table[shares.rest, 1:j], transfers[shares.last - 1, 1:j])
        parts = torch.maximum(before, stage[shares.last - 1, 1:])
        table[:, j] = shares.least(parts, table[:, j])
    return cast("list[list[float]]", table.tolist())


def stages_within(
    costs: SharedCosts, machines: int, limit: float
) -> tuple[tuple[int, int, int], ...]:
    """Stages of which none takes longer: the fewest, then the fewest bytes between them."""
    L, shares = costs.layers, _Shares(machines)
    fast = costs.transfer(slice(None), shares.all) <= limit
    # For machines and layers: stages, bytes, and of the last stage its first layer and machines.
    chosen = torch.full((4, machines + 1, L + 1), math.inf, dtype=torch.float64)
    count, size, _, _ = chosen
    alone = [_doubles([1]), _doubles([0]), _doubles([0]), _doubles(range(machines + 1))]
    for j in range(1, L + 1):
        within = costs.stage(slice(j), j, shares.all) <= limit
        whole = torch.cat([torch.tensor([False]), within[:, 0]])
        cut = (within & fast[:, :j])[shares.last - 1, 1:]
        parts = [
            count[shares.rest, 1:j] + 1,
            size[shares.rest, 1:j] + costs.bytes[1:j],
            _doubles(range(1, j)),
            shares.last[:, None].double(),
        ]
        # The first table decides; where it does not, the next one does.
        for table, single, several in zip(chosen, alone, parts, strict=True):
            one, some = single.where(whole, math.inf), several.where(cut, math.inf)
            least = table[:, j] = shares.least(some, one)
            whole, cut = whole & (one == least), cut & (some == shares.each(least))
    found: list[tuple[int, int, int]] = []
    j, m = L, machines
    while j:
        first, last = (int(chosen[k, m, j]) for k in (2, 3))
        found.append((first, j, last))
        j, m = first, m - last
    return tuple(reversed(found))
