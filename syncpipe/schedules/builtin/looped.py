"""Schedules for several stages on each device, where stage ``j`` is on device ``j % devices``.

Two devices with two stages each, four micro-batches; what is in small letters is of a device's
second stage. A half backward takes as long as a forward:

    looped_bfs   F0F1F2F3f0f1f2f3      b3--b2--b1--b0--B3--B2--B1--B0--
                   F0F1F2F3f0f1f2f3b3--b2--b1--b0--B3--B2--B1--B0--

    interleaved  F0F1f0f1F2  b0--F3b1--f2B0--f3B1--  b2--  b3--B2--B3--
    1f1b           F0F1f0b0--f1b1--F2B0--F3B1--f2b2--f3b3--B2--B3--

    interleaved  F0F1f0f1  i0w0F2i1w1F3I0W0f2I1W1f3i2w2i3w3I2W2I3W3
    zero bubble    F0F1f0i0f1i1w0F2I0w1F3I1W0f2i2W1f3i3w2I2w3I3W2W3
"""

from __future__ import annotations

from syncpipe.schedules.builtin.placement import Placement, in_rounds
from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.schedule import Action, Schedule

__all__ = ["interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs"]


def looped_bfs(m: int, device_of: Placement) -> Schedule:
    """Breadth first: GPipe, one stage of a device after the other.

    A device takes all micro-batches through its first stage, then all of them through its second,
    and back in the opposite order. With ``p`` devices and ``v`` stages on each the bubble is
    ``(p-1) / (v m + p-1)``, as in interleaved 1F1B, for every ``m`` from ``p`` on; all ``m``
    micro-batches are in flight at once. What it saves are changes: the parameters of a stage are
    used in one go.

    Source: Lamy-Poirier 2022, Breadth-First Pipeline Parallelism. On each stage the last
    micro-batch goes back first, as in :func:`gpipe`.

    Args:
        m: number of micro-batches.
        device_of: for each stage the index of its device, 0, 1, ... and again from 0.

    Raises:
        ValueError: if the stages are not laid out like that.
    """
    devices = in_rounds("looped_bfs", m, device_of)
    n, p = len(devices), max(devices) + 1
    rows = []
    for d in range(p):
        row = [Action("forward", i, j) for j in range(d, n, p) for i in range(m)]
        rows.append((*row, *(Action("backward", i, j) for _, i, j in reversed(row))))
    return Schedule(m, devices, tuple(rows), "looped_bfs")


def interleaved_1f1b(m: int, device_of: Placement) -> Schedule:
    """1F1B where each device has several stages.

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
    devices = in_rounds("interleaved_1f1b", m, device_of)
    p = max(devices) + 1
    rows = [_row(m, devices, d, "backward", lead=2 * (p - d - 1), delay=None) for d in range(p)]
    return Schedule(m, devices, tuple(rows), "interleaved_1f1b")


def interleaved_zero_bubble(m: int, device_of: Placement) -> Schedule:
    """Interleaved 1F1B with backward in two halves: weight halves fill the bubble.

    As in :func:`zb_h1`, input halves send gradients on early, so devices begin to go back sooner,
    and device ``d`` puts weight halves off by ``d`` of them. With ``p`` devices and ``v`` stages
    on each the devices idle for ``(p-1) (F+I-W)`` of a stage, where ``m`` is a multiple of ``p``,
    and none holds more than the ``v p`` cells of 1F1B's first device.

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.3 (ZB-H1), for the order of
    Narayanan et al. 2021 (:func:`interleaved_1f1b`).

    Args:
        m: number of micro-batches.
        device_of: for each stage the index of its device, 0, 1, ... and again from 0.

    Raises:
        ValueError: if the stages are not laid out like that.
    """
    devices = in_rounds("interleaved_zero_bubble", m, device_of)
    p = max(devices) + 1
    rows = [_row(m, devices, d, "backward_input", lead=p - d - 1, delay=d) for d in range(p)]
    return Schedule(m, devices, tuple(rows), "interleaved_zero_bubble")


def _row(
    m: int, device_of: tuple[int, ...], d: int, back: Kind, *, lead: int, delay: int | None
) -> tuple[Action, ...]:
    """What a device does in interleaved order.

    Args:
        m: number of micro-batches.
        device_of: for each stage the index of its device.
        d: the device.
        back: the kind of its backwards.
        lead: so many more forwards than the last device it does before its first backward.
        delay: after so many further backwards it does the weight half of one; None: there is none.
    """
    n, p = len(device_of), max(device_of) + 1
    padded = -(-m // p) * p  # micro-batches that are not there are left out in the end
    forwards, backwards = [], []
    for start in range(0, padded, p):
        group = range(start, start + p)
        forwards += [Action("forward", i, j) for j in range(d, n, p) for i in group]
        backwards += [Action(back, i, j) for j in reversed(range(d, n, p)) for i in group]
    warm_up = min(len(forwards), lead + n - p)
    row = forwards[:warm_up]
    weights = [] if delay is None else [Action("backward_weight", i, j) for _, i, j in backwards]
    for k, backward in enumerate(backwards):
        row += [*forwards[warm_up + k : warm_up + k + 1], backward]
        if delay is not None and k >= delay:
            row.append(weights[k - delay])
    row += weights[len(weights) - (delay or 0) :]
    return tuple(action for action in row if action.i < m)
