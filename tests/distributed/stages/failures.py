"""What each of the three ranks of ``test_stage_failures.py`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from syncpipe.distributed import stage


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
        x.register_hook(_broken)
        return x


def _broken(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("in backward")


def fails(how: str) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Fails(how), nn.Linear(4, 4))
    mine = stage(layers, [1, 1, 1], sample=torch.randn(2, 4))
    schedule = mine.schedule("1f1b", chunks=6, loss_fn=F.mse_loss)
    found = []
    for _ in range(2):
        try:
            schedule.step(torch.randn(12, 4), target=torch.randn(12, 4))
            found.append("nothing")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
    return found


def everything(rank: int, folder: Path) -> Any:
    found = {"forward": fails("forward")}
    dist.destroy_process_group()  # which wakes the others
    meeting = f"file://{folder}/again"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=3)
    return {**found, "backward": fails("backward")}
