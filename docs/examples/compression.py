"""Gradients cross the boundaries between stages in bfloat16: an extension of 20 lines.

    python compression.py

It changes the package itself, at one of the five places of docs/how-it-works.md.
"""

from typing import Any

import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.training.extensions import BACKWARD


def compressed(task: Any, r: int, inner: Any) -> Any:
    """Around the backward of stage ``r``; asked when a program is bound."""
    if len(task.call.pipeline.stages) == 1:
        return inner

    def outer(i: int, cell: Any, grads: list[Any]) -> list[Any]:
        grads[:] = [cast(part, torch.float32) for part in grads]  # for each edge, from later stages
        parts = inner(i, cell, grads)
        return [cast(part, torch.bfloat16) for part in parts]  # for each edge, to earlier stages

    return outer


def cast(grads: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """None is a tensor that no gradient reached."""
    return [None if grad is None else grad.to(dtype) for grad in grads]


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    pipe = Pipe(model, [1, 2], devices=["cpu:0", "cpu:1"], chunks=4)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    grads = []
    for extensions in ([], [compressed]):
        BACKWARD.extend(extensions)
        pipe.zero_grad()
        pipe.train_batch(x, y, loss_fn=nn.functional.mse_loss)
        grads.append(model[0].weight.grad.clone())
    exact, rounded = grads
    print(f"difference {(rounded - exact).norm() / exact.norm():.4f}")
    BACKWARD.remove(compressed)
