"""Skip connections between layers, sent directly from one device to another.

A layer that sends or receives a skip is a class whose forward is a generator:

    from syncpipe.skip import skippable, stash, pop

    @skippable(stash=["before"])
    class Remember(nn.Module):
        def forward(self, x):
            yield stash("before", x)
            return x

    @skippable(pop=["before"])
    class Add(nn.Module):
        def forward(self, x):
            return x + (yield pop("before"))

    model = nn.Sequential(Remember(), nn.Linear(8, 8), nn.ReLU(), Add())

The model runs as an ``nn.Sequential``, and in a ``Pipe`` of any balance. To use such a pair several
times in one model, isolate each pair: ``ns = Namespace()``, ``Remember().isolate(ns)``,
``Add().isolate(ns)``.
"""

from .layout import verify_skippables
from .skippable import pop, skippable, stash
from .store import Namespace

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
