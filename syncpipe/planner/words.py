"""How times, counts, layers and tables are told."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

__all__ = ["columns", "count", "duration", "layers_named", "listed", "memory_of"]

from syncpipe.balance.profile import in_bytes


def duration(seconds: float) -> str:
    """Three digits and a unit: 12.3 ms."""
    unit, one = next(
        ((unit, one) for unit, one in (("s", 1.0), ("ms", 1e-3)) if seconds >= one * 0.9995),
        ("us", 1e-6),
    )
    value = seconds / one
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


def count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def memory_of(memory: float, limit: float) -> str:
    """Bytes, and what part of the limit they are, if there is one."""
    if math.isinf(limit):
        return in_bytes(memory)
    return f"{in_bytes(memory)} of {in_bytes(limit)} ({memory / limit:.0%})"


def layers_named(names: Sequence[str]) -> str:
    """The first and the last of them, and how many there are."""
    short = []
    for name in (names[0], names[-1]):
        name = name if name.isprintable() else repr(name)[1:-1]
        short.append(name if len(name) <= 24 else f"{name[:11]}..{name[-11:]}")
    return f"{short[0]} to {short[1]} ({len(names)})" if len(names) > 1 else short[0]


def listed(balance: Sequence[int]) -> str:
    """A balance, the middle of a long one left out."""
    if len(balance) <= 16:
        return str(list(balance))
    first, last = (", ".join(map(str, part)) for part in (balance[:8], balance[-4:]))
    return f"[{first}, .., {last}]"


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
