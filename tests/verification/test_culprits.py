"""Models with a fault each: the report names the layer and the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import is_recomputing, verify
from syncpipe.verification.report import Report
from tests.support.skips import Receive
from tests.verification.models import (
    WIDTH,
    Center,
    Counter,
    Elsewhere,
    Memory,
    OwnGenerator,
    Scale,
    Send,
    batch,
    linear,
    pipe_of,
)


def reasons(report: Report, run: str) -> list[tuple[str, str]]:
    """Where a run differs, and why."""
    assert not report.ok
    found = [(f.where, f.reason) for f in report.findings if run in f.runs]
    assert all(reason in " ".join(str(report).split()) for _, reason in found)
    return found


def test_batch_norm() -> None:
    pipe = pipe_of(linear(), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU()), linear())
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy)
    [(where, reason)] = reasons(report, "micro-batches")
    assert where == "layer 1 ('1': Sequential)"
    assert reason.startswith("BatchNorm sees micro-batches ('0': BatchNorm1d)")
    assert report.pipe_ok


def test_batch_norm_beside_dropout() -> None:
    pipe = pipe_of(nn.Dropout(), linear(), nn.Dropout(), nn.BatchNorm1d(WIDTH), linear())
    [(where, reason)] = reasons(verify(pipe, *batch(), loss_fn=F.cross_entropy), "micro-batches")
    assert where == "layer 3 ('3': BatchNorm1d)"
    assert "BatchNorm sees micro-batches" in reason


def test_batch_norm_with_one_sample_left() -> None:
    pipe = pipe_of(linear(), nn.BatchNorm1d(WIDTH), linear())
    report = verify(pipe, *batch(13), loss_fn=F.cross_entropy)
    [(_, reason)] = reasons(report, "micro-batches")
    assert "drop_last" in reason
    assert "in layer 1 ('1': BatchNorm1d), micro-batch 3" in report["1f1b"].error


def test_samples_that_look_at_each_other() -> None:
    report = verify(pipe_of(linear(), Center(), linear()), *batch(), loss_fn=F.cross_entropy)
    [(where, reason)] = reasons(report, "micro-batches")
    assert where == "layer 1 ('1': Center)"
    assert "depends on the other samples" in reason
    assert report.pipe_ok


def test_masked_loss() -> None:
    x, y = batch()
    y[:2] = y[5] = -100
    pipe = pipe_of(linear(), linear(), linear())
    report = verify(pipe, x, y, loss_fn=lambda o, t: F.cross_entropy(o, t))
    [(where, reason)] = reasons(report, "loss of each micro-batch")
    assert where == ""
    assert "no mean over samples" in reason
    assert "weight=" in reason
    assert report.pipe_ok
    assert report["micro-batches"].ok

    def kept(target: Tensor) -> Any:
        return (target != -100).sum()

    assert verify(pipe, x, y, loss_fn=lambda o, t: F.cross_entropy(o, t), weight=kept).ok


@pytest.mark.parametrize(("taken_for", "is_a"), [("mean", "sum"), ("sum", "mean")])
def test_a_sum_that_was_taken_for_a_mean(taken_for: str, is_a: str) -> None:
    pipe = pipe_of(linear(), linear(), linear())
    report = verify(
        pipe,
        *batch(),
        loss_fn=lambda o, t: F.cross_entropy(o, t, reduction=is_a),
        loss_reduction=taken_for,
    )
    [(_, reason)] = reasons(report, "loss of each micro-batch")
    assert f"loss_reduction={is_a!r}" in reason


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_generator_of_its_own(schedule: str) -> None:
    pipe = pipe_of(linear(), OwnGenerator(), linear())
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy, schedules=[schedule])
    for run in ("pipe(x)", schedule):
        [(where, reason)] = reasons(report, run)
        assert where.startswith("layer 1 ('1': OwnGenerator)")
        assert reason.startswith("it draws from a generator of its own (source)")
    assert verify(
        pipe_of(linear(), OwnGenerator(), linear(), checkpoint="never"),
        *batch(),
        loss_fn=F.cross_entropy,
    ).pipe_ok


def test_a_counter() -> None:
    pipe = pipe_of(linear(), linear(), Counter(), linear())
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy)
    for run in ("micro-batches", "pipe(x)", "1f1b"):
        [(where, reason)] = reasons(report, run)
        assert where.startswith("layer 2 ('2': Counter)")
        assert reason.startswith("it keeps state (count changes in forward)")


def test_state_that_does_no_harm_is_no_fault() -> None:
    assert (
        verify(pipe_of(linear(), Memory(), linear()), *batch(), loss_fn=F.cross_entropy)[
            "1f1b"
        ].gradients.status
        == "equal"
    )


def test_a_layer_that_works_in_place_on_what_others_use() -> None:
    pipe = pipe_of(Send(), Scale(), linear(), Receive(), balance=[1, 3])
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy)
    assert report["micro-batches"].ok
    [(_, reason)] = reasons(report, "1f1b")
    assert reason.startswith("a layer works in place: layer 1 ('1': Scale)")
    assert report["1f1b"].error.startswith("RuntimeError")
    assert verify(
        pipe_of(Send(), Scale(), linear(), Receive(), balance=[2, 2]),
        *batch(),
        loss_fn=F.cross_entropy,
    ).ok


def test_a_buffer_that_backward_needs() -> None:
    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rate", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.rate += 0.1
            return x * self.rate

    pipe = pipe_of(linear(), Drifting(), linear())
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy)
    [(where, reason)] = reasons(report, "micro-batches")
    assert where == "layer 1 ('1': Drifting)"
    assert "(rate) that its output depends on" in reason
    assert report["1f1b"].ok  # one after the other it works


def test_something_that_is_in_no_module() -> None:
    report = verify(pipe_of(linear(), Elsewhere(), linear()), *batch(), loss_fn=F.cross_entropy)
    [(where, reason)] = reasons(report, "1f1b")
    assert where == "layer 1 ('1': Elsewhere)"
    assert "does not give the same twice" in reason


def test_an_error_that_comes_in_the_pipe_only() -> None:
    class Once(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                raise ZeroDivisionError("only once")
            return x * 1

    report = verify(pipe_of(linear(), Once(), linear()), *batch(), loss_fn=F.cross_entropy)
    assert report["pipe(x)"].error.startswith("ZeroDivisionError: only once")
    [finding] = report.findings
    assert {"pipe(x)", "gpipe", "1f1b"} <= set(finding.runs)
    assert "FAILED" in str(report)
