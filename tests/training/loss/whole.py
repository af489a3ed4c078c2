"""The mini-batch in one piece, which a pipe with a loss has to equal."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.models import linear_model
from tests.support.running import pipe_of


def four(**options: Any) -> Pipe:
    """A pipe of four stages."""
    torch.manual_seed(1)
    return pipe_of(linear_model(), **options)


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
    torch.testing.assert_close(actual, expected[0])
    torch.testing.assert_close(grads_of(pipe), expected[1])
