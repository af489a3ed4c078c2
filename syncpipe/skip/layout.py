"""The skips of a sequence of layers: what each layer sends and receives, whether that fits, and
which skips travel between partitions."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from .namespace import SkipKey, describe
from .skippable import is_skippable, overrides_undeclared, pops, stashes


class LayerSkips(NamedTuple):
    """The skips of a top-level layer, those of its submodules included.

    Attributes:
        stashed: skips that it sends to later layers.
        popped: skips that it receives from earlier layers.
        internal: skips that one of its submodules sends to another.
    """

    stashed: tuple[SkipKey, ...]
    popped: tuple[SkipKey, ...]
    internal: tuple[SkipKey, ...]


def layer_skips(layer: nn.Module) -> LayerSkips:
    """What a layer exchanges with other layers, and what it keeps to itself.

    A name that one and the same module stashes and pops is a fault, and is left out here.
    """
    stashed: Counter[SkipKey] = Counter()
    popped: Counter[SkipKey] = Counter()
    for _, module in _own_modules(layer):
        both = _declared_both_ways(module)
        stashed.update(key for key in stashes(module) if key not in both)
        popped.update(key for key in pops(module) if key not in both)
    internal = stashed & popped
    return LayerSkips(
        tuple((stashed - internal).elements()),
        tuple((popped - internal).elements()),
        tuple(internal),
    )


def _own_modules(
    module: nn.Module, path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """A layer and its submodules with their paths, each once, nested pipes left out."""
    seen = set() if seen is None else seen
    if module in seen or getattr(type(module), "_syncpipe_skips_are_internal", False):
        return
    seen.add(module)
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _own_modules(child, f"{path}.{name}" if path else name, seen)


def _declared_both_ways(module: nn.Module) -> list[SkipKey]:
    popped = pops(module)
    return [key for key in stashes(module) if key in popped]


class SkipLayout(NamedTuple):
    """The skips that cross from one partition to another; all others stay inside one.

    Attributes:
        incoming: for each stage, the skips that it pops, with the stage that stashes them.
        outgoing: for each stage, the skips that it stashes, with the stage that pops them.
    """

    incoming: tuple[dict[SkipKey, int], ...]
    outgoing: tuple[dict[SkipKey, int], ...]


def inspect_layout(partitions: Sequence[nn.Sequential | Sequence[nn.Module]]) -> SkipLayout:
    """Works out which skips travel between which partitions.

    Args:
        partitions: runs of layers, in the order of the stages. Together they have to be free of
            the faults that :func:`verify_skippables` reports.
    """
    layout = SkipLayout(tuple({} for _ in partitions), tuple({} for _ in partitions))
    source: dict[SkipKey, int] = {}
    for stage, partition in enumerate(partitions):
        for layer in partition:
            skips = layer_skips(layer)
            for key in skips.popped:
                if source[key] != stage:
                    layout.incoming[stage][key] = source[key]
                    layout.outgoing[source[key]][key] = stage
            source.update(dict.fromkeys(skips.stashed, stage))
    return layout


def verify_skippables(module: nn.Sequential) -> None:
    """Check the skips of a model; ``Pipe`` does this by itself.

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
    labels: list[str] = []
    faults: list[tuple[int, str]] = []
    # For each skip the layers that stash it, that pop it, and that do both inside themselves.
    uses: dict[SkipKey, tuple[list[int], ...]] = defaultdict(lambda: ([], [], []))
    # Not named_children(): it leaves out the second use of a layer that is used twice.
    for index, (name, layer) in enumerate(module._modules.items()):
        called = "" if name == str(index) else f" {name!r}"
        labels.append(f"layer {index}{called} ({type(layer).__name__})")
        if layer is not None:
            faults += [(index, labels[index] + text) for text in _faults_inside(layer)]
            for kind, keys in enumerate(layer_skips(layer)):
                for key in keys:
                    uses[key][kind].append(index)
    for key, (stashed, popped, internal) in uses.items():
        faults += _faults_between(describe(key), stashed, popped, internal, labels)
    if faults:
        faults.sort(key=lambda fault: fault[0])
        lines = "".join(f"\n  {text}" for _, text in faults)
        raise TypeError(f"the skips of this model do not match:{lines}")


def _faults_inside(layer: nn.Module) -> Iterator[str]:
    """What is wrong with a layer whatever the others do."""
    for path, module in _own_modules(layer):
        where = f", in its submodule {path!r} ({type(module).__name__})," if path else ""
        for key in _declared_both_ways(module):
            yield f"{where} declares {describe(key)} both as stash and as pop"
        if (not path or is_skippable(module)) and inspect.isgeneratorfunction(module.forward):
            yield f"{where} has a generator as forward, but no @skippable of its own"
        elif overrides_undeclared(module):
            yield (
                f"{where} overrides a forward with skips: decorate {type(module).__name__} with "
                "@skippable, naming all skips that then happen (none: @skippable())"
            )


def _faults_between(
    skip: str, stashed: list[int], popped: list[int], internal: list[int], labels: list[str]
) -> Iterator[tuple[int, str]]:
    """What is wrong with one skip among the layers that use it."""
    for verb, indices in (("stashes", stashed), ("pops", popped)):
        for again in indices[1:]:
            yield again, f"{labels[again]} {verb} {skip} again, after {labels[indices[0]]}"
    for first in stashed[:1]:
        if max(popped, default=first) <= first:
            yield first, f"{labels[first]} stashes {skip}, but no later layer pops it"
    for first in popped[:1]:
        if min(stashed, default=first) >= first:
            yield first, f"{labels[first]} pops {skip}, but no earlier layer stashes it"
    for index in internal:
        if stashed and popped and stashed[0] <= index <= popped[-1]:
            yield (
                index,
                f"{labels[index]} stashes and pops {skip} inside itself while another {skip} is "
                f"on its way from {labels[stashed[0]]} to {labels[popped[-1]]}",
            )
