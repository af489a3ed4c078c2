"""PyTorch's own transformers become chains of their layers, whatever their masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe, sequential
from syncpipe.layers.conversion.layer import Holder


def layer(kind: Any, **options: Any) -> nn.Module:
    return kind(8, 2, 16, 0.0, batch_first=True, **options)


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.encoder = nn.TransformerEncoder(layer(nn.TransformerEncoderLayer), 3, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.encoder(self.tokens(ids)))


class Causal(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        return self.out(self.encoder(self.tokens(ids), mask))


class Hinted(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        return self.out(self.encoder(self.tokens(ids), mask, is_causal=True))


class Padded(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.encoder(self.tokens(ids), src_key_padding_mask=ids == 0))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        decoder = layer(nn.TransformerDecoderLayer)
        self.decoder = nn.TransformerDecoder(decoder, 3, nn.LayerNorm(8))

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        x = self.tokens(ids)
        return self.out(self.decoder(x, x.flip(1), mask, memory_key_padding_mask=ids == 0))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        x = self.tokens(ids)
        y = self.transformer(x, x, tgt_mask=mask, src_key_padding_mask=ids == 0)
        return self.out(y)


MODELS = {
    "plain": Encoder,
    "causal": Causal,
    "hinted": Hinted,
    "padded": Padded,
    "padded, not nested": lambda: Padded(enable_nested_tensor=False),
    "padded, not checked": lambda: Padded(mask_check=False),
    "with a norm": lambda: Padded(norm=nn.LayerNorm(8)),
    "decoder": Decoder,
    "both": Both,
}


def ids_of(batch: int, length: int, *, left: bool = False) -> Tensor:
    """Tokens, with padding at the end of all rows but the first (or at their begin)."""
    ids = torch.randint(1, 20, (batch, length))
    ids[1:, : 2 if left else 0] = 0
    ids[1:, length if left else -2 :] = 0
    return ids


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*nested_tensor")
@pytest.mark.parametrize("name", MODELS)
def test_chains_of_layers(name):
    torch.manual_seed(1)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    layers = sequential(model, ids_of(3, 7))
    found = [m for m in layers.modules() if "TransformerEncoderLayer" in type(m).__name__]
    found += [m for m in layers.modules() if "TransformerDecoderLayer" in type(m).__name__]
    assert len(layers) >= len(found) + 2
    holders = [sum(not isinstance(m, Holder) for m in each.children()) for each in layers]
    assert max(holders) <= 1  # no layer has more than one of them
    pipe = Pipe(layers, "uniform", devices=["cpu:0", "cpu:1"], chunks=2)
    for ids in (ids_of(4, 7), ids_of(2, 5), ids_of(4, 6, left=True)):
        pieces = ids.chunk(2)
        pipe.train()
        ours = pipe(ids)
        theirs = torch.cat([plain.train()(piece) for piece in pieces])
        assert torch.equal(ours, theirs)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        pipe.zero_grad()
        plain.zero_grad()
        pipe.eval()
        plain.eval()
        assert torch.equal(pipe(ids), torch.cat([plain(piece) for piece in pieces]))
        with torch.no_grad():  # PyTorch nests the padded ones here
            assert torch.equal(pipe(ids), torch.cat([plain(piece) for piece in pieces]))
