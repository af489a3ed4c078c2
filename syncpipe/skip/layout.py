"""The skips of a sequence of layers, their faults, and the skips that cross partitions."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from .skippable import is_skippable, overrides_undeclared, pops, stashes
from .store import SkipKey, describe


class LayerSkips(NamedTuple):
    """The skips of a top-level layer, those of its submodules included."""

    stashed: tuple[SkipKey, ...]  #: sent to later layers
    popped: tuple[SkipKey, ...]  #: received from earlier layers
    internal: tuple[SkipKey, ...]  #: sent from one of its submodules to another


def layer_skips(layer: nn.Module) -> LayerSkips:
    """The skips of a layer, without those that a single module both stashes and pops (a fault)."""
    stashed: Counter[SkipKey] = Counter()
    popped: Counter[SkipKey] = Counter()
    for _, module in modules_outside_pipes(layer):
        both = {*stashes(module)} & {*pops(module)}
        stashed.update(key for key in stashes(module) if key not in both)
        popped.update(key for key in pops(module) if key not in both)
    internal = stashed & popped
    return LayerSkips(
        tuple((stashed - internal).elements()),
        tuple((popped - internal).elements()),
        tuple(internal),
    )


def modules_outside_pipes(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A layer and its submodules with their paths, each once, without nested pipes."""
    seen = {m for m in module.modules() if getattr(type(m), "_syncpipe_skips_are_internal", False)}
    return module.named_modules(seen)  # type: ignore[no-any-return]


class SkipLayout(NamedTuple):
    """The skips that cross from one partition to another."""

    incoming: tuple[dict[SkipKey, int], ...]  #: for each stage: a skip it pops -> its source
    outgoing: tuple[dict[SkipKey, int], ...]  #: for each stage: a skip it stashes -> its target


def inspect_layout(partitions: Sequence[nn.Sequential | Sequence[nn.Module]]) -> SkipLayout:
    """Finds the skips between partitions, which must have passed :func:`verify_skippables`."""
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
    """Check the skips of a model. ``Pipe`` calls this itself.

    Skips of submodules count as skips of their top-level layer, except inside a nested pipe. Skips
    from one submodule of a layer to another one are internal to the layer.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``; or a skip is stashed or popped twice,
            stashed and popped by one module, never popped by a later layer, or never stashed by an
            earlier one. The message lists all faults, one per line, in the order of the layers.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"verify_skippables() takes an nn.Sequential, not an object of type "
            f"{type(module).__name__}"
        )
    labels: list[str] = []
    faults: list[tuple[int, str]] = []  # with the index of the layer, or of the second one
    # For each skip the layers that stash it, that pop it, and that use it internally.
    uses: dict[SkipKey, tuple[list[int], ...]] = defaultdict(lambda: ([], [], []))
    # Not named_children(): it leaves out the second use of a layer that is used twice.
    for k, (name, layer) in enumerate(module._modules.items()):
        called = "" if name == str(k) else f" {name!r}"
        labels.append(f"layer {k}{called} ({type(layer).__name__})")
        if layer is not None:
            faults += [(k, text) for text in _faults_inside(layer)]
            for kind, keys in enumerate(layer_skips(layer)):
                for key in keys:
                    uses[key][kind].append(k)
    for key, (stashed, popped, internal) in uses.items():
        skip = describe(key)
        for verb, users in (("stashes", stashed), ("pops", popped)):
            faults += [(k, f" {verb} {skip} again, after {labels[users[0]]}") for k in users[1:]]
        if stashed and max(popped, default=-1) <= stashed[0]:
            faults.append((stashed[0], f" stashes {skip}, but no later layer pops it"))
        if popped and min(stashed, default=len(labels)) >= popped[0]:
            faults.append((popped[0], f" pops {skip}, but no earlier layer stashes it"))
        for k in internal:
            if stashed and popped and stashed[0] <= k <= popped[-1]:
                way = f"from {labels[stashed[0]]} to {labels[popped[-1]]}"
                text = f" stashes and pops {skip} inside itself while another {skip} is on its way "
                faults.append((k, text + way))
    if faults:
        faults.sort(key=lambda fault: fault[0])
        lines = "".join(f"\n  {labels[k]}{text}" for k, text in faults)
        raise TypeError(f"the skips of this model do not match:{lines}")


def _faults_inside(layer: nn.Module) -> Iterator[str]:
    """The faults of a layer that do not depend on other layers."""
    for path, module in modules_outside_pipes(layer):
        where = f", in its submodule {path!r} ({type(module).__name__})," if path else ""
        for key in stashes(module):
            if key in pops(module):
                yield f"{where} declares {describe(key)} both as stash and as pop"
        if (not path or is_skippable(module)) and inspect.isgeneratorfunction(module.forward):
            yield f"{where} has a generator as forward, but no @skippable of its own"
        elif overrides_undeclared(module):
            yield (
                f"{where} overrides a forward with skips: decorate {type(module).__name__} with "
                "@skippable, naming all skips that then happen (none: @skippable())"
            )
