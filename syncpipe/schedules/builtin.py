"""The schedules that one can ask for by name.

Two devices, three micro-batches (1F1B with the textbook's slots); ``F`` is a forward, ``B`` a
backward, ``I`` and ``W`` its input and weight halves:

    naive   F0      B0--F1      B1--F2      B2--    1f1b    F0F1    B0--F2B1--  B2--
              F0B0--      F1B1--      F2B2--                  F0B0--F1B1--F2B2--

    gpipe   F0F1F2      B2--B1--B0--                zb_h1   F0F1  I0W0F2I1W1I2W2
              F0F1F2B2--B1--B0--                              F0I0F1I1W0F2I2W1W2

Each is written down as the order on one device per stage. Where a device has several stages, their
orders are merged into one (:mod:`syncpipe.schedules.merge`), except for interleaved 1F1B, which is
about just that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.merge import onto_devices
from syncpipe.schedules.schedule import Action, Schedule

__all__ = ["gpipe", "interleaved_1f1b", "naive", "one_f_one_b", "zb_h1"]

#: A number of stages, each on a device of its own, or for each stage the index of its device.
Placement = int | Sequence[int]


def naive(m: int, device_of: Placement) -> Schedule:
    """One micro-batch at a time through all stages and back: model parallelism as done by hand.

    Args:
        m: number of micro-batches.
        device_of: number of stages, or for each stage the index of its device.
    """
    devices = _placed(m, device_of)
    row: list[tuple[Kind, int]] = []
    for i in range(m):
        row += [("forward", i), ("backward", i)]
    return onto_devices("naive", m, devices, [row] * len(devices))


def gpipe(m: int, device_of: Placement) -> Schedule:
    """Fill-drain, or F-then-B: all forwards, then all backwards, the last micro-batch first.

    With even stages the bubble is ``(n-1) / (m+n-1)`` of the time; all ``m`` micro-batches are in
    flight at once.

    Source: Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism, section 2.3. As in ``loss.backward()``, micro-batch ``i`` goes back before ``i-1``.

    Args:
        m: number of micro-batches.
        device_of: number of stages, or for each stage the index of its device.
    """
    devices = _placed(m, device_of)
    row: list[tuple[Kind, int]] = [("forward", i) for i in range(m)]
    row += [("backward", i) for i in reversed(range(m))]
    return onto_devices("gpipe", m, devices, [row] * len(devices))


def one_f_one_b(
    m: int,
    device_of: Placement,
    *,
    slots: Literal["textbook", "overlap"] | Sequence[int] = "overlap",
) -> Schedule:
    """1F1B with flush: a stage goes forward until its slots are taken, then back and forth in turn.

    With even stages and without transfers the bubble is GPipe's, ``(n-1) / (m+n-1)``, but at most
    as many micro-batches are in flight on a stage as it has slots.

    Source: Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN Training
    (the order); Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM, section 2.2.1 (with a flush after each mini-batch).

    Args:
        m: number of micro-batches.
        device_of: number of stages, or for each stage the index of its device. Neighbours on one
            device count as one stage below.
        slots: the largest number of micro-batches in flight for each stage. ``"textbook"`` is
            ``n - j``, the fewest that keep even stages busy when transfers take no time.
            ``"overlap"`` is ``2 (n-j) - 1``: while a stage computes, activations and gradients of
            other micro-batches are on their way, and when one takes long the next stage has work
            left. Or a number for each stage, never more than
            for the stage before. More than ``m`` is ``m``.

    Raises:
        ValueError: if the slots cannot work.
    """
    devices = _placed(m, device_of)
    depths = _depths(devices)
    if slots == "textbook":
        counts = depths
    elif slots == "overlap":
        counts = [2 * depth - 1 for depth in depths]
    else:
        counts = _checked_slots(slots, len(devices))
    rows = []
    for count in counts:
        row: list[tuple[Kind, int]] = [("forward", i) for i in range(min(m, count))]
        for i in range(m):
            row.append(("backward", i))
            if i + count < m:
                row.append(("forward", i + count))
        rows.append(row)
    return onto_devices("1f1b", m, devices, rows)


def interleaved_1f1b(m: int, device_of: Placement) -> Schedule:
    """1F1B where each device has several stages: stage ``j`` is on device ``j % devices``.

    A device takes ``p`` micro-batches through its first stage, then the same through its second
    and so on, ``p`` the number of devices. Filling and draining thus take only a stage's time per
    device, not all of them: with ``v`` stages on each the bubble is ``(p-1) / (v m + p-1)`` if
    ``m`` is a multiple of ``p``. Other ``m`` work, and idle a little more.

    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM, section 2.2.2.

    Args:
        m: number of micro-batches.
        device_of: for each stage the index of its device, 0, 1, ... and again from 0.

    Raises:
        ValueError: if the stages are not laid out like that.
    """
    devices = _placed(m, device_of)
    p = max(devices) + 1
    if len(devices) % p or any(device != j % p for j, device in enumerate(devices)):
        raise ValueError(
            f"interleaved_1f1b needs stages that go round the devices evenly, such as "
            f"{[*range(p), *range(p)]}, but device_of={list(devices)}"
        )
    v = len(devices) // p
    padded = -(-m // p) * p  # micro-batches that are not there are left out in the end
    rows = []
    for d in range(p):
        forwards, backwards = [], []
        for start in range(0, padded, p):
            group = range(start, start + p)
            for chunk in range(v):
                forwards += [Action("forward", i, chunk * p + d) for i in group]
                backwards += [Action("backward", i, (v - 1 - chunk) * p + d) for i in group]
        warm_up = min(padded * v, 2 * (p - d - 1) + (v - 1) * p)
        row = forwards[:warm_up]
        for k, backward in enumerate(backwards):
            row += [*forwards[warm_up + k : warm_up + k + 1], backward]
        rows.append(tuple(action for action in row if action.i < m))
    return Schedule(m, devices, tuple(rows), "interleaved_1f1b")


def zb_h1(m: int, device_of: Placement) -> Schedule:
    """1F1B with backward in two halves: what nobody waits for fills the bubble.

    The input half sends the gradient on at once; stage ``j`` puts the weight half off by ``j``
    micro-batches, and so starts all of its input halves early. With even stages devices idle for
    ``(n-1) (F+I-W)``, against ``(n-1) (F+I+W)`` in 1F1B: a third, if the three are equal. At most
    ``n`` micro-batches are in flight on any stage, as on 1F1B's first.

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.3 (ZB-H1).

    Args:
        m: number of micro-batches.
        device_of: number of stages, or for each stage the index of its device. Neighbours on one
            device count as one stage above.
    """
    devices = _placed(m, device_of)
    depths = _depths(devices)
    rows = []
    for depth in depths:
        delay = depths[0] - depth
        row: list[tuple[Kind, int]] = [("forward", i) for i in range(min(m, depth))]
        for i in range(m):
            row.append(("backward_input", i))
            if i >= delay:
                row.append(("backward_weight", i - delay))
            if i + depth < m:
                row.append(("forward", i + depth))
        row += [("backward_weight", i) for i in range(max(0, m - delay), m)]
        rows.append(row)
    return onto_devices("zb_h1", m, devices, rows)


def _placed(m: int, device_of: Placement) -> tuple[int, ...]:
    """The device of each stage, checked."""
    devices = tuple(range(device_of)) if isinstance(device_of, int) else tuple(device_of)
    if m < 1:
        raise ValueError(f"a schedule needs at least one micro-batch, but m={m}")
    if not devices or set(devices) != set(range(max(devices) + 1)):
        raise ValueError(
            f"device_of={device_of} must name, for each stage, one of the devices 0, 1, ..., and "
            "each of these at least once"
        )
    return devices


def _depths(device_of: tuple[int, ...]) -> list[int]:
    """For each stage its place from the right, from 1; neighbours on a device share it."""
    runs = [len(list(run)) for _, run in groupby(device_of)]
    return [len(runs) - r for r, length in enumerate(runs) for _ in range(length)]


def _checked_slots(slots: Any, n: int) -> list[int]:
    counts = [] if isinstance(slots, str) or not isinstance(slots, Sequence) else list(slots)
    if not counts or not all(isinstance(count, int) for count in counts):
        raise ValueError(f"slots={slots!r}: use 'textbook', 'overlap' or a number for each stage")
    if len(counts) != n:
        raise ValueError(
            f"slots={counts} has {len(counts)} numbers, but there are {n} stages: give one for each"
        )
    for j, count in enumerate(counts):
        if count < 1:
            raise ValueError(f"slots={counts}: stage {j} needs at least one slot, not {count}")
        if j and count > counts[j - 1]:
            raise ValueError(
                f"slots={counts}: stage {j} would wait for ever for a micro-batch that stage "
                f"{j - 1} has no slot for; give it at most {counts[j - 1]}"
            )
    return counts
