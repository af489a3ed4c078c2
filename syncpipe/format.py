"""Text for times, bytes, counts and tables."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

__all__ = ["SECONDS", "columns", "count", "duration", "in_bytes", "three_digits", "time_unit"]

#: Units of time in seconds, the longest first, and units of memory, the smallest first.
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BYTES = ("B", "kB", "MB", "GB", "TB")


def time_unit(unit: str, time: float) -> tuple[float, str]:
    """A factor and a unit that turn this time into a number of 1 or more, where one does."""
    if unit not in SECONDS or not time:
        return 1.0, unit
    seconds = time * SECONDS[unit]
    best = next((name for name, one in SECONDS.items() if seconds >= 0.9995 * one), "us")
    return SECONDS[unit] / SECONDS[best], best


def three_digits(value: float) -> str:
    """The number with three significant digits, or all digits before the point."""
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


def duration(time: float, unit: str = "s") -> str:
    """A time with three digits and a unit that fits, for example 12.3 ms."""
    factor, fitting = time_unit(unit, time)
    return f"{three_digits(time * factor)} {fitting}"


def in_bytes(number: float, *, up: bool = False) -> str:
    """A size in powers of 1000, for example 12 B, 3.4 kB or 789 GB; ``up``: never rounded down."""
    unit = 0
    while abs(number) >= 999.5 and unit < len(_BYTES) - 1:
        number, unit = number / 1000, unit + 1
    digits = 0 if unit == 0 or abs(number) >= 99.5 else 1
    if up:
        number = math.ceil(number * 10**digits) / 10**digits
    return f"{number:.{digits}f} {_BYTES[unit]}"


def count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def columns(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """The lines of a table; the columns in ``left`` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
