"""Devices described in words, and devices measured; there need not be any for either."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncpipe import Worker, plan
from syncpipe.balance import LayerProfile, Profile
from syncpipe.planner import machine as devices
from syncpipe.planner.machine import (
    BYTES,
    RATE,
    RESERVE,
    Machine,
    link_bandwidth,
    machine_of,
    measure_bandwidth,
    measure_memory,
    number_of,
)
from tests.support import accelerator as acc

# --- numbers with units and descriptions --------------------------------------------------------


def test_numbers_with_units() -> None:
    sizes = {"16GB": 16e9, "16 gb": 16e9, " 1.5 TB ": 1.5e12, "24gib": 24 * 2**30}
    sizes |= {".5MiB": 2**19, "80e3 MB": 80e9, "3kB": 3e3, "7B": 7}
    rates = {"12 GB / s": 12e9, "12GBps": 12e9, "1GiB/s": 2**30, "100 gbit/S": 12.5e9}
    rates |= {"100Gb/s": 12.5e9, "100Gbps": 12.5e9, "8 bits/s": 1, "1 gBIT/s": 125e6}
    assert {text: number_of("memory", text, BYTES) for text in sizes} == sizes
    assert {text: number_of("bandwidth", text, RATE) for text in rates} == rates
    for text in ("", "16", "-16GB", "16QB", "16iB", "16GB/s", "16GB x", "0GB", "1e400GB"):
        with pytest.raises(ValueError, match=rf"memory='{text}' (cannot be read: write it|is .*0)"):
            number_of("memory", text, BYTES)
    with pytest.raises(ValueError, match="'12GB/s' for bytes or '100Gbit/s' for bits"):
        number_of("bandwidth", "12gb/s", RATE)


def test_devices_in_words() -> None:
    four = Machine.even(4, 24 * 2**30, 12e9)
    for text in ("4x24GiB,12GB/s", "4 X 24gib , 12 GB/s", " 4 * 24 GiB, 96Gbit/s"):
        assert machine_of(text) == four
    assert machine_of("8 x h100, 450GB/s") == Machine.even(8, 80e9, 450e9)
    assert machine_of("2 x A100-40GB @ 2, 1GB/s").memory == (40e9,) * 2
    with pytest.raises(ValueError, match="'A100' could be A100-40GB or A100-80GB"):
        machine_of("2 x A100, 1GB/s")
    assert machine_of("16GB") == Machine.even(1, 16e9)  # one device needs no bandwidth
    assert machine_of("8 x 16GB", bandwidth="12GB/s") == Machine.even(8, 16e9, 12e9)
    machine = machine_of("2 x 80GB @ 2.0 + 24GB + 2 x 24GB, 12GB/s")
    assert machine.memory == (80e9,) * 2 + (24e9,) * 3
    assert machine.bandwidth == Machine.even(5, 1.0, 12e9).bandwidth
    assert machine.speed == (2, 2, 1, 1, 1)
    assert not machine.uniform
    assert machine_of("2 x 16GB, 1GB/s", speed=[1, 3]).speed == (1, 3)
    assert machine_of(machine, speed=[1] * 5).uniform is False  # of memory


def test_links_inside_and_between_machines() -> None:
    machine = machine_of("2 x (2 x 80GB, 300GB/s) + 24GB, 25GB/s")
    inside, between = 300e9, 25e9
    assert machine.memory == (80e9,) * 4 + (24e9,)
    assert machine.bandwidth == (
        (math.inf, inside, between, between, between),
        (inside, math.inf, between, between, between),
        (between, between, math.inf, inside, between),
        (between, between, inside, math.inf, between),
        (between,) * 4 + (math.inf,),
    )
    assert len(machine_of("16 x (8 x 80GB, 300GB/s), 25GB/s")) == 128


def test_what_is_given_beside_it() -> None:
    assert machine_of(" cpu:0, cpu:1", memory=1).names == ("cpu:0", "cpu:1")
    assert machine_of("3 x 16GB, 1GB/s", memory="8GB").memory == (8e9, 8e9, 8e9)
    assert machine_of("3 x 16GB, 1GB/s", memory=[1, "2B", math.inf]).memory == (1, 2, math.inf)
    machine = machine_of("2 x 16GB, 1GB/s", bandwidth=[[0, "2GB/s"], [3.0, 0]])
    assert machine.bandwidth == ((math.inf, 2e9), (3.0, math.inf))
    machine = Machine.even(2, 5.0, 7.0)
    assert machine_of(machine) == machine
    assert machine_of(machine, memory=3, bandwidth=4) == Machine.even(2, 3.0, 4.0)


# --- machines -----------------------------------------------------------------------------------


def test_a_machine() -> None:
    machine = Machine.even(3, 16e9, 12e9)
    assert (len(machine), machine.uniform, machine.transfer(24e9, 0, 2)) == (3, True, 2.0)
    assert machine.transfer(24e9, 1, 1) == 0
    assert machine.ordered(range(2)) == Machine.even(2, 16e9, 12e9)
    links = Machine.even(2).bandwidth
    assert not Machine((1.0, 2.0), links).uniform
    assert not Machine((1.0, 1.0), links, speed=(1.0, 2.0)).uniform
    assert Machine.even(2, "16GB", "12GB/s", host="3GB/s") == Machine.even(2, 16e9, 12e9, 3e9)  # type: ignore[arg-type]
    for given, match in (
        ({"host": "3GB"}, "host='3GB' cannot be read"),
        ({"memory": (), "bandwidth": ()}, "has no device"),
        ({"names": ("a",)}, "names has 1 entries, but there are 2"),
        ({"speed": (1.0,)}, "speed has 1 entries, but there are 2"),
    ):
        with pytest.raises(ValueError, match=match):
            Machine(**{"memory": (1.0, 1.0), "bandwidth": links} | given)  # type: ignore[arg-type]


def test_devices_in_another_order() -> None:
    rows = ((math.inf, 1.0, 2.0), (3.0, math.inf, 4.0), (5.0, 6.0, math.inf))
    machine = Machine((1.0, 2.0, 1.0), rows, speed=(1.0, 3.0, 1.0))
    other = machine.ordered((1, 2))
    assert (other.memory, other.speed) == ((2.0, 1.0), (3.0, 1.0))
    assert other.bandwidth == ((math.inf, 4.0), (6.0, math.inf))
    assert other.names == ("device 1", "device 2")  # each keeps what it was called
    assert machine.orders() == [(0, 1, 2), (0, 2, 1), (1, 0, 2)]
    assert Machine.even(3).orders() == [(0, 1, 2)]
    rates = [
        [9.0 if {a, b} in ({0, 3}, {1, 2}, {1, 3}) else 1.0 for b in range(4)] for a in range(4)
    ]
    assert Machine((1.0,) * 4, rates).orders() == [(0, 1, 2, 3), (0, 3, 1, 2)]  # type: ignore[arg-type]
    assert Machine((1.0,) * 4, rates).linked(3) == (0, 3, 1, 2)  # type: ignore[arg-type]


# --- real devices -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    link_bandwidth.cache_clear()
    yield
    link_bandwidth.cache_clear()


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


INF = math.inf
GIVEN = {"memory": [1, 2, 3], "bandwidth": 4, "host_bandwidth": 2}


@pytest.mark.parametrize(
    ("places", "given", "memory", "bandwidth", "host"),
    [
        (["cpu:0", "cpu:1", "cpu:1"], {}, (200,) * 3, ((INF,) * 3,) * 3, 0),  # of one memory
        ([gpu(0), gpu(1)], {}, (100, 100), ((INF, 2), (11, INF)), 1),  # each direction by itself
        ([gpu(1), gpu(2)], {}, (100, 100), ((INF, 13), (22, INF)), 11),  # that of the slowest
        ([gpu(1)], {"host_bandwidth": "3B/s"}, (100,), ((INF,),), 3),
        # A device that is named twice shares its memory, unless that is a list.
        ([gpu(0), gpu(0)], {}, (50, 50), ((INF, INF),) * 2, 1),
        ([gpu(0), gpu(0)], {"memory": 8}, (4, 4), ((INF, INF),) * 2, 1),
        ([gpu(0), gpu(0)], {"memory": [8, 8]}, (8, 8), ((INF, INF),) * 2, 1),
        ([gpu(0), gpu(1), gpu(1)], GIVEN, (1, 2, 3), ((INF, 4, 4), *((4, INF, INF),) * 2), 2),
    ],
)
def test_real_devices(
    measured: list[tuple[str, ...]], places: list[Any], given: dict[str, Any], memory: Any,
    bandwidth: Any, host: float,
) -> None:  # fmt: skip
    machine = machine_of(places, **given)
    assert (machine.memory, machine.bandwidth, machine.host) == (memory, bandwidth, host)
    assert machine.names == tuple(str(getattr(place, "device", place)) for place in places)
    assert len(measured) == len(set(measured))
    assert measured == [] or given is not GIVEN


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


def test_bandwidth_is_measured_once(measured: list[tuple[str, ...]]) -> None:
    machine_of([gpu(0), gpu(1), "cpu"])
    links = [call for call in measured if len(call) == 2]
    assert len(links) == len(set(links)) == 6  # that to the host is one of them
    measured.clear()
    machine_of([gpu(1), gpu(0), "cpu:3"])  # the CPU is one memory
    assert not [call for call in measured if len(call) == 2]
    link_bandwidth.cache_clear()
    link_bandwidth(torch.device("cuda:0"), torch.device("cuda:1"))
    assert measured[-1] == ("cuda:0", "cuda:1")


def test_a_number_of_devices(
    measured: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine_of(3).names == ("cpu:0", "cpu:1", "cpu:2")
    here = [gpu(k) for k in range(2)]
    monkeypatch.setattr(devices, "default_devices", lambda n: here)
    assert machine_of(1).names == ("cuda:0",)
    with pytest.raises(ValueError, match=r"devices=3, but this machine has 2 .*describe other"):
        machine_of(3)
    monkeypatch.setattr(devices, "measure_memory", lambda device: 0.0)
    with pytest.raises(ValueError, match="no memory is free on cpu"):
        machine_of(["cpu"])


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        *((text, {}, re.escape(message)) for text, message in (
            ("8 x 16GB", "('8 x 16GB, 12GB/s'), or give bandwidth="),
            ("", "memory='' cannot be read"),
            ("8 x", "memory='' cannot be read"),
            ("four", "memory='four' cannot be read: write it like '16GB'"),
            ("8 x 16QB, 12GB/s", "devices='8 x 16QB, 12GB/s': memory='16QB' cannot be read"),
            ("8 x 16GB 12GB/s", "memory='16GB 12GB/s'"),
            ("8 x 16GB, 12GB", "bandwidth=' 12GB' cannot be read: write it like '12GB/s'"),
            ("8 x 16GB, 12GB/s, 4", "memory='16GB, 12GB/s'"),
            ("8 x 16GB +, 1GB/s", "memory=''"),
            ("0 x 16GB, 1GB/s", "'0' in '0 x 16GB' must be a whole number of devices"),
            ("eight x 16GB, 12GB/s", "'eight' in 'eight x 16GB' must be a whole number of dev"),
            ("2.5 x 16GB, 1GB/s", "'2.5 x 16GB' must be a whole number of devices"),
            ("1e9 x 16GB, 1GB/s", "whole number of devices, 1024 at most"),
            ("1000 x (8 x 16GB, 1GB/s), 2GB/s", "devices, 1024 at most"),
            ("2 x 16GB, 0GB/s", "greater than 0"),
            ("2 x 16GB @ fast, 1GB/s", "speed=' fast' cannot be read"),
            ("2 x 16GB @ 0, 1GB/s", "greater than 0"),
            ("2 x (8 x 16GB, 1GB/s, 2GB/s", "cannot be read"),
            ("2 x (8 x 16GB), 2GB/s", "'8 x 16GB' has no bandwidth between devices"),
        )),
        *(("2 x 16GB, 1GB/s", options, message) for options, message in (
            ({"memory": 0}, r"memory=0 must be a positive number of bytes"),
            ({"memory": math.nan}, "memory=nan"),
            ({"memory": True}, "memory=True"),
            ({"memory": [1, None]}, r"memory\[1\]=None"),
            ({"memory": [1, 2, 3]}, "memory has 3 entries, but there are 2"),
            ({"bandwidth": -1}, "bandwidth=-1 must be a positive number of bytes per second"),
            ({"speed": [1, 0]}, r"speed\[1\]=0 must be a positive number"),
            ({"speed": [1]}, "speed has 1 entries, but there are 2"),
            ({"bandwidth": [1, 2]}, r"rows of \[1, 1\] numbers"),
            ({"bandwidth": [[1, 1], [0, 1]]}, r"bandwidth\[1\]\[0\]=0"),
            ({"speed": [1, math.inf]}, r"speed\[1\]"),
            ({"host_bandwidth": 0}, "host_bandwidth=0 must be a positive number"),
            *(({what: object()}, f"{what}=<object") for what in ("memory", "bandwidth", "speed")),
        )),
        ([], {}, "devices is empty"),
        (0, {}, "devices=0"),
        (True, {}, "list of devices"),
        (torch.device("cpu"), {}, "list of devices"),
        (["nowhere"], {}, "'nowhere' is not a device"),
        (["meta"], {}, "free memory of meta is unknown .* memory="),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(given: Any, options: dict[str, Any], message: str) -> None:
    wrong_type = "<object" in message or "list of" in message
    with pytest.raises(TypeError if wrong_type else ValueError, match=message):
        machine_of(given, **options)


# --- measuring ----------------------------------------------------------------------------------


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
    times = iter([9.0, 1e-3, 2e-3, 64e-3, 8.0, 7.0])
    watch = (lambda: None), (lambda end, start: next(times))
    source, target = (SimpleNamespace(type=kind) for kind in ("cpu", "made up"))
    asked = []
    monkeypatch.setattr(devices, "stopwatch", lambda of: asked.append(of) or watch)
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
