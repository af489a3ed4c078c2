"""Schedules for stages that several devices serve: 1F1B-RR, and others dealt out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncpipe.options import consecutive
from syncpipe.schedules import (
    SCHEDULES,
    Costs,
    build,
    dealt,
    gpipe,
    one_f_one_b,
    simulate,
    validate,
)
from syncpipe.timeline import Timeline
from tests.support.training import any_schedule

ROUND = ((0, 1), (2, 3), (0, 1), (2, 3))
V = ((0, 1), (2, 3), (2, 3), (0, 1))
BY_STAGE = ["naive", "gpipe", "1f1b", "zb_h1", "zb_h2"]


@settings(max_examples=200)
@given(
    m=st.integers(1, 20),
    replicas=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    name=st.sampled_from([*BY_STAGE, "textbook"]),
)
def test_each_device_has_its_micro_batches_in_a_valid_order(m, replicas, name):
    placement = consecutive(replicas)
    schedule = (
        one_f_one_b(m, placement, slots="textbook")
        if name == "textbook"
        else build(name, m, placement)
    )
    validate(schedule)
    assert len(schedule.actions) == sum(replicas)
    first = 0
    for j, r in enumerate(replicas):
        for k in range(r):
            row = schedule.actions[first + k]
            assert {(a.i, a.j) for a in row} == {(i, j) for i in range(k, m, r)}
        first += r


@settings(max_examples=100)
@given(data=st.data(), m=st.integers(1, 6), seed=st.integers(0, 2**32), halves=st.booleans())
def test_any_schedule_can_be_dealt_out(data, m, seed, halves):
    devices = data.draw(st.sampled_from([(0, 1, 2), (0, 1, 0), (0, 0, 1), (0, 1, 1, 0)]))
    groups = [(0, 1), (2, 3, 4), 5]
    schedule = any_schedule(m, devices, seed=seed, halves=halves, in_order=False)
    placement = tuple([groups[d] for d in devices])
    found = dealt(schedule, placement)
    validate(found)
    for d, row in enumerate(schedule.actions):
        hands = groups[d] if isinstance(groups[d], tuple) else (groups[d],)
        for k, hand in enumerate(hands):
            wanted = tuple([action for action in row if action.i % len(hands) == k])
            assert found.actions[hand] == wanted


@settings(max_examples=60)
@given(data=st.data(), m=st.integers(1, 9), name=st.sampled_from(BY_STAGE))
def test_stages_may_have_devices_in_common_in_any_way(data, m, name):
    n = data.draw(st.integers(1, 4))
    some = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
    drawn = [data.draw(some) for _ in range(n)]
    order = list(dict.fromkeys(d for those in drawn for d in those))
    placement = tuple(
        [
            tuple(map(order.index, those)) if len(those) > 1 else order.index(those[0])
            for those in drawn
        ]
    )
    schedule = build(name, m, placement)
    validate(schedule)


@pytest.mark.parametrize(
    ("replicas", "textbook", "overlap"),
    [
        ([2, 1, 1], (2, 2, 1), (3, 3, 1)),
        ([7, 1], (2, 1), (2, 1)),
        ([9, 5, 1, 1], (2, 2, 2, 1), (3, 2, 3, 1)),
        ([1, 1, 1], (3, 2, 1), (5, 3, 1)),
        ([1, 5, 3], (10, 2, 1), (17, 3, 1)),
        ([4], (1,), (1,)),
    ],
)
def test_what_is_in_flight_on_each_device(replicas, textbook, overlap):
    placement = consecutive(replicas)
    for slots, wanted in (("textbook", textbook), ("overlap", overlap)):
        assert one_f_one_b(60, placement, slots=slots).in_flight == wanted


@pytest.mark.parametrize(
    ("replicas", "m", "bubble"), [([2, 1, 1], 40, 0.09), ([7, 1], 56, 0.12), ([3, 3], 30, 0.1)]
)
def test_devices_are_busy_when_work_is_even(replicas, m, bubble):
    times = tuple(map(float, replicas))
    schedule = build("1f1b", m, consecutive(replicas))
    simulation = simulate(schedule, Costs(times, times, times))
    assert simulation.bubble <= bubble
    assert len(simulation.busy) == sum(replicas)
    assert len(Timeline.of(simulation).rows) == sum(replicas)


def test_slots_are_those_of_each_device():
    assert one_f_one_b(12, ((0, 1), 2), slots=[2, 3]).in_flight == (2, 3)
    with pytest.raises(ValueError, match=r"stage 1 has 5, but .* at most 4"):
        one_f_one_b(12, ((0, 1), 2), slots=[2, 5])


def test_transfers_are_between_the_devices_of_a_micro_batch():
    schedule = one_f_one_b(4, ((0, 1), (2, 3)))
    simulation = simulate(schedule, Costs((1, 1), (1, 1), (1, 1), (0.5,)))
    there = {
        (span.i, span.row) for span in Timeline.of(simulation).spans if span.kind == "transfer"
    }
    assert there == {(0, 0), (2, 0), (1, 1), (3, 1), (0, 2), (2, 2), (1, 3), (3, 3)}


def test_what_is_made_for_one_device_each_is_dealt_out_by_build():
    placement = ((0, 1), 2)
    mine = gpipe(4, 2)
    for schedule in (mine, lambda m, device_of: gpipe(m, device_of)):
        assert build(schedule, 4, placement).actions == gpipe(4, placement).actions
    with pytest.raises(ValueError, match="one device each, but device_of="):
        SCHEDULES["interleaved_1f1b"](4, ROUND)
    with pytest.raises(ValueError, match="made for device_of"):
        build(gpipe(4, 3), 4, placement)
