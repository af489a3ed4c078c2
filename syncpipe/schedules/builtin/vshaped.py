"""Schedules for two stages on each device, laid out in a V: down the devices, and back up.

With ``p`` devices, device ``d`` has the stages ``d`` and ``2 p - 1 - d``, so the first device has
the first and the last stage. Two devices, four micro-batches; what is in small letters is of a
device's second stage:

    zbv       F0F1F2f0i0w0f1i1w1F3I0W0f2i2w2I1W1f3i3w3I2W2I3W3
                F0f0F1f1i0w0F2I0W0f2i1w1F3I1W1f3i2w2I2i3I3W2w3W3

    v_half    F0F1  f0i0F2w0f1i1w1I0F3W0f2i2w2I1W1  f3i3I2w3I3W2W3
                F0f0F1  i0f1w0F2I0i1W0f2w1F3I1i2W1f3I2w2i3I3W2w3W3

    v_min     F0    f0i0F1w0I0W0f1i1F2w1I1W1f2i2F3w2I2W2f3i3w3  I3W3
                F0f0    i0I0F1f1w0W0i1I1F2f2w1W1i2I2F3f3w2W2i3I3w3W3

    dualpipev   F0F1F2f0i0w0f1F3b1--f2B0--b2--f3  B1--b3--I2W2I3W3
                  F0f0F1f1F2b0--f2B0--F3b1--f3B1--b2--B2--i3I3w3W3

Formulas are for even stages where each half of a backward takes as long as a forward. Bubbles are
in units of that time, and those of a synchronous step, which begins and ends for all devices at
once; 1F1B with the two stages as one idles for ``6 (p-1)``. What is in flight is counted in cells
of a device, both stages together: ``2 p`` on the first device of 1F1B. Where the three times
differ, V-Half and V-Min, whose devices have little room to choose, idle in every micro-batch.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, product

from syncpipe.schedules.builtin.placement import Placement, in_a_v
from syncpipe.schedules.kinds import LETTERS
from syncpipe.schedules.merge import played
from syncpipe.schedules.schedule import Action, Schedule

__all__ = ["dualpipev", "v_half", "v_min", "zbv"]

_KINDS = {letter: kind for kind, letter in LETTERS.items()}


def zbv(m: int, device_of: Placement) -> Schedule:
    """ZB-V: no bubble but the way to the turn, with the memory of 1F1B.

    No device idles between its first and its last action. In a synchronous step there remains the
    time until the first micro-batch has reached the last device, ``p-1``. At most ``2 p`` cells
    are in flight on any device.

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 6 (ZB-V). For fewer than
    ``2 p - 1`` micro-batches it is the one for so many, with those left out that are not there.

    Args:
        m: number of micro-batches.
        device_of: for each stage the index of its device: 0, 1, ..., 1, 0.

    Raises:
        ValueError: if the stages are not laid out like that.
    """
    devices = in_a_v("zbv", m, device_of)
    p = max(devices) + 1
    rounds = max(m, 2 * p - 1) - p
    rows = []
    for d in range(p):
        after = p - 1 - d
        rows.append(
            "F" * (2 * after + 1) + "fF" * d + "fiw" * (p - d)
            + "FIwfiw" * (rounds - after) + "Iwfiw" * after
            + "Ii" * d + "Iw" * (p - d) + "w" * (2 * d)
        )  # fmt: skip
    return _spelled("zbv", m, devices, rows)


def dualpipev(m: int, device_of: Placement) -> Schedule:
    """DualPipeV: forwards of one stage beside backwards of the other, mostly whole ones.

    Made for layers that do such a pair at once, one half of it computing while the other one
    communicates; here the forward comes before the backward. The bubble is ``p-1``, and at most
    ``2 p + 1`` cells are in flight on any device.

    Source: DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.2.1 (DualPipe), cut in half by
    Sea AI Lab (github.com/deepseek-ai/DualPipe). That is for ``2 p`` micro-batches or more; with
    fewer some of its phases are shorter or left out, and the bubble may be larger.

    Args:
        m: number of micro-batches.
        device_of: for each stage the index of its device: 0, 1, ..., 1, 0.

    Raises:
        ValueError: if the stages are not laid out like that.
    """
    devices = in_a_v("dualpipev", m, device_of)
    p = max(devices) + 1
    rows = []
    for d in range(p):
        after = p - 1 - d
        rows.append(
            "F" * (2 * after) + "Ff" * (d + 1) + "iwf" * after
            + "FbfB" * (m - p - after) + "bfB" * after
            + ("bB" * (d + 1))[: d + 1] + ("iI" * (d + 1))[d + 1 :]
            + "wI" * after + "w" * (d + 1)
        )  # fmt: skip
    return _spelled("dualpipev", m, devices, rows)


def v_half(m: int, device_of: Placement) -> Schedule:
    """V-Half: half of 1F1B's activations, and half of its bubble.

    The bubble is at most ``3 (p-1)``, and at most ``p + 2`` cells (``p + 1``, if ``p`` is odd) are
    in flight on any device.

    Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory. The building block
    for four devices, and others like it:

        device 0   F............fi.............I    every step on the way down takes 1,
               1    F.........f...i..........I      and every step on the way up takes 2
               2     F......f......i.......I
               3      F...f.........i....I

    Args:
        m: number of micro-batches.
        device_of: for each stage the index of its device: 0, 1, ..., 1, 0.

    Raises:
        ValueError: if the stages are not laid out like that.
    """
    devices = in_a_v("v_half", m, device_of)
    p = max(devices) + 1
    turns = (1, 1, 2) if p % 2 else (4, 1, 5)  # so that no two actions meet
    return _repeated("v_half", m, devices, (1, 2, 1, 2), turns, room=2 * (p // 2) + 2)


def v_min(m: int, device_of: Placement) -> Schedule:
    """V-Min: about a third of 1F1B's activations, and two thirds of its bubble.

    The bubble is at most ``4 (p-1)``, and at most ``2 ceil((p+2) / 3)`` cells are in flight on any
    device. With up to three devices :func:`v_half` needs no more, and idles less.

    Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory. The building block
    for four devices, where no step takes longer than it must:

        device 0   F......fi......I
               1    F....f..i....I
               2     F..f....i..I
               3      Ff......iI

    Args:
        m: number of micro-batches.
        device_of: for each stage the index of its device: 0, 1, ..., 1, 0.

    Raises:
        ValueError: if the stages are not laid out like that.
    """
    devices = in_a_v("v_min", m, device_of)
    p = max(devices) + 1
    turns = (1, 1, 1) if p % 3 else (3, 1, 3)  # so that no two actions meet
    return _repeated("v_min", m, devices, (1, 1, 1, 1), turns, room=2 * -(-(p + 2) // 3))


def _spelled(name: str, m: int, device_of: tuple[int, ...], rows: list[str]) -> Schedule:
    """A schedule from a letter for each action.

    Args:
        name: of the schedule.
        m: number of micro-batches; the rows may be for more.
        device_of: for each stage the index of its device.
        rows: for each device its actions: ``F``, ``B`` and ``I`` for the next micro-batch of its
            first stage, ``f``, ``b`` and ``i`` for that of its second, and ``w`` for the weight
            half that waits for the longest time.
    """
    actions = []
    for d, letters in enumerate(rows):
        row: list[Action] = []
        waiting: deque[Action] = deque()
        counts: dict[tuple[bool, int], int] = {}
        for letter in letters:
            if letter == "w":
                row.append(waiting.popleft())
                continue
            kind, j = _KINDS[letter.upper()], d if letter.isupper() else len(device_of) - 1 - d
            key = kind == "forward", j
            i = counts[key] = counts.get(key, -1) + 1
            row.append(Action(kind, i, j))
            if kind == "backward_input":
                waiting.append(Action("backward_weight", i, j))
        actions.append(tuple(action for action in row if action.i < m))
    return Schedule(m, device_of, tuple(actions), name)


def _repeated(
    name: str,
    m: int,
    device_of: tuple[int, ...],
    steps: tuple[int, int, int, int],
    turns: tuple[int, int, int],
    room: int,
) -> Schedule:
    """A schedule that repeats a building block, the way of a micro-batch, every six units of time.

    Six actions are what a micro-batch asks of a device. So where no two of a block meet on a
    device modulo six, all blocks fit into each other, and devices are always busy. A cell's time in
    flight, divided by six, is how many of its stage are in flight at once: short ways and long ones
    meet on each device in the V, so all devices need about the same memory.

    What a block leaves open is where weight halves go: wherever a device would idle, and where a
    forward needs the room that one takes. Everything starts as soon as it can, so that the
    beginning and the end are shorter than the blocks are.

    Args:
        name: of the schedule.
        m: number of micro-batches.
        device_of: for each stage the index of its device.
        steps: the time from an action to the same one on the next stage of its way: forward, down
            the devices and up; back, down and up.
        turns: the same at the turns between these four.
        room: the largest number of cells in flight on a device.
    """
    n, p = len(device_of), len(device_of) // 2
    ways = [(step,) * (p - 1) for step in steps]
    gaps = (*ways[0], turns[0], *ways[1], turns[1], *ways[2], turns[2], *ways[3])
    times = list(accumulate(gaps, initial=0))
    lists: list[list[Action]] = []
    for d in range(p):
        cells: list[tuple[int, Action]] = []
        for i, j in product(range(m), (d, n - 1 - d)):
            cells.append((6 * i + times[j], Action("forward", i, j)))
            cells.append((6 * i + times[2 * n - 1 - j], Action("backward_input", i, j)))
        row = [action for _, action in sorted(cells)]
        halves = [Action("backward_weight", i, j) for kind, i, j in row if kind != "forward"]
        lists += [row, halves]
    return played(name, m, device_of, lists, room)
