"""Recomputation in simulations: when it runs, what it costs, what it hides behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncpipe.schedules import build, gpipe, naive, one_f_one_b
from syncpipe.schedules.simulation import Costs, Simulation, simulate
from syncpipe.timeline.timeline import Timeline
from tests.schedules.test_schedule import schedules
from tests.schedules.test_simulation import costs_for


@st.composite
def recomputing(draw: st.DrawFn) -> Simulation:
    schedule = draw(schedules())
    counts = [draw(st.integers(0, schedule.m)) for _ in range(schedule.n)]
    return simulate(schedule, draw(costs_for(schedule.n)), counts)


@given(recomputing())
def test_each_recomputation_is_right_before_its_backward(simulation: Simulation) -> None:
    kinds = ("recompute", "backward", "backward_input")
    for row in range(len(simulation.schedule.actions)):
        spans = sorted((s for s in simulation.spans if s.device == row), key=lambda s: s.start)
        order = [span.action for span in spans]
        for k, action in enumerate(order):
            if action.kind in kinds[1:]:
                again = action.i < simulation.rematerialized[action.j]
                before = order[k - 1]
                assert (before.kind == "recompute") == again
                assert not again or before[1:] == action[1:]
    recomputed = [s.action for s in simulation.spans if s.action.kind == "recompute"]
    assert len(recomputed) == sum(simulation.rematerialized)


@given(st.data())
def test_what_is_played_is_when_spans_end(data: st.DataObject) -> None:
    """The player and the spans work out times each by itself; also for a smaller last one."""
    schedule = data.draw(schedules())
    usual, last = (data.draw(costs_for(schedule.n)) for _ in range(2))
    costs = replace(usual, last=replace(last, skips=usual.skips))
    counts = [data.draw(st.integers(0, schedule.m)) for _ in range(schedule.n)]
    every = data.draw(st.sampled_from([None, 1, 2]))
    simulation = simulate(schedule, costs, counts, update_every=every)
    assert simulation.makespan == max(span.end for span in simulation.spans)


@pytest.mark.parametrize("device_of", [((0, 1), 2), (0, (1, 2)), ((0, 1), (2, 3))])
def test_each_replica_has_links_of_its_own(device_of: tuple[int | tuple[int, ...], ...]) -> None:
    simulation = simulate(build("1f1b", 6, device_of), Costs.even(2, transfer=4.0))
    assert simulation.makespan == max(span.end for span in simulation.spans)
    receivers = {simulation.schedule.device(t.action.i, t.target) for t in simulation.transfers}
    assert receivers == set(range(len(simulation.schedule.actions)))


@given(recomputing())
def test_recomputing_less_never_takes_longer(simulation: Simulation) -> None:
    plain = simulate(simulation.schedule, simulation.costs)
    assert plain.makespan <= simulation.makespan
    assert sum(simulation.busy) == pytest.approx(
        sum(plain.busy)
        + sum(
            count * time
            for count, time in zip(
                simulation.rematerialized, simulation.costs.recompute, strict=True
            )
        )
    )


@pytest.mark.parametrize("m", [2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_in_even_stages_gpipe_pays_for_all_but_what_waits_anyway(m: int, n: int) -> None:
    """The last micro-batch of every stage but the last is recomputed while others go back."""
    costs = Costs.even(n, 1.0, 1.0, 1.0)
    stored = simulate(gpipe(m, n), costs).makespan
    assert simulate(gpipe(m, n), costs, [m - 1] * n).makespan == stored + m - 1
    assert simulate(gpipe(m, n), costs, [m] * n).makespan == stored + m


def test_a_recomputation_does_not_wait_for_the_gradient() -> None:
    simulation = simulate(naive(1, 2), Costs.even(2, 1.0, 1.0, 1.0), [1, 0])
    again = next(span for span in simulation.spans if span.action.kind == "recompute")
    assert (again.start, again.end) == (1.0, 2.0)
    assert simulation.makespan == 6.0


def test_it_takes_the_time_given_for_it() -> None:
    costs = Costs((1.0,), (1.0,), (1.0,), recompute=(5.0,))
    assert simulate(gpipe(2, 1), costs, [2]).makespan == 2 * (1 + 5 + 2)


def test_a_timeline_shows_it() -> None:
    simulation = simulate(one_f_one_b(4, 2), Costs.even(2), [4, 0])
    kinds = [span.kind for span in Timeline.of(simulation).spans]
    assert kinds.count("recompute") == 4


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [-1, 0], [0, 5]])
def test_numbers_that_do_not_fit_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rematerialized=.*0 to m=4.*2 stages"):
        simulate(gpipe(4, 2), Costs.even(2), counts)


def test_as_many_times_as_stages() -> None:
    with pytest.raises(ValueError, match=r"recompute has 1 times.*2 stages"):
        Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), recompute=(1.0,))
