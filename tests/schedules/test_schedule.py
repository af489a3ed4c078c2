"""Schedules as data: what they promise, what validation refuses, and the CSV files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncpipe.schedules import (
    SCHEDULES,
    build,
    from_csv,
    gpipe,
    interleaved_1f1b,
    naive,
    one_f_one_b,
    to_csv,
    validate,
    zb_h1,
    zb_h2,
)
from syncpipe.schedules.schedule import (
    LETTERS,
    Action,
    Schedule,
)
from tests.schedules.layouts import LOOPED, V_SHAPED, in_a_v, rounds

BY_STAGE = ["naive", "gpipe", "1f1b", "zb_h1", "zb_h2"]  # these work wherever the stages are


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, ...]:
    """For each stage a device, in no order at all."""
    devices = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, devices - 1), max_size=4))
    return tuple(draw(st.permutations([*range(devices), *more])))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any built-in schedule."""
    m = draw(st.integers(1, 10))
    name = draw(st.sampled_from(list(SCHEDULES)))
    if name in LOOPED:
        return build(name, m, rounds(draw(st.integers(1, 5)), draw(st.integers(1, 3))))
    if name in V_SHAPED:
        return build(name, m, in_a_v(draw(st.integers(1, 6))))
    device_of = draw(placements())
    if name != "1f1b":
        return build(name, m, device_of)
    n = len(device_of)
    numbers = st.lists(st.integers(1, 12), min_size=n, max_size=n)
    falling = numbers.map(lambda slots: sorted(slots, reverse=True))
    slots = draw(st.sampled_from(["textbook", "overlap"]) | falling)
    return build(partial(one_f_one_b, slots=slots), m, device_of)


def letters(schedule: Schedule, device: int) -> str:
    return " ".join(str(action) for action in schedule.actions[device])


# --- what they look like ------------------------------------------------------------------------


def test_orders_as_in_the_literature() -> None:
    assert to_csv(naive(2, 2)) == "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"
    assert to_csv(gpipe(3, 2)) == "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n"
    assert to_csv(one_f_one_b(3, 2, slots="textbook")) == (
        "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    )
    assert to_csv(zb_h1(3, 2)) == (
        "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"
    )
    assert to_csv(zb_h2(4, 2)) == (
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3\n"
        "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1F3,1I3,1W1,1W2,1W3\n"
    )
    # Narayanan et al. 2021, figure 4 (bottom): the first of four devices with two stages each.
    assert interleaved_1f1b(8, rounds(4, 2)).in_flight_on_device == (11, 9, 7, 5)
    first = "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0"
    assert letters(interleaved_1f1b(8, rounds(4, 2)), 0).startswith(first)


@pytest.mark.parametrize("m", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_micro_batches_in_flight(m: int, n: int) -> None:
    assert naive(m, n).in_flight == (1,) * n
    assert gpipe(m, n).in_flight == (m,) * n
    textbook = one_f_one_b(m, n, slots="textbook")
    assert textbook.in_flight == tuple(min(m, n - s) for s in range(n))
    overlap = one_f_one_b(m, n, slots="overlap")
    assert overlap.in_flight == tuple(min(m, 2 * (n - s) - 1) for s in range(n))
    assert max(zb_h1(m, n).in_flight) == max(textbook.in_flight)
    assert one_f_one_b(m, n, slots=[m] * n).in_flight == gpipe(m, n).in_flight


def test_neighbours_on_one_device_are_one_stage() -> None:
    assert one_f_one_b(8, (0, 0, 1, 1), slots="textbook").in_flight == (2, 2, 1, 1)
    assert one_f_one_b(8, (0, 0, 0)).in_flight == (1, 1, 1)
    assert zb_h1(8, (0, 0, 1, 1)).in_flight == (2, 2, 2, 2)
    assert letters(one_f_one_b(2, (0, 0)), 0) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"
    assert letters(gpipe(2, (0, 0)), 0) == "0F0 1F0 0F1 1F1 1B1 0B1 1B0 0B0"


@given(schedules())
def test_every_built_in_is_valid(schedule: Schedule) -> None:
    validate(schedule)
    assert all(1 <= alive <= schedule.m for alive in schedule.in_flight)
    cells = schedule.m * schedule.n
    assert sum(map(len, schedule.actions)) == 2 * cells + len(schedule.splits)


@given(st.integers(1, 10), placements(), st.sampled_from(BY_STAGE))
def test_merging_keeps_the_order_of_each_stage(
    m: int, device_of: tuple[int, ...], name: str
) -> None:
    # With device_of all different there is nothing to merge; the depths must agree, so no runs.
    assume(all(a != b for a, b in pairwise(device_of)))
    merged, alone = build(name, m, device_of), build(name, m, range(len(device_of)))
    for j, d in enumerate(device_of):
        assert tuple(a for a in merged.actions[d] if a.j == j) == alone.actions[j]


# --- validation ---------------------------------------------------------------------------------


def mutated(rows: Sequence[str], m: int, device_of: tuple[int, ...]) -> Schedule:
    """A schedule from rows of cells, however wrong."""
    kinds: dict[str, Any] = LETTERS | {"S": "sideways"}
    actions = [[Action(kinds[c[1]], int(c[2:]), int(c[0])) for c in row.split()] for row in rows]
    return Schedule(m, device_of, tuple(map(tuple, actions)), "mine")


WRONG = {
    "twice": (["0F0 0B0 0F0"], 1, (0,), r"0F0, action 2 of device 0, was already action 0"),
    "whole and split": (["0F0 0B0 0I0 0W0"], 1, (0,), r"0B0, action 1 .* split as well"),
    "no such micro-batch": (["0F0 0F1 0B0"], 1, (0,), r"0F1, action 1 .* outside of m=1, n=1"),
    "no such stage": (["0F0 1F0 0B0"], 1, (0,), r"1F0, action 1 .* outside of m=1, n=1"),
    "wrong device": (["0F0 1F0 0B0", "1B0"], 1, (0, 1), r"1F0, action 1 .* belongs on device 1"),
    "no device": (["0F0 0B0", ""], 1, (0,), r"2 lists of actions, but device_of=\(0,\)"),
    "an empty row": (["0F0 0B0", "", "1F0 1B0"], 1, (0, 2), r"each device has a stage"),
    "no such kind": (["0S0"], 1, (0,), r"'sideways'; there are forward, backward"),
    "no stage": ([], 1, (), r"m=1, n=0"),
    "no micro-batch": ([""], 0, (0,), r"m=0, n=1"),
    "backward first": (["0B0 0F0"], 1, (0,), r"0B0, action 0 .* waits for 0F0, action 1 of 0"),
    "weight first": (["0F0 0W0 0I0"], 1, (0,), r"0W0, action 1 .* waits for 0I0, action 2 of 0"),
    "edge, forward": (["1F0 0F0 1B0 0B0"], 1, (0, 0), r"1F0, action 0 .* waits for 0F0"),
    "edge, backward": (["0F0 1F0 0B0 1B0"], 1, (0, 0), r"0B0, action 2 .* waits for 1B0"),
    "deadlock": (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        2,
        (0, 1),
        r"deadlock: 0B0, action 1 of device 0, waits for 1B0, action 2 of 1; "
        r"1F1, action 1 of device 1, waits for 0F1, action 2 of 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    rows, m, device_of, message = WRONG[case]
    with pytest.raises(ValueError, match=f"schedule 'mine' is not valid: .*{message}"):
        validate(mutated(rows, m, device_of))


def can_finish(schedule: Schedule) -> bool:
    """Another way to see it: the order on devices and the needs, together, have no circle."""
    before: dict[Action, set[Action]] = {}
    for row in schedule.actions:
        for k, action in enumerate(row):
            before[action] = {*schedule.predecessors(action), *row[max(0, k - 1) : k]}
    while before:
        free = {action for action, needed in before.items() if not needed & before.keys()}
        if not free:
            return False
        for action in free:
            del before[action]
    return True


@given(schedules(), st.data())
def test_reordered_schedules(schedule: Schedule, data: st.DataObject) -> None:
    """Two actions of a device change places: valid if and only if there is no circle now."""
    d = data.draw(st.integers(0, len(schedule.actions) - 1))
    row = list(schedule.actions[d])
    a = data.draw(st.integers(0, len(row) - 1))
    b = data.draw(st.integers(0, len(row) - 1))
    row[a], row[b] = row[b], row[a]
    changed = replace(
        schedule, actions=(*schedule.actions[:d], tuple(row), *schedule.actions[d + 1 :])
    )
    if can_finish(changed):
        validate(changed)
    else:
        with pytest.raises(ValueError, match="deadlock"):
            validate(changed)


@given(schedules(), st.data())
def test_a_lost_action_is_named(schedule: Schedule, data: st.DataObject) -> None:
    d = data.draw(st.integers(0, len(schedule.actions) - 1))
    row = schedule.actions[d]
    k = data.draw(st.integers(0, len(row) - 1))
    rest = row[:k] + row[k + 1 :]
    changed = replace(schedule, actions=(*schedule.actions[:d], rest, *schedule.actions[d + 1 :]))
    with pytest.raises(ValueError, match=f"{row[k]} is missing on device {d}"):
        validate(changed)


# --- CSV ----------------------------------------------------------------------------------------


@given(schedules())
def test_csv_round_trip(schedule: Schedule) -> None:
    text = to_csv(schedule)
    again = from_csv(text, schedule.name)
    assert again == schedule
    assert again.name == schedule.name
    assert to_csv(again) == text


def test_csv_with_idle_time_and_space() -> None:
    text = "0F0, 0F1, , ,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n\r\n"
    expected = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert to_csv(from_csv(text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", "line 1: '0X0' is no action"),
        ("0F0,0B0\n1F0,F1", "line 2: 'F1' is no action"),
        ("0F0,0B0,0F", "line 1: '0F' is no action"),
        ("0F0\n0B0", "stage 0 is on lines 1 and 2"),
        ("0F0,0B0,2F0,2B0", "stage 1 has no action, but stage 2 has"),
        ("", "no action in this schedule"),
        (",,\n", "no action in this schedule"),
    ],
)
def test_csv_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_csv(text)


def test_pytorch_reads_the_cells() -> None:
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    action_type = getattr(module, "_Action", None)
    if action_type is None:
        pytest.skip("this PyTorch keeps its actions elsewhere")
    for row in zb_h1(3, 2).actions + gpipe(3, 2).actions:
        for action in row:
            theirs = action_type.from_str(str(action))
            assert (theirs.stage_index, theirs.microbatch_index) == (action.j, action.i)
            assert repr(theirs) == str(action)


# --- what cannot be -----------------------------------------------------------------------------

SLOTS = partial(one_f_one_b, 4, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SLOTS(slots="many"), "slots='many': use 'textbook', 'overlap' or a number"),
        (lambda: SLOTS(slots=2), "slots=2: use 'textbook', 'overlap' or a number"),
        (lambda: SLOTS(slots={0: 1}), "slots={0: 1}: use 'textbook', 'overlap' or a number"),
        (lambda: SLOTS(slots=[2]), r"slots=\[2\] has 1 numbers, but there are 2 stages"),
        (lambda: SLOTS(slots=[1, 0]), "stage 1 has 0, but needs at least one, and at most 1"),
        (lambda: SLOTS(slots=[1, 2]), "stage 1 has 2, but .* at most 1: .* wait for ever"),
        (lambda: gpipe(0, 2), "at least one micro-batch, but m=0"),
        *((partial(gpipe, 4, d), "device_of=.* must name") for d in ((), (1,), (0, 2), 0)),
        *(
            (partial(build, name, 4, device_of), rf"{name} needs {where}, but device_of=")
            for names, where, several in (
                (LOOPED, r"stages that go round .*, such as devices=\[0, 1, 0, 1\]",
                 [(0, 0, 1, 1), (1, 0), (0, 1, 0), (0, 1, 1, 0)]),
                (V_SHAPED, r"two stages .*, such as devices=\[0, 1, 1, 0\]",
                 [(0, 1), (0, 1, 0, 1), (0, 1, 1), (1, 0, 0, 1)]),
            )
            for name in names
            for device_of in several
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
