"""The static layout of skips: from which stage to which stage each of them travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .namespace import SkipKey
from .walk import layer_skips


@dataclass(frozen=True)
class SkipLayout:
    """The skips that cross from one partition to another; all others stay inside one.

    Attributes:
        incoming: for each stage, the skips that it pops, with the stage that stashes them.
        outgoing: for each stage, the skips that it stashes, with the stage that pops them.
    """

    incoming: tuple[dict[SkipKey, int], ...]
    outgoing: tuple[dict[SkipKey, int], ...]


def inspect_layout(partitions: Sequence[nn.Sequential | Sequence[nn.Module]]) -> SkipLayout:
    """Works out which skips travel between which partitions.

    Args:
        partitions: runs of layers, in the order of the stages. Together they have to be free of
            the faults that :func:`verify_skippables` reports.
    """
    incoming: list[dict[SkipKey, int]] = [{} for _ in partitions]
    outgoing: list[dict[SkipKey, int]] = [{} for _ in partitions]
    source: dict[SkipKey, int] = {}
    for stage, partition in enumerate(partitions):
        for layer in partition:
            skips = layer_skips(layer)
            for key in skips.popped:
                if source[key] != stage:
                    incoming[stage][key] = source[key]
                    outgoing[source[key]][key] = stage
            source.update(dict.fromkeys(skips.stashed, stage))
    return SkipLayout(tuple(incoming), tuple(outgoing))
