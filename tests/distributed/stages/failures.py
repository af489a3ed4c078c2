"""What each of the three ranks of ``test_stage_failures.py`` does."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from syncpipe.distributed import peers, stage

WAYS = ("forward", "backward", "eval", "refused", "clip", "leaves", "killed")


class Fails(nn.Module):
    """Breaks in the forward of a micro-batch or in its backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < 3:
            return self.linear(x)
        if self.how == "forward":
            raise KeyError("the third micro-batch")
        x = self.linear(x)
        if self.how == "backward":
            x.register_hook(_broken)
        return x


def _broken(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("in backward")


def raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return "nothing"


def fails(how: str, rank: int) -> list[str]:
    """What a call says that fails in one rank, or is another one there; and what the next says."""
    peers.PATIENCE, peers._LOOK = 0.3, 0.1
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Fails(how), nn.Linear(4, 4))
    x, y = torch.randn(12, 4), torch.randn(12, 4)
    mine = stage(layers, [1, 1, 1], sample=x[:2])
    schedule = mine.schedule("1f1b", chunks=6, loss_fn=F.mse_loss)

    def step() -> None:
        schedule.step(x, target=y)

    def clip() -> None:
        mine.clip_grad_norm_(1.0)

    def other() -> None:
        schedule.eval(x)

    def short() -> None:
        schedule.step(x[:7] if rank == 0 else x, target=y)

    if how in ("forward", "backward"):
        return [raised(step), raised(step)]
    step()
    if how == "leaves":
        if rank == 1:
            return []
        return [raised(step), raised(step)]
    if how == "killed":
        if rank == 1:
            os.kill(os.getpid(), 9)
        return [raised(step), raised(step)]
    act = {"eval": other, "refused": short, "clip": clip}[how]
    return [raised(act if rank == (2 if how == "eval" else 0) else step), raised(step)]


def everything(rank: int, folder: Path) -> Any:
    found = {}
    for how in WAYS:
        if how != WAYS[0]:
            meeting = f"file://{folder}/{how}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=3)
        found[how] = fails(how, rank)
        torch.save(found, folder / f"{rank}.pt")  # one does not come to its end
        gc.collect()  # the rank that leaves says so when it lets go of its stages
        if how != WAYS[-1]:
            dist.destroy_process_group()
    return found
