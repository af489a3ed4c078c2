"""Schedules that are an order for each stage, wherever the stages are.

Where a device has several stages, their orders are merged into one
(:mod:`syncpipe.schedules.merge`).

Two devices, three micro-batches (1F1B with the textbook's slots); ``F`` is a forward, ``B`` a
backward, ``I`` and ``W`` its input and weight halves:

    naive   F0      B0--F1      B1--F2      B2--    1f1b    F0F1    B0--F2B1--  B2--
              F0B0--      F1B1--      F2B2--                  F0B0--F1B1--F2B2--

    gpipe   F0F1F2      B2--B1--B0--                zb_h1   F0F1  I0W0F2I1W1I2W2
              F0F1F2B2--B1--B0--                              F0I0F1I1W0F2I2W1W2

                                                    zb_h2   F0F1F2I0W0I1W1I2W2
                                                              F0I0F1I1F2I2W0W1W2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from syncpipe.schedules.builtin.placement import Placement, depths_of, placed, replicas_of
from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.merge import onto_devices
from syncpipe.schedules.schedule import Devices, Schedule

__all__ = ["gpipe", "naive", "one_f_one_b", "zb_h1", "zb_h2"]


def naive(m: int, device_of: Placement) -> Schedule:
    """One micro-batch at a time through all stages and back: model parallelism as done by hand.

    Args:
        m: number of micro-batches.
        device_of: number of stages, or for each stage the index of its device.
    """
    devices = placed(m, device_of)
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
    devices = placed(m, device_of)
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
    as many micro-batches are in flight on a stage as it has slots. With replicas it is 1F1B-RR:
    micro-batch ``i`` goes both ways on replica ``i % r``, and each replica takes turns as above.

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
            for the stage before. More than ``m`` is ``m``. With replicas they are for each device
            of the stage: ``n - j`` is the number of devices from stage ``j`` on, divided by
            those of the stage and rounded up, PipeDream's number; and all replicas of a stage
            together never have fewer than those of the next.

    Raises:
        ValueError: if the slots cannot work.
    """
    devices = placed(m, device_of)
    if slots == "textbook":
        counts = _counts(devices, 1)
    elif slots == "overlap":
        counts = _counts(devices, 2)
    else:
        counts = _checked_slots(slots, replicas_of(devices))
    rows = [_row(m, count, "backward") for count in counts]
    return onto_devices("1f1b", m, devices, rows)


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
    devices = placed(m, device_of)
    rows = _with_halves(m, _counts(devices, 1))
    return onto_devices("zb_h1", m, devices, rows)


def zb_h2(m: int, device_of: Placement) -> Schedule:
    """ZB-H1 with more micro-batches in flight: a stage that has begun does not idle until it ends.

    So many forwards come first that the first gradient is there when they are done. From the first
    to the last action of any one device it idles for ``(n-1) (F+I-2W)``, not at all if the three
    are equal; the memory is twice that of 1F1B, ``2n - 1`` micro-batches in flight on any stage.

    In a step that begins and ends for all devices at once, as a synchronous one does, those behind
    the first also wait for the first micro-batch, ``(n-1) F``. With even halves that is as much as
    in :func:`zb_h1`; what remains is more work at hand while transfers are under way.

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.3 (ZB-H2).

    Args:
        m: number of micro-batches.
        device_of: number of stages, or for each stage the index of its device. Neighbours on one
            device count as one stage above.
    """
    devices = placed(m, device_of)
    rows = _with_halves(m, _counts(devices, 2))
    return onto_devices("zb_h2", m, devices, rows)


def _counts(device_of: Devices, passes: int) -> list[int]:
    """For each stage how many micro-batches are in flight on all of its devices together.

    As many as there are devices behind it, once, or on the way there and back.
    """
    counts: list[int] = []
    depths, replicas = depths_of(device_of), replicas_of(device_of)
    for depth, r in zip(reversed(depths), reversed(replicas), strict=True):
        wanted = max([passes * depth - (passes - 1) * r, *counts[-1:]])
        counts.append(-(-wanted // r) * r)  # each replica has as many
    return counts[::-1]


def _with_halves(m: int, counts: Sequence[int]) -> list[list[tuple[Kind, int]]]:
    """For each stage an order with so many forwards first, and the same in flight as on stage 0."""
    return [_row(m, count, "backward_input", counts[0] - count) for count in counts]


def _row(m: int, count: int, back: Kind, delay: int = 0) -> list[tuple[Kind, int]]:
    """So many forwards, then back and forth in turn.

    Args:
        m: number of micro-batches.
        count: of forwards at first.
        back: the kind of the backwards. After an input half comes a weight half, if there is one:
        delay: that of so many micro-batches before; the rest follow at the end.
    """
    row: list[tuple[Kind, int]] = [("forward", i) for i in range(min(m, count))]
    weights: list[tuple[Kind, int]] = [("backward_weight", i) for i in range(m)]
    for i in range(m):
        row.append((back, i))
        if back == "backward_input" and i >= delay:
            row.append(weights[i - delay])
        if i + count < m:
            row.append(("forward", i + count))
    return row + (weights[max(0, m - delay) :] if back == "backward_input" else [])


def _checked_slots(slots: Any, replicas: list[int]) -> list[int]:
    """For each stage the slots of all replicas."""
    n = len(replicas)
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
        if j and count * replicas[j] > counts[j - 1] * replicas[j - 1]:
            most = counts[j - 1] * replicas[j - 1] // replicas[j]
            raise ValueError(
                f"slots={counts}: stage {j} would wait for ever for a micro-batch that stage "
                f"{j - 1} has no slot for; give it at most {most}"
                + (f" (the replicas are {replicas})" if max(replicas) > 1 else "")
            )
    return [count * r for count, r in zip(counts, replicas, strict=True)]
