"""Models for ``Pipe.auto``, each with the arguments of a call; what they are made of, and the step.

In double precision: a pipe's step and the plain model's are equal to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.data.trees import tensors_in
from tests.layers.conversion.models import Dense, ResNet, Transformer, tokens
from tests.support.models import cut
from tests.support.training import size_of

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
#: Samples of a sample, and of a mini-batch.
FEW, BATCH = 3, 12


class Residual(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(24, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def tied() -> nn.Module:
    model = Transformer()
    model.head.weight = model.tokens.weight
    return model


#: What needs nothing but PyTorch.
WRITTEN: dict[str, Callable[[], Call]] = {
    "residual": lambda: (Residual(64, 5), (torch.randn(FEW, 24),), {}),
    "norms": lambda: (ResNet(64), (torch.randn(FEW, 64),), {}),
    "skips": lambda: (Dense(32), (torch.randn(FEW, 32),), {}),
    "tied language model": lambda: (tied(), tokens(FEW)[:1], {"mask": tokens(FEW)[1]}),
}


def made(build: Callable[[], Call]) -> Call:
    """A model in double precision."""
    torch.manual_seed(0)
    model, args, kwargs = build()

    def doubled(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    args = tuple(map(doubled, args))
    return model.double(), args, {name: doubled(value) for name, value in kwargs.items()}


def loss_fn(output: Any) -> Tensor:
    """A mean over the samples of all that a model gives."""
    found = [t for t in tensors_in(output) if t.is_floating_point() and t.dim()]
    return torch.stack(
        [(t * t).flatten(1).mean() if t.dim() > 1 else t.mean() for t in found]
    ).sum()


def grown(value: Any) -> Any:
    """A mini-batch, from a sample."""
    return torch.cat([value] * (BATCH // FEW)) if isinstance(value, Tensor) else value


def assert_trains(pipe: Pipe, plain: nn.Module, args: Any, kwargs: Any) -> None:
    """A step of the pipe is that of the plain model, which is fed its micro-batches.

    Args:
        pipe: the pipe.
        plain: a copy of the model, made before.
        args: of the sample.
        kwargs: of the sample.
    """
    named = dict(zip(inspect.signature(plain.forward).parameters, args, strict=False)) | kwargs
    named = {name: grown(value) for name, value in named.items()}
    expected = torch.zeros((), dtype=torch.float64)
    for piece in cut(named, pipe.chunks):
        loss = loss_fn(plain(**piece)) * (size_of(piece) / BATCH)
        loss.backward()
        expected += loss.detach()
    input = named if len(named) > 1 else named.popitem()[1]
    found = pipe.train_batch(input, loss_fn=loss_fn, verify=False)
    torch.testing.assert_close(found, expected)
    mine, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (pipe, plain))
    torch.testing.assert_close(mine, theirs)
