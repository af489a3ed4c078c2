"""Models for ``Pipe.auto``, each with the arguments of a call; what they are made of, and the step.

In double precision, without dropout: a pipe's step and the plain model's are equal to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe
from syncpipe.data import tensors_in

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


class UNet(nn.Module):
    """Skips over the middle."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        pairs = list(pairwise(sizes))
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in pairs)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in reversed(pairs))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for conv, norm in zip(self.down, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
            kept.append(x)
        for conv in self.up:
            x = conv(torch.cat([x, kept.pop()], 1))
        return x


class Language(nn.Module):
    """A tied transformer, called with a mask by its name; gives a dict."""

    def __init__(self, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(ids)
        hidden = None if mask is None else mask == 0
        for block in self.blocks:
            x = block(x, src_key_padding_mask=hidden)
        return {"logits": self.head(x)}


def ids(length: int = 7) -> Tensor:
    return torch.randint(64, (FEW, length))


def image(size: int = 32) -> Tensor:
    return torch.randn(FEW, 3, size, size)


#: What needs nothing but PyTorch.
WRITTEN: dict[str, Callable[[], Call]] = {
    "residual": lambda: (Residual(64, 5), (torch.randn(FEW, 24),), {}),
    "U-Net": lambda: (UNet(), (image(16),), {}),
    "tied language model": lambda: (Language(), (ids(),), {"mask": torch.ones(FEW, 7)}),
}


def made(build: Callable[[], Call]) -> Call:
    """A model in double precision, without dropout."""
    torch.manual_seed(0)
    model, args, kwargs = build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

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
    first = next(iter(named.values()))
    expected, start = torch.zeros((), dtype=torch.float64), 0
    for size in map(len, first.chunk(pipe.chunks)):
        rows = slice(start, start + size)
        cut = {k: v[rows] if isinstance(v, Tensor) else v for k, v in named.items()}
        loss = loss_fn(plain(**cut)) * (size / BATCH)
        loss.backward()
        expected, start = expected + loss.detach(), start + size
    place = pipe.devices[0]
    there = {k: v.to(place) if isinstance(v, Tensor) else v for k, v in named.items()}
    input = there if len(there) > 1 else first.to(place)
    found = pipe.train_batch(input, loss_fn=loss_fn, verify=False)
    torch.testing.assert_close(found.cpu(), expected)
    parameters = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        mine, theirs = (
            torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu()
            for p in (parameters[name], parameter)
        )
        torch.testing.assert_close(mine, theirs, msg=partial("{}: {}".format, name))
