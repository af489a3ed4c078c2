"""Layers that are hard on a pipe: each takes a tensor, or the dict that Fork or Twice makes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncpipe import Pipe, is_recomputing
from syncpipe.runtime.streams import AcceleratorStreams
from tests.support.models import CHANNELS, LENGTH, Inner, on_x


def near(leaf: Tensor, x: Tensor) -> Tensor:
    """A leaf where the layer is; a pipe moves only those that it knows."""
    return leaf if leaf.device == x.device else leaf.to(x.device)


class OnX(nn.Module):
    """Acts on a tensor, or on the entry "x" of a dict."""

    def forward(self, value: Any) -> Any:
        return on_x(self.act, value)


class Hidden(OnX):
    """Parameters in a plain list, used whole and by views."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.randn(CHANNELS * LENGTH)), nn.Parameter(torch.ones(1))]

    def act(self, x: Tensor) -> Tensor:
        bias, scale = (near(weight, x) for weight in self.weights)
        return x * scale + bias.view(1, CHANNELS, LENGTH)


class Some(Hidden):
    """Uses the leaves that a function of its input says; the first gradients of two are one."""

    def __init__(self, choose: Callable[[Tensor], slice]) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.randn(LENGTH)) for _ in range(2)]
        self.choose = choose

    def act(self, x: Tensor) -> Tensor:
        chosen = [near(weight, x).view(LENGTH) for weight in self.weights[self.choose(x.detach())]]
        return x * sum(chosen[1:], chosen[0])


def sign(x: Tensor) -> slice:
    k = int(x[0, 0, 0] > 0)
    return slice(k, k + 1)


def closure() -> nn.Module:
    """A leaf that only a function knows; of one sample it gets the very gradient of the input."""
    leaf = torch.randn(CHANNELS, LENGTH, requires_grad=True)
    layer = Inner(lambda x: x + near(leaf, x).view(1, CHANNELS, LENGTH))
    layer.leaf = lambda: leaf
    return layer


class Plus(OnX):
    """Adds a parameter of the shape of its input: both get the very same gradient."""

    def __init__(self) -> None:
        super().__init__()
        of_sizes = [nn.Parameter(torch.randn(size, CHANNELS, LENGTH)) for size in range(1, 10)]
        self.of_sizes = nn.ParameterList(of_sizes)

    def act(self, x: Tensor) -> Tensor:
        return x + self.of_sizes[len(x) - 1]


class Seldom(OnX):
    """Uses its parameter for some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH))

    def act(self, x: Tensor) -> Tensor:
        return x * self.weight if x.detach()[0, 0, 0] > 0 else x * 2


class ParameterViews(OnX):
    """Adds and multiplies by views of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH, CHANNELS + 1))

    def act(self, x: Tensor) -> Tensor:
        return x * self.weight[:, 0] + self.weight[:, 1:].t()


class Checkpointed(nn.Module):
    """A layer that re-materializes a part of itself."""

    def __init__(self, *, reentrant: bool, dropout: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(LENGTH, LENGTH), nn.Tanh())
        if dropout:
            self.inner.append(nn.Dropout(0.4))
        self.reentrant = reentrant

    def forward(self, value: Any) -> Any:
        return on_x(lambda x: checkpoint(self.inner, x, use_reentrant=self.reentrant), value)


class Embed(OnX):
    """Adds what an embedding has for the signs of the input."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(2, LENGTH, max_norm=max_norm)

    def act(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach()[..., 0] > 0).long())


def on_current_device(x: Tensor) -> Tensor:
    """Makes a tensor on the current device, as layers with kernels of their own do."""
    here = torch.accelerator.current_accelerator() if x.device.type != "cpu" else "cpu"
    return x * torch.full((), 2.0, dtype=x.dtype, device=here)


class Stateful(OnX):
    """Its output depends on a buffer, which its forwards change in training.

    Args:
        change: changes it, by the mean of the input.
        late: only in some later forward for the first time.
    """

    def __init__(self, change: Callable[[Any, Tensor], Any], late: bool = False) -> None:
        super().__init__()
        self.change, self.wait = change, int(torch.randint(5, ())) if late else 0
        self.register_buffer("state", torch.ones(LENGTH))

    def act(self, x: Tensor) -> Tensor:
        y = x * self.state.clone()
        self.wait -= not is_recomputing()
        if self.training and self.wait < 0:
            self.change(self, x.detach().mean((0, 1)))
        return y


class Autocast(OnX):
    """A linear layer under an autocast of its own, or without that of the caller."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.linear, self.enabled = nn.Linear(LENGTH, LENGTH), enabled

    def act(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            y: Tensor = self.linear(x.float())
            return y.float()


class TensorHook(OnX):
    """Changes the gradient of an activation of its own."""

    def __init__(self, hook: Callable[[Tensor], Tensor], factor: float = 1.5) -> None:
        super().__init__()
        self.hook, self.factor = hook, factor

    def act(self, x: Tensor) -> Tensor:
        y = x * self.factor
        if y.requires_grad:
            y.register_hook(self.hook)
        return y


class Slope(OnX):
    """The gradient of a scalar network: autograd inside of forward, as in energy models."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LENGTH, LENGTH), *layers, nn.Tanh())

    def act(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x * 1
        with torch.enable_grad():
            # (Not of its input itself, which may have a hook of the layer before.)
            x = x.clone() if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)[0]


def piped(*layers: nn.Module) -> nn.Module:
    """A pipe of two stages inside of a layer."""
    devices = ["cpu:0", "cpu:1"]
    linear = nn.Linear(LENGTH, LENGTH)
    return Inner(Pipe(nn.Sequential(linear, *layers), [1, len(layers)], devices=devices, chunks=2))


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


class Weighs(nn.Module):
    """From a tensor to a tree with a parameter itself in it, as learned queries are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(LENGTH) + 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "weight": self.weight}


def fork_rng(x: Tensor) -> Tensor:
    """Draws from the global generator, and puts it back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return x * torch.rand(LENGTH).to(x)


class Dawdle(TensorHook):
    """Takes a different, short time at each call, forward and backward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(self.wait, 1)
        self.delays = random.Random(seed)

    def wait(self, *_: Any) -> None:
        time.sleep(self.delays.random() * 4e-4)

    def act(self, x: Tensor) -> Tensor:
        self.wait()
        return super().act(x)
