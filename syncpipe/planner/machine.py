"""What a pipeline runs on: how much each device holds, and what the links between them carry.

Devices are described in words, ``"8 x 16GB, 12GB/s"``, eight of 16 GB each with 12 GB/s between any
two, or they are here and measured:

    devices   one or more of these, with "+" between them, then a comma and a bandwidth
    one       "80GB", or faster than what layers are measured on, "80GB @ 2.0"
    several   "8 x 80GB", or machines with links of their own, "16 x (8 x 80GB, 300GB/s)"

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, permutations
from numbers import Real
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from syncpipe.layers.placement import check_devices, default_devices, resolve_workers
from syncpipe.runtime.streams import AcceleratorStreams, same_memory

__all__ = [
    "RESERVE",
    "Machine",
    "clear_cache",
    "kind_of",
    "link_bandwidth",
    "machine_of",
    "measure_bandwidth",
    "measure_memory",
    "parse_bandwidth",
    "parse_bytes",
]

EXAMPLE = "8 x 16GB, 12GB/s"
_MOST_DEVICES = 1024

#: The part of an accelerator's free memory that plans leave alone: for what the caching allocator
#: loses between blocks, and for what libraries take for themselves at their first call.
RESERVE = 0.06
_COPY_BYTES = 64_000_000
_ROUNDS = 5

T = TypeVar("T")
Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Machine:
    """Devices in the order in which stages are put on them.

    Attributes:
        memory: bytes that a pipeline may use on each device; ``math.inf`` for no limit.
        bandwidth: bytes per second from device ``a`` to device ``b``, as ``bandwidth[a][b]``;
            ``math.inf`` where going there takes no time, as always on the diagonal.
        names: of the devices, to be printed; empty for none.
        speed: by what factor each device is faster than the one that layers were measured on;
            empty for equal ones.
        host: bytes per second between a device and the memory of the host, in each direction; 0
            where activations are not to be offloaded.

    Raises:
        TypeError, ValueError: there is no device, numbers do not match, or one of them is none.
    """

    memory: tuple[float, ...]
    bandwidth: Rows
    names: tuple[str, ...] = ()
    speed: tuple[float, ...] = ()
    host: float = 0.0

    def __post_init__(self) -> None:
        memory = tuple(_size(f"memory[{d}]", one) for d, one in enumerate(self.memory))
        n, rows = len(memory), [tuple(row) for row in self.bandwidth]
        if n == 0:
            raise ValueError("memory=() names no device; a pipeline needs at least one")
        if [len(row) for row in rows] != [n] * n:
            raise ValueError(
                f"bandwidth has rows of {[len(row) for row in rows]} numbers, but there are {n} "
                f"devices: give one number for all, or {n} rows of {n}"
            )
        speed = tuple(_factor(d, one) for d, one in enumerate(self.speed)) or (1.0,) * n
        bandwidth = tuple(
            tuple(_rate(f"bandwidth[{a}][{b}]", row[b]) if a != b else math.inf for b in range(n))
            for a, row in enumerate(rows)
        )
        fields = {"memory": memory, "bandwidth": bandwidth, "names": tuple(self.names)}
        for name, value in (fields | {"speed": speed}).items():
            object.__setattr__(self, name, value)
        _check_count("speed", speed, n)
        _check_count("names", self.names or speed, n)
        if self.host != 0:
            _rate("host", self.host)

    @classmethod
    def even(
        cls, n: int, memory: float = math.inf, bandwidth: float = math.inf, host: float = 0.0
    ) -> Machine:
        """Equal devices, and equal links between all of them.

        Args:
            n: how many.
            memory: bytes that may be used on each.
            bandwidth: bytes per second between any two, in each direction.
            host: bytes per second to and from the host.
        """
        return cls((memory,) * n, ((bandwidth,) * n,) * n, host=host)

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

    def transfer(self, size: float, a: int, b: int) -> float:
        """Seconds from device to device; what goes there comes back as a gradient, and the slower
        direction stands for both.
        """
        return size / min(self.bandwidth[a][b], self.bandwidth[b][a])

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
        return Machine(of(self.memory), rows, names, of(self.speed), self.host)

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


# -- numbers and text ------------------------------------------------------------------------------


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


def _size(what: str, given: Any) -> float:
    if isinstance(given, str):
        return parse_bytes(given)
    return _positive(what, given, " of bytes (16e9, '16GB')")


def _rate(what: str, given: Any) -> float:
    if isinstance(given, str):
        return parse_bandwidth(given)
    return _positive(what, given, " of bytes per second (12e9, '12GB/s')")


def _factor(d: int, given: Any) -> float:
    return _positive(f"speed[{d}]", None if given == math.inf else given, "")


def _positive(what: str, given: Any, unit: str) -> float:
    if isinstance(given, bool) or not isinstance(given, Real) or not float(given) > 0:
        raise ValueError(f"{what}={given!r} must be a positive number{unit}")
    return float(given)


def _check_count(what: str, given: Sequence[Any], n: int) -> None:
    if len(given) != n:
        raise ValueError(f"{what} is for {len(given)} devices, but there are {n}")


class _Reader:
    """Reads a text from left to right, and says where it could not go on."""

    def __init__(self, what: str, text: str, example: str) -> None:
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
        return self.positive(number * _power(found[2], found[3]))

    def rate(self, number: float) -> float:
        """Bytes per second, after their number; of bits, if they are bits."""
        found = self.take(r"(?:([kmgt])(i?))?(bits?|B)\s*(?:/\s*s(?:ec)?|ps)(?![a-z])")
        if found is None:
            raise self.error("a unit per second: GB/s or GiB/s, of bits Gbit/s or Gb/s")
        prefix, unit = found[2] or "", found[4]
        if unit == "b" and not prefix.isupper():
            self.at = found.start()
            raise self.error(f"{prefix.upper()}B/s for bytes or {prefix.upper()}bit/s for bits")
        return self.positive(number * _power(prefix, found[3]) / (1 if unit == "B" else 8))

    def machine(self) -> tuple[Machine, bool]:
        """The next devices, with what links them, and whether that was said."""
        parts: list[Machine] = []
        while not parts or self.take("[+]"):
            start, count, number = self.at, 1, None
            if not self.take("[(]"):
                number = self.number("a number")
                if self.take("[x\u00d7*]"):
                    count = int(number) if number.is_integer() else 0
                    several = bool(self.take("[(]"))
                    number = None if several else self.number("the memory of one device")
            if number is None:
                part, rated = self.machine()
                if not rated and len(part) > 1:
                    raise self.error("',' and the bandwidth inside the parentheses")
                if not self.take("[)]"):
                    raise self.error("')'")
            else:
                size, speed = self.size(number), 1.0
                if self.take("@"):
                    speed = self.positive(self.number("how many times as fast it is"))
                part = Machine((size,), ((math.inf,),), speed=(speed,))
            if not 1 <= count <= (_MOST_DEVICES - sum(map(len, parts))) // len(part):
                self.at = start
                raise self.error(f"a whole number of devices, {_MOST_DEVICES} at most")
            parts += [part] * count
        rated = self.take(",") is not None
        return Machine.linked(parts, self.rate(self.number("a bandwidth")) if rated else 1.0), rated

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


def _power(prefix: str | None, binary: str | None) -> float:
    return float((1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper()))


# -- what is given, described, or here and measured ------------------------------------------------


def machine_of(
    devices: Any,
    *,
    memory: Any = None,
    bandwidth: Any = None,
    speed: Any = None,
    host_bandwidth: Any = None,
) -> Machine:
    """The machine that a plan is made for; the arguments are those of :func:`syncpipe.plan`.

    Two places on one device share what is given or measured for it, unless ``memory`` is a list.
    The bandwidth to the host is the least of all accelerators; described devices have none.

    Raises:
        TypeError, ValueError: a description that cannot be read, a device that is not here, a
            number that is none, or something that is not said and cannot be measured.
    """
    if isinstance(devices, str):
        with suppress(RuntimeError):  # "cuda:0": a list of devices is meant, and this says so
            check_devices(str(torch.device(devices.strip())))
        devices = _described(devices, bandwidth)
    known = devices if isinstance(devices, Machine) else None
    real = [] if known else _places(devices)
    places: list[Any] = list(range(len(known))) if known else list(real)
    n = len(places)
    if isinstance(memory, (str, Real)):
        size = _size("memory", memory)
        memory = [size / places.count(place) for place in places]
    elif memory is None:
        memory = known.memory if known else _measured_memory(real)
    elif not isinstance(memory, Iterable):
        raise TypeError(f"memory={memory!r} is neither bytes (16e9, '16GB') nor a list of them")
    memory = tuple(memory)
    _check_count("memory", memory, n)
    if isinstance(bandwidth, (str, Real)):
        rate = _rate("bandwidth", bandwidth)
        bandwidth = [[math.inf if a == b else rate for b in places] for a in places]
    elif bandwidth is None:
        measured = ((link_bandwidth(a, b) for b in real) for a in real)
        bandwidth = known.bandwidth if known else measured
    elif not isinstance(bandwidth, Iterable):
        raise TypeError(
            f"bandwidth={bandwidth!r} is neither bytes per second (12e9, '12GB/s') nor rows of them"
        )
    rows = tuple((row,) if isinstance(row, (str, Real)) else tuple(row) for row in bandwidth)
    if speed is None:
        speed = known.speed if known else (1.0,) * n
    elif isinstance(speed, str) or not isinstance(speed, Iterable):
        raise TypeError(
            f"speed={speed!r} must be a list with a factor for each device, as [2.0, 1]"
        )
    if host_bandwidth is not None:
        host = _rate("host_bandwidth", host_bandwidth)
    elif known:
        host = known.host
    else:
        accelerators = [place for place in dict.fromkeys(real) if place.type != "cpu"]
        host = min((link_bandwidth(a, torch.device("cpu")) for a in accelerators), default=0.0)
    names = known.names if known else tuple(map(str, real))
    return Machine(memory, rows, names, tuple(speed), host)


def _described(text: str, bandwidth: Any) -> Machine:
    """The machine of a description; what links the devices may be given besides."""
    reader = _Reader("devices", text, EXAMPLE)
    machine, rated = reader.machine()
    reader.end("the end" if rated else "',' and a bandwidth, or '+' and more devices")
    if not rated and bandwidth is None and len(machine) > 1:
        raise ValueError(
            f"devices={text!r} does not say what goes from device to device in a second: "
            f"add it ({text.strip() + ', 12GB/s'!r}), or give bandwidth='12GB/s'"
        )
    return machine


def _places(devices: Any) -> list[torch.device]:
    """The devices of a list or a number."""
    if isinstance(devices, int) and not isinstance(devices, bool):
        if not 1 <= devices <= _MOST_DEVICES:
            raise ValueError(f"devices={devices}: plans are made for 1 to {_MOST_DEVICES}")
        here = default_devices(devices)
        if len(here) < devices:
            raise ValueError(
                f"devices={devices}, but {len(here)} are here ({', '.join(map(str, here))}): to "
                f"plan for others, describe them: devices={EXAMPLE!r}"
            )
        return here[:devices]
    given = check_devices(devices)
    if not given:
        raise ValueError(f"devices is empty: give at least one, or a description ({EXAMPLE!r})")
    return [worker.device for worker in resolve_workers(given, len(given))]


def _measured_memory(places: Sequence[torch.device]) -> tuple[float, ...]:
    """For each place its share of the memory that it is in."""
    memories = [_memory_of(place) for place in places]
    first = dict(zip(reversed(memories), reversed(places), strict=True))
    measured = {name: measure_memory(place) for name, place in first.items()}
    for name, size in measured.items():
        if size <= 0:
            raise ValueError(f"no memory is free on {name}: free some, or give memory='16GB'")
    return tuple(measured[name] / memories.count(name) for name in memories)


def _memory_of(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(device)


def kind_of(device: torch.device) -> str:
    """The name of what a device is, as its maker calls it, if that can be known."""
    if device.type != "cpu":
        with suppress(AttributeError, AssertionError, RuntimeError):
            return f"{device.type} {torch.get_device_module(device.type).get_device_name(device)}"
    return device.type


def measure_memory(device: torch.device) -> float:
    """Bytes that can be allocated on a device now.

    On an accelerator what is free and what this process's caching allocator holds unused, less
    ``RESERVE`` of it; on the CPU what the operating system says is available.

    Raises:
        ValueError: it is unknown.
    """
    try:
        if device.type == "cpu":
            text = Path("/proc/meminfo").read_text()
            return 1024.0 * int(re.findall(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)[0])
        module = torch.get_device_module(device.type)
        free = module.mem_get_info(device)[0]
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return float((free + unused) * (1 - RESERVE))
    except (LookupError, AttributeError, OSError, RuntimeError) as error:
        raise ValueError(
            f"how much memory is free on {device} cannot be found out ({error}): give memory='16GB'"
        ) from error


def measure_bandwidth(source: torch.device, target: torch.device) -> float:
    """Bytes per second from one device to another, one of them an accelerator.

    The median of a few copies, made as a pipe makes them and timed by the device: of 64 MB, or of
    an eighth of what is free, where that is less.

    Raises:
        ValueError: between these two nothing can be copied.
    """
    accelerator = target if source.type == "cpu" else source
    if "meta" in (source.type, target.type) or accelerator.type == "cpu":
        raise ValueError(
            f"the way from {source} to {target} cannot be measured: give bandwidth='12GB/s'"
        )
    streams = AcceleratorStreams(accelerator)
    stream = streams.current()
    # Written to once: memory that nobody has touched may not be there yet.
    size = _COPY_BYTES
    with suppress(ValueError):
        free = (measure_memory(place) for place in (source, target) if place.type != "cpu")
        size = max(1, int(min(size, *(memory / 8 for memory in free))))
    given = torch.ones(size, dtype=torch.uint8, device=source)
    taken = torch.ones(size, dtype=torch.uint8, device=target)
    times = []
    with streams.use(stream):
        for _ in range(1 + _ROUNDS):
            start = streams.stamp(stream)
            taken.copy_(given, non_blocking=True)
            end = streams.stamp(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return size / max(median(times[1:]), 1e-9)  # the first one opened the way


_bandwidths: dict[tuple[str, str], float] = {}


def link_bandwidth(source: torch.device, target: torch.device) -> float:
    """Bytes per second, measured once in a process; ``math.inf`` where nothing is copied."""
    if same_memory(source, target):
        return math.inf
    pair = (_memory_of(source), _memory_of(target))
    if pair not in _bandwidths:
        _bandwidths[pair] = measure_bandwidth(source, target)
    return _bandwidths[pair]


def clear_cache() -> None:
    """Forgets all bandwidths that were measured."""
    _bandwidths.clear()
