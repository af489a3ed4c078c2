"""What the loss function is given, what it may use, what comes back, and what is refused."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import NoChunk, Pipe
from tests.support.running import assert_same
from tests.support.training import FOUR, assert_trains_as
from tests.training.loss.whole import four, grads_of

TREE = {
    "a": torch.arange(5),
    "b": (torch.arange(5.0), None),
    "whole": NoChunk(torch.arange(3)),
    "word": "x",
}
CUT = [
    {"a": a, "b": (a.float(), None), "whole": torch.arange(3), "word": "x"}
    for a in torch.arange(5).chunk(2)
]


@pytest.mark.parametrize(
    ("target", "expected"),
    [(TREE, CUT), (7, [7] * 2), ("x", ["x"] * 2), (NoChunk(X := torch.arange(2)), [X] * 2)],
)
def test_targets_are_trees_that_are_cut_like_the_input(target, expected):
    pipe, seen = four(chunks=2), []
    pipe.train_batch(
        torch.randn(5, 3), target, verify=False, loss_fn=lambda y, t: seen.append(t) or y.sum()
    )
    assert_same(seen, expected, "targets")


class Aside(nn.Linear):
    """Puts something aside that goes back."""

    aux: Tensor

    def forward(self, x):
        y = torch.tanh(super().forward(x))
        Aside.aux = y.pow(2).mean()
        return y


def with_aside(output, target):
    return F.mse_loss(output, target) + Aside.aux


def aside_pipe(k, devices, checkpoint):
    """Three stages, of which the one with index ``k`` puts something aside; and its layers."""
    layers = nn.Sequential(*((Aside if j == k else nn.Linear)(4, 4) for j in range(3)))
    plain = copy.deepcopy(layers)
    return Pipe(layers, [1] * 3, devices=devices, chunks=4, checkpoint=checkpoint), plain


on_devices = pytest.mark.parametrize("devices", [["cpu"] * 3, FOUR[:3]], ids=["one", "three"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@on_devices
def test_loss_fn_may_use_what_layers_of_the_last_stage_put_aside(devices, schedule):
    pipe, plain = aside_pipe(2, devices, "never")
    x, y = torch.randn(2, 8, 4)
    assert_trains_as(pipe, plain, x, y, loss_fn=with_aside, schedule=schedule, verify=False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@on_devices
@pytest.mark.parametrize(("k", "checkpoint"), [(1, "never"), (1, "always"), (2, "always")])
def test_what_would_be_lost_is_refused(k, checkpoint, devices, schedule):
    pipe, _ = aside_pipe(k, devices, checkpoint)
    with pytest.raises(RuntimeError, match="with its graph"):
        pipe.train_batch(*torch.randn(2, 8, 4), loss_fn=with_aside, schedule=schedule)
    assert grads_of(pipe) == [None] * 6


def test_losses_go_back_as_they_were_returned_whatever_loss_fn_does_with_them_later():
    pipe, _ = aside_pipe(None, ["cpu"] * 3, "never")
    kept = []

    def loss_fn(output, target):
        for loss in kept:
            loss.mul_(3)
        kept.append(F.mse_loss(output, target))
        return kept[-1]

    x, y = torch.randn(2, 8, 4)
    other = copy.deepcopy(pipe)
    for each, function in ((pipe, loss_fn), (other, F.mse_loss)):
        each.train_batch(x, y, loss_fn=function, schedule="gpipe", verify=False)
    assert_same(grads_of(pipe), grads_of(other))


def test_outputs_are_what_loss_fn_made_of_them():
    _, outputs = four().train_batch(ROWS, loss_fn=lambda y: y.mul_(0).sum(), return_outputs=True)
    assert not outputs.any()


def twice(first: Any, then: Any) -> Any:
    given = iter([first, then, then, then])
    return lambda y: next(given)(y)


ROWS = torch.randn(4, 3)
MSE_SUM, NONE = nn.MSELoss(reduction="sum"), nn.MSELoss(reduction="none")

#: What the loss function returns, of the output alone.
RETURNED: list[tuple[Any, type[Exception], str]] = [
    (lambda y: y, ValueError, r"float32\[1, 3\].*reduction='sum'|one floating"),
    (lambda y: y.sum().long(), ValueError, "int64"),
    (lambda y: 3.5, TypeError, "float"),
    (lambda y: None, TypeError, "NoneType"),
    (lambda y: (y.sum(), 1, 2), ValueError, "tuple of 3"),
    (lambda y: (1, y.sum()), TypeError, "int"),
    (twice(lambda y: y.sum(), lambda y: (y.sum(), 1)), ValueError,
     "a loss with a weight for micro-batch 1, and a loss for the first"),
    (twice(lambda y: (y.sum(), 1), lambda y: y.sum()), ValueError,
     "a loss for micro-batch 1, and a loss with a weight for the first"),
    (lambda y: (y.sum(), y.mean()), ValueError, "weight.*requires grad"),
    (lambda y: (y.sum(), torch.ones(2)), ValueError, r"weight float32\[2\]"),
    (lambda y: (y.sum(), "1"), TypeError, "weight of type str"),
    (lambda y: y.detach().sum(), RuntimeError, "does not require grad"),
    (twice(lambda y: (y.mean(), {"a": 1.0}), lambda y: (y.mean(), {"b": 1.0})), ValueError,
     r"metrics \['b'\] for micro-batch 1, and a loss and metrics \['a'\] for"),
]  # fmt: skip
#: What does not go together, for a loss of output and target.
TOGETHER: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loss_fn": lambda y, t: (y.sum(), 1), "loss_reduction": "sum"}, ValueError,
     "loss_reduction='sum'"),
    ({"loss_fn": MSE_SUM, "weight": lambda t: 1.0}, ValueError, "weight is for losses that are"),
    ({"loss_fn": lambda y, t: (y.mean(), 1), "weight": lambda t: 1.0}, ValueError,
     "weight= is given"),
    ({"loss_fn": NONE}, ValueError, "use reduction='mean' or reduction='sum'"),
    ({"loss_fn": partial(F.mse_loss, reduction="none")}, ValueError, "use reduction='mean'"),
    ({"loss_fn": MSE_SUM, "loss_reduction": "mean"}, ValueError,
     "loss_reduction='mean', but loss_fn has reduction='sum'"),
    ({"loss_fn": nn.MSELoss}, TypeError, r"give an instance, loss_fn=MSELoss\(...\)"),
    ({"grad_scaler": 3}, TypeError, "grad_scaler"),
    *[({"accumulate": a}, ValueError, "accumulate=") for a in (0, -1, math.nan, math.inf, "2")],
    ({"weight": [1, 2]}, ValueError, "weight has 2 numbers, but there are 4 micro-batches"),
    ({"weight": [1, 1, 1, -1]}, ValueError, "weight of -1.0"),
    ({"weight": lambda t: math.nan}, ValueError, "weight of nan"),
    ({"weight": lambda t: "many"}, TypeError, "weight of type str"),
    ({"weight": lambda t: torch.ones(2)}, ValueError, r"weight float32\[2\], not one number"),
    ({"weight": lambda t: None}, TypeError, "weight of type NoneType"),
    ({"weight": 3}, TypeError, "weight must be a function of the target, or a number for each"),
]  # fmt: skip
SUM, MSE = {"loss_fn": torch.sum}, {"loss_fn": F.mse_loss}
#: What neither training nor evaluation takes.
NEITHER: list[tuple[Any, dict[str, Any], Any, str]] = [
    ((ROWS,), {"loss_fn": "mse"}, TypeError, "loss_fn must be callable.*str"),
    ((ROWS,), {**SUM, "loss_reduction": "average"}, ValueError, "='average'.*'mean', 'sum'"),
    ((ROWS,), {**SUM, "data_iter": iter([])}, ValueError, "data_iter"),
    ((None, ROWS), {**SUM, "data_iter": iter([])}, ValueError, "data_iter"),
    ((), {**SUM, "data_iter": [1]}, TypeError, r"must be an iterator, not list.*iter\("),
    ((), SUM, (TypeError, ValueError), "data_iter"),
    *[((torch.randn(8, 3), torch.randn(rows, 3)), MSE, ValueError,
       rf"(?s)float32\[8, 3\].*target: float32\[{rows}, 3\]") for rows in (7, 9, 1)],
]  # fmt: skip
REFUSED = [
    *[("train_batch", (ROWS,), {"loss_fn": loss_fn}, *error) for loss_fn, *error in RETURNED],
    *[("train_batch", (ROWS, ROWS), {**MSE, **options}, *error) for options, *error in TOGETHER],
    *[(call, *row) for row in NEITHER for call in ("train_batch", "eval_batch")],
    ("eval_batch", (ROWS, ROWS), {}, ValueError, "loss_fn"),
]


@pytest.mark.parametrize(("call", "given", "options", "kind", "message"), REFUSED)
def test_what_is_no_loss_or_does_not_go_together_is_refused(call, given, options, kind, message):
    pipe = four()
    with pytest.raises(kind, match=message):
        getattr(pipe, call)(*given, **options)
    assert grads_of(pipe) == [None] * 8
    pipe.train_batch(ROWS, ROWS, loss_fn=F.mse_loss)


def test_an_error_in_the_function_of_the_target_is_its_own():
    with pytest.raises(ZeroDivisionError) as caught:
        four().train_batch(ROWS, ROWS, loss_fn=F.mse_loss, weight=lambda t: 1 / 0)
    assert "in weight, for the target of micro-batch 0" in caught.value.__notes__


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_a_pipe_without_layers_is_refused(call):
    with pytest.raises(ValueError, match="no layers"):
        getattr(Pipe(nn.Sequential(), []), call)(ROWS, loss_fn=torch.sum)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_without_grad_mode_is_refused(context):
    with context(), pytest.raises(RuntimeError, match="eval_batch"):
        four().train_batch(ROWS, loss_fn=torch.sum)


def test_a_pipe_of_frozen_layers_has_nothing_to_train():
    pipe = four().requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=torch.sum)
    x = torch.randn(4, 3, requires_grad=True)
    pipe.train_batch(x, loss_fn=torch.sum)  # but for its input
    assert x.grad is not None
