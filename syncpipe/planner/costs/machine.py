"""What a pipeline runs on, as far as planning goes: how much each device holds, and what the links
between them carry.

A device is of any kind; that of a description ("8 x 16GB, 12GB/s") and one that was measured look
the same here. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations
from typing import TypeVar

__all__ = ["Machine"]

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """Devices in the order in which stages are put on them.

    Attributes:
        memory: bytes that a pipeline may use on each device; ``math.inf`` for no limit.
        bandwidth: bytes per second from device ``a`` to device ``b``, as ``bandwidth[a][b]``;
            ``math.inf`` where going there takes no time, as on the diagonal.
        names: of the devices, to be printed; empty for none.
        speed: by what factor each device is faster than the one that layers were measured on;
            empty for equal ones.

    Raises:
        ValueError: there is no device, numbers do not match, or one of them is none.
    """

    memory: tuple[float, ...]
    bandwidth: tuple[tuple[float, ...], ...]
    names: tuple[str, ...] = ()
    speed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", tuple(self.memory))
        object.__setattr__(self, "bandwidth", tuple(map(tuple, self.bandwidth)))
        object.__setattr__(self, "names", tuple(self.names))
        n = len(self.memory)
        object.__setattr__(self, "speed", tuple(self.speed) or (1.0,) * n)
        if n == 0:
            raise ValueError("memory=() names no device; a pipeline needs at least one")
        for d, memory in enumerate(self.memory):
            _check(f"memory of device {d}", memory)
        if len(self.bandwidth) != n or any(len(row) != n for row in self.bandwidth):
            shape = [len(row) for row in self.bandwidth]
            raise ValueError(
                f"bandwidth has rows of {shape} numbers, but memory is for {n} devices: give it "
                f"{n} rows of {n}"
            )
        for a, row in enumerate(self.bandwidth):
            for b, bandwidth in enumerate(row):
                if a == b and bandwidth != math.inf:
                    raise ValueError(
                        f"bandwidth from device {a} to itself is {bandwidth}; what stays on a "
                        "device takes no time: math.inf"
                    )
                _check(f"bandwidth from device {a} to {b}", bandwidth)
        if len(self.speed) != n:
            raise ValueError(f"speed has {len(self.speed)} factors, but there are {n} devices")
        for d, speed in enumerate(self.speed):
            _check(f"speed of device {d}", speed)
            if speed == math.inf:
                raise ValueError(f"speed of device {d} is inf; it must be finite")
        if self.names and len(self.names) != n:
            raise ValueError(f"names has {len(self.names)} of them, but there are {n} devices")

    @classmethod
    def even(cls, n: int, memory: float = math.inf, bandwidth: float = math.inf) -> Machine:
        """Equal devices, and equal links between all of them.

        Args:
            n: how many.
            memory: bytes that may be used on each.
            bandwidth: bytes per second between any two, in each direction.
        """
        if n < 1:
            raise ValueError(f"n={n}: a machine has at least one device")
        rows = [[math.inf if a == b else bandwidth for b in range(n)] for a in range(n)]
        return cls((memory,) * n, tuple(map(tuple, rows)))

    @classmethod
    def linked(cls, parts: Sequence[Machine], bandwidth: float) -> Machine:
        """Several machines side by side.

        Args:
            parts: each with its own links.
            bandwidth: bytes per second between devices of two of them, in each direction.
        """
        rows: list[tuple[float, ...]] = []
        count = sum(map(len, parts))
        for part in parts:
            left = len(rows)
            right = count - left - len(part)
            rows += [(bandwidth,) * left + row + (bandwidth,) * right for row in part.bandwidth]
        memory = tuple(size for part in parts for size in part.memory)
        return cls(memory, tuple(rows), speed=tuple(v for part in parts for v in part.speed))

    def __len__(self) -> int:
        return len(self.memory)

    def time(self, size: float, a: int, b: int) -> float:
        """Seconds that so many bytes take from device ``a`` to device ``b``."""
        return size / self.bandwidth[a][b]

    @property
    def uniform(self) -> bool:
        """Whether all devices and all links between two are alike."""
        links = {w for a, row in enumerate(self.bandwidth) for b, w in enumerate(row) if a != b}
        return len(set(self.memory)) == 1 and len(links) <= 1 and len(set(self.speed)) == 1

    def head(self, n: int) -> Machine:
        """The first ``n`` devices."""
        if not 1 <= n <= len(self):
            raise ValueError(f"n={n}: there are {len(self)} devices")
        return self.ordered(range(n))

    def ordered(self, devices: Sequence[int]) -> Machine:
        """Some of the devices, or all, in another order; each keeps what it is called."""
        names = tuple(self.name(d) for d in devices)
        if not self.names and names == tuple(f"device {s}" for s in range(len(names))):
            names = ()

        def of(row: Sequence[T]) -> tuple[T, ...]:
            return tuple(row[d] for d in devices)

        rows = tuple(of(self.bandwidth[d]) for d in devices)
        return Machine(of(self.memory), rows, names, of(self.speed))

    def orders(self) -> list[tuple[int, ...]]:
        """Orders of the devices that are worth a try: as given, and if there are two or three kinds
        of devices (by memory and speed), those with each kind together.
        """
        kinds: dict[tuple[float, float], list[int]] = {}
        for d, kind in enumerate(zip(self.memory, self.speed, strict=True)):
            kinds.setdefault(kind, []).append(d)
        given = tuple(range(len(self)))
        if len(kinds) > 3:
            return [given, given[::-1]]
        together = [tuple(chain.from_iterable(some)) for some in permutations(kinds.values())]
        return list(dict.fromkeys([given, *together]))

    def name(self, d: int) -> str:
        """What to call device ``d``: its name, or its number."""
        return self.names[d] if self.names else f"device {d}"

    def with_memory(self, memory: Sequence[float]) -> Machine:
        """The same devices with other limits."""
        return replace(self, memory=tuple(memory))


def _check(what: str, number: float) -> None:
    ok = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not (ok and number > 0):  # not a number is not greater either
        raise ValueError(f"{what} is {number!r}; it must be a number greater than 0, or math.inf")
