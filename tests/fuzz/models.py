"""Random models, of layers that are hard on a pipe: what they do in place, hand on, hook and hide.

Each layer takes a tensor, or the dict that Fork or Twice makes, and works on its "x". A model is
drawn by a :class:`random.Random`, which hypothesis has, too. Only models are drawn that the plain
``nn.Sequential`` can train, and whose gradients it sums in one order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from syncpipe import Pipe, is_recomputing
from syncpipe.runtime.streams import AcceleratorStreams
from syncpipe.skip import Namespace
from tests.support.models import (
    CHANNELS,
    LENGTH,
    Counter,
    Fork,
    Inner,
    Join,
    Known,
    Noise,
    Receive,
    Send,
    on_x,
    tie,
)
from tests.support.running import Do, Residual, Using

__all__ = ["KINDS", "Model", "drawn_model"]


def _linear() -> nn.Linear:
    return nn.Linear(LENGTH, LENGTH)


def _using(function: Callable[..., Tensor], *layers: nn.Module) -> nn.Module:
    return Inner(Using(function, *layers))


# --- parameters, and leaves that are none --------------------------------------------------------


def _near(leaf: Tensor, x: Tensor) -> Tensor:
    """A leaf where the layer is; a pipe moves only those that it knows."""
    return leaf if leaf.device == x.device else leaf.to(x.device)


class Weights(nn.Module):
    """A function of "x" and of parameters of these shapes, which may be in a plain list."""

    def __init__(
        self, function: Callable[..., Tensor], *shapes: tuple[int, ...], hidden: bool = False
    ) -> None:
        super().__init__()
        weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        self.function, self.weights = function, weights if hidden else nn.ParameterList(weights)

    def forward(self, value: Any) -> Any:
        return on_x(lambda x: self.function(x, *[_near(w, x) for w in self.weights]), value)


def _closure() -> nn.Module:
    """A leaf that only a function knows; of one sample it gets the very gradient of the input."""
    leaf = torch.randn(CHANNELS, LENGTH, requires_grad=True)
    layer = Inner(lambda x: x + _near(leaf, x).view(1, CHANNELS, LENGTH))
    layer.leaf = lambda: leaf
    return layer


def _is_positive(x: Tensor) -> bool:
    return bool(x.detach()[0, 0, 0] > 0)


class Weighs(nn.Module):
    """From a tensor to a tree with a parameter itself in it, as learned queries are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(LENGTH) + 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "weight": self.weight}


def _tied() -> nn.Module:
    """Two linear layers with one weight, the first of them used twice."""
    first, second = _linear(), nn.Linear(LENGTH, LENGTH, bias=False)
    second.weight = first.weight
    return _using(lambda x, a, b: a(b(a(x).tanh())), first, second)


def _embed(x: Tensor, table: nn.Module) -> Tensor:
    """Adds what an embedding has for the signs of the input."""
    return x + table((x.detach()[..., 0] > 0).long())


def _frozen() -> nn.Module:
    return Known(_linear()).requires_grad_(False)


# --- state ---------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Its output depends on a buffer, which its forwards change in training.

    Args:
        change: changes it, by the mean of the input.
        late: only in some later forward for the first time.
    """

    def __init__(self, change: Callable[[Any, Tensor], Any], late: bool = False) -> None:
        super().__init__()
        self.change, self.wait = change, int(torch.randint(5, ())) if late else 0
        self.register_buffer("state", torch.ones(LENGTH))

    def forward(self, value: Any) -> Any:
        return on_x(self._act, value)

    def _act(self, x: Tensor) -> Tensor:
        y = x * self.state.clone()
        self.wait -= not is_recomputing()
        if self.training and self.wait < 0:
            self.change(self, x.detach().mean((0, 1)))
        return y


def _two_counters() -> nn.Module:
    """Two layers with one buffer."""
    first, second = Counter(), Counter()
    second.scale = first.scale
    return nn.Sequential(first, second)


class Living(nn.Module):
    """A function of itself and "x", by an attribute that changes between calls or in them.

    Attributes:
        factor: a number, or a tensor; its owner changes it from time to time.
        calls: how many forwards there were, where the function counts them.
    """

    def __init__(self, act: Callable[[Any, Tensor], Tensor], *parameters: str) -> None:
        super().__init__()
        self.act, self.factor, self.calls = act, 1.0, 0
        for name in parameters:
            self.register_parameter(name, nn.Parameter(torch.rand(LENGTH) + 0.5))
        self.register_buffer("state", torch.zeros(CHANNELS))
        self.register_buffer("spread", torch.ones(CHANNELS))

    def forward(self, value: Any) -> Any:
        return on_x(lambda x: self.act(self, x), value)

    @property
    def moves(self) -> bool:
        """Whether it changes its state now."""
        return self.training and bool(self.factor > 1)


class Center(Living):
    """From a tensor to a tree with a buffer in it, which each forward changes in place."""

    def __init__(self) -> None:
        super().__init__(lambda layer, x: x)
        self.register_buffer("center", torch.ones(LENGTH))

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            self.center.mul_(0.5).add_(x.mean((0, 1)), alpha=0.5)
        return {"x": x, "weight": self.center}


def _counted(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return x * (1 + 1 / layer.calls)


def _observed(layer: Any, x: Tensor) -> Tensor:
    """Changes buffers from some call on, without a version."""
    return F.batch_norm(x, layer.state, layer.spread, training=layer.moves)


def _written(layer: Any, x: Tensor) -> Tensor:
    y = x + layer.state.clone().view(-1, 1)
    if layer.moves:
        layer.state.data.copy_(x.detach().mean((0, 2)))
    return y


def _remembered(layer: Any, x: Tensor) -> Tensor:
    """Keeps a tensor that is no buffer, and changes it in place."""
    if not hasattr(layer, "memory"):
        layer.memory = torch.zeros(CHANNELS, 1)
    y = x + layer.memory
    layer.memory.copy_(x.detach().mean((0, 2)).view(-1, 1))
    return y


def _made(make: Callable[[], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Makes a module, or a parameter, when it sees its first input."""

    def act(layer: Any, x: Tensor) -> Tensor:
        if not hasattr(layer, "made"):
            layer.calls += 1
            layer.made = make()
        return x * layer.made if isinstance(layer.made, Tensor) else layer.made(x)

    return act


def _same_linear() -> nn.Linear:
    layer = _linear()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return layer


def _looking() -> nn.Module:
    """Looks at its own parameter."""

    def act(layer: Any, x: Tensor) -> Tensor:
        assert isinstance(layer.weight, nn.Parameter)
        return x * layer.weight * getattr(layer.weight, "scale", 1.0)  # copies of it have none

    layer: Any = Living(act, "weight")
    layer.weight.scale = 2.0
    return layer  # type: ignore[no-any-return]


def _flat() -> nn.Module:
    """Parameters that are parts of one tensor, of which each has the version of all."""
    layer: Any = Living(lambda layer, x: x * layer.first + layer.second, "first", "second")
    flat = torch.cat([layer.first.data, layer.second.data])
    layer.first.data, layer.second.data = flat.chunk(2)
    return layer  # type: ignore[no-any-return]


#: Bytes of a buffer that stands out in the memory of these models.
TABLE = 1 << 17


def _table(layer: Any, x: Tensor) -> Tensor:
    """Reads a large buffer; makes it, or puts a new one in its place, in the first call."""
    if layer.calls == 0:
        layer.calls = 1
        layer.register_buffer("table", torch.full((TABLE // 4,), 1.5))
    return x * layer.table[0]


# --- hooks ---------------------------------------------------------------------------------------


def _tensor_hook(hook: Callable[[Tensor], Any], factor: float = 1.5) -> nn.Module:
    """Changes the gradient of an activation of its own."""

    def act(x: Tensor) -> Tensor:
        y = x * factor
        if y.requires_grad:
            y.register_hook(hook)
        return y

    return Inner(act)


def _drawing_hook(hook: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    """The gradient comes in each micro-batch: what first draws in a later one is not seen."""
    return lambda: Inner(nn.Sequential(_linear(), _tensor_hook(hook)))


def dawdling(seed: int = 0) -> nn.Module:
    """Takes a different, short time at each call, forward and backward."""
    delays = random.Random(seed)

    def wait(*_: Any) -> None:
        time.sleep(delays.random() * 4e-4)

    return nn.Sequential(Do(wait), _tensor_hook(wait, 1))


def _hooked(register: str, hook: Callable[..., Any]) -> Callable[[], nn.Module]:
    """A linear layer with a hook."""

    def make() -> nn.Module:
        layer = _linear()
        getattr(layer, register)(hook)
        return Known(layer)

    return make


def _parameter_hook(hook: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A linear layer with a hook on its weight; ``pipe(x)`` may give it None (docs/limits.md)."""

    def make() -> nn.Module:
        layer = _linear()
        layer.weight.register_hook(lambda grad: None if grad is None else hook(grad))
        return Known(layer)

    return make


def _forked(grad: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return grad * torch.rand(LENGTH).to(grad)


def _noisy(grad: Tensor) -> Tensor:
    return grad + torch.randn_like(grad)


def _doubled(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else grad * 2 for grad in grads)


# --- in place -------------------------------------------------------------------------------------


def _repair(x: Tensor) -> Tensor:
    """Writes into its input only where that is needed, often in a later call only."""
    return x.clamp_(-2, 2) if x.detach().abs().max() > 2 else x


def _own_forward() -> nn.Module:
    """One of PyTorch's own layers, which never write, but for its forward."""
    layer = _linear()
    layer.forward = lambda x: x.mul_(1.25)  # type: ignore[method-assign]
    return Known(layer)


def _add_to_first(x: Tensor) -> Tensor:
    x[..., 0] += 1.0
    return x


# --- in forward: autograd, autocast, streams, pipes, generators ----------------------------------


def _slope(*layers: nn.Module) -> nn.Module:
    """The gradient of a scalar network: autograd inside of forward, as in energy models."""

    def act(x: Tensor, net: nn.Module) -> Tensor:
        if not torch.is_grad_enabled():
            return x * 1
        with torch.enable_grad():
            # (Not of its input itself, which may have a hook of the layer before.)
            x = x.clone() if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(net(x).square().sum(), x, create_graph=True)[0]

    return _using(act, nn.Sequential(_linear(), *layers, nn.Tanh()))


def _checkpointed(reentrant: bool, *layers: nn.Module) -> nn.Module:
    """Recomputes a part of itself."""
    return _using(
        lambda x, inner: checkpoint(inner, x, use_reentrant=reentrant),
        nn.Sequential(_linear(), nn.Tanh(), *layers),
    )


def _autocast(enabled: bool) -> nn.Module:
    """A linear layer under an autocast of its own, or without that of the caller."""

    def act(x: Tensor, linear: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y: Tensor = linear(x.float())
            return y.float()

    return _using(act, _linear())


def _on_current_device(x: Tensor) -> Tensor:
    """Makes a tensor on the current device, as layers with kernels of their own do."""
    here = torch.accelerator.current_accelerator() if x.device.type != "cpu" else "cpu"
    return x * torch.full((), 2.0, dtype=x.dtype, device=here)


class OwnStream(nn.Module):
    """Runs a module on a stream of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.stream: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            y: Tensor = self.inner(x)
            return y
        here = torch.accelerator.current_stream(x.device)
        self.stream = self.stream or torch.Stream(device=x.device)
        self.stream.wait_stream(here)
        x.record_stream(self.stream)
        with AcceleratorStreams(x.device).use(self.stream):
            y = self.inner(x)
        here.wait_stream(self.stream)
        y.record_stream(here)
        return y


def _piped(*layers: nn.Module) -> nn.Module:
    """A pipe of two stages inside of a layer."""
    devices = ["cpu:0", "cpu:1"]
    return Inner(
        Pipe(nn.Sequential(_linear(), *layers), [1, len(layers)], devices=devices, chunks=2)
    )


def _fork_rng(x: Tensor) -> Tensor:
    """Draws from the global generator, and puts it back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return x * torch.rand(LENGTH).to(x)


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        make: makes one.
        passes: may return the memory that it was given.
        inplace: writes into what it was given.
        stores: autograd keeps its output, or forbids to change it in place.
        once: uses what it was given once.
        draws: from PyTorch's generators, in training.
        counts: sees in which order micro-batches come.
        cpu: does what it does on the CPU only.
        lives: changes between calls, or keeps what it has made: for lives.
    """

    make: Callable[[], nn.Module]
    passes: bool = False
    inplace: bool = False
    stores: bool = False
    once: bool = True
    draws: bool = False
    counts: bool = False
    cpu: bool = False
    lives: bool = False


KINDS: dict[str, Kind] = {
    "linear": Kind(lambda: Known(_linear())),
    "conv": Kind(lambda: Known(nn.Conv1d(CHANNELS, CHANNELS, 1))),
    "batch_norm": Kind(lambda: Known(nn.BatchNorm1d(CHANNELS)), counts=True),
    "momentum_none": Kind(lambda: Known(nn.BatchNorm1d(CHANNELS, momentum=None)), counts=True),
    "instance_norm": Kind(lambda: Known(nn.InstanceNorm1d(CHANNELS, affine=True))),
    "layer_norm": Kind(lambda: Known(nn.LayerNorm(LENGTH))),
    "tanh": Kind(lambda: Known(nn.Tanh()), stores=True),
    "gelu": Kind(lambda: Known(nn.GELU())),
    "frozen": Kind(_frozen),
    "data_parallel": Kind(lambda: Inner(nn.DataParallel(_linear())), cpu=True),
    "tied": Kind(_tied),
    "seldom": Kind(lambda: Weights(lambda x, w: x * w if _is_positive(x) else x * 2, (LENGTH,))),
    "attention": Kind(
        lambda: Known(nn.TransformerEncoderLayer(LENGTH, 1, 4, 0.0, batch_first=True)),
        once=False,
    ),
    "lstm": Kind(
        lambda: _using(lambda x, lstm: lstm(x)[0], nn.LSTM(LENGTH, LENGTH, batch_first=True)),
        stores=True,
        once=False,
        cpu=True,
    ),
    "slope": Kind(_slope, once=False),
    "pipe": Kind(
        lambda: _piped(nn.BatchNorm1d(CHANNELS), nn.Tanh()), stores=True, counts=True, cpu=True
    ),
    "buffer": Kind(lambda: Stateful(lambda layer, x: None)),
    "counter": Kind(Counter, counts=True),
    "two_counters": Kind(_two_counters, counts=True),
    "assigned": Kind(  # whose memory belongs to a stream that nobody knows
        lambda: Stateful(lambda layer, x: setattr(layer, "state", layer.state + x)),
        counts=True,
        cpu=True,
    ),
    "no_trace": Kind(lambda: Stateful(lambda layer, x: layer.state.data.copy_(x)), counts=True),
    "late": Kind(lambda: Stateful(lambda layer, x: layer.state.add_(x), late=True), counts=True),
    "reads_statistics": Kind(  # which a layer inside of it changes without a trace
        lambda: _using(
            lambda x, norm: norm(x) + x - norm.running_mean.view(-1, 1), nn.BatchNorm1d(CHANNELS)
        ),
        once=False,
        counts=True,
    ),
    "spectral_norm": Kind(lambda: Known(spectral_norm(_linear())), counts=True),
    "weight_norm": Kind(lambda: Known(weight_norm(_linear()))),
    "autocast": Kind(lambda: _autocast(True), cpu=True),
    "full_precision": Kind(lambda: _autocast(False), cpu=True),
    "residual": Kind(lambda: Inner(Residual(LENGTH)), once=False),
    "hidden": Kind(  # used whole, and by views
        lambda: Weights(
            lambda x, bias, scale: x * scale + bias.view(1, CHANNELS, LENGTH),
            (CHANNELS * LENGTH,),
            (1,),
            hidden=True,
        )
    ),
    "both": Kind(  # their first gradients are one
        lambda: Weights(
            lambda x, a, b: x * (a.view(LENGTH) + b.view(LENGTH)),
            (LENGTH,),
            (LENGTH,),
            hidden=True,
        )
    ),
    "either": Kind(
        lambda: Weights(
            lambda x, a, b: x * (b if _is_positive(x) else a), (LENGTH,), (LENGTH,), hidden=True
        )
    ),
    "closure": Kind(_closure),
    "parameter_views": Kind(
        lambda: Weights(lambda x, w: x * w[:, 0] + w[:, 1:].t(), (LENGTH, CHANNELS + 1))
    ),
    "plus": Kind(  # of the shape of its input: both get the very same gradient
        lambda: Weights(
            lambda x, *of_sizes: x + of_sizes[len(x) - 1],
            *[(size, CHANNELS, LENGTH) for size in range(1, 10)],
        )
    ),
    "embedding": Kind(lambda: _using(_embed, nn.Embedding(2, LENGTH)), once=False),
    "embedding_max_norm": Kind(
        lambda: _using(_embed, nn.Embedding(2, LENGTH, max_norm=0.5)), once=False, counts=True
    ),
    "expand": Kind(lambda: Inner(lambda x: x.mean(1, True).expand(-1, CHANNELS, -1)), stores=True),
    "transposed": Kind(lambda: Inner(lambda x: (x * 2).mT.contiguous().mT)),
    "dawdle": Kind(dawdling, stores=True),
    "current_device": Kind(lambda: Inner(_on_current_device)),
    "own_stream": Kind(lambda: Inner(OwnStream(_linear()))),
    "detached": Kind(lambda: Inner(lambda x: x.detach() * 2)),
    # alive
    "factor": Kind(lambda: Living(lambda layer, x: x * layer.factor), lives=True),
    "counted": Kind(lambda: Living(_counted), counts=True, lives=True),
    "observed": Kind(lambda: Living(_observed), counts=True, lives=True),
    "written": Kind(lambda: Living(_written), counts=True, lives=True),
    "remembered": Kind(lambda: Living(_remembered), counts=True, lives=True),
    "center": Kind(Center, passes=True, counts=True, lives=True),
    "makes": Kind(lambda: Living(_made(lambda: nn.Parameter(torch.ones(LENGTH)))), lives=True),
    "makes_module": Kind(lambda: Living(_made(_same_linear)), lives=True),
    "looks": Kind(_looking, lives=True),
    "flat": Kind(_flat, lives=True),
    "table": Kind(lambda: Living(_table), lives=True),
    "sometimes": Kind(
        lambda: Living(lambda layer, x: F.dropout(x, 0.4, layer.moves)), draws=True, lives=True
    ),
    # handed on
    "identity": Kind(nn.Identity, passes=True),
    "flatten": Kind(lambda: Known(nn.Flatten(2)), passes=True),
    "dropout_0": Kind(lambda: Known(nn.Dropout(0.0)), passes=True),
    "view": Kind(lambda: Inner(lambda x: x.view_as(x)), passes=True),
    "slice": Kind(lambda: Inner(lambda x: x[:, :CHANNELS]), passes=True),
    # in place
    "relu_": Kind(lambda: Known(nn.ReLU(inplace=True)), inplace=True, passes=True, stores=True),
    "hardtanh_": Kind(lambda: Known(nn.Hardtanh(inplace=True)), inplace=True, passes=True),
    "mul_": Kind(lambda: Inner(lambda x: x.mul_(1.5)), inplace=True, passes=True),
    "add_": Kind(lambda: Inner(_add_to_first), inplace=True, passes=True),
    "repair": Kind(lambda: Inner(_repair), inplace=True, passes=True),
    "own_forward": Kind(_own_forward, inplace=True, passes=True),
    # part of themselves again
    "checkpoint": Kind(lambda: _checkpointed(False), stores=True),
    "reentrant": Kind(lambda: _checkpointed(True), stores=True),
    # hooks
    "tensor_hook": Kind(lambda: _tensor_hook(lambda grad: grad * 0.75), stores=True),
    "parameter_hook": Kind(_parameter_hook(lambda grad: grad * 0.5)),
    "forward_hook": Kind(_hooked("register_forward_hook", lambda m, x, y: y * 1.25)),
    "forward_pre_hook": Kind(_hooked("register_forward_pre_hook", lambda m, x: (x[0] * 0.5,))),
    "backward_hook": Kind(
        _hooked("register_full_backward_hook", lambda m, gx, gy: _doubled(gx)), stores=True
    ),
    "backward_pre_hook": Kind(
        _hooked("register_full_backward_pre_hook", lambda m, gy: _doubled(gy)), stores=True
    ),
    # random
    "dropout": Kind(lambda: Known(nn.Dropout(0.4)), passes=True, draws=True),
    "dropout_": Kind(
        lambda: Known(nn.Dropout(0.4, inplace=True)), inplace=True, passes=True, draws=True
    ),
    "dropouts": Kind(  # in a module, and outside of it
        lambda: _using(lambda x, d: F.dropout(d(x), 0.2, d.training), nn.Dropout(0.3)),
        draws=True,
        once=False,
    ),
    # It draws for negative numbers only; there is always one, for whoever first draws late may be
    # recomputed with other numbers, as the limits say.
    "rrelu": Kind(
        lambda: Known(nn.Sequential(Do(lambda x: x - x.amax()), nn.RReLU())),
        draws=True,
        once=False,
    ),
    "noise": Kind(Noise, passes=True, draws=True),
    "fork_rng": Kind(lambda: Inner(_fork_rng), draws=True, cpu=True),
    "checkpoint_dropout": Kind(
        lambda: _checkpointed(False, nn.Dropout(0.4)), stores=True, draws=True
    ),
    "reentrant_dropout": Kind(
        lambda: _checkpointed(True, nn.Dropout(0.4)), stores=True, draws=True
    ),
    "slope_dropout": Kind(lambda: _slope(nn.Dropout(0.4)), once=False, draws=True),
    "pipe_dropout": Kind(lambda: _piped(nn.Dropout(0.4)), draws=True),
    "noisy_hook": Kind(_drawing_hook(_noisy), stores=True, draws=True),
    "noisy_parameter_hook": Kind(_parameter_hook(_noisy), draws=True),
    "fork_rng_hook": Kind(_drawing_hook(_forked), stores=True, draws=True),
    # from a tensor to a tree, and back
    "fork": Kind(Fork, once=False),
    "join": Kind(Join),
    "twice": Kind(lambda: Do(lambda x: {"x": x, "again": x}), passes=True, once=False),
    "meet": Kind(lambda: Do(lambda tree: tree["x"] - tree["again"] * 0.5)),
    "weighs": Kind(Weighs, passes=True),
    "weighed": Kind(lambda: Do(lambda tree: tree["x"] * tree["weight"])),
    "part": Kind(lambda: Do(lambda tree: tree["x"] * 2)),
    "centered": Kind(lambda: Do(lambda tree: tree["x"] - tree["weight"])),
    # skips
    "send": Kind(Send, passes=True, once=False),
    "send_int": Kind(lambda: Send("int"), passes=True),
    "send_none": Kind(lambda: Send("none"), passes=True),
    "send_kept": Kind(lambda: Send("kept"), passes=True, counts=True, lives=True),
    "receive": Kind(Receive, passes=True),  # what it pops may be None
    "receive_unused": Kind(lambda: Receive(used=False), passes=True),
}
_ENDS = {
    "fork": ("join", "part"),
    "twice": ("meet", "part"),
    "weighs": ("weighed", "part"),
    "center": ("centered", "part"),
}
_ALL_ENDS = {*sum(_ENDS.values(), ())}


@dataclass(frozen=True)
class Model:
    """A model in words.

    Attributes:
        layers: the kinds of its layers.
        seed: of their parameters.
        ties: triples: the place of a layer, that of a later one of its kind, and whether it is the
            same module (or another one with the same parameters).
    """

    layers: tuple[str, ...]
    seed: int
    ties: tuple[tuple[int, int, bool], ...] = ()

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers in training."""
        return any(KINDS[kind].draws for kind in self.layers)

    @property
    def draws_in_backward(self) -> bool:
        """Whether it goes on drawing there, other numbers each time."""
        return any(kind.startswith("noisy") for kind in self.layers)

    @property
    def counts(self) -> bool:
        """Whether a layer sees in which order micro-batches come."""
        return any(KINDS[kind].counts for kind in self.layers)

    def begins_in_place_on_a_view(self, balance: Sequence[int]) -> bool:
        """Whether a partition begins in place on a view, which the border ends, by such a cut."""
        for cut in list(accumulate(balance))[:-1]:
            before = [k for k in self.layers[:cut] if not KINDS[k].passes][-1:]
            after = list(takewhile(lambda k: KINDS[k].passes, self.layers[cut:]))
            if before == ["transposed"] and any(KINDS[kind].inplace for kind in after):
                return True
        return False

    @property
    def begins_in_place(self) -> bool:
        """Whether it writes into its input."""
        for kind in self.layers:
            if KINDS[kind].inplace:
                return True
            if not KINDS[kind].passes:
                break
        return False

    def _layers(self) -> Iterator[nn.Module]:
        waiting: list[Namespace] = []
        for kind in self.layers:
            layer: Any = KINDS[kind].make()
            if kind.startswith("send"):
                waiting.append(Namespace())
                layer.isolate(waiting[-1])
            elif kind.startswith("receive"):
                layer.isolate(waiting.pop(0))
            yield layer

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        """The same model every time."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            torch.manual_seed(self.seed)
            model = nn.Sequential(*self._layers())
        finally:
            torch.set_default_dtype(before)
        for first, second, is_one in self.ties:
            if is_one:
                model[second] = model[first]
            else:
                tie(model[first], model[second])
        return model

    @property
    def uses_twice(self) -> bool:
        """Whether a stage may use a weight that it shares with another one more than once."""
        return len(self.ties) > 1 or any(self.layers[k] in _OFTEN for k, _, _ in self.ties)


#: Layers that may be tied; those in the second set use a parameter more than once.
_TIED = (
    "linear", "conv", "layer_norm", "tied", "residual", "parameter_views", "embedding", "frozen",
    "checkpoint", "reentrant", "forward_hook", "backward_hook", "parameter_hook", "attention",
    "buffer", "weight_norm", "seldom",
)  # fmt: skip
_OFTEN = ("tied", "parameter_views", "reentrant")


def _drawn_ties(
    chance: random.Random, layers: Sequence[str], names: Sequence[str]
) -> tuple[tuple[int, int, bool], ...]:
    """Ties between layers of one kind, if there are any."""
    ties = []
    last: dict[str, int] = {}
    for k, name in enumerate(layers):
        if name in _TIED and name in names:
            if name in last and chance.random() < 0.6:
                is_one = chance.random() < 0.4
                ties.append((last[name], k, is_one))
            last[name] = k
    return tuple(ties)


def leaves(model: nn.Module) -> dict[str, Tensor]:
    """All leaves of a model, by name, whether modules know them or not."""
    found = dict(model.named_parameters())
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "weights", None), list):
            found |= {f"{name}.{k}": weight for k, weight in enumerate(layer.weights)}
        elif hasattr(layer, "leaf"):
            found[f"{name}.leaf"] = layer.leaf()
    return found


class Chain:
    """The kinds of layers one after another, and what may come next."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.writable, self.shared = True, False  # its end, by the next layer; by several
        self.waiting, self.tree = 0, ""  # skips that nobody has popped; what made a tree of it

    def fits(self, name: str) -> bool:
        """Whether the plain model can train with such a layer next."""
        kind = KINDS[name]
        if name in _ALL_ENDS and name not in _ENDS.get(self.tree, ()):
            return False
        if name.startswith("receive") and not self.waiting:
            return False
        if name in _ENDS and self.tree:
            return False
        return (self.writable or not kind.inplace) and (kind.once or not self.shared)

    def add(self, name: str) -> None:
        """Such a layer is next."""
        kind = KINDS[name]
        self.layers.append(name)
        self.waiting += name.startswith("send") - name.startswith("receive")
        self.tree = name if name in _ENDS else "" if name in _ALL_ENDS else self.tree
        if kind.inplace or not kind.passes:
            self.writable = not kind.stores
        if not kind.passes:
            self.shared = False
        if name in ("send", "twice"):
            self.writable, self.shared = False, True

    @classmethod
    def takes(cls, layers: Sequence[str]) -> bool:
        """Whether the plain model can train with these."""
        chain = cls()
        for name in layers:
            if not chain.fits(name):
                return False
            chain.add(name)
        return not chain.waiting and chain.tree != "center"


def drawn_model(chance: random.Random, *, most: int, kinds: Sequence[str] | None = None) -> Model:
    """Draws a model.

    Args:
        chance: what draws.
        most: the most layers, but for those that end what others began.
        kinds: those that may be drawn; None for all.
    """
    names = [k for k in KINDS if not KINDS[k].lives] if kinds is None else list(kinds)
    chain = Chain()
    layers = chain.layers
    has_ties = chance.random() < 0.3
    for _ in range(chance.randint(1, most)):
        again = [name for name in layers if name in _TIED and name in names] if has_ties else []
        name = chance.choice(again if again and chance.random() < 0.5 else names)
        if chain.fits(name):
            chain.add(name)
        elif chain.fits("linear"):
            chain.add("linear")
    if chain.tree == "center" or (chain.tree and chance.random() < 0.7):
        chain.add(chance.choice(_ENDS[chain.tree]))
    while chain.waiting:
        chain.add("receive")
    seed = chance.randrange(1000)
    has_ties &= "own_forward" not in layers  # which knows the one module that it is of
    return Model(tuple(layers), seed, _drawn_ties(chance, layers, names) if has_ties else ())
