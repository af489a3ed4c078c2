"""The steps of a stream as data: 1F1B that never drains, and an update after each mini-batch."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from syncpipe.schedules import Costs, one_f_one_b, simulate
from syncpipe.schedules.steps import Edge, training_steps
from syncpipe.schedules.stream import Extent, StreamSteps


def edges_of(n: int, skips: list[tuple[int, int]]) -> list[Edge]:
    ways = [*((j, j + 1, None) for j in range(n - 1)), *((a, b, 0) for a, b in skips if b < n)]
    return [Edge(number, *way) for number, way in enumerate(ways)]


def alone(n: int) -> list[tuple[int, ...]]:
    """Stages without replicas."""
    return [(j,) for j in range(n)]


@given(
    n=st.integers(1, 5),
    m=st.integers(1, 9),
    chunks=st.integers(1, 3),
    count=st.integers(0, 9),
    skips=st.lists(st.sampled_from([(0, 2), (1, 3), (0, 4)]), unique=True),
)
def test_the_steps_are_those_of_1f1b_with_updates(n, m, chunks, count, skips):
    m, edges = m * chunks, edges_of(n, skips)
    schedule = one_f_one_b(m, n, slots="textbook")
    expected = training_steps(tuple(edges), schedule, (count,) * n)
    steps = StreamSteps(edges, alone(n), range(n), (count,) * n, Extent(m), chunks)
    for found, row in zip(steps.rows, expected.rows, strict=True):
        found = list(found)
        assert [step for step in found if step.key[0] != "update"] == list(row)
        after = [a for a, b in pairwise(found) if b.key[0] == "update"]
        assert [(a.key[0], a.action.i) for a in after] == [
            ("backward", i) for i in range(chunks - 1, m, chunks)
        ]


@given(replicas=st.lists(st.integers(1, 4), min_size=1, max_size=5), m=st.integers(0, 30))
def test_round_robin_never_stops_however_many_replicas_there_are(replicas, m):
    """Workers run free, in any order: each message that one waits for comes."""
    n, numbers, total = len(replicas), [], len(replicas)
    for j, r in enumerate(replicas):
        numbers.append((j, *range(total, total + r - 1)))
        total += r - 1
    extent = Extent(replicas=max(replicas))
    program = StreamSteps(edges_of(n, [(0, 2)]), numbers, range(total), (0,) * total, extent)
    done, there, rows = [], set(), list(map(iter, program.rows))
    heads = [next(row, None) for row in rows]
    while any(heads):
        ready = [w for w, head in enumerate(heads) if head and there.issuperset(head.needs)]
        step = heads[w := ready[-1]]
        if step.key[0] == "forward" and step.key[1] in numbers[0] and step.action.i >= m:
            extent.end(m)
        there -= set(step.needs)
        there |= set(step.sends)
        done.append(step)
        heads[w] = next(rows[w], None)
    empty = {
        number for s in done if s.key[0] == "forward" and s.action.i >= m for number in s.sends
    }
    assert there <= empty
    for j, own in enumerate(numbers):
        back = [s.action.i for s in done if s.key[0] == "backward" and s.key[1] in own]
        assert sorted(back) == list(range(m))
        updates = [s.action.i for s in done if s.key == ("update", j)]
        assert updates == list(range(0, m, len(own)))
        if max(replicas) == 1:  # one empty cell goes forward on each stage
            assert [s.action.i for s in done if s.key == ("forward", j)] == list(range(m + 1))


@given(n=st.integers(1, 5), m=st.integers(1, 40))
def test_the_bubble_is_that_of_one_fill_and_updates_take_time(n, m):
    schedule = one_f_one_b(m, n, slots="textbook")
    assert simulate(schedule, Costs.even(n), update_every=1).makespan == 3 * (m + n - 1)
    played = simulate(schedule, Costs.even(n, update=0.5), update_every=1)
    updates = [span for span in played.spans if span.kind == "update" and span.row == 0]
    assert [span.duration for span in updates] == [0.5] * m
    assert played.makespan >= 3 * (m + n - 1) + 0.5
