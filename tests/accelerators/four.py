"""A model, pipes for it on four accelerators, and what they have to compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.worker import Worker
from tests.support import accelerator as acc
from tests.support.running import Residual
from tests.support.skips import Receive, Send

WIDTH, ROWS, CHUNKS = 8, 12, 4
MODES = ["always", "except_last", "never"]
#: Each way to train with one or two of the modes, which do not depend on it.
WAYS = [
    ("always", "pipe(x)"), ("never", "pipe(x)"), ("except_last", "gpipe"),
    ("never", "1f1b"), ("always", "1f1b"), ("except_last", "zb_h1"),
]  # fmt: skip


def two_workers() -> list[Any]:
    a, b = Worker(acc.device(1)), Worker(acc.device(1))
    return [a, b, a, b]


LAYOUTS: dict[str, Callable[[], list[Any]]] = {
    "four": lambda: [acc.device(k) for k in range(4)],
    "backwards": lambda: [acc.device(k) for k in (3, 1, 2, 0)],
    "interleaved": lambda: [acc.device(k) for k in (0, 1, 0, 1)],
    "workers": lambda: [Worker(acc.device(k)) for k in range(4)],
    "two workers on one": two_workers,
    "host between": lambda: [acc.device(0), "cpu:0", acc.device(1), acc.device(2)],
    "host at the ends": lambda: ["cpu:0", acc.device(1), acc.device(2), "cpu:1"],
    "in turns": lambda: ["cpu:0", acc.device(1), "cpu:1", acc.device(0)],
}


def model() -> nn.Sequential:
    """Seven layers; a skip from the first stage to the last."""
    return nn.Sequential(
        Send(), nn.Linear(WIDTH, WIDTH), Residual(WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, WIDTH), Receive(), nn.Linear(WIDTH, WIDTH),
    ).double()  # fmt: skip


def pipe_of(module: nn.Sequential, layout: str, **arguments: Any) -> Pipe:
    n = len(module)
    balance = [n // 4 + (j < n % 4) for j in range(4)]
    return Pipe(
        copy.deepcopy(module), balance, devices=LAYOUTS[layout](), chunks=CHUNKS, **arguments
    )


def data() -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    return x, target


def expected(module: nn.Sequential, x: Tensor, target: Tensor, loss_fn: Any) -> list[Tensor]:
    """Loss and gradients of the plain model on the CPU."""
    module = copy.deepcopy(module)
    x = x.detach().clone().requires_grad_()
    parts = []
    for piece, goal in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
        result = loss_fn(module(piece), goal)
        parts.append(result if isinstance(result, tuple) else (result, torch.tensor(1.0)))
    loss = sum(part * weight for part, weight in parts) / sum(weight for _, weight in parts)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in module.parameters())]


def trained(pipe: Pipe, x: Tensor, target: Tensor, loss_fn: Any, **arguments: Any) -> list[Tensor]:
    """The same of a pipe; everything is read on the streams on which it was asked for."""
    pipe.zero_grad()
    x = x.detach().to(pipe.devices[0]).requires_grad_()
    loss = pipe.train_batch(x, target, loss_fn=loss_fn, **arguments)
    return [loss, x.grad, *(p.grad for p in pipe.parameters())]


def assert_close(found: list[Tensor], right: list[Tensor]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-12)


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Weights differ from micro-batch to micro-batch, and are where the loss is."""
    return F.mse_loss(output, target), (target > 0).sum()
