"""Transformer language models, two layers for each of their blocks: attention and feed-forward.

Both keep their residual inside. A cut inside of them would have to send the residual as well as
the output of a sublayer, twice as much as between them, and it would spare a stage less than half a
block.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """``x + attention(norm(x))``, causal, with several heads: ``[N, T, width]`` to the same shape.

    Args:
        width: of the model.
        heads: their number, a divisor of the width.
        fused: by PyTorch's fused kernels, which store no scores; False: step by step, storing the
            N * heads * T * T scores as everyone did before there were such kernels.
    """

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads}: the width, {width}, must be a multiple of them")
        self.norm = nn.LayerNorm(width)
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)
        self.heads, self.fused = heads, fused

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        heads = self.inward(self.norm(x)).view(samples, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            mixed = scores.masked_fill(future, -math.inf).softmax(dim=-1) @ value
        return x + self.outward(mixed.transpose(1, 2).reshape(samples, length, width))


class FeedForward(nn.Module):
    """``x + outward(activation(inward(norm(x))))``, position by position."""

    def __init__(self, width: int, hidden: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), activation(), nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)
