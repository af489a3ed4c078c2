"""Models as people write them, in one table: not one of them is a chain of layers."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.running import Do


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


class Pair(nn.Module):
    """Two layers, and what a function or a subclass does between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.inner = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self.a(x)))

    def between(self, x: Tensor) -> Tensor:
        return x if self.inner is None else self.inner(self, x)


class Does(Pair):
    """Calls a function in place of its forward, and has these parts as well."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__(forward)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.inner(self, x)


def modes(m: Any, x: Tensor) -> Any:
    """Does something else in training than in evaluation: parameters, outputs, skips."""
    early = m.a(x)
    late = early * 3 if m.training else early
    if m.training:
        late = late + m.extra(x * 2)
    late = m.b(late)
    return (late, m.auxiliary(early)) if m.training else late - early


def carries(m: Any, x: Tensor) -> Tensor:
    """Hands a value that only training has to a later layer."""
    small = x[:, :1] * 2 if m.training else None
    x = m.b(m.a(x))
    return x + small if m.training else x


def doubled(x: Tensor) -> Output:
    return Output(x * 2)


def uses_attributes(m: Any, x: Tensor) -> Tensor:
    """Hands on what is an attribute of something."""
    logits = m.wraps(m.a(x)).logits
    return m.layers[0](m.b(logits)) + logits


class Twice(torch.autograd.Function):
    """Has a backward that is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


def writes_into_input(m: Any, x: Tensor) -> Tensor:
    x += 1
    x[:, 0] = 2.0
    return m.b(m.a(x.type(torch.float32)) * x)


def without_gradients(_: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True) + 1
    return x / scale


def writes_into_a_view(early: bool) -> Callable[[], nn.Module]:
    def forward(m: Any, x: Tensor) -> Tensor:
        whole = x * 2 if early else m.a(x)
        half = whole[:, :2]
        y = m.b(m.a(x) if early else x)
        half += y[:, :2]
        return m.a(whole)

    return lambda: Does(forward)


def expands(_: Any, x: Tensor) -> Tensor:
    """Decides by the batch size what makes no difference."""
    where = torch.arange(4.0)[None]
    if x.shape[0] != where.shape[0]:
        where = where.expand(x.shape[0], -1)
    return x + where


class Doubles(nn.Linear):
    """Does something before PyTorch's own ``__call__``."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 2)


class Stays(nn.Dropout):
    """Is in evaluation in training."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class Freezes(nn.Sequential):
    """Likewise what is in it. It has a hook, so that it is not inlined."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout())
        self.register_forward_hook(lambda *_: None)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[0].eval()
        return self


class Halves(Pair):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) if x.shape[0] > 2 else self.b(x)
        return y if y.shape[1] > 1 else -y


@dataclass
class Noted:
    value: Tensor
    note: str | None = None


class HalvesNoted(Halves):
    def forward(self, x: Tensor) -> Any:
        return Noted(super().forward(x))


def notes(m: Any, x: Tensor) -> Tensor:
    """Changes an object that a module left whole has returned."""
    noted = m.halves(m.a(x))
    noted.note = "seen"
    return m.b(noted.value)


def mapping_of(kind: Any) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        result = kind()
        result["out"] = m.b(m.a(x))
        result["aux"] = result["out"] + 1
        return result

    return Does(forward)


def functional(m: Any, x: Tensor) -> Tensor:
    """Functions use parameters, one of them twice, one of another module."""
    return F.linear(F.linear(F.linear(x, m.w), m.other.weight), m.w)


class Backwards(nn.Module):
    """Runs its modules in another order than it has them, with weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.linear, self.unused = nn.Linear(4, 4), nn.Linear(2, 2)
        self.register_buffer("own", torch.rand(4))
        self.register_buffer("unsaved", torch.rand(4), persistent=False)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.tied(self.first(x)))
        return self.last(x + self.own + self.unsaved)


def awkward() -> nn.Module:
    """Has children of names that a layer may have for itself."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.skips[1](m.skips[0](x)) * m.takes
        return m.signature(m.device(m.code(y))) + x + torch.arange(4, device=x.device)

    names = ("code", "device", "signature")
    parts: dict[str, Any] = {name: nn.Linear(4, 4) for name in names}
    parts["skips"] = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    return Does(forward, **parts, takes=nn.Parameter(torch.rand(4)))


class Encoder(nn.Module):
    """PyTorch's own transformers, called by a function."""

    def __init__(self, call: Callable[[Any, Tensor, Tensor], Tensor], inner: nn.Module) -> None:
        super().__init__()
        self.tokens, self.inner, self.out = nn.Embedding(20, 8), inner, nn.Linear(8, 20)
        self.call = call

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.call(self.inner, ids, self.tokens(ids)))


def causal(ids: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(ids.size(1))


def encoder(call: Callable[[Any, Tensor, Tensor], Tensor], **options: Any) -> Encoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return Encoder(call, nn.TransformerEncoder(layer, 3, **options))


def with_padding(encoder: Any, ids: Tensor, x: Tensor) -> Tensor:
    return encoder(x, src_key_padding_mask=ids == 0)


def decoder() -> Encoder:
    layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
    return Encoder(
        lambda m, ids, x: m(x, x.flip(1), causal(ids), memory_key_padding_mask=ids == 0),
        nn.TransformerDecoder(layer, 3, nn.LayerNorm(8)),
    )


def both() -> Encoder:
    return Encoder(
        lambda m, ids, x: m(x, x, tgt_mask=causal(ids), src_key_padding_mask=ids == 0),
        nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True),
    )


def padded(batch: int, length: int = 7, *, left: bool = False) -> tuple[Tensor]:
    """Tokens, with padding at the end of all rows but the first (or at their begin)."""
    ids = torch.randint(1, 20, (batch, length))
    ids[1:, : 2 if left else 0] = 0
    ids[1:, length if left else -2 :] = 0
    return (ids,)


@functools.lru_cache
def halves(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0] * shape[1], shape[2] // 2


def cached(_: Any, x: Tensor) -> Tensor:
    """Asks a function with a cache about sizes, as einops does."""
    rows, width = halves((*x.shape, 4)[:3] if x.dim() > 2 else (*x.shape[:1], 2, 2 * x.shape[1]))
    return x.reshape(rows // 2, -1)[:, :width]


@torch.jit.script
def gated(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a) * torch.sigmoid(b)


class Decodes(nn.Module):
    """Is handed a module, and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, inner: Any) -> Tensor:
        return inner(x * self.scale)


def hands_on(method: bool) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.decode(m.a(x), m.block.between if method else m.block)
        return m.b(x) if method else m.block(m.b(x))

    decode = Decodes()
    decode.register_forward_hook(lambda *_: None)
    block = Pair(lambda m, x: m.b(x)) if method else Pair()
    return Does(forward, decode=decode, block=block)


def recomputes(m: Any, x: Tensor) -> Tensor:
    """Recomputes its layers by PyTorch's checkpoint, of both kinds."""
    x = m.a(x)
    if m.training:
        x = checkpoint(m.inside, x, use_reentrant=True)
        return checkpoint(m.b, x, use_reentrant=False)
    return m.b(m.inside(x))


def compiles() -> nn.Module:
    """A compiled block among others."""
    model = nn.Sequential(Pair(), Pair(), Pair())
    model[1].compile(backend="eager")
    return model


class Case(NamedTuple):
    """A model, arguments for so many samples, and how many layers there are in it."""

    build: Callable[[], nn.Module]
    sample: Callable[..., tuple[Tensor, ...]]
    layers: int


def rows(width: int = 4) -> Callable[..., tuple[Tensor, ...]]:
    return lambda batch: (torch.randn(batch, width),)


CASES = {
    "resnet": Case(ResNet, rows(6), 11),
    "dense": Case(Dense, rows(6), 5),
    "transformer": Case(Transformer, tokens, 29),
    "other in training": Case(
        lambda: Does(modes, extra=nn.Linear(4, 4), auxiliary=nn.Linear(4, 4)), rows(), 2
    ),
    "carries in training": Case(lambda: Does(carries), rows(), 2),
    "attributes": Case(
        lambda: Does(uses_attributes, wraps=Do(doubled), layers=nn.ModuleList([nn.Linear(4, 4)])),
        rows(),
        4,
    ),
    "own backward": Case(lambda: Pair(lambda _, x: Twice.apply(x)), rows(), 2),
    "writes into its input": Case(lambda: Does(writes_into_input), rows(), 2),
    "without gradients": Case(lambda: Pair(without_gradients), rows(), 2),
    "writes under another name": Case(writes_into_a_view(early=False), rows(), 2),
    "writes into a view": Case(writes_into_a_view(early=True), rows(), 2),
    "expands": Case(lambda: Pair(expands), rows(), 2),
    "len": Case(lambda: Pair(lambda m, x: x + m.b.bias[None].expand(len(x), -1)), rows(), 3),
    "decides by a size inside": Case(
        lambda: nn.Sequential(ResNet(4), nn.Linear(2, 4), Halves(), nn.Linear(4, 4)), rows(), 14
    ),
    "own call": Case(lambda: nn.Sequential(Pair(), Doubles(4, 4)), rows(), 3),
    "stays in evaluation": Case(lambda: nn.Sequential(Pair(), Stays(), Freezes()), rows(), 4),
    "notes something in a result": Case(lambda: Does(notes, halves=HalvesNoted()), rows(), 3),
    "a module called output": Case(
        lambda: Does(lambda m, x: UserDict(y=m.output(m.a(x))), output=nn.Linear(4, 4)), rows(), 2
    ),
    "dict": Case(lambda: mapping_of(dict), rows(), 2),
    "OrderedDict": Case(lambda: mapping_of(OrderedDict), rows(), 2),
    "UserDict": Case(lambda: mapping_of(UserDict), rows(), 2),
    "functional": Case(
        lambda: Does(functional, w=nn.Parameter(torch.rand(4, 4)), other=nn.Linear(4, 4)), rows(), 3
    ),
    "backwards": Case(Backwards, rows(), 4),
    "awkward names": Case(awkward, rows(), 6),
    "encoder": Case(lambda: encoder(lambda m, ids, x: m(x)), padded, 5),
    "causal": Case(lambda: encoder(lambda m, ids, x: m(x, causal(ids))), padded, 5),
    "causal, as said": Case(
        lambda: encoder(lambda m, ids, x: m(x, causal(ids), is_causal=True)), padded, 5
    ),
    "padded": Case(lambda: encoder(with_padding), padded, 5),
    "padded, not nested": Case(
        lambda: encoder(with_padding, enable_nested_tensor=False), padded, 5
    ),
    "padded, not checked": Case(lambda: encoder(with_padding, mask_check=False), padded, 5),
    "padded, with a norm": Case(lambda: encoder(with_padding, norm=nn.LayerNorm(8)), padded, 6),
    "decoder": Case(decoder, padded, 6),
    "nn.Transformer": Case(both, padded, 8),
    "a module at several places": Case(
        lambda: (lambda act: nn.Sequential(nn.Linear(4, 4), act, Pair(lambda _, x: act(x)), act))(
            nn.GELU()
        ),
        rows(),
        6,
    ),
    "a cache of sizes": Case(lambda: Pair(cached), rows(), 2),
    "TorchScript": Case(lambda: Pair(lambda m, x: gated(x, m.b(x))), rows(), 3),
    "hands on a module": Case(lambda: hands_on(method=False), rows(), 4),
    "calls forward": Case(lambda: Pair(lambda m, x: m.a.forward(x) + m.b.forward(x)), rows(), 4),
    "recomputes": Case(lambda: Does(recomputes, inside=Pair()), rows(), 4),
    "compiled inside": Case(compiles, rows(), 5),
}
