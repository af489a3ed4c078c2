"""Models without a fault: the pipe computes what the layers compute plainly, to the last bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import NoChunk, Pipe, sequential, verify
from syncpipe.schedules import SCHEDULES
from syncpipe.verification.report import COLUMNS, Report
from tests.support.skips import Receive
from tests.support.training import FOUR, ROUND, V, any_schedule, fitting
from tests.verification.models import WIDTH, Scale, Send, TwoBiases, batch, linear, pipe_of

MODELS: dict[str, Any] = {
    "plain": lambda: [linear(), nn.Tanh(), linear(), nn.GELU(), linear()],
    "dropout": lambda: [linear(), nn.Dropout(), linear(), nn.Dropout(0.1), linear()],
    "skips": lambda: [Send(), linear(), nn.Dropout(), Receive(), linear()],
    "in place": lambda: [Scale(), linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(True)],
    "attention": lambda: [
        nn.Unflatten(1, (2, WIDTH // 2)),
        nn.TransformerEncoderLayer(WIDTH // 2, 1, 8, batch_first=True),
        nn.Flatten(),
        linear(),
        nn.LayerNorm(WIDTH),
    ],
}


def assert_exact(report: Report, *, beside: bool = True) -> None:
    """Bits everywhere in the pipe; schedules that split backward add gradients up otherwise."""
    assert report.pipe_ok, report
    assert report.ok or not beside, report
    for run in report.runs:
        if run.kind != "pipe" or run.not_applicable:
            continue
        splits = run.name.startswith(("zb", "v_", "dualpipev", "interleaved_zero"))
        for column in COLUMNS:
            exact = getattr(run, column).status in ("equal", "none")
            assert exact or (splits and column == "gradients"), f"{run.name} {column}\n{report}"


@pytest.mark.parametrize("balance", [[2, 3], [1, 3, 1], [2, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_bit(name: str, balance: list[int]) -> None:
    pipe = pipe_of(*MODELS[name](), balance=balance)
    assert_exact(verify(pipe, *batch(11), loss_fn=F.cross_entropy))


@settings(max_examples=30)
@given(data=st.data())
def test_any_pipe_of_a_clean_model_is_ok(data: st.DataObject) -> None:
    layers = MODELS[data.draw(st.sampled_from(list(MODELS)))]()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(layers) - 1), max_size=3)))
    ends = [0, *cuts, len(layers)]
    pipe = pipe_of(
        *layers,
        balance=[b - a for a, b in pairwise(ends)],
        chunks=data.draw(st.integers(1, 5)),
        checkpoint=data.draw(st.sampled_from(["always", "except_last", "never"])),
    )
    schedule = data.draw(st.sampled_from(["naive", "gpipe", "1f1b", "zb_h1"]))
    x, y = batch(data.draw(st.integers(4, 13)))
    y[: data.draw(st.integers(0, 3))] = -100
    assert_exact(verify(pipe, x, y, loss_fn=F.cross_entropy, schedules=[schedule]))


def test_deferred_batch_norm() -> None:
    layers = [linear(), nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH)]
    report = verify(pipe_of(*layers, deferred_batch_norm=True), *batch(), loss_fn=F.cross_entropy)
    assert_exact(report, beside=False)
    assert "BatchNorm sees micro-batches" in str(report)


@pytest.mark.parametrize("devices", [FOUR, ROUND, V], ids=["four", "round", "v"])
def test_every_schedule_runs_where_the_devices_allow_it(devices: list[str]) -> None:
    pipe = pipe_of(linear(), linear(), nn.Dropout(), linear(), balance=[1] * 4, devices=devices)
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy)
    assert_exact(report)
    numbers = [devices.index(device) for device in devices]
    for name in SCHEDULES:
        fits = name in fitting(numbers)
        assert bool(report[name].not_applicable) is not fits
        assert report[name].outputs.status == ("equal" if fits else "none")


@given(seed=st.integers(0, 999), n=st.integers(2, 4))
@settings(max_examples=15)
def test_stages_that_go_back_in_orders_of_their_own(seed: int, n: int) -> None:
    schedule = any_schedule(4, range(n), seed=seed, halves=False, in_order=True)
    pipe = pipe_of(*(linear() for _ in range(n)), balance=[1] * n)
    report = verify(pipe, *batch(11), loss_fn=F.cross_entropy, schedules=[schedule])
    assert report.runs[-1].ok, report
    assert report.runs[-1].outputs.status == "equal"


def test_gradients_that_are_one_tensor() -> None:
    report = verify(pipe_of(linear(), TwoBiases(), linear()), *batch(4), loss_fn=F.cross_entropy)
    assert_exact(report)


def tied() -> list[nn.Module]:
    embedding, block, head = nn.Embedding(9, WIDTH), linear(), nn.Linear(WIDTH, 9, bias=False)
    head.weight = embedding.weight
    return [embedding, nn.Dropout(0.1), block, nn.Tanh(), block, head]


@pytest.mark.parametrize("balance", [[3, 3], [2, 2, 2], [1] * 6], ids=str)
def test_tied_weights(balance: list[int]) -> None:
    x = torch.randint(9, (11,))
    report = verify(pipe_of(*tied(), balance=balance), x, x, loss_fn=F.cross_entropy)
    assert report["pipe(x)"].ok  # a weight that is used twice is added up in another order
    report.runs.remove(report["pipe(x)"])
    assert_exact(report)


def test_functions_and_layers_that_take_several_values() -> None:
    class Mixes(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b

    layers = [Mixes(), torch.tanh, linear()]
    pipe = Pipe(layers, [2, 1], devices=["cpu:0", "cpu:1"], chunks=3, unpack=True)
    x, y = batch(9)
    assert_exact(verify(pipe, (x, x + 1), y, loss_fn=F.cross_entropy))


def test_a_model_that_was_converted() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = linear(), nn.Dropout(), linear()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.last(self.drop(self.first(x)) * mask + x)

    x, y = batch()
    layers = sequential(Masked(), x, mask=x > 0)
    pipe = pipe_of(*layers, balance=[1, len(layers) - 1])
    assert_exact(verify(pipe, {"x": x, "mask": x > 0}, y, loss_fn=F.cross_entropy))


def test_trees_and_targets_by_key() -> None:
    class First(nn.Module):
        def forward(self, d: Any) -> Any:
            return d["x"] * d["scale"], d["ids"]

    class Second(nn.Module):
        def forward(self, pair: Any) -> Tensor:
            return pair[0] * pair[1][:, None].float()

    x, y = batch()
    scale = NoChunk(torch.randn(WIDTH))
    given = {"x": x, "scale": scale, "ids": torch.arange(12), "labels": y}
    pipe = pipe_of(First(), Second(), linear(), balance=[1, 2])
    report = verify(pipe, given, "labels", loss_fn=F.cross_entropy)
    assert_exact(report)
    assert report["1f1b"].input_gradients.status == "equal"


@pytest.mark.parametrize("threads", [1, 2])
def test_with_so_many_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wide = [nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, WIDTH)]
        assert_exact(verify(pipe_of(*wide), *batch(203), loss_fn=F.cross_entropy))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert verify(pipe_of(*MODELS["plain"]()), *batch(), loss_fn=F.cross_entropy).ok


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_loss_with_weight_and_metrics(checkpoint: str) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        kept = (target != -100).sum()
        return F.cross_entropy(output, target), kept, {"kept": kept}

    x, y = batch()
    y[:5] = -100
    pipe = pipe_of(*MODELS["dropout"](), checkpoint=checkpoint)
    assert_exact(verify(pipe, x, y, loss_fn=loss_fn))


def test_a_random_loss_is_not_compared_with_that_of_the_mini_batch() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(output), target)

    report = verify(pipe_of(*MODELS["plain"]()), *batch(), loss_fn=loss_fn)
    assert_exact(report)
    assert report["loss of each micro-batch"].loss.status == "none"
    assert "loss_fn draws random numbers" in report.notes[0]


def test_parameters_of_the_loss_are_compared_too() -> None:
    head, pipe = linear(), pipe_of(*MODELS["plain"]())
    report = verify(pipe, *batch(), loss_fn=lambda y, t: F.cross_entropy(head(y), t))
    assert_exact(report)
    assert head.weight.grad is None


def test_a_pipe_in_eval_mode_says_so() -> None:
    pipe: Pipe = pipe_of(*MODELS["dropout"]()).eval()
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy)
    assert_exact(report)
    assert report["loss of each micro-batch"].loss.status in ("equal", "rounding")
    assert report["micro-batches"].outputs.status in ("equal", "rounding")
    assert "eval() mode" in str(report)
    assert not pipe.training


def test_outputs_with_a_number_in_them() -> None:
    class WithAuxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            return {"logits": y, "aux": y.square().mean()}

    pipe = pipe_of(linear(), nn.Tanh(), WithAuxiliary())
    report = verify(
        pipe, *batch(), loss_fn=lambda o, t: F.cross_entropy(o["logits"], t) + 0.1 * o["aux"]
    )
    assert report.ok, report
    assert report["1f1b"].gradients.status == "equal"
    assert "without dimensions" in report["pipe(x)"].not_applicable
    report = verify(
        pipe, *batch(), loss_fn=lambda o, t: F.cross_entropy(o["logits"], t) + o["aux"].sqrt()
    )
    assert report.pipe_ok
    assert not report.ok  # the root of a mean is no mean
