"""Times measured on a busy machine: the least counts, contradictions are measured again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe.balance import Profile, profile
from syncpipe.balance.profiling import profiler

TRUE = 1e-3


def measured(
    monkeypatch: pytest.MonkeyPatch, time: Callable[[], float], timeout: float = 1e-3
) -> Profile:
    """Layers whose every run takes what the function says."""
    monkeypatch.setattr(profiler, "stopwatch", lambda device: (lambda: 0.0, lambda a, b: time()))
    monkeypatch.setattr(profiler, "PATIENCE", 1e9)  # however slow this machine is
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return profile(layers, torch.randn(8, 4), sizes=[4, 8], timeout=timeout)


def times(found: Profile) -> list[float]:
    layers = found.layers
    return [t for x in layers for row in (x.forward, x.backward) for t in row.values()]


def test_what_else_runs_does_not_count_and_leaves_a_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    found = measured(
        monkeypatch, lambda: TRUE * (draw.uniform(50, 1000) if draw.random() < 0.5 else 1)
    )
    assert times(found) == pytest.approx([TRUE] * 12)
    assert found.spread > 1
    assert found.load_average > 0


def test_a_calm_machine_has_no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, lambda: TRUE)
    assert times(found) == [TRUE] * 12
    assert found.spread == 0


def test_fewer_samples_never_take_longer() -> None:
    rows: Any = {2: [5.0, 6.0], 4: [3.0, 9.0], 8: [4.0]}
    assert profiler._least_of(rows) == {2: 3.0, 4: 3.0, 8: 4.0}


def test_a_profile_keeps_its_spread(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    found = measured(monkeypatch, lambda: TRUE * draw.uniform(1, 3))
    found.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert (again.spread, again.load_average) == (found.spread, found.load_average)
