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
from tests.support.running import Do
from tests.training.loss.whole import classifier, four, labels, masked

MASKED = {"input": torch.randn(8, 4), "target": labels(8, [0, 1, 2, 7]), "loss_fn": masked}


def warned(pipe: Any, call: str = "train_batch", **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(pipe, call)(**arguments)
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


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_warned_about(name: str, call: str) -> None:
    calls, expected = CASES[name]
    if name == "draws in its first call":
        calls = [{**MASKED, "loss_fn": drawn_once()}] * 4
    pipe = (four if calls[0]["input"] is X else classifier)(chunks=4)
    texts = [warned(pipe, call, **arguments) for arguments in calls]
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
    for loss_fn in [make(False)] * 4:
        assert warned(pipe, input=x, loss_fn=loss_fn) == []
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
    assert "not checked, because" in warned(pipe, input=x, loss_fn=loss_fn)[0]
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
    assert "the model computes the loss" in text
    assert "logits" in text
    assert not warned(pipe, input=X, loss_fn=lambda output: output["loss"], weight=[1, 2, 3, 4])


class WithLoss(nn.Module):
    """Returns logits, and their masked loss."""

    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return x["x"], masked(x["x"], x["y"])


def test_a_loss_of_the_logits_is_none_that_the_model_makes() -> None:
    def of_logits(output: Any, target: Tensor) -> Tensor:
        return masked(output[0], target)

    pipe = Pipe(nn.Sequential(Do(lambda d: {**d, "x": 1 * d["x"]}), WithLoss()), [2], chunks=4)
    x = torch.randn(8, 5, requires_grad=True)
    given = {"input": {"x": x, "y": MASKED["target"]}, "target": MASKED["target"]}
    [text] = warned(pipe, **given, loss_fn=of_logits)
    assert "unmasked targets needs weight=" in text


def test_a_scalar_beside_the_outputs_is_combined_as_losses_are() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), Do(lambda y: (y, y.exp().mean()))), [2], chunks=3)
    loss_fn = lambda output: output[0].pow(2).mean() + 0.1 * output[1]  # noqa: E731
    assert warned(pipe, input=torch.randn(7, 3), loss_fn=loss_fn, verify=True) == []


def padded(lengths: list[int]) -> list[Any]:
    """Micro-batches of two samples, with their targets; of the second some are masked."""
    return [(torch.randn(2, n, 4), torch.randint(1, 5, (2, n)).tril(-1)) for n in lengths]


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    kept = target != 0
    return (F.cross_entropy(output.mT, target, reduction="none") * kept).sum() / kept.sum()


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_outputs_that_cannot_be_joined_are_not_checked_which_is_said_once(call: str) -> None:
    pipe = classifier(chunks=4)
    texts = [
        warned(pipe, call, data_iter=iter(padded([4, 7, 3, 9])), loss_fn=masked_mean)
        for _ in range(4)
    ]
    assert [len(found) for found in texts] == [1, 0, 0, 0]
    assert "loss_fn is not checked, because" in texts[0][0]
    assert "[2, 7, 5]" in texts[0][0]
    assert "needs weight=" in texts[0][0]
    counted = {"loss_fn": masked_mean, "weight": lambda t: (t != 0).sum()}
    assert not warned(classifier(chunks=4), call, data_iter=iter(padded([4, 7, 3, 9])), **counted)


@pytest.mark.parametrize("steps", [12, 2])  # as many as samples in a micro-batch, too
@pytest.mark.parametrize("wrong", [False, True])
def test_outputs_whose_samples_are_not_in_dimension_0(steps: int, wrong: bool) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        kept = F.cross_entropy(output.flatten(0, 1), target.t().flatten(), reduction="none")
        return kept.sum() / kept.gt(1.6).sum() if wrong else kept.mean()

    layers = nn.Sequential(nn.Linear(4, 5), Do(lambda x: x.transpose(0, 1)))
    given = {"input": torch.randn(8, steps, 4), "target": torch.randint(5, (8, steps))}
    pipe = Pipe(layers, [1, 1], chunks=4)
    assert len(warned(pipe, **given, loss_fn=loss_fn, verify=True)) == wrong


class Scaled:
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, y: Tensor) -> Tensor:
        CALLED.append(1)
        return y.pow(2).mean()


CALLED: list[int] = []
scaled = lambda y, factor: Scaled(factor)(y)  # noqa: E731
#: Made anew in each step, of its number.
ANEW: dict[str, Any] = {
    "a number": lambda step: lambda y: scaled(y, step),
    "a default": lambda step: lambda y, step=step: scaled(y, step),
    "a tensor": lambda step: partial(lambda t, y: scaled(y, t), torch.tensor(step)),
    "a list": lambda step: lambda y, factors=[step]: scaled(y, factors),
    "a partial": lambda step: partial(scaled, factor=step),
    "an object": Scaled,
    "a method": lambda step: Scaled(step).__call__,
}


@pytest.mark.parametrize("make", ANEW.values(), ids=ANEW)
def test_one_that_is_made_anew_with_other_values_is_checked_as_seldom(make: Any) -> None:
    pipe, extra = four(chunks=4), []
    for step in range(16):
        CALLED.clear()
        pipe.train_batch(torch.randn(8, 3), loss_fn=make(step))
        extra.append(len(CALLED) - 4)
    assert [step + 1 for step, calls in enumerate(extra) if calls] == [1, 2, 4, 8, 16]


def test_a_variable_that_it_closes_over_may_get_its_value_later() -> None:
    pipe = four(chunks=4)
    for step in range(3):
        loss_fn = lambda y: y.mean() if step == 0 else y.mean() / before  # noqa: B023, E731
        before = warned(pipe, input=X, loss_fn=loss_fn) or 1.0


class Metric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.tensor(0)

    def update(self, y: Tensor) -> None:
        self.seen = self.seen + len(y)


METRIC = Metric()


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_it_counts_nothing_in_a_metric_of_the_loss(call: str) -> None:
    own, METRIC.seen = Metric(), torch.tensor(0)

    def loss_fn(y: Tensor) -> Tensor:
        own.update(y)
        METRIC.update(y)
        return y.pow(2).mean()

    warned(four(chunks=4), call, input=X, loss_fn=loss_fn)
    assert (int(own.seen), int(METRIC.seen)) == (8, 8)


def test_an_iterator_brings_a_target_with_each_micro_batch():
    pipe, x = Pipe(nn.Sequential(nn.Linear(3, 3)), [1], chunks=4), torch.randn(4, 3)
    pairs = zip(x.chunk(4), torch.randn(4, 3).chunk(4), strict=True)
    assert not warned(pipe, data_iter=pairs, loss_fn=F.mse_loss, verify=True)
