"""A loss that is not what it is taken for is noticed, in the first call or a later one."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import NoChunk, Pipe
from tests.training.loss.whole import classifier, four, labels, masked

MASKED = {"input": torch.randn(8, 4), "target": labels(8, [0, 1, 2, 7]), "loss_fn": masked}


def warned(pipe: Any, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.train_batch(**arguments)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


X, CLASSES = torch.randn(8, 3), labels(8, range(8))


def drawn_once() -> Any:
    """Draws in its first call only, as compilation does."""
    drawn: list[Tensor] = []
    return lambda y, t: drawn.append(torch.rand(1)) or masked(y, t) if not drawn else masked(y, t)


#: What one pipe is given in its calls, and in which of them it warns.
CASES: dict[str, tuple[list[dict[str, Any]], list[int]]] = {
    "a mask that nobody counts, once": ([MASKED] * 4, [0]),
    "asked for": ([{**MASKED, "verify": True}] * 2, [0, 1]),
    "switched off": ([{**MASKED, "verify": False}], []),
    "counted": ([{**MASKED, "weight": lambda t: (t != -100).sum(), "verify": True}], []),
    "comes with its weight": ([{**MASKED, "loss_fn": lambda y, t: (masked(y, t), 1)}], []),
    "so, and asked for": (
        [{**MASKED, "loss_fn": lambda y, t: (masked(y, t), 1), "verify": True}],
        [0],
    ),
    "nothing masked": ([{**MASKED, "target": CLASSES}], []),
    "a sum": ([{"input": X, "loss_fn": lambda y: y.sum(), "loss_reduction": "sum"}], []),
    "a mean": ([{"input": X, "loss_fn": lambda y: y.pow(2).mean()}], []),
    "draws": ([{"input": X, "loss_fn": lambda y: F.dropout(y).mean()}], []),
    "draws in its first call": ([{**MASKED, "loss_fn": drawn_once()}] * 4, [1]),
    "writes into the output": ([{"input": X, "loss_fn": lambda y: y.mul_(2).mean()}], []),
    "masked from the second": ([{**MASKED, "target": CLASSES}, *[MASKED] * 8], [1]),
    "masked from the third": ([*[{**MASKED, "target": CLASSES}] * 2, *[MASKED] * 7], [3]),
    "masked from the fifth": ([*[{**MASKED, "target": CLASSES}] * 4, *[MASKED] * 5], [7]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_warned_about(name: str) -> None:
    calls, expected = CASES[name]
    pipe = (four if calls[0]["input"] is X else classifier)(chunks=4)
    texts = [warned(pipe, **arguments) for arguments in calls]
    assert [call for call, found in enumerate(texts) if found] == expected
    assert all("weight=" in text for found in texts for text in found)


def reduced(y: Tensor, total: bool) -> Tensor:
    return y.pow(2).sum() if total else y.pow(2).mean()


class Loss(nn.Module):
    def __init__(self, total: bool) -> None:
        super().__init__()
        self.forward = partial(reduced, total=total)


MAKE: dict[str, Any] = {
    "module": Loss,
    "closure": lambda total: lambda y: reduced(y, total),
    "default": lambda total: lambda y, total=total: reduced(y, total),
    "keyword": lambda total: lambda y, *, total=total: reduced(y, total),
    "options": lambda total: partial(reduced, total=total),
    "arguments": lambda total: partial(lambda total, y: reduced(y, total), total),
    "method": lambda total: Loss(total).__call__,
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_each_loss_function_is_checked_whatever_its_class_or_code(make: Any) -> None:
    pipe, x = four(chunks=4), torch.randn(8, 3)
    for _ in range(4):
        assert warned(pipe, input=x, loss_fn=make(False)) == []
    assert len(warned(pipe, input=x, loss_fn=make(True))) == 1


def test_a_function_that_is_made_anew_for_each_call_is_the_same_one() -> None:
    pipe, scale, seen = four(chunks=4), torch.rand(3), []

    def loss_fn(y: Tensor, again: bool) -> Tensor:
        seen[-1] += 1
        return (y * scale).mean()

    for _ in range(8):
        seen.append(0)
        pipe.train_batch(torch.randn(8, 3), loss_fn=lambda y: loss_fn(y, True))
    assert seen == [5, 5, 4, 5, 4, 4, 4, 5]


def test_no_loss_function_is_kept_alive() -> None:
    pipe, gone = four(chunks=4), []
    for k in range(40):
        scale = torch.rand(3)
        gone.append(weakref.ref(scale))
        pipe.train_batch(torch.randn(8, 3), loss_fn=lambda y, s=scale, k=k: (y * s).mean() * k)
    del scale
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def test_a_copy_of_the_pipe_checks_by_itself() -> None:
    pipe = classifier(chunks=4)
    assert [len(warned(each, **MASKED)) for each in (pipe, copy.deepcopy(pipe))] == [1, 1]


def test_a_mean_that_was_taken_for_a_sum_needs_no_sum() -> None:
    mean = {"input": X, "loss_fn": lambda y: (y**2).mean(), "loss_reduction": "sum"}
    [text] = warned(Pipe(nn.Sequential(nn.Linear(3, 3)), [1], chunks=4), **mean)
    assert "no sum over samples. A mean over them needs loss_reduction='mean'" in text
    assert "loss_reduction='sum'" not in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_a_loss_of_about_zero_is_not_warned_about(dtype: torch.dtype) -> None:
    rows = 100 * torch.randn(16, 3)
    x = torch.cat([rows, -rows])[torch.randperm(32)].to(dtype)  # means of nothing but rounding
    for k in range(8):
        pipe = Pipe(nn.Sequential(nn.Linear(3, 3, bias=False)).to(dtype), [1], chunks=4)
        assert warned(pipe, input=x[torch.randperm(32)], loss_fn=lambda y, k=k: y.mean()) == []
        [text] = warned(pipe, input=x, loss_fn=lambda y, k=k: y.mean() + y.shape[0])
        assert "no mean over samples" in text


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


def test_an_iterator_brings_a_target_with_each_micro_batch():
    pipe, x = Pipe(nn.Sequential(nn.Linear(3, 3)), [1], chunks=4), torch.randn(4, 3)
    pairs = zip(x.chunk(4), torch.randn(4, 3).chunk(4), strict=True)
    assert not warned(pipe, data_iter=pairs, loss_fn=F.mse_loss, verify=True)
