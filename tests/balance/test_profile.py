"""``Profile``: files, tables, sizes that were not measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncpipe.balance import LayerProfile, Profile, SkipProfile
from syncpipe.balance.profile import in_bytes, interpolate

ENTRY = {
    "name": "conv",
    "forward_ms": 2.5,
    "backward_ms": 5,
    "activation_bytes": 1000,
    "parameter_bytes": 40,
    "stored_bytes": 3000,
}


def layer(name: str = "a", sizes: tuple[int, ...] = (2, 4), **more: Any) -> LayerProfile:
    times = {size: size / 1000 for size in sizes}
    amounts = {size: size * 100 for size in sizes}
    return LayerProfile(name, times, times, amounts, amounts, amounts, **more)


def whole() -> Profile:
    skips = (SkipProfile("residual", 0, 2, {2: 7, 4: 14}),)
    layers = (layer("a"), layer("b", parameter_bytes=12, frozen_bytes=4), layer("c"))
    return Profile(layers, skips, {2: 20, 4: 40}, "cuda:0 (some GPU)")


# --- files --------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    whole().save(path)
    assert Profile.load(path) == whole()
    assert Profile.load(str(path)) == whole()


def test_a_list_of_entries_is_a_profile_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([ENTRY, {**ENTRY, "nodes": 3}]))
    profile = Profile.load(path, samples=32)
    assert profile == Profile.from_list([ENTRY, ENTRY], samples=32)
    first = profile.layers[0]
    assert (first.name, first.forward, first.backward) == ("conv", {32: 0.0025}, {32: 0.005})
    assert (first.output_bytes, first.stored_bytes) == ({32: 1000}, {32: 3000})
    assert first.parameter_bytes == 40
    assert profile.sizes == (32,)


def test_a_list_of_unknown_size_becomes_what_one_says_it_is() -> None:
    profile = Profile.from_list([ENTRY])
    assert profile.whole
    assert profile.of(64) == Profile.from_list([ENTRY], samples=64)
    assert profile.of(64).of(8) == profile.of(64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("{}", "not a profile"),
        ("3", "not a profile"),
        ('{"syncpipe_profile": 3}', "not a profile"),
        ('{"syncpipe_profile": 1}', "not a whole profile: it lacks layers"),
        ('{"syncpipe_profile": 99}', "of version 99, and those are 1"),
        ("\ufeff{}", "neither one that Profile.save wrote"),
        ("[" * 100_000, "nested too deep"),
        (f"[{'9' * 5000}]", "not a JSON file"),
        ('{"syncpipe_profile": 1, "layers": 3}', "layers is 3, not a list"),
        ('{"syncpipe_profile": 1, "layers": [{"name": "a"}]}', r"layers\[0\] lacks forward"),
        ('{"syncpipe_profile": 1, "layers": [], "colour": 3}', "has 'colour', which is unknown"),
        ('{"syncpipe_profile": 1, "layers": [3], "skips": []}', "not a whole profile"),
        ("[]", "at least one layer"),
        ("[3]", "entry 0 is 3, not a mapping"),
        ('[{"name": "a"}]', "entry 0 of the profile lacks forward_ms"),
    ],
)
def test_another_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Profile.load(path)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "3", None, True])
@pytest.mark.parametrize("key", [key for key in ENTRY if key != "name"])
def test_numbers_that_are_none_are_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{key} of entry 1 \('conv'\) is"):
        Profile.from_list([ENTRY, {**ENTRY, key: value}])


def test_samples_are_for_a_file_that_does_not_know_them(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    whole().save(path)
    with pytest.raises(ValueError, match=r"samples=8.*says itself"):
        Profile.load(path, samples=8)
    Profile.from_list([ENTRY]).save(path)
    assert Profile.load(path, samples=8).sizes == (8,)


# --- what does not fit together -----------------------------------------------------------------


def test_all_layers_are_measured_at_the_same_sizes() -> None:
    with pytest.raises(ValueError, match=r"layer 'b'.*\[2\].*\[2, 4\]"):
        Profile((layer("a"), layer("b", (2,))))


@pytest.mark.parametrize(("stash", "pop"), [(0, 3), (-1, 1), (1, 1), (2, 0)])
def test_a_skip_leads_to_a_later_layer(stash: int, pop: int) -> None:
    layers = (layer("a"), layer("b"), layer("c"))
    with pytest.raises(ValueError, match=rf"'s' goes from layer {stash} to {pop}"):
        Profile(layers, (SkipProfile("s", stash, pop, {2: 1, 4: 2}),))


# --- numbers ------------------------------------------------------------------------------------


def test_memory_scales_what_is_trained() -> None:
    trained = layer(parameter_bytes=100, frozen_bytes=30, buffer_bytes=5)
    assert trained.memory(4.0) == 4 * 70 + 30 + 5


@given(
    st.dictionaries(st.integers(1, 100), st.floats(0, 10), min_size=1, max_size=5),
    st.floats(0.1, 500),
)
def test_measured_numbers_are_kept_and_none_is_negative(
    numbers: dict[int, float], samples: float
) -> None:
    assert all(interpolate(numbers, size) == number for size, number in numbers.items())
    assert interpolate(numbers, samples) >= 0


@given(
    st.floats(0, 5),
    st.floats(0, 5),
    st.sets(st.integers(1, 64), min_size=2, max_size=5),
    st.integers(1, 500),
)
def test_a_straight_line_stays_one(a: float, b: float, sizes: set[int], samples: int) -> None:
    numbers = {size: a + b * size for size in sizes}
    assert interpolate(numbers, samples) == pytest.approx(a + b * samples)


def test_one_size_is_scaled_in_proportion() -> None:
    assert interpolate({8: 4.0}, 2) == 1.0


def test_more_samples_never_take_less_than_the_largest_that_was_measured() -> None:
    assert interpolate({1: 3.0, 2: 2.0, 4: 1.0}, 100) == 1.0


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (16e9, "16.0 GB"),
     (999_600_000, "1.0 GB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_sizes_have_a_unit_that_fits(number: float, text: str) -> None:
    assert in_bytes(number) == text


# --- the table ----------------------------------------------------------------------------------


def test_the_table_shows_the_largest_size() -> None:
    text = str(whole())
    assert text.splitlines()[0] == "4 samples on cuda:0 (some GPU)"
    assert text.splitlines()[2].split() == ["a", "4.000", "ms", "4.000", "ms", "400", "B", "400",
                                            "B", "0", "B"]  # fmt: skip
    assert text.splitlines()[5].split()[:5] == ["all", "12.000", "ms", "12.000", "ms"]
    assert text.splitlines()[6] == "skip residual: a to c, 14 B"


def test_what_is_shared_counts_once_in_all() -> None:
    layers = (layer("a"), layer("b"))
    assert str(Profile(layers)).splitlines()[-1].split()[-4:-2] == ["0", "B"]
