"""Devices in words: ``"8 x 16GB, 12GB/s"``, eight of 16 GB each with 12 GB/s between any two.

devices   one or more of these, with "+" between them, then a comma and a bandwidth
one       "80GB", or faster than what layers are measured on, "80GB @ 2.0"
several   "8 x 80GB", or machines with links of their own, "16 x (8 x 80GB, 300GB/s)"
"""

from __future__ import annotations

import math
import re
from typing import Any

from syncpipe.planner.costs.machine import Machine

__all__ = ["EXAMPLE", "described", "parse_bandwidth", "parse_bytes"]

EXAMPLE = "8 x 16GB, 12GB/s"
_MOST_DEVICES = 1024


def parse_bytes(text: str) -> float:
    """Bytes from text: "16GB" is 16e9, "16GiB" 16 * 2**30; B, kB, MB and TB as well.

    Case and spaces do not matter.

    Raises:
        ValueError: with the place where it cannot be read.
    """
    reader = _Reader("memory", text, "16GB")
    found = reader.size(reader.number("a number"))
    reader.end()
    return found


def parse_bandwidth(text: str) -> float:
    """Bytes per second from text: "12GB/s" is 12e9, "100Gbit/s" or "100Gb/s" 12.5e9.

    Case and spaces do not matter, but where bits and bytes differ by nothing else: "12gb/s" could
    be either, and is refused.

    Raises:
        ValueError: with the place where it cannot be read.
    """
    reader = _Reader("bandwidth", text, "12GB/s")
    found = reader.rate(reader.number("a number"))
    reader.end()
    return found


def described(text: str, bandwidth: Any) -> Machine:
    """The machine of a description.

    Args:
        text: such as ``"8 x 16GB, 12GB/s"``.
        bandwidth: given besides; then it may be missing in the text.

    Raises:
        ValueError: with the place where it cannot be read.
    """
    reader = _Reader("devices", text, EXAMPLE)
    machine, rated = _machine(reader)
    reader.end("the end" if rated else "',' and a bandwidth, or '+' and more devices")
    if not rated and bandwidth is None and len(machine) > 1:
        raise ValueError(
            f"devices={text!r} does not say what goes from device to device in a second: "
            f"add it ({text.strip() + ', 12GB/s'!r}), or give bandwidth='12GB/s'"
        )
    return machine


def _machine(reader: _Reader) -> tuple[Machine, bool]:
    """The next devices, with what links them, and whether that was said."""
    parts: list[Machine] = []
    while True:
        start, count, number = reader.at, 1, 0.0
        inside = reader.take("[(]")
        if not inside:
            number = reader.number("a number")
            if reader.take("[x\u00d7*]"):
                most = _MOST_DEVICES - sum(map(len, parts))
                if not (number.is_integer() and 1 <= number <= most):
                    reader.at = start
                    raise reader.error(f"a whole number of devices, {_MOST_DEVICES} at most")
                count = int(number)
                inside = reader.take("[(]")
                number = 0.0 if inside else reader.number("the memory of one device")
        if inside:
            part, rated = _machine(reader)
            if not rated and len(part) > 1:
                raise reader.error("',' and the bandwidth inside the parentheses")
            if not reader.take("[)]"):
                raise reader.error("')'")
            if sum(map(len, parts)) + count * len(part) > _MOST_DEVICES:
                reader.at = start
                raise reader.error(f"{_MOST_DEVICES} devices at most")
        else:
            size, speed = reader.size(number), 1.0
            if reader.take("@"):
                speed = reader.positive(reader.number("how many times as fast it is"))
            part = Machine((size,), ((math.inf,),), speed=(speed,))
        parts += [part] * count
        if not reader.take("[+]"):
            break
    rated = reader.take(",") is not None
    rate = reader.rate(reader.number("a bandwidth")) if rated else math.inf
    return Machine.linked(parts, rate), rated


_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class _Reader:
    """Reads a text from left to right, and says where it could not go on."""

    def __init__(self, what: str, text: str, example: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"{what}={text!r} is not text such as {example!r}")
        self._what, self._text, self._example = what, text, example
        self.at = 0

    def take(self, pattern: str) -> re.Match[str] | None:
        """What the text goes on with, spaces aside, if it is that."""
        found = re.compile(rf"\s*({pattern})", re.IGNORECASE).match(self._text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def number(self, expected: str) -> float:
        found = self.take(r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?")
        if found is None:
            raise self.error(expected)
        return float(found[1])

    def size(self, number: float) -> float:
        """Bytes, after their number."""
        found = self.take(r"(?:([kmgt])(i?))?B(?![a-z/])")
        if found is None:
            raise self.error("B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
        return self.positive(number * _prefix(found[2], found[3]))

    def rate(self, number: float) -> float:
        """Bytes per second, after their number; of bits, if they are bits."""
        found = self.take(r"(?:([kmgt])(i?))?(bits?|B)\s*(?:/\s*s(?:ec)?|ps)(?![a-z])")
        if found is None:
            raise self.error("a unit per second: GB/s or GiB/s, of bits Gbit/s or Gb/s")
        prefix, binary, unit = found[2] or "", found[3], found[4]
        if unit == "b" and not prefix.isupper():
            self.at = found.start()
            raise self.error(f"{prefix.upper()}B/s for bytes or {prefix.upper()}bit/s for bits")
        return self.positive(number * _prefix(prefix, binary) / (1 if unit == "B" else 8))

    def end(self, expected: str = "the end") -> None:
        if self._text[self.at :].strip():
            raise self.error(expected)

    def error(self, expected: str) -> ValueError:
        rest = self._text[self.at :].lstrip()
        where = (
            f"at character {len(self._text) - len(rest) + 1}, {rest!r}" if rest else "at the end"
        )
        return ValueError(
            f"{self._what}={self._text!r} cannot be read {where}: expected {expected}; write it "
            f"like {self._example!r}"
        )

    def positive(self, number: float) -> float:
        """The number, if it is one that can be."""
        if not 0 < number < math.inf:
            raise ValueError(
                f"{self._what}={self._text!r} has the size {number:g} before character "
                f"{self.at + 1}; it must be greater than 0, and finite"
            )
        return number


def _prefix(prefix: str | None, binary: str | None) -> float:
    return float((1024 if binary else 1000) ** _POWERS[(prefix or "").upper()])
