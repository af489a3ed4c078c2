"""``build``: a schedule from a name, an object, a file or a function, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from syncpipe.schedules import SCHEDULES, Schedule, build, gpipe, naive, one_f_one_b, to_csv


def test_build_by_name_object_and_file(tmp_path: Path) -> None:
    schedule = build("zb_h1", 4, [0, 1])
    assert build(schedule, 4, (0, 1)) is schedule
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedule))
    assert build(path, 4, (0, 1)) == schedule
    assert build(str(path), 4, (0, 1)) == schedule
    assert build(str(path), 4, (0, 1)).name == "mine.csv"


def test_more_schedules_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "mine", lambda m, device_of: gpipe(m, device_of))
    assert build("mine", 2, (0, 1)) == gpipe(2, 2)
    monkeypatch.setitem(SCHEDULES, "mine", lambda m, device_of: naive(m, device_of))
    assert build("mine", 2, (0, 1)) == naive(2, 2)
    monkeypatch.setitem(SCHEDULES, "mine", lambda m, device_of: Schedule(m, device_of, ((),)))
    with pytest.raises(ValueError, match="0F0 is missing"):
        build("mine", 2, (0,))


def test_build_by_function() -> None:
    schedule = build(partial(one_f_one_b, slots=[4, 2]), 4, [0, 1])
    assert schedule == one_f_one_b(4, 2, slots=[4, 2])
    assert schedule.in_flight == (4, 2)


class Unhashable:
    """Counts how often it is asked."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[int, ...]]] = []

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self, m: int, device_of: tuple[int, ...]) -> Schedule:
        self.asked.append((m, device_of))
        return gpipe(m, device_of)


def test_a_function_is_asked_once_for_the_same() -> None:
    one, other = Unhashable(), Unhashable()
    for function in (one, other, one):
        assert build(function, 4, [0, 1]) == gpipe(4, 2)
        assert build(function, 3, [0, 1]) == gpipe(3, 2)
    assert one.asked == other.asked == [(4, (0, 1)), (3, (0, 1))]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("1F1B", "no schedule '1F1B'; did you mean '1f1b'"),
        ("dualpipe", "did you mean 'dualpipev'"),
        ("chimera", "the names are naive, gpipe, 1f1b, looped_bfs, interleaved_1f1b, inter"),
        (gpipe(5, 2), "'gpipe' is made for m=5, but here m=4"),
        (gpipe(4, 3), r"made for device_of=\(0, 1, 2\), but here device_of=\(0, 1\)"),
        (Schedule(4, (0, 1), ((), ())), "'custom' is not valid: 0F0 is missing"),
    ],
)
def test_build_errors(schedule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(schedule, 4, (0, 1))


def fails(m: int, device_of: tuple[int, ...]) -> Schedule:
    raise ZeroDivisionError("its own")


@pytest.mark.parametrize(
    ("function", "kind", "message", "name"),
    [
        (fails, ZeroDivisionError, "its own", "fails"),
        (lambda: None, TypeError, "takes 0 positional arguments", "<lambda>"),
        (len, TypeError, "len", "len"),
        (partial(gpipe, slots=2), TypeError, "slots", "partial(gpipe, slots=2)"),
        (lambda *_: "1f1b", TypeError, "schedule=<lambda> returned '1f1b'", "<lambda>"),
        (lambda m, d: gpipe(m + 1, d), ValueError, "made for m=5, but here m=4", "<lambda>"),
        (lambda m, d: gpipe(m, 3), ValueError, "but here device_of", "<lambda>"),
        (lambda m, d: Schedule(m, d, ((), ())), ValueError, "0F0 is missing", "<lambda>"),
        (Unhashable, TypeError, "positional", "Unhashable"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(
    function: Any, kind: type[Exception], message: str, name: str
) -> None:
    for _ in range(2):
        with pytest.raises(kind, match=message) as caught:
            build(function, 4, (0, 1))
        [note] = caught.value.__notes__
        assert f"schedule={name}" in note.replace("test_what_.<locals>.", "")
        assert note.endswith("m=4, device_of=(0, 1)")


def test_build_refuses_other_things() -> None:
    with pytest.raises(TypeError, match=r"schedule=3: must be a name, .*; the names are naive"):
        build(3, 4, (0, 1))  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        build("nowhere.csv", 4, (0, 1))
