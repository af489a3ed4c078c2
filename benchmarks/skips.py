"""Our models for the older libraries: their own skips in place of ours, tuples in place of dicts.

torchgpipe and fairscale have ``skippable``, ``stash`` and ``pop`` by the same names, but each only
knows its own. A model written for ``syncpipe.skip`` is translated layer by layer: the layers, and
with them the parameters, stay the very same objects, so that all libraries train one model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.skip import stash
from syncpipe.skip.skippable import is_skippable, pops, stashes

#: The keys of a dict that goes from layer to layer; None where something else does.
Keys = Sequence[Any] | None


def translated(model: nn.Sequential, skips: ModuleType, sample: Tensor) -> nn.Sequential:
    """The same layers for another library; those without skips and dicts go in as they are.

    What is put around a layer costs about a microsecond for each skip that it sends or receives.

    Args:
        model: the layers.
        skips: where the library has its ``skippable``, ``stash``, ``pop`` and ``Namespace``.
        sample: an input, small; the model runs once on it, which shows where dicts travel. (Both
            libraries accept tensors and tuples of tensors only.)
    """
    spaces: defaultdict[Any, Any] = defaultdict(skips.Namespace)
    layers: list[nn.Module] = []
    value: Any = sample
    for layer in model:
        before = _keys(value)
        with torch.no_grad():
            value = layer(value)
        layers.append(_translated(layer, before, _keys(value), skips, spaces))
    return nn.Sequential(*layers)


def _keys(value: Any) -> Keys:
    return tuple(value) if isinstance(value, dict) else None


def _translated(
    layer: nn.Module, before: Keys, after: Keys, skips: ModuleType, spaces: dict[Any, Any]
) -> nn.Module:
    if is_skippable(layer):
        ends = stashes(layer), pops(layer)
        names = [[name for _, name in keys] for keys in ends]
        kind = type(type(layer).__name__, (_Skipping,), {})  # a decorator may change its class
        found = skips.skippable(*names)(kind)(layer, before, after, skips)
        for space, name in (*ends[0], *ends[1]):
            if space is not None:
                found.isolate(spaces[space], only=[name])
        made: nn.Module = found
        return made
    return layer if before is None and after is None else _Tupled(layer, before, after)


class _Tupled(nn.Module):
    """A layer that takes or gives a dict; here it takes or gives a tuple of the values."""

    def __init__(self, layer: nn.Module, before: Keys, after: Keys) -> None:
        super().__init__()
        self.layer, self.before, self.after = layer, before, after

    def forward(self, value: Any) -> Any:
        return self.packed(self.layer(self.unpacked(value)))

    def unpacked(self, value: Any) -> Any:
        """What the layer takes."""
        return value if self.before is None else dict(zip(self.before, value, strict=True))

    def packed(self, value: Any) -> Any:
        """What goes to the next layer."""
        return value if self.after is None else tuple(value[key] for key in self.after)


class _Skipping(_Tupled):
    """A layer with skips; what its generator asks of us is asked of the other library."""

    def __init__(self, layer: nn.Module, before: Keys, after: Keys, skips: ModuleType) -> None:
        super().__init__(layer, before, after)
        self.skips = skips

    def forward(self, value: Any) -> Generator[Any, Any, Any]:
        written = vars(type(self.layer).forward)["__wrapped__"]  # as it was before @skippable
        generator = written(self.layer, self.unpacked(value))
        reply = None
        while True:
            try:
                command = generator.send(reply)
            except StopIteration as stop:
                return self.packed(stop.value)
            if isinstance(command, stash):
                reply = yield self.skips.stash(command.name, command.value)
            else:
                reply = yield self.skips.pop(command.name)
