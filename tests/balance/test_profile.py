"""``Profile``: files, tables, sizes that were not measured."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncpipe.balance import LayerProfile, Profile, SkipProfile
from syncpipe.balance.profile import in_bytes, interpolate
from syncpipe.commands.main import main

ENTRY = {
    "name": "conv",
    "forward_ms": 2.5,
    "backward_ms": 5,
    "activation_bytes": 1000,
    "parameter_bytes": 40,
    "stored_bytes": 3000,
}


def layer(name: str = "a", sizes: tuple[int, ...] = (4, 8), **more: Any) -> LayerProfile:
    times = {size: size / 1000 for size in sizes}
    amounts = {size: size * 100 for size in sizes}
    return LayerProfile(name, times, times, amounts, amounts, amounts, **more)


def whole() -> Profile:
    skips = (SkipProfile("residual", 0, 2, {4: 7, 8: 14}),)
    halves = layer("b", parameter_bytes=12, frozen_bytes=4, interpreter=0.5, weight_share=0.25)
    layers = (layer("a"), halves, layer("c"))
    return Profile(layers, skips, {4: 20, 8: 40}, "cuda:0 (some GPU)", spread=0.5, load_average=2.0)


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_what_is_saved_is_loaded(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "profile.json"
    whole().save(path)
    path.write_text(path.read_text(), encoding=encoding)
    assert Profile.load(path) == Profile.load(str(path)) == whole()
    with pytest.raises(ValueError, match=r"samples=8.*says itself"):
        Profile.load(path, samples=8)


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


def test_a_list_of_unknown_size_becomes_what_one_says_it_is(tmp_path: Path) -> None:
    profile = Profile.from_list([ENTRY])
    assert profile.whole
    assert profile.of(64) == Profile.from_list([ENTRY], samples=64)
    assert profile.of(64).of(8) == profile.of(64)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json", samples=8) == profile.of(8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("", "not a JSON file"),
        ("\x00", "not a JSON file"),
        ("{}", "not a profile"),
        ("3", "not a profile"),
        ('{"syncpipe_profile": 99}', "of version 99, not 2"),
        ('{"syncpipe_profile": 2}', "not a whole profile: layers is None, not a list"),
        ("\ufeff{}", "neither one that Profile.save wrote"),
        ("[" * 10**6, "nested too deep"),
        ('{"a":' * 10**5, "nested too deep"),
        (f"[{'9' * 5000}]", "not a JSON file"),
        ('{"syncpipe_profile": 2, "layers": 3}', "layers is 3, not a list"),
        ('{"syncpipe_profile": 2, "layers": [{"name": "a"}], "skips": []}',
         r"layers\[0\]: .*missing.*'forward'"),
        ('{"syncpipe_profile": 2, "layers": [], "skips": [], "colour": 3}', "'colour'"),
        ('{"syncpipe_profile": 2, "layers": [3], "skips": []}', r"layers\[0\] is 3, not a mapping"),
        ("[]", "at least one layer"),
        ("[3]", "entry 0 is 3, not a mapping"),
        ('[{"name": "a"}]', "entry 0 of the profile lacks forward_ms"),
    ],
)  # fmt: skip
def test_another_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Profile.load(path)


def planned(path: Path) -> int:
    """Loads a file and plans with it, as the command line does."""
    return main(["plan", "--profile", str(path), "--devices", "2 x 1GB, 1GB/s", "--batch-size", "8",
                 "--chunks", "2"])  # fmt: skip


def places(data: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a tree of JSON."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    found = []
    for key, value in items:
        found.append((*where, key))
        if isinstance(value, dict | list):
            found += places(value, (*where, key))
    return found


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 10**400, -(10**400), 1e308, -1e-300, float("nan"), float("inf"), "8"]),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["4", "8", "-1", "x", "1e3", "", "9" * 30]), st.floats()),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_what_was_changed_is_planned_with_or_refused_in_a_sentence(
    data: st.DataObject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    whole().save(path)
    saved = path.read_bytes()
    what = data.draw(st.sampled_from(["change", "remove", "add", "cut", "garble"]))
    if what == "cut":
        path.write_bytes(saved[: data.draw(st.integers(0, len(saved) - 3))])
    elif what == "garble":
        path.write_bytes(data.draw(st.binary(max_size=40)))
    else:
        tree = json.loads(saved) if data.draw(st.booleans()) else [dict(ENTRY), dict(ENTRY)]
        *way, last = data.draw(st.sampled_from(places(tree)))
        node = tree
        for key in way:
            node = node[key]
        if what == "change":
            node[last] = data.draw(ODD)
        elif what == "remove":
            del node[last]
        elif isinstance(node, dict):
            node[data.draw(st.text(max_size=3))] = data.draw(ODD)
        path.write_text(json.dumps(tree))
    status = planned(path)
    shown = capsys.readouterr()
    assert status in (0, 1, 2)
    assert status == 0 or shown.err.startswith("python -m syncpipe plan: ")
    assert status == 2 or what not in ("cut", "garble")
    assert "nan" not in shown.out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    whole().save(path)
    path.chmod(0)
    assert planned(path) == 2


# --- what does not fit together -----------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "3", None, True])
@pytest.mark.parametrize("key", [key for key in ENTRY if key != "name"])
def test_numbers_that_are_none_are_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{key} of entry 1 \('conv'\) is"):
        Profile.from_list([ENTRY, {**ENTRY, key: value}])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": (layer("a"), layer("b", (4,)))}, r"layer 1 \('b'\).*\[4\].*\[4, 8\]"),
        ({"layers": (layer("a", (0,)),)}, "from 1"),
        ({"layers": (layer("a", frozen_bytes=3),)}, "frozen_bytes of layer 'a' is 3, more than"),
        ({"layers": (layer("a", weight_share=2),)}, r"weight_share of layer 0 \('a'\) is 2;.* 1 "),
        ({"layers": (layer("a", interpreter=-1),)}, r"interpreter of layer 0 \('a'\) is -1"),
        ({"layers": (layer(3),)}, "name of layer 0.* is 3; it must be text"),  # type: ignore[arg-type]
        ({"layers": ()}, "at least one layer"),
        ({"device": 3}, "device of a profile is 3; it must be text"),
        ({"source": "guessed"}, "source='guessed'"),
        ({"spread": -1.0}, "spread of a profile is -1.0"),
        ({"input_bytes": {4: 1}}, r"input_bytes of a profile.*\[4\].*\[4, 8\]"),
        *[
            ({"skips": [SkipProfile("s", a, b, {4: 1, 8: 2})]}, rf"'s' goes from layer {a} to {b}")
            for a, b in ((0, 3), (-1, 1), (1, 1), (2, 0))
        ],
    ],
)
def test_what_does_not_fit_together_is_named(arguments: dict[str, Any], message: str) -> None:
    layers = (layer("a"), layer("b"), layer("c"))
    with pytest.raises((TypeError, ValueError), match=message):
        Profile(**{"layers": layers, **arguments})


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
    assert interpolate({8: 4.0}, 2) == 1.0  # one size: in proportion
    assert interpolate({1: 3.0, 2: 2.0, 4: 1.0}, 100) == 1.0  # never less than the largest
    assert interpolate({4: 2.0, 8: 20.0}, 2) == 1.0  # however much larger ones were disturbed


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (16e9, "16.0 GB"),
     (999_600_000, "1.0 GB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_sizes_have_a_unit_that_fits(number: float, text: str) -> None:
    assert in_bytes(number) == text


def test_the_table_shows_the_largest_size() -> None:
    lines = str(whole()).splitlines()
    assert lines[0] == "8 samples on cuda:0 (some GPU)"
    assert lines[2].split() == ["a", "8.000", "ms", "8.000", "ms", "800", "B", "800", "B", "0", "B"]
    assert lines[5].split()[:5] == ["all", "24.000", "ms", "24.000", "ms"]
    assert lines[5].split()[-4:-2] == ["0", "B"]  # what is shared counts once
    assert lines[6] == "skip residual: a to c, 14 B"
