"""Models as research code writes them: each has a habit of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.entry import Model, Sample, ids, lengths, mask, takes, times

__all__ = ["WRITTEN"]

Forward = Callable[..., Any]


class Net(nn.Module):
    """Parts by name, and a function for its forward: ``forward(self, ...)``."""

    def __init__(self, forward: Forward, **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def _linear(count: int = 3, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


class Block(nn.Module):
    """Attention by einsum with a mask, and an MLP, both with a residual."""

    def __init__(self, width: int = 8, heads: int = 2, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.one(x)).view(b, n, 3, self.heads, d // self.heads).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale / math.sqrt(d // self.heads)
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        x = x + self.out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(b, n, d))
        return x + self.mlp(self.two(x))


def _blocks(count: int = 3, **options: Any) -> nn.ModuleList:
    return nn.ModuleList(Block(**options) for _ in range(count))


def _tokens(m: Any, x: Tensor) -> Tensor:
    return m.embed(x) + m.places[: x.shape[1]]


def gpt(m: Any, x: Tensor, target: Tensor | None = None) -> Any:
    """Returns logits, and a loss if there is a target, as nanoGPT."""
    h = _tokens(m, x)
    for block in m.blocks:
        h = block(h, m.causal[: x.shape[1], : x.shape[1]])
    logits = m.head(m.norm(h))
    if target is None:
        return logits
    return logits, F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")


def padded(m: Any, x: Tensor, seen: Tensor) -> Tensor:
    h = _tokens(m, x)
    kept = None if seen.all() else seen[:, None, None, :].bool()
    for block in m.blocks:
        h = block(h, kept)
    return m.head(h[:, 0])


def unet(m: Any, x: Tensor) -> Tensor:
    found = []
    for down in m.down:
        x = torch.relu(down(x))
        found.append(x)
        x = F.max_pool2d(x, 2)
    x = m.middle(x)
    for up in m.up:
        skip = found.pop()
        x = F.interpolate(x, size=skip.shape[2:], mode="bilinear")
        x = torch.relu(up(torch.cat([x, skip], 1)))
    return m.head(x)


def vae(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = F.relu(m.encode(x))
    mean, spread = m.mean(h), m.spread(h)
    z = mean + torch.randn_like(mean) * (0.5 * spread).exp() if m.training else mean
    return torch.sigmoid(m.decode(F.relu(m.wide(z)))), mean, spread


def experts(m: Any, x: Tensor) -> Tensor:
    weights, chosen = m.gate(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        share = (weights * (chosen == k)).sum(-1, keepdim=True)
        out = out + share * expert(x)
    return m.head(out)


def routed(m: Any, x: Tensor) -> Tensor:
    """Experts on the rows chosen for each, as most write it."""
    x = m.stem(x)
    chosen = m.gate(x).argmax(-1)
    out = torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        at = torch.where(chosen == k)[0]
        out.index_add_(0, at, expert(x[at]))
    return m.head(out)


def lstm(m: Any, x: Tensor) -> Tensor:
    h, _ = m.rnn(m.embed(x))
    return m.head(h[:, -1])


def packed(m: Any, x: Tensor, length: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(
        m.embed(x), length.cpu(), batch_first=True, enforce_sorted=False
    )
    h, _ = nn.utils.rnn.pad_packed_sequence(m.rnn(rows)[0], batch_first=True)
    return m.head(h.mean(1))


def cells(m: Any, x: Tensor) -> Tensor:
    """A loop over time with cells."""
    h = x.new_zeros(x.shape[0], 8)
    for t in range(x.shape[1]):
        for cell in m.cells:
            h = cell(x[:, t], h)
    return m.head(h)


def seq2seq(m: Any, x: Tensor, y: Tensor) -> Tensor:
    causal = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
    return m.head(m.net(m.embed(x), m.embed(y), tgt_mask=causal, tgt_is_causal=True))


def gates(m: Any, x: Tensor) -> Tensor:
    """Highway layers, one parameter for all gates."""
    for k, layer in enumerate(m.layers):
        g = torch.sigmoid(m.gates[k] * x)
        x = g * torch.tanh(layer(x)) + (1 - g) * x
    return m.head(x)


def tied(m: Any, x: Tensor) -> Tensor:
    h = m.embed(x)
    for block in m.blocks:
        h = block(h)
    return F.linear(h, m.embed.weight)


def looped(m: Any, x: Tensor) -> Tensor:
    """One block several times, as ALBERT and deep equilibrium models have it."""
    x = m.stem(x)
    for _ in range(m.steps):
        x = x + m.block(x)
    return m.head(x)


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor] | None = None


class Heads(NamedTuple):
    boxes: Tensor
    classes: Tensor


def output_class(m: Any, x: Tensor) -> Output:
    hidden = []
    for layer in m.layers:
        x = F.gelu(layer(x))
        hidden.append(x)
    return Output(m.head(x), hidden)


def detector(m: Any, x: Tensor) -> Heads:
    """Queries that attend to an image."""
    memory = m.stem(x).flatten(2).transpose(1, 2)
    q = m.queries.weight[None].expand(x.shape[0], -1, -1)
    for layer in m.layers:
        q = layer(q, memory)
    return Heads(m.boxes(q).sigmoid(), m.classes(q))


def siamese(m: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = (m.encoder(each) for each in (x, y))
    return F.cosine_similarity(m.project(a), m.project(b))


def diffusion(m: Any, x: Tensor, t: Tensor) -> Tensor:
    half = 4
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    angles = t[:, None].float() * freqs[None]
    e = m.time(torch.cat([angles.sin(), angles.cos()], -1))
    for layer, scale in zip(m.layers, m.scales, strict=True):
        shift, gain = scale(e).chunk(2, -1)
        x = x + F.silu(layer(x) * (1 + gain) + shift)
    return m.head(x)


def recomputed(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = checkpoint(layer, x, use_reentrant=False) if m.training else layer(x)
    return m.head(x)


def reentrant(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    for layer in m.layers:
        x = checkpoint(lambda y, each=layer: torch.tanh(each(y)), x, use_reentrant=True)
    return m.head(x)


def annealed(m: Any, x: Tensor) -> Tensor:
    """Gumbel-free soft choice, with a temperature that its owner lowers."""
    x = m.stem(x)
    weights = (m.choice(x) / m.temperature).softmax(-1)
    return m.head(sum(weights[:, k : k + 1] * each(x) for k, each in enumerate(m.layers)))


def counted(m: Any, x: Tensor) -> Tensor:
    """Counts steps in a buffer in training."""
    x = m.stem(x)
    if m.training:
        m.steps += 1
    return m.head(torch.relu(m.middle(x)))


def stateful(m: Any, x: Tensor) -> Tensor:
    """A spiking cell keeps its potential in an attribute, which the model resets."""
    for cell in m.layers:
        cell.potential = None
    out = torch.zeros(())
    for _ in range(3):
        h = x
        for cell in m.layers:
            h = cell(h)
        out = out + h
    return m.head(out)


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.potential = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        drive = self.map(x)
        self.potential = drive if self.potential is None else 0.5 * self.potential + drive
        return torch.sigmoid(self.potential - 1)


def moved(m: Any, x: Tensor) -> Tensor:
    m.shift = m.shift.to(x)
    return m.head(torch.relu(m.stem(x) + m.shift))


def aside(m: Any, x: Tensor) -> Any:
    """Returns auxiliary heads in training only, as GoogLeNet and PSPNet."""
    x = torch.relu(m.stem(x))
    early = m.auxiliary(x) if m.training else None
    x = m.head(torch.relu(m.middle(x)))
    return (x, early) if m.training else x


def windows(m: Any, x: Tensor) -> Tensor:
    """Local attention: cuts rows into windows, pads the last."""
    x = m.embed(x)
    b, n, d = x.shape
    x = F.pad(x, (0, 0, 0, -n % 4))
    for k, block in enumerate(m.blocks):
        x = torch.roll(x, -2 * (k % 2), 1)
        x = block(x.reshape(-1, 4, d)).reshape(b, -1, d)
        x = torch.roll(x, 2 * (k % 2), 1)
    return m.head(x[:, :n])


def hyper(m: Any, x: Tensor) -> Tensor:
    """A network whose weights another one makes of the input."""
    w = m.weights(x.mean(1)).view(-1, 8, 8)
    return m.head(torch.bmm(F.relu(m.stem(x)), w))


def graph(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    """Message passing with an adjacency matrix for each sample."""
    for layer in m.layers:
        x = F.elu(layer(torch.softmax(edges, -1) @ x)) + x
    return m.head(x.mean(1))


def spectral(m: Any, x: Tensor) -> Tensor:
    """A Fourier neural operator."""
    x = m.stem(x)
    for weight, layer in zip(m.weights, m.layers, strict=True):
        f = torch.fft.rfft(x, dim=1)[:, :4]
        y = torch.fft.irfft(torch.einsum("bkc,kcd->bkd", f, torch.view_as_complex(weight)),
                            n=x.shape[1], dim=1)  # fmt: skip
        x = F.gelu(y + layer(x))
    return m.head(x)


def quantised(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Vector quantisation with a straight-through gradient."""
    z = m.encode(x)
    nearest = torch.cdist(z, m.codes.weight).argmin(-1)
    q = m.codes(nearest)
    return m.decode(z + (q - z).detach()), (q - z.detach()).square().mean(-1)


def physics(m: Any, x: Tensor) -> Tensor:
    for k, layer in enumerate(m.layers):
        x = torch.sin(30.0 * layer(x)) if k == 0 else torch.sin(layer(x))
    return m.head(x)


def ode(m: Any, x: Tensor) -> Tensor:
    """Runge-Kutta steps through one network."""
    x, h = m.stem(x), 1 / m.steps
    for _ in range(m.steps):
        a = m.field(x)
        b = m.field(x + h / 2 * a)
        x = x + h * m.field(x + h / 2 * b)
    return m.head(x)


def multitask(m: Any, x: Tensor) -> dict[str, Tensor]:
    shared = m.trunk(x)
    return {name: head(shared) for name, head in m.heads.items()}


def frozen(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = m.backbone(x)
    return m.head(x)


def scanned(m: Any, x: Tensor) -> Tensor:
    """A state space model by a loop over time."""
    for layer, a in zip(m.layers, m.decays, strict=True):
        u, states = layer(x), []
        h = torch.zeros_like(u[:, 0])
        for t in range(u.shape[1]):
            h = torch.sigmoid(a) * h + u[:, t]
            states.append(h)
        x = x + torch.stack(states, 1)
    return m.head(x)


def critic(m: Any, state: Tensor, *, action: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([state, action], -1)
    return m.first(both).squeeze(-1), m.second(both).squeeze(-1)


def _mlp(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())][:-1])


def _conv(a: int, b: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(a, b, size, padding=size // 2)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross, self.mlp = nn.MultiheadAttention(8, 2, batch_first=True), _mlp(8, 16, 8)

    def forward(self, q: Tensor, memory: Tensor) -> Tensor:
        q = q + self.cross(q, memory, memory, need_weights=False)[0]
        return q + self.mlp(q)


def _text() -> dict[str, Any]:
    return {"embed": nn.Embedding(90, 8), "places": nn.Parameter(torch.randn(16, 8) / 8)}


def _ends(a: int = 8, b: int = 2) -> dict[str, Any]:
    return {"stem": nn.Linear(a, 8), "head": nn.Linear(8, b)}


def _net(forward: Forward, sample: Sample, parts: Callable[[], dict[str, Any]]) -> Model:
    return Model("", lambda _: Net(forward, **parts()), sample)


_WIDE = takes((8,))
_ROWS = takes((6, 8))
WRITTEN: dict[str, Model] = {
    "GPT with a loss": _net(gpt, takes(ids(12), ids(12)), lambda: {
        **_text(), "blocks": _blocks(), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 90),
        "causal": torch.ones(16, 16).tril().bool()}),
    "GPT": _net(gpt, takes(ids(12)), lambda: {
        **_text(), "blocks": _blocks(scale=0.5), "norm": nn.LayerNorm(8),
        "head": nn.Linear(8, 90), "causal": torch.ones(16, 16).tril().bool()}),
    "encoder with padding": _net(padded, takes(ids(12), mask(12)), lambda: {
        **_text(), "blocks": _blocks(), "head": nn.Linear(8, 2)}),
    "U-Net": _net(unet, takes((3, 20, 20)), lambda: {
        "down": nn.ModuleList([_conv(3, 4), _conv(4, 8)]), "middle": _conv(8, 8),
        "up": nn.ModuleList([_conv(16, 8), _conv(12, 4)]), "head": _conv(4, 2, 1)}),
    "VAE": _net(vae, _WIDE, lambda: {
        "encode": nn.Linear(8, 8), "mean": nn.Linear(8, 4), "spread": nn.Linear(8, 4),
        "wide": nn.Linear(4, 8), "decode": nn.Linear(8, 8)}),
    "mixture of experts": _net(experts, _ROWS, lambda: {
        "gate": nn.Linear(8, 4), "experts": _linear(4), "head": nn.Linear(8, 2)}),
    "experts on chosen rows": _net(routed, _WIDE, lambda: {
        **_ends(), "gate": nn.Linear(8, 3), "experts": _linear()}),
    "LSTM": _net(lstm, takes(ids(12)), lambda: {
        "embed": nn.Embedding(90, 8), "rnn": nn.LSTM(8, 8, 2, batch_first=True),
        "head": nn.Linear(8, 2)}),
    "GRU on packed rows": _net(packed, takes(ids(12), lengths(9)), lambda: {
        "embed": nn.Embedding(90, 8), "rnn": nn.GRU(8, 8, batch_first=True),
        "head": nn.Linear(8, 2)}),
    "loop of cells": _net(cells, _ROWS, lambda: {
        "cells": nn.ModuleList([nn.GRUCell(8, 8)]), "head": nn.Linear(8, 2)}),
    "nn.Transformer": _net(seq2seq, takes(ids(12), ids(7)), lambda: {
        "embed": nn.Embedding(90, 8), "net": nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True),
        "head": nn.Linear(8, 90)}),
    "highway": _net(gates, _WIDE, lambda: {
        "layers": _linear(), "gates": nn.Parameter(torch.randn(3, 8)), "head": nn.Linear(8, 2)}),
    "tied embedding": _net(tied, takes(ids(12)), lambda: {
        "embed": nn.Embedding(90, 8), "blocks": _blocks()}),
    "one block many times": _net(looped, _WIDE, lambda: {
        **_ends(), "block": _mlp(8, 16, 8), "steps": 3}),
    "dataclass output": _net(output_class, _WIDE, lambda: {
        "layers": _linear(), "head": nn.Linear(8, 2)}),
    "DETR-like": _net(detector, takes((3, 16, 16)), lambda: {
        "stem": nn.Conv2d(3, 8, 4, 4), "queries": nn.Embedding(5, 8), "boxes": nn.Linear(8, 4),
        "classes": nn.Linear(8, 3), "layers": nn.ModuleList(Decoder() for _ in range(3))}),
    "Siamese": _net(siamese, takes((8,), (8,)), lambda: {
        "encoder": _mlp(8, 16, 8), "project": nn.Linear(8, 4)}),
    "diffusion MLP": _net(diffusion, takes((8,), times), lambda: {
        "time": _mlp(8, 16, 8), "layers": _linear(), "head": nn.Linear(8, 8),
        "scales": nn.ModuleList(nn.Linear(8, 16) for _ in range(3))}),
    "checkpoint": _net(recomputed, _WIDE, lambda: {"layers": _linear(), "head": nn.Linear(8, 2)}),
    "reentrant checkpoint": _net(reentrant, _WIDE, lambda: {**_ends(), "layers": _linear()}),
    "temperature": _net(annealed, _WIDE, lambda: {
        **_ends(), "choice": nn.Linear(8, 3), "layers": _linear(), "temperature": 2.0}),
    "counter in a buffer": _net(counted, _WIDE, lambda: {
        **_ends(), "middle": nn.Linear(8, 8), "steps": torch.zeros((), dtype=torch.long)}),
    "spiking": _net(stateful, _WIDE, lambda: {
        "layers": nn.ModuleList(Spiking() for _ in range(2)), "head": nn.Linear(8, 2)}),
    "moves its buffer": _net(moved, _WIDE, lambda: {**_ends(), "shift": torch.randn(8)}),
    "auxiliary head": _net(aside, _WIDE, lambda: {
        **_ends(), "middle": nn.Linear(8, 8), "auxiliary": nn.Linear(8, 2)}),
    "local attention": _net(windows, takes(ids(10)), lambda: {
        "embed": nn.Embedding(90, 8), "blocks": _blocks(), "head": nn.Linear(8, 2)}),
    "hypernetwork": _net(hyper, _ROWS, lambda: {**_ends(), "weights": nn.Linear(8, 64)}),
    "dense graphs": _net(graph, takes((6, 8), (6, 6)), lambda: {
        "layers": _linear(), "head": nn.Linear(8, 2)}),
    "Fourier operator": _net(spectral, takes((16, 8)), lambda: {
        **_ends(), "layers": _linear(2),
        "weights": nn.ParameterList(torch.randn(4, 8, 8, 2) / 8 for _ in range(2))}),
    "VQ": _net(quantised, _ROWS, lambda: {
        "encode": _mlp(8, 16, 8), "codes": nn.Embedding(5, 8), "decode": _mlp(8, 16, 8)}),
    "SIREN": _net(physics, takes((8,)), lambda: {"layers": _linear(), "head": nn.Linear(8, 1)}),
    "neural ODE": _net(ode, _WIDE, lambda: {**_ends(), "field": _mlp(8, 16, 8), "steps": 2}),
    "several tasks": _net(multitask, _WIDE, lambda: {
        "trunk": _mlp(8, 16, 8), "heads": nn.ModuleDict(
            {"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})}),
    "frozen backbone": _net(frozen, _WIDE, lambda: {
        "backbone": _mlp(8, 16, 8), "head": nn.Linear(8, 2)}),
    "state space": _net(scanned, _ROWS, lambda: {
        "layers": _linear(2), "head": nn.Linear(8, 2),
        "decays": nn.ParameterList(torch.randn(8) for _ in range(2))}),
    "twin critics": _net(critic, takes((6,), action=(2,)), lambda: {
        "first": _mlp(8, 16, 1), "second": _mlp(8, 16, 1)}),
}  # fmt: skip
