"""The named schedules, and :func:`build`, which makes a valid schedule of any :data:`ScheduleLike`.

Named schedules are functions of the number of micro-batches and of ``device_of``: the number of
stages, or for each stage the index of its device.

Some define an order for each stage, wherever the stages are. Where a device has several stages,
their orders are merged, and neighbours on one device count as one stage. Two devices, three
micro-batches (1F1B with the textbook's slots); ``F`` is a forward, ``B`` a backward, ``I`` and
``W`` its input and weight halves, each as long as a forward:

    naive   F0      B0--F1      B1--F2      B2--    1f1b    F0F1    B0--F2B1--  B2--
              F0B0--      F1B1--      F2B2--                  F0B0--F1B1--F2B2--

    gpipe   F0F1F2      B2--B1--B0--                zb_h1   F0F1  I0W0F2I1W1I2W2
              F0F1F2B2--B1--B0--                              F0I0F1I1W0F2I2W1W2

                                                    zb_h2   F0F1F2I0W0I1W1I2W2
                                                              F0I0F1I1F2I2W0W1W2

Others need several stages on each device, with stage ``j`` on device ``j % devices``. Two stages on
each, four micro-batches; small letters are for the second stage of a device:

    looped_bfs   F0F1F2F3f0f1f2f3      b3--b2--b1--b0--B3--B2--B1--B0--
                   F0F1F2F3f0f1f2f3b3--b2--b1--b0--B3--B2--B1--B0--

    interleaved  F0F1f0f1F2  b0--F3b1--f2B0--f3B1--  b2--  b3--B2--B3--
    1f1b           F0F1f0b0--f1b1--F2B0--F3B1--f2b2--f3b3--B2--B3--

    interleaved  F0F1f0f1  i0w0F2i1w1F3I0W0f2I1W1f3i2w2i3w3I2W2I3W3
    zero bubble    F0F1f0i0f1i1w0F2I0w1F3I1W0f2i2W1f3i3w2I2w3I3W2W3

The last ones need two stages on each device, in a V: of ``p`` devices, device ``d`` has the stages
``d`` and ``2 p - 1 - d``, so the first device has the first and the last stage:

    zbv       F0F1F2f0i0w0f1i1w1F3I0W0f2i2w2I1W1f3i3w3I2W2I3W3
                F0f0F1f1i0w0F2I0W0f2i1w1F3I1W1f3i2w2I2i3I3W2w3W3

    v_half    F0F1  f0i0F2w0f1i1w1I0F3W0f2i2w2I1W1  f3i3I2w3I3W2W3
                F0f0F1  i0f1w0F2I0i1W0f2w1F3I1i2W1f3I2w2i3I3W2w3W3

    v_min     F0    f0i0F1w0I0W0f1i1F2w1I1W1f2i2F3w2I2W2f3i3w3  I3W3
                F0f0    i0I0F1f1w0W0i1I1F2f2w1W1i2I2F3f3w2W2i3I3w3W3

    dualpipev   F0F1F2f0i0w0f1F3b1--f2B0--b2--f3  B1--b3--I2W2I3W3
                  F0f0F1f1F2b0--f2B0--F3b1--f3B1--b2--B2--i3I3w3W3

Formulas assume even stages. The bubbles of V schedules are in units of a forward's duration, for a
synchronous step, which starts and ends on all devices at once. In these units 1F1B with both stages
as one idles for ``6 (p-1)``, with ``2 p`` cells in flight on its first device. Where the durations
of ``F``, ``I`` and ``W`` differ, V-Half and V-Min idle in every micro-batch.
"""

from __future__ import annotations

import difflib
import operator
import os
import types
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, Literal, cast

from syncpipe.schedules.greedy import merge_orders, round_robin
from syncpipe.schedules.orders import (
    Placement,
    alternating,
    checked_devices,
    gpipe,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from syncpipe.schedules.player import Costs, play, validate
from syncpipe.schedules.schedule import LETTERS, Action, Devices, Kind, Schedule, from_csv

__all__ = [
    "SCHEDULES", "ScheduleLike", "build", "dualpipev", "gpipe", "interleaved_1f1b",
    "interleaved_zero_bubble", "looped_bfs", "maker_of", "naive", "one_f_one_b", "round_sizes",
    "schedule_label", "v_half", "v_min", "zb_h1", "zb_h2", "zbv",
]  # fmt: skip


def _checked_layout(
    name: str, shape: Literal["rounds", "v"], m: int, device_of: Placement
) -> tuple[int, ...]:
    """The device of each stage, checked to go round (0, 1, ..., 0, 1, ...), or in a V."""
    devices = checked_devices(m, device_of)
    single = tuple([device for device in devices if isinstance(device, int)])
    if single != devices:
        raise ValueError(
            f"{name} has no replicas, but device_of={devices}: make it for one device per stage, "
            "then distribute it by syncpipe.schedules.round_robin(schedule, device_of)"
        )
    line = tuple(range(max(single) + 1))
    wanted = line + line[::-1] if shape == "v" else line * (len(single) // len(line))
    if single != wanted:
        where, example = "two stages on each device, in a V", [*line, *line[::-1]]
        if shape == "rounds":
            where, example = "stages that go round the devices evenly", [*line, *line]
        raise ValueError(
            f"{name} needs {where}, for example devices={example}, not device_of={list(single)}"
        )
    return single


def looped_bfs(m: int, device_of: Placement) -> Schedule:
    """Breadth first: GPipe, one stage of a device after the other.

    With ``p`` devices and ``v`` stages on each the bubble is ``(p-1) / (v m + p-1)`` if ``m`` is
    at least ``p``; all ``m`` micro-batches are in flight. The last one goes backward first.
    Source: Lamy-Poirier 2022, Breadth-First Pipeline Parallelism.
    """
    devices = _checked_layout("looped_bfs", "rounds", m, device_of)
    n, p = len(devices), max(devices) + 1
    rows = []
    for d in range(p):
        row = [Action("forward", i, j) for j in range(d, n, p) for i in range(m)]
        rows.append((*row, *(Action("backward", i, j) for _, i, j in reversed(row))))
    return Schedule(m, devices, tuple(rows), "looped_bfs")


def interleaved_1f1b(m: int, device_of: Placement, *, size: int | None = None) -> Schedule:
    """1F1B with several stages per device: a round of micro-batches through each stage in turn.

    With ``p`` devices and ``v`` stages on each the bubble is ``(p-1) / (v m + p-1)`` if ``m`` is a
    multiple of ``p``, otherwise a little more.
    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM, section 2.2.2.

    Args:
        m, device_of: as for :func:`one_f_one_b`.
        size: micro-batches of a round. Default: ``p``, with a shorter last round; or equal rounds
            as in ``torch.distributed.pipelining``, if these are faster for even
            stages. Rounds of more than ``p`` hold more micro-batches in flight.
    """
    devices = _checked_layout("interleaved_1f1b", "rounds", m, device_of)
    return _interleaved("interleaved_1f1b", m, devices, "backward", size)


def interleaved_zero_bubble(m: int, device_of: Placement, *, size: int | None = None) -> Schedule:
    """Interleaved 1F1B with split backwards: weight halves fill the bubble.

    Device ``d`` delays weight halves by ``d`` of them. With ``p`` devices and ``v`` stages on each,
    devices idle for ``(p-1) (F+I-W)`` of a stage if ``m`` is a multiple of ``p``, and hold at most
    ``v p`` cells. ``size`` is that of :func:`interleaved_1f1b`.
    Source: Qi et al. 2023, as :func:`zb_h1`.
    """
    devices = _checked_layout("interleaved_zero_bubble", "rounds", m, device_of)
    return _interleaved("interleaved_zero_bubble", m, devices, "backward_input", size)


def round_sizes(m: int, p: int) -> list[int]:
    """Round sizes to try on ``p`` devices: ``p`` with a shorter last round, and equal rounds."""
    rounds = max(1, m // p)
    return list(dict.fromkeys([p, *[m // rounds] * (m % rounds == 0)]))


@lru_cache(maxsize=256)
def _interleaved(
    name: str, m: int, device_of: tuple[int, ...], back: Kind, size: int | None
) -> Schedule:
    n, p = len(device_of), max(device_of) + 1
    if size is None:
        made = [_interleaved(name, m, device_of, back, k) for k in round_sizes(m, p)]
        even = Costs.even(n)
        steps = [play(one.actions, m, device_of, even).makespan for one in made]
        return made[steps.index(min(steps))]
    rows = []
    for d in range(p):
        forwards, backwards = [], []
        for start in range(0, -(-m // size) * size, size):
            group = range(start, start + size)
            forwards += [Action("forward", i, j) for j in range(d, n, p) for i in group]
            backwards += [Action(back, i, j) for j in reversed(range(d, n, p)) for i in group]
        halves = back == "backward_input"
        lead = (p - d - 1) * (1 if halves else 2) + (n // p - 1) * size
        row = alternating(forwards, backwards, lead + 1, d * halves)
        rows.append(tuple([action for action in row if action.i < m]))
    return Schedule(m, device_of, tuple(rows), name)


def zbv(m: int, device_of: Placement) -> Schedule:
    """ZB-V: no bubble except for the first micro-batch's way to the turn, in the memory of 1F1B.

    A device does not idle between its first and its last action; the last device waits ``p-1`` for
    the first micro-batch. At most ``2 p`` cells are in flight on a device. Fewer than ``2 p - 1``
    micro-batches take the schedule of ``2 p - 1``, with the missing ones left out.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 6 (ZB-V).
    """
    devices = _checked_layout("zbv", "v", m, device_of)
    p = len(devices) // 2
    rounds = max(m, 2 * p - 1) - p
    rows = []
    for d in range(p):
        after = p - 1 - d
        rows.append(
            "F" * (2 * after + 1) + "fF" * d + "fiw" * (p - d)
            + "FIwfiw" * (rounds - after) + "Iwfiw" * after
            + "Ii" * d + "Iw" * (p - d) + "w" * (2 * d)
        )  # fmt: skip
    return _from_letters("zbv", m, devices, rows)


def dualpipev(m: int, device_of: Placement) -> Schedule:
    """DualPipeV: forwards of one stage next to backwards, mostly whole ones, of the other.

    The forward of such a pair comes first. The bubble is ``p-1``, or more with fewer than ``2 p``
    micro-batches, and at most ``2 p + 1`` cells are in flight on a device.
    Source: DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.2.1 (DualPipe), cut in half by
    Sea AI Lab (github.com/deepseek-ai/DualPipe).
    """
    devices = _checked_layout("dualpipev", "v", m, device_of)
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
    return _from_letters("dualpipev", m, devices, rows)


def v_half(m: int, device_of: Placement) -> Schedule:
    """V-Half: half of 1F1B's activations, and half of its bubble.

    The bubble is at most ``3 (p-1)``, and at most ``p + 2`` cells (``p + 1`` if ``p`` is odd) are
    in flight on a device. Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory.
    The building block for four devices, and for others alike:

        device 0   F............fi.............I    every step on the way down takes 1,
               1    F.........f...i..........I      and every step on the way up takes 2
               2     F......f......i.......I
               3      F...f.........i....I
    """
    devices = _checked_layout("v_half", "v", m, device_of)
    p = len(devices) // 2
    turns = (1, 1, 2) if p % 2 else (4, 1, 5)  # so that no two actions collide
    return _from_block("v_half", m, devices, (1, 2, 1, 2), turns, room=2 * (p // 2) + 2)


def v_min(m: int, device_of: Placement) -> Schedule:
    """V-Min: about a third of 1F1B's activations, and two thirds of its bubble.

    The bubble is at most ``4 (p-1)``, and at most ``2 ceil((p+2) / 3)`` cells are in flight on a
    device. With up to three devices :func:`v_half` needs no more memory and idles less. Source: as
    above. The building block for four devices, where every step takes 1:

        device 0   F......fi......I
               1    F....f..i....I
               2     F..f....i..I
               3      Ff......iI
    """
    devices = _checked_layout("v_min", "v", m, device_of)
    p = len(devices) // 2
    turns = (1, 1, 1) if p % 3 else (3, 1, 3)  # so that no two actions collide
    return _from_block("v_min", m, devices, (1, 1, 1, 1), turns, room=2 * -(-(p + 2) // 3))


def _from_letters(name: str, m: int, device_of: tuple[int, ...], rows: list[str]) -> Schedule:
    """A schedule from a letter for each action: capital for the next micro-batch of a device's
    first stage, small for that of its second; ``w`` is the oldest weight half left.
    """
    actions = []
    for d, letters in enumerate(rows):
        row: list[Action] = []
        waiting: deque[Action] = deque()
        counts: Counter[tuple[bool, int]] = Counter()
        for letter in letters:
            if letter == "w":
                row.append(waiting.popleft())
                continue
            kind, j = LETTERS[letter.upper()], d if letter.isupper() else len(device_of) - 1 - d
            i = counts[kind == "forward", j]
            counts[kind == "forward", j] += 1
            row.append(Action(kind, i, j))
            if kind == "backward_input":
                waiting.append(Action("backward_weight", i, j))
        actions.append(tuple([action for action in row if action.i < m]))
    return Schedule(m, device_of, tuple(actions), name)


def _from_block(
    name: str, m: int, device_of: tuple[int, ...], steps: tuple[int, int, int, int],
    turns: tuple[int, int, int], room: int,
) -> Schedule:  # fmt: skip
    """A schedule that repeats a building block, one micro-batch's actions, every six time units.

    A micro-batch has six actions on each device, so if no two of a block collide modulo six, blocks
    fit into each other without gaps. Weight halves go where a device would idle, and where a
    forward needs their memory. ``steps`` are the times from stage to stage in each of four sweeps
    (forward down the devices and up, backward down and up), ``turns`` those between the sweeps.
    """
    n, p = len(device_of), len(device_of) // 2
    sweeps = [(step,) * (p - 1) for step in steps]
    gaps = (*sweeps[0], turns[0], *sweeps[1], turns[1], *sweeps[2], turns[2], *sweeps[3])
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
    return merge_orders(name, m, device_of, lists, room)


#: The schedules by name; add your own here.
SCHEDULES: dict[str, Callable[[int, Any], Schedule]] = {
    "naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2,
    "looped_bfs": looped_bfs, "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zero_bubble": interleaved_zero_bubble, "zbv": zbv, "v_half": v_half,
    "v_min": v_min, "dualpipev": dualpipev,
}  # fmt: skip


# --- from a ScheduleLike to a valid schedule --------------------------------------------------

#: A name in :data:`SCHEDULES`, the path of a CSV file, a schedule, or a function that returns a
#: schedule for ``m`` micro-batches and stages on the devices ``device_of``.
ScheduleLike = str | os.PathLike[str] | Schedule | Callable[[int, Any], Schedule]


def build(schedule: ScheduleLike, m: int, device_of: Sequence[int] | Devices) -> Schedule:
    """Make a valid schedule for ``m`` micro-batches and these stages.

    Functions without support for replicas get one device for each group of replicas;
    :func:`syncpipe.schedules.round_robin` then distributes the micro-batches.

    Args:
        schedule: a name in :data:`SCHEDULES`; a schedule; the path of a CSV file (:func:`to_csv`),
            a string that ends in ``.csv`` or a path object; or a function ``(m, device_of)`` that
            returns a schedule, called once for the same arguments.
        m: number of micro-batches.
        device_of: for each stage the index of its device, or those of its replicas in a tuple.

    Raises:
        TypeError: ``schedule`` is none of these, or the function returns no schedule.
        ValueError: the name is unknown, or the schedule is invalid or made for other arguments.
    """
    devices = tuple(device_of)
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        schedule = maker_of(schedule)
    if isinstance(schedule, str | os.PathLike):
        path = Path(schedule)
        schedule = from_csv(path.read_text(encoding="utf-8"), path.name)
    if isinstance(schedule, Schedule):
        return _checked_schedule(schedule, m, devices)
    if not callable(schedule):
        raise TypeError(
            f"schedule={schedule!r}: must be a name, a Schedule, the path of a CSV file or a "
            f"function (m, device_of) -> Schedule; the names are {', '.join(SCHEDULES)}"
        )
    # A bound method is hashable by identity, whether or not the function is.
    return _call_maker(types.MethodType(operator.call, schedule), m, devices)


def maker_of(name: str) -> Callable[[int, Any], Schedule]:
    if name in SCHEDULES:
        return SCHEDULES[name]
    if name == "auto":
        raise ValueError(
            "schedule='auto' needs costs: record some steps (with pipe.trace() as trace:) and give "
            "syncpipe.schedules.auto(m, device_of, costs=trace.costs, "
            "rematerialized=trace.rematerialized)"
        )
    close = difflib.get_close_matches(name.lower(), SCHEDULES, n=1, cutoff=0.5)
    hint = f" did you mean {close[0]!r}?" if close else ""
    known = f"the names are {', '.join(SCHEDULES)}, and a path ends in .csv"
    raise ValueError(f"schedule={name!r} is unknown;{hint} {known}")


def schedule_label(schedule: ScheduleLike) -> str:
    if isinstance(schedule, str | os.PathLike | Schedule):
        return repr(schedule.name if isinstance(schedule, Schedule) else str(schedule))
    if isinstance(schedule, partial):
        options = [f"{key}={value!r}" for key, value in schedule.keywords.items()]
        given = [schedule_label(schedule.func), *map(repr, schedule.args), *options]
        return f"partial({', '.join(given)})"
    return str(getattr(schedule, "__qualname__", repr(schedule)))


@lru_cache(maxsize=128)
def _call_maker(function: types.MethodType, m: int, device_of: Devices) -> Schedule:
    maker: Any = function.__self__
    name = schedule_label(maker)
    maker = maker.func if isinstance(maker, partial) else maker
    of_replicas = any(maker is known for known in (naive, gpipe, one_f_one_b, zb_h1, zb_h2))
    given = device_of if of_replicas else _without_replicas(device_of)
    try:
        schedule = function(m, given)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"schedule={name} returned {schedule!r}, not a Schedule")
        return _checked_schedule(schedule, m, device_of)
    except Exception as error:
        error.add_note(f"raised by schedule={name}, called with m={m}, device_of={given}")
        raise


def _without_replicas(device_of: Devices) -> tuple[int, ...]:
    """For each stage one index, with one device in place of each group of replicas."""
    if not any(isinstance(devices, tuple) for devices in device_of):
        return cast("tuple[int, ...]", device_of)
    groups = list(dict.fromkeys(device_of))
    return tuple([groups.index(devices) for devices in device_of])


def _checked_schedule(schedule: Schedule, m: int, device_of: Devices) -> Schedule:
    """The schedule itself, or distributed to replicas, if it is valid for these stages."""
    single = device_of if schedule.device_of == device_of else _without_replicas(device_of)
    for what, has, wanted in (("m", schedule.m, m), ("device_of", schedule.device_of, single)):
        if has != wanted:
            raise ValueError(
                f"schedule {schedule.name!r} is made for {what}={has}, not {what}={wanted}; "
                f"make one for m={m}, device_of={single}"
            )
    validate(schedule)
    return schedule if single == device_of else round_robin(schedule, device_of)
