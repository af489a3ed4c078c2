"""A small classifier, its data, and the loop that everybody writes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe

CHUNKS = 4


def pipe_and_model(balance: list[int] | None = None) -> tuple[Pipe, nn.Sequential]:
    """A pipe on CPU workers, and the same model without one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    balance = balance or [2, 3]
    devices = [f"cpu:{j}" for j in range(len(balance))]
    return Pipe(copy.deepcopy(model), balance, devices=devices, chunks=CHUNKS), model


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches with their targets, always the same."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def plain_loop(model: nn.Module, optimizer: Any, scheduler: Any = None, count: int = 4) -> None:
    """Trains a model on all mini-batches."""
    for x, y in batches(count):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
