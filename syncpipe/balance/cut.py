"""The best cut of a chain of layers into stages, exactly.

Pure Python. Costs are made whole numbers first (a float is one times a power of two), so that sums
are exact and nothing is lost to rounding.

The largest stage: a bound is possible if stages that are each filled up to it, from the left, are
enough; the smallest possible bound is found by bisection.

Among the cuts that reach it, the rest is the most even where the squares of the stages' costs have
the smallest sum. A dynamic program over (stage, border) finds it, and looks only at borders that
can be part of such a cut::

    stages, each filled up to the bound      the border after stage k is somewhere
      from the left     |----|----|---|-|    between the two, and where the squares of both
      from the right    |-|---|----|----|    sides can still beat the best cut known so far
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

#: So many borders are tried at a time. Where more are possible, first some of them are, then those
#: around the best; that is not always the best of all.
_MOST_BORDERS = 100_000


def balance_cost(cost: Iterable[float], partitions: int) -> list[int]:
    """Cuts a chain of layers so that the largest stage costs as little as possible.

    The minimum is exact. Among the cuts that reach it, it is the one with the most even rest: the
    sum of squares of all stages' costs is the smallest. (Only where thousands of layers leave more
    than 100,000 places for borders, a few giants among many small layers, that sum is nearly the
    smallest.) A layer that costs nothing stays with the one before it, where there is a choice.

    Args:
        cost: of each layer, in any unit; whole numbers or floats, not negative.
        partitions: number of stages.

    Returns:
        For each stage the number of its layers, at least 1.

    Raises:
        ValueError: if there are fewer layers than stages, or a cost is no number or negative.
    """
    costs, n = _checked(cost, partitions)
    sums = [0, *accumulate(_whole(costs))]
    bound = _smallest_bound(sums, n)
    borders = _evened(sums, _filled(sums, n, bound), bound)
    windows = _windows(sums, borders, bound)
    step = 0
    while step != 1:
        step = -(-sum(map(len, windows)) // _MOST_BORDERS)
        borders = _most_even(sums, _tried(sums, windows, borders, step), bound)
        windows = [
            range(max(window[0], border - step), min(window[-1], border + step) + 1)
            for window, border in zip(windows, borders, strict=True)
        ]
    return [b - a for a, b in pairwise(borders)]


def _checked(cost: Iterable[Any], partitions: Any) -> tuple[list[Fraction], int]:
    """The costs, exactly, and the number of stages."""
    costs = list(cost)
    n = -1 if isinstance(partitions, bool) else _index(partitions)
    if n < 1:
        raise ValueError(f"partitions={partitions!r}: must be a whole number, at least 1")
    if len(costs) < n:
        raise ValueError(
            f"partitions={n}, but there are only {len(costs)} layers: every partition needs one, "
            f"so ask for at most {len(costs)}"
        )
    exact = [_exact(number) for number in costs]
    for index, number in enumerate(exact):
        if number is None or number < 0:
            raise ValueError(f"cost[{index}]={costs[index]}: costs are finite and not negative")
    return [number for number in exact if number is not None], n


def _exact(number: Any) -> Fraction | None:
    """A number of any library as one of Python's; None if it is not finite."""
    try:
        return Fraction(operator.index(number))
    except TypeError:
        pass
    try:
        return Fraction(number)
    except (ValueError, OverflowError):
        return None
    except TypeError:
        other = float(number)
        return Fraction(other) if math.isfinite(other) else None


def _index(number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        return -1


def _whole(costs: list[Fraction]) -> list[int]:
    """The same costs as whole numbers, in a smaller unit."""
    unit = math.lcm(*{number.denominator for number in costs})
    return [number.numerator * (unit // number.denominator) for number in costs]


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


def _evened(sums: list[int], borders: list[int], bound: int) -> list[int]:
    """Moves borders to the middle between their neighbours, until none moves any more."""
    n = len(borders) - 1
    moved = True
    sweeps = 0
    while moved and sweeps < 50:
        moved = False
        sweeps += 1
        for k in [*range(n - 1, 0, -1), *range(1, n)]:
            left, right = borders[k - 1], borders[k + 1]
            low = max(bisect_left(sums, sums[right] - bound, left + 1, right - 1), left + 1)
            high = min(bisect_right(sums, sums[left] + bound, left + 1, right) - 1, right - 1)
            middle = sums[left] + sums[right]
            at = bisect_left(sums, middle, low, high + 1, key=lambda total: 2 * total)
            best = min(
                (b for b in (borders[k], at - 1, at) if low <= b <= high),
                key=lambda b: abs(2 * sums[b] - middle),
            )
            if abs(2 * sums[best] - middle) < abs(2 * sums[borders[k]] - middle):
                borders[k] = best
                moved = True
    return borders


def _windows(sums: list[int], known: list[int], bound: int) -> list[range]:
    """For each border the places where a cut at least as even can have it.

    With ``x`` to the left of the border after ``k`` of ``n`` stages and ``t`` in all, the squares
    are at least ``x^2 / k + (t - x)^2 / (n - k)``. That is no more than those of the known cut
    where ``(n x - k t)^2 <= k (n - k) (n squares - t^2)``.
    """
    n, total = len(known) - 1, sums[-1]
    slack = n * _squares(sums, known) - total**2
    lows, highs = _emptied(sums, n, bound), _filled(sums, n, bound)
    for k in range(1, n):
        reach = math.isqrt(k * (n - k) * slack)
        scaled = lows[k], highs[k] + 1
        first = bisect_left(sums, k * total - reach, *scaled, key=lambda x: n * x)
        last = bisect_right(sums, k * total + reach, *scaled, key=lambda x: n * x) - 1
        lows[k], highs[k] = first, last
    return [range(low, high + 1) for low, high in zip(lows, highs, strict=True)]


def _tried(
    sums: list[int], windows: list[range], known: list[int], step: int
) -> list[Sequence[int]]:
    """One place of each window in so many, those of a known cut, and the edges of large layers."""
    if step == 1:
        return list(windows)
    large = sorted(range(len(sums) - 1), key=lambda layer: sums[layer] - sums[layer + 1])[:32]
    edges = {edge for layer in large for edge in (layer, layer + 1)}
    return [
        sorted({*window[::step], window[-1], border, *(e for e in edges if e in window)})
        for window, border in zip(windows, known, strict=True)
    ]


def _squares(sums: list[int], borders: list[int]) -> int:
    return sum((sums[b] - sums[a]) ** 2 for a, b in pairwise(borders))


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
