"""Plans under other schedules than GPipe's and 1F1B."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import syncpipe
from syncpipe import Pipe
from syncpipe.balance import LayerProfile, Profile
from syncpipe.planner import NoPlan, Plan
from syncpipe.planner.draft import levels
from syncpipe.planner.search import LAYOUTS
from syncpipe.schedules import build, gpipe, simulate
from tests.support.models import linear_model

NAMES = [name for name in LAYOUTS if name not in ("auto", "gpipe")]
SCHEDULES = ("1f1b", "gpipe")


def profile_of(times: list[float], stored: float = 1e6, parameters: int = 10**5) -> Profile:
    """Layers that take so many ms for 8 samples, twice that backward."""
    return Profile(
        tuple(
            LayerProfile(
                name=f"layer{k}",
                forward={8: time / 1e3},
                backward={8: 2 * time / 1e3},
                output_bytes={8: 10**5},
                stored_bytes={8: stored * (1 + k % 3)},
                parameter_bytes=parameters,
            )
            for k, time in enumerate(times)
        )
    )


PROFILE = profile_of([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


def planned(profile: Profile = PROFILE, devices: str = "3 x 1GB, 10GB/s", **more: Any) -> Plan:
    return syncpipe.plan(profile, devices=devices, **{"batch_size": 64, **more})


def held(plan: Plan) -> list[float]:
    """The most that each device holds, counted along the simulated step."""
    chosen = plan.chosen
    stages = plan.terms.stages(chosen.form, chosen.balance, chosen.modes)
    lanes = levels(chosen.form, plan.simulation, stages)
    return [max(level for _, level in lane) for lane in lanes]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_that_schedule_simulated(name: str) -> None:
    plan = planned(schedule=name)
    schedule = build(name, plan.chunks, plan.device_of)
    assert plan.simulation.schedule == schedule
    assert plan.step_time == simulate(schedule, plan.simulation.costs).makespan
    assert plan.bound <= plan.step_time * (1 + 1e-9)
    assert sum(plan.balance) == len(PROFILE.layers)


@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_a_pipe_runs_it(name: str) -> None:
    profile = profile_of([1.0] * 6)
    plan = planned(profile, "2 x 1GB, 10GB/s", schedule=name, chunks=4)
    model, input = linear_model(6), torch.randn(8, 3)
    model(input).mean().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    pipe = Pipe(model, **plan.options(), devices=plan.on(["cpu:0", "cpu:1"]))
    pipe.train_batch(input, loss_fn=torch.mean)
    for parameter, gradient in zip(pipe.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_device_ever_holds_more_than_is_said(data: st.DataObject) -> None:
    times = data.draw(st.lists(st.floats(0.5, 5), min_size=6, max_size=9))
    name = data.draw(st.sampled_from([*SCHEDULES, *NAMES]))
    limit = data.draw(st.sampled_from(["1GB", "40MB", "25MB"]))
    try:
        plan = planned(profile_of(times), f"2 x {limit}, 10GB/s", schedule=name, chunks=8)
    except NoPlan:
        return
    said = plan.as_dict()["memory_of_devices"]
    for most, told, memory in zip(held(plan), said, plan.machine.memory, strict=False):
        assert most <= told * (1 + 1e-9) <= memory * (1 + 1e-8)
    if name in NAMES or "recompute" not in plan.chosen.modes:
        assert held(plan) == pytest.approx(said)


def test_less_memory_means_recomputation() -> None:
    plan = planned(devices="3 x 22MB, 10GB/s", schedule="interleaved_1f1b", chunks=8)
    assert "always" in plan.checkpoint
    assert "never" in planned(schedule="interleaved_1f1b", chunks=8).checkpoint


def test_several_stages_on_a_device_do_not_cut_where_much_is_sent() -> None:
    sent = [1e8] * 5 + [1e4] + [1e8] * 3 + [1e4] * 3
    layers = [
        replace(layer, output_bytes={8: size})
        for layer, size in zip(profile_of([5.0] * 12).layers, sent, strict=True)
    ]
    several, line = (
        planned(Profile(tuple(layers)), "2 x 1GB, 1GB/s", schedule=schedule)
        for schedule in ("interleaved_1f1b", None)
    )
    assert several.balance[:2] == [6, 4]
    assert several.step_time < 1.25 * line.step_time


def test_the_fastest_of_all_is_not_slower_than_any() -> None:
    steps = {name: planned(schedule=name).step_time for name in (None, *LAYOUTS)}
    assert planned(schedule="any").step_time == min(steps.values())
    assert steps["auto"] <= min(steps.values()) * (1 + 1e-9)


def test_the_page_says_what_every_schedule_takes() -> None:
    plan = planned()
    assert "plan.compare()" in str(plan)
    plan.compare()
    page = " ".join(str(plan).split())  # however its lines are wrapped
    for name in LAYOUTS:
        assert re.search(rf"schedule={name!r}: [\d.]+ MB at most", page)
    tight = planned(devices="3 x 16MB, 10GB/s", chunks=8)
    tight.compare()
    page = " ".join(str(tight).split())
    assert re.search(r"does not fit schedule='\w+': device \d would need", page)


def test_the_page_says_that_there_was_no_time_for_one_made_to_measure() -> None:
    times = [1.0] * 16
    plan = planned(profile_of(times), "8 x 1GB, 10GB/s", batch_size=128, chunks=128)
    plan.compare()
    assert "not tried for so many stages and micro-batches" in str(plan)


def test_stages_with_replicas_are_one_of_the_ways() -> None:
    light = LayerProfile("light", {8: 4e-3}, {8: 8e-3}, {8: 10}, {8: 10}, parameter_bytes=10)
    heavy = LayerProfile("heavy", {8: 2e-3}, {8: 4e-3}, {8: 10}, {8: 10}, parameter_bytes=10**9)
    plan = planned(Profile((light, heavy)), "3 x 80GB, 1GB/s", batch_size=48)
    rival = next(rival for rival in plan.alternatives if "replicas" in rival.name)
    assert rival.name == "stages with replicas, 2-1 (replicas=True)"
    replicas = syncpipe.plan(plan.profile, devices="3 x 80GB, 1GB/s", batch_size=48, replicas=True)
    assert rival.time == replicas.step
    assert "Stages with replicas, 2-1 (replicas=True) would be" in " ".join(str(plan).split())


def test_what_devices_hold_is_told_where_they_have_several_stages() -> None:
    assert "device 0, stages 0, 5 at once" in str(planned(schedule="zbv"))
    assert planned(schedule="interleaved_1f1b", stages=9).device_of == [0, 1, 2] * 3
    devices = ["cpu:0", "cpu:1"]
    plan = syncpipe.plan(PROFILE, devices=devices, memory="1GB", batch_size=64, schedule="zbv")
    assert plan.devices == ("cpu:0", "cpu:1", "cpu:1", "cpu:0")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"schedule": "zbv", "stages": 5}, ValueError, "two stages on each device"),
        ({"schedule": "zbv", "profile": profile_of([1, 2, 3])}, ValueError, "3 layers"),
        ({"schedule": "zb_h1", "devices": "3 x 2MB, 1GB/s"}, NoPlan, "more than its 2.0 MB"),
        ({"schedule": "auto", "devices": "3 x 2MB, 1GB/s"}, NoPlan, "no plan fits"),
        ({"schedule": "any", "devices": "3 x 2MB, 1GB/s"}, NoPlan, "no plan fits"),
        ({"schedule": gpipe}, TypeError, "names"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        planned(**arguments)


def test_devices_for_a_plan_must_be_enough() -> None:
    with pytest.raises(ValueError, match="this plan uses 3 devices"):
        planned(schedule="zb_h1", stages=3).on(["cpu:0"])
