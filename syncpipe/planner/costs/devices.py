"""What a plan is made for: devices that are here, measured, or a description of ones that are not.

A description is what one would say aloud: ``"8 x 16GB, 12GB/s"``, eight devices with 16 GB each and
12 GB/s between any two of them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from numbers import Real
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from syncpipe.layers.placement import check_devices, default_devices, resolve_workers
from syncpipe.planner.costs.description import EXAMPLE, described, parse_bandwidth, parse_bytes
from syncpipe.planner.costs.machine import Machine
from syncpipe.runtime.streams import AcceleratorStreams, same_memory

__all__ = [
    "RESERVE",
    "clear_cache",
    "link_bandwidth",
    "machine_of",
    "measure_bandwidth",
    "measure_memory",
    "measure_speed",
]

#: The part of an accelerator's free memory that plans leave alone: for what the caching allocator
#: loses between blocks, and for what libraries take for themselves at their first call.
RESERVE = 0.06

#: As many as a description may have.
_MOST_DEVICES = 1024
_COPY_BYTES = 64_000_000
_ROUNDS = 5

_bandwidths: dict[tuple[str, str], float] = {}
_speeds: dict[str, float] = {}  # by kind of device


def machine_of(
    devices: Any, *, memory: Any = None, bandwidth: Any = None, speed: Any = None
) -> Machine:
    """The machine that a plan is made for.

    Args:
        devices: a description such as ``"8 x 16GB, 12GB/s"``, ``"2 x 80GB @ 2.0 + 4 x 24GB,
            100Gbit/s"`` (the first two are twice as fast), ``"2 x (8 x 80GB, 300GB/s), 25GB/s"``
            (two machines with faster links inside), or ``"8 x 16GB"`` together with ``bandwidth``;
            or a list of devices as for ``Pipe``,
            which are measured; or how many of the accelerators that are here, CPU workers where
            there is none; or a ``Machine``.
        memory: what may be used, in place of what is described or measured: bytes as a number or
            as text ("16GB") for each device, or a list with one of them for each. Two places
            on one device share what is given or measured for it, unless it is a list.
        bandwidth: bytes per second as a number or as text ("12GB/s") between any two
            devices, or rows of them, from the device of the row to that of the column.
        speed: for each device by what factor it is faster than the one that layers are measured on;
            that is the first of real ones. By default real devices of different kinds are measured
            (:func:`measure_speed`), and all others are equal.

    Raises:
        TypeError, ValueError: a description that cannot be read, a device that is not here, a
            number that is none, or something that is not said and cannot be measured.
    """
    if isinstance(devices, str):
        with suppress(RuntimeError):  # "cuda:0": a list of devices is meant, and this says so
            check_devices(str(torch.device(devices.strip())))
        machine = described(devices, bandwidth)
        return machine_of(machine, memory=memory, bandwidth=bandwidth, speed=speed)
    if isinstance(devices, Machine):
        places = range(len(devices))
        held = _given_memory(memory, places) or devices.memory
        rows = _given_bandwidth(bandwidth, places) or devices.bandwidth
        factors = _given_speed(speed, places) or devices.speed
        return Machine(held, rows, devices.names, factors)
    found = _places(devices)
    held = _given_memory(memory, found) or _measured_memory(found)
    rows = _given_bandwidth(bandwidth, found) or tuple(
        tuple(link_bandwidth(a, b) for b in found) for a in found
    )
    return Machine(
        held, rows, tuple(map(str, found)), _given_speed(speed, found) or _measured_speed(found)
    )


def measure_memory(device: torch.device) -> float:
    """Bytes that can be allocated on a device now.

    On an accelerator what is free and what this process's caching allocator holds unused, less
    ``RESERVE`` of it; on the CPU what the operating system says is available, to all of this
    machine or to the control group that this process is in, whichever is less.

    Raises:
        ValueError: nobody says how much it is.
    """
    try:
        if device.type == "cpu":
            return _cpu_memory()
        module = torch.get_device_module(device.type)
        free = module.mem_get_info(device)[0]
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return float((free + unused) * (1 - RESERVE))
    except (AttributeError, NotImplementedError, OSError, RuntimeError) as error:
        raise ValueError(
            f"how much memory is free on {device} cannot be found out ({error}): give memory='16GB'"
        ) from error


def measure_bandwidth(source: torch.device, target: torch.device) -> float:
    """Bytes per second from one device to another, one of them an accelerator.

    The median of a few copies of 64 MB, made as a pipe makes them and timed by the device.

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
    given = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=source)
    taken = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=target)
    times = []
    with streams.use(stream):
        for _ in range(1 + _ROUNDS):
            start = streams.stamp(stream)
            taken.copy_(given, non_blocking=True)
            end = streams.stamp(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return _COPY_BYTES / max(median(times[1:]), 1e-9)  # the first one opened the way


def link_bandwidth(source: torch.device, target: torch.device) -> float:
    """Bytes per second, measured once in a process; ``math.inf`` where nothing is copied."""
    if same_memory(source, target):
        return math.inf
    pair = (_memory_of(source), _memory_of(target))
    if pair not in _bandwidths:
        _bandwidths[pair] = measure_bandwidth(source, target)
    return _bandwidths[pair]


def measure_speed(
    device: torch.device, layer: nn.Module | None = None, sample: torch.Tensor | None = None
) -> float:
    """How many times in a second a device does the forward and backward of a layer.

    Divided by that of another device it is the factor by which this one is faster.

    Args:
        device: any but meta.
        layer: a module; by default a linear layer with 1024 inputs and outputs. It is copied.
        sample: its input; by default 1024 rows.

    Returns:
        By the median of a few rounds, the first of which does not count.
    """
    layer = nn.Linear(1024, 1024) if layer is None else layer
    sample = torch.ones(1024, 1024) if sample is None else sample
    there, given = deepcopy(layer).to(device), sample.detach().to(device)
    given.requires_grad_(given.is_floating_point())
    times = []
    for _ in range(1 + _ROUNDS):
        _wait(device)
        start = time.perf_counter()
        there(given).sum().backward()
        _wait(device)
        times.append(time.perf_counter() - start)
    return 1 / max(median(times[1:]), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def clear_cache() -> None:
    """Forgets all bandwidths and speeds that were measured."""
    _bandwidths.clear()
    _speeds.clear()


def _places(devices: Any) -> list[torch.device]:
    """The devices of a list or a number."""
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            raise ValueError(f"devices={devices}: there is at least one")
        if devices > _MOST_DEVICES:
            raise ValueError(f"devices={devices}: plans are made for {_MOST_DEVICES} at most")
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


def _memory_of(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(device)


def _measured_memory(places: Sequence[torch.device]) -> tuple[float, ...]:
    """For each place its share of the memory that it is in."""
    memories = [_memory_of(place) for place in places]
    first = dict(zip(reversed(memories), reversed(places), strict=True))
    measured = {name: measure_memory(place) for name, place in first.items()}
    for name, size in measured.items():
        if size <= 0:
            raise ValueError(f"no memory is free on {name}: free some, or give memory='16GB'")
    return tuple(measured[name] / memories.count(name) for name in memories)


def _measured_speed(places: Sequence[torch.device]) -> tuple[float, ...]:
    """Relative to the first; nothing is measured where all are of one kind."""
    kinds = [_kind(place) for place in places]
    if len(set(kinds)) == 1:
        return (1.0,) * len(places)
    for kind, place in zip(kinds, places, strict=True):
        if kind not in _speeds:
            _speeds[kind] = measure_speed(place)
    return tuple(_speeds[kind] / _speeds[kinds[0]] for kind in kinds)


def _kind(device: torch.device) -> str:
    """The name of what a device is, as its maker calls it, if that can be known."""
    if device.type != "cpu":
        with suppress(AttributeError, AssertionError, RuntimeError):
            return f"{device.type} {torch.get_device_module(device.type).get_device_name(device)}"
    return device.type


def _cpu_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{proc / 'meminfo'} has no MemAvailable")
    return min([1024.0 * int(found[1]), *_group_memory(proc, groups)])


def _group_memory(proc: Path, groups: Path) -> Iterable[float]:
    """What the control groups of this process, if they have a limit, leave of it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            base, limit, usage, cached = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        group = Path(path.lstrip("/"))
        for directory in (base / group, *(base / parent for parent in group.parents)):
            try:
                most = int((directory / limit).read_text())
                used = int((directory / usage).read_text())
                stat = (directory / "memory.stat").read_text()
            except (OSError, ValueError):  # no such group from here, or no limit ("max")
                continue
            found = re.search(rf"^{cached} (\d+)", stat, re.MULTILINE)
            yield most - used + (int(found[1]) if found else 0)


def _given_memory(memory: Any, places: Sequence[Any]) -> tuple[float, ...] | None:
    """``memory=`` for each place."""
    if memory is None:
        return None
    if isinstance(memory, (str, Real)):
        size = _size("memory", memory)
        return tuple(size / list(places).count(place) for place in places)
    if not isinstance(memory, Iterable):
        raise TypeError(f"memory={memory!r} is neither bytes (16e9, '16GB') nor a list of them")
    sizes = tuple(_size(f"memory[{d}]", one) for d, one in enumerate(memory))
    if len(sizes) != len(places):
        raise ValueError(f"memory is for {len(sizes)} devices, but there are {len(places)}")
    return sizes


def _given_bandwidth(bandwidth: Any, places: Sequence[Any]) -> tuple[tuple[float, ...], ...] | None:
    """``bandwidth=`` as rows; what stays on a device takes no time."""
    if bandwidth is None:
        return None
    if isinstance(bandwidth, (str, Real)):
        rate = _size("bandwidth", bandwidth, rate=True)
        return tuple(tuple(math.inf if a == b else rate for b in places) for a in places)
    if not isinstance(bandwidth, Iterable):
        raise TypeError(
            f"bandwidth={bandwidth!r} is neither bytes per second (12e9, '12GB/s') nor rows of them"
        )
    rows = [[row] if isinstance(row, (str, Real)) else list(row) for row in bandwidth]
    n = len(places)
    if len(rows) != n or any(len(row) != n for row in rows):
        raise ValueError(
            f"bandwidth has rows of {[len(row) for row in rows]} numbers, but there are {n} "
            f"devices: give one number for all, or {n} rows of {n}"
        )

    def entry(a: int, b: int) -> float:
        return math.inf if a == b else _size(f"bandwidth[{a}][{b}]", rows[a][b], rate=True)

    return tuple(tuple(entry(a, b) for b in range(n)) for a in range(n))


def _given_speed(speed: Any, places: Sequence[Any]) -> tuple[float, ...] | None:
    """``speed=`` for each place."""
    if speed is None:
        return None
    if isinstance(speed, (str, Real)) or not isinstance(speed, Iterable):
        raise TypeError(
            f"speed={speed!r} must be a list with a factor for each device, as [2.0, 1]"
        )
    factors = tuple(speed)
    for d, factor in enumerate(factors):
        if (
            isinstance(factor, bool)
            or not isinstance(factor, Real)
            or not 0 < float(factor) < math.inf
        ):
            raise ValueError(f"speed[{d}]={factor!r} must be a positive number")
    if len(factors) != len(places):
        raise ValueError(f"speed is for {len(factors)} devices, but there are {len(places)}")
    return tuple(map(float, factors))


def _size(what: str, given: Any, *, rate: bool = False) -> float:
    """A positive number, of text or as it is."""
    if isinstance(given, str):
        return parse_bandwidth(given) if rate else parse_bytes(given)
    unit = "bytes per second (12e9, '12GB/s')" if rate else "bytes (16e9, '16GB')"
    if isinstance(given, bool) or not isinstance(given, Real) or not float(given) > 0:
        raise ValueError(f"{what}={given!r} must be a positive number of {unit}")
    return float(given)
