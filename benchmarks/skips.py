"""Our models for the older libraries: their own skips in place of ours.

torchgpipe and fairscale have ``skippable``, ``stash`` and ``pop`` by the same names, but each only
knows its own. A model written for ``syncpipe.skip`` is translated layer by layer: the layers, and
with them the parameters, stay the very same objects, so that all libraries train one model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from types import ModuleType
from typing import Any

from torch import nn

from syncpipe.skip import stash
from syncpipe.skip.skippable import is_skippable, pops, stashes


def translated(model: nn.Sequential, skips: ModuleType) -> nn.Sequential:
    """The same layers for another library; those without skips go in as they are.

    What is put around a layer costs about a microsecond for each skip that it sends or receives.

    Args:
        model: the layers, between which tensors go (both libraries accept nothing else).
        skips: where the library has its ``skippable``, ``stash``, ``pop`` and ``Namespace``.
    """
    spaces: defaultdict[Any, Any] = defaultdict(skips.Namespace)
    layers: list[nn.Module] = []
    for layer in model:
        made: Any = layer
        if is_skippable(layer):
            ends = stashes(layer), pops(layer)
            names = [[name for _, name in keys] for keys in ends]
            kind = type(type(layer).__name__, (_Skipping,), {})  # a decorator may change its class
            made = skips.skippable(*names)(kind)(layer, skips)
            for space, name in (*ends[0], *ends[1]):
                if space is not None:
                    made.isolate(spaces[space], only=[name])
        layers.append(made)
    return nn.Sequential(*layers)


class _Skipping(nn.Module):
    """A layer with skips; what its generator asks of us is asked of the other library."""

    def __init__(self, layer: nn.Module, skips: ModuleType) -> None:
        super().__init__()
        self.layer, self.skips = layer, skips

    def forward(self, value: Any) -> Generator[Any, Any, Any]:
        written = vars(type(self.layer).forward)["__wrapped__"]  # as it was before @skippable
        generator = written(self.layer, value)
        reply = None
        while True:
            try:
                command = generator.send(reply)
            except StopIteration as stop:
                return stop.value
            if isinstance(command, stash):
                reply = yield self.skips.stash(command.name, command.value)
            else:
                reply = yield self.skips.pop(command.name)
