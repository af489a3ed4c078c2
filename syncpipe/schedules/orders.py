"""Schedules that are an order of actions for each stage: GPipe, 1F1B, and their kin.

Pictures of them are in :mod:`syncpipe.schedules.named`. Where a device has several stages, their
orders are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, groupby, zip_longest
from typing import Any, Literal

from syncpipe.schedules.greedy import merge_orders
from syncpipe.schedules.schedule import HALVES, Action, Devices, Kind, Schedule, devices_of

#: The number of stages, each on its own device; or as ``Schedule.device_of``.
Placement = int | Sequence[int] | Devices


def checked_devices(m: int, device_of: Placement) -> Devices:
    devices = tuple(range(device_of)) if isinstance(device_of, int) else tuple(device_of)
    if m < 1:
        raise ValueError(f"a schedule needs at least one micro-batch, but m={m}")
    there = set(chain.from_iterable(devices_of(devices, j) for j in range(len(devices))))
    if not there or there != set(range(len(there))):
        raise ValueError(
            f"device_of={device_of} must name a device 0, 1, ... for each stage, and every device "
            "at least once"
        )
    return devices


def alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], first: int, delay: int = 0
) -> list[Action]:
    """``first`` forwards, then backwards, forwards in turn; weight halves are ``delay`` late."""
    weights = [Action("backward_weight", i, j) for kind, i, j in backwards if kind in HALVES]
    late = [[*[None] * delay, *weights]] if weights else []
    turns = zip_longest(backwards, *late, forwards[first:])
    return [*forwards[:first], *filter(None, chain.from_iterable(turns))]


@lru_cache(maxsize=2048)
def actions(kind: Kind, m: int, j: int) -> tuple[Action, ...]:
    return tuple([Action(kind, i, j) for i in range(m)])


def naive(m: int, device_of: Placement) -> Schedule:
    """One micro-batch at a time through all stages and back: model parallelism as done by hand."""
    return _with_slots("naive", m, checked_devices(m, device_of), 0)


def gpipe(m: int, device_of: Placement) -> Schedule:
    """Fill-drain, or F-then-B: all forwards, then all backwards, the last micro-batch first.

    With even stages the bubble is ``(n-1) / (m+n-1)`` of the time; all ``m`` micro-batches are in
    flight at once. Source: Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks
    using Pipeline Parallelism, section 2.3.
    """
    devices = checked_devices(m, device_of)
    stages = range(len(devices))
    rows = [[*actions("forward", m, j), *reversed(actions("backward", m, j))] for j in stages]
    return merge_orders("gpipe", m, devices, rows)


def one_f_one_b(
    m: int, device_of: Placement, *,
    slots: Literal["textbook", "overlap"] | Sequence[int] = "overlap",
) -> Schedule:  # fmt: skip
    """1F1B with flush: forwards until the slots of a stage are taken, then a backward in turn.

    With even stages and without transfers the bubble equals GPipe's. With replicas it is 1F1B-RR:
    micro-batch ``i`` runs on replica ``i % r``, forward and backward.

    Source: Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN Training (the
    order); Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM, section 2.2.1 (with a flush after each mini-batch).

    Args:
        m: number of micro-batches.
        device_of: for each stage its device, or the number of stages.
        slots: maximum of micro-batches in flight on each stage: ``"textbook"`` is ``n - j``, the
            fewest that keep even stages busy, ``"overlap"`` is ``2 (n-j) - 1``, which hides
            transfers. Or a number for each stage, at most that of the previous stage. With replicas
            it is for each device of the stage: ``n - j`` becomes the number of devices from stage
            ``j`` on, divided by the stage's own and rounded up, PipeDream's number.
    """
    devices = checked_devices(m, device_of)
    passes = {"textbook": 1, "overlap": 2}
    if isinstance(slots, str) and slots in passes:
        return _with_slots("1f1b", m, devices, passes[slots])
    n = len(devices)
    own: Any = slots if isinstance(slots, Sequence) and not isinstance(slots, str) else ()
    valid = len(own) == n and all(isinstance(count, int) and count > 0 for count in own)
    counts = [count * len(devices_of(devices, j)) for j, count in enumerate(own)] if valid else []
    if not valid or counts != sorted(counts, reverse=True):
        raise ValueError(
            f"slots={slots!r}: use 'textbook', 'overlap' or a number for each of {n} stages: at "
            "least 1, and times replicas no more than for the previous stage, or it would deadlock"
        )
    return _with_slots("1f1b", m, devices, counts)


def zb_h1(m: int, device_of: Placement) -> Schedule:
    """1F1B with split backwards: weight halves, which no stage waits for, fill the bubble.

    Stage ``j`` delays the weight half by ``j`` micro-batches. With even stages devices idle for
    ``(n-1) (F+I-W)``, against ``(n-1) (F+I+W)`` in 1F1B: a third if the three are equal. At most
    ``n`` micro-batches are in flight on any stage.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.3 (ZB-H1).
    """
    return _with_slots("zb_h1", m, checked_devices(m, device_of), 1, "backward_input")


def zb_h2(m: int, device_of: Placement) -> Schedule:
    """ZB-H1 with more micro-batches in flight: a stage that has begun does not idle until it ends.

    Between its first and last action a device idles for ``(n-1) (F+I-2W)``, not at all if the three
    are equal; ``2n - 1`` micro-batches are in flight on any stage. In a synchronous step all
    devices but the first also wait for the first micro-batch, ``(n-1) F``: with even halves as long
    as in :func:`zb_h1`.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.3 (ZB-H2).
    """
    return _with_slots("zb_h2", m, checked_devices(m, device_of), 2, "backward_input")


def _with_slots(
    name: str, m: int, devices: Devices, counts: int | list[int], back: Kind = "backward"
) -> Schedule:
    """On stage ``j``, ``counts[j]`` forwards, then a backward and a forward in turn.

    Split backwards keep ``counts[0]`` micro-batches in flight on each stage. Counts are for all
    replicas of a stage together. As a number, ``counts`` is 1 or 2 for the devices from a stage on,
    passed once or there and back, and 0 for one micro-batch.
    """
    if isinstance(counts, int):
        passes, counts, depth = counts, [], 0
        for own, run in groupby(reversed(devices)):
            r = len(own) if isinstance(own, tuple) else 1
            depth += r
            most = max([passes * depth - (passes - 1) * r, *counts[-1:]]) if passes else 1
            counts += [-(-most // r) * r if passes else 1 for _ in run]
        counts.reverse()
    rows = [_stage_order(m, j, back, count, counts[0] - count) for j, count in enumerate(counts)]
    return merge_orders(name, m, devices, rows)


@lru_cache(maxsize=2048)
def _stage_order(m: int, j: int, back: Kind, first: int, delay: int) -> tuple[Action, ...]:
    return tuple(alternating(actions("forward", m, j), actions(back, m, j), first, delay))
