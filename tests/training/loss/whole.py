"""The mini-batch in one piece, which a pipe with a loss has to equal; a classifier, and masks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.support.models import linear_model
from tests.support.running import pipe_of
from tests.support.training import RUNS

CLASSES = 5
IGNORED = -100


def four(**options: Any) -> Pipe:
    """A pipe of four stages."""
    torch.manual_seed(1)
    return pipe_of(linear_model(), **options)


def classifier(run: str = "1f1b", **options: Any) -> Pipe:
    """Four stages on the devices of a schedule."""
    torch.manual_seed(3)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES)]
    return Pipe(nn.Sequential(*layers), [1, 1, 1, 1], devices=RUNS[run][1], **options)


def labels(size: int, kept: Sequence[int], ignored: int = IGNORED) -> Tensor:
    """Targets of which some are masked."""
    target = torch.arange(size) % CLASSES
    return torch.where(torch.isin(torch.arange(size), torch.tensor(kept)), target, ignored)


def masked(output: Tensor, target: Tensor) -> Tensor:
    """A mean over what is not masked, of which nobody knows."""
    kept = target != IGNORED
    return (F.cross_entropy(output, target, reduction="none") * kept).sum() / kept.sum()


def grads_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def whole(pipe: nn.Module, loss: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the mini-batch in one piece; ``loss`` is called with a plain copy."""
    plain = copy.deepcopy(nn.Sequential(*pipe))
    plain.zero_grad()
    value = loss(plain)
    value.backward()
    return value.detach(), [p.grad for p in plain.parameters()]


def assert_trains_like(pipe: Pipe, actual: Tensor, expected: tuple[Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(actual, expected[0], equal_nan=True)
    torch.testing.assert_close(grads_of(pipe), expected[1], equal_nan=True)
