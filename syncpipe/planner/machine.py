"""The devices of a pipeline, with their memory and the bandwidth between them.

Devices of this machine are measured. Others are described in text, for example
``"8 x 16GB, 12GB/s"``: eight devices of 16 GB with 12 GB/s between any two. The grammar:

    devices   one or more groups with "+" between them, then a comma and a bandwidth
    group     "80GB" or "H100" (``syncpipe.balance.DEVICES``), "80GB @ 2.0" (twice as fast as the
              device that layers are measured on), "8 x 80GB", or machines with links of their
              own, "16 x (8 x 80GB, 300GB/s)"

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, permutations
from numbers import Real
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from syncpipe.balance.estimate import DEVICES
from syncpipe.balance.measure import RESERVE, measure_memory, stopwatch
from syncpipe.layers.placement import check_devices, default_devices, resolve_workers
from syncpipe.runtime.streams import same_memory
from syncpipe.storage import storage_of

__all__ = [
    "BYTES", "RATE", "RESERVE", "Machine", "bytes_on", "kind_of", "levels", "link_bandwidth",
    "machine_of", "measure_bandwidth", "measure_memory", "number_of", "places_of", "real_devices",
]  # fmt: skip

EXAMPLE = "8 x 16GB, 12GB/s"
_MOST_DEVICES = 1024

_COPY_BYTES = 64_000_000
_ROUNDS = 5
_WAYS = 64  # the paths over links that are extended by one more device
_ALIKE = 0.1  # numbers that differ by less, relative, count as equal, since they are measured


@dataclass(frozen=True)
class Machine:
    """Devices in the order of the stages.

    Attributes:
        memory: bytes that a pipeline may use on each device; ``math.inf`` for no limit.
        bandwidth: bytes per second from device ``a`` to device ``b``, as ``bandwidth[a][b]``;
            ``math.inf`` for no transfer time, as always on the diagonal.
        names: the names to print; by default "device 0" and so on.
        speed: the speed of each device relative to the device that layers were measured on; empty
            if all are 1.
        host: bytes per second between a device and the memory of the host, in each direction; 0
            rules out offloading.

    Raises:
        TypeError, ValueError: there is no device, lengths do not match, or a value is not a
            positive number.
    """

    memory: tuple[float, ...]
    bandwidth: tuple[tuple[float, ...], ...]
    names: tuple[str, ...] = ()
    speed: tuple[float, ...] = ()
    host: float = 0.0

    def __post_init__(self) -> None:
        memory = _numbers("memory", self.memory, BYTES)
        n, inf = len(memory), math.inf
        if n == 0:
            raise ValueError("memory=() has no device: give the bytes of at least one")
        rows = [row if _is_list(row) else (row,) for row in _as_list("bandwidth", self.bandwidth)]
        if [len(row) for row in rows] != [n] * n:
            raise ValueError(
                f"bandwidth has rows of {[len(row) for row in rows]} numbers, but there are {n} "
                f"devices: give one number for all, or {n} rows of {n}"
            )
        rows = [[inf if a == b else row[b] for b in range(n)] for a, row in enumerate(rows)]
        links = tuple(_numbers(f"bandwidth[{a}]", row, RATE) for a, row in enumerate(rows))
        names = tuple(self.names) or tuple([f"device {d}" for d in range(n)])
        speed = _numbers("speed", self.speed, FACTOR) or (1.0,) * n
        _check_count("speed", speed, n)
        _check_count("names", names, n)
        host = 0.0 if self.host == 0 else number_of("host", self.host, RATE)
        new = {"memory": memory, "bandwidth": links, "names": names, "speed": speed, "host": host}
        for name, value in new.items():
            object.__setattr__(self, name, value)

    @classmethod
    def even(
        cls, n: int, memory: float = math.inf, bandwidth: float = math.inf, host: float = 0.0
    ) -> Machine:
        """``n`` equal devices with equal links; the other arguments are as the attributes."""
        return cls((memory,) * n, ((bandwidth,) * n,) * n, host=host)

    def __len__(self) -> int:
        return len(self.memory)

    def transfer(self, size: float, a: int, b: int) -> float:
        """Seconds for ``size`` bytes in the slower direction, as gradients go the other way."""
        return size / min(self.bandwidth[a][b], self.bandwidth[b][a])

    @cached_property
    def kinds(self) -> list[tuple[int, ...]]:
        """The devices of each kind; devices of a kind have equal memory and speed, about."""
        found: dict[tuple[float, float], tuple[int, ...]] = {}
        for d, kind in enumerate(zip(levels(self.memory), levels(self.speed), strict=True)):
            found[kind] = (*found.get(kind, ()), d)
        return list(found.values())

    @cached_property
    def even_links(self) -> bool:
        """Whether all links between two devices have about the same bandwidth."""
        links = [w for a, row in enumerate(self.bandwidth) for b, w in enumerate(row) if a != b]
        return len({*levels(links)}) <= 1

    @property
    def uniform(self) -> bool:
        """Whether all devices, and all links, are about equal."""
        return len(self.kinds) == 1 and self.even_links

    def shared(self, places: Sequence[tuple[int, ...]]) -> Machine:
        """One device for each place, with the least memory and speed of the devices of the place.

        Device ``k`` of the ``r`` devices of a place runs every ``r``-th micro-batch.
        """

        def links(a: tuple[int, ...], b: tuple[int, ...]) -> float:
            turns = range(math.lcm(len(a), len(b)))
            return min(self.bandwidth[a[k % len(a)]][b[k % len(b)]] for k in turns)

        memory, speed = (
            tuple([min(row[d] for d in place) for place in places])
            for row in (self.memory, self.speed)
        )
        rows = tuple([tuple([links(a, b) for b in places]) for a in places])
        names = tuple([self.names[place[0]] for place in places])
        return Machine(memory, rows, names, speed, self.host)

    def ordered(self, devices: Sequence[int]) -> Machine:
        """These devices in this order, with their names."""
        return self.shared([(d,) for d in devices])

    def orders(self) -> list[tuple[int, ...]]:
        """The orders to try: as given, along the best links, and kind by kind for 2 or 3 kinds."""
        given = tuple(range(len(self)))
        if len(self.kinds) > 3:
            return [given, given[::-1]]
        orders = [tuple(chain.from_iterable(some)) for some in permutations(self.kinds)]
        linked = [] if self.even_links else [self.linked(len(self))]
        return list(dict.fromkeys([given, *orders, *linked]))

    def linked(self, n: int) -> tuple[int, ...]:
        """An order whose first ``n`` devices shape a path over fast links; the others follow.

        A beam search: the best paths over fewer devices are extended by one device at a time.
        """
        ways: list[tuple[float, tuple[int, ...]]] = [(0.0, (d,)) for d in range(len(self))]
        for _ in range(n - 1):
            longer: dict[Any, tuple[float, tuple[int, ...]]] = {}
            for cost, way in ways:
                for d in {*range(len(self))} - {*way}:
                    found = cost + self.transfer(1.0, way[-1], d), (*way, d)
                    key = frozenset(way), d
                    longer[key] = min(longer.get(key, found), found)
            ways = sorted(longer.values())[:_WAYS]
        first = min(ways)[1]
        return (*first, *[d for d in range(len(self)) if d not in first])


def levels(numbers: Iterable[float]) -> list[float]:
    """For each number the least of the numbers that are about equal."""
    numbers, levels = [*numbers], dict[float, float]()
    least = 0.0
    for number in sorted(numbers):
        least = levels[number] = least if number <= least * (1 + _ALIKE) else number
    return [levels[number] for number in numbers]


# -- numbers and text ------------------------------------------------------------------------------


class Unit(NamedTuple):
    """A unit of numbers: a pattern for its text, an example, and words for a message."""

    ending: str
    example: str
    of: str


_PREFIX = r"(?:(?P<prefix>[kmgt])(?P<binary>i?))?"
#: "16GB" is 16e9, "16GiB" 16 * 2**30; "12GB/s" is 12e9, "100Gbit/s" or "100Gb/s" 12.5e9. Case and
#: spaces do not matter, except that "12gb/s" is refused: it could mean bits or bytes.
BYTES = Unit(
    rf"{_PREFIX}B",
    "'16GB' (B, kB, MB, GB, TB, KiB, MiB, GiB or TiB)",
    " of bytes (16e9, '16GB')",
)
RATE = Unit(
    rf"{_PREFIX}(?P<one>bits?|B)\s*(?:/\s*s(?:ec)?|ps)",
    "'12GB/s' for bytes or '100Gbit/s' for bits",
    " of bytes per second (12e9, '12GB/s')",
)
FACTOR = Unit("", "2.0", "")


def number_of(what: str, given: Any, unit: Unit) -> float:
    """A positive number, from a number or text.

    Raises:
        ValueError: ``given`` is no such number; the message begins with ``what``.
    """
    if not isinstance(given, str):
        known = isinstance(given, Real) and not isinstance(given, bool)
        if not (known and float(given) > 0) or (unit is FACTOR and given == math.inf):
            raise ValueError(f"{what}={given!r} must be a positive number{unit.of}")
        return float(given)
    number = r"\s*(?P<number>\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)\s*"
    found = re.fullmatch(rf"{number}{unit.ending}\s*", given, re.IGNORECASE)
    parts = found.groupdict("") if found else {}
    prefix, one = parts.get("prefix", ""), parts.get("one", "B")
    if not parts or (one == "b" and not prefix.isupper()):
        raise ValueError(f"{what}={given!r} cannot be read: write it like {unit.example}")
    base, bits = 1024 if parts.get("binary") else 1000, 1 if one == "B" else 8
    value: float = float(parts["number"]) * base ** " KMGT".index(prefix.upper() or " ") / bits
    if not 0 < value < math.inf:
        raise ValueError(f"{what}={given!r} is {value:g}: it must be greater than 0 and finite")
    return value


def _is_list(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str)


def _as_list(what: str, given: Any) -> list[Any]:
    if not _is_list(given):
        raise TypeError(f"{what}={given!r} must be a list with one entry for each device")
    return list(given)


def _numbers(what: str, given: Any, unit: Unit) -> tuple[float, ...]:
    numbers = enumerate(_as_list(what, given))
    return tuple(number_of(f"{what}[{k}]", number, unit) for k, number in numbers)


def _check_count(what: str, given: Sequence[Any], n: int) -> None:
    if len(given) != n:
        raise ValueError(f"{what} has {len(given)} entries, but there are {n} devices")


#: A group: its count, and either what is in parentheses, or memory and speed of a device.
_DEVICES = re.compile(
    r"\s*(?:([^()]*?)\s*[x\u00d7*])?\s*(?:\((.*)\)|([^()@]*)(?:@([^()]*))?)\s*", re.IGNORECASE
)


def _parse_memory(what: str, text: str) -> float:
    """The bytes that a text gives, directly or as the name of a device in the table."""
    name = text.strip().lower()
    known = [one for one in DEVICES if name and one.lower().startswith(name)]
    if len(known) > 1 and name not in map(str.lower, known):
        raise ValueError(f"{what}={text!r} could be {' or '.join(known)}: give one of these names")
    if not known:
        return number_of(what, text, BYTES)
    return DEVICES[next((one for one in known if one.lower() == name), known[0])].memory


def _parse_machine(text: str, bandwidth: Any = None, whole: str = "") -> Machine:
    """The machine of a description, or of a part in parentheses of the description ``whole``."""
    what = f"devices={whole or text!r}"
    listed, comma, rate = re.fullmatch(r"(.*?)(?:(,)([^,()]*))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    parts: list[Machine] = []
    for one in re.split(r"\+(?![^(]*\))", listed):
        found = _DEVICES.fullmatch(one)
        count, inside, memory, speed = found.groups() if found else (None, None, one, None)
        if inside is not None:
            part = _parse_machine(inside, whole=whole or text)
        else:
            size = _parse_memory(f"{what}: memory", memory)
            factor = number_of(f"{what}: speed", "1" if speed is None else speed, FACTOR)
            part = Machine((size,), ((math.inf,),), speed=(factor,))
        number = int(count) if re.fullmatch(r"\d{1,4}", count := (count or "1").strip()) else 0
        if not 1 <= number <= (_MOST_DEVICES - sum(map(len, parts))) // len(part):
            raise ValueError(
                f"{what}: {count!r} in {one.strip()!r} must be a whole number of devices, "
                f"{_MOST_DEVICES} at most; write it like {EXAMPLE!r}"
            )
        parts += [part] * number
    if not comma and bandwidth is None and sum(map(len, parts)) > 1:
        raise ValueError(
            f"{what}: {text!r} has no bandwidth between devices: add it "
            f"({text.strip() + ', 12GB/s'!r}), or give bandwidth='12GB/s'"
        )
    link = number_of(f"{what}: bandwidth", rate, RATE) if comma else 1.0
    at = [(k, d) for k, part in enumerate(parts) for d in range(len(part))]
    rows = [tuple([parts[k].bandwidth[a][b] if k == m else link for m, b in at]) for k, a in at]
    memory, speed = (tuple([getattr(parts[k], x)[d] for k, d in at]) for x in ("memory", "speed"))
    return Machine(memory, tuple(rows), speed=speed)


# -- devices of this machine -----------------------------------------------------------------------


def real_devices(devices: Any) -> tuple[Any, ...] | None:
    """The devices of this machine that a list, names ("cuda:0, cuda:1") or a count give, as a pipe
    takes them; None for a description.

    Raises:
        TypeError, ValueError: an entry is no device, or the machine does not have it.
    """
    if isinstance(devices, Machine):
        return None
    if isinstance(devices, str):
        names = [name.strip() for name in devices.split(",")]
        try:
            here = [int(name) if name.isdecimal() else torch.device(name) for name in names]
        except RuntimeError:  # a description
            return None
        devices = here[0] if len(names) == 1 and names[0].isdecimal() else here
    if isinstance(devices, int) and not isinstance(devices, bool):
        if not 1 <= devices <= _MOST_DEVICES:
            raise ValueError(f"devices={devices} must be from 1 to {_MOST_DEVICES}")
        every = default_devices(devices)
        if len(every) < devices:
            raise ValueError(
                f"devices={devices}, but this machine has {len(every)} "
                f"({', '.join(map(str, every))}): describe other devices: devices={EXAMPLE!r}"
            )
        return tuple(every[:devices])
    given = check_devices(devices)
    if not given:
        raise ValueError(f"devices is empty: give at least one, or a description ({EXAMPLE!r})")
    return tuple(given)


def places_of(real: Sequence[Any]) -> list[torch.device]:
    """The ``torch.device`` of each device or worker."""
    return [worker.device for worker in resolve_workers(real, len(real))]


def machine_of(
    devices: Any,
    *,
    memory: Any = None,
    bandwidth: Any = None,
    speed: Any = None,
    host_bandwidth: Any = None,
    model: Any = None,
) -> Machine:
    """The machine that a plan is made for; the arguments are those of :func:`syncpipe.plan`.

    Memory that the model occupies counts as free, because the plan includes it. Two places on one
    device share its memory, given or measured, unless ``memory`` is a list. The bandwidth to the
    host is the least of all accelerators; for described devices it is 0 unless given.

    Raises:
        TypeError, ValueError: a description or a number cannot be read, this machine lacks a
            device, or a value is missing and cannot be measured.
    """
    given = real_devices(devices)
    real = places_of(given) if given is not None else []
    known = devices if real or isinstance(devices, Machine) else _parse_machine(devices, bandwidth)
    places: list[Any] = real or list(range(len(known)))
    cpu = torch.device("cpu")  # all CPU workers share one memory
    homes = [cpu if place.type == "cpu" else place for place in real]
    if memory is None:
        measured = {
            home: measure_memory(home) + (home != cpu) * (1 - RESERVE) * bytes_on(model, home)
            for home in dict.fromkeys(homes)
        }
        for home, size in measured.items():
            if size <= 0:
                raise ValueError(f"no memory is free on {home}: free some, or give memory='16GB'")
        memory = [measured[home] / homes.count(home) for home in homes] or known.memory
    elif isinstance(memory, (str, Real)):
        size = number_of("memory", memory, BYTES)
        memory = [size / places.count(place) for place in places]
    memory = _as_list("memory", memory)
    _check_count("memory", memory, len(places))
    if bandwidth is None:
        bandwidth = [[link_bandwidth(a, b) for b in homes] for a in homes] or known.bandwidth
    elif isinstance(bandwidth, (str, Real)):
        rate = number_of("bandwidth", bandwidth, RATE)
        bandwidth = [[math.inf if a == b else rate for b in places] for a in places]
    if host_bandwidth is None:
        rates = (link_bandwidth(home, cpu) for home in dict.fromkeys(homes) if home != cpu)
        host = min(rates, default=0.0) if real else known.host
    else:
        host = number_of("host_bandwidth", host_bandwidth, RATE)
    if speed is None:
        speed = () if real else known.speed
    return Machine(memory, bandwidth, tuple(map(str, real)) or known.names, speed, host)


def bytes_on(model: Any, place: torch.device) -> int:
    """Bytes of a model's parameters, gradients and buffers on a device."""
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    there = {storage_of(tensor): tensor for tensor in tensors if tensor.device == place}
    return sum(tensor.untyped_storage().nbytes() for tensor in there.values())


def kind_of(device: torch.device) -> str:
    """The type of a device, followed by the maker's name of it if PyTorch knows that."""
    if device.type != "cpu":
        with suppress(AttributeError, AssertionError, RuntimeError):
            return f"{device.type} {torch.get_device_module(device.type).get_device_name(device)}"
    return device.type


def measure_bandwidth(source: torch.device, target: torch.device) -> float:
    """Bytes per second from one device to another, one of them an accelerator.

    The median of a few copies, made as a pipe makes them and timed by the device. A copy has 64 MB,
    or an eighth of the free memory if that is less.

    Raises:
        ValueError: neither device is an accelerator, or one is ``meta``.
    """
    accelerator = target if source.type == "cpu" else source
    if "meta" in (source.type, target.type) or accelerator.type == "cpu":
        raise ValueError(
            f"the bandwidth from {source} to {target} cannot be measured: give bandwidth='12GB/s'"
        )
    mark, between = stopwatch(accelerator)
    size = _COPY_BYTES
    with suppress(ValueError):
        free = (measure_memory(place) for place in (source, target) if place.type != "cpu")
        size = max(1, int(min(size, *(memory / 8 for memory in free))))
    # Ones, because memory that was never written may not be allocated yet.
    given, taken = (torch.ones(size, dtype=torch.uint8, device=d) for d in (source, target))
    times = []
    for _ in range(1 + _ROUNDS):
        start = mark()
        taken.copy_(given, non_blocking=True)
        times.append(between(mark(), start))
    return size / max(median(times[1:]), 1e-9)  # the first copy sets up the link


@cache
def link_bandwidth(source: torch.device, target: torch.device) -> float:
    """Bytes per second, measured once per process; ``math.inf`` within one memory."""
    return math.inf if same_memory(source, target) else measure_bandwidth(source, target)
