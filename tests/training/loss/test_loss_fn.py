"""What the loss function is given, what it may use, what comes back, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import NoChunk, Pipe
from tests.support.models import CHECKPOINT_MODES, assert_same_tree, linear_model
from tests.support.training import KINDS, RUNS
from tests.training.loss.whole import four, grads_of, whole


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_the_loss_function_is_called_once_a_micro_batch_in_order(run, checkpoint):
    seen = []

    def loss_fn(y, t):
        seen.append(int(t[0]))
        return y.sum()

    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=4, checkpoint=checkpoint)
    pipe.train_batch(
        torch.randn(4, 3), torch.arange(4), loss_fn=loss_fn, verify=False, **RUNS[run][0]
    )
    assert seen == [0, 1, 2, 3]


def test_targets_are_trees_that_are_cut_like_the_input():
    pipe, seen = four(chunks=2), []
    target = {
        "a": torch.arange(5),
        "b": (torch.arange(5.0), None),
        "whole": NoChunk(torch.arange(3)),
        "word": "x",
    }

    def loss_fn(y, t):
        seen.append(t)
        return y.sum()

    pipe.train_batch(torch.randn(5, 3), target, loss_fn=loss_fn, verify=False)
    expected = [
        {"a": a, "b": (a.float(), None), "whole": torch.arange(3), "word": "x"}
        for a in torch.arange(5).chunk(2)
    ]
    assert_same_tree(seen, expected, "targets")


@pytest.mark.parametrize("target", [7, "x", NoChunk(torch.arange(2))])
def test_a_target_without_anything_to_cut_goes_to_every_micro_batch(target):
    pipe, seen = four(), []
    pipe.train_batch(
        torch.randn(4, 3), target, verify=False, loss_fn=lambda y, t: seen.append(t) or y.sum()
    )
    assert_same_tree(seen, [getattr(target, "tensor", target)] * 4, "targets")


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_target_may_need_a_gradient(checkpoint):
    pipe = four(checkpoint=checkpoint)
    x, target = torch.randn(8, 3), torch.randn(8, 3, requires_grad=True)
    loss, _ = whole(pipe, lambda plain: F.mse_loss(plain(x), target))
    expected, target.grad = target.grad, None
    torch.testing.assert_close(pipe.train_batch(x, target, loss_fn=F.mse_loss), loss)
    torch.testing.assert_close(target.grad, expected)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_outputs_come_back_gathered_and_detached(run, checkpoint):
    class Two(nn.Module):
        def forward(self, x):
            return {"y": x * 2, "rest": [x.detach() > 0, None, "word"]}

    layers = nn.Sequential(*linear_model(3), Two())
    pipe = Pipe(layers, [1, 1, 1, 1], devices=RUNS[run][1], chunks=3, checkpoint=checkpoint)
    x = torch.randn(7, 3)
    expected = [layers(piece) for piece in x.chunk(3)]
    loss, output = pipe.train_batch(
        x, loss_fn=lambda y: y["y"].sum(), return_outputs=True, **RUNS[run][0]
    )
    assert loss.shape == ()
    assert not output["y"].requires_grad
    assert torch.equal(output["y"], torch.cat([y["y"] for y in expected]))
    assert torch.equal(output["rest"][0], torch.cat([y["rest"][0] for y in expected]))
    assert output["rest"][1:] == [None, "word"]


X, Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))


class Aside(nn.Module):
    """Puts something aside that goes back."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.aux = None

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.aux = y.pow(2).mean()
        return y


def model(k):
    """Three layers; the one with index ``k`` puts something aside."""
    torch.manual_seed(0)
    return nn.Sequential(*(Aside() if index == k else nn.Linear(4, 4) for index in range(3)))


def with_aside(layer):
    return lambda output, target: F.mse_loss(output, target) + layer.aux


def step(layers, k, devices, schedule, checkpoint):
    pipe = Pipe(layers, [1, 1, 1], devices=devices, chunks=4, checkpoint=checkpoint)
    pipe.train_batch(X, Y, loss_fn=with_aside(layers[k]), schedule=schedule)
    return pipe


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "devices", [["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"]], ids=["one", "three"]
)
def test_loss_fn_may_use_what_layers_of_the_last_stage_put_aside(devices, schedule):
    layers = model(2)
    plain = copy.deepcopy(layers)
    order = reversed(range(4)) if schedule == "gpipe" else range(4)
    losses = [
        with_aside(plain[2])(plain(x), y) / 4 for x, y in zip(X.chunk(4), Y.chunk(4), strict=True)
    ]
    for i in order:
        losses[i].backward()
    step(layers, 2, devices, schedule, "never")
    for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        if schedule == "zb_h1":  # adds products to gradients in one operation
            torch.testing.assert_close(ours.grad, theirs.grad)
        else:
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "devices", [["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"]], ids=["one", "three"]
)
@pytest.mark.parametrize(("k", "checkpoint"), [(1, "never"), (1, "always"), (2, "always")])
def test_what_would_be_lost_is_refused(k, checkpoint, devices, schedule):
    layers = model(k)
    with pytest.raises(RuntimeError, match="with its graph"):
        step(layers, k, devices, schedule, checkpoint)
    assert all(parameter.grad is None for parameter in layers.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_go_back_as_they_were_returned_whatever_loss_fn_does_with_them_later(reduction):
    layers = model(None)
    plain = copy.deepcopy(layers)
    kept = []

    def loss_fn(output, target):
        for loss in kept:
            loss.mul_(3)
        kept.append(F.mse_loss(output, target, reduction=reduction))
        return kept[-1]

    pipe = Pipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4)
    pipe.train_batch(
        X, Y, loss_fn=loss_fn, loss_reduction=reduction, schedule="gpipe", verify=False
    )
    for i in reversed(range(4)):
        loss = F.mse_loss(plain(X.chunk(4)[i]), Y.chunk(4)[i], reduction=reduction)
        (loss / 4 if reduction == "mean" else loss).backward()
    for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


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
        twice(lambda y: y.sum(), lambda y: (y.sum(), 1)), ValueError,
        "a loss with a weight for micro-batch 1, and a loss for the first",
    ),
    "weight only first": (
        twice(lambda y: (y.sum(), 1), lambda y: y.sum()), ValueError,
        "a loss for micro-batch 1, and a loss with a weight for the first",
    ),
    "weight with a graph": (lambda y: (y.sum(), y.mean()), ValueError, "weight.*requires grad"),
    "weight of many": (lambda y: (y.sum(), torch.ones(2)), ValueError, r"weight float32\[2\]"),
    "weight a word": (lambda y: (y.sum(), "1"), TypeError, "weight of type str"),
    "no grad": (lambda y: y.detach().sum(), RuntimeError, "does not require grad"),
    "other metrics": (
        twice(lambda y: (y.mean(), {"a": 1.0}), lambda y: (y.mean(), {"b": 1.0})), ValueError,
        r"metrics \['b'\] for micro-batch 1, and a loss and metrics \['a'\] for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused(name):
    loss_fn, kind, message = REFUSED[name]
    pipe = four()
    with pytest.raises(kind, match=message):
        pipe.train_batch(torch.randn(4, 3), loss_fn=loss_fn)
    assert grads_of(pipe) == [None] * 8


ROWS = torch.randn(4, 3)


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
        "weight= is given",
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
        pipe.train_batch(torch.randn(4, 3), ROWS, **options)
    assert grads_of(pipe) == [None] * 8
    pipe.train_batch(torch.randn(4, 3), ROWS, loss_fn=F.mse_loss)


def test_an_error_in_the_function_of_the_target_is_its_own():
    with pytest.raises(ZeroDivisionError) as caught:
        four().train_batch(ROWS, ROWS, loss_fn=F.mse_loss, weight=lambda t: 1 / 0)
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
