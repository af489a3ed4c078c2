"""Where the stages are: what all schedules are given, and the layouts that some want."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from syncpipe.schedules.schedule import Devices, devices_of

__all__ = ["Placement", "depths_of", "in_a_v", "in_rounds", "on_one_each", "placed", "replicas_of"]

#: A number of stages, each on a device of its own; or for each stage the index of its device, or
#: those of its replicas in a tuple.
Placement = int | Sequence[int] | Devices


def placed(m: int, device_of: Placement) -> Devices:
    """The devices of each stage, checked.

    Raises:
        ValueError: if there is no micro-batch, or a device has no stage.
    """
    devices = tuple(range(device_of)) if isinstance(device_of, int) else tuple(device_of)
    if m < 1:
        raise ValueError(f"a schedule needs at least one micro-batch, but m={m}")
    there = set(chain.from_iterable(devices_of(devices, j) for j in range(len(devices))))
    if not there or there != set(range(max(there) + 1)):
        raise ValueError(
            f"device_of={device_of} must name, for each stage, one of the devices 0, 1, ..., and "
            "each of these at least once"
        )
    return devices


def replicas_of(device_of: Devices) -> list[int]:
    """For each stage how many devices serve it."""
    return [len(devices_of(device_of, j)) for j in range(len(device_of))]


def depths_of(device_of: Devices) -> list[int]:
    """For each stage how many devices there are from it to the right; neighbours on one share it.

    All replicas count: so many micro-batches can be computed at a time there.
    """
    depths: list[int] = []
    depth = 0
    for devices, run in groupby(reversed(device_of)):
        depth += len(devices) if isinstance(devices, tuple) else 1
        depths += [depth for _ in run]
    return depths[::-1]


def on_one_each(name: str, m: int, device_of: Placement) -> tuple[int, ...]:
    """As :func:`placed`, for stages that are on one device each.

    Raises:
        ValueError: if one has replicas.
    """
    devices = placed(m, device_of)
    for j, device in enumerate(devices):
        if isinstance(device, tuple):
            raise ValueError(
                f"{name} is made for stages on one device each, but stage {j} is on {device}: make "
                "it for one of them, and deal that by syncpipe.schedules.dealt(schedule, device_of)"
            )
    return tuple([device for device in devices if isinstance(device, int)])


def in_rounds(name: str, m: int, device_of: Placement) -> tuple[int, ...]:
    """As :func:`placed`, for stages that go round: 0, 1, ..., and again from 0.

    Raises:
        ValueError: if they do not, with a layout that does.
    """
    devices = on_one_each(name, m, device_of)
    p = max(devices) + 1
    if len(devices) % p or any(device != j % p for j, device in enumerate(devices)):
        raise ValueError(
            f"{name} needs stages that go round the devices evenly, such as "
            f"devices={[*range(p), *range(p)]}, but device_of={list(devices)}"
        )
    return devices


def in_a_v(name: str, m: int, device_of: Placement) -> tuple[int, ...]:
    """As :func:`placed`, for two stages on each device: 0, 1, ..., and back to 0.

    Raises:
        ValueError: if they are elsewhere, with the layout for so many devices.
    """
    devices = on_one_each(name, m, device_of)
    p = max(devices) + 1
    wanted = (*range(p), *reversed(range(p)))
    if devices != wanted:
        raise ValueError(
            f"{name} needs two stages on each device, which go there and back; on {p} devices that "
            f"is devices={list(wanted)}, but device_of={list(devices)}"
        )
    return devices
