"""From what people write, ``schedule="1f1b"``, to a valid schedule."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from syncpipe.schedules.builtin import gpipe, interleaved_1f1b, naive, one_f_one_b, zb_h1
from syncpipe.schedules.schedule import Schedule, validate
from syncpipe.schedules.text import from_csv

__all__ = ["SCHEDULES", "build", "named"]

#: The schedules by name; more can be added. Each takes ``(m, device_of)`` and its own options.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
}


def build(
    schedule: str | os.PathLike[str] | Schedule, m: int, device_of: Sequence[int], **options: Any
) -> Schedule:
    """A valid schedule for so many micro-batches and these stages.

    Args:
        schedule: a name in :data:`SCHEDULES`, a schedule, or the path of a CSV file
            (:func:`to_csv`): a string that ends in ``.csv``, or a path object.
        m: number of micro-batches.
        device_of: for each stage the index of its device.
        **options: those of the schedule of that name, such as ``slots`` of ``"1f1b"``.

    Raises:
        TypeError: if ``schedule`` is none of these.
        ValueError: if the name or an option is unknown, or if the schedule is not valid or made
            for something else.
    """
    devices = tuple(device_of)
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        frozen = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items())
        for option, value in frozen:
            if not isinstance(value, Hashable):
                raise ValueError(f"schedule {schedule!r} cannot take {option}={value!r}")
        return _build_named(schedule, named(schedule), m, devices, frozen)
    if isinstance(schedule, str | os.PathLike):
        path = Path(schedule)
        schedule = from_csv(path.read_text(encoding="utf-8"), path.name)
    elif not isinstance(schedule, Schedule):
        raise TypeError(
            "schedule must be a name, a Schedule or the path of a CSV file, not "
            f"{type(schedule).__name__}; the names are {', '.join(SCHEDULES)}"
        )
    if options:
        raise ValueError(
            f"{', '.join(options)}: only a schedule given by name takes options, and "
            f"{schedule.name!r} is complete as it is"
        )
    for what, has, wanted in (("m", schedule.m, m), ("device_of", schedule.device_of, devices)):
        if has != wanted:
            raise ValueError(
                f"schedule {schedule.name!r} is made for {what}={has}, but here {what}={wanted}; "
                f"make one for m={m}, device_of={devices}"
            )
    validate(schedule)
    return schedule


def named(name: str) -> Callable[..., Schedule]:
    """What makes the schedule of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name.lower(), SCHEDULES, n=1, cutoff=0.5)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"there is no schedule {name!r};{hint} the names are {', '.join(SCHEDULES)}, and a "
            "path ends in .csv"
        )
    return SCHEDULES[name]


@lru_cache(maxsize=128)
def _build_named(
    name: str,
    function: Callable[..., Schedule],
    m: int,
    device_of: tuple[int, ...],
    options: tuple[tuple[str, Any], ...],
) -> Schedule:
    known = list(inspect.signature(function).parameters)[2:]
    for option, value in options:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"schedule {name!r} has no option {option}={value!r}; {takes}")
    schedule = function(m, device_of, **dict(options))
    validate(schedule)
    return schedule
