"""Schedules as data: what they promise, what validation refuses, files, and ``build``; simulations;
bubble, memory and orders against papers and PyTorch.

Times of papers are in units of a forward of one stage. What 1F1B would idle with a device's two
stages as one is ``6 (p-1)``, and its first device has ``2 p`` cells in flight.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncpipe.options import consecutive
from syncpipe.schedules import (
    SCHEDULES,
    Costs,
    Simulation,
    auto,
    build,
    from_csv,
    gpipe,
    interleaved_1f1b,
    naive,
    one_f_one_b,
    round_robin,
    simulate,
    to_csv,
    validate,
    zb_h1,
    zb_h2,
)
from syncpipe.schedules.player import Span, play
from syncpipe.schedules.schedule import LETTERS, Action, Kind, Schedule
from tests.support.training import any_schedule, on_each_device

LOOPED = ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"]
V_SHAPED = ["zbv", "v_half", "v_min", "dualpipev"]
BY_STAGE = ["naive", "gpipe", "1f1b", "zb_h1", "zb_h2"]  # these work wherever the stages are
SLOTS = partial(one_f_one_b, 4, 2)


def rounds(devices: int, each: int = 2) -> tuple[int, ...]:
    """Stages that go round the devices."""
    return tuple(range(devices)) * each


def in_a_v(devices: int) -> tuple[int, ...]:
    """Stages that go there and back."""
    return *range(devices), *reversed(range(devices))


LAYOUTS = dict.fromkeys(LOOPED, rounds) | dict.fromkeys(V_SHAPED, in_a_v)


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


# --- what they look like ------------------------------------------------------------------------


def test_orders_as_in_the_literature() -> None:
    assert to_csv(naive(2, 2)) == "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"
    assert to_csv(gpipe(3, 2)) == "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n"
    assert to_csv(SLOTS(slots="textbook")) == (
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    )
    assert to_csv(zb_h1(3, 2)) == (
        "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"
    )
    assert to_csv(zb_h2(4, 2)) == (
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3\n"
        "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1F3,1I3,1W1,1W2,1W3\n"
    )
    # Neighbours on one device are one stage.
    assert to_csv(one_f_one_b(2, (0, 0))) == "0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n"
    assert to_csv(gpipe(2, (0, 0))) == "0F0,1F0,0F1,1F1,1B1,0B1,1B0,0B0\n"
    assert one_f_one_b(8, (0, 0, 1, 1), slots="textbook").in_flight == (2, 2, 1, 1)
    assert zb_h1(8, (0, 0, 1, 1)).in_flight == (2, 2, 2, 2)


# --- stages that several devices serve: 1F1B-RR, and others by round robin ----------------------


@settings(max_examples=100)
@given(data=st.data(), m=st.integers(1, 9), name=st.sampled_from(BY_STAGE))
def test_stages_may_have_devices_in_common_in_any_way(data, m, name):
    n = data.draw(st.integers(1, 4))
    some = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)
    drawn = [data.draw(some) for _ in range(n)]
    order = list(dict.fromkeys(d for those in drawn for d in those))
    hands = [tuple(map(order.index, those)) for those in drawn]
    validate(build(name, m, tuple([own if len(own) > 1 else own[0] for own in hands])))


@settings(max_examples=100)
@given(data=st.data(), m=st.integers(1, 6), seed=st.integers(0, 2**32), halves=st.booleans())
def test_any_schedule_can_be_dealt_out(data, m, seed, halves):
    devices = data.draw(st.sampled_from([(0, 1, 2), (0, 1, 0), (0, 0, 1), (0, 1, 1, 0)]))
    groups = [(0, 1), (2, 3, 4), 5]
    schedule = any_schedule(m, devices, seed=seed, halves=halves, in_order=False)
    found = round_robin(schedule, tuple([groups[d] for d in devices]))
    validate(found)
    for d, row in enumerate(schedule.actions):
        hands = groups[d] if isinstance(groups[d], tuple) else (groups[d],)
        for k, hand in enumerate(hands):
            wanted = tuple([action for action in row if action.i % len(hands) == k])
            assert found.actions[hand] == wanted


@pytest.mark.parametrize(
    ("replicas", "textbook", "overlap"),
    [
        ([2, 1, 1], (2, 2, 1), (3, 3, 1)),
        ([7, 1], (2, 1), (2, 1)),
        ([9, 5, 1, 1], (2, 2, 2, 1), (3, 2, 3, 1)),
        ([1, 5, 3], (10, 2, 1), (17, 3, 1)),
        ([4], (1,), (1,)),
    ],
)
def test_what_is_in_flight_on_each_device(replicas, textbook, overlap):
    placement = consecutive(replicas)
    for slots, wanted in (("textbook", textbook), ("overlap", overlap)):
        assert one_f_one_b(60, placement, slots=slots).in_flight == wanted


def test_what_is_made_for_one_device_each_is_dealt_out_by_build():
    placement = ((0, 1), 2)
    for schedule in (gpipe(4, 2), lambda m, device_of: gpipe(m, device_of)):
        assert build(schedule, 4, placement).actions == gpipe(4, placement).actions
    assert one_f_one_b(12, placement, slots=[2, 3]).in_flight == (2, 3)


# --- validation and files -----------------------------------------------------------------------


def written(rows: Sequence[str], m: int, device_of: tuple[int, ...]) -> Schedule:
    """A schedule from rows of cells, however wrong."""
    kinds: dict[str, Any] = LETTERS | {"S": "sideways"}
    actions = [[Action(kinds[c[1]], int(c[2:]), int(c[0])) for c in row.split()] for row in rows]
    return Schedule(m, device_of, tuple(map(tuple, actions)), "mine")


@pytest.mark.parametrize(
    ("rows", "m", "device_of", "message"),
    [
        (["0F0 0B0 0F0"], 1, (0,), r"0F0, action 2 of device 0, is a duplicate"),
        (["0F0 0B0 0I0 0W0"], 1, (0,), r"0B0, action 1 .* does not belong there, or is split"),
        (["0F0 0F1 0B0"], 1, (0,), r"0F1, action 1 .* belong there.* m=1, device_of=\(0,\)"),
        (["0F0 1F0 0B0"], 1, (0,), r"1F0, action 1 .* does not belong there"),
        (["0F0 1F0 0B0", "1B0"], 1, (0, 1), r"1F0, action 1 of device 0, does not belong there"),
        (["0S0"], 1, (0,), r"0\?0, action 0 of device 0, does not belong there"),
        (["0F0 0B0", ""], 1, (0,), r"2 lists of actions, one for each .* device_of=\(0,\)"),
        (["0F0 0B0", "", "1F0 1B0"], 1, (0, 2), r"3 lists of actions, one for each device"),
        ([], 1, (), r"m=1, n=0"),
        ([""], 0, (0,), r"m=0, n=1"),
        (["0B0 0F0"], 1, (0,), r"0B0, action 0 of device 0, waits for 0F0, action 1 of 0"),
        (["0F0 0W0 0I0"], 1, (0,), r"0W0, action 1 .* waits for 0I0, action 2 of 0"),
        (["1F0 0F0 1B0 0B0"], 1, (0, 0), r"1F0, action 0 .* waits for 0F0"),
        (["0F0 1F0 0B0 1B0"], 1, (0, 0), r"0B0, action 2 .* waits for 1B0"),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], 2, (0, 1),
            r"deadlock: 0B0, action 1 of device 0, waits for 1B0, action 2 of 1; "
            r"1F1, action 1 of device 1, waits for 0F1, action 2 of 0",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    rows: list[str], m: int, device_of: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"schedule 'mine' is not valid: .*{message}"):
        validate(written(rows, m, device_of))


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
def test_reordered_and_lost_actions_and_files(schedule: Schedule, data: st.DataObject) -> None:
    """Two actions of a device change places: valid if and only if there is no circle now."""
    validate(schedule)
    assert all(1 <= alive <= schedule.m for alive in schedule.in_flight)
    cells = schedule.m * schedule.n
    assert sum(map(len, schedule.actions)) == 2 * cells + len(schedule.splits)
    again = from_csv(to_csv(schedule), schedule.name)
    assert (again, again.name, to_csv(again)) == (schedule, schedule.name, to_csv(schedule))

    d = data.draw(st.integers(0, len(schedule.actions) - 1))
    row = schedule.actions[d]
    a, b = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))

    def changed(row: Sequence[Action]) -> Schedule:
        rows = (*schedule.actions[:d], tuple(row), *schedule.actions[d + 1 :])
        return replace(schedule, actions=rows)

    with pytest.raises(ValueError, match=f"{row[a]} is missing on device {d}"):
        validate(changed(row[:a] + row[a + 1 :]))
    order = list(row)
    order[a], order[b] = order[b], order[a]
    if can_finish(changed(order)):
        validate(changed(order))
    else:
        with pytest.raises(ValueError, match="deadlock"):
            validate(changed(order))


# --- build, and what cannot be ------------------------------------------------------------------


def test_build_by_name_object_file_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = build("zb_h1", 4, [0, 1])
    assert build(schedule, 4, (0, 1)) is schedule
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedule).replace(",", ", ,") + "\n")  # idle time and space
    assert build(path, 4, (0, 1)) == build(str(path), 4, (0, 1)) == schedule
    assert build(str(path), 4, (0, 1)).name == "mine.csv"
    assert build(partial(one_f_one_b, slots=[4, 2]), 4, [0, 1]) == SLOTS(slots=range(4, 0, -2))
    for make in (gpipe, naive):
        monkeypatch.setitem(SCHEDULES, "mine", lambda m, device_of, make=make: make(m, device_of))
        assert build("mine", 2, (0, 1)) == make(2, 2)


class Counts(list[Any]):
    """Notes what it is asked for; as a list it has no hash, and it is equal to all others."""

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self, m: int, device_of: tuple[int, ...]) -> Schedule:
        self.append((m, device_of))
        return gpipe(m, device_of)


def test_a_function_is_asked_once_for_the_same() -> None:
    one, other = Counts(), Counts()
    for function in (one, other, one):
        for m in (4, 3):
            assert build(function, m, [0, 1]) == gpipe(m, 2)
    assert [*one] == [*other] == [(4, (0, 1)), (3, (0, 1))]


def fails(m: int, device_of: tuple[int, ...]) -> Schedule:
    raise ZeroDivisionError("its own")


@pytest.mark.parametrize(
    ("function", "kind", "message", "name"),
    [
        (fails, ZeroDivisionError, "its own", "fails"),
        (len, TypeError, "len", "len"),
        (partial(gpipe, slots=2), TypeError, "slots", "partial(gpipe, slots=2)"),
        (lambda *_: "1f1b", TypeError, "schedule=<lambda> returned '1f1b'", "<lambda>"),
        (lambda m, d: gpipe(m + 1, d), ValueError, "made for m=5, not m=4", "<lambda>"),
        (lambda m, d: gpipe(m, 3), ValueError, ", not device_of", "<lambda>"),
        (lambda m, d: Schedule(m, d, ((), ())), ValueError, "0F0 is missing", "<lambda>"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(
    function: Any, kind: type[Exception], message: str, name: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        build(function, 4, (0, 1))
    [note] = caught.value.__notes__
    assert f"schedule={name}" in note.replace("test_what_.<locals>.", "")
    assert note.endswith("m=4, device_of=(0, 1)")


TWO = (1, 1)
ROUND, BACK = r"stages that go round .* devices=\[0, 1, 0, 1\]", r"two stages .*\[0, 1, 1, 0\]"
ELSEWHERE = [
    *((LOOPED, ROUND, d) for d in [(0, 0, 1, 1), (1, 0), (0, 1, 0), (0, 1, 1, 0)]),
    *((V_SHAPED, BACK, d) for d in [(0, 1), (0, 1, 0, 1), (0, 1, 1), (1, 0, 0, 1)]),
]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((partial(SLOTS, slots=slots), "slots=.*: use 'textbook', 'overlap' or a number for each")
          for slots in ("many", 2, {0: 1}, [2], [1, 0], [1, 2], [2, "a"])),
        (partial(one_f_one_b, 12, ((0, 1), 2), slots=[2, 5]), "times replicas no more than"),
        (partial(interleaved_1f1b, 4, ((0, 1), 2)), "has no replicas, but device_of="),
        (partial(build, gpipe(4, 3), 4, ((0, 1), 2)), "made for device_of"),
        (partial(gpipe, 0, 2), "at least one micro-batch, but m=0"),
        *((partial(gpipe, 4, d), "device_of=.* must name") for d in ((), (1,), (0, 2), 0)),
        *((partial(build, name, 4, d), rf"{name} needs {where}, not device_of=")
          for names, where, d in ELSEWHERE for name in names),
        *((partial(from_csv, text), message) for text, message in (
            ("0F0,0X0", "line 1: '0X0' is not an action"),
            ("0F0,0B0\n1F0,F1", "line 2: 'F1' is not an action"),
            ("0F0\n0B0", "stage 0 is on lines 1 and 2"),
            ("0F0,0B0,2F0,2B0", r"stages \{1\} have no action"),
            ("0F0,0B0,1000000F0,1000000B0", r"stages \{1\} have no action"),
            (",,\n", r"stages \{0\} have no action"),
        )),
        (lambda: validate(from_csv("0F0,0B0,0F1{0},0B1{0}".format("0" * 18))),
         "0F1 is missing on device 0"),
        *((lambda rows=rows, more=more: Costs(*rows, **more), message)
          for rows, more, message in (
            (((1,), (1, 1), (1,)), {}, "backward_input has 2 times, but forward has 1 stages"),
            (((1, 1), (1, 1), (1,)), {}, "backward_weight has 1 times"),
            ((TWO, TWO, TWO, (1, 1)), {}, r"transfer has 2 times, .* give 1"),
            (((1, -1), TWO, TWO), {}, "forward contains -1"),
            ((TWO, (1, math.nan), TWO), {}, "backward_input contains nan"),
            ((TWO, TWO, TWO, (math.inf,)), {}, "transfer contains inf"),
            ((TWO, TWO, TWO, (), {(0, 1): -2}), {}, "skips contains -2"),
            ((TWO, TWO, TWO, (), {(1, 0): 2}), {}, "no skip leads from stage 1 to 0"),
            ((TWO, TWO, TWO, (), {(0, 2): 2}), {}, "from stage 0 to 2 of 2 stages"),
            (((), (), ()), {}, "at least one stage"),
            ((TWO, TWO, TWO), {"recompute": (1,)}, "recompute has 1 times"),
            (((1,), (1,), (1,)), {"last": Costs.even(2)}, "last has 2 stages"),
        )),
        (partial(simulate, Schedule(1, (0,), ((),)), Costs.even(1)), "0F0 is missing"),
        (partial(simulate, gpipe(2, 2), Costs.even(3)), "costs have 3 stages, .*'gpipe' has 2"),
        (partial(simulate, gpipe(2, 2), Costs.even(2), update_every=0), "update_every=0"),
        *((partial(simulate, gpipe(4, 2), Costs.even(2), counts), "rematerialized=.* 0 to m=4")
          for counts in ([1], [1, 1, 1], [-1, 0], [0, 5])),
        *((partial(auto, **{"m": 2, "device_of": 2, "costs": Costs.even(2), **changed}), message)
          for changed, message in (
            ({"memory": [1, 0.5]}, r"one micro-batch at a time takes \(1.0, 1.0\)"),
            ({"memory": [1]}, r"memory=.*give 2 numbers >= 0, one for each device"),
            ({"memory": math.nan}, "memory="),
            ({"costs": Costs.even(3)}, "costs are for 3 stages, but there are 2"),
            ({"activations": [1]}, r"activations=.*give 2 numbers >= 0, one for each stage"),
            ({"activations": [1, -1]}, "activations="),
            ({"inputs": [1, 2]}, r"inputs=.* must not be larger"),
            ({"rematerialized": [5, 0]}, "rematerialized="),
            ({"m": 0}, "at least one micro-batch"),
        )),
        *((partial(build, schedule, 4, (0, 1)), message) for schedule, message in (
            ("1F1B", "schedule='1F1B' is unknown; did you mean '1f1b'"),
            ("chimera", "the names are naive, gpipe, 1f1b, zb_h1, zb_h2, looped_bfs, inter"),
            (3, "schedule=3: must be a name, .*; the names are naive"),
            ("auto", r"schedules\.auto\(m, device_of, costs="),
            (gpipe(5, 2), "'gpipe' is made for m=5, not m=4"),
            (gpipe(4, 3), r"made for device_of=\(0, 1, 2\), not device_of=\(0, 1\)"),
            (Schedule(4, (0, 1), ((), ())), "'custom' is not valid: 0F0 is missing"),
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


# --- the simulator ------------------------------------------------------------------------------

# Multiples of 1/4 add up without rounding, so that sums can be compared exactly.
times = st.integers(0, 40).map(lambda quarters: quarters / 4)


def costs_for(n: int) -> st.SearchStrategy[Costs]:
    def row(length: int) -> st.SearchStrategy[tuple[float, ...]]:
        return st.lists(times, min_size=length, max_size=length).map(tuple)

    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    skips = st.dictionaries(st.sampled_from(pairs), times, max_size=3) if pairs else st.just({})
    return st.builds(Costs, row(n), row(n), row(n), row(n - 1), skips)


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    schedule = draw(schedules())
    return simulate(schedule, draw(costs_for(schedule.n)))


def action_of(span: Span) -> Action:
    return Action(span.kind, span.i, span.j)  # type: ignore[arg-type]


@given(st.data())
def test_everything_starts_as_soon_as_it_can(data: st.DataObject) -> None:
    """In order on each device and link, and never before what it needs is there."""
    schedule, m = (made := data.draw(schedules())), made.m
    usual, last = (data.draw(costs_for(schedule.n)) for _ in range(2))
    costs = replace(usual, last=replace(last, skips=usual.skips))
    counts = [data.draw(st.integers(0, m)) for _ in range(schedule.n)]
    simulation = simulate(schedule, costs, counts)
    spans = {action_of(span): span for span in simulation.spans}
    busy: dict[Any, float] = defaultdict(float)  # links, and what has arrived
    for t in simulation.transfers:
        assert t.target is not None
        sender = schedule.backward_of(t.i, t.j) if t.backward else Action("forward", t.i, t.j)
        link, there = (t.row, schedule.device(t.i, t.target)), (t.i, t.target, t.backward)
        assert t.row == schedule.device(t.i, t.j) != link[1]
        assert t.start == max(spans[sender].end, busy[link])
        busy[link], busy[there] = t.end, max(t.end, busy[there])
    device = schedule.device_of
    sent = sum(device[a] != device[b] for a, b, _ in costs.edges)
    assert len(simulation.transfers) == 2 * m * sent
    for d, row in enumerate(schedule.actions):
        free = 0.0
        for kind, i, j in row:
            own = last if i == m - 1 else costs
            needed = [spans[each].end for each in schedule.predecessors(Action(kind, i, j))]
            if kind != "backward_weight":
                needed.append(busy[i, j, kind != "forward"])
            if kind in ("backward", "backward_input") and i < counts[j]:
                again = spans[Action("recompute", i, j)]
                assert (again.row, again.start) == (d, free)
                free += own.recompute[j]
                assert again.end == free
            span = spans[Action(kind, i, j)]
            assert (span.row, span.start) == (d, max([free, *needed]))
            free = span.start + own.times[kind][j]
            assert span.end == free
    assert len(spans) == len(simulation.spans) == sum(map(len, schedule.actions)) + sum(counts)
    for found in (simulation.spans, simulation.transfers):
        assert [s.start for s in found] == sorted(s.start for s in found)
    played = play(schedule.actions, m, schedule.device_of, costs, counts).makespan
    assert simulation.makespan == played == max(span.end for span in spans.values())


# --- papers -------------------------------------------------------------------------------------


def played(schedule: Schedule) -> Simulation:
    return simulate(schedule, Costs.even(schedule.n))


def idle(simulation: Simulation) -> float:
    """The time that each device has nothing to do, in a step that all begin and end together."""
    assert len(set(simulation.busy)) == 1
    return simulation.makespan - simulation.busy[0]


@pytest.mark.parametrize("p", range(1, 17))
def test_v_half_and_v_min_have_their_parts_of_the_bubble_and_of_the_memory(p: int) -> None:
    for m in (2 * p, 3 * p + 1):
        half, least = (build(name, m, in_a_v(p)) for name in ("v_half", "v_min"))
        assert 3 * (p - 1) - 2 <= idle(played(half)) <= 3 * (p - 1)
        assert p <= max(on_each_device(half)) <= p + 2 - p % 2
        assert 4 * (p - 1) - 1 <= idle(played(least)) <= 4 * (p - 1)
        assert 2 * p / 3 <= max(on_each_device(least)) <= 2 * (p + 4) / 3


# --- the table of the page ----------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
ROW = re.compile(r'\| `"(\w+)"`(.*?)\|.*\| ([\d.]+) %, ([\d.]+) \| ([\d.]+) %, ([\d.]+) \|\n')


def test_the_table_of_the_page_is_what_the_simulator_says() -> None:
    rows = ROW.findall(PAGE)
    assert {row[0] for row in rows} == set(SCHEDULES)
    for name, more, *numbers in rows:
        seen = []
        for m, p in ((8, 4), (64, 16)):
            made: Any = partial(one_f_one_b, slots="textbook") if "textbook" in more else name
            schedule = build(made, m, LAYOUTS.get(name, range)(p))
            most = max(on_each_device(schedule)) * p / schedule.n
            seen += [100 * played(schedule).bubble, most]
        assert [round(number, 1) for number in seen] == list(map(float, numbers)), name


# --- torch.distributed.pipelining: theirs without processes, as data ----------------------------

#: By our name; they have two stages on each device.
THEIRS = {
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}


def theirs(name: str, m: int, devices: int) -> Schedule:
    """Their schedule for the stages of the first process, which knows the order of all others."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(module, THEIRS[name]):
        pytest.skip(f"this PyTorch has no {THEIRS[name]}")
    stage: Any = SimpleNamespace(
        group_size=devices, group_rank=0, num_stages=2 * devices, stage_index=0,
        submod=nn.Identity(), is_first=True, is_last=False,
    )  # fmt: skip
    order = getattr(module, THEIRS[name])([stage, stage], m).pipeline_order
    rows = []
    for rank in range(devices):
        row: list[Action] = []
        for cell in order[rank]:
            for one in () if cell is None else getattr(cell, "sub_actions", None) or (cell,):
                action = Action(
                    KINDS[one.computation_type.name], one.microbatch_index, one.stage_index
                )
                assert repr(one) == str(action)  # the cells of our files
                row.append(action)
        rows.append(tuple(row))
    return Schedule(m, LAYOUTS[name](devices), tuple(rows), THEIRS[name])


SOME = [(4, 1), (4, 2), (9, 3), (8, 4), (16, 4), (32, 8)]


@pytest.mark.parametrize(
    ("name", "m", "devices"),
    [*((name, m, p) for name in THEIRS for m, p in SOME), *(("zbv", m, 4) for m in range(1, 7))],
)
def test_the_order_is_that_of_pytorch(name: str, m: int, devices: int) -> None:
    other = theirs(name, m, devices)
    ours = build(name, m, other.device_of)

    def order(schedule: Schedule) -> list[list[Action | str]]:
        """Of which stage a weight half is makes no difference: nobody waits for it."""
        return [
            [a if a.kind != "backward_weight" else "W" for a in row] for row in schedule.actions
        ]

    assert order(ours) == order(other)
    assert played(ours).makespan == played(other).makespan
    assert on_each_device(ours) == on_each_device(other)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize(("m", "devices"), [(6, 4), (10, 4), (5, 4), (7, 4), (5, 3), (14, 8)])
def test_rounds_of_one_length_are_those_of_pytorch_and_the_shorter_order_is_taken(
    name: str, m: int, devices: int
) -> None:
    other = theirs(name, m, devices)
    rounds = max(1, m // devices)
    equal = SCHEDULES[name](m, other.device_of, size=m // rounds)  # type: ignore[call-arg]
    padded = SCHEDULES[name](m, other.device_of, size=devices)  # type: ignore[call-arg]
    for one in (equal, padded):
        validate(one)
    assert played(equal).makespan == played(other).makespan
    least = min(played(equal).makespan, played(padded).makespan)
    assert played(build(name, m, other.device_of)).makespan == least
