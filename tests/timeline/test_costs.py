"""``timeline.costs``: what a trace, or a simulation, says that each stage costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncpipe.schedules import Costs, one_f_one_b, simulate, zb_h1
from syncpipe.timeline import Span, Timeline
from tests.schedules.test_simulation import costs_for


def approximately(costs: Costs) -> dict[str, Any]:
    return {name: pytest.approx(value, abs=1e-6) for name, value in vars(costs).items()}


@given(costs_for(3), st.sampled_from([0, 3, 4]))
@settings(deadline=None)
def test_a_simulation_has_the_costs_that_it_was_made_with(costs: Costs, count: int) -> None:
    times = costs.forward, costs.backward_input, costs.backward_weight
    between = [costs.transfer[j] + costs.skips.get((j, j + 1), 0.0) for j in range(2)]
    further = {(0, 2): costs.skips[0, 2]} if (0, 2) in costs.skips else {}
    timeline = Timeline.of(simulate(zb_h1(4, 3), costs, [count, 0, count]))
    assert vars(Costs(*times, between, further)) == approximately(timeline.costs)
    assert timeline.rematerialized == (count, 0, count)


def test_a_whole_backward_is_all_input_half() -> None:
    costs = Costs((1, 2), (3, 4), (5, 6), recompute=(7, 8))
    timeline = Timeline.of(simulate(one_f_one_b(3, 2), costs, [2, 0]))
    assert timeline.costs == Costs((1, 2), (8, 10), (0, 0), recompute=(7, 2))


def test_medians_over_micro_batches_and_steps() -> None:
    spans = [
        Span(kind, i, 0, 0, 10.0 * i, 10.0 * i + time, step=i)
        for i, time in enumerate([1.0, 2.0, 9.0])
        for kind in ("forward", "backward")
    ]
    assert Timeline(spans, ["one"]).costs == Costs((2.0,), (2.0,), (0.0,))


def test_the_slower_way_counts() -> None:
    spans = [Span(kind, 0, j, j, 0, 1) for j in (0, 1) for kind in ("forward", "backward")]
    there, back = (
        Span("transfer", 0, 0, 0, 0, 2, 1),
        Span("transfer", 0, 1, 1, 0, 3, 0, backward=True),
    )
    assert Timeline([*spans, there, back], ["one", "other"]).costs.transfer == (3.0,)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [([], "no step"), (["backward"], "no step"), (["forward"], "no backward of stage 0")],
)
def test_what_is_missing(kinds: list[str], message: str) -> None:
    spans = [Span(kind, 0, 0, 0, 0, 1) for kind in kinds]
    with pytest.raises(ValueError, match=message):
        _ = Timeline(spans, ["one"]).costs
