"""Plans know that one process runs the Python of one stage at a time."""

from __future__ import annotations

import pytest

import syncpipe
import syncpipe.planner.draft as candidate
from syncpipe.balance import LayerProfile, Profile
from syncpipe.planner import Plan

BATCH = 64


@pytest.fixture(autouse=True)
def with_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on free-threaded CPython."""
    monkeypatch.setattr(candidate, "has_lock", lambda: True)


def profile_with(python: float) -> Profile:
    """Four layers of 3 ms for 8 samples, which hold the interpreter for so long, of any size."""
    layers = [
        LayerProfile(str(k), {8: 1e-3}, {8: 2e-3}, {8: 0}, {8: 1e6}, interpreter=python)
        for k in range(4)
    ]
    return Profile(tuple(layers))


def planned(python: float, chunks: int | None = None) -> Plan:
    return syncpipe.plan(
        profile_with(python), devices="4 x 1GB, 10GB/s", batch_size=BATCH, chunks=chunks
    )


def test_no_step_is_shorter_than_the_python_of_all_stages() -> None:
    plan = planned(5e-3, chunks=8)
    assert plan.interpreter_time == pytest.approx(4 * 8 * 5e-3)
    assert plan.step_time == plan.interpreter_time > plan.simulation.makespan
    assert plan.certificate == 1


def test_recomputed_forwards_count_twice() -> None:
    plan = syncpipe.plan(
        profile_with(5e-3), devices="2 x 3MB, 10GB/s", batch_size=BATCH, chunks=8,
        schedule="gpipe", stages=2,
    )  # fmt: skip
    assert plan.checkpoint == ["except_last", "except_last"]
    assert plan.interpreter_time == pytest.approx(4 * 5e-3 * (8 + 7))


def test_micro_batches_are_larger_where_python_is_slow() -> None:
    assert planned(5e-3).chunks < planned(0.0).chunks
    assert planned(5e-3).step_time <= min(planned(5e-3, chunks=m).step_time for m in (1, 2, 4, 8))


def test_the_page_says_what_the_interpreter_takes_and_that_it_is_the_bottleneck() -> None:
    assert "The interpreter is the bottleneck" in " ".join(str(planned(5e-3, chunks=8)).split())
    page = str(planned(0.5e-3, chunks=8))
    assert "interpreter 16.0 ms" in page
    assert "bottleneck" not in page
    assert "interpreter" not in str(planned(0.0))


def test_without_the_lock_there_is_no_such_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "has_lock", lambda: False)
    plan = planned(5e-3, chunks=8)
    assert plan.interpreter_time == 0
    assert plan.step_time == plan.simulation.makespan
