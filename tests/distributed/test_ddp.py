"""``DistributedDataParallel(pipe)`` on two gloo processes: the gradients of all ranks, averaged."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from syncpipe.distributed import data_parallel
from tests.support.running import MODES, pipe_of, plain, weigh

KINDS = ["plain", "no_sync", "find_unused_parameters", "static_graph", "changing chunks"]


class Sometimes(nn.Module):
    """Uses one of its two layers, by the sign of its input's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.used == "a" else self.a(x) + self.b(x)

    used = "both"


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    middle = Sometimes() if kind == "find_unused_parameters" else nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), middle, nn.Linear(6, 3))


def difference(kind: str, mode: str) -> float:
    """The largest difference between the parameters after a few steps.

    Of a pipe under ``DistributedDataParallel``, beside the plain loop with gradients averaged by
    hand.
    """
    ours = model(kind)
    theirs = copy.deepcopy(ours)
    pipe = pipe_of(ours, [3, 2], chunks=4, checkpoint=mode)
    options: dict[str, Any] = {
        "find_unused_parameters": kind == "find_unused_parameters",
        "static_graph": kind == "static_graph",
    }
    ddp = DistributedDataParallel(pipe, broadcast_buffers=False, **options)
    torch.manual_seed(10 + dist.get_rank())
    for step in range(4):
        if kind == "changing chunks":
            pipe.chunks = 2 + step % 3
        if kind == "find_unused_parameters":
            ours[3].used = theirs[3].used = "both" if step % 2 else "a"
        batches = [torch.randn(12, 6) for _ in range(2 if kind == "no_sync" else 1)]
        for k, x in enumerate(batches):
            last = k == len(batches) - 1
            with nullcontext() if last else ddp.no_sync():
                weigh(ddp(x)).backward()
            weigh(plain(theirs, x, pipe.chunks)).backward()
        for p in theirs.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= 2
        with torch.no_grad():
            for module in (ours, theirs):
                for p in module.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
                module.zero_grad()
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    worst = max(float((a - b).abs().max()) for a, b in pairs)
    others: list[Any] = [None, None]
    dist.all_gather_object(others, [p.detach() for p in ours.parameters()])
    agree = all(torch.equal(a, b) for a, b in zip(*others, strict=True))
    return worst if agree else float("inf")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_training_with_ddp_is_training_with_averaged_gradients(two, kind, mode):
    assert max(two.run(difference, kind, mode)) < 1e-6


def warned() -> list[list[str]]:
    """The warnings of two ``train_batch``, inside of ``DistributedDataParallel`` and as data
    parallel."""
    ddp = DistributedDataParallel(pipe_of(model("plain"), [3, 2]))
    x, target = torch.randn(8, 6), torch.randint(0, 3, (8,))
    found = []
    for pipe in (ddp.module, data_parallel(pipe_of(model("plain"), [3, 2]))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                pipe.train_batch(x, target, loss_fn=nn.functional.cross_entropy)
        found.append([f"{each.filename}: {each.message}" for each in caught])
    return found


def test_train_batch_inside_of_ddp_warns_once(two):
    for [told], nothing in two.run(warned):
        assert "tests/distributed/test_ddp.py: this is one of 2 processes" in told
        assert "syncpipe.distributed.data_parallel(pipe)" in told
        assert not nothing
