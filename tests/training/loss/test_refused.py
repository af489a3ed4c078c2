"""Losses and arguments that make no sense are refused, without a trace in ``.grad``."""

from __future__ import annotations

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
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused(name):
    loss_fn, kind, message = REFUSED[name]
    pipe = four()
    with pytest.raises(kind, match=message):
        pipe.train_batch(torch.randn(4, 3), loss_fn=loss_fn)
    assert grads_of(pipe) == [None] * 8


def test_weights_and_sums_do_not_go_together():
    pipe = four()
    with pytest.raises(ValueError, match="loss_reduction='sum'"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=lambda y: (y.sum(), 1), loss_reduction="sum")
    assert grads_of(pipe) == [None] * 8


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
