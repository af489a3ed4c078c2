"""Models as people write them by hand, none of them a chain of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """Goes down and up again, with a skip on each level."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 16)))
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((32, 8), (16, 4)))

    def forward(self, x: Tensor) -> Tensor:
        """Of images ``[N, 3, H, W]``."""
        levels = []
        for layer in self.down:
            x = torch.relu(layer(x))
            levels.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = torch.relu(layer(torch.cat([x, levels.pop()], 1)))
        return x


class PaddedEncoder(nn.Module):
    """``nn.TransformerEncoder`` with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(30, 8), nn.Linear(8, 30)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """Of tokens ``[N, L]``; 0 is padding."""
        return self.out(self.encoder(self.tokens(ids), src_key_padding_mask=ids == 0))


class CausalEncoder(PaddedEncoder):
    """The language model of PyTorch's tutorial."""

    def forward(self, ids: Tensor) -> Tensor:
        """Of tokens ``[N, L]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        return self.out(self.encoder(self.tokens(ids), mask))


class Translator(nn.Module):
    """``nn.Transformer``, from a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, 0.1, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Of tokens ``[N, L]``; 0 is padding."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        x, padding = self.tokens(ids), ids == 0
        y = self.transformer(x, x, tgt_mask=mask, src_key_padding_mask=padding)
        return self.out(y)


class Draw(nn.Module):
    """Draws in training only."""

    def forward(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Of rows ``[N, 4]``."""
        if not self.training:
            return mean
        return mean + torch.randn_like(mean) * torch.exp(0.5 * variance)


class Sampled(nn.Module):
    """A variational autoencoder, with the drawing in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)
        self.mean, self.variance, self.draw = nn.Linear(8, 4), nn.Linear(8, 4), Draw()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows ``[N, 8]``."""
        h = torch.relu(self.encoder(x))
        mean, variance = self.mean(h), self.variance(h)
        return self.decoder(self.draw(mean, variance)), mean, variance
