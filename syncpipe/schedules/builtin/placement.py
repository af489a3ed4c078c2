"""Where the stages are: what all schedules are given, and the layouts that some want."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

__all__ = ["Placement", "depths_of", "in_a_v", "in_rounds", "placed"]

#: A number of stages, each on a device of its own, or for each stage the index of its device.
Placement = int | Sequence[int]


def placed(m: int, device_of: Placement) -> tuple[int, ...]:
    """The device of each stage, checked.

    Raises:
        ValueError: if there is no micro-batch, or a device has no stage.
    """
    devices = tuple(range(device_of)) if isinstance(device_of, int) else tuple(device_of)
    if m < 1:
        raise ValueError(f"a schedule needs at least one micro-batch, but m={m}")
    if not devices or set(devices) != set(range(max(devices) + 1)):
        raise ValueError(
            f"device_of={device_of} must name, for each stage, one of the devices 0, 1, ..., and "
            "each of these at least once"
        )
    return devices


def depths_of(device_of: tuple[int, ...]) -> list[int]:
    """For each stage its place from the right, from 1; neighbours on a device share it."""
    runs = [len(list(run)) for _, run in groupby(device_of)]
    return [len(runs) - r for r, length in enumerate(runs) for _ in range(length)]


def in_rounds(name: str, m: int, device_of: Placement) -> tuple[int, ...]:
    """As :func:`placed`, for stages that go round: 0, 1, ..., and again from 0.

    Raises:
        ValueError: if they do not, with a layout that does.
    """
    devices = placed(m, device_of)
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
    devices = placed(m, device_of)
    p = max(devices) + 1
    wanted = (*range(p), *reversed(range(p)))
    if devices != wanted:
        raise ValueError(
            f"{name} needs two stages on each device, which go there and back; on {p} devices that "
            f"is devices={list(wanted)}, but device_of={list(devices)}"
        )
    return devices
