"""What ``chunks``, ``checkpoint`` and ``schedule`` of a pipe may be."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

from syncpipe.schedules.build import named
from syncpipe.schedules.schedule import Schedule

__all__ = [
    "Modes",
    "Slots",
    "check_length",
    "check_slots",
    "checked_chunks",
    "checked_modes",
    "checked_schedule",
    "shown_schedule",
]

#: A checkpoint mode for all stages, or one for each.
Modes = str | tuple[str, ...]

#: Of 1F1B: by name, or a number for each stage.
Slots = str | tuple[int, ...] | None

_CHECKPOINT_MODES = ("always", "except_last", "never")


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


def checked_modes(checkpoint: Any) -> Modes:
    """The mode for all stages, or those for each.

    Raises:
        ValueError: neither, or an unknown mode.
    """
    modes = (checkpoint,) if isinstance(checkpoint, str) else checkpoint
    names = ", ".join(map(repr, _CHECKPOINT_MODES))
    if not isinstance(modes, Sequence) or not all(isinstance(mode, str) for mode in modes):
        raise ValueError(f"checkpoint={checkpoint!r}: must be one of {names}, or one per stage")
    for mode in modes:
        if mode not in _CHECKPOINT_MODES:
            raise ValueError(f"checkpoint={checkpoint!r}: {mode!r} is not one of {names}")
    return checkpoint if isinstance(checkpoint, str) else tuple(modes)


def check_length(modes: Modes, stages: int) -> None:
    """Refuses modes for another number of stages.

    Raises:
        ValueError: with both numbers.
    """
    if not isinstance(modes, str) and len(modes) != stages:
        raise ValueError(
            f"checkpoint={modes} has {len(modes)} modes, but there are {stages} stages: give one "
            "for each stage, or one mode for all"
        )


def check_slots(slots: Slots, stages: int) -> None:
    """Refuses slots for another number of stages.

    Raises:
        ValueError: with both numbers.
    """
    if isinstance(slots, tuple) and len(slots) != stages:
        raise ValueError(
            f"slots={list(slots)} has {len(slots)} numbers, but there are {stages} stages: give "
            "one for each stage; setting pipe.schedule = '1f1b' forgets them"
        )


def checked_schedule(schedule: Any, slots: Any) -> tuple[str | os.PathLike[str] | Schedule, Slots]:
    """A schedule and its slots, as far as they can be checked without a mini-batch.

    Raises:
        TypeError: not a schedule.
        ValueError: an unknown name, or slots that cannot be.
    """
    if not isinstance(schedule, str | os.PathLike | Schedule):
        raise TypeError(
            f"schedule={schedule!r}: must be a name, a Schedule or the path of a CSV file"
        )
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        named(schedule)
    if slots is None:
        return schedule, None
    if schedule != "1f1b":
        raise ValueError(f"slots={slots!r}: only schedule='1f1b' has slots, not {schedule!r}")
    if isinstance(slots, str):
        if slots not in ("textbook", "overlap"):
            raise ValueError(f"slots={slots!r}: use 'textbook', 'overlap' or a number per stage")
        return schedule, slots
    if not isinstance(slots, Sequence):
        raise TypeError(f"slots={slots!r}: must be 'textbook', 'overlap' or a number per stage")
    return schedule, tuple(slots)


def shown_schedule(schedule: str | os.PathLike[str] | Schedule, slots: Slots) -> str:
    """A schedule for the ``repr`` of a pipe; nothing if it is the usual one."""
    if schedule == "1f1b" and slots is None:
        return ""
    name = schedule.name if isinstance(schedule, Schedule) else str(schedule)
    return f", schedule={name!r}" + ("" if slots is None else f", slots={slots!r}")
