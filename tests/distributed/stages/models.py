"""A model with all that crosses from stage to stage, and what it should give."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import LayerSpec, TiedLayerSpec
from syncpipe.skip import pop, skippable, stash

WORDS, WIDTH, LENGTH = 11, 6, 3


@skippable(stash=["embedded", "ids"])
class Read(nn.Module):
    """Embeds, and gives a dict with a mask, an index and None; two skips, one of them integers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Generator[Any, Any, dict[str, Any]]:
        x = self.words(ids)
        yield stash("embedded", x.clone())
        yield stash("ids", ids)
        return {"x": x, "mask": ids > 3, "turn": torch.tensor(0.5 + 0.5j), "none": None, "k": 2}


class Block(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        x = given["x"].mul_(given["turn"].real)
        y = self.down(torch.tanh(self.up(x))) * given["mask"].unsqueeze(-1)
        return {**given, "x": x + y * given["k"]}


@skippable(pop=["embedded", "ids"])
class Join(nn.Module):
    """Takes both skips."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, given: dict[str, Any]) -> Generator[Any, Any, Tensor]:
        assert given["none"] is None
        assert given["mask"].dtype is torch.bool
        embedded = yield pop("embedded")
        ids = yield pop("ids")
        return given["x"] + embedded + self.bias[ids]


class Write(nn.Module):
    """Logits, by the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).flatten(0, 1)


def model() -> nn.Sequential:
    """Twelve layers; the first and the last share a weight."""
    torch.manual_seed(0)
    layers = nn.Sequential(Read(), *[Block() for _ in range(9)], Join(), Write())
    layers[-1].weight = layers[0].words.weight
    return layers


def specs() -> list[LayerSpec]:
    """The same, not built yet."""
    return [
        TiedLayerSpec("words", Read, tied_weight_attr="words.weight"),
        *[LayerSpec(Block) for _ in range(9)],
        LayerSpec(Join),
        LayerSpec(Write),
    ]


def data(step: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    """Words, and those to be found; some of these are not counted."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
    y = torch.randint(0, WORDS, (size * LENGTH,), generator=generator)
    y[:: 5 + step] = -100
    return x, y


def expected(steps: int = 1) -> tuple[nn.Sequential, Tensor]:
    """The plain model with the gradients of whole mini-batches, and the last loss."""
    plain = model()
    for step in range(steps):
        x, y = data(step)
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
    return plain, loss.detach()
