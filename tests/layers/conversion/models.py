"""Models as people write them: not one of them is a chain of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(d, d), nn.BatchNorm1d(d)
        self.relu, self.second = nn.ReLU(inplace=True), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.relu(self.norm(self.first(x))))


class ResNet(nn.Module):
    """Residuals, normalisation, writes in place, one module for all activations."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(d, d)
        self.blocks = nn.Sequential(*(Residual(d) for _ in range(3)))
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.stem(x))
        out = self.blocks(out)
        out += x
        return self.head(torch.flatten(self.relu(out), 1))


class Dense(nn.Module):
    """Every layer sees all before it."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d * (k + 1), d) for k in range(4))
        self.head = nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(torch.tanh(layer(torch.cat(found, 1))))
        return self.head(sum(found[1:], found[0]))


class Attention(nn.Module):
    def __init__(self, d: int, p: float) -> None:
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(d, 3 * d), nn.Linear(d, d), p

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = self.qkv(x).chunk(3, -1)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.out(y), {"values": v}


class Block(nn.Module):
    def __init__(self, d: int, p: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(d), Attention(d, p)
        self.up, self.act, self.down = nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y, _ = self.attention(self.norm(x), mask)
        x = x + self.drop(y)
        return x + self.drop(self.down(self.act(self.up(x))))


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


torch.utils._pytree.register_pytree_node(
    Output,
    lambda output: ([output.logits, output.hidden], None),
    lambda parts, _: Output(*parts),
)


class Transformer(nn.Module):
    """Tokens and a mask, positions made on the way, a parameter of its own, an output class."""

    def __init__(self, d: int = 8, p: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, d), nn.Embedding(16, d)
        self.h = nn.ModuleList(Block(d, p) for _ in range(layers))
        self.scale = nn.Parameter(torch.rand(d))
        self.register_buffer("shift", torch.rand(d))
        self.register_buffer("unsaved", torch.rand(d), persistent=False)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 20, bias=False)
        self.unused = nn.Linear(2, 3)

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, *, hidden: bool = False, **more: Any
    ) -> Output:
        batch, length = ids.shape
        where = torch.arange(length, device=ids.device)
        x = self.tokens(ids) + self.positions(where)
        bias = torch.full((length, length), float("-inf"), device=x.device).triu(1)
        bias = bias.expand(batch, length, length)
        if mask is not None:
            bias = bias.masked_fill(~mask[:, None, :], -1e4)
        states = []
        for block in self.h:
            x = block(x, bias)
            states.append(x)
        x = self.norm(x * self.scale + self.shift + self.unsaved)
        return Output(self.head(x), tuple(states) if hidden else None)


def tokens(batch: int = 5, length: int = 7) -> tuple[Tensor, Tensor]:
    """Ids, and a mask with padding in each row."""
    ids = torch.randint(0, 20, (batch, length))
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[:, -2:] = False
    return ids, mask
