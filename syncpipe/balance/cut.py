"""The best cut of a chain of layers into stages.

Pure Python. Costs are made whole numbers first (a float is one times a power of two), so that sums
are exact and nothing is lost to rounding.

The largest stage: a bound is possible if stages that are each filled up to it, from the left, are
enough; the smallest possible bound is found by bisection.

Among the cuts that reach it, the rest is the most even where the squares of the stages' costs have
the smallest sum. A dynamic program over (stage, border) finds it, in a window for each border::

    stages, each filled up to the bound      the border after stage k is somewhere
      from the left     |----|----|---|-|    between the two
      from the right    |-|---|----|----|
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

__all__ = ["balance_cost"]

#: So many places are tried at a time. Where windows have more, first some of them are, then those
#: around the best.
_MOST_PLACES = 100_000


def balance_cost(cost: Iterable[float], partitions: int) -> list[int]:
    """Cut a chain of layers so that the largest stage costs as little as possible.

    The minimum is exact. Among the cuts that reach it, it is the one with the most even rest: the
    sum of squares of all stages' costs is the smallest. (Only where thousands of layers leave more
    than 100,000 places for borders, that sum is nearly the smallest.) A layer that costs nothing
    stays with the one before it, where there is a choice.

    Args:
        cost: of each layer, in any unit; whole numbers or floats, not negative.
        partitions: number of stages.

    Returns:
        For each stage the number of its layers, at least 1.

    Raises:
        ValueError: if there are fewer layers than stages, or a cost is no number or negative.
    """
    costs, n = _checked(cost, partitions)
    unit = math.lcm(*{number.denominator for number in costs})
    sums = [0, *accumulate(number.numerator * (unit // number.denominator) for number in costs)]
    bound = _smallest_bound(sums, n)
    borders, lows = _filled(sums, n, bound), _emptied(sums, n, bound)
    windows = [range(low, high + 1) for low, high in zip(lows, borders, strict=True)]
    large = sorted(range(len(costs)), key=costs.__getitem__)[-32:]
    edges = sorted({edge for layer in large for edge in (layer, layer + 1)})
    step = 0
    while step != 1:
        step = -(-sum(map(len, windows)) // _MOST_PLACES)
        tried: list[Sequence[int]] = [
            sorted({*window[::step], window[-1], border, *(e for e in edges if e in window)})
            for window, border in zip(windows, borders, strict=True)
        ]
        borders = _most_even(sums, tried, bound)
        windows = [
            range(max(window[0], border - step), min(window[-1], border + step) + 1)
            for window, border in zip(windows, borders, strict=True)
        ]
    return [b - a for a, b in pairwise(borders)]


def _checked(cost: Iterable[Any], partitions: Any) -> tuple[list[Fraction], int]:
    """The costs, exactly, and the number of stages."""
    costs = list(cost)
    whole = hasattr(partitions, "__index__") and not isinstance(partitions, bool)
    n = operator.index(partitions) if whole else -1
    if n < 1:
        raise ValueError(f"partitions={partitions!r}: must be a whole number, at least 1")
    if len(costs) < n:
        raise ValueError(
            f"partitions={n}, but there are only {len(costs)} layers: every partition needs one, "
            f"so ask for at most {len(costs)}"
        )
    exact = [_exact(number) for number in costs]
    for index, number in enumerate(exact):
        if number < 0:
            raise ValueError(f"cost[{index}]={costs[index]}: costs are finite and not negative")
    return exact, n


def _exact(number: Any) -> Fraction:
    """A number of any library as one of Python's; -1 if it is not finite."""
    for kind in (operator.index, Fraction, float):
        try:
            return Fraction(kind(number))
        except (ValueError, OverflowError):
            return Fraction(-1)
        except TypeError:
            continue
    raise TypeError(f"a cost is {number!r}: it must be a number")


def _smallest_bound(sums: list[int], n: int) -> int:
    """The smallest cost that no stage of some cut exceeds."""
    largest = max(b - a for a, b in pairwise(sums))
    low = max(largest, -(-sums[-1] // n))
    high = -(-sums[-1] // n) + largest  # filling up to the mean, a stage ends within one layer
    while low < high:
        middle = (low + high) // 2
        if _stages(sums, middle, n) <= n:
            high = middle
        else:
            low = middle + 1
    return low


def _stages(sums: list[int], bound: int, most: int) -> int:
    """How many stages it takes if each is filled up to a bound; counts no further than needed."""
    count = end = 0
    while end < len(sums) - 1 and count <= most:
        end = bisect_right(sums, sums[end] + bound, end) - 1
        count += 1
    return count


def _filled(sums: list[int], n: int, bound: int) -> list[int]:
    """Borders of stages that are filled up to the bound from the left, none of them empty."""
    layers = len(sums) - 1
    borders = [0]
    for k in range(1, n + 1):
        end = bisect_right(sums, sums[borders[-1]] + bound, borders[-1]) - 1
        borders.append(min(end, layers - (n - k)))
    return borders


def _emptied(sums: list[int], n: int, bound: int) -> list[int]:
    """The same from the right: how far to the left each border can be."""
    borders = [len(sums) - 1]
    for k in range(n - 1, -1, -1):
        borders.append(max(bisect_left(sums, sums[borders[-1]] - bound, 0, borders[-1]), k))
    return borders[::-1]


def _most_even(sums: list[int], tried: list[Sequence[int]], bound: int) -> list[int]:
    """The borders with the smallest sum of squares, at some places and within a bound."""
    best: dict[int, int] = {0: 0}  # for each place of the border: the squares to its left
    came: list[dict[int, int]] = []  # and where the border before it is
    for places in tried[1:]:
        best, before = _next_border(sums, best, places, bound)
        came.append(before)
    borders = [len(sums) - 1]
    for before in reversed(came):
        borders.append(before[borders[-1]])
    return borders[::-1]


def _next_border(
    sums: list[int], best: dict[int, int], places: Sequence[int], bound: int
) -> tuple[dict[int, int], dict[int, int]]:
    """One step of the dynamic program.

    The further to the right a border, the further to the right the best one before it (the squares
    meet the quadrangle inequality, Yao 1980), so that halving the places leaves little to try.
    """
    squares: dict[int, int] = {}
    came: dict[int, int] = {}
    starts = sorted(best)
    todo = [(0, len(places) - 1, 0, len(starts) - 1)]
    while todo:
        first, last, low, high = todo.pop()
        if first > last:
            continue
        middle = (first + last) // 2
        b = places[middle]
        end = min(bisect_left(starts, b) - 1, high)
        begin = max(low, bisect_left(starts, sums[b] - bound, key=lambda a: sums[a]))
        found = -1
        for s in range(end, begin - 1, -1):
            value = best[starts[s]] + (sums[b] - sums[starts[s]]) ** 2
            if found < 0 or value < squares[b]:
                squares[b], found = value, s
        if found < 0:  # no stage ends here: what is possible to its left and right is open
            todo += [(first, middle - 1, low, high), (middle + 1, last, low, high)]
            continue
        came[b] = starts[found]
        todo += [(first, middle - 1, low, found), (middle + 1, last, found, high)]
    return squares, came
