"""Layers with skips, shared by the tests of them."""

from __future__ import annotations

from torch import nn

from syncpipe.skip import pop, skippable, stash
from tests.support.models import Receive as Receive
from tests.support.models import Send as Send


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
