"""What is measured of layers: times by a clock that only layers move, values, skips, arguments."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncpipe
from syncpipe import NoChunk, Pipe
from syncpipe.balance import DeviceSpec, LayerProfile, Profile, SkipProfile, estimated, profile
from syncpipe.balance import run as measuring
from syncpipe.skip import Namespace
from tests.support.models import Fork, Join, Receive, Send
from tests.support.running import on_gradient
from tests.support.skips import Around

# --- time ---------------------------------------------------------------------------------------


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
        return type(self)(self.clock, self.seconds, tuple(self.late))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds * len(x) + (self.late.pop(0) if self.late else 0)
        return on_gradient(x * self.weight, self._back)

    def _back(self, grad: Tensor) -> None:
        self.clock.now += 2 * self.seconds * len(grad)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measuring, "stopwatch", clock)
    return clock


def test_forward_and_backward_apart_for_each_size(clock: Clock) -> None:
    model = nn.Sequential(nn.Flatten(), Takes(clock, 1), nn.ReLU(), Takes(clock, 3))
    layers = profile(model, torch.rand(8, 2), timeout=0.0).layers
    nothing = {2: 0, 4: 0, 8: 0}
    assert [layer.forward for layer in layers] == [
        nothing, {2: 2, 4: 4, 8: 8}, nothing, {2: 6, 4: 12, 8: 24},
    ]  # fmt: skip
    assert [layer.backward[8] for layer in layers] == [0, 16, 0, 48]


def test_the_first_run_and_a_slow_one_do_not_count(clock: Clock) -> None:
    model = nn.Sequential(Takes(clock, 1, late=(1000, 0, 50)))
    assert profile(model, torch.rand(4, 2), sizes=[4], timeout=0.05).layers[0].forward == {4: 4}


def test_without_time_layers_run_once(clock: Clock) -> None:
    model = nn.Sequential(Takes(clock, 1), Takes(clock, 1))
    layers = profile(model, torch.rand(4, 2), sizes=[4], time=False).layers
    assert clock.now == 2 * (4 + 8)  # forward and back, to count what is alive
    assert all(layer.forward == layer.backward == {4: 0} for layer in layers)
    assert [(layer.interpreter, layer.weight_share) for layer in layers] == 2 * [(0, None)]


def test_rounds_go_on_while_there_is_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(measuring.clock, "monotonic", lambda: clock.now)

    def rounds(timeout: float) -> float:
        start = clock.now
        model = nn.Sequential(nn.Flatten(), Takes(clock, 1))
        profile(model, torch.rand(1, 2, requires_grad=True), sizes=[1], timeout=timeout)
        return (clock.now - start) / 3

    python = 1 / 3  # a forward is for that at least; and a round is one back to inputs, too
    assert rounds(0) == pytest.approx(1 + python + 2 * 1)  # to warm up, and one
    assert rounds(3) == pytest.approx(1 + python + 2 * measuring.LEAST)
    assert rounds(36) == pytest.approx(1 + 1 + 2 * 6, abs=1)
    assert rounds(1e6) == pytest.approx(1 + 1 + 2 * measuring.MOST)


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
    monkeypatch.setattr(measuring, "WINDOW", window)
    log: list[str] = []
    model = nn.Sequential(*(Notes(name, log) for name in "abc"))
    profile(model, torch.rand(4, 2, requires_grad=True), sizes=[4], timeout=0.5)
    assert log[-2 * len(round) :] == 2 * round
    assert log[:2] == ["a", "a back"]  # to see what it stores


def test_a_size_counts_after_a_round_of_its_own(clock: Clock) -> None:
    class Slow(Takes):
        """Takes a hundred seconds more where the micro-batch before was of another size."""

        def forward(self, x: Tensor) -> Tensor:
            self.clock.now += 100 * (len(x) != sizes[-1])
            sizes.append(len(x))
            return super().forward(x)

    sizes = [0]
    layers = profile(nn.Sequential(Slow(clock, 1)), torch.rand(8, 2), sizes=[2, 4, 8]).layers
    assert layers[0].forward == {2: 2, 4: 4, 8: 8}


def test_time_is_measured_with_the_threads_that_a_worker_has() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return x

    seen: list[int] = []
    profile(nn.Sequential(Asks()), torch.rand(2), sizes=[2], timeout=0.0, threads=3)
    assert set(seen) == {3}


# --- noise --------------------------------------------------------------------------------------

TRUE = 1e-3


def noisy(monkeypatch: pytest.MonkeyPatch, time: Callable[[], float]) -> Profile:
    """Layers whose every run takes what the function says."""
    monkeypatch.setattr(measuring, "stopwatch", lambda device: (lambda: 0.0, lambda a, b: time()))
    monkeypatch.setattr(measuring, "PATIENCE", 1e9)  # however slow this machine is
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return profile(layers, torch.randn(8, 4), sizes=[4, 8], timeout=1e-3)


def times(found: Profile) -> list[float]:
    return [t for x in found.layers for row in (x.forward, x.backward) for t in row.values()]


def test_what_else_runs_does_not_count_and_leaves_a_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    busy = noisy(monkeypatch, lambda: TRUE * (draw.uniform(50, 1000) if draw.random() < 0.7 else 1))
    assert times(busy) == pytest.approx([TRUE] * 12)
    assert busy.spread > 1
    assert busy.load_average > 0
    calm = noisy(monkeypatch, lambda: TRUE)
    assert times(calm) == [TRUE] * 12
    assert calm.spread == 0


def test_fewer_samples_never_take_longer() -> None:
    rows: Any = {2: [5.0, 6.0], 4: [3.0, 9.0], 8: [4.0]}
    assert measuring.least_of(rows) == {2: 3.0, 4: 3.0, 8: 4.0}


# --- the weight half of backward ----------------------------------------------------------------


class Halves(Takes):
    """Its parameter takes three seconds for each sample, besides two for its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight = on_gradient(self.weight * 1, lambda _: self._take(3 * len(x)))
        self._take(len(x))
        return on_gradient(x * weight, self._back)

    def _take(self, seconds: float) -> None:
        self.clock.now += seconds


def test_what_is_missing_without_products_for_parameters_is_the_weight_half(clock: Clock) -> None:
    frozen = Halves(clock, 1).requires_grad_(False)
    model = nn.Sequential(Halves(clock, 1), nn.ReLU(), Halves(clock, 1), frozen)
    layers = profile(model, torch.rand(4, 2), timeout=0).layers
    # Nothing goes back from the first layer without its parameter.
    assert [layer.weight_share for layer in layers] == [1, 0, pytest.approx(3 / 5), 0]
    fast = DeviceSpec("d", half=1.0, single=1.0, bandwidth=1e30, launch=0.0)
    two = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    shares = [layer.weight_share for layer in estimated(two, torch.randn(64, 512), on=fast).layers]
    assert shares == [1, pytest.approx(0.5)]  # two products of one size


def test_the_halves_of_a_plan_are_those_of_its_profile() -> None:
    def planned(share: float | None) -> Any:
        layers = [
            LayerProfile(str(k), {8: 1e-3}, {8: 2e-3}, {8: 10}, {8: 10}, parameter_bytes=8,
                         weight_share=share)
            for k in range(4)
        ]  # fmt: skip
        return syncpipe.plan(
            Profile(tuple(layers)), devices="2 x 1GB, 1GB/s", batch_size=32, chunks=4,
            schedule="zb_h1",
        )  # fmt: skip

    costs = planned(0.75).simulation.costs
    assert costs.backward_weight == pytest.approx([0.75 * 2 * 2e-3] * 2)
    assert costs.backward_input == pytest.approx([0.25 * 2 * 2e-3] * 2)
    assert "are estimated" not in str(planned(0.75))
    assert "are estimated" in str(planned(None))


# --- how long layers hold the interpreter -------------------------------------------------------


class ThreadClock:
    """The CPU time of this thread, which only layers move."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["time"], name)


class Python(nn.Module):
    """Three seconds of Python, and an operator of five."""

    def __init__(self, clock: ThreadClock) -> None:
        super().__init__()
        self.clock = clock

    def __deepcopy__(self, memo: dict[int, Any]) -> Python:
        return Python(self.clock)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 3
        Kernel.clock = self.clock
        return torch.relu(x.as_subclass(Kernel)).as_subclass(Tensor)


class Kernel(Tensor):
    """A tensor whose relu takes five seconds."""

    clock: ThreadClock

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.relu:
            cls.clock.now += 5
        return super().__torch_function__(func, types, args, kwargs or {})


def test_time_of_the_interpreter_is_that_outside_of_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ThreadClock()
    monkeypatch.setattr(measuring, "clock", clock)
    monkeypatch.setattr(measuring, "of_counting", lambda: 0.0)
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    model = nn.Sequential(Python(clock), nn.Linear(2, 2), Python(clock), compiled)
    for timeout in (0, 0.05):  # however little time there is
        layers = profile(model, torch.ones(4, 2), timeout=timeout).layers
        assert [layer.interpreter for layer in layers] == [3, 0, 3, 0]
    monkeypatch.setattr(measuring, "of_counting", lambda: 0.5)
    calls = measuring.outside_operators(lambda: torch.relu(torch.ones(2)))[1]
    assert calls >= 1
    layers = profile(model[:2], torch.ones(4, 2), timeout=0).layers
    assert 0 <= layers[0].interpreter < 3  # counting operators does not count
    assert layers[1].interpreter == 0  # and it is never negative


# --- values of any kind -------------------------------------------------------------------------


def test_layers_get_their_real_input_in_train_mode() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            assert x.requires_grad
            assert torch.equal(x, expected[: len(x)])
            return x

    model = nn.Sequential()
    model.add_module("stem", nn.Linear(3, 3))
    model.add_module("asks", Asks())
    x = torch.rand(8, 3)
    expected = model.stem(x).detach()
    found = profile(model.eval(), x, timeout=0.0)
    assert (found.sizes, found.device) == ((2, 4, 8), "cpu")
    assert [layer.name for layer in found.layers] == ["stem", "asks"]


def test_trees_skips_and_integers() -> None:
    a, b = Namespace(), Namespace()
    model = nn.Sequential(
        nn.Embedding(10, 3),
        Send().isolate(a),
        Fork(),
        Send("int").isolate(b),
        Around(a=Send(), b=Receive()),  # a skip inside of a layer
        Receive().isolate(a),
        Around(a=Receive().isolate(b)),
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
        ({"sample": torch.tensor(1.0)}, ValueError, "NoChunk"),
        ({"sample": torch.rand(0, 3)}, ValueError, "no samples"),
        ({"sample": (torch.rand(8, 3), torch.rand(3, 3)), "sizes": [4]}, ValueError,
         "whole number of rows"),
        ({"module": nn.Linear(3, 3)}, TypeError, r"nn\.Sequential"),
        ({"module": nn.Sequential(Send())}, TypeError, "no later layer pops"),
        ({"module": nn.Sequential()}, ValueError, "no layers"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"module": nn.Sequential(nn.Linear(3, 3)), "sample": torch.rand(8, 3), **arguments}
    with pytest.raises(error, match=message):
        profile(**given)


def test_a_bar_when_asked_for_and_none_for_what_is_quick_or_unseen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bar(progress: bool | None) -> str:
        model = nn.Sequential(nn.ReLU(), nn.ReLU())
        profile(model, torch.rand(2), timeout=0.0, progress=progress)
        return capsys.readouterr().err

    pytest.importorskip("tqdm")
    assert "0/2" in bar(True)
    assert "layer" not in bar(False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert "layer" not in bar(None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert "layer" not in bar(None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        bar(True)


def test_a_pipe_that_ran_before_does_not_make_layers_look_compiled() -> None:
    """Modules that draw hold the generators by the attribute that ``compile()`` sets."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = [layer.peak_bytes for layer in profile(model, torch.rand(2, 4), time=False).layers]
    Pipe(model, [2, 1], devices=["cpu:0", "cpu:1"], chunks=2)(torch.rand(2, 4)).sum().backward()
    after = [layer.peak_bytes for layer in profile(model, torch.rand(2, 4), time=False).layers]
    assert all(before)
    assert after == before
