"""How a backward divides into its halves: by what was measured, or by a guess that is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from syncpipe.balance.profile import Profile, interpolate
from syncpipe.planner.costs.chain import Chain
from syncpipe.schedules.simulation import Costs

__all__ = ["Halves"]

#: Of a layer with weights that nobody has measured: both products of a linear layer's backward have
#: as many multiplications.
_GUESS = 0.5


@dataclass(frozen=True)
class Halves:
    """For each layer what its weight half is of its backward, and what waits for it.

    Attributes:
        shares: of its backward's time.
        outputs: bytes, of the gradients of its outputs, which it keeps until then; 0 for layers
            that have nothing to put off.
        measured: whether all shares are.
    """

    shares: tuple[float, ...]
    outputs: tuple[float, ...]
    measured: bool

    @classmethod
    def of(cls, profile: Profile, samples: float) -> Halves:
        """Those of a profile, for a micro-batch of so many samples."""
        shares, outputs, measured = [], [], True
        for layer in profile.layers:
            trained = layer.parameter_bytes > layer.frozen_bytes
            share = layer.weight_share if trained else 0.0
            if share is None:
                share, measured = _GUESS, False
            shares.append(share)
            outputs.append(interpolate(layer.output_bytes, samples) if share else 0.0)
        return cls(tuple(shares), tuple(outputs), measured)

    def split(self, costs: Costs, chain: Chain, balance: Sequence[int]) -> Costs:
        """Costs of whole backwards as those of both halves."""
        back = chain.backward
        later = list(accumulate(map(float.__mul__, back, self.shares), initial=0.0))
        inputs, weights = [], []
        for whole, (i, j) in zip(
            costs.backward_input, pairwise(accumulate(balance, initial=0)), strict=True
        ):
            of = chain.backward_to[j] - chain.backward_to[i]
            weight = whole * (later[j] - later[i]) / of if of > 0 else 0.0
            weights.append(weight)
            inputs.append(max(0.0, whole - weight))
        last = costs.last and self.split(costs.last, chain, balance)
        return replace(
            costs, backward_input=tuple(inputs), backward_weight=tuple(weights), last=last
        )
