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


class Embedding(nn.Module):
    """Tokens ``[N, T]`` to vectors ``[N, T, width]``, with the positions as sines and cosines."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)  # forward scales it to 1
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
        angles = torch.arange(length).unsqueeze(1) * rates
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("positions", waves, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = self.tokens(tokens)
        return vectors * math.sqrt(vectors.shape[-1]) + self.positions[: tokens.shape[1]]


def transformer(
    layers: int,
    *,
    width: int = 2048,
    hidden: int = 8192,
    heads: int = 32,
    vocabulary: int = 32_000,
    length: int = 1024,
    fused: bool = False,
) -> nn.Sequential:
    """Transformer-L: from tokens ``[N, T]`` to logits ``[N, T, vocabulary]``.

    Source: Huang et al. 2018, "GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism",
    https://arxiv.org/abs/1811.06965, section 3 and Table 1: dimension 2048 of the model and
    8192 of the feed-forward layers, 32 heads, sequences of 1024 tokens, 32k words. The block is as
    in Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, figure 1 (left).

    Assumed, and confirmed by all five published numbers of parameters, which say 50.36 M for each
    layer and 131 M besides:

    - 32k means 32,000, and the embedding and the softmax have a table each: 2 * 32,000 * 2048 is
      131.07 M. (One table of 64,000 would be the same number.)
    - The linear layers have biases: without them, 1663 layers would have 83.8 B, not 83.9 B.

    The numbers say nothing about the rest: the normalization comes before the sublayers and once
    more at the end, ReLU, positions without parameters, a softmax without a bias, a causal mask, no
    dropout. The attention stores its scores, since fused kernels are younger than the paper.

    Args:
        layers: L.
        width: of the model, an even number.
        hidden: width of the feed-forward layers.
        heads: of the attention.
        vocabulary: the number of different tokens.
        length: the most tokens in a sequence.
        fused: see :class:`Attention`.

    Returns:
        2 * layers + 3 layers.
    """
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [Attention(width, heads, fused), FeedForward(width, hidden, nn.ReLU)]
    return nn.Sequential(
        Embedding(vocabulary, width, length),
        *blocks,
        nn.LayerNorm(width),
        nn.Linear(width, vocabulary, bias=False),
    )
