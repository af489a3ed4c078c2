"""Devices described in words, and devices measured; there need not be any for either."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncpipe.planner.machine import (
    Machine,
    machine_of,
    parse_bandwidth,
    parse_bytes,
)

# --- numbers with units -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16e9),
        ("16 gb", 16e9),
        (" 1.5 TB ", 1.5e12),
        ("24GiB", 24 * 2**30),
        ("24gib", 24 * 2**30),
        (".5MiB", 2**19),
        ("80e3 MB", 80e9),
        ("3kB", 3e3),
        ("7B", 7),
    ],
)
def test_bytes(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("12GB/s", 12e9),
        ("12 GB / s", 12e9),
        ("12GBps", 12e9),
        ("1GiB/s", 2**30),
        ("100Gbit/s", 12.5e9),
        ("100 gbit/S", 12.5e9),
        ("100Gb/s", 12.5e9),
        ("100Gbps", 12.5e9),
        ("8 bits/s", 1),
    ],
)
def test_bandwidths(text: str, rate: float) -> None:
    assert parse_bandwidth(text) == rate


@given(st.integers(1, 10**6), st.sampled_from(["kB", "MB", "GB", "KiB", "TiB"]))
def test_a_bit_is_an_eighth_of_a_byte(number: int, unit: str) -> None:
    of_bits = unit.replace("B", "bit")
    assert parse_bandwidth(f"{number}{unit}/s") == parse_bytes(f"{number}{unit}")
    assert parse_bandwidth(f"{number} {of_bits}/s") * 8 == parse_bytes(f"{number} {unit}")


def test_bits_or_bytes_must_be_said() -> None:
    with pytest.raises(ValueError, match="expected GB/s for bytes or Gbit/s for bits"):
        parse_bandwidth("12gb/s")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "at the end: expected a number"),
        ("16", "at the end: expected B, kB"),
        ("-16GB", "at character 1, '-16GB': expected a number"),
        ("16QB", "at character 3, 'QB'"),
        ("16iB", "at character 3, 'iB'"),
        ("16GB/s", "at character 3, 'GB/s'"),
        ("16GB x", "at character 6, 'x': expected the end; write it like '16GB'"),
        ("0GB", "greater than 0"),
        ("1e400GB", "finite"),
    ],
)
def test_what_is_no_size_says_where(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_bytes(text)


# --- descriptions -------------------------------------------------------------------------------


def test_the_same_devices() -> None:
    assert machine_of("8 x 16GB, 12GB/s") == Machine.even(8, 16e9, 12e9)


@pytest.mark.parametrize("text", ["4x24GiB,12GB/s", "4 X 24gib , 12 GB/s", " 4 * 24 GiB, 96Gbit/s"])
def test_ways_to_write_it(text: str) -> None:
    assert machine_of(text) == Machine.even(4, 24 * 2**30, 12e9)


def test_different_devices() -> None:
    machine = machine_of("2 x 16GB + 24GB + 1 x 32GB, 12GB/s")
    assert machine.memory == (16e9, 16e9, 24e9, 32e9)
    assert machine.bandwidth == Machine.even(4, 1.0, 12e9).bandwidth


def test_devices_of_different_speed() -> None:
    machine = machine_of("2 x 80GB @ 2.0 + 3 x 24GB, 12GB/s")
    assert machine.memory == (80e9,) * 2 + (24e9,) * 3
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


def test_one_device_needs_no_bandwidth() -> None:
    assert machine_of("16GB") == Machine.even(1, 16e9)


def test_a_bandwidth_that_is_not_said() -> None:
    with pytest.raises(ValueError, match=r"8 x 16GB, 12GB/s.*or give bandwidth="):
        machine_of("8 x 16GB")
    assert machine_of("8 x 16GB", bandwidth="12GB/s") == Machine.even(8, 16e9, 12e9)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "devices='' cannot be read at the end"),
        ("8", "at the end: expected B, kB"),
        ("8 x", "at the end: expected the memory of one device"),
        ("8 x 16QB, 12GB/s", "at character 7, 'QB, 12GB/s'.*like '8 x 16GB, 12GB/s'"),
        ("8 x 16GB 12GB/s", "at character 10, '12GB/s': expected ',' and a bandwidth"),
        ("8 x 16GB, 12GB", "at character 13, 'GB': expected a unit per second"),
        ("8 x 16GB, 12GB/s, 4", "at character 17, ', 4': expected the end"),
        ("8 x 16GB +", "at the end: expected a number"),
        ("0 x 16GB, 1GB/s", "at character 1, .*: expected a whole number of devices"),
        ("2.5 x 16GB, 1GB/s", "expected a whole number of devices"),
        ("1e9 x 16GB, 1GB/s", "whole number of devices, 1024 at most"),
        ("1e999 x 16GB, 1GB/s", "expected a whole number of devices"),
        ("2 x 16GB, 0GB/s", "greater than 0"),
        ("2 x 16GB @ fast, 1GB/s", "at character 12, .*: expected how many times as fast"),
        ("2 x 16GB @ 0, 1GB/s", "greater than 0"),
        ("2 x (8 x 16GB, 1GB/s, 2GB/s", "at character 21, .*: expected '\\)'"),
        ("2 x (8 x 16GB), 2GB/s", "at character 14, .*bandwidth inside the parentheses"),
        ("1000 x (8 x 16GB, 1GB/s), 2GB/s", "at character 1, .*devices, 1024 at most"),
        ("four", "at character 1, 'four': expected a number"),
    ],
)
def test_a_description_that_cannot_be_read_says_where(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        machine_of(text)


def test_a_device_is_no_description() -> None:
    with pytest.raises(TypeError, match=r"write \['cuda:0'\]"):
        machine_of("cuda:0")


# --- what is given beside it --------------------------------------------------------------------


def test_memory_for_each_device() -> None:
    assert machine_of("3 x 16GB, 1GB/s", memory="8GB").memory == (8e9, 8e9, 8e9)
    assert machine_of("3 x 16GB, 1GB/s", memory=[1, "2B", math.inf]).memory == (1, 2, math.inf)


def test_bandwidth_as_rows() -> None:
    machine = machine_of("2 x 16GB, 1GB/s", bandwidth=[[0, "2GB/s"], [3.0, 0]])
    assert machine.bandwidth == ((math.inf, 2e9), (3.0, math.inf))


def test_a_machine_is_one() -> None:
    machine = Machine.even(2, 5.0, 7.0)
    assert machine_of(machine) == machine
    assert machine_of(machine, memory=3, bandwidth=4) == Machine.even(2, 3.0, 4.0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"memory": 0}, r"memory=0 must be a positive number of bytes"),
        ({"memory": math.nan}, "memory=nan"),
        ({"memory": True}, "memory=True"),
        ({"memory": [1, None]}, r"memory\[1\]=None"),
        ({"memory": [1, 2, 3]}, "memory is for 3 devices, but there are 2"),
        ({"bandwidth": -1}, "bandwidth=-1 must be a positive number of bytes per second"),
        ({"speed": [1, 0]}, r"speed\[1\]=0 must be a positive number"),
        ({"speed": [1]}, "speed is for 1 devices, but there are 2"),
        ({"bandwidth": [1, 2]}, r"rows of \[1, 1\] numbers"),
        ({"bandwidth": [[1, 1], [0, 1]]}, r"bandwidth\[1\]\[0\]=0"),
    ],
)
def test_numbers_that_are_none(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        machine_of("2 x 16GB, 1GB/s", **given)


@pytest.mark.parametrize("what", ["memory", "bandwidth", "speed"])
def test_neither_number_nor_list(what: str) -> None:
    with pytest.raises(TypeError, match=f"{what}=<object"):
        machine_of("2 x 16GB, 1GB/s", **{what: object()})


# --- machines -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "bandwidth", "message"),
    [
        ((), (), "names no device"),
        ((1.0, -2.0), ((math.inf, 1.0), (1.0, math.inf)), r"memory\[1\]=-2.0 must be a positive"),
        ((1.0, math.nan), ((math.inf, 1.0), (1.0, math.inf)), r"memory\[1\]=nan"),
        ((1.0,), ((math.inf, 1.0),), r"rows of \[2\] numbers, but there are 1"),
        ((1.0, 1.0), ((math.inf, 0.0), (1.0, math.inf)), r"bandwidth\[0\]\[1\]=0.0"),
    ],
)
def test_machines_that_are_none(
    memory: tuple[float, ...], bandwidth: tuple[tuple[float, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Machine(memory, bandwidth)


def test_a_machine() -> None:
    machine = Machine.even(3, 16e9, 12e9)
    assert (len(machine), machine.uniform, machine.transfer(24e9, 0, 2)) == (3, True, 2.0)
    assert machine.transfer(24e9, 1, 1) == 0
    assert machine.head(2) == Machine.even(2, 16e9, 12e9)
    assert not Machine((1.0, 2.0), Machine.even(2).bandwidth).uniform
    assert not Machine((1.0, 1.0), Machine.even(2).bandwidth, speed=(1.0, 2.0)).uniform
    with pytest.raises(ValueError, match="there are 3 devices"):
        machine.head(4)
    with pytest.raises(ValueError, match="speed is for 1 devices, but there are 2"):
        Machine((1.0, 1.0), Machine.even(2).bandwidth, speed=(1.0,))


def test_devices_in_another_order() -> None:
    rows = ((math.inf, 1.0, 2.0), (3.0, math.inf, 4.0), (5.0, 6.0, math.inf))
    machine = Machine((1.0, 2.0, 1.0), rows, speed=(1.0, 3.0, 1.0))
    other = machine.ordered((1, 2))
    assert (other.memory, other.speed) == ((2.0, 1.0), (3.0, 1.0))
    assert other.bandwidth == ((math.inf, 4.0), (6.0, math.inf))
    assert other.names == ("device 1", "device 2")  # each keeps what it was called
    assert machine.orders() == [(0, 1, 2), (0, 2, 1), (1, 0, 2)]
    assert Machine.even(3).orders() == [(0, 1, 2)]
