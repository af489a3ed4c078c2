"""``syncpipe.plan``: what it promises under which schedule, what it prints, what it refuses."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import syncpipe
from syncpipe import Pipe, Worker
from syncpipe.balance import LayerProfile, Profile
from syncpipe.planner import Alternative, Machine, NoPlan, Plan
from syncpipe.planner.cuts import least_largest
from syncpipe.planner.search import LAYOUTS
from syncpipe.schedules import build, gpipe, one_f_one_b, simulate
from syncpipe.timeline.timeline import Timeline
from tests.support.models import linear_model

NAMES = [name for name in LAYOUTS if name not in ("auto", "gpipe")]
LOCK = "syncpipe.planner.candidates.has_lock"


def profile_of(
    times: list[float],
    stored: float = 1e6,
    parameters: int = 10**6,
    names: str = "layer{}",
    python: float = 0.0,
    **more: Any,
) -> Profile:
    """Layers that take so many ms for 8 samples, twice that backward."""
    layers = [
        LayerProfile(
            names.format(k), {8: time / 1e3}, {8: 2 * time / 1e3}, {8: 10**5}, {8: stored},
            parameter_bytes=parameters, interpreter=python,
        )
        for k, time in enumerate(times)
    ]  # fmt: skip
    return Profile(tuple(layers), **more)


PROFILE = profile_of([3, 1, 4, 1, 5, 9, 2, 6])
EVEN = profile_of([3] * 8)


def planned(profile: Profile = PROFILE, devices: Any = "4 x 1GB, 10GB/s", **options: Any) -> Plan:
    """With 8 micro-batches, which is quick to find; for any number chunks=None."""
    return syncpipe.plan(profile, devices=devices, **{"batch_size": 64, "chunks": 8} | options)


def said_by(plan: Plan) -> str:
    """Its text, however its lines are wrapped."""
    return " ".join(str(plan).split())


# --- what it says is what is simulated, and what a pipe runs ------------------------------------


@pytest.mark.parametrize("name", [None, *NAMES])
def test_the_step_time_is_that_of_the_schedule_that_a_pipe_will_run(name: str | None) -> None:
    plan = planned(schedule=name)
    kind = plan.schedule if plan.slots is None else partial(one_f_one_b, slots=plan.slots)
    schedule = build(kind, plan.chunks, plan.device_of)
    again = {"always": plan.chunks, "except_last": plan.chunks - 1, "never": 0}
    counts = [again[mode] for mode in plan.checkpoint]
    assert plan.simulation.schedule == schedule
    assert simulate(schedule, plan.simulation.costs, counts).makespan == plan.step_time
    assert plan.samples_per_second == 64 / plan.step_time
    assert plan.bubble == plan.simulation.bubble
    assert plan.certificate == pytest.approx(plan.step_time / plan.bound)
    assert plan.certificate >= 1 - 1e-9
    assert sum(plan.balance) == len(PROFILE.layers)
    assert plan.timeline().makespan == pytest.approx(plan.step_time)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", *NAMES, "auto"])
def test_a_pipe_runs_it(name: str) -> None:
    plan = planned(profile_of([1.0] * 6), ["cpu:0", "cpu:1"], schedule=name, chunks=4, memory="1GB")
    model, input = linear_model(6), torch.randn(8, 3)
    model(input).mean().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    pipe = Pipe(model, **plan.options(), devices=plan.devices)
    shape = (pipe.balance, pipe.chunks, pipe.checkpoint)
    assert shape == (plan.balance, plan.chunks, tuple(plan.checkpoint))
    with pipe.trace() as trace:
        pipe.train_batch(input, loss_fn=torch.mean)
    for parameter, gradient in zip(pipe.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    for d in range(2) if name in ("gpipe", "1f1b") else ():
        ran = sorted((s for s in trace.spans if s.j == d and s.kind in ("forward", "backward")),
                     key=lambda s: s.start)  # fmt: skip
        row = plan.chosen.shape.schedule.actions[d]
        assert [(s.kind, s.i) for s in ran] == [(action.kind, action.i) for action in row]


def test_stages_say_what_the_layers_say() -> None:
    plan = planned(memory="2GB")
    names = [name for stage in plan.stages for name in stage.layers]
    assert names == [layer.name for layer in PROFILE.layers]
    share = 64 / plan.chunks / 8
    for stage in plan.stages:
        layers = [layer for layer in PROFILE.layers if layer.name in stage.layers]
        assert stage.forward == pytest.approx(share * sum(x.forward[8] for x in layers))
        assert stage.backward == pytest.approx(share * sum(x.backward[8] for x in layers))
        fixed = 4 * sum(x.parameter_bytes for x in layers)
        stored = share * sum(x.stored_bytes[8] for x in layers)
        step = fixed + stage.in_flight * stored
        assert stage.memory == pytest.approx(max(step, 5 / 4 * fixed))  # or the optimizer's step
        assert (stage.limit, stage.mode) == (2e9, "store")


def test_the_halves_of_backward_are_those_of_the_profile() -> None:
    known = Profile(tuple([replace(layer, weight_share=0.75) for layer in PROFILE.layers]))
    plan, guessed = (planned(profile, schedule="zb_h1") for profile in (known, PROFILE))
    costs = plan.simulation.costs
    assert costs.backward_weight == pytest.approx([3 * time for time in costs.backward_input])
    assert "Backward halves were not measured" in said_by(guessed)
    assert "Backward halves were not measured" not in said_by(plan)


def test_stages_that_recompute_store_the_last_under_gpipe_and_none_under_1f1b() -> None:
    profile = profile_of([3] * 8, stored=1e8)
    for schedule, mode in (("gpipe", "except_last"), ("1f1b", "always")):
        plan = planned(profile, "4 x 0.4GB, 10GB/s", chunks=8, schedule=schedule, stages=4)
        assert mode in plan.checkpoint
        assert {each for each in plan.checkpoint if isinstance(each, str)} <= {"never", mode}
    small: dict[str, Any] = {"schedule": "interleaved_1f1b", "chunks": 8, "stages": 6}
    assert set(planned(EVEN, "3 x 1GB, 10GB/s", **small).checkpoint) == {"never"}
    assert "always" in planned(EVEN, "3 x 18MB, 10GB/s", **small).checkpoint


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_device_ever_holds_more_than_is_said(data: st.DataObject) -> None:
    times = data.draw(st.lists(st.floats(0.5, 5), min_size=6, max_size=9))
    name = data.draw(st.sampled_from(["1f1b", "gpipe", *NAMES]))
    limit = data.draw(st.sampled_from(["1GB", "40MB", "25MB"]))
    profile = profile_of(times, parameters=10**5)
    try:
        plan = planned(profile, f"2 x {limit}, 10GB/s", schedule=name)
    except NoPlan:
        return
    chosen, said = plan.chosen, plan.as_dict()["memory_of_devices"]
    stages = plan.terms.stages(chosen.shape, chosen.balance, chosen.modes)
    places = enumerate(chosen.shape.stages_of)
    held = [max(chosen.shape.levels(d, {j: stages[j] for j in own})) for d, own in places]
    for most, told, memory in zip(held, said, plan.machine.memory, strict=False):
        assert most <= told * (1 + 1e-9) <= memory * (1 + 1e-8)
    if name in NAMES or "recompute" not in chosen.modes:
        assert held == pytest.approx(said)


# --- choices ------------------------------------------------------------------------------------


def test_what_is_given_is_kept() -> None:
    assert planned(chunks=4, stages=2, schedule="gpipe").slots is None
    assert planned(chunks=[2, 4]).chunks in (2, 4)
    assert planned(schedule="interleaved_1f1b", stages=8).device_of == [0, 1, 2, 3] * 2


def test_a_plan_knows_the_real_devices_that_it_is_for() -> None:
    workers = (Worker("cpu"), Worker("cpu"))
    assert planned(devices=workers, stages=2).devices == workers
    assert planned(devices=iter(("cpu:0", "cpu:1")), stages=2).devices == ("cpu:0", "cpu:1")
    three = planned(devices=["cpu:0", "cpu:1", "cpu:2"], memory="1GB", stages=2)
    assert three.devices == ("cpu:0", "cpu:1")  # what is left over is none of them
    assert planned().devices is None
    v = planned(devices=["cpu:0", "cpu:1"], memory="1GB", schedule="zbv")
    assert v.devices == ("cpu:0", "cpu:1", "cpu:1", "cpu:0")
    assert planned(devices=Machine.even(4, 1e9, 1e10)).as_dict() == planned().as_dict()
    with pytest.raises(ValueError, match="give the 3 that this plan uses"):
        planned(schedule="zb_h1", stages=3).on(["cpu:0"])


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


@pytest.mark.parametrize("replicas", [False, True])
def test_an_optimizer_is_measured(replicas: bool) -> None:
    adam = planned(replicas=replicas)
    sgd = planned(replicas=replicas, optimizer=torch.optim.SGD)
    assert sgd.as_dict() == planned(replicas=replicas, param_scale=2.0).as_dict()
    assert max(sgd.chosen.memory) < max(adam.chosen.memory)


# --- the interpreter ----------------------------------------------------------------------------


def test_no_step_is_shorter_than_the_python_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOCK, lambda: True)  # also on free-threaded CPython
    slow = profile_of([1] * 4, python=5e-3)
    plan = planned(slow)
    assert plan.interpreter_time == pytest.approx(4 * 8 * 5e-3)
    assert plan.step_time == plan.interpreter_time > plan.simulation.makespan
    assert plan.certificate == 1
    assert "limited by Python, which one thread runs at a time" in said_by(plan)
    some = said_by(planned(profile_of([1] * 4, python=0.5e-3)))
    assert "interpreter 16.0 ms" in some
    assert "limited by Python" not in some
    again = planned(profile_of([1] * 4, parameters=0, python=5e-3), "2 x 3MB, 10GB/s",
                    schedule="gpipe", stages=2)  # fmt: skip
    assert again.checkpoint == ["except_last"] * 2
    assert again.interpreter_time == pytest.approx(4 * 5e-3 * (8 + 7))
    free = planned(slow, chunks=None)  # fewer and larger ones
    assert free.chunks < planned(profile_of([1] * 4), chunks=None).chunks
    assert free.step_time <= min(planned(slow, chunks=m).step_time for m in (1, 2, 4, 8))
    monkeypatch.setattr(LOCK, lambda: False)
    assert planned(slow).interpreter_time == 0


# --- the page -----------------------------------------------------------------------------------


def test_what_is_said_for_which_plan() -> None:
    plan = planned(memory="1GB", chunks=None)
    light, heavy = profile_of([3] * 8, parameters=1000), profile_of([3] * 8, parameters=4 * 10**7)
    tight = planned(profile_of([3] * 8, stored=1e8), "4 x 0.4GB, 10GB/s")
    measured: dict[str, Any] = {"spread": 0.4, "load_average": 6.25, "source": "measured"}
    unsure = planned(profile_of([3] * 8, device="cpu", **measured))
    slow = planned(profile_of([3] * 8, device="cpu", source="measured", load_average=1e4))
    far = planned(profile_of([3] * 8, device="A100", source="estimated"))
    part = Profile((replace(profile_of([1], parameters=100).layers[0], frozen_bytes=40),))
    small, large = (
        planned(part, f"1 x {room}B, 1GB/s", batch_size=1, param_scale=2, chunks=None)
        for room in (125_190, 126_000)
    )
    assert small.stages[0].gradients == large.stages[0].gradients == 60
    assert "too much" not in str(large)
    said: tuple[tuple[Plan, tuple[str, ...]], ...] = (
        (small, ("too much for device 0",)),
        (plan, ("layer0", "of 1.0 GB", "step time", "samples per second", "bubble", "bound",
               "an equal number of layers", "torchgpipe", "one device", "data parallelism",
               f"{len(plan.balance)} stages", "plan.compare()")),
        (planned(light), ("data parallelism, 4 copies would be", "DistributedDataParallel")),
        (planned(heavy, "4 x 0.5GB, 1GB/s"),
         ("that was tried is faster than this plan.", "does not fit")),
        (planned(devices="1 x 1GB"), ("one device, no pipeline",)),
        (planned(light, replicas=True), ("1F1B, 1 stage on 4 devices,",)),
        (planned(stages=2), ("(2 devices left over: as asked)",)),
        (planned(schedule="zbv"), ("device 0, stages 0, 7 at once",)),
        (tight, ("+ recompute",)),
        (unsure, ("\u00b140%: rounds or layers contradict each other (load 6.2", "ms \u00b140%,")),
        (slow, ("load 10000.0 during the measurement: other programs may have made",)),
        (far, ("times are estimated from the data sheet, not measured",)),
    )  # fmt: skip
    for some, parts in said:
        assert max(map(len, str(some).splitlines())) < 160
        assert [what for what in parts if what not in said_by(some)] == []
    assert planned(devices="1 x 1GB").step_time == pytest.approx(31 * 3e-3 * 8)
    for some in (planned(stages=1), planned(devices="1 x 1GB")):
        assert "No pipeline" not in str(some)
    assert "\u00b1" not in str(planned(profile_of([3] * 8, spread=0.01)))
    for samples, capped in ((1024, False), (2048, True)):
        text = said_by(planned(batch_size=samples, devices="2 x 1GB, 10GB/s", chunks=None))
        assert "fixed cost of a micro-batch is unknown" in text
        assert ("micro-batches are tried only if" in text) is capped
    other = Alternative("data parallelism, 2 copies", 0.999 * plan.step_time, instead="that")
    text = said_by(Plan(plan.terms, plan.chosen, [other]))  # not "1.00 times as fast"
    assert "Nothing that was tried is faster than this plan by more than 1%." in text


def test_the_page_says_what_every_schedule_takes() -> None:
    plan = planned(devices="3 x 1GB, 10GB/s")
    plan.compare()
    for name in LAYOUTS:
        assert re.search(rf"schedule={name!r}( \(with .*?\))?: [\d.]+ MB at most", said_by(plan))
    large = planned(profile_of([1.0] * 16), "8 x 1GB, 10GB/s", batch_size=128, chunks=128)
    large.compare()
    assert "was not tried: too many stages and micro-batches" in said_by(large)


def test_stages_with_replicas_are_one_of_the_ways() -> None:
    light = LayerProfile("light", {8: 4e-3}, {8: 8e-3}, {8: 10}, {8: 10}, parameter_bytes=10)
    heavy = LayerProfile("heavy", {8: 2e-3}, {8: 4e-3}, {8: 10}, {8: 10}, parameter_bytes=10**9)
    free: dict[str, Any] = {"devices": "3 x 80GB, 1GB/s", "batch_size": 48, "chunks": None}
    plan = planned(Profile((light, heavy)), **free)
    rival = next(rival for rival in plan.alternatives if "replicas" in rival.name)
    assert rival.name == "stages with replicas, 2-1 (replicas=True)"
    found = planned(plan.profile, replicas=True, **free)
    assert rival.time == found.step_time
    assert "As a pipe, stages with replicas, 2-1 (replicas=True) would be" in said_by(plan)


NOISY = [[12e9 * (1 + 0.01 * ((5 * a + 3 * b) % 7)) for b in range(4)] for a in range(4)]
LIKE = {
    "free memory": {"memory": [16e9, 15.99e9, 16e9, 15.5e9]},
    "links": {"bandwidth": NOISY},
    "speed": {"speed": [1.0, 1.02, 1.01, 1.0]},
}


@pytest.mark.parametrize("given", LIKE.values(), ids=LIKE)
def test_devices_are_alike_within_some_per_cent(given: dict[str, Any]) -> None:
    light = profile_of([3, 1, 4, 1, 5, 9], parameters=1000)
    names = {one.name for one in planned(light, "4 x 16GB, 12GB/s").alternatives}
    plan = planned(light, "4 x 16GB, 12GB/s", **given)
    assert "data parallelism, 4 copies" in names
    assert {one.name for one in plan.alternatives} == names
    assert plan.machine.names == tuple(f"device {d}" for d in range(4))  # in the order given
    assert planned(light, "4 x 16GB, 12GB/s", replicas=True, **given).replicas == [4]
    other = Machine.even(4, 16e9, 12e9)
    assert not replace(other, memory=(16e9, 8e9, 16e9, 16e9)).uniform


def test_fsdp_is_compared_where_one_device_is_too_small() -> None:
    """Three quarters of the parameters go out twice, and so do the gradients once (ZeRO, 7.2.2)."""
    large = profile_of([5.0] * 8, parameters=5 * 10**7)
    for rate, seconds in (("100GB/s", 8 * 15e-3 * 2), ("1GB/s", 3 * 0.75 * 0.4)):
        plan = planned(large, f"4 x 1GB, {rate}")
        named = {one.name: one for one in plan.alternatives}
        assert named["one device"].time is None
        fsdp = named["FSDP over 4 devices"]
        assert fsdp.time == pytest.approx(seconds)
        assert "fully_shard" in fsdp.instead
        assert ("Use torch.distributed.fsdp" in said_by(plan)) == (rate == "100GB/s")
    assert "FSDP" not in said_by(planned())
    tight = planned(large, "4 x 0.51GB, 1GB/s").alternatives
    assert next(one.time for one in tight if "FSDP" in one.name) is None


def test_copies_are_laid_out_along_the_links() -> None:
    """Where much is sent between stages a copy is on one machine; where parameters are many, the
    copies of a stage are.
    """
    two = "2 x (2 x 80GB, 300GB/s), 1GB/s"
    taken = {}
    for sent, parameters in ((1e8, 10**3), (1e3, 10**8)):
        layers = (
            replace(layer, output_bytes={8: sent})
            for layer in profile_of([5] * 4, parameters=parameters).layers
        )
        plan = planned(Profile(tuple(layers)), two, batch_size=16)
        name = "data parallelism, 2 copies of a pipeline of 2 stages"
        taken[sent] = next(one.time for one in plan.alternatives if one.name == name)
    assert max(taken.values()) < 0.06  # over the other links either takes 0.1 s more


def page(plan: Plan, folder: Path) -> str:
    plan.save(folder / "plan.HTML")
    return (folder / "plan.HTML").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("devices", "more"),
    [
        ("3 x 1GB, 10GB/s", {}),
        ("1 x 1GB", {}),
        ("3 x 1GB, 10GB/s", {"schedule": "zbv"}),
        ("3 x 18MB, 10GB/s", {}),  # recomputes
        ("1 x 40MB + 2 x 1TB, 10GB/s", {}),
    ],
)
def test_the_html_page_has_the_verdict_stages_layers_memory_and_alternatives(
    devices: str, more: dict[str, Any], tmp_path: Path
) -> None:
    plan = planned(EVEN, devices, batch_size=32, chunks=4, **more)
    shown = page(plan, tmp_path)
    assert not re.search(r"\bnan|\binf\b|<(script|link|img|iframe)|@import|src=", shown)
    assert 'name="viewport" content="width=device-width' in shown
    assert "prefers-color-scheme: dark" in shown
    HTMLParser().feed(shown)
    assert "<details open>" in shown
    assert shown.count('<div class="wide') == 5  # what is wide scrolls by itself
    for layer in plan.profile.layers:
        assert f"<td>{layer.name}</td>" in shown
    for s, stage in enumerate(plan.stages):
        assert f"stage {s} on {stage.device}" in shown
    rows = [("this plan", plan.step_time), *((a.name, a.time) for a in plan.alternatives)]
    rows.sort(key=lambda row: math.inf if row[1] is None else row[1])
    places = [shown.index(f"<td>{escape(name)}</td>") for name, _ in rows]
    assert places == sorted(places)  # by their times
    held = shown.partition('<table class="held">')[2].partition("</table>")[0].split("</tr>")[:-1]
    bars = [sum(map(float, re.findall(r"width:([\d.]+)%", row))) for row in held]
    shares = zip(plan.chosen.on_device, plan.machine.memory, strict=False)
    assert bars == pytest.approx([100 * a / b for a, b in shares], abs=0.1)


def test_the_verdict_comes_first_and_is_red_where_one_should_not_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Timeline, "_repr_svg_", lambda self: None)
    light = planned(profile_of([3] * 6, parameters=10), "2 x 1GB, 10GB/s", chunks=4)
    shown = page(light, tmp_path)
    assert '<p class="verdict bad">' in shown
    assert shown.index("Without a pipe, ") < shown.index("Where the model is cut")
    assert "syncpipe[plot]" in shown
    assert 'class="verdict good"' in page(Plan(light.terms, light.chosen, []), tmp_path)
    with pytest.raises(ValueError, match=r"plan.pdf' must end in \.html; .* plan.timeline"):
        light.save(tmp_path / "plan.pdf")


def test_many_layers_are_listed_on_demand_and_states_of_adam_are_named(tmp_path: Path) -> None:
    shown = page(planned(profile_of([1] * 20), "2 x 1GB, 10GB/s", chunks=4), tmp_path)
    assert "<details><summary>" in shown
    assert "(param_scale=4: Adam&#x27;s states in the parameters&#x27; dtype)" in shown


def test_names_of_any_kind_are_text(tmp_path: Path) -> None:
    names = "</text><script>&\x01\ud800{}"
    assert "<script" not in page(planned(profile_of([1] * 4, names=names), stages=2), tmp_path)
    plan = planned(profile_of([1] * 4, names="\ud800\n{}"), "2 x 1GB, 1GB/s", stages=2)
    str(plan).encode()
    assert r"0  device 0  \ud800\n0 to " in str(plan)


def test_it_is_looked_for_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more it may take minutes beside other work."""

    def noted(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return least_largest(*args)

    seen: list[int] = []
    monkeypatch.setattr("syncpipe.planner.cuts.least_largest", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        planned()
        assert (set(seen), torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


def test_text_dictionary_and_page_search_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = planned()

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this searches")

    monkeypatch.setattr("syncpipe.planner.alternatives.search_schedules", refused)
    monkeypatch.setattr("syncpipe.planner.search.auto", refused)
    monkeypatch.setattr("syncpipe.planner.candidates.play", refused)
    str(plan)
    assert plan.as_dict()["schedules"] == []
    plan.save(tmp_path / "plan.html")
    with pytest.raises(AssertionError, match="this searches"):
        plan.compare()


def test_as_dict_is_json_with_figures_of_what_else_was_looked_at() -> None:
    free = json.loads(json.dumps(planned(memory=math.inf).as_dict(), allow_nan=False))
    assert (sum(free["balance"]), free["stages"][0]["limit"]) == (8, None)
    plan = planned(profile_of([3] * 8, stored=2e6, parameters=10**5), "3 x 10MB, 10GB/s")
    plan.compare()
    assert re.search(r"does not fit schedule='\w+'[^:]*: device \d would need", said_by(plan))
    found = {one["schedule"]: one for one in plan.as_dict()["schedules"]}
    assert found.keys() == {*LAYOUTS}
    assert {one["fits"] for one in found.values()} == {False, True}
    for one in found.values():
        assert one["fits"] == (one["time"] is not None) == (one["memory"] <= 10e6 * (1 + 1e-9))
        assert (sum(one["balance"]), one["chunks"], one["pipeline"]) == (8, 8, True)
        assert one["fits"] or "would need" in one["note"]
    alone = next(one for one in plan.as_dict()["alternatives"] if one["name"] == "one device")
    assert not alone["pipeline"]


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": True}, TypeError, "batch_size=True"),
        ({"chunks": "4"}, TypeError, "chunks='4'"),
        ({"chunks": [4, 2.0]}, TypeError, "chunks=2.0"),
        ({"stages": 2.0}, TypeError, "stages=2.0"),
        ({"param_scale": "2"}, ValueError, "param_scale='2'"),
        ({"param_scale": 0}, ValueError, "param_scale=0: must be a number from 1"),
        ({"schedule": "pipedream"}, ValueError, "schedule='pipedream'"),
        ({"schedule": gpipe}, TypeError, "names"),
        ({"schedule": "zbv", "stages": 5}, ValueError, "two stages on each device"),
        ({"schedule": "zbv", "module": profile_of([1, 2, 3])}, ValueError, "3 layers"),
        ({"schedule": "zb_h1", "devices": "3 x 2MB, 1GB/s"}, NoPlan,
         "under '1f1b'.* more than the 2.0 MB"),
        ({"devices": "4 x 16GB@, 12GB/s"}, ValueError, "speed"),
        *(({"schedule": name, "devices": "3 x 2MB, 1GB/s"}, NoPlan, "no plan fits")
          for name in ("auto", "any", None)),
        ({"chunks": 60}, ValueError, "chunks=60 .* batch_size=64 are .* makes 32 of 2"),
        ({"chunks": []}, ValueError, "chunks is empty"),
        ({"chunks": 0}, ValueError, "chunks=0"),
        ({"stages": 5}, ValueError, "stages=5 is .* with 4 devices and 8 layers: give from 1 to 4"),
        ({"param_scale": 2.0, "optimizer": torch.optim.SGD}, ValueError, "leave one"),
        ({"devices": "a lot of them"}, ValueError, "a lot of them"),
        ({"devices": "4 x 1GB"}, ValueError, "12GB/s"),
        ({"sample": torch.ones(1)}, ValueError, "leave out the sample"),
        ({"module": nn.ReLU()}, ValueError, "sample"),
        ({"module": nn.ReLU(), "sample": torch.ones(1)}, TypeError, "ReLU"),
        ({"module": 3}, TypeError, "int"),
        ({"module": profile_of([0, 0], device="meta")}, ValueError, "no times"),
        ({"replicas": True, "stages": 4}, ValueError, "stages=4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"module": PROFILE, "devices": "4 x 1GB, 10GB/s", "batch_size": 64, **arguments}
    with pytest.raises(error, match=message):
        syncpipe.plan(**given)


def test_a_search_shows_its_progress_where_it_is_asked_to(capsys):
    pytest.importorskip("tqdm")
    for progress in (True, False, None):
        planned(progress=progress)
        assert ("plan: " in capsys.readouterr().err) == (progress is True)
