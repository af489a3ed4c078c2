"""Cuts that are not the best ones, to show beside a plan what they would cost.

Pure Python. Nothing here decides anything: people come from libraries that cut like this, and a
plan says how much slower their cut would be.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["block_partitions", "even_split"]


def even_split(layers: int, n: int) -> tuple[int, ...]:
    """Equal numbers of layers; where that does not come out even, the first ones get one more.

    Args:
        layers: how many there are.
        n: the number of stages.

    Returns:
        The balance: how many layers each stage gets.

    Raises:
        ValueError: fewer layers than stages, or no stage at all.
    """
    _check_stages(layers, n)
    return tuple(layers // n + (j < layers % n) for j in range(n))


def block_partitions(cost: Sequence[float], n: int) -> tuple[int, ...]:
    """The balance that torchgpipe's ``balance_cost`` would choose.

    The algorithm comes from Imre Bárány et al., "Block Partitions of Sequences"
    (https://arxiv.org/abs/1308.2452). Costs are mapped to [0, 1]. While the largest and the
    smallest block differ by more than 1, the smallest is given the layer at its border that lies on
    the way to the largest::

        | a b c d | e f | g h |        largest: the first, smallest: the last
        | a b c d | e | f g h |        the layer moves one block to the right
                      <-

    What it ends with differs by at most the largest layer, which says little where there are few
    layers for each stage: the largest block can be several times that of the best cut.

    The steps are torchgpipe's, one for one, and so are the cuts, wherever it has an answer. With
    many equal costs it may have none: a block that is empty gives a layer all the same, borders
    cross, and in the end a stage has no layers, or borders run out of the sequence for ever. Then
    this stops, and moves borders just so far that each stage has a layer.

    Args:
        cost: of each layer; finite numbers.
        n: the number of stages.

    Raises:
        ValueError: a cost that is no finite number, fewer layers than stages, or no stage at all.
    """
    _check_stages(len(cost), n)
    for layer, number in enumerate(cost):
        if not math.isfinite(number):
            raise ValueError(f"cost[{layer}] is {number!r}; costs are finite numbers")
    least, spread = min(cost), max(cost) - min(cost)
    scaled = [(number - least) / spread if spread else 0.0 for number in cost]

    # Block j has the layers from border j to border j + 1.
    borders = [len(cost) // n * j for j in range(n)] + [len(cost)]
    sizes = [sum(scaled[a:b]) for a, b in pairwise(borders)]
    largest = _largest(sizes)
    size = sizes[largest]
    # It takes a fraction of layers x stages steps, and leaves the sequence when it will not end.
    for _ in range(len(cost) ** 2 * n):
        smallest = min(range(n), key=sizes.__getitem__)
        if size <= sizes[smallest] + 1:
            break
        giver, border, move = smallest + 1, smallest + 1, 1
        if largest < smallest:
            giver, border, move = smallest - 1, smallest, -1
        borders[border] += move
        if not 0 <= borders[border] <= len(cost):
            break
        for j in (giver, smallest):  # summed anew: differences would round otherwise
            sizes[j] = sum(scaled[borders[j] : borders[j + 1]])
        if giver == largest:
            largest = _largest(sizes)
            size = sizes[largest]
    return _repaired(borders)


def _largest(sizes: Sequence[float]) -> int:
    """The last of the largest blocks, as torchgpipe's comparison of pairs gives it."""
    return max(range(len(sizes)), key=lambda j: (sizes[j], j))


def _repaired(borders: Sequence[int]) -> tuple[int, ...]:
    """The blocks between borders, each with at least one layer."""
    n, layers = len(borders) - 1, borders[-1]
    moved = [0]
    for j in range(1, n):
        moved.append(min(max(borders[j], moved[-1] + 1), layers - (n - j)))
    moved.append(layers)
    return tuple(b - a for a, b in pairwise(moved))


def _check_stages(layers: int, n: int) -> None:
    if operator.index(n) < 1:
        raise ValueError(f"n={n}: there is at least one stage")
    if layers < n:
        raise ValueError(f"{layers} layers cannot be cut into {n} stages; use at most {layers}")
