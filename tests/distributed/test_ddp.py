"""``DistributedDataParallel(pipe)`` on two gloo processes: the gradients of all ranks, averaged."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncpipe.distributed import data_parallel
from tests.distributed.test_gradients import Sometimes
from tests.support.running import MODES, pipe_of, plain, weigh


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    middle = Sometimes() if kind == "find_unused_parameters" else nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), middle, nn.Linear(6, 3))


def difference(kind: str, mode: str) -> None:
    """A pipe under ``DistributedDataParallel`` trains as the plain loop with averaged gradients."""
    ours = model(kind)
    theirs = copy.deepcopy(ours)
    pipe = pipe_of(ours, [3, 2], chunks=4, checkpoint=mode)
    options = {key: key == kind for key in ("find_unused_parameters", "static_graph")}
    ddp = DistributedDataParallel(pipe, broadcast_buffers=False, **options)
    torch.manual_seed(10 + dist.get_rank())
    for step in range(4):
        if kind == "changing chunks":
            pipe.chunks = 2 + step % 3
        if kind == "find_unused_parameters":
            ours[3].used = theirs[3].used = "b" if step % 2 else "a"
        batches = [torch.randn(12, 6) for _ in range(2 if kind == "no_sync" else 1)]
        for k, x in enumerate(batches):
            last = k == len(batches) - 1
            with nullcontext() if last else ddp.no_sync():
                weigh(ddp(x)).backward()
            weigh(plain(theirs, x, pipe.chunks)).backward()
        for p in theirs.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, dist.ReduceOp.SUM)
            p.grad /= 2
        for module in (ours, theirs):
            torch.optim.SGD(module.parameters(), 0.1).step()
            module.zero_grad()
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)
    for p in ours.parameters():
        other = p.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(p, other)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("plain", mode) for mode in MODES), ("no_sync", "always"), ("static_graph", "always"),
        ("find_unused_parameters", "except_last"), ("changing chunks", "never"),
    ],
)  # fmt: skip
def test_training_with_ddp_is_training_with_averaged_gradients(two, kind, mode):
    two.run(difference, kind, mode)


def warned() -> None:
    """``train_batch`` warns once inside of ``DistributedDataParallel``, never as data parallel."""
    ddp = DistributedDataParallel(pipe_of(model("plain"), [3, 2]))
    x, target = torch.randn(8, 6), torch.randint(0, 3, (8,))
    for pipe, times in (ddp.module, 1), (data_parallel(pipe_of(model("plain"), [3, 2])), 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                pipe.train_batch(x, target, loss_fn=nn.functional.cross_entropy)
        assert len(caught) == times
        for each in caught:
            assert each.filename.endswith("tests/distributed/test_ddp.py")
            assert "this is one of 2 processes" in str(each.message)
            assert "syncpipe.distributed.data_parallel(pipe)" in str(each.message)


def test_train_batch_inside_of_ddp_warns_once(two):
    two.run(warned)
