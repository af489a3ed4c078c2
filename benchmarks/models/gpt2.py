"""GPT-2, with a head of its own or with that of the embedding, which travels as a skip."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe.skip import pop, skippable, stash

from .transformer import Attention, FeedForward


class LearnedEmbedding(nn.Module):
    """Tokens ``[N, T]`` to vectors ``[N, T, width]``, with a parameter for each position."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)  # as in the published code
        nn.init.normal_(self.positions.weight, std=0.01)

    def forward(self, tokens: Tensor) -> Any:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)


@skippable(stash=["table"])
class LendingEmbedding(LearnedEmbedding):
    """The same; it sends its table of tokens to the head."""

    def forward(self, tokens: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("table", self.tokens.weight)
        return super().forward(tokens)


@skippable(pop=["table"])
class BorrowedHead(nn.Module):
    """The logits of the tokens, by the table of the embedding; no parameters of its own."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        table = yield pop("table")
        return F.linear(x, table)


def gpt2_small(
    *,
    tied: bool = False,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50_257,
    length: int = 1024,
    fused: bool = True,
) -> nn.Sequential:
    """GPT-2 small: from tokens ``[N, T]`` to logits ``[N, T, vocabulary]``.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3
    and Table 2, first row (12 layers, 768). The paper's 117 M is a slip; the model that it
    published (https://github.com/openai/gpt-2) has 124.44 M parameters. No dropout, as in there.

    That model ties the head to the embedding. ``Pipe`` refuses a parameter that two partitions
    share, so there are two ways:

    - ``tied=False``: the head has a table of its own. That makes 163.04 M, 38.60 M (50,257 * 768)
      more, and is what one would measure: nothing large travels.
    - ``tied=True``: 124.44 M. The embedding sends its table to the head as a skip, and the gradient
      comes back the same way, with each micro-batch. It trains what GPT-2 trains, for 154 MB of
      traffic each way.

    Args:
        tied: see above.
        layers: blocks of attention and feed-forward.
        width: of the model.
        heads: of the attention.
        vocabulary: the number of different tokens.
        length: the most tokens in a sequence.
        fused: see :class:`benchmarks.models.transformer.Attention`.

    Returns:
        2 * layers + 3 layers.
    """
    embedding = LendingEmbedding if tied else LearnedEmbedding
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks.append(Attention(width, heads, fused))
        blocks.append(FeedForward(width, 4 * width, partial(nn.GELU, approximate="tanh")))
    return nn.Sequential(
        embedding(vocabulary, width, length),
        *blocks,
        nn.LayerNorm(width),
        BorrowedHead() if tied else nn.Linear(width, vocabulary, bias=False),
    )
