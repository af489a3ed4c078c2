"""Finding the skips of a layer, those of its submodules included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .namespace import SkipKey
from .skippable import is_skippable, pops, stashes


@dataclass(frozen=True)
class LayerSkips:
    """The skips of a top-level layer.

    Attributes:
        stashed: skips that it sends to later layers.
        popped: skips that it receives from earlier layers.
        internal: skips that one of its submodules sends to another.
    """

    stashed: tuple[SkipKey, ...]
    popped: tuple[SkipKey, ...]
    internal: tuple[SkipKey, ...]


def own_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A layer and its submodules with their paths, each once, nested pipes left out."""
    yield from _own_modules(layer, "", set())


def _own_modules(
    module: nn.Module, path: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen or getattr(type(module), "_syncpipe_skips_are_internal", False):
        return
    seen.add(module)
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _own_modules(child, f"{path}.{name}" if path else name, seen)


def declared_both_ways(module: nn.Module) -> list[SkipKey]:
    """The skips that one module declares as stash and as pop."""
    popped = pops(module)
    return [key for key in stashes(module) if key in popped]


def layer_skips(layer: nn.Module) -> LayerSkips:
    """What a layer exchanges with other layers, and what it keeps to itself.

    A name that one and the same module stashes and pops is a fault, and is left out here.
    """
    stashed: Counter[SkipKey] = Counter()
    popped: Counter[SkipKey] = Counter()
    for _, module in own_modules(layer):
        if is_skippable(module):
            both = declared_both_ways(module)
            stashed.update(key for key in stashes(module) if key not in both)
            popped.update(key for key in pops(module) if key not in both)
    internal = stashed & popped
    return LayerSkips(
        tuple((stashed - internal).elements()),
        tuple((popped - internal).elements()),
        tuple(internal),
    )
