"""What ``replicas`` of a pipe may be: how many devices serve each stage."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from syncpipe.schedules.schedule import Devices

__all__ = [
    "ReplicasLike",
    "checked_replicas",
    "consecutive",
    "counts_of",
    "partitions_for",
    "split",
]

#: For all stages, or for each.
ReplicasLike = int | tuple[int, ...]


def checked_replicas(replicas: Any) -> ReplicasLike:
    """A number for all stages, or one for each.

    Raises:
        TypeError: not integers.
        ValueError: less than one.
    """
    single = not isinstance(replicas, Iterable) or isinstance(replicas, str | bytes)
    given = [replicas] if single else list(replicas)
    try:
        counts = [operator.index(count) for count in given]
    except TypeError as error:
        raise TypeError(
            f"replicas={replicas!r}: must be a number of devices for each stage, such as "
            "[2, 1, 1], or one number for all stages"
        ) from error
    if any(isinstance(count, bool) or count < 1 for count in given):
        raise ValueError(f"replicas={replicas!r}: each stage is served by at least 1 device")
    return counts[0] if single else tuple(counts)


def counts_of(replicas: ReplicasLike, partitions: int) -> list[int]:
    """For each partition the number of its replicas.

    Raises:
        ValueError: they are for another number of partitions.
    """
    if isinstance(replicas, int):
        return [replicas] * partitions
    if len(replicas) != partitions:
        raise ValueError(
            f"replicas={list(replicas)} has {len(replicas)} numbers, but balance has {partitions} "
            "partitions: give one for each. (To set another balance, set pipe.replicas = 1 before)"
        )
    return list(replicas)


def partitions_for(replicas: ReplicasLike, balance: str, devices: int) -> int:
    """How many partitions a balance by name makes.

    Args:
        replicas: as checked.
        balance: the name.
        devices: how many there are.

    Raises:
        ValueError: they do not fit.
    """
    if isinstance(replicas, int):
        if devices % replicas:
            raise ValueError(
                f"replicas={replicas}: {devices} devices cannot be divided by {replicas}: give as "
                f"many as there are stages times {replicas}"
            )
        return devices // replicas
    if len(set(replicas)) > 1:
        raise ValueError(
            f"balance={balance!r} makes stages that are alike, but replicas={list(replicas)} are "
            "for stages that are not: give numbers of layers, such as those of "
            "syncpipe.planner.plan(..., replicas=True)"
        )
    return len(replicas)


def split(counts: Sequence[int], workers: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For each stage its workers; those of the first stage come first.

    Raises:
        ValueError: a stage would have the same one twice.
    """
    following = iter(workers)
    found = [tuple(islice(following, count)) for count in counts]
    for j, those in enumerate(found):
        if len(set(those)) < len(those):
            names = ", ".join(str(getattr(worker, "device", worker)) for worker in those)
            raise ValueError(
                f"devices: the replicas of stage {j} would be on {names}, which are listed stage "
                "by stage: each replica of a stage needs a device of its own"
            )
    return found


def consecutive(counts: Sequence[int]) -> Devices:
    """The stages on one device after another, as the argument ``device_of`` of schedules."""
    following = iter(range(sum(counts)))
    found = [tuple(islice(following, count)) for count in counts]
    return tuple([those if len(those) > 1 else those[0] for those in found])
