"""Losses and arguments that make no sense are refused, without a trace in ``.grad``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.training.loss.whole import four, grads_of


@pytest.mark.parametrize("rows", [3, 5, 1])
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_targets_of_another_number_of_samples_are_refused(call, rows):
    pipe = four(chunks=2)
    with pytest.raises(ValueError, match="target") as caught:
        getattr(pipe, call)(torch.randn(4, 3), torch.randn(rows, 3), loss_fn=F.mse_loss)
    assert f"float32[{rows}, 3]" in str(caught.value)
    assert "float32[4, 3]" in str(caught.value)


def twice(first: Any, then: Any) -> Any:
    given = iter([first, then, then, then])
    return lambda y: next(given)(y)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no scalar": (lambda y: y, ValueError, r"float32\[1, 3\].*reduction='sum'|one floating"),
    "integer": (lambda y: y.sum().long(), ValueError, "int64"),
    "no tensor": (lambda y: 3.5, TypeError, "float"),
    "nothing": (lambda y: None, TypeError, "NoneType"),
    "three": (lambda y: (y.sum(), 1, 2), ValueError, "tuple of 3"),
    "weight and no loss": (lambda y: (1, y.sum()), TypeError, "int"),
    "weight later": (
        twice(lambda y: y.sum(), lambda y: (y.sum(), 1)), ValueError, "some micro-batches only"
    ),
    "weight only first": (
        twice(lambda y: (y.sum(), 1), lambda y: y.sum()), ValueError, "some micro-batches only"
    ),
    "weight with a graph": (lambda y: (y.sum(), y.mean()), ValueError, "weight.*requires grad"),
    "weight of many": (lambda y: (y.sum(), torch.ones(2)), ValueError, r"weight float32\[2\]"),
    "weight a word": (lambda y: (y.sum(), "1"), TypeError, "weight of type str"),
    "no grad": (lambda y: y.detach().sum(), RuntimeError, "does not require grad"),
    "other metrics": (
        twice(lambda y: (y.mean(), {"a": 1.0}), lambda y: (y.mean(), {"b": 1.0})), ValueError,
        r"metrics \['b'\] for micro-batch 1, and \['a'\] for the",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused(name):
    loss_fn, kind, message = REFUSED[name]
    pipe = four()
    with pytest.raises(kind, match=message):
        pipe.train_batch(torch.randn(4, 3), loss_fn=loss_fn)
    assert grads_of(pipe) == [None] * 8


Y = torch.randn(4, 3)
MSE_SUM, NONE = nn.MSELoss(reduction="sum"), nn.MSELoss(reduction="none")
OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weight of a sum": (
        {"loss_fn": lambda y, t: (y.sum(), 1), "loss_reduction": "sum"}, ValueError,
        "loss_reduction='sum'",
    ),
    "weight= of a sum": (
        {"loss_fn": MSE_SUM, "weight": lambda t: 1.0}, ValueError, "weight is for losses that are"
    ),
    "weights from two sides": (
        {"loss_fn": lambda y, t: (y.mean(), 1), "weight": lambda t: 1.0}, ValueError,
        "train_batch was given one",
    ),
    "no reduction": ({"loss_fn": NONE}, ValueError, "use reduction='mean' or reduction='sum'"),
    "nor of a partial": (
        {"loss_fn": partial(F.mse_loss, reduction="none")}, ValueError, "use reduction='mean'"
    ),
    "two reductions": (
        {"loss_fn": MSE_SUM, "loss_reduction": "mean"}, ValueError,
        "loss_reduction='mean', but loss_fn has reduction='sum'",
    ),
    "a class": ({"loss_fn": nn.MSELoss}, TypeError, r"give an instance, loss_fn=MSELoss\(...\)"),
    "a scaler that is none": ({"loss_fn": F.mse_loss, "grad_scaler": 3}, TypeError, "grad_scaler"),
    **{
        f"accumulate={number}": (
            {"loss_fn": F.mse_loss, "accumulate": number}, ValueError, "accumulate="
        )
        for number in (0, -1, float("nan"), float("inf"), "2", None)
    },
    **{
        f"weight: {message}": ({"loss_fn": F.mse_loss, "weight": weight}, error, message)
        for weight, error, message in [
            ([1, 2], ValueError, "weight has 2 numbers, but there are 4 micro-batches"),
            ([1, 1, 1, -1], ValueError, "weight of -1.0"),
            (lambda t: float("nan"), ValueError, "weight of nan"),
            (lambda t: "many", TypeError, "weight of type str"),
            (lambda t: torch.ones(2), ValueError, r"weight float32\[2\], not one number"),
            (lambda t: None, TypeError, "weight of type NoneType"),
            (3, TypeError, "weight must be a function of the target, or a number for each"),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_what_does_not_go_together_is_refused(name):
    options, kind, message = OPTIONS[name]
    pipe = four()
    with pytest.raises(kind, match=message):
        pipe.train_batch(torch.randn(4, 3), Y, **options)
    assert grads_of(pipe) == [None] * 8
    pipe.train_batch(torch.randn(4, 3), Y, loss_fn=F.mse_loss)


def test_an_error_in_the_function_of_the_target_is_its_own():
    with pytest.raises(ZeroDivisionError) as caught:
        four().train_batch(Y, Y, loss_fn=F.mse_loss, weight=lambda t: 1 / 0)
    assert "in weight, for the target of micro-batch 0" in caught.value.__notes__


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_arguments_that_make_no_sense_are_named(call):
    pipe, x = four(), torch.randn(4, 3)
    run = getattr(pipe, call)
    with pytest.raises(TypeError, match=r"loss_fn must be callable.*str"):
        run(x, loss_fn="mse")
    with pytest.raises(ValueError, match=r"loss_reduction='average'.*'mean', 'sum'"):
        run(x, loss_fn=torch.sum, loss_reduction="average")
    with pytest.raises(ValueError, match="data_iter"):
        run(x, loss_fn=torch.sum, data_iter=iter([]))
    with pytest.raises(ValueError, match="data_iter"):
        run(None, x, loss_fn=torch.sum, data_iter=iter([]))
    with pytest.raises(TypeError, match=r"data_iter must be an iterator, not list.*iter\("):
        run(loss_fn=torch.sum, data_iter=[(x, None)] * 4)
    with pytest.raises((TypeError, ValueError), match="data_iter"):
        run(loss_fn=torch.sum)


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_hooks_of_the_pipe_itself_are_refused_as_they_would_not_run(call):
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        pipe = four()
        getattr(pipe, register)(lambda *_: None)
        with pytest.raises(RuntimeError, match=r"pipe\.partitions"):
            getattr(pipe, call)(torch.randn(4, 3), loss_fn=torch.sum)


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_a_pipe_without_layers_is_refused(call):
    with pytest.raises(ValueError, match="no layers"):
        getattr(Pipe(nn.Sequential(), []), call)(torch.randn(4, 3), loss_fn=torch.sum)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_without_grad_mode_is_refused(context):
    pipe = four()
    with context(), pytest.raises(RuntimeError, match="eval_batch"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=torch.sum)


def test_a_pipe_of_frozen_layers_has_nothing_to_train():
    pipe = four().requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=torch.sum)
    x = torch.randn(4, 3, requires_grad=True)
    pipe.train_batch(x, loss_fn=torch.sum)  # but for its input
    assert x.grad is not None
