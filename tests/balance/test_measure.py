"""What is measured of layers: times by a clock that only layers move, values, skips, arguments."""

from __future__ import annotations

import operator
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from syncpipe import NoChunk, Pipe
from syncpipe.balance import DeviceSpec, Profile, SkipProfile, estimated, profile
from syncpipe.balance import measure as measuring
from syncpipe.skip import Namespace
from tests.support.models import Fork, Join, Receive, Send
from tests.support.running import Do, on_gradient
from tests.support.skips import Around

# --- time ---------------------------------------------------------------------------------------


class Clock:
    """A stopwatch of its own for each test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self, device: torch.device) -> tuple[Callable[[], float], Any]:
        return (lambda: self.now), operator.sub


class Takes(nn.Module):
    """Takes a second for each sample in forward, and two of them in backward; its parameter takes
    some more for each sample.
    """

    def __init__(self, clock: Clock, seconds: float, weight: float = 0) -> None:
        super().__init__()
        self.arguments = clock, seconds, weight
        self.clock, self.seconds, self.own = clock, seconds, weight
        self.weight = nn.Parameter(torch.ones(()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Takes:
        return type(self)(*self.arguments).requires_grad_(self.weight.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        self.take(self.seconds * len(x))
        weight = on_gradient(self.weight * 1, lambda _: self.take(self.own * len(x)))
        return on_gradient(x * weight, lambda grad: self.take(2 * self.seconds * len(grad)))

    def take(self, seconds: float) -> None:
        self.clock.now += seconds


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
    assert rounds(3) == pytest.approx(1 + python + 2 * measuring.MIN_ROUNDS)
    assert rounds(36) == pytest.approx(1 + 1 + 2 * 6, abs=1)
    assert rounds(1e6) == pytest.approx(1 + 1 + 2 * measuring.MAX_ROUNDS)


@pytest.mark.parametrize(
    ("window", "round"),
    [(1e9, ["a", "b", "c", "c back", "b back", "a back"]), (0, ["c", "c back"])],
    ids=["all in one", "one by one"],
)
def test_layers_are_timed_in_a_rotation(
    window: float, round: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def notes(name: str) -> nn.Module:
        def run(x: Tensor) -> Any:
            log.append(name)
            return on_gradient(x * 1, lambda _: log.append(f"{name} back"))

        return Do(run)

    monkeypatch.setattr(measuring, "WINDOW", window)
    log: list[str] = []
    x = torch.rand(4, 2, requires_grad=True)
    profile(nn.Sequential(*map(notes, "abc")), x, sizes=[4], timeout=0.5)
    assert log[-2 * len(round) :] == 2 * round
    assert log[:2] == ["a", "a back"]  # to see what it stores


def test_a_size_counts_after_a_round_of_its_own(clock: Clock) -> None:
    """Here a micro-batch after one of another size takes a hundred seconds more."""

    def slow(x: Tensor) -> None:
        clock.now += len(x) + 100 * (len(x) != sizes[-1])
        sizes.append(len(x))

    sizes = [0]
    layers = profile(nn.Sequential(Do(slow)), torch.rand(8, 2), sizes=[2, 4, 8]).layers
    assert layers[0].forward == {2: 2, 4: 4, 8: 8}


# --- noise --------------------------------------------------------------------------------------

TRUE = 1e-3


def test_what_else_runs_does_not_count_and_leaves_a_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(time: Callable[[], float]) -> Profile:
        monkeypatch.setattr(measuring, "stopwatch", lambda _: (lambda: 0.0, lambda a, b: time()))
        layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        return profile(layers, torch.randn(8, 4), sizes=[4, 8], timeout=1e-3)

    monkeypatch.setattr(measuring, "LATE_FACTOR", 1e9)  # however slow this machine is
    draw = random.Random(0)
    busy = found(lambda: TRUE * (draw.uniform(50, 1000) if draw.random() < 0.7 else 1))
    calm = found(lambda: TRUE)
    for each in (busy, calm):
        rows = [row for x in each.layers for row in (x.forward, x.backward)]
        assert all(row == pytest.approx({4: TRUE, 8: TRUE}) for row in rows)
    assert (busy.spread > 1, calm.spread) == (True, 0)
    assert busy.load_average > 0


@pytest.mark.parametrize(
    ("takes", "forward", "spread"),
    [
        ({2: 5, 4: 3, 8: 4}, {2: 3, 4: 3, 8: 4}, 0),
        ({2: 1, 4: 2, 8: 4}, {2: 1, 4: 2, 8: 4}, 0),
        ({2: 1, 4: 2, 8: 4000}, {2: 1, 4: 2, 8: 4000}, pytest.approx(249, rel=1e-3)),
    ],
)
def test_fewer_samples_never_take_longer_and_more_hardly_a_thousand_times_as_long(
    takes: dict[int, float], forward: dict[int, float], spread: Any, clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """That leaves a spread, also where they do so in all rounds."""

    def odd(x: Tensor) -> None:
        clock.now += takes[len(x)]

    monkeypatch.setattr(measuring, "EXTRA_ROUNDS", 0)
    found = profile(nn.Sequential(Do(odd)), torch.rand(8, 2), timeout=0.0)
    assert (found.layers[0].forward, found.spread) == (forward, spread)


@pytest.mark.parametrize(
    ("slow", "rounds", "took", "spread"),
    [
        (lambda k: 500, measuring.MIN_ROUNDS, 500, 0),
        (
            lambda k: 10**6,
            measuring.MIN_ROUNDS + measuring.EXTRA_ROUNDS,
            10**6,
            pytest.approx(992, abs=10),
        ),
        (lambda k: 10**6 if k < 12 else 1, 8, 1, pytest.approx(250000, rel=0.01)),
    ],
    ids=["it may be so", "in all rounds", "at first"],
)
def test_a_layer_a_thousand_times_as_slow_as_others_for_what_it_does_is_measured_again(
    slow: Callable[[int], float], rounds: int, took: float, spread: Any, clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where it stays so, or was so in most rounds, that leaves a spread."""
    seen: list[int] = []

    def odd(x: Tensor) -> None:
        clock.now += slow(len(seen))
        seen.append(1)

    def usual(x: Tensor) -> None:
        clock.now += 1

    monkeypatch.setattr(measuring, "LATE_FACTOR", 1e9)
    layers = [Do(usual), Do(usual), Do(odd), Do(usual)]
    found = profile(nn.Sequential(*layers), torch.rand(8, 2), sizes=[8], timeout=1e-9)
    assert len(seen) // 2 == pytest.approx(rounds, abs=2)  # and one back to inputs for each
    assert (found.layers[2].forward, found.spread) == ({8: took}, spread)


# --- the weight half of backward, and the interpreter -------------------------------------------


def test_what_is_missing_without_products_for_parameters_is_the_weight_half(clock: Clock) -> None:
    frozen = Takes(clock, 1).requires_grad_(False)
    halves = [Takes(clock, 1, weight=3) for _ in range(2)]
    model = nn.Sequential(halves[0], nn.ReLU(), halves[1], frozen)
    layers = profile(model, torch.rand(4, 2), timeout=0).layers
    # Nothing goes back from the first layer without its parameter.
    assert [layer.weight_share for layer in layers] == [1, 0, pytest.approx(3 / 5), 0]
    fast = DeviceSpec("d", half=1.0, single=1.0, bandwidth=1e30, launch=0.0)
    two = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    shares = [layer.weight_share for layer in estimated(two, torch.randn(64, 512), on=fast).layers]
    assert shares == [1, pytest.approx(0.5)]  # two products of one size


def test_time_of_the_interpreter_is_that_outside_of_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Kernel(Tensor):
        """A tensor whose relu takes five seconds."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            now[0] += 5 * (func is torch.relu)
            return super().__torch_function__(func, types, args, kwargs or {})

    def python(x: Tensor) -> Tensor:
        """Three seconds of Python, and that operator."""
        now[0] += 3
        return torch.relu(x.as_subclass(Kernel)).as_subclass(Tensor)

    now = [0.0]
    monkeypatch.setattr(measuring.clock, "thread_time", lambda: now[0])
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    model = nn.Sequential(Do(python), nn.Linear(2, 2), Do(python), compiled)
    for timeout in (0, 0.05):  # however little time there is
        layers = profile(model, torch.ones(4, 2), timeout=timeout).layers
        assert [x.interpreter for x in layers] == pytest.approx([3, 0, 3, 0], abs=1e-4)
    monkeypatch.setattr(measuring, "COUNTING", 0.5)
    layers = profile(model[:2], torch.ones(4, 2), timeout=0).layers
    assert 0 <= layers[0].interpreter < 3  # counting operators does not count
    assert layers[1].interpreter == 0  # and it is never negative


# --- values of any kind -------------------------------------------------------------------------


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


def test_layers_get_their_real_input_even_if_one_changes_it() -> None:
    def takes(tree: dict[str, Any]) -> Any:
        assert tree.pop("label") == "fork"
        assert tree["x"].requires_grad
        seen.append(len(tree["x"]))
        torch.testing.assert_close(tree["x"].detach(), expected[: seen[-1]])  # by kind of CPU
        return tree.pop("x").mul_(2)

    seen: list[int] = []
    made = nn.Sequential(OrderedDict(stem=nn.Linear(3, 3), fork=Fork(), takes=Do(takes)))
    x = torch.rand(8, 4, 3)
    expected = made.stem(x).detach()
    found = profile(made, x, timeout=0.0)
    assert set(seen) == {2, 4, 8}
    assert (found.sizes, found.device) == ((2, 4, 8), "cpu")
    assert [layer.name for layer in found.layers] == ["stem", "fork", "takes"]


def test_what_goes_whole_to_every_micro_batch() -> None:
    def uses(tree: dict[str, Any]) -> Tensor:
        x, mask = tree["x"], tree["mask"]
        assert tree["name"] == "as it is"
        sizes.append((len(x), len(mask)))
        return x * mask[0]

    sizes: list[tuple[int, int]] = []
    sample = {"x": torch.rand(8, 3), "mask": NoChunk(torch.ones(5, 3)), "name": "as it is"}
    profile(nn.Sequential(Do(uses)), sample, sizes=[2, 8], time=False)
    assert sizes == [(2, 5), (8, 5)]


def test_tied_parameters_count_once() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    frozen = nn.BatchNorm1d(3).requires_grad_(False)
    layers = profile(nn.Sequential(first, second, frozen), torch.rand(4, 3), time=False).layers
    found = [(x.parameter_bytes, x.frozen_bytes, x.buffer_bytes) for x in layers]
    assert found == [(48, 0, 0), (12, 0, 0), (24, 24, 32)]


def test_a_pipe_that_ran_before_does_not_make_layers_look_compiled() -> None:
    """Modules that draw hold the generators by the attribute that ``compile()`` sets."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = [
        layer.backward_peak_bytes for layer in profile(model, torch.rand(2, 4), time=False).layers
    ]
    Pipe(model, [2, 1], devices=["cpu:0", "cpu:1"], chunks=2)(torch.rand(2, 4)).sum().backward()
    after = [
        layer.backward_peak_bytes for layer in profile(model, torch.rand(2, 4), time=False).layers
    ]
    assert all(before)
    assert after == before


# --- arguments ----------------------------------------------------------------------------------


def in_fake_mode() -> nn.Module:
    with FakeTensorMode():
        return nn.Linear(3, 3)


def on_meta(layer: nn.Module) -> dict[str, Any]:
    return {"module": nn.Sequential(nn.Linear(3, 3), layer), "device": "meta"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sizes": [9]}, ValueError, r"sizes=\[9\].*from 1 to the 8"),
        ({"sizes": [0]}, ValueError, r"sizes=\[0\]"),
        ({"sizes": []}, ValueError, r"sizes=\[\]"),
        ({"sizes": 4}, TypeError, r"\[4\]"),
        ({"timeout": -1}, ValueError, "timeout=-1"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan"),
        ({"threads": 0}, ValueError, "threads=0"),
        ({"device": "nowhere"}, ValueError, "device='nowhere'"),
        ({"sample": torch.tensor(1.0)}, ValueError, "NoChunk"),
        ({"sample": torch.rand(0, 3)}, ValueError, "sample is empty"),
        ({"sample": (torch.rand(8, 3), torch.rand(3, 3)), "sizes": [4]}, ValueError,
         "whole number of rows"),
        ({"module": nn.Linear(3, 3)}, TypeError, r"nn\.Sequential"),
        ({"module": nn.Sequential(Send())}, TypeError, "no later layer pops"),
        ({"module": nn.Sequential()}, ValueError, "no layers"),
        (on_meta(Do(lambda x: x * x.sum().item())), RuntimeError,
         r"layer '1' \(Do\) needs the values.*a GPU"),
        (on_meta(Do(lambda x: x[x > 0.5])), RuntimeError, r"'1' \(Do\) needs the value"),
        (on_meta(nn.Linear(4, 4)), RuntimeError, r"shape|size|dim"),
        ({"device": "cpu", "sample": torch.rand(4, 3, device="meta")}, ValueError,
         r"device='cpu'.*sample is on meta"),
        ({"module": nn.Sequential(in_fake_mode())}, ValueError,
         r"FakeTensorMode.*torch.device\('meta'\)"),
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
    with pytest.raises(ImportError, match="tqdm"):
        bar(True)


def test_a_profile_of_autocast_says_so() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    plain = profile([layer], x, time=False)
    with torch.autocast("cpu", torch.bfloat16):
        cast = profile([layer], x, time=False)
    assert cast.how.endswith("cpu, in autocast to torch.bfloat16")
    assert "autocast" not in plain.how
    assert cast.layers[0].output_bytes[4] == plain.layers[0].output_bytes[4] / 2
