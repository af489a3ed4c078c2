"""Losses that are no mean over samples: masks, class weights, weights by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.support.training import RUNS
from tests.training.loss.whole import assert_trains_like, four, grads_of, whole

CLASSES = 5
IGNORED = -100


def classifier(run: str = "1f1b", **options: Any) -> Pipe:
    torch.manual_seed(3)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES)]
    return Pipe(nn.Sequential(*layers), [1, 1, 1, 1], devices=RUNS[run][1], **options)


def labels(size: int, kept: list[int], ignored: int = IGNORED) -> Tensor:
    """Targets of which some are masked."""
    target = torch.arange(size) % CLASSES
    return torch.where(torch.isin(torch.arange(size), torch.tensor(kept)), target, ignored)


def losses(ignored: int, weight: Tensor | None, smoothing: float) -> dict[str, Any]:
    how: dict[str, Any] = {"ignore_index": ignored, "weight": weight}

    def likelihood(output: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(output.log_softmax(1), target, **how)

    return {
        "module": nn.CrossEntropyLoss(**how, label_smoothing=smoothing),
        "partial": partial(F.cross_entropy, **how, label_smoothing=smoothing),
        "sum": nn.CrossEntropyLoss(**how, label_smoothing=smoothing, reduction="sum"),
        "by weight": likelihood,
    }


def weigh(ignored: int, weight: Tensor | None, target: Tensor) -> Tensor:
    kept = target[target != ignored]
    return torch.tensor(len(kept)) if weight is None else weight[kept].sum()


@settings(max_examples=60)
@given(data=st.data())
def test_any_mask_under_any_schedule(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9), "size")
    kept = data.draw(st.lists(st.integers(0, size - 1), unique=True, min_size=1), "kept")
    ignored = data.draw(st.sampled_from([IGNORED, CLASSES - 1, 0]), "ignored")
    weight = data.draw(st.sampled_from([None, torch.rand(CLASSES) + 0.1]), "class weights")
    kind = data.draw(st.sampled_from(["module", "partial", "sum", "by weight"]), "loss")
    run = data.draw(st.sampled_from(list(RUNS)), "run")
    chunks = (
        4 if "interleaved" in run or "looped" in run else data.draw(st.integers(1, 4), "chunks")
    )
    target = labels(size, kept, ignored)
    if (target == ignored).all():  # the last class is ignored, too
        return
    loss_fn = losses(ignored, weight, data.draw(st.sampled_from([0.0, 0.1]), "smoothing"))[kind]
    pipe, x = classifier(run, chunks=chunks), torch.randn(size, 4)
    expected = whole(pipe, lambda plain: loss_fn(plain(x), target))
    options = dict(RUNS[run][0])
    if kind == "by weight":
        options["weight"] = partial(weigh, ignored, weight)
    assert_trains_like(pipe, pipe.train_batch(x, target, loss_fn=loss_fn, **options), expected)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_a_mini_batch_without_any_target_gives_what_pytorch_gives(loss_fn: Any) -> None:
    pipe, x, target = classifier(chunks=4), torch.randn(8, 4), labels(8, [])
    expected = whole(pipe, lambda plain: loss_fn(plain(x), target))
    loss = pipe.train_batch(x, target, loss_fn=loss_fn)
    assert loss.isnan()
    assert expected[0].isnan()
    torch.testing.assert_close(grads_of(pipe), expected[1], equal_nan=True)


def test_targets_may_be_probabilities() -> None:
    pipe, x, target = classifier(chunks=3), torch.randn(7, 4), torch.rand(7, CLASSES).softmax(1)
    expected = whole(pipe, lambda plain: F.cross_entropy(plain(x), target))
    assert_trains_like(pipe, pipe.train_batch(x, target, loss_fn=F.cross_entropy), expected)


def test_targets_may_have_places() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Tanh(), nn.Conv1d(4, CLASSES, 1))
    pipe = Pipe(model, [1, 2], devices=["cpu:0", "cpu:1"], chunks=3)
    x, target = torch.randn(7, 3, 6), torch.randint(0, CLASSES, (7, 6))
    target[torch.rand(7, 6) < 0.6] = IGNORED
    target[:3] = IGNORED
    expected = whole(pipe, lambda plain: F.cross_entropy(plain(x), target))
    assert_trains_like(pipe, pipe.train_batch(x, target, loss_fn=F.cross_entropy), expected)


def test_gradients_of_masked_micro_batches_are_not_scaled_afterwards() -> None:
    """What hooks see of a micro-batch is its part of the mini-batch's gradient."""
    pipe, x, target = classifier(chunks=4), torch.randn(8, 4), labels(8, [0, 1, 2, 7])
    weight, seen = pipe[3].weight, []
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    torch.testing.assert_close(sum(seen), weight.grad, rtol=0, atol=0)


def test_micro_batches_of_an_iterator_are_weighted_at_the_end() -> None:
    pipe, x, target = classifier(chunks=4), torch.randn(8, 4), labels(8, [2, 3, 4, 7])
    expected = whole(pipe, lambda plain: F.cross_entropy(plain(x), target))
    pairs = zip(x.chunk(4), target.chunk(4), strict=True)
    assert_trains_like(pipe, pipe.train_batch(data_iter=pairs, loss_fn=F.cross_entropy), expected)


def test_evaluation_is_weighted_likewise() -> None:
    pipe, x, target = classifier(chunks=4), torch.randn(8, 4), labels(8, [0, 1, 2, 7])
    expected = F.cross_entropy(nn.Sequential(*pipe)(x), target)
    torch.testing.assert_close(pipe.eval_batch(x, target, loss_fn=F.cross_entropy), expected)


def test_a_compiled_criterion_is_known_as_well() -> None:
    pipe, x, target = classifier(chunks=4), torch.randn(8, 4), labels(8, [0, 1, 2, 7])
    loss_fn: Any = torch.compile(nn.CrossEntropyLoss(), backend="eager")
    expected = whole(pipe, lambda plain: F.cross_entropy(plain(x), target))
    assert_trains_like(pipe, pipe.train_batch(x, target, loss_fn=loss_fn), expected)


# --- weights by hand -----------------------------------------------------------------------------


def masked(output: Tensor, target: Tensor) -> Tensor:
    kept = target != IGNORED
    return (F.cross_entropy(output, target, reduction="none") * kept).sum() / kept.sum()


@pytest.mark.parametrize("kept", [[0, 1, 2, 7], [7], list(range(8))])
@pytest.mark.parametrize("numbers", [False, True], ids=["function", "numbers"])
def test_weights_are_counted_before_anything_runs(kept: list[int], numbers: bool) -> None:
    pipe, x, target = classifier(chunks=4), torch.randn(8, 4), labels(8, kept)
    counts = [int((t != IGNORED).sum()) for t in target.chunk(4)]
    weight: Any = counts if numbers else lambda t: (t != IGNORED).sum()
    expected = whole(pipe, lambda plain: masked(plain(x), target))
    loss = pipe.train_batch(x, target, loss_fn=masked, weight=weight)
    assert_trains_like(pipe, loss, expected)


@pytest.mark.parametrize("tensors", [False, True])
def test_a_mean_over_nothing_has_no_part(tensors: bool) -> None:
    """``(loss, weight)`` with a mean that is 0 / 0, and gradients that would be."""
    pipe, x, target = classifier(chunks=4), torch.randn(8, 4), labels(8, [2, 3, 4])

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        weight = (target != IGNORED).sum()
        return masked(output, target), weight if tensors else int(weight)

    expected = whole(pipe, lambda plain: masked(plain(x), target))
    assert_trains_like(pipe, pipe.train_batch(x, target, loss_fn=loss_fn), expected)


BAD = {
    "wrong number": ([1, 2], ValueError, "weight has 2 numbers, but there are 4 micro-batches"),
    "negative": ([1, 1, 1, -1], ValueError, "weight of -1.0"),
    "not finite": (lambda t: float("nan"), ValueError, "weight of nan"),
    "no number": (lambda t: "many", TypeError, "weight of type str"),
    "several": (lambda t: torch.ones(2), ValueError, r"weight float32\[2\], not one number"),
    "nothing": (lambda t: None, TypeError, "weight of type NoneType"),
    "no function": (3, TypeError, "weight must be a function of the target, or a number for each"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_weight_is_refused(kind: str) -> None:
    weight, error, message = BAD[kind]
    pipe, x, target = classifier(chunks=4), torch.randn(8, 4), labels(8, [0])
    with pytest.raises(error, match=message):
        pipe.train_batch(x, target, loss_fn=masked, weight=weight)
    assert all(p.grad is None for p in pipe.parameters())
    pipe.train_batch(x, labels(8, range(8)), loss_fn=F.cross_entropy)


def test_an_error_in_the_function_of_the_target_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        classifier(chunks=4).train_batch(
            torch.randn(8, 4), labels(8, [0]), loss_fn=masked, weight=lambda t: 1 / 0
        )
    assert "in weight, for the target of micro-batch 0" in caught.value.__notes__


def test_weights_from_two_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="train_batch was given one"):
        four().train_batch(torch.randn(8, 3), loss_fn=lambda y: (y.mean(), 1), weight=lambda t: 1.0)


def test_a_sum_has_no_weights() -> None:
    with pytest.raises(ValueError, match="weight is for losses that are means"):
        four().train_batch(
            torch.randn(8, 3), torch.randn(8, 3), loss_fn=nn.MSELoss(reduction="sum"),
            weight=lambda t: 1.0,
        )  # fmt: skip


# --- reductions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss_fn", [nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum")]
)
def test_the_reduction_of_the_loss_is_read(loss_fn: Any) -> None:
    pipe, x, target = four(chunks=4), torch.randn(7, 3), torch.randn(7, 3)
    expected = whole(pipe, lambda plain: loss_fn(plain(x), target))
    assert_trains_like(pipe, pipe.train_batch(x, target, loss_fn=loss_fn), expected)


def test_batchmean_is_a_mean() -> None:
    pipe, x, target = four(chunks=4), torch.randn(7, 3), torch.rand(7, 3)
    loss_fn = nn.KLDivLoss(reduction="batchmean")
    expected = whole(pipe, lambda plain: loss_fn(plain(x), target))
    assert_trains_like(pipe, pipe.train_batch(x, target, loss_fn=loss_fn), expected)


@pytest.mark.parametrize(
    "loss_fn", [nn.MSELoss(reduction="none"), partial(F.mse_loss, reduction="none")]
)
def test_no_reduction_is_refused_with_what_to_write(loss_fn: Any) -> None:
    with pytest.raises(ValueError, match="use reduction='mean' or reduction='sum'"):
        four().train_batch(torch.randn(8, 3), torch.randn(8, 3), loss_fn=loss_fn)


def test_reductions_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="loss_reduction='mean', but loss_fn has reduction='sum'"):
        four().train_batch(
            torch.randn(8, 3), torch.randn(8, 3), loss_fn=nn.MSELoss(reduction="sum"),
            loss_reduction="mean",
        )  # fmt: skip


def test_a_class_is_not_taken_for_a_loss() -> None:
    with pytest.raises(TypeError, match=r"give an instance, loss_fn=CrossEntropyLoss\(...\)"):
        classifier().train_batch(torch.randn(8, 4), labels(8, [0]), loss_fn=nn.CrossEntropyLoss)


@pytest.mark.parametrize("data_iter", [False, True])
@pytest.mark.parametrize("returned", [False, True])
def test_where_nothing_counts_gradients_are_zero(data_iter: bool, returned: bool) -> None:
    pipe, x, target = classifier(chunks=2), torch.randn(4, 4), labels(4, [])
    loss_fn = (
        (lambda y, t: (F.cross_entropy(y, t), (t >= 0).sum())) if returned else F.cross_entropy
    )
    pairs = {"data_iter": iter(zip(x.chunk(2), target.chunk(2), strict=True))}
    given = pairs if data_iter else {"input": x, "target": target}
    loss = pipe.train_batch(loss_fn=loss_fn, **given)
    expected = whole(pipe, lambda plain: F.cross_entropy(plain(x), target))
    torch.testing.assert_close(loss, expected[0], equal_nan=True)
    torch.testing.assert_close(grads_of(pipe), expected[1])
