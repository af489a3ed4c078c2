"""What a loss function returns beside the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.training import KINDS, RUNS
from tests.training.loss.test_masked import IGNORED, classifier, labels
from tests.training.loss.whole import assert_trains_like, four, whole


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    kept = target != IGNORED
    return (output.argmax(1)[kept] == target[kept]).float().mean()


@pytest.mark.parametrize("run", KINDS)
def test_numbers_are_combined_as_the_losses_are(run: str) -> None:
    pipe, x, target = classifier(run, chunks=4), torch.randn(8, 4), labels(8, [0, 1, 2, 7])

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        count = int((target != IGNORED).sum())
        metrics = {"accuracy": accuracy(output, target), "count": count, "target": target}
        return F.cross_entropy(output, target), count, metrics

    expected = whole(pipe, lambda plain: F.cross_entropy(plain(x), target))
    right = accuracy(torch.nn.Sequential(*pipe)(x), target)
    loss, metrics = pipe.train_batch(x, target, loss_fn=loss_fn, **RUNS[run][0])
    assert_trains_like(pipe, loss, expected)
    torch.testing.assert_close(metrics["accuracy"], right)
    assert metrics["count"] == pytest.approx((2 * 2 + 1 * 1 + 1 * 1) / 4)
    assert torch.equal(torch.cat(metrics["target"]), target)


def test_they_are_detached() -> None:
    pipe = four(chunks=4)
    _, metrics = pipe.train_batch(
        torch.randn(8, 3), loss_fn=lambda y: (y.mean(), {"mean": y.mean(), "rows": y.sum(1)})
    )
    assert not metrics["mean"].requires_grad
    assert [row.requires_grad for row in metrics["rows"]] == [False] * 4


def test_beside_a_known_loss_they_are_weighted_by_samples() -> None:
    pipe, x = four(chunks=3), torch.randn(7, 3)
    y = torch.nn.Sequential(*pipe)(x)
    loss, outputs, metrics = pipe.train_batch(
        x, loss_fn=lambda y: (y.pow(2).mean(), {"mean": y.mean()}), return_outputs=True
    )
    torch.testing.assert_close(loss, y.pow(2).mean().detach())
    torch.testing.assert_close(outputs, y.detach())
    torch.testing.assert_close(metrics["mean"], y.mean().detach())


def test_beside_a_sum_they_are_added_up() -> None:
    pipe, x = four(chunks=3), torch.randn(7, 3)
    _, metrics = pipe.train_batch(
        x, loss_fn=lambda y: (y.sum(), {"samples": len(y)}), loss_reduction="sum"
    )
    assert metrics == {"samples": 7}


def test_evaluation_returns_them_as_well() -> None:
    pipe, x = four(chunks=3), torch.randn(7, 3)
    _, metrics = pipe.eval_batch(x, loss_fn=lambda y: (y.mean(), {"samples": [len(y)]}))
    assert metrics == {"samples": [[3], [3], [1]]}


def test_they_are_the_same_for_all_micro_batches() -> None:
    names = iter("aab")
    with pytest.raises(ValueError, match=r"metrics \['b'\] for micro-batch 2, and \['a'\] for the"):
        four(chunks=3).train_batch(
            torch.randn(7, 3), loss_fn=lambda y: (y.mean(), {next(names): 1.0})
        )


def test_a_tuple_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="a tuple of 3; it returns a loss"):
        four().train_batch(torch.randn(8, 3), loss_fn=lambda y: (y.mean(), 1, 2))


def test_no_graph_hangs_on_what_is_in_lists() -> None:
    _, metrics = four(chunks=2).train_batch(
        torch.randn(4, 3), loss_fn=lambda y: (y.mean(), {"parts": [y, y.sum()]})
    )
    assert not any(part.requires_grad for parts in metrics["parts"] for part in parts)
