"""How long layers hold the interpreter, by a clock that only they move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncpipe.balance.profiling.interpreter as interpreter
from syncpipe.balance import LayerProfile, Profile
from syncpipe.balance.measure import profile
from syncpipe.balance.profiling.interpreter import python_time


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now


class Python(nn.Module):
    """Three seconds of Python, and an operator of five."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __deepcopy__(self, memo: dict[int, Any]) -> Python:
        return Python(self.clock)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 3
        return torch.relu(x.as_subclass(Kernel)).as_subclass(Tensor)


class Kernel(Tensor):
    """A tensor whose relu takes five seconds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.relu:
            clock.now += 5
        return super().__torch_function__(func, types, args, kwargs or {})


clock = Clock()


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "time", clock)
    monkeypatch.setattr(interpreter, "_of_counting", lambda: 0.0)


def test_what_operators_take_is_not_the_interpreters() -> None:
    assert python_time(lambda: Python(clock)(torch.ones(2))) == 3


def test_counting_operators_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_of_counting", lambda: 1.0)
    assert python_time(lambda: torch.relu(torch.ones(2))) == 0  # and it is never negative


def test_a_profile_knows_it_for_each_layer() -> None:
    model = nn.Sequential(Python(clock), nn.Linear(2, 2))
    assert [layer.interpreter for layer in profile(model, torch.ones(4, 2)).layers] == [3, 0]


def test_however_little_time_there_is() -> None:
    model = nn.Sequential(*(Python(clock) for _ in range(3)))
    layers = profile(model, torch.ones(4, 2), timeout=0).layers
    assert [layer.interpreter for layer in layers] == [3, 3, 3]


def test_a_compiled_layer_has_none() -> None:
    compiled = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert profile(compiled, torch.ones(4, 2), timeout=0.1).layers[0].interpreter == 0


def test_without_time_there_is_none() -> None:
    assert (
        profile(nn.Sequential(Python(clock)), torch.ones(4), time=False).layers[0].interpreter == 0
    )


def test_it_is_saved_with_the_profile(tmp_path: Any) -> None:
    one = {8: 1.0}
    saved = Profile((LayerProfile("a", one, one, one, one, interpreter=0.5),))
    saved.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == saved
