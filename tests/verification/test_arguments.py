"""What ``verify`` takes, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe, verify
from syncpipe.schedules import one_f_one_b
from tests.verification.models import batch, linear, pipe_of


def refused(error: type[Exception], message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(error, match=message):
        verify(*args, **{"loss_fn": F.cross_entropy, **options})


def test_what_does_not_fit_is_refused() -> None:
    pipe, (x, y) = pipe_of(linear(), linear(), linear()), batch()
    refused(TypeError, "takes a syncpipe.Pipe, not Sequential", nn.Sequential(), x, y)
    refused(ValueError, "no layers", Pipe(nn.Sequential(), [], devices=["cpu:0"]), x, y)
    refused(TypeError, "is a class", pipe, x, y, loss_fn=nn.CrossEntropyLoss)
    refused(ValueError, "did you mean 'gpipe'", pipe, x, y, schedules=["gpip"])
    refused(TypeError, "must be a name", pipe, x, y, schedules=[3])
    refused(ValueError, "neither an input", pipe, None)
    refused(ValueError, "cannot be cut", pipe, x, y[:5])
    refused(ValueError, "loss is one floating-point number", pipe, x, y, loss_fn=lambda o, t: o)


def test_a_lazy_layer_is_refused() -> None:
    pipe = pipe_of(nn.LazyLinear(6), linear(), linear())
    refused(ValueError, r"0\.(weight|bias) is a lazy parameter.*run the model once", pipe, *batch())


def test_what_the_layers_raise_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught:
        verify(pipe_of(linear(), linear(), nn.Linear(3, 3)), *batch(), loss_fn=F.cross_entropy)
    notes = " ".join(caught.value.__notes__)
    assert "layer 2 ('2': Linear)" in notes
    assert "on the whole mini-batch" in notes


def test_the_schedules_that_are_asked_for() -> None:
    pipe, data = pipe_of(linear(), linear(), linear()), batch()
    report = verify(pipe, *data, loss_fn=F.cross_entropy, schedules=["zbv", "gpipe"])
    assert [run.name for run in report.runs[3:]] == ["zbv", "gpipe"]
    assert "two stages on each device" in report["zbv"].not_applicable
    assert "not run: zbv (needs two stages" in str(report)
    with pytest.raises(KeyError, match="the runs are"):
        report["1f1b"]
    own = partial(one_f_one_b, slots="overlap")
    assert len(verify(pipe, *data, loss_fn=F.cross_entropy, schedules=own).runs) == 4
    pipe.schedule = own
    report = verify(pipe, *data, loss_fn=F.cross_entropy)
    assert report["partial(one_f_one_b, slots='overlap')"].outputs.status == "equal"


@pytest.mark.parametrize(("chunks", "devices"), [(1, ["cpu:0", "cpu:1"]), (3, ["cpu", "cpu"])])
def test_one_micro_batch_or_one_device(chunks: int, devices: list[str]) -> None:
    pipe = pipe_of(linear(), nn.Dropout(), linear(), chunks=chunks, devices=devices)
    report = verify(pipe, *batch(), loss_fn=F.cross_entropy)
    assert report.ok
    assert str(report).splitlines()[-1].startswith("OK: the pipe computes")


def test_the_report_is_a_page() -> None:
    report = verify(pipe_of(linear(), linear(), linear()), *batch(), loss_fn=F.cross_entropy)
    lines = str(report).splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 100
    assert "balance=[2, 1], 4 micro-batches, checkpoint='except_last'" in lines[0]


def test_hooks_of_partitions_run_plainly_too() -> None:
    pipe = pipe_of(linear(), nn.Dropout(), linear())
    pipe.partitions[0].register_forward_hook(lambda module, args, output: output * 2)
    assert verify(pipe, *batch(), loss_fn=F.cross_entropy).ok
    assert "forward" not in vars(pipe.partitions[0])


def test_a_loss_is_checked_in_the_first_call_as_ever() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    pipe, (x, y) = pipe_of(linear(), linear(), linear()), batch()
    y[:2] = -100
    assert verify(pipe, x, y, loss_fn=loss_fn, weight=lambda t: (t != -100).sum()).ok
    with pytest.warns(UserWarning, match="weight="):
        pipe.train_batch(x, y, loss_fn=loss_fn)


def test_no_target() -> None:
    pipe = pipe_of(linear(), linear(), linear())
    assert verify(pipe, torch.randn(8, 6), loss_fn=lambda y: y.square().mean()).ok


def test_a_target_that_needs_a_gradient() -> None:
    pipe, y = pipe_of(linear(), linear(), linear()), torch.randn(8, 6, requires_grad=True)
    report = verify(pipe, torch.randn(8, 6), y, loss_fn=F.mse_loss)
    assert report.ok, report
    assert y.grad is None
