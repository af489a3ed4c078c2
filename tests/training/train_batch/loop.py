"""A model, its pipe, and the loop over micro-batches as people write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.support.models import assert_same_tree
from tests.support.running import assert_same
from tests.support.training import LAST_FIRST, RUNS, weigh


def noisy(output: Any, target: Any = None) -> Tensor:
    """A loss that draws."""
    return weigh(output, target) * torch.rand(())


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)
    )


def model_pipe(run: str, module: nn.Sequential | None = None, **options: Any) -> Pipe:
    return Pipe(
        model() if module is None else module,
        [2, 2, 1, 1],
        devices=RUNS[run][1],
        **{"chunks": 5, **options},
    )


def by_hand(
    plain: nn.Sequential, x: Tensor, target: Tensor, run: str, chunks: int = 5
) -> tuple[Tensor, Tensor]:
    """The loop that people write; returns loss and outputs."""
    losses, outputs = [], []
    for c, t in zip(x.chunk(chunks), target.chunk(chunks), strict=True):
        outputs.append(plain(c))
        losses.append(F.mse_loss(outputs[-1], t) * (len(c) / len(x)))
    for loss in losses[::-1] if run in LAST_FIRST else losses:
        loss.backward()
    return sum(losses[1:], losses[0]).detach(), torch.cat(outputs).detach()


def assert_same_state(ours: nn.Module, theirs: nn.Module, *, exact: bool) -> None:
    assert_same_tree(dict(ours.named_buffers()), dict(theirs.named_buffers()), "buffers")
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        if exact or p.grad is None or q.grad is None:
            assert_same([p.grad], [q.grad])
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
