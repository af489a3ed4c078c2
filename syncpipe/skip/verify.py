"""Checking that every skip of a model has one layer that stashes it and a later one that pops it.

Layers are compared skip by skip: each skip has the list of the layers that stash it and the list
of the layers that pop it. All is well where both hold one layer, in this order.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from .namespace import SkipKey, describe
from .skippable import is_skippable, overrides_undeclared
from .walk import declared_both_ways, layer_skips, own_modules

Fault = tuple[int, str]
"""The index of the layer at fault, and what is wrong with it."""


@dataclass
class _Uses:
    """The indices of the layers that use one skip."""

    stashed: list[int] = field(default_factory=list)
    popped: list[int] = field(default_factory=list)
    internal: list[int] = field(default_factory=list)


def verify_skippables(module: nn.Sequential) -> None:
    """Checks the skips of a model; ``Pipe`` does this by itself.

    Skips of submodules count as skips of the top-level layer around them, except those inside a
    nested pipe. A skip that one submodule stashes and another one of the same layer pops is that
    layer's own affair.

    Args:
        module: the model.

    Raises:
        TypeError: not an ``nn.Sequential``; or skips are declared wrongly: stashed again by a
            later layer, popped again, both stashed and popped by the same layer, stashed and
            never popped by a later layer, popped and never stashed by an earlier one. The
            message lists all faults, one per line, in the order of the layers.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"verify_skippables() takes an nn.Sequential, not an object of type "
            f"{type(module).__name__}"
        )
    # Not named_children(): it leaves out the second use of a layer that is used twice.
    layers = list(module._modules.items())
    labels = [_label(j, name, layer) for j, (name, layer) in enumerate(layers)]
    uses: dict[SkipKey, _Uses] = {}
    faults: list[Fault] = []
    for index, (_, layer) in enumerate(layers):
        if layer is None:
            continue
        faults += [(index, labels[index] + text) for text in _faults_inside(layer)]
        skips = layer_skips(layer)
        for key in skips.stashed:
            uses.setdefault(key, _Uses()).stashed.append(index)
        for key in skips.popped:
            uses.setdefault(key, _Uses()).popped.append(index)
        for key in skips.internal:
            uses.setdefault(key, _Uses()).internal.append(index)
    for key, use in uses.items():
        faults += _faults_between(describe(key), use, labels)
    if faults:
        faults.sort(key=lambda fault: fault[0])
        lines = "".join(f"\n  {text}" for _, text in faults)
        raise TypeError(f"the skips of this model do not match:{lines}")


def _label(index: int, name: str, layer: nn.Module | None) -> str:
    called = "" if name == str(index) else f" {name!r}"
    return f"layer {index}{called} ({type(layer).__name__})"


def _faults_inside(layer: nn.Module) -> Iterator[str]:
    """What is wrong with a layer whatever the others do."""
    for path, module in own_modules(layer):
        where = f", in its submodule {path!r} ({type(module).__name__})," if path else ""
        for key in declared_both_ways(module):
            yield f"{where} declares {describe(key)} both as stash and as pop"
        if (not path or is_skippable(module)) and inspect.isgeneratorfunction(module.forward):
            yield f"{where} has a generator as forward, but no @skippable of its own"
        elif overrides_undeclared(module):
            yield (
                f"{where} overrides a forward with skips: decorate {type(module).__name__} with "
                "@skippable, naming all skips that then happen (none: @skippable())"
            )


def _faults_between(skip: str, use: _Uses, labels: list[str]) -> Iterator[Fault]:
    """What is wrong with one skip among the layers that use it."""
    for again in use.stashed[1:]:
        first = labels[use.stashed[0]]
        yield again, f"{labels[again]} stashes {skip} again, after {first}"
    for again in use.popped[1:]:
        first = labels[use.popped[0]]
        yield again, f"{labels[again]} pops {skip} again, after {first}"
    for index in use.stashed[:1]:
        if not any(later > index for later in use.popped):
            yield index, f"{labels[index]} stashes {skip}, but no later layer pops it"
    for index in use.popped[:1]:
        if not any(earlier < index for earlier in use.stashed):
            yield index, f"{labels[index]} pops {skip}, but no earlier layer stashes it"
    for index in use.internal:
        for start, end in zip(use.stashed[:1], use.popped[-1:], strict=False):
            if start <= index <= end:
                yield (
                    index,
                    f"{labels[index]} stashes and pops {skip} inside itself while another "
                    f"{skip} is on its way from {labels[start]} to {labels[end]}",
                )
