"""``Profile``: files, tables, sizes that were not measured."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncpipe.balance import LayerProfile, Profile, SkipProfile
from syncpipe.balance.profile import interpolate
from syncpipe.commands.main import main
from syncpipe.format import in_bytes

ENTRY = {
    "name": "conv", "forward_ms": 2.5, "backward_ms": 5, "activation_bytes": 1000,
    "parameter_bytes": 40, "stored_bytes": 3000,
}  # fmt: skip


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
    with pytest.raises(ValueError, match=r"samples=8.*has its own"):
        Profile.load(path, samples=8)


def test_a_list_of_entries_is_a_profile_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([ENTRY, {**ENTRY, "nodes": 3}]))
    profile = Profile.load(path, samples=32)
    assert profile == Profile.from_list([ENTRY, ENTRY], samples=32)
    assert profile.layers[0] == LayerProfile(
        "conv", {32: 0.0025}, {32: 0.005}, {32: 1000}, {32: 3000}, parameter_bytes=40
    )
    unknown = Profile.load(path)
    assert unknown.whole
    assert unknown.of(64).of(8) == unknown.of(64) == Profile.load(path, samples=64)
    unknown.save(path)
    assert Profile.load(path, samples=8) == unknown.of(8)


def changed(*place: Any, to: Any) -> str:
    """A file that somebody has changed."""
    tree = {"syncpipe_profile": 2, **json.loads(json.dumps(asdict(whole())))}
    reduce(operator.getitem, place[:-1], tree)[place[-1]] = to
    return json.dumps(tree)


@pytest.mark.parametrize(
    "text",
    [
        "{", "", "\x00", "{}", "3", "[]", "[3]", "\ufeff{}", '[{"name": "a"}]',
        "[" * 10**6, '{"a":' * 10**5, f"[{'9' * 5000}]",
        '{"syncpipe_profile": 99}', '{"syncpipe_profile": 2}',
        changed("layers", to=3), changed("layers", to=[{"name": "a"}]), changed("layers", to=[3]),
        changed("colour", to=3), changed("layers", 0, "name", to=3),
        *(changed("layers", 0, "forward", "4", to=value)
          for value in (-1, 10**400, "8", None, math.nan)),
        changed("layers", 0, "forward", to=3), changed("skips", 0, "stash", to=0.5),
        changed("input_bytes", to={"x": 1}), changed("input_bytes", to={"-1": 1, "8": 2}),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_refused_in_a_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    assert main(["plan", "--profile", str(path), "--devices", "2", "--batch-size", "8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"python -m syncpipe plan: {path} is not a profile (")
    assert "or a list of entries with name" in error
    assert error.count("\n") == 1


# --- what does not fit together -----------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "3", None, True])
@pytest.mark.parametrize("key", ["forward_ms", "stored_bytes"])
def test_numbers_that_are_none_are_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{key} of entry 1 \('conv'\) is"):
        Profile.from_list([ENTRY, {**ENTRY, key: value}], samples=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": (layer("a"), layer("b", (4,)))}, r"layer 1 \('b'\) is \{4.*\[4, 8\]"),
        ({"layers": (layer("a", (0,)),)}, "from 1"),
        ({"layers": (layer("a", frozen_bytes=3),)}, "frozen_bytes of layer 'a' is 3, more than"),
        ({"layers": (layer("a", weight_share=2),)}, r"weight_share of layer 0 \('a'\) is 2.* to 1"),
        ({"layers": (layer("a", interpreter=-1),)}, r"interpreter of layer 0 \('a'\) is -1"),
        ({"layers": (layer(3),)}, "name of layer 0.* is 3, not a str"),  # type: ignore[arg-type]
        ({"layers": ()}, "at least one layer"),
        ({"device": 3}, "device of a profile is 3, not a str"),
        ({"source": "guessed"}, "source='guessed'"),
        ({"spread": -1.0}, "spread of a profile is -1.0"),
        ({"input_bytes": {4: 1}}, r"input_bytes of a profile is \{4: 1\}.*\[4, 8\]"),
        ({"skips": [SkipProfile("s", -1, 1, {4: 1, 8: 2})]}, "stash of skip 's' is -1"),
        *[
            ({"skips": [SkipProfile("s", a, b, {4: 1, 8: 2})]}, rf"'s' goes from layer {a} to {b}")
            for a, b in ((0, 3), (1, 1), (2, 0))
        ],
    ],
)
def test_what_does_not_fit_together_is_named(arguments: dict[str, Any], message: str) -> None:
    layers = (layer("a"), layer("b"), layer("c"))
    with pytest.raises((TypeError, ValueError), match=message):
        Profile(**{"layers": layers, **arguments})


# --- numbers ------------------------------------------------------------------------------------


@given(
    st.floats(0, 5),
    st.floats(0, 5),
    st.sets(st.integers(1, 64), min_size=2, max_size=5),
    st.integers(1, 500),
)
def test_a_straight_line_stays_one(a: float, b: float, sizes: set[int], samples: int) -> None:
    numbers = {size: a + b * size for size in sizes}
    assert interpolate(numbers, samples) == pytest.approx(a + b * samples)
    assert all(interpolate(numbers, size) == number for size, number in numbers.items())


@pytest.mark.parametrize(
    ("numbers", "samples", "expected"),
    [
        ({8: 4.0}, 2, 1.0),  # one size: in proportion
        ({1: 3.0, 2: 2.0, 4: 1.0}, 100, 1.0),  # never less than the largest
        ({4: 2.0, 8: 20.0}, 2, 1.0),  # however much larger ones were disturbed
    ],
)
def test_what_was_not_measured(numbers: Any, samples: int, expected: float) -> None:
    assert interpolate(numbers, samples) == expected


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (16e9, "16.0 GB"),
     (999_600_000, "1.0 GB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_sizes_have_a_unit_that_fits(number: float, text: str) -> None:
    assert in_bytes(number) == text


def test_the_table_shows_the_largest_size() -> None:
    lines = str(whole()).splitlines()
    assert lines[0] == "8 samples, measured on cuda:0 (some GPU)"
    assert lines[2].split() == ["a", "8.000", "ms", "8.000", "ms", "800", "B", "800", "B", "0", "B"]
    assert lines[5].split()[:5] == ["all", "24.000", "ms", "24.000", "ms"]
    assert lines[5].split()[-4:-2] == ["0", "B"]  # what is shared counts once
    assert lines[6] == "skip residual: a to c, 14 B"
    trained = layer(parameter_bytes=100, frozen_bytes=30, buffer_bytes=5)
    assert trained.memory(4.0) == 4 * 70 + 30 + 5
