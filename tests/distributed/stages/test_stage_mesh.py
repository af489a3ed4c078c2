"""Three kinds of parallelism on eight ranks: pipeline, sharded data, tensors, two of each."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from syncpipe import Pipe
from syncpipe.distributed import stage
from tests.distributed.processes import ranks
from tests.distributed.stages.models import Block, data, model

M, RATE = 4, 0.5


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Words and those to be found, of which the second half has more that count."""
    x, y = data(step)
    y[:11] = -100
    return x, y


def close(ours: Any, theirs: Tensor) -> None:
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, check_dtype=False)


def everything(where: str) -> list[str]:
    """Three steps with masked targets and clipping, a validation, sums, and a checkpoint."""
    folder = Path(where)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    mine = stage(model(), [6, 6], sample=batch(0)[0][:2], group=mesh["pp"])
    for each in mine.stages:
        for name, layer in each.submod.named_children():
            if isinstance(layer, Block):
                plan = {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
                parallelize_module(each.submod, mesh["tp"], plan)
                fully_shard([layer.up, layer.down], mesh=mesh["dp"])
        fully_shard(each.submod, mesh=mesh["dp"])
    assert all(isinstance(parameter, DTensor) for parameter in mine.parameters())
    assert all(len(p.to_local()) < len(p) for p in mine.parameters())
    optimizer = torch.optim.SGD(mine.parameters(), lr=RATE)
    options = {"chunks": M, "data_parallel": mesh["dp"]}
    schedule = mine.schedule("1f1b", loss_fn=F.cross_entropy, **options)
    sums = mine.schedule("1f1b", loss_fn=nn.CrossEntropyLoss(reduction="sum"), **options)
    first = mesh["dp"].get_local_rank() == 0
    half, counted = (slice(8), slice(24)) if first else (slice(8, 16), slice(24, 48))
    plain = model()
    theirs = torch.optim.SGD(plain.parameters(), lr=RATE)
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    ours = dict(mine.named_parameters(remove_duplicate=False))
    with pytest.raises(ValueError, match="norm_type=0: give a positive one"):
        mine.clip_grad_norm_(0.05, 0)
    for step, norm_type in enumerate((2.0, 1.0, math.inf)):
        x, y = batch(step)
        mine.zero_grad()
        losses: list[Tensor] = []
        schedule.step(x[half], target=y[counted], losses=losses)
        norm = mine.clip_grad_norm_(0.05, norm_type)
        optimizer.step()
        plain.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type))
        theirs.step()
        assert bool(losses) == (mine.last is not None)
        if losses:
            mean = torch.stack(losses).sum()
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            close(mean / 2, loss.detach())
    for name, parameter in ours.items():
        close(parameter.detach(), wanted[name].detach())
    mine.eval()
    output = schedule.eval(x[half])
    if output is not None:
        close(output, plain(x[half]).detach())
    mine.train()
    dcp.save({"model": mine.state_dict()}, checkpoint_id=folder / "checkpoint")
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), folder / "plain.pt")
    mine.zero_grad()
    plain.zero_grad()
    sums.step(x[half], target=y[counted])
    F.cross_entropy(plain(x), y, reduction="sum").backward()
    for name, parameter in ours.items():
        close(parameter.grad, wanted[name].grad)
    return list(ours)


def test_training_in_three_dimensions_is_that_of_the_plain_model(tmp_path):
    with ranks(8, tmp_path) as eight:
        names = eight.run(everything, str(tmp_path))
    assert {*chain(*names)} == {*dict(model().named_parameters(remove_duplicate=False))}
    pipe = Pipe(model(), [3, 4, 5], devices=["cpu:0", "cpu:1", "cpu:2"])
    dcp.load({"model": pipe.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    wanted = torch.load(tmp_path / "plain.pt")
    for name, value in pipe.state_dict().items():
        close(value, wanted[name])
