"""Gradients of several calls that make one optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.training import KINDS, RUNS
from tests.training.loss.test_masked import IGNORED, classifier, labels
from tests.training.loss.whole import four, grads_of, whole


@pytest.mark.parametrize("run", KINDS)
def test_several_calls_equal_one_larger_mini_batch(run: str) -> None:
    pipe, x, target = classifier(run, chunks=4), torch.randn(24, 4), labels(24, list(range(24)))
    _, expected = whole(pipe, lambda plain: F.cross_entropy(plain(x), target))
    losses = [
        pipe.train_batch(a, b, loss_fn=F.cross_entropy, accumulate=3, **RUNS[run][0])
        for a, b in zip(x.chunk(3), target.chunk(3), strict=True)
    ]
    torch.testing.assert_close(grads_of(pipe), expected)
    whole_loss = F.cross_entropy(torch.nn.Sequential(*pipe)(x), target)
    torch.testing.assert_close(sum(losses) / 3, whole_loss.detach())  # of each call, not divided


def test_the_share_of_each_call_makes_masked_ones_exact() -> None:
    pipe, x, target = classifier(chunks=4), torch.randn(16, 4), labels(16, [0, 1, 2, 9, 15, 14])
    _, expected = whole(pipe, lambda plain: F.cross_entropy(plain(x), target))
    count = (target != IGNORED).sum()
    for a, b in zip(x.chunk(2), target.chunk(2), strict=True):
        share = float(count / (b != IGNORED).sum())
        pipe.train_batch(a, b, loss_fn=F.cross_entropy, accumulate=share)
    torch.testing.assert_close(grads_of(pipe), expected)


@pytest.mark.parametrize("number", [0, -1, float("nan"), float("inf"), "2", None])
def test_what_is_no_number_of_mini_batches_is_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="accumulate="):
        four().train_batch(torch.randn(8, 3), loss_fn=torch.mean, accumulate=number)
