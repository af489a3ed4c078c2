"""What each of the eight ranks of ``test_stage_mesh.py`` does: two of everything."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from syncpipe.distributed import stage
from syncpipe.skip import pop, skippable, stash

WIDTH, M = 8, 4


@skippable(stash=["start"])
class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        yield stash("start", x)
        return x


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@skippable(pop=["start"])
class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return F.linear(x + (yield pop("start")), self.weight)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(Start(), Mlp(), Mlp(), End())
    layers[-1].weight = layers[0].embedding.weight
    return layers


def everything(rank: int, folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, WIDTH, (2, 16, WIDTH), generator=generator)[:, :, 0]
    plain = model()
    F.cross_entropy(plain(x), y).backward()

    mine = stage(model(), [2, 2], sample=x[:2], group=mesh["pp"])
    for each in mine.stages:
        for name, layer in each.submod.named_children():
            if isinstance(layer, Mlp):
                plan = {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
                parallelize_module(each.submod, mesh["tp"], plan)
                fully_shard(layer, mesh=mesh["dp"])
        fully_shard(each.submod, mesh=mesh["dp"])
    schedule = mine.schedule("1f1b", chunks=M, loss_fn=F.cross_entropy)
    half = slice(8) if mesh["dp"].get_local_rank() == 0 else slice(8, 16)
    found = {}
    for _ in range(2):  # and once more, without the gradients of the first time
        mine.zero_grad()
        schedule.step(x[half], target=y[half])
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        for name, parameter in mine.named_parameters(remove_duplicate=False):
            assert isinstance(parameter, DTensor)
            found[name] = float((parameter.grad.full_tensor() - wanted[name].grad).abs().max())
    sharded = copy.copy(next(p for p in mine.parameters() if p.ndim == 2)).to_local().shape
    return {"differences": found, "sharded": tuple(sharded)}
