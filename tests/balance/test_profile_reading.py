"""Files that are no profiles: whatever is in them, a sentence says what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncpipe.balance import LayerProfile, Profile, SkipProfile
from syncpipe.commands.main import main

LAYERS = tuple(
    LayerProfile(str(k), {4: 1e-3, 8: 2e-3}, {4: 1e-3, 8: 2e-3}, {4: 8, 8: 16}, {4: 8, 8: 16})
    for k in range(3)
)
GOOD = Profile(LAYERS, (SkipProfile("skip", 0, 2, {4: 1, 8: 2}),), {4: 1, 8: 2}, "cpu")
ENTRY = {"name": "a", "forward_ms": 1, "backward_ms": 2, "activation_bytes": 10,
         "parameter_bytes": 10, "stored_bytes": 10}  # fmt: skip

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 10**400, -(10**400), 1e308, -1e-300, float("nan"), float("inf"), "8"]),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["4", "8", "-1", "x", "1e3", "", "9" * 30]), st.floats()),
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("saved") / "profile.json"
    GOOD.save(path)
    return path.read_text()


def places(data: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a tree of JSON."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    found = []
    for key, value in items:
        found.append((*where, key))
        if isinstance(value, dict | list):
            found += places(value, (*where, key))
    return found


def planned(path: Path) -> int:
    """Loads a file and plans with it, as the command line does."""
    return main(["plan", "--profile", str(path), "--devices", "2 x 1GB, 1GB/s", "--batch-size", "8",
                 "--chunks", "2"])  # fmt: skip


quick = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(data=st.data())
def test_what_was_changed_is_planned_with_or_refused_in_a_sentence(
    data: st.DataObject, saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = json.loads(saved) if data.draw(st.booleans()) else [dict(ENTRY), dict(ENTRY)]
    *way, last = data.draw(st.sampled_from(places(tree)))
    node = tree
    for key in way:
        node = node[key]
    what = data.draw(st.sampled_from(["change", "remove", "add"]))
    if what == "change":
        node[last] = data.draw(ODD)
    elif what == "remove":
        del node[last]
    elif isinstance(node, dict):
        node[data.draw(st.text(max_size=3))] = data.draw(ODD)
    path = tmp_path / "file.json"
    path.write_text(json.dumps(tree))
    status = planned(path)
    shown = capsys.readouterr()
    assert status in (0, 1, 2)
    assert status == 0 or shown.err.startswith("python -m syncpipe plan: ")
    assert "nan" not in shown.out


@quick
@given(data=st.data())
def test_what_was_cut_off_or_garbled_is_refused_in_a_sentence(
    data: st.DataObject, saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = saved.encode()
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 3))]
    else:
        content = data.draw(st.binary(max_size=40))
    path = tmp_path / "file.json"
    path.write_bytes(content)
    assert planned(path) == 2
    assert capsys.readouterr().err.startswith("python -m syncpipe plan: ")


def test_a_mark_of_the_byte_order_is_no_mistake(saved: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(saved, encoding="utf-8-sig")
    assert Profile.load(path) == GOOD


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    GOOD.save(path)
    path.chmod(0)
    assert planned(path) == 2


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, f"[{'9' * 10**4}]", "\x00", "nul"])
def test_odd_texts_are_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    assert planned(path) == 2
    assert capsys.readouterr().err.count("\n") == 1
