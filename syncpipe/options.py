"""What ``chunks``, ``checkpoint`` and ``schedule`` of a pipe may be."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

from syncpipe.schedule import Schedule
from syncpipe.schedules.build import named

__all__ = ["Modes", "check_length", "checked_chunks", "checked_modes", "checked_schedule"]

#: A checkpoint mode for all stages, or one for each.
Modes = str | tuple[str, ...]

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


def checked_schedule(
    schedule: Any, slots: str | Sequence[int] | None
) -> tuple[str | os.PathLike[str] | Schedule, str | tuple[int, ...] | None]:
    """A schedule and its slots, as far as they can be checked without a mini-batch.

    Raises:
        TypeError: not a schedule.
        ValueError: an unknown name.
    """
    if not isinstance(schedule, str | os.PathLike | Schedule):
        raise TypeError(
            f"schedule={schedule!r}: must be a name, a Schedule or the path of a CSV file"
        )
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        named(schedule)
    return schedule, slots if slots is None or isinstance(slots, str) else tuple(slots)
