"""Tied tensors: parameters and buffers that are in layers of several stages.

``head.weight = embedding.weight``, one module at two places, ``tie_weights()``: outside of running
cells there is one tensor, which all of these modules hold. Its owner is the first stage that has
it. What the others compute with is for ``stages.sharing`` to say; here is who shares what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from syncpipe.data import extent, storage_of

__all__ = [
    "Place", "Tie", "check_memory", "check_modes", "check_replicas", "find_ties", "overlapping",
]  # fmt: skip


class Place(NamedTuple):
    """Where a tensor is: the stage, the modules on the way, its name there and its full name."""

    stage: int
    way: tuple[nn.Module, ...]
    name: str
    full_name: str

    @property
    def module(self) -> nn.Module:
        """The module that holds it."""
        return self.way[-1]

    @property
    def is_parameter(self) -> bool:
        """Whether it is one of the module's parameters, not of its buffers."""
        return self.name in self.module._parameters

    @property
    def tensors(self) -> dict[str, Any]:
        """The dict of the module that holds it."""
        return self.module._parameters if self.is_parameter else self.module._buffers


@dataclass(frozen=True, eq=False)
class Tie:
    """A parameter or buffer that several stages have, in the order of layers: the owner first."""

    tensor: Tensor
    places: tuple[Place, ...]
    stages: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The stage that has it first."""
        return self.stages[0]

    def __str__(self) -> str:
        """Its names."""
        names = dict.fromkeys(f"{p.full_name!r} (stage {p.stage})" for p in self.places)
        return " and ".join(names)


def find_ties(partitions: Sequence[nn.Module]) -> list[Tie]:
    """What several partitions share, by the names in the wrapped module."""
    shared = _shared(partitions)
    if not shared:
        return []
    found: dict[int, tuple[Tensor, list[Place]]] = {}
    for j, partition in enumerate(partitions):
        for prefix, way in _ways((partition,), "", set()):
            for name, tensor in chain(way[-1]._parameters.items(), way[-1]._buffers.items()):
                if tensor is not None and id(tensor) in shared:
                    place = Place(j, way, name, prefix + name)
                    found.setdefault(id(tensor), (tensor, []))[1].append(place)
    ties = [
        Tie(tensor, tuple(places), tuple(dict.fromkeys(place.stage for place in places)))
        for tensor, places in found.values()
    ]
    for tie in ties:
        _check(tie)
    return ties


def _ways(
    way: tuple[nn.Module, ...], prefix: str, seen: set[int]
) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """All modules, each once, with the way there; by the names that they have in each other."""
    if id(way[-1]) in seen:
        return
    seen.add(id(way[-1]))
    yield prefix, way
    for name, child in way[-1]._modules.items():
        if child is not None:
            yield from _ways((*way, child), f"{prefix}{name}.", seen)


def _shared(partitions: Sequence[nn.Module]) -> set[int]:
    """The tensors, by identity, that more than one partition has. Runs in each call."""
    homes: dict[int, int] = {}
    shared: set[int] = set()
    for j, partition in enumerate(partitions):
        pending: list[nn.Module | None] = [partition]
        seen: set[int] = set()
        while pending:
            module = pending.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            for tensor in chain(module._parameters.values(), module._buffers.values()):
                if tensor is not None and homes.setdefault(id(tensor), j) != j:
                    shared.add(id(tensor))
            pending.extend(module._modules.values())
    return shared


def _check(tie: Tie) -> None:
    if is_lazy(tie.tensor):
        raise ValueError(
            f"{tie} are one parameter that has no value yet, in stages that may want different "
            "shapes: run the plain model once before it is made a Pipe"
        )
    for module in chain.from_iterable(place.way for place in tie.places):
        why = ""
        if isinstance(module, torch.jit.ScriptModule):
            why = (
                f"{type(module).__name__} is TorchScript, which computes with its own tensors only"
            )
        if getattr(module, "_syncpipe_skips_are_internal", False):
            why = "one of them inside of another Pipe, which keeps its layers where they are"
        if why:
            raise ValueError(
                f"{tie} are one tensor, and {why}: choose a balance that puts both layers into one "
                "stage, or untie them"
            )


def check_replicas(ties: Sequence[Tie], replicas: Sequence[int]) -> None:
    """Refuses ties with stages that have replicas."""
    for tie in ties:
        for j in tie.stages:
            if replicas[j] > 1:
                raise ValueError(
                    f"{tie} are one tensor, and stage {j} has {replicas[j]} replicas, each with a "
                    "copy of its own: choose a balance that puts both layers into one stage, give "
                    "these stages one device each, or untie them"
                )


def check_modes(ties: Sequence[Tie]) -> None:
    """Refuses normalisations in training that have running statistics in common."""
    for tie in ties:
        for place in tie.places:
            module = place.module
            if not place.is_parameter and isinstance(module, _NormBase) and module.training:
                raise ValueError(
                    f"{tie} are one buffer of a {type(module).__name__}, which moves it in "
                    "training. Stages see the micro-batches in another order than the plain model "
                    "does, so it would not be the same: give each stage a module of its own, "
                    "choose a balance that puts both layers into one stage, or call eval() of this "
                    "module"
                )


class _Named(NamedTuple):
    """A tensor of a stage, by its name there."""

    stage: int
    name: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name!r} in stage {self.stage}"


def overlapping(partitions: Sequence[nn.Module]) -> Iterator[tuple[_Named, _Named]]:
    """Pairs of different parameters and buffers of partitions that have memory in common."""
    found: dict[int, dict[int, _Named]] = {}
    for j, partition in enumerate(partitions):
        for name, tensor in chain(partition.named_parameters(), partition.named_buffers()):
            if not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel():
                group = found.setdefault(storage_of(tensor), {})
                group.setdefault(id(tensor), _Named(j, name, tensor))
    for group in found.values():
        near: list[_Named] = []
        for a in sorted(group.values(), key=lambda named: extent(named.tensor)):
            near = [b for b in near if extent(b.tensor)[1] > extent(a.tensor)[0]]
            for b in near:
                yield (a, b) if a.stage < b.stage else (b, a)
            near.append(a)


def check_memory(partitions: Sequence[nn.Module]) -> None:
    """Refuses different parameters of partitions on different devices that overlap in memory."""
    for a, b in overlapping(partitions):
        if a.stage != b.stage:
            raise ValueError(
                f"{a} and {b} are two tensors that have memory in common, which they cannot on "
                "different devices: make them one parameter (a.weight = b.weight), or copies of "
                "their own"
            )
