"""A model, pipes for it on four accelerators, and what they have to compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
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


def places(kind: type, *indices: int) -> Callable[[], list[Any]]:
    return lambda: [kind(acc.device(k)) for k in indices]


LAYOUTS: dict[str, Callable[[], list[Any]]] = {
    "four": places(torch.device, 0, 1, 2, 3),
    "backwards": places(torch.device, 3, 1, 2, 0),
    "interleaved": places(torch.device, 0, 1, 0, 1),
    "workers": places(Worker, 0, 1, 2, 3),
    "one": places(torch.device, 1, 1, 1, 1),
    "two workers on one": lambda: places(Worker, 1, 1)() * 2,
    "host between": lambda: [acc.device(0), "cpu:0", acc.device(1), acc.device(2)],
    "host at the ends": lambda: ["cpu:0", acc.device(1), acc.device(2), "cpu:1"],
    "in turns": lambda: ["cpu:0", acc.device(1), "cpu:1", acc.device(0)],
}
HOST = "host"  #: the layout to compare with
#: With replicas, for models of seven layers: balance, replicas, devices.
SHAPES: dict[str, tuple[list[int], list[int], Callable[[], list[Any]]]] = {
    "last": ([3, 2, 2], [1, 1, 2], LAYOUTS["four"]),
    "hybrid": ([4, 3], [2, 2], LAYOUTS["four"]),
    "data parallel": ([7], [4], LAYOUTS["four"]),
    "in rounds": ([2, 2, 2, 1], [2] * 4, places(torch.device, 0, 1, 2, 3, 0, 1, 2, 3)),
    "three and one": ([4, 3], [3, 1], places(torch.device, 3, 1, 0, 2)),
    "by hand": ([4, 3], [2, 2], places(Worker, 0, 1, 1, 2)),
}


def model() -> nn.Sequential:
    """Seven layers; a skip from the first stage to the last."""
    return nn.Sequential(
        Send(), nn.Linear(WIDTH, WIDTH), Residual(WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, WIDTH), Receive(), nn.Linear(WIDTH, WIDTH),
    ).double()  # fmt: skip


def pipe_of(module: nn.Sequential, layout: str, **options: Any) -> Pipe:
    """A pipe of a copy, with four stages or of a shape."""
    if layout in SHAPES and acc.count() < 4:
        pytest.skip("needs four accelerators")
    even = [len(module) // 4 + (j < len(module) % 4) for j in range(4)]
    balance, replicas, devices = SHAPES.get(layout) or (even, [1] * 4, LAYOUTS.get(layout))
    options = {
        "devices": devices() if devices else ["cpu"] * 4,
        "replicas": replicas,
        "chunks": CHUNKS,
        **options,
    }
    return Pipe(copy.deepcopy(module), balance, **options)


def data() -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    return x, target


def step(
    pipe: Pipe, x: Tensor, target: Tensor, loss_fn: Any, schedule: str = "1f1b", **options: Any
) -> Tensor:
    """The loss of a step of ``train_batch``, or of the caller's own."""
    if schedule != "pipe(x)":
        return pipe.train_batch(x, target, loss_fn=loss_fn, schedule=schedule, **options)
    loss: Tensor = loss_fn(pipe(x), target.to(pipe.devices[-1]))
    loss.backward()
    return loss.detach()


def trained(pipe: Pipe, x: Tensor, *arguments: Any, **options: Any) -> list[Tensor]:
    """Loss and gradients of a pipe; they are read on the streams on which it was asked for."""
    pipe.zero_grad()
    x = x.detach().to(pipe.devices[0]).requires_grad_()
    loss = step(pipe, x, *arguments, **options)
    return [loss, x.grad, *(p.grad for p in pipe.parameters())]


def assert_close(found: list[Tensor], right: list[Tensor]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-12)


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Weights differ from micro-batch to micro-batch, and are where the loss is."""
    return F.mse_loss(output, target), (target > 0).sum()
