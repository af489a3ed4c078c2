"""``syncpipe.plan``: what it promises, what it prints, what it refuses."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import syncpipe
from syncpipe import Pipe, Worker
from syncpipe.balance import LayerProfile, Profile, SkipProfile
from syncpipe.planner import Machine, Plan, replicated
from syncpipe.schedules import build, one_f_one_b
from syncpipe.schedules.player import simulate
from tests.support.models import linear_model

FOUR = "4 x 1GB, 10GB/s"


def profile_of(
    times: list[float], stored: float = 1e6, parameters: int = 10**6, **more: Any
) -> Profile:
    """Layers that take so many ms for 8 samples, twice that backward."""
    layers = [
        LayerProfile(
            name=f"layer{k}",
            forward={8: time / 1e3},
            backward={8: 2 * time / 1e3},
            output_bytes={8: 10**5},
            stored_bytes={8: stored},
            parameter_bytes=parameters,
        )
        for k, time in enumerate(times)
    ]
    return Profile(tuple(layers), **more)


PROFILE = profile_of([3, 1, 4, 1, 5, 9, 2, 6])


def planned(profile: Profile = PROFILE, devices: Any = FOUR, **options: Any) -> Plan:
    return syncpipe.plan(profile, devices=devices, **{"batch_size": 64, **options})


# --- what it says is what is simulated, and what a pipe runs ------------------------------------


def test_the_step_time_is_that_of_the_schedule_that_a_pipe_will_run() -> None:
    plan = planned()
    kind = plan.schedule if plan.slots is None else partial(one_f_one_b, slots=plan.slots)
    schedule = build(kind, plan.chunks, range(len(plan.balance)))
    again = {"always": plan.chunks, "except_last": plan.chunks - 1, "never": 0}
    counts = [again[mode] for mode in plan.checkpoint]
    assert simulate(schedule, plan.simulation.costs, counts).makespan == plan.step_time
    assert plan.samples_per_second == 64 / plan.step_time
    assert plan.bubble == plan.simulation.bubble
    assert plan.certificate == pytest.approx(plan.step_time / plan.bound)
    assert plan.certificate >= 1 - 1e-12


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipe_takes_its_options_and_train_batch_its_schedule(schedule: str) -> None:
    model = linear_model(8)
    plan = planned(devices=["cpu:0", "cpu:1", "cpu:2"], schedule=schedule)
    pipe = Pipe(model, **plan.options(), devices=plan.devices)
    assert pipe.balance == plan.balance
    assert pipe.chunks == plan.chunks
    assert pipe.checkpoint == tuple(plan.checkpoint)
    assert len(plan.balance) > 1
    with pipe.trace() as trace:
        pipe.train_batch(torch.randn(64, 3), loss_fn=torch.mean)
    spans = [span for span in trace.spans if span.kind in ("forward", "backward")]
    for j in range(len(plan.balance)):
        ran = [(s.kind, s.i) for s in sorted(spans, key=lambda s: s.start) if s.j == j]
        wanted = [(s.kind, s.i) for s in plan.simulation.spans if s.j == j]
        assert ran == [action for action in wanted if action[0] in ("forward", "backward")]


def test_stages_say_what_the_layers_say() -> None:
    plan = planned(memory="2GB")
    assert [layer for stage in plan.stages for layer in stage.layers] == [
        layer.name for layer in PROFILE.layers
    ]
    share = 64 / plan.chunks / 8
    for stage in plan.stages:
        layers = [layer for layer in PROFILE.layers if layer.name in stage.layers]
        assert stage.forward == pytest.approx(share * sum(x.forward[8] for x in layers))
        assert stage.backward == pytest.approx(share * sum(x.backward[8] for x in layers))
        assert stage.limit == 2e9
        fixed = 4 * sum(x.parameter_bytes for x in layers)
        stored = share * sum(x.stored_bytes[8] for x in layers)
        assert stage.memory == pytest.approx(fixed + stage.in_flight * stored)
        assert not stage.recomputes


def test_stages_that_recompute_store_the_last_under_gpipe_and_none_under_1f1b() -> None:
    profile = profile_of([3] * 8, stored=1e8)
    modes = {}
    for schedule in ("gpipe", "1f1b"):
        plan = planned(profile, "4 x 0.4GB, 10GB/s", chunks=8, schedule=schedule, stages=4)
        modes[schedule] = set(plan.checkpoint)
    assert modes["gpipe"] <= {"never", "except_last"}
    assert modes["1f1b"] <= {"never", "always"}
    assert all(len(found - {"never"}) == 1 for found in modes.values())


# --- choices ------------------------------------------------------------------------------------


def test_what_is_given_is_kept() -> None:
    plan = planned(chunks=4, stages=2, schedule="gpipe")
    assert (plan.chunks, len(plan.balance), plan.schedule) == (4, 2, "gpipe")
    assert plan.slots is None
    assert planned(chunks=[2, 4]).chunks in (2, 4)


def test_a_model_is_measured_and_left_alone() -> None:
    model = linear_model(4).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = syncpipe.plan(
        model, torch.randn(8, 3), devices=["cpu:0", "cpu:1"], batch_size=8, timeout=0.05
    )
    assert [layer.name for layer in plan.profile.layers] == ["0", "1", "2", "3"]
    assert not model.training
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())


# --- the page -----------------------------------------------------------------------------------


def test_what_is_said_for_which_plan() -> None:
    plan = planned(memory="1GB")
    light, heavy = profile_of([3] * 8, parameters=1000), profile_of([3] * 8, parameters=4 * 10**7)
    tight = planned(profile_of([3] * 8, stored=1e8), "4 x 0.4GB, 10GB/s", chunks=8)
    said = (
        (plan, ("layer0", "of 1.0 GB", "step time", "samples per second", "bubble", "bound",
               "an equal number of layers", "torchgpipe", "one device", "data parallelism",
               f"{len(plan.balance)} stages")),
        (planned(light), ("data parallelism, 4 copies would be", "DistributedDataParallel")),
        (planned(heavy, "4 x 0.5GB, 10GB/s"),
         ("that was looked at is faster than this plan.", "does not fit")),
        (planned(devices="1 x 1GB"), ("one device, no pipeline",)),
        (planned(stages=2), ("(2 devices left over: as asked)",)),
        (tight, ("+ recompute",)),
    )  # fmt: skip
    for some, parts in said:
        assert max(map(len, str(some).splitlines())) < 160
        assert [what for what in parts if what not in " ".join(str(some).split())] == []
    assert planned(devices="1 x 1GB").step_time == pytest.approx(31 * 3e-3 * 8)
    for some in (planned(stages=1), planned(devices="1 x 1GB")):
        assert "No pipeline" not in str(some)
    timeline = plan.timeline()
    assert timeline.makespan == pytest.approx(plan.step_time)
    assert timeline.unit == "s"
    assert timeline.rows == tuple(stage.device for stage in plan.stages)


def test_a_plan_knows_the_real_devices_that_it_is_for() -> None:
    workers = (Worker("cpu"), Worker("cpu"))
    assert planned(devices=workers, stages=2).devices == workers
    assert planned(devices=iter(("cpu:0", "cpu:1")), stages=2).devices == ("cpu:0", "cpu:1")
    assert [torch.device(device).index for device in planned(devices=1).devices or ()] == [0]
    assert planned().devices is None
    assert planned(devices=Machine.even(4, 1e9, 1e10)).chosen == planned().chosen
    for devices in (FOUR, ["cpu:0", "cpu:1"]):
        assert "devices" not in planned(devices=devices).options()


def test_rivals_are_worse_or_truly_better() -> None:
    plan = planned()
    cuts = [rival for rival in plan.alternatives if rival.pipeline and "replicas" not in rival.name]
    assert cuts
    assert all(rival.time >= plan.step_time * (1 - 1e-9) for rival in cuts if rival.time)


def test_as_dict_is_json() -> None:
    data = json.loads(json.dumps(planned(memory=math.inf).as_dict(), allow_nan=False))
    assert data["balance"] == planned(memory=math.inf).balance
    assert data["stages"][0]["limit"] is None


# --- skips --------------------------------------------------------------------------------------


def with_skip(size: float) -> Profile:
    return profile_of([3] * 8, skips=(SkipProfile("s", 0, 7, {8: size}),))


def test_a_skip_takes_memory_where_it_waits_and_time_on_its_way() -> None:
    given: dict[str, Any] = {"chunks": 8, "stages": 4, "schedule": "1f1b"}
    without, plan = planned(with_skip(0.0), **given), planned(with_skip(1e7), **given)
    assert plan.stages[-1].memory >= without.stages[-1].memory + 1e7
    assert plan.simulation.costs.skips == {(0, 3): pytest.approx(1e7 / 10e9)}
    assert plan.step_time == without.step_time  # it is there long before it is needed


def test_a_skip_that_is_slower_than_the_layers_sets_the_pace() -> None:
    given: dict[str, Any] = {"devices": "4 x 100GB, 10GB/s", "chunks": 8, "stages": 4}
    plan = planned(with_skip(1e9), **given)
    assert plan.step_time > 8 * 0.1 > planned(with_skip(0.0), **given).step_time


# --- refusals -----------------------------------------------------------------------------------


def test_no_plan_fits_names_the_stage_what_is_missing_and_the_way_out() -> None:
    profile = profile_of([3] * 8, parameters=10**8)
    with pytest.raises(ValueError, match="no plan fits into memory") as caught:
        planned(profile, "2 x 1GB, 10GB/s")
    text = str(caught.value)
    for what in ("stage 0", "'layer0' to 'layer3'", "1.7 GB", "more than the 1.0 GB", "4 such"):
        assert what in text
    assert planned(profile, "4 x 1GB, 10GB/s").balance == [2, 2, 2, 2]


def meta_profile() -> Profile:
    return profile_of([0, 0], device="meta")


def test_text_dictionary_and_page_search_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = planned()

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this searches")

    monkeypatch.setattr("syncpipe.planner.planning.variants", refused)
    monkeypatch.setattr("syncpipe.planner.search.auto", refused)
    monkeypatch.setattr("syncpipe.planner.draft.play", refused)
    assert "plan.compare()" in str(plan)
    assert plan.as_dict()["schedules"] == []
    plan.save(tmp_path / "plan.html")
    with pytest.raises(AssertionError, match="this searches"):
        plan.compare()


def test_an_optimizer_is_measured() -> None:
    given: dict[str, Any] = {"devices": FOUR, "batch_size": 64, "replicas": True}
    adam = syncpipe.plan(PROFILE, **given)
    sgd = syncpipe.plan(PROFILE, optimizer=torch.optim.SGD, **given)
    scaled = syncpipe.plan(PROFILE, param_scale=2.0, **given)
    assert sgd.memory == scaled.memory
    assert max(sgd.memory) < max(adam.memory)
    asked: dict[str, Any] = {"chunks": 4, "stages": 2, "schedule": "gpipe"}
    by_class = planned(optimizer=torch.optim.SGD, **asked)
    assert by_class.chosen.memory == planned(param_scale=2.0, **asked).chosen.memory


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    memory=st.integers(10**5, 2 * 10**7),
    n=st.integers(1, 4),
)
def test_what_the_error_says_makes_it_fit(times: list[float], memory: int, n: int) -> None:
    profile = profile_of(times)
    try:
        plan = planned(profile, f"{n} x {memory}B, 1GB/s", batch_size=8)
    except ValueError as error:
        text = str(error)
    else:
        assert all(stage.memory <= stage.limit for stage in plan.stages)
        assert str(plan)
        return
    more = re.search(r"([\d.]+ [kMG]?B) on each device", text)
    assert more
    planned(profile, f"{n} x {more[1]}, 1GB/s", batch_size=8)
    if enough := re.search(r"(\d+) such devices", text):
        planned(profile, f"{enough[1]} x {memory}B, 1GB/s", batch_size=8)
    if smaller := re.search(r"batch_size=(\d+)", text):
        planned(profile, f"{n} x {memory}B, 1GB/s", batch_size=int(smaller[1]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": True}, ValueError, "batch_size=True"),
        ({"chunks": "4"}, TypeError, "chunks='4'"),
        ({"chunks": [4, 2.0]}, TypeError, "chunks=2.0"),
        ({"stages": 2.0}, TypeError, "stages=2.0"),
        ({"param_scale": "2"}, ValueError, "param_scale='2'"),
        ({"param_scale": 0}, ValueError, "param_scale=0: must be a number, at least 1"),
        ({"schedule": "pipedream"}, ValueError, "schedule='pipedream'"),
        ({"chunks": 60}, ValueError, "chunks=60 does not divide batch_size=64"),
        ({"stages": 5}, ValueError, "stages=5"),
        ({"param_scale": 2.0, "optimizer": torch.optim.SGD}, ValueError, "give one"),
        ({"devices": "a lot of them"}, ValueError, "a lot of them"),
        ({"devices": "4 x 1GB"}, ValueError, "12GB/s"),
        ({"sample": torch.ones(1)}, ValueError, "leave out the sample"),
        ({"module": nn.ReLU()}, ValueError, "sample"),
        ({"module": nn.ReLU(), "sample": torch.ones(1)}, TypeError, "ReLU"),
        ({"module": 3}, TypeError, "int"),
        ({"module": meta_profile()}, ValueError, "no times"),
        ({"replicas": True, "chunks": 4}, ValueError, "chunks=4"),
    ],
)
def test_what_does_not_fit_is_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"module": PROFILE, "devices": FOUR, "batch_size": 64, **arguments}
    with pytest.raises(error, match=message):
        syncpipe.plan(**given)


def test_replicas_gives_pipedreams_plan() -> None:
    found = syncpipe.plan(PROFILE, devices=FOUR, batch_size=64, replicas=True)
    added = {name: getattr(found, name) for name in ("chunks", "step", "memory")}
    assert found == replace(replicated(PROFILE, 4, 10e9, samples=16), **added)


def test_replicas_take_a_profile_of_unknown_size_as_it_is() -> None:
    entry = {"name": "a", "forward_ms": 1, "backward_ms": 2, "activation_bytes": 10}
    profile = Profile.from_list([{**entry, "parameter_bytes": 10, "stored_bytes": 10}] * 3)
    found = syncpipe.plan(profile, devices=FOUR, batch_size=64, replicas=True)
    assert found.one_machine == pytest.approx(0.009)
