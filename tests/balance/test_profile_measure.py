"""What is measured of layers: times, sizes and skips."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncpipe.balance.profiling.profiler as profiler
from syncpipe import NoChunk
from syncpipe.balance.measure import profile
from syncpipe.balance.profile import SkipProfile
from syncpipe.skip import Namespace
from tests.support.models import Fork, Join, Receive, Send
from tests.support.running import on_gradient
from tests.support.skips import Around

# --- time, by a clock that only layers move -----------------------------------------------------


class Clock:
    """A stopwatch of its own for each test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self, device: torch.device) -> tuple[Callable[[], float], Any]:
        return (lambda: self.now), (lambda start, end: end - start)


class Takes(nn.Module):
    """Takes a second for each sample in forward, and two of them in backward."""

    def __init__(self, clock: Clock, seconds: float, late: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.clock, self.seconds, self.late = clock, seconds, list(late)
        self.weight = nn.Parameter(torch.ones(()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Takes:
        return Takes(self.clock, self.seconds, tuple(self.late))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds * len(x) + (self.late.pop(0) if self.late else 0)
        return on_gradient(x * self.weight, self._back)

    def _back(self, grad: Tensor) -> None:
        self.clock.now += 2 * self.seconds * len(grad)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profiler, "stopwatch", clock)
    return clock


def test_forward_and_backward_apart_for_each_size(clock: Clock) -> None:
    model = nn.Sequential(Takes(clock, 1), nn.ReLU(), Takes(clock, 3))
    layers = profile(model, torch.rand(8, 2), timeout=0.0).layers
    assert [layer.forward for layer in layers] == [
        {2: 2, 4: 4, 8: 8},
        {2: 0, 4: 0, 8: 0},
        {2: 6, 4: 12, 8: 24},
    ]
    assert [layer.backward[8] for layer in layers] == [16, 0, 48]


def test_the_first_run_and_a_slow_one_do_not_count(clock: Clock) -> None:
    model = nn.Sequential(Takes(clock, 1, late=(1000, 0, 50)))
    assert profile(model, torch.rand(4, 2), sizes=[4], timeout=0.05).layers[0].forward == {4: 4}


def test_what_needs_no_gradient_has_no_backward(clock: Clock) -> None:
    found = profile(nn.Sequential(nn.Flatten(), Takes(clock, 1)), torch.rand(2, 2), timeout=0.0)
    assert found.layers[0].backward == {2: 0}
    assert found.layers[1].backward == {2: 4}


def test_without_time_layers_run_once(clock: Clock) -> None:
    model = nn.Sequential(Takes(clock, 1), Takes(clock, 1))
    layers = profile(model, torch.rand(4, 2), sizes=[4], time=False).layers
    assert clock.now == 2 * (4 + 8)  # forward and back, to count what is alive
    assert all(layer.forward == layer.backward == {4: 0} for layer in layers)


def test_rounds_go_on_while_there_is_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(profiler.clock, "monotonic", lambda: clock.now)

    def rounds(timeout: float) -> float:
        start = clock.now
        profile(nn.Sequential(Takes(clock, 1)), torch.rand(1, 2), sizes=[1], timeout=timeout)
        return (clock.now - start) / 3

    python = 1 / 3  # a forward is for that at least
    assert rounds(0) == pytest.approx(1 + python + 1)  # to warm up, and one
    assert rounds(1.5) == pytest.approx(1 + python + 2)
    assert rounds(2) == pytest.approx(1 + python + profiler.LEAST)
    assert rounds(30) == 1 + 10
    # Three forwards were for Python, and three times both halves and the input half.
    assert rounds(1e6) == 1 + 1 + 4 + profiler.MOST


class Notes(nn.Module):
    """Writes down when it is run, and which way."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.weight = nn.Parameter(torch.ones(()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Notes:
        return Notes(self.name, self.log)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(self.name)
        y = x * self.weight
        y.register_hook(lambda _: self.log.append(f"{self.name} back"))
        return y


@pytest.mark.parametrize(
    ("window", "round"),
    [(1e9, ["a", "b", "c", "c back", "b back", "a back"]), (0, ["c", "c back"])],
    ids=["all in one", "one by one"],
)
def test_layers_are_timed_in_a_rotation(
    window: float, round: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "WINDOW", window)
    log: list[str] = []
    model = nn.Sequential(*(Notes(name, log) for name in "abc"))
    profile(model, torch.rand(4, 2), sizes=[4], timeout=0.5)
    assert log[-2 * len(round) :] == 2 * round
    assert log[:2] == ["a", "a back"]  # to see what it stores


def test_a_size_counts_after_a_round_of_its_own(clock: Clock) -> None:
    class Slow(Takes):
        """Takes a hundred seconds more where the micro-batch before was of another size."""

        def __deepcopy__(self, memo: dict[int, Any]) -> Slow:
            return Slow(self.clock, self.seconds)

        def forward(self, x: Tensor) -> Tensor:
            self.clock.now += 100 * (len(x) != sizes[-1])
            sizes.append(len(x))
            return super().forward(x)

    sizes = [0]
    layers = profile(nn.Sequential(Slow(clock, 1)), torch.rand(4, 2), sizes=[2, 4]).layers
    assert layers[0].forward == {2: 2, 4: 4}


def test_time_is_measured_with_the_threads_that_a_worker_has() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return x

    seen: list[int] = []
    profile(nn.Sequential(Asks()), torch.rand(2), sizes=[2], timeout=0.0, threads=3)
    assert set(seen) == {3}


# --- values of any kind -------------------------------------------------------------------------


def test_layers_get_their_real_input_in_train_mode() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            assert x.requires_grad
            assert torch.equal(x, expected[: len(x)])
            return x

    model = nn.Sequential(nn.Linear(3, 3), Asks()).eval()
    x = torch.rand(8, 3)
    expected = model[0](x).detach()
    assert profile(model, x, timeout=0.0).sizes == (2, 4, 8)


def test_trees_skips_and_integers() -> None:
    a, b = Namespace(), Namespace()
    model = nn.Sequential(
        nn.Embedding(10, 3),
        Send().isolate(a),
        Fork(),
        Send("int").isolate(b),
        nn.Identity(),
        Receive().isolate(a),
        Receive().isolate(b),
        Join(),
    )
    found = profile(model, torch.randint(10, (4, 4)), sizes=[2, 4], timeout=0.0)
    x = {2: 96, 4: 192}
    assert found.input_bytes == {2: 64, 4: 128}
    assert found.skips == (
        SkipProfile("skip", 1, 5, x),
        SkipProfile("skip", 3, 6, {2: 16, 4: 32}),
    )
    tree = {n: 2 * x[n] + 8 * n + x[n] // 4 for n in (2, 4)}  # x, side, rows and mask
    assert found.layers[2].output_bytes == found.layers[6].output_bytes == tree
    assert found.layers[7].output_bytes == x


def test_skips_of_submodules() -> None:
    inside = Around(a=Send(), b=Receive())
    model = nn.Sequential(nn.Linear(3, 3), inside, Around(a=Send()), nn.ReLU(), Around(a=Receive()))
    found = profile(model, torch.rand(2, 3), timeout=0.0)
    assert found.skips == (SkipProfile("skip", 2, 4, {2: 24}),)


def test_a_layer_that_changes_its_input() -> None:
    class Takes(nn.Module):
        def forward(self, tree: dict[str, Any]) -> Tensor:
            label, x = tree.pop("label"), tree.pop("x")
            assert label == "fork"
            seen.append(x.detach().clone())
            output: Tensor = x.mul_(2)
            return output

    seen: list[Tensor] = []
    profile(nn.Sequential(nn.Linear(3, 3), Fork(), Takes()), torch.rand(2, 4, 3), timeout=0.0)
    assert len(seen) > 1
    assert all(torch.equal(x, seen[0]) for x in seen)


def test_what_goes_whole_to_every_micro_batch() -> None:
    class Uses(nn.Module):
        def forward(self, tree: dict[str, Any]) -> Tensor:
            x, mask = tree["x"], tree["mask"]
            assert tree["name"] == "as it is"
            sizes.append((len(x), len(mask)))
            return x * mask[0]

    sizes: list[tuple[int, int]] = []
    sample = {"x": torch.rand(8, 3), "mask": NoChunk(torch.ones(5, 3)), "name": "as it is"}
    profile(nn.Sequential(Uses()), sample, sizes=[2, 8], time=False)
    assert sizes == [(2, 5), (8, 5)]


def test_tied_parameters_count_once() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    frozen = nn.BatchNorm1d(3).requires_grad_(False)
    layers = profile(nn.Sequential(first, second, frozen), torch.rand(4, 3), time=False).layers
    assert [x.parameter_bytes for x in layers] == [48, 12, 24]
    assert [x.frozen_bytes for x in layers] == [0, 0, 24]
    assert [x.buffer_bytes for x in layers] == [0, 0, 32]


def test_layers_have_their_names_and_a_place() -> None:
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(3, 3))
    found = profile(model, torch.rand(1, 3), timeout=0.0)
    assert [layer.name for layer in found.layers] == ["stem"]
    assert found.device == "cpu"
    assert found.sizes == (1,)


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sizes": [9]}, ValueError, r"sizes=\[9\].*which has 8"),
        ({"sizes": [0]}, ValueError, r"sizes=\[0\]"),
        ({"sizes": []}, ValueError, r"sizes=\[\]"),
        ({"sizes": 4}, TypeError, r"\[4\]"),
        ({"timeout": -1}, ValueError, "timeout=-1"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan"),
        ({"threads": 0}, ValueError, "threads=0"),
        ({"device": "nowhere"}, ValueError, "device='nowhere'"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        profile(nn.Sequential(nn.Linear(3, 3)), torch.rand(8, 3), **arguments)


def test_samples_that_cannot_be_cut() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="NoChunk"):
        profile(model, torch.tensor(1.0))
    with pytest.raises(ValueError, match="no samples"):
        profile(model, torch.rand(0, 3))
    with pytest.raises(ValueError, match="whole number of rows"):
        profile(model, (torch.rand(8, 3), torch.rand(3, 3)), sizes=[4])


def test_models_that_no_pipe_takes() -> None:
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        profile(nn.Linear(3, 3), torch.rand(8, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no later layer pops"):
        profile(nn.Sequential(Send()), torch.rand(8, 3))
    with pytest.raises(ValueError, match="no layers"):
        profile(nn.Sequential(), torch.rand(8, 3))


# --- progress -----------------------------------------------------------------------------------


def test_a_bar_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    profile(nn.Sequential(nn.ReLU(), nn.ReLU()), torch.rand(2), timeout=0.0, progress=True)
    assert "0/2" in capsys.readouterr().err


@pytest.mark.parametrize("progress", [None, False])
def test_no_bar_for_what_is_quick_or_unseen(
    progress: bool | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if progress is None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    profile(nn.Sequential(nn.ReLU()), torch.rand(2), timeout=0.0, progress=progress)
    assert "layer" not in capsys.readouterr().err


def test_tqdm_is_missed_only_by_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    profile(nn.Sequential(nn.ReLU()), torch.rand(2), timeout=0.0)
    with pytest.raises(ImportError, match="pip install tqdm"):
        profile(nn.Sequential(nn.ReLU()), torch.rand(2), progress=True)
