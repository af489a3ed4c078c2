"""Layers with skips, shared by the tests of them."""

from __future__ import annotations

import pickle

import torch
from torch import nn

from syncpipe.skip import pop, skippable, stash

X = torch.arange(6.0).reshape(3, 2)


@skippable(stash=["skip"])
class Send(nn.Module):
    """Sends its input past the layers that follow."""

    def forward(self, x):
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Receive(nn.Module):
    def forward(self, x):
        return x + (yield pop("skip"))


@skippable(stash=["skip"])
class SendConv(nn.Module):
    """Has parameters and a buffer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        yield stash("skip", x)
        return self.norm(self.conv(x))


@skippable(stash=["a", "b"], pop=["c"])
class Many(nn.Module):
    def forward(self, x):
        c = yield pop("c")
        yield stash("a", x)
        yield stash("b", c)
        return x


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


class Around(nn.Module):
    """An ordinary layer with other layers inside."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x


class NestedPipe(Around):
    _syncpipe_skips_are_internal = True


def make(stashed=(), popped=()):
    """A layer that adds what it pops, and stashes its input."""

    @skippable(stash=stashed, pop=popped)
    class Layer(nn.Module):
        def forward(self, x):
            total = x
            for name in popped:
                total = total + (yield pop(name))
            for name in stashed:
                yield stash(name, x)
            return total

    return Layer()


def roundtrip(module):
    return pickle.loads(pickle.dumps(module))


def layer_of(function, **names):
    return skippable(**names)(type("Culprit", (nn.Module,), {"forward": function}))()
