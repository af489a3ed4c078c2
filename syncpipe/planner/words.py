"""How times and tables are told."""

from __future__ import annotations

from collections.abc import Container, Sequence

__all__ = ["columns", "duration"]


def duration(seconds: float) -> str:
    """Three digits and a unit: 12.3 ms."""
    for unit, one in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= one * 0.9995 or unit == "us":
            value = seconds / one
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    raise AssertionError


def columns(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Lines whose cells stand below each other, to the right but for those of some columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
