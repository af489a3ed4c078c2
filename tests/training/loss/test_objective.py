"""How the losses of micro-batches become that of the mini-batch: sizes, sums, weights, scales."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import NoChunk, Pipe
from tests.support.models import linear_model
from tests.support.running import Do
from tests.support.training import KINDS, RUNS
from tests.training.loss.whole import (
    CLASSES,
    IGNORED,
    assert_trains_like,
    classifier,
    four,
    grads_of,
    labels,
    whole,
)

SUM = partial(F.mse_loss, reduction="sum")


# --- what is known of a loss ---------------------------------------------------------------------


#: As what the weight of a loss may come with it.
WEIGHTS: dict[str, Any] = {
    "numbers": lambda w: w.item(),
    "tensors": lambda w: w,
    "tensors of one element": lambda w: w.reshape(1),
    "numpy": lambda w: w.numpy()[()],
}


def losses(ignored: int, weight: Tensor | None, smoothing: float, given: str) -> dict[str, Any]:
    """Losses, and functions of the target that say their weights, where these are not known."""
    how: dict[str, Any] = {"ignore_index": ignored, "weight": weight}

    def likelihood(output: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(output.log_softmax(1), target, **how)

    def weigh(target: Tensor) -> Tensor:
        kept = target[target != ignored]
        return torch.tensor(len(kept)) if weight is None else weight[kept].sum()

    return {
        "module": (nn.CrossEntropyLoss(**how, label_smoothing=smoothing), None),
        "partial": (partial(F.cross_entropy, **how, label_smoothing=smoothing), None),
        "sum": (nn.CrossEntropyLoss(**how, label_smoothing=smoothing, reduction="sum"), None),
        "by weight": (likelihood, weigh),
        "with its weight": (lambda y, t: (likelihood(y, t), WEIGHTS[given](weigh(t))), None),
    }


@settings(max_examples=60)
@given(data=st.data())
def test_any_mask_under_any_schedule(data: st.DataObject) -> None:
    """On top of gradients that are there; a mean over nothing is 0 / 0, and has no part."""
    size = data.draw(st.integers(1, 9), "size")
    kept = data.draw(st.lists(st.integers(0, size - 1), unique=True), "kept")
    ignored = data.draw(st.sampled_from([IGNORED, CLASSES - 1, 0]), "ignored")
    weight = data.draw(st.sampled_from([None, torch.rand(CLASSES) + 0.1]), "class weights")
    smoothing = data.draw(st.sampled_from([0.0, 0.1]), "smoothing")
    given = losses(ignored, weight, smoothing, data.draw(st.sampled_from([*WEIGHTS]), "given as"))
    kind = data.draw(st.sampled_from([*given]), "loss")
    run = data.draw(st.sampled_from(list(RUNS)), "run")
    rounds = "interleaved" in run or "looped" in run
    chunks = 4 if rounds else data.draw(st.integers(1, 4), "chunks")
    target = labels(size, kept, ignored)
    (loss_fn, weigh), options = given[kind], dict(RUNS[run][0])
    plain_loss = given["by weight"][0] if kind == "with its weight" else loss_fn
    pipe, x = classifier(run, chunks=chunks), torch.randn(size, 4)
    expected, grads = whole(pipe, lambda plain: plain_loss(plain(x), target))
    if weigh is None:
        evaluated = pipe.eval_batch(x, target, loss_fn=loss_fn)
        torch.testing.assert_close(evaluated, expected, equal_nan=True)
    elif data.draw(st.booleans(), "numbers"):
        options["weight"] = list(map(weigh, target.chunk(chunks)))
    else:
        options["weight"] = weigh
    if data.draw(st.booleans(), "there"):
        for p, grad in zip(pipe.parameters(), grads, strict=True):
            p.grad = torch.ones_like(p)
            grad += 1
    found = pipe.train_batch(x, target, loss_fn=loss_fn, **options)
    assert_trains_like(pipe, found, (expected, grads))


ROWS = torch.randn(7, 3)
KNOWN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "probabilities": (F.cross_entropy, torch.rand(7, 3).softmax(1), {}),
    "compiled": (
        torch.compile(nn.CrossEntropyLoss(), backend="eager"),
        torch.tensor([0, 1, 2, IGNORED, 2, IGNORED, IGNORED]), {},
    ),
    "sum that is said": (lambda y, t: SUM(y, t), ROWS, {"loss_reduction": "sum"}),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), ROWS.softmax(1), {}),
    "mean": (F.mse_loss, ROWS, {}),
    "scaler that is off": (
        F.mse_loss, ROWS, {"grad_scaler": torch.amp.GradScaler("cpu", enabled=False)}
    ),
    "scaler, which leaves the loss": (
        F.mse_loss, ROWS, {"grad_scaler": torch.amp.GradScaler("cpu", 8.0)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("iterator", [False, True])
@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("size", [7, 5, 3, 1])
def test_the_loss_is_that_of_the_mini_batch(kind: str, size: int, iterator: bool) -> None:
    loss_fn, target, options = KNOWN[kind]
    pipe, x, target = four(chunks=4), torch.randn(size, 3), target[:size]
    expected, grads = whole(pipe, lambda plain: loss_fn(plain(x), target))
    given: dict[str, Any] = {"input": x, "target": target}
    if iterator:
        pipe.chunks = len(x.chunk(4))
        given = {"data_iter": zip(x.chunk(4), target.chunk(4), strict=True)}
    loss = pipe.train_batch(**given, loss_fn=loss_fn, **options)
    scale = options["grad_scaler"].get_scale() if "grad_scaler" in options else 1
    assert_trains_like(pipe, loss, (expected, [grad * scale for grad in grads]))
    assert not loss.requires_grad
    assert loss.shape == ()


class Readout(nn.Module):
    """The sum of each group of rows: of nodes that are one graph."""

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        rows, group = x
        return rows.new_zeros(int(group.max()) + 1, 3).index_add(0, group, rows)


def graphs(*sizes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(sum(sizes), 3), torch.repeat_interleave(torch.tensor(sizes))


#: Means of PyTorch's, and targets for so many graphs.
MEANS: dict[str, tuple[Any, Any]] = {
    "elements": (F.mse_loss, lambda n: torch.randn(n, 3)),
    "a module": (nn.SmoothL1Loss(), lambda n: torch.randn(n, 3)),
    "another": (nn.PoissonNLLLoss(), lambda n: torch.rand(n, 3)),
    "a target of one element": (partial(F.huber_loss, delta=2.0), lambda n: torch.zeros(1, 1)),
    "rows": (nn.KLDivLoss(reduction="batchmean"), lambda n: torch.rand(n, 3)),
    "probabilities": (F.cross_entropy, lambda n: torch.rand(n, 3).softmax(1)),
    "classes": (F.cross_entropy, lambda n: torch.randint(3, (n,))),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("kind", MEANS)
def test_means_count_by_outputs_and_targets_not_by_rows_of_the_input(kind: str) -> None:
    loss_fn, target = MEANS[kind]
    batches = [(graphs(*each), target(len(each))) for each in ([2, 3], [20, 30, 9], [4], [2, 2])]
    layers = nn.Sequential(Do(lambda pair: (pair[0] * 2, pair[1])), Readout(), nn.Linear(3, 3))
    pipe = Pipe(layers, [2, 1], devices=["cpu:0", "cpu:1"], chunks=4)

    def plain_loss(plain: nn.Module) -> Tensor:
        targets = torch.cat([target for _, target in batches])
        if targets.shape == (4, 1):
            targets = targets[:1]
        return loss_fn(torch.cat([plain(x) for x, _ in batches]), targets)

    expected = whole(pipe, plain_loss)
    found = pipe.train_batch(data_iter=iter(batches), loss_fn=loss_fn)
    assert_trains_like(pipe, found, expected)
    found = pipe.eval_batch(data_iter=iter(batches), loss_fn=loss_fn)
    torch.testing.assert_close(found, expected[0])


def test_a_target_that_all_samples_share_does_not_count() -> None:
    pipe, x, target = four(chunks=4), torch.randn(7, 3), torch.randn(3)
    expected = whole(pipe, lambda plain: F.mse_loss(plain(x), target.expand(7, 3)))
    with pytest.warns(UserWarning, match="Using a target size"):
        found = pipe.train_batch(x, NoChunk(target), loss_fn=F.mse_loss)
    assert_trains_like(pipe, found, expected)


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", KINDS)
def test_weights_with_every_schedule_and_gradients_beyond_the_parameters(run: str) -> None:
    torch.manual_seed(2)
    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=3)
    x0, t0 = torch.randn(7, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    scale = nn.Parameter(torch.tensor(1.5))  # of the loss
    weights = torch.tensor([1.0] * 3 + [2.0] * 3 + [3.0])

    def per_sample(y: Tensor, t: Tensor) -> Tensor:
        return (y - t * scale).pow(2).sum(1)

    expected = whole(
        pipe, lambda plain: (per_sample(plain(x0.exp()), t0.tanh()) * weights).sum() / weights.sum()
    )
    for p, grad in zip(pipe.parameters(), expected[1], strict=True):
        p.grad = torch.ones_like(p)
        grad += 1
    others = [t.grad for t in (x0, t0, scale)]
    x0.grad = t0.grad = scale.grad = None
    seen = iter(range(3))

    def loss_fn(y: Tensor, t: Tensor) -> Any:
        return per_sample(y, t).mean(), torch.tensor(len(y) * (next(seen) + 1))

    loss = pipe.train_batch(x0.exp(), t0.tanh(), loss_fn=loss_fn, **RUNS[run][0])
    assert_trains_like(pipe, loss, expected)
    torch.testing.assert_close([t.grad for t in (x0, t0, scale)], others)


def test_losses_may_need_no_gradient_in_some_micro_batches() -> None:
    pipe, x = four(), torch.randn(4, 3)
    x[1] = 0
    pipe.train_batch(x, x.clone(), loss_fn=lambda y, t: y.sum() if t.any() else y.detach().sum())
    expected = whole(pipe, lambda plain: plain(x[[0, 2, 3]]).sum() / 4)
    torch.testing.assert_close(grads_of(pipe), expected[1])


# --- metrics -------------------------------------------------------------------------------------


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    kept = target != IGNORED
    return (output.argmax(1)[kept] == target[kept]).float().mean()


@pytest.mark.parametrize("run", KINDS)
def test_metrics_that_are_numbers_are_combined_as_the_losses_are(run: str) -> None:
    pipe, x, target = classifier(run, chunks=4), torch.randn(8, 4), labels(8, [0, 1, 2, 7])

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        count = int((target != IGNORED).sum())
        metrics = {"accuracy": accuracy(output, target), "count": count, "target": target}
        return F.cross_entropy(output, target), count, metrics

    expected = whole(pipe, lambda plain: F.cross_entropy(plain(x), target))
    right = accuracy(nn.Sequential(*pipe)(x), target)
    loss, metrics = pipe.train_batch(x, target, loss_fn=loss_fn, **RUNS[run][0])
    assert_trains_like(pipe, loss, expected)
    torch.testing.assert_close(metrics["accuracy"], right)
    assert metrics["count"] == pytest.approx((2 * 2 + 1 * 1 + 1 * 1) / 4)
    assert torch.equal(torch.cat(metrics["target"]), target)


def test_metrics_of_a_sum_are_added_up_and_evaluation_returns_them_as_well() -> None:
    pipe, x = four(chunks=3), torch.randn(7, 3)

    def returned(y: Tensor) -> Any:
        metrics = [("samples", len(y)), ("all", [len(y)])]
        return y.sum(), dict(metrics if len(y) > 1 else metrics[::-1])  # in any order

    for run in (pipe.train_batch, pipe.eval_batch):
        _, metrics = run(x, loss_fn=returned, loss_reduction="sum")
        assert metrics == {"samples": 7, "all": [[3], [3], [1]]}
