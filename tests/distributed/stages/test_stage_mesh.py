"""Three kinds of parallelism on eight ranks: pipeline, sharded data, tensors, two of each."""

from __future__ import annotations

import math
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
from syncpipe.skip import pop, skippable, stash
from tests.distributed.processes import ranks

WIDTH, M, RATE = 8, 4, 0.5


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


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Indices and classes, of which the second half has fewer that count."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(0, WIDTH, (2, 16, WIDTH), generator=generator)[:, :, 0]
    y[2] = y[9:14] = -100
    return x, y


def everything(where: str) -> dict[str, Any]:
    """Three steps with masked targets and clipping, a validation, and a checkpoint."""
    folder = Path(where)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    mine = stage(model(), [2, 2], sample=batch(0)[0][:2], group=mesh["pp"])
    for each in mine.stages:
        for name, layer in each.submod.named_children():
            if isinstance(layer, Mlp):
                plan = {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
                parallelize_module(each.submod, mesh["tp"], plan)
                fully_shard(layer, mesh=mesh["dp"])
        fully_shard(each.submod, mesh=mesh["dp"])
    assert all(isinstance(parameter, DTensor) for parameter in mine.parameters())
    optimizer = torch.optim.SGD(mine.parameters(), lr=RATE)
    schedule = mine.schedule("1f1b", chunks=M, loss_fn=F.cross_entropy, data_parallel=mesh["dp"])
    sums = mine.schedule(
        "1f1b", chunks=M, loss_fn=nn.CrossEntropyLoss(reduction="sum"), data_parallel=mesh["dp"]
    )
    half = slice(8) if mesh["dp"].get_local_rank() == 0 else slice(8, 16)
    plain, found = model(), {"differences": {}, "norms": [], "losses": []}
    wanted = dict(plain.named_parameters(remove_duplicate=False))

    def compare(what: str) -> None:
        for name, parameter in mine.named_parameters(remove_duplicate=False):
            ours, theirs = (p.grad if what == "sums" else p for p in (parameter, wanted[name]))
            far = (ours.full_tensor() - theirs).abs().max() / theirs.abs().max()
            found["differences"][f"{what} {name}"] = float(far)

    for step, norm_type in enumerate((2.0, 1.0, math.inf)):
        x, y = batch(step)
        mine.zero_grad()
        losses: list[Tensor] = []
        schedule.step(x[half], target=y[half], losses=losses)
        norm = mine.clip_grad_norm_(0.05, norm_type)
        optimizer.step()
        plain.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= RATE * parameter.grad
        found["norms"].append(float(norm / expected))
        if losses:
            mean = torch.stack(losses).sum()
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            found["losses"].append(float(mean / 2 / loss.detach()))
    compare("step")
    mine.eval()
    output = schedule.eval(x[half])
    if output is not None:
        found["validated"] = float((output - plain(x[half]).detach()).abs().max())
    mine.train()
    dcp.save({"model": mine.state_dict()}, checkpoint_id=folder / "checkpoint")
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), folder / "plain.pt")
    mine.zero_grad()
    plain.zero_grad()
    sums.step(x[half], target=y[half])
    F.cross_entropy(plain(x), y, reduction="sum").backward()
    compare("sums")
    tensor = next(p for p in mine.parameters() if p.ndim == 2).to_local()
    return {**found, "sharded": tuple(tensor.shape)}


def test_training_in_three_dimensions_is_that_of_the_plain_model(tmp_path):
    with ranks(8, tmp_path) as eight:
        all_ranks = eight.run(everything, str(tmp_path))
    names = dict(model().named_parameters(remove_duplicate=False))
    found = {name: value for rank in all_ranks for name, value in rank["differences"].items()}
    assert found.keys() == {f"{what} {name}" for what in ("step", "sums") for name in names}
    for rank in all_ranks:
        assert max(rank["differences"].values()) < 1e-5, rank
        assert rank["norms"] == pytest.approx([1, 1, 1], abs=1e-5)
        assert rank["sharded"][0] == WIDTH // 2
    last = [rank for rank in all_ranks if rank["losses"]]
    assert len(last) == 4
    for rank in last:
        assert rank["losses"] == pytest.approx([1, 1, 1], abs=1e-5)
        assert rank["validated"] < 1e-5
    pipe = Pipe(model(), [1, 1, 2], devices=["cpu:0", "cpu:1", "cpu:2"])
    dcp.load({"model": pipe.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    wanted = torch.load(tmp_path / "plain.pt")
    for name, value in pipe.state_dict().items():
        assert torch.allclose(value, wanted[name], atol=1e-5)
