"""Models with a fault each: the report names the layer and the reason."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import is_recomputing, verify
from syncpipe.verification.report import Report
from tests.support.models import Counter as Changes
from tests.support.running import Do
from tests.support.skips import Receive
from tests.verification.models import (
    WIDTH,
    Counter,
    Memory,
    OwnGenerator,
    Send,
    batch,
    linear,
    pipe_of,
    scale,
)


def reasons(report: Report, run: str) -> list[tuple[str, str]]:
    """Where a run differs, and why."""
    assert not report.ok
    found = [(f.where, f.reason) for f in report.findings if run in f.runs]
    assert all(reason in " ".join(str(report).split()) for _, reason in found)
    return found


CALLS = count(1)
#: Layers with a culprit; where it is, the reason, and the runs that differ: of the plain model on
#: micro-batches, and of the pipe.
CULPRITS: dict[str, Any] = {
    "batch norm": (
        lambda: [linear(), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU()), linear()],
        "layer 1 ('1': Sequential)", "BatchNorm sees micro-batches (0: BatchNorm1d)", False,
    ),
    "batch norm beside dropout": (
        lambda: [nn.Dropout(), linear(), nn.Dropout(), nn.BatchNorm1d(WIDTH), linear()],
        "layer 3 ('3': BatchNorm1d)", "BatchNorm sees micro-batches", False,
    ),
    "samples look at each other": (
        lambda: [linear(), Do(lambda x: x - x.mean(0)), linear()],
        "layer 1 ('1': Do)", "its output for a sample depends on the other samples", False,
    ),
    "a buffer": (
        lambda: [linear(), Changes(), linear()],
        "layer 1 ('1': Counter)", "it keeps state (scale changes in forward)", False,
    ),
    "a generator": (
        lambda: [linear(), OwnGenerator(), linear()],
        "layer 1 ('1': OwnGenerator)", "it draws from a generator of its own (source)", True,
    ),
    "an attribute": (
        lambda: [linear(), linear(), Counter(), linear()],
        "layer 2 ('2': Counter)", "it keeps state (count changes in forward)", True,
    ),
    "something in no module": (
        lambda: [linear(), Do(lambda x: x * next(CALLS)), linear()],
        "layer 1 ('1': Do)", "it does not give the same twice", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CULPRITS)
def test_the_layer_and_the_reason(name: str) -> None:
    layers, where, reason, in_pipe = CULPRITS[name]
    report = verify(pipe_of(*layers()), *batch(), loss_fn=F.cross_entropy)
    for run in ("micro-batches", *(("pipe(x)", "1f1b") if in_pipe else ())):
        [found] = reasons(report, run)
        assert found[0] == where
        assert found[1].startswith(reason)
    assert report["1f1b"].ok is not in_pipe


def test_what_does_no_harm_is_no_fault() -> None:
    report = verify(pipe_of(linear(), Memory(), linear()), *batch(), loss_fn=F.cross_entropy)
    assert report["1f1b"].comparisons["gradients"].status == "equal"
    pipe = pipe_of(linear(), OwnGenerator(), linear(), checkpoint="never")
    assert verify(pipe, *batch(), loss_fn=F.cross_entropy).pipe_ok
    pipe = pipe_of(Send(), scale(), linear(), Receive(), balance=[2, 2])
    assert verify(pipe, *batch(), loss_fn=F.cross_entropy).ok


def test_masked_loss() -> None:
    x, y = batch()
    y[:2] = y[5] = -100
    pipe = pipe_of()
    report = verify(pipe, x, y, loss_fn=lambda o, t: F.cross_entropy(o, t))
    [(where, reason)] = reasons(report, "loss of each micro-batch")
    assert where == ""
    assert "no mean over samples" in reason
    assert "weight=" in reason
    assert "verify=False" not in reason
    assert report.pipe_ok
    assert report["micro-batches"].ok

    def kept(target: Tensor) -> Any:
        return (target != -100).sum()

    assert verify(pipe, x, y, loss_fn=lambda o, t: F.cross_entropy(o, t), weight=kept).ok


@pytest.mark.parametrize(("taken_for", "is_a"), [("mean", "sum"), ("sum", "mean")])
def test_a_sum_that_was_taken_for_a_mean(taken_for: str, is_a: str) -> None:
    loss_fn = lambda o, t: F.cross_entropy(o, t, reduction=is_a)  # noqa: E731
    report = verify(pipe_of(), *batch(), loss_fn=loss_fn, loss_reduction=taken_for)
    [(_, reason)] = reasons(report, "loss of each micro-batch")
    assert "loss_reduction=" in reason


def fails_again(x: Tensor) -> None:
    if is_recomputing():
        raise ZeroDivisionError("only once")


def test_errors_that_come_in_some_runs_only() -> None:
    report = verify(pipe_of(linear(), Do(fails_again), linear()), *batch(), loss_fn=F.cross_entropy)
    assert report["pipe(x)"].error.startswith("ZeroDivisionError: only once")
    [finding] = report.findings
    assert {"pipe(x)", "gpipe", "1f1b"} <= set(finding.runs)
    assert "FAILED" in str(report)
    pipe = pipe_of(linear(), nn.BatchNorm1d(WIDTH), linear())
    report = verify(pipe, *batch(13), loss_fn=F.cross_entropy)
    [(_, reason)] = reasons(report, "micro-batches")
    assert "drop_last" in reason
    assert "in layer 1 ('1': BatchNorm1d), micro-batch 3" in report["1f1b"].error
    pipe = pipe_of(Send(), scale(), linear(), Receive(), balance=[1, 3])
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy)
    assert report["micro-batches"].ok
    [(_, reason)] = reasons(report, "1f1b")
    assert reason.startswith("a layer works in place: layer 1 ('1': Do)")
    assert report["1f1b"].error.startswith("RuntimeError")
