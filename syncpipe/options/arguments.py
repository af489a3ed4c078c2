"""What ``chunks`` and ``schedule`` of a pipe may be; ``checkpoint`` has a file of its own."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, cast

from syncpipe.options.replicas import consecutive
from syncpipe.schedules import one_f_one_b
from syncpipe.schedules.build import AUTO, ScheduleLike, named, shown
from syncpipe.schedules.schedule import Schedule

__all__ = [
    "check_slots",
    "checked_chunks",
    "checked_schedule",
    "shown_schedule",
]


def checked_chunks(chunks: Any) -> int:
    """The number of micro-batches as an int.

    Raises:
        TypeError: not an integer.
        ValueError: less than one.
    """
    try:
        count = operator.index(chunks)
    except TypeError as error:
        raise TypeError(f"chunks must be an integer, not {chunks!r}") from error
    if isinstance(chunks, bool):
        raise ValueError(f"chunks={chunks!r}: must be a number, at least 1, not a bool")
    if count <= 0:
        raise ValueError(f"chunks={chunks!r}: the number of micro-batches must be at least 1")
    return count


def checked_schedule(schedule: Any, slots: Any = None) -> ScheduleLike:
    """A schedule, as far as it can be checked without a mini-batch.

    Args:
        schedule: anything that :func:`syncpipe.schedules.build` takes, or ``"auto"``.
        slots: of 1F1B; short for ``schedule=functools.partial(one_f_one_b, slots=slots)``.

    Raises:
        TypeError: not a schedule.
        ValueError: an unknown name, or slots for something else than 1F1B.
    """
    if not isinstance(schedule, str | os.PathLike | Schedule) and not callable(schedule):
        raise TypeError(
            f"schedule={schedule!r}: must be a name, a Schedule, the path of a CSV file or a "
            "function (m, device_of) -> Schedule"
        )
    if isinstance(schedule, str) and not schedule.endswith(".csv") and schedule != AUTO:
        named(schedule)
    if slots is None:
        return cast("ScheduleLike", schedule)
    if schedule != "1f1b":
        raise ValueError(f"slots={slots!r}: only schedule='1f1b' has slots, not {shown(schedule)}")
    slots = tuple(slots) if isinstance(slots, list) else slots
    try:
        return _with_slots(slots)
    except TypeError:  # it has no hash; what else is wrong with it, the schedule says
        return partial(one_f_one_b, slots=slots)


@lru_cache(maxsize=128)
def _with_slots(slots: Any) -> partial[Schedule]:
    """The same object for the same slots, so that its schedules are made once."""
    return partial(one_f_one_b, slots=slots)


def check_slots(schedule: ScheduleLike, replicas: Sequence[int]) -> None:
    """Refuses slots that cannot be, as far as that can be said before a mini-batch is there.

    Args:
        schedule: what was checked before.
        replicas: of each stage.

    Raises:
        ValueError: naming them; or the schedule cannot be for stages with replicas.
    """
    if schedule == AUTO and any(count > 1 for count in replicas):
        raise ValueError(
            f"schedule='auto' is made for stages on one device each, but replicas={list(replicas)}:"
            " choose a schedule by name, such as '1f1b'"
        )
    if isinstance(schedule, partial) and schedule.func is one_f_one_b:
        schedule(1, consecutive(replicas))


def shown_schedule(schedule: ScheduleLike) -> str:
    """A schedule for the ``repr`` of a pipe; nothing if it is the usual one."""
    return "" if schedule == "1f1b" else f", schedule={shown(schedule)}"
