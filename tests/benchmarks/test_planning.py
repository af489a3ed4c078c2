"""``benchmarks.planning``: what is compared is what it says."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import Part
from benchmarks.planning.predicted import both_busy, spearman, tell
from benchmarks.planning.ways import ALONE, AT_ONCE, asleep, loop_of, other_ways
from syncpipe import Pipe, plan
from syncpipe.balance import LayerProfile, Profile
from syncpipe.planner.machine import Machine
from syncpipe.schedules import gpipe
from syncpipe.schedules.simulation import Costs, simulate

SIZE = {1: 16.0}
PROFILE = Profile(
    tuple(
        LayerProfile(str(k), {1: took}, {1: 2 * took}, SIZE, SIZE)
        for k, took in enumerate((1e-3, 2e-3, 1e-3, 4e-3))
    )
)


def test_each_way_to_run_is_another_and_can_be_built():
    problem = asleep(quick=True)
    best = plan(PROFILE, devices=Machine.even(4), batch_size=4, chunks=4)
    ways = other_ways(best, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"], (4,))
    assert ways["the plan"].balance == best.balance
    assert len(ways) > 3
    told = [json.dumps({**way.options(), "slots": way.slots}) for way in ways.values()]
    assert len(set(told)) == len(told)
    for way in ways.values():
        assert Pipe(problem.model, **way.options(), devices=way.devices).balance == way.balance


def test_busy_at_once():
    # Filling and draining a pipeline of two, one works alone: 2 of 5 units, forth and back.
    simulation = simulate(gpipe(4, 2), Costs.even(2, 1.0, 1.0, 0.0))
    assert simulation.makespan == 10
    assert both_busy(simulation) == 6
    assert both_busy(simulate(gpipe(4, 1), Costs.even(1, 1.0, 1.0, 0.0))) == 0


def test_predictions_are_slowed_where_both_compute_and_by_the_error_of_the_profile():
    best = plan(PROFILE, devices=Machine.even(2), batch_size=4, chunks=4)
    taken, busy = best.step_time, both_busy(best.simulation)
    whole = 4 * sum(layer.forward[1] + layer.backward[1] for layer in PROFILE.layers)
    samples = {
        "the plan": [taken] * 2,
        loop_of(4): [2 * whole] * 2,
        ALONE: [1.0] * 2,
        AT_ONCE: [1.5] * 2,
    }
    part = Part("Title", "Setting.")
    tell(part, "model", {"the plan": best}, samples, {"the plan": [1.0, 1.5, 1.5]})
    loop, row = part.rows
    assert loop["measured / predicted"].median == pytest.approx(2)
    assert loop["machine"].median == 1.5
    assert row["measured / predicted"].median == pytest.approx(1)
    assert row["processors"].median == 1.5  # in the rounds that count
    limit = taken / (taken + busy / 2)
    assert 0.5 < limit < 0.9
    assert row["over the machine's limit"].median == pytest.approx(limit)
    assert row["over limit and profile"].median == pytest.approx(limit / 2)


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 50]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [9, 7, 5, 3]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 3], [5, 6, 7, 8]) == pytest.approx(0.9 / 0.9**0.5)  # shared ranks
    assert spearman([1, 1], [1, 2]) is None
