"""Devices described in words, and devices measured; there need not be any for either."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncpipe import Worker, plan
from syncpipe.balance import LayerProfile, Profile
from syncpipe.planner import machine as devices
from syncpipe.planner.machine import (
    RESERVE,
    Machine,
    clear_cache,
    link_bandwidth,
    machine_of,
    measure_bandwidth,
    measure_memory,
)
from tests.support import accelerator as acc

# --- real devices -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    clear_cache()
    yield
    clear_cache()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What was measured: 600 bytes on the CPU, 100 on others; so many bytes a second."""
    calls: list[tuple[str, ...]] = []

    def memory(device: torch.device) -> float:
        calls.append((str(device),))
        return 600.0 if device.type == "cpu" else 100.0

    def bandwidth(a: torch.device, b: torch.device) -> float:
        calls.append((str(a), str(b)))
        return float(10 * (a.index or 0) + (b.index or 0) + 1)

    monkeypatch.setattr(devices, "measure_memory", memory)
    monkeypatch.setattr(devices, "measure_bandwidth", bandwidth)
    return calls


def gpu(k: int) -> Worker:
    return Worker(f"cuda:{k}")  # not asked whether it exists


def test_cpu_workers_share_memory_and_copy_nothing(measured: list[tuple[str, ...]]) -> None:
    machine = machine_of(["cpu:0", "cpu:1", "cpu:1"])
    assert machine == Machine((200.0,) * 3, ((math.inf,) * 3,) * 3, ("cpu:0", "cpu:1", "cpu:1"))
    assert len(measured) == 1


def test_accelerators_have_their_own(measured: list[tuple[str, ...]]) -> None:
    machine = machine_of([gpu(0), gpu(1)])
    assert machine.memory == (100, 100)
    assert machine.bandwidth == ((math.inf, 2), (11, math.inf))  # each direction by itself
    assert machine.names == ("cuda:0", "cuda:1")


def test_speeds_are_given_or_all_alike(measured: list[tuple[str, ...]]) -> None:
    assert machine_of([gpu(0), gpu(1)]).speed == (1, 1)
    assert machine_of(["cpu", gpu(0)], speed=[1, 5]).speed == (1, 5)


def test_layers_are_measured_on_each_kind_of_device(
    measured: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"cpu": 6.0, "cuda:1": 2.0}
    asked: list[str] = []

    def profiled(module: Any, sample: Any, *, device: Any, **more: Any) -> Profile:
        asked.append(str(device))
        half = {4: times[str(device)] / 2}
        return Profile(tuple(LayerProfile(k, half, half, half, half) for k in "ab"))

    monkeypatch.setattr("syncpipe.planner.planning.measured", profiled)
    monkeypatch.setattr("syncpipe.planner.planning.kind_of", lambda device: device.type)
    found = plan([torch.nn.ReLU()] * 2, torch.ones(4), devices=["cpu", gpu(1)], batch_size=4,
                 chunks=1, stages=2)  # fmt: skip
    assert sorted(zip(found.machine.names, found.machine.speed, strict=True)) == [
        ("cpu", 1), ("cuda:1", 3)
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"devices are of 2 kinds .*give speed="):
        plan(profiled(None, None, device="cpu"), devices=["cpu", gpu(1)], batch_size=4)


def test_the_link_to_the_host_is_that_of_the_slowest_accelerator(
    measured: list[tuple[str, ...]],
) -> None:
    assert machine_of([gpu(1), gpu(2)]).host == 11
    assert machine_of(["cpu:0", "cpu:1"]).host == 0
    assert machine_of([gpu(1)], host_bandwidth="3B/s").host == 3


def test_a_device_named_twice_shares_its_memory(measured: list[tuple[str, ...]]) -> None:
    machine = machine_of([gpu(0), gpu(1), gpu(0)])
    assert machine.memory == (50, 100, 50)
    assert machine.bandwidth[0][2] == machine.bandwidth[2][0] == math.inf
    assert machine_of([gpu(0), gpu(1), gpu(0)], memory=8).memory == (4, 8, 4)
    assert machine_of([gpu(0), gpu(1), gpu(0)], memory=[8, 8, 8]).memory == (8, 8, 8)


def test_bandwidth_is_measured_once(measured: list[tuple[str, ...]]) -> None:
    machine_of([gpu(0), gpu(1), "cpu"])
    links = [call for call in measured if len(call) == 2]
    assert len(links) == len(set(links)) == 6  # that to the host is one of them
    measured.clear()
    machine_of([gpu(1), gpu(0), "cpu:3"])  # the CPU is one memory
    assert not [call for call in measured if len(call) == 2]
    clear_cache()
    link_bandwidth(torch.device("cuda:0"), torch.device("cuda:1"))
    assert measured[-1] == ("cuda:0", "cuda:1")


def test_what_is_given_is_not_measured(measured: list[tuple[str, ...]]) -> None:
    given = {"memory": [1, 2, 3], "bandwidth": 4, "host_bandwidth": 2}
    machine = machine_of([gpu(0), gpu(1), gpu(1)], **given)
    assert machine.memory == (1, 2, 3)
    assert machine.bandwidth[0] == (math.inf, 4, 4)
    assert machine.bandwidth[1] == (4, math.inf, math.inf)  # one device: no link
    assert measured == []


def test_no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "measure_memory", lambda device: 0.0)
    with pytest.raises(ValueError, match="no memory is free on cpu"):
        machine_of(["cpu"])


def test_a_number_of_devices(
    measured: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [torch.device("cuda", k) for k in range(2)]
    monkeypatch.setattr(devices, "default_devices", lambda n: here)
    assert machine_of(1).names == ("cuda:0",)
    with pytest.raises(ValueError, match=r"devices=3, but 2 are here.*describe them"):
        machine_of(3)


def test_cpu_workers_where_there_is_nothing_else(measured: list[tuple[str, ...]]) -> None:
    assert machine_of(3).names == ("cpu:0", "cpu:1", "cpu:2")


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ([], ValueError, "devices is empty"),
        (0, ValueError, "devices=0"),
        (True, TypeError, "list of devices"),
        (torch.device("cpu"), TypeError, "list of devices"),
        (["nowhere"], ValueError, "'nowhere' is not a device"),
        (["meta"], ValueError, "free on meta cannot be found out .* give memory="),
    ],
)
def test_devices_that_are_none(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        machine_of(given)


# --- measuring ----------------------------------------------------------------------------------


def test_memory_of_the_cpu() -> None:
    assert 0 < measure_memory(torch.device("cpu")) < 2**50


def test_memory_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        mem_get_info=lambda device: (700, 1000),
        memory_reserved=lambda device: 300,
        memory_allocated=lambda device: 200,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert measure_memory(torch.device("cuda:0")) == pytest.approx(800 * (1 - RESERVE))


def test_bandwidth_is_the_median_and_the_first_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([9e3, 1.0, 2.0, 64.0, 8e3, 7e3])  # milliseconds, as events give them

    event = SimpleNamespace(synchronize=lambda: None, elapsed_time=lambda end: next(times))
    streams = SimpleNamespace(
        current=lambda: "stream",
        use=lambda stream: nullcontext(),
        stamp=lambda stream: event,
    )
    source, target = (SimpleNamespace(type=kind) for kind in ("cpu", "made up"))
    asked = []
    monkeypatch.setattr(devices, "AcceleratorStreams", lambda of: asked.append(of) or streams)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, dtype, device: ones(4, dtype=dtype))
    assert measure_bandwidth(source, target) == pytest.approx(64e6 / 64e-3)  # type: ignore[arg-type]
    assert asked == [target]  # the accelerator's clock, not the CPU's


def test_a_link_that_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="from meta to cpu cannot be measured: give bandwidth="):
        link_bandwidth(torch.device("meta"), torch.device("cpu"))


@pytest.mark.gpu
def test_a_real_accelerator() -> None:
    machine = machine_of([acc.device(), "cpu"])
    assert 0 < machine.memory[0] <= torch.get_device_module().mem_get_info(acc.device())[1]
    assert 1e8 < machine.bandwidth[0][1] < 1e12
    assert 1e8 < machine.bandwidth[1][0] < 1e12
