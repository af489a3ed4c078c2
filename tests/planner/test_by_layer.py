"""Plans whose stages recompute some of their layers, beside brute force and in pipes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import syncpipe
from benchmarks.planning import random_profile
from syncpipe import Pipe, is_recomputing
from syncpipe.balance.profile import LayerProfile, Profile
from syncpipe.planner.by_layer import Refinement
from syncpipe.planner.candidates import Problem, one_f_one_b_shape
from syncpipe.planner.chain import Mode, Spans, ends_of
from syncpipe.planner.machine import Machine
from syncpipe.planner.search import refined, search


def profile_of(forward: list[float], stored: list[float]) -> Profile:
    """Layers whose inputs are small."""
    return Profile(
        tuple(
            LayerProfile(str(k), {1: f}, {1: 2 * f}, {1: 1.0}, {1: s})
            for k, (f, s) in enumerate(zip(forward, stored, strict=True))
        )
    )


def every_spans(i: int, j: int) -> Iterator[Spans]:
    """All ways to store layers ``[i, j)`` or to recompute them in runs."""
    if i == j:
        yield ()
        return
    yield from every_spans(i + 1, j)
    for to in range(i + 1, j + 1):
        for rest in every_spans(to, j):
            yield ((i, to), *rest)


@settings(max_examples=25)
@given(
    times=st.lists(st.integers(0, 9), min_size=2, max_size=6),
    sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    slots=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    part=st.floats(0.2, 1.0),
)
def test_each_stage_recomputes_as_few_seconds_as_any_choice_of_runs(
    times: list[int], sizes: list[int], slots: tuple[int, int], part: float
) -> None:
    profile = profile_of([*map(float, times)], [*map(float, sizes[: len(times)])])
    m, cut, shape = 4, (1, len(times) - 1), one_f_one_b_shape(4, (max(slots), min(slots)))
    whole = Problem(profile, Machine.even(2), m, 2.0).evaluate(shape, cut, ["store"] * 2)
    assert whole is not None
    limit = part * max(whole.on_device)
    problem = Problem(profile, Machine.even(2, limit), m, 2.0)
    found = Refinement(problem).modes(shape, cut)
    least: float | None = 0.0
    for s, (i, j) in enumerate(ends_of(cut)):
        fitting = [
            sum(times[a] for run in runs for a in range(*run))
            for runs in every_spans(i, j)
            if problem.needs(shape, s, ends_of(cut), mode_of(runs, i, j)).peak(shape.in_flight[s])
            <= limit
        ]
        least = None if least is None or not fitting else least + min(fitting)
    assert (found is None) == (least is None)
    if found is not None:
        candidate = problem.evaluate(shape, cut, found)
        assert candidate is not None
        assert candidate.excess == 1
        again = sum(
            sum(times[a] for run in runs_of(mode, *ends) for a in range(*run))
            for mode, ends in zip(found, candidate.ends, strict=True)
        )
        assert again == least


def mode_of(runs: Spans, i: int, j: int) -> Mode:
    return "recompute" if runs == ((i, j),) else runs or "store"


def runs_of(mode: Mode, i: int, j: int) -> Spans:
    return mode if isinstance(mode, tuple) else ((i, j),) if mode == "recompute" else ()


@pytest.mark.parametrize("seed", [4, 7])
def test_it_is_never_slower_nor_with_more_memory(seed: int) -> None:
    profile = random_profile(12, f"by layer {seed}")
    most = max(search(Problem(profile, Machine.even(3, math.inf, 12e9), 64, 2.0))[0].on_device)
    before, faster = math.inf, 0
    for part in (0.35, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8):
        problem = Problem(profile, Machine.even(3, part * most, 12e9), 64, 2.0)
        if found := search(problem, chunks=8):
            chosen = refined(problem, found, 8)
            assert chosen is not None
            assert chosen.excess == 1
            assert chosen.time <= found[0].time
            assert chosen.time <= before * 1.005
            before, faster = chosen.time, faster + (chosen.time < found[0].time)
    assert faster


class Counts(nn.Linear):
    """Counts its recomputations."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.again: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.again["recomputed"] += is_recomputing()
        return super().forward(x).tanh()


def test_a_pipe_recomputes_the_layers_that_a_plan_names() -> None:
    profile = profile_of([1e-3] * 8, [1e8, 1e6] * 4)
    devices = "2 x 0.35GB, 10GB/s"
    plan = syncpipe.plan(profile, devices=devices, batch_size=8, chunks=8, stages=2)
    assert any(isinstance(mode, list) for mode in plan.checkpoint)
    assert 0 < len(plan.stages[0].recomputed) < len(plan.stages[0].layers)
    some, whole = len(plan.stages[0].recomputed), len(plan.stages[0].layers)
    assert f"+ recompute {some} of {whole}" in str(plan)
    backward = plan.simulation.costs.times["backward"][0]  # a layer takes 1 ms again
    assert backward == pytest.approx(plan.stages[0].backward + 1e-3 * some)
    assert plan.step_time == pytest.approx(plan.simulation.makespan)
    pipe = Pipe(
        nn.Sequential(*(Counts() for _ in range(8))), **plan.options(), devices=["cpu:0", "cpu:1"]
    )
    pipe.train_batch(torch.randn(8, 8), loss_fn=torch.mean)
    names = {str(k) for k, layer in enumerate(pipe) if layer.again["recomputed"]}
    assert names == {name for stage in plan.stages for name in stage.recomputed}


def test_stages_that_all_recompute_by_layer_are_one_list_of_a_pipe() -> None:
    """Here less fits than a stage stores for one micro-batch."""
    profile, devices = profile_of([1e-3] * 8, [1e8] * 8), "2 x 0.25GB, 10GB/s"
    plan = syncpipe.plan(profile, devices=devices, batch_size=8, chunks=8, stages=2)
    assert all(isinstance(mode, list) for mode in plan.checkpoint)
    layers = nn.Sequential(*(Counts() for _ in range(8)))
    pipe = Pipe(layers, **plan.options(), devices=["cpu:0", "cpu:1"])
    pipe.train_batch(torch.randn(8, 8), loss_fn=torch.mean)
    names = {str(k) for k, layer in enumerate(pipe) if layer.again["recomputed"]}
    assert names == {name for stage in plan.stages for name in stage.recomputed}


def test_more_memory_does_not_hide_the_cut_that_recomputes_by_layer() -> None:
    profile = random_profile(35, "memory 7")
    step = {
        limit: syncpipe.plan(
            profile, devices=Machine.even(3, limit, 12e9), batch_size=128, chunks=8
        ).step_time
        for limit in (955e6, 1012e6)  # with the larger limit a slower cut stores all layers
    }
    assert step[1012e6] <= step[955e6] * 1.005


def test_the_order_of_the_devices_is_that_of_the_stages_by_layer() -> None:
    """Where whole stages recompute, another order is the fastest."""
    profile, rates = random_profile(11, "kinds 38"), Machine.even(3, 1, 12e9).bandwidth
    machine = Machine((124e6, 82.6e6, 82.6e6), rates)
    found = []
    for order in ((0, 1, 2), (1, 2, 0)):
        problem = Problem(profile, machine.ordered(order), 64, 4.0)
        found.append(refined(problem, search(problem, chunks=8), 8))
    plan = syncpipe.plan(profile, devices=machine, batch_size=64, chunks=8)
    assert plan.step_time == min(one.time for one in found if one)
