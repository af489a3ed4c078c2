"""From what people write, ``schedule="1f1b"``, to a valid schedule."""

from __future__ import annotations

import difflib
import operator
import os
import types
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

from syncpipe.schedules.greedy import dealt
from syncpipe.schedules.named import BY_STAGE, SCHEDULES
from syncpipe.schedules.player import validate
from syncpipe.schedules.schedule import Devices, Schedule, from_csv

__all__ = ["SCHEDULES", "ScheduleLike", "build", "named", "shown"]

#: What a schedule can be given as: a name in :data:`SCHEDULES`, the path of a CSV file, a schedule,
#: or what makes one for ``m`` micro-batches and stages on the devices ``device_of``.
ScheduleLike = str | os.PathLike[str] | Schedule | Callable[[int, Any], Schedule]


def build(schedule: ScheduleLike, m: int, device_of: Sequence[int] | Devices) -> Schedule:
    """Make a valid schedule for so many micro-batches and these stages.

    With replicas, what does not know of them is made for one device in the place of those that
    serve a stage together, and is dealt out (:func:`syncpipe.schedules.dealt`).

    Args:
        schedule: a name in :data:`SCHEDULES`; a schedule; the path of a CSV file (:func:`to_csv`),
            a string that ends in ``.csv`` or a path object; or any function ``(m, device_of)``
            that returns a schedule, which is asked once for the same arguments.
        m: number of micro-batches.
        device_of: for each stage the index of its device, or those of its replicas in a tuple.

    Raises:
        TypeError: if ``schedule`` is none of these, or a function that returns no schedule.
        ValueError: the name is unknown, or the schedule not valid or made for something else.
    """
    devices = tuple(device_of)
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        schedule = named(schedule)
    if isinstance(schedule, str | os.PathLike):
        path = Path(schedule)
        schedule = from_csv(path.read_text(encoding="utf-8"), path.name)
    if isinstance(schedule, Schedule):
        return _fitting(schedule, m, devices)
    if not callable(schedule):
        raise TypeError(
            f"schedule={schedule!r}: must be a name, a Schedule, the path of a CSV file or a "
            f"function (m, device_of) -> Schedule; the names are {', '.join(SCHEDULES)}"
        )
    # As a method it has a hash, which is that of an object, whatever the function itself has.
    return _made(types.MethodType(operator.call, schedule), m, devices)


def named(name: str) -> Callable[[int, Any], Schedule]:
    """What makes the schedule of that name."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    if name == "auto":
        raise ValueError(
            "schedule='auto' is made for costs: record some steps (with pipe.trace() as trace:) "
            "and give syncpipe.schedules.auto(m, device_of, costs=trace.costs, "
            "rematerialized=trace.rematerialized)"
        )
    close = difflib.get_close_matches(name.lower(), SCHEDULES, n=1, cutoff=0.5)
    hint = f" did you mean {close[0]!r}?" if close else ""
    known = f"the names are {', '.join(SCHEDULES)}, and a path ends in .csv"
    raise ValueError(f"there is no schedule {name!r};{hint} {known}")


def shown(schedule: ScheduleLike) -> str:
    """How messages call it."""
    if isinstance(schedule, str | os.PathLike | Schedule):
        return repr(schedule.name if isinstance(schedule, Schedule) else str(schedule))
    if isinstance(schedule, partial):
        options = [f"{key}={value!r}" for key, value in schedule.keywords.items()]
        return f"partial({', '.join([shown(schedule.func), *map(repr, schedule.args), *options])})"
    return str(getattr(schedule, "__qualname__", repr(schedule)))


@lru_cache(maxsize=128)
def _made(function: types.MethodType, m: int, device_of: Devices) -> Schedule:
    maker: Any = function.__self__
    name = shown(maker)
    maker = maker.func if isinstance(maker, partial) else maker
    knows = any(maker is known for known in BY_STAGE.values())
    given = device_of if knows else _one_each(device_of)
    try:
        schedule = function(m, given)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"schedule={name} returned {schedule!r}, which is no Schedule")
        return _fitting(schedule, m, device_of)
    except Exception as error:
        error.add_note(f"So says schedule={name} when called with m={m}, device_of={given}")
        raise


def _one_each(device_of: Devices) -> tuple[int, ...]:
    """The same stages with one device in the place of those that serve a stage together."""
    if not any(isinstance(devices, tuple) for devices in device_of):
        return cast("tuple[int, ...]", device_of)
    groups = list(dict.fromkeys(device_of))
    return tuple([groups.index(devices) for devices in device_of])


def _fitting(schedule: Schedule, m: int, device_of: Devices) -> Schedule:
    """The schedule itself, or dealt out to replicas, if it is valid for these stages."""
    single = device_of if schedule.device_of == device_of else _one_each(device_of)
    for what, has, wanted in (("m", schedule.m, m), ("device_of", schedule.device_of, single)):
        if has != wanted:
            raise ValueError(
                f"schedule {schedule.name!r} is made for {what}={has}, but here {what}={wanted}; "
                f"make one for m={m}, device_of={single}"
            )
    validate(schedule)
    return schedule if single == device_of else dealt(schedule, device_of)
