"""A loss that is not what it is taken for is noticed in the first call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import NoChunk, Pipe
from tests.training.loss.test_masked import classifier, labels, masked
from tests.training.loss.whole import four

MASKED = {"input": torch.randn(8, 4), "target": labels(8, [0, 1, 2, 7]), "loss_fn": masked}


def warned(pipe: Any, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.train_batch(**arguments)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_a_mask_that_nobody_counts_is_noticed() -> None:
    assert [text.count("weight=") > 0 for text in warned(classifier(chunks=4), **MASKED)] == [True]


def test_only_in_the_first_call() -> None:
    pipe = classifier(chunks=4)
    assert [len(warned(pipe, **MASKED)) for _ in range(3)] == [1, 0, 0]


def test_again_when_asked() -> None:
    pipe = classifier(chunks=4)
    assert [len(warned(pipe, **MASKED, verify=True)) for _ in range(2)] == [1, 1]


def test_not_at_all_if_switched_off() -> None:
    assert warned(classifier(chunks=4), **MASKED, verify=False) == []


def test_what_is_right_is_not_warned_about() -> None:
    pipe, x, target = classifier(chunks=4), torch.randn(8, 4), labels(8, range(8))
    weight = lambda t: (t != -100).sum()  # noqa: E731
    assert warned(pipe, input=x, target=target, loss_fn=masked) == []
    assert warned(pipe, **MASKED, weight=weight, verify=True) == []
    assert warned(pipe, input=x, loss_fn=lambda y: y.sum(), loss_reduction="sum") == []
    assert warned(pipe, input=x, loss_fn=lambda y: y.pow(2).mean()) == []


def test_a_sum_that_is_taken_for_a_mean_is_noticed() -> None:
    [text] = warned(four(chunks=4), input=torch.randn(8, 3), loss_fn=lambda y: y.pow(2).sum())
    assert "loss_reduction='sum'" in text


def test_the_losses_of_pytorch_are_known_and_called_once_for_each_micro_batch() -> None:
    seen = []
    loss_fn = nn.MSELoss()
    loss_fn.register_forward_hook(lambda *_: seen.append(1))
    four(chunks=4).train_batch(torch.randn(8, 3), torch.randn(8, 3), loss_fn=loss_fn)
    assert len(seen) == 4


def test_an_error_in_it_matters_only_if_it_was_asked_for() -> None:
    def loss_fn(y: Tensor) -> Tensor:
        if len(y) > 2:
            raise LookupError
        return y.sum()

    pipe, x = four(chunks=4), torch.randn(8, 3)
    pipe.train_batch(x, loss_fn=loss_fn)
    grads = [p.grad.clone() for p in pipe.parameters()]
    with pytest.raises(LookupError):
        pipe.train_batch(x, loss_fn=loss_fn, verify=True)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(pipe.parameters(), grads, strict=True))


def test_what_is_the_same_for_all_micro_batches_stays_so() -> None:
    pipe, scale = four(chunks=4), torch.rand(3)

    def loss_fn(y: Tensor, target: Any) -> Tensor:
        assert target["scale"].shape == (3,)
        return (y * target["scale"]).pow(2).mean()

    target = {"scale": NoChunk(scale)}
    assert warned(pipe, input=torch.randn(8, 3), target=target, loss_fn=loss_fn, verify=True) == []


def test_a_loss_that_draws_is_left_alone() -> None:
    pipe = four(chunks=4)
    assert warned(pipe, input=torch.randn(8, 3), loss_fn=lambda y: F.dropout(y).mean()) == []


def test_outputs_are_kept_as_the_loss_function_found_them() -> None:
    pipe = four(chunks=4)
    assert warned(pipe, input=torch.randn(8, 3), loss_fn=lambda y: y.mul_(2).mean()) == []


def test_it_changes_nothing() -> None:
    x, found = torch.randn(8, 3), []
    for verify in (False, True):
        pipe = four(chunks=4)
        loss = pipe.train_batch(x, loss_fn=lambda y: y.pow(2).mean(), verify=verify)
        found.append([loss, *(p.grad for p in pipe.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_call_that_checks_nothing_leaves_it_to_the_next() -> None:
    pipe = classifier(chunks=1)
    assert warned(pipe, **MASKED) == []
    pipe.chunks = 4
    fails = iter([True])

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        if next(fails, False):
            raise LookupError
        return masked(y, target)

    with pytest.raises(LookupError):
        warned(pipe, **{**MASKED, "loss_fn": loss_fn})
    assert len(warned(pipe, **{**MASKED, "loss_fn": loss_fn})) == 1
    assert len(warned(pipe, **MASKED)) == 1


def test_a_loss_that_draws_in_its_first_call_only_is_checked_in_the_second() -> None:
    drawn: list[Tensor] = []  # as compilation does

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        drawn or drawn.append(torch.rand(1))
        return masked(y, target)

    pipe = classifier(chunks=4)
    assert [len(warned(pipe, **{**MASKED, "loss_fn": loss_fn})) for _ in range(3)] == [0, 1, 0]


def test_it_leaves_no_trace_in_the_buffers_of_the_loss() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(5))
            self.calls = 0

        def forward(self, y: Tensor) -> Tensor:
            self.calls += 1
            self.center = 0.9 * self.center + 0.1 * y.detach().mean(0)
            return y.pow(2).mean()

    losses = Centred(), Centred()
    for loss_fn, verify in zip(losses, (True, False), strict=True):
        classifier(chunks=4).train_batch(MASKED["input"], loss_fn=loss_fn, verify=verify)
    assert [loss_fn.calls for loss_fn in losses] == [4, 4]
    assert torch.equal(losses[0].center, losses[1].center)


def test_a_loss_that_the_model_makes_is_noticed() -> None:
    class Makes(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": x.pow(2).mean(), "logits": x}

    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), Makes()), [2], devices=["cpu"], chunks=4)
    [text] = warned(pipe, input=torch.randn(8, 3), loss_fn=lambda output: output["loss"])
    assert "made by the model" in text
    assert "logits" in text
