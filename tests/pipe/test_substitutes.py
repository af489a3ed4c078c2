"""What stands for a parameter in a cell (tied, of a replica, hooked, a version) is like it.

And what a forward makes in a copy of a module is there afterwards.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.running import pipe_of

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
KINDS = ["plain", "tied", "replicas", "hooked"]


class Quantized(nn.Parameter):
    """A parameter of a class of its own, with a number that belongs to it."""


class Scaled(nn.Module):
    """Finds its own parameter by its class, and computes by an attribute of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Quantized(torch.eye(3) + 0.1)
        self.weight.scale, self.weight.uses = 2.0, []
        self.register_buffer("shift", torch.ones(3))
        self.shift.scale = 3.0

    def forward(self, x: Tensor) -> Tensor:
        (own,) = [t for t in vars(self)["_parameters"].values() if type(t) is Quantized]
        assert isinstance(own, nn.Parameter)
        assert own is self.weight
        own.uses.append(len(x))
        own.last = float(x.detach().sum())
        return x @ own * own.scale + self.shift * self.shift.scale


def pipe_with(kind: str, layer: nn.Module, last: nn.Module, **options: Any) -> Pipe:
    """The first of two stages has the layer, and a parameter that another one stands for."""
    first = nn.Linear(3, 3)
    layers = nn.Sequential(first, layer, last)
    if kind == "tied":
        last.weight = layer.weight if hasattr(layer, "weight") else first.weight
    if kind == "hooked":
        for parameter in layers.parameters():
            parameter.register_hook(lambda grad: None)
    if kind == "replicas":
        options |= {"replicas": [2, 1], "devices": ["cpu:0", "cpu:1", "cpu:2"]}
    return pipe_of(layers, [2, 1], **options)


@pytest.mark.parametrize("driver", ["pipe(x)", "train_batch", "train_stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_for_a_parameter_is_of_its_class_and_has_its_attributes(kind, driver):
    layer = Scaled()
    pipe = pipe_with(kind, layer, Scaled() if kind == "tied" else nn.Linear(3, 3))
    if driver == "pipe(x)":
        pipe(X).sum().backward()
    elif driver == "train_batch":
        pipe.train_batch(X, loss_fn=torch.mean)
    elif kind != "tied":  # which a stream refuses
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        pipe.train_stream([(X, None)] * 3, optimizer=sgd, loss_fn=torch.mean)
    else:
        return
    assert len(set(layer.weight.uses)) == 1
    assert isinstance(layer.weight.last, float)


class Makes(nn.Module):
    """Learns its width from the first input, as code does that makes its own lazy layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            made: dict[str, Any] = {
                "a parameter": lambda: nn.Parameter(torch.full((3,), 1.5)),
                "a module": lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
            }
            if self.kind == "a buffer":
                self.register_buffer("made", torch.full((3,), 1.5))
            else:
                self.made = made[self.kind]()
        return self.made(x) if self.kind == "a module" else x * self.made


@pytest.mark.parametrize("driver", ["pipe(x)", "train_batch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["a parameter", "a module", "a buffer"])
def test_what_a_forward_makes_is_in_the_pipe_and_trained(what, kind, driver):
    layer = Makes(what)
    pipe = pipe_with(kind, layer, nn.Linear(3, 3))

    def step() -> None:
        if driver == "pipe(x)":
            pipe(X).square().sum().backward()
        else:
            pipe.train_batch(X, loss_fn=lambda y: y.square().sum(), loss_reduction="sum")

    if kind == "replicas":
        with pytest.raises(RuntimeError, match="has replicas, made or removed a parameter"):
            step()
        pipe.zero_grad()
    else:
        step()
    made = layer.made
    plain = copy.deepcopy(nn.Sequential(*pipe))
    plain.zero_grad()
    if kind != "replicas":
        pipe.zero_grad()
    step()
    assert layer.made is made
    for piece in reversed(X.chunk(4)) if driver == "pipe(x)" else X.chunk(4):
        plain(piece).square().sum().backward()
    assert "1.made" in "".join(dict(pipe.state_dict()))
    grads = [[p.grad for p in module.parameters()] for module in (pipe, plain)]
    torch.testing.assert_close(*grads)  # replicas add up in an order of their own


def test_what_a_forward_removes_or_replaces_in_a_copy_is_gone():
    class Merges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.old, self.other = nn.Linear(3, 3), None

        def forward(self, x: Tensor) -> Tensor:
            if hasattr(self, "old"):
                self.new, self.other = self.old, self.old.weight
                del self.old
            return self.new(x)

    layer = Merges()
    weight = layer.old.weight
    pipe = pipe_with("hooked", layer, nn.Linear(3, 3))
    for _ in range(2):
        pipe(X).sum().backward()
    assert not hasattr(layer, "old")
    assert layer.new.weight is layer.other is weight
    assert weight.grad is not None
