"""Weights of losses that are on a device: nobody waits for them, and they get to where they go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.support import accelerator as acc

pytestmark = pytest.mark.gpu

CLASSES, IGNORED = 5, -100


def case(devices: list[torch.device]) -> tuple[Pipe, nn.Sequential, Tensor, Tensor]:
    """A pipe, the same on the CPU, an input, and targets of which a micro-batch has none."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(CLASSES, CLASSES) for _ in devices))
    layers = nn.Sequential(*(nn.Linear(CLASSES, CLASSES) for _ in devices))
    layers.load_state_dict(plain.state_dict())
    pipe = Pipe(layers, [1] * len(devices), devices=devices, chunks=4)
    target = torch.tensor([0, 1, 2, 3, IGNORED, IGNORED, 4, IGNORED])
    return pipe, plain, torch.randn(8, CLASSES), target


def masked(output: Tensor, target: Tensor) -> Tensor:
    kept = target != IGNORED
    each = F.cross_entropy(output, target, reduction="none", ignore_index=IGNORED)
    return each.sum() / kept.sum()


def counted(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


WAYS: dict[str, dict[str, Any]] = {
    "known": {"loss_fn": F.cross_entropy},
    "weight": {"loss_fn": masked, "weight": counted},
    "with the loss": {"loss_fn": lambda y, t: (masked(y, t), counted(t))},
}


@pytest.mark.parametrize("at", [0, -1], ids=["target on the first", "target on the last"])
@pytest.mark.parametrize("way", WAYS)
def test_a_masked_loss_is_that_of_the_mini_batch(way: str, at: int) -> None:
    pipe, plain, x, target = case([acc.device(k) for k in range(4)])
    input, there = x.to(pipe.devices[0]), target.to(pipe.devices[at])
    for _ in range(3):
        pipe.zero_grad()
        with acc.no_waits():
            loss = pipe.train_batch(input, there, verify=False, **WAYS[way])
    expected = masked(plain(x), target)
    expected.backward()
    acc.synchronize()
    torch.testing.assert_close(loss.cpu(), expected.detach())
    for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad)
