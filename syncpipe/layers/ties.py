"""Tied tensors: parameters and buffers that are in layers of several stages.

``head.weight = embedding.weight``, one module at two places, ``tie_weights()``: outside of running
cells all of these modules hold the same tensor. Its owner is the first stage that has it. This file
finds ties. ``stages.sharing`` makes the copies that the other stages compute with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from syncpipe.runtime.streams import same_memory
from syncpipe.skip.layout import modules_outside_pipes
from syncpipe.storage import extent, places_of, storage_of

__all__ = [
    "Place", "Tie", "check_memory", "check_modes", "check_replicas", "find_ties", "move_layers",
    "overlapping",
]  # fmt: skip


class Place(NamedTuple):
    """One place of a parameter or buffer: the stage, the module, the name in the wrapped module."""

    stage: int
    module: nn.Module
    full_name: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.full_name!r} (stage {self.stage})"


@dataclass(frozen=True, eq=False)
class Tie:
    """A parameter or buffer of several stages; the owner comes first in ``stages``."""

    tensor: Tensor
    places: tuple[Place, ...]
    stages: tuple[int, ...]

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(map(str, self.places)))


def _all_places(partitions: Sequence[nn.Module]) -> Iterator[Place]:
    for j, partition in enumerate(partitions):
        paths = {module: f"{path}." if path else "" for path, module in partition.named_modules()}
        for module, _, name, tensor in places_of(partition):
            yield Place(j, module, paths[module] + name, tensor)


def find_ties(partitions: Sequence[nn.Module]) -> list[Tie]:
    """The tensors that several partitions share; runs in every call."""
    homes: dict[int, int] = {}
    shared = {
        id(tensor)
        for j, partition in enumerate(partitions)
        for *_, tensor in places_of(partition)
        if homes.setdefault(id(tensor), j) != j
    }
    found: dict[int, list[Place]] = {}
    for place in _all_places(partitions) if shared else ():
        if id(place.tensor) in shared:
            found.setdefault(id(place.tensor), []).append(place)
    ties = [
        Tie(places[0].tensor, tuple(places), tuple(dict.fromkeys(p.stage for p in places)))
        for places in found.values()
    ]
    for tie in ties:
        _check_tie(tie, partitions)
    return ties


def move_layers(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Move partitions to devices, in place; a shared tensor moves to its first device."""
    counts = Counter(id(tensor) for each in partitions for *_, tensor in places_of(each))
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # shared tensors by id: the old and the new one
    for partition, device in zip(partitions, devices, strict=True):
        for _, module in modules_outside_pipes(partition):  # a pipe has devices of its own
            held = module._parameters, module._buffers
            own = [(name, t) for tensors in held for name, t in tensors.items() if t is not None]
            present = [t for _, t in own if id(t) in replaced]
            stay = {id(t) for t in present} | {id(t.grad) for t in present if t.is_leaf}
            # "cpu:1" is a worker without memory of its own: tensors in the same memory do not move.
            if not all(id(t) in replaced or same_memory(t.device, device) for _, t in own):
                move = partial(_moved, device, stay)
                module._apply(move, recurse=False)  # type: ignore[no-untyped-call]
            for name, tensor in own:
                if counts[id(tensor)] > 1 or id(tensor) in replaced:
                    new = getattr(module, name)
                    replaced[id(new)] = replaced.setdefault(id(tensor), (tensor, new))
    for module, _, name, tensor in [place for each in partitions for place in places_of(each)]:
        if id(tensor) in replaced and replaced[id(tensor)][1] is not tensor:
            setattr(module, name, replaced[id(tensor)][1])


def _moved(device: torch.device, stay: set[int], tensor: Tensor) -> Tensor:
    return tensor if id(tensor) in stay else tensor.to(device)


def _check_tie(tie: Tie, partitions: Sequence[nn.Module]) -> None:
    if is_lazy(tie.tensor):
        raise ValueError(
            f"{tie} are one parameter that has no value yet, in stages that may want different "
            "shapes: run the plain model once before it is made a Pipe"
        )
    why = ""
    for place in tie.places:
        if isinstance(place.module, torch.jit.ScriptModule):
            kind = type(place.module).__name__
            why = f"{kind} is TorchScript, which computes with its own tensors only"
        if place.module not in dict(modules_outside_pipes(partitions[place.stage])).values():
            why = "one of them inside of another Pipe, which keeps its layers where they are"
    if why:
        raise ValueError(
            f"{tie} are one tensor, and {why}: choose a balance that puts both layers into one "
            "stage, or untie them"
        )


def check_replicas(ties: Sequence[Tie], replicas: Sequence[int]) -> None:
    for tie in ties:
        for j in tie.stages:
            if replicas[j] > 1:
                raise ValueError(
                    f"{tie} are one tensor, and stage {j} has {replicas[j]} replicas, each with a "
                    "copy of its own: choose a balance that puts both layers into one stage, give "
                    "these stages one device each, or untie them"
                )


def check_modes(ties: Sequence[Tie]) -> None:
    """Raise if normalisations in training share running statistics."""
    for tie in ties:
        for place in tie.places:
            module = place.module
            is_buffer = not isinstance(place.tensor, nn.Parameter)
            if is_buffer and isinstance(module, _NormBase) and module.training:
                raise ValueError(
                    f"{tie} are one buffer of a {type(module).__name__}, which moves it in "
                    "training. Stages see the micro-batches in another order than the plain model "
                    "does, so it would not be the same: give each stage a module of its own, "
                    "choose a balance that puts both layers into one stage, or call eval() of this "
                    "module"
                )


def overlapping(partitions: Sequence[nn.Module]) -> Iterator[tuple[Place, Place]]:
    """Pairs of different parameters and buffers that overlap in memory."""
    found: dict[int, dict[int, Place]] = {}
    for place in _all_places(partitions):
        tensor = place.tensor
        if not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel():
            found.setdefault(storage_of(tensor), {}).setdefault(id(tensor), place)
    for group in found.values():
        near: list[tuple[Place, int]] = []  # with the end of their memory
        for a in sorted(group.values(), key=lambda place: extent(place.tensor)):
            start, end = extent(a.tensor)
            near = [(b, b_end) for b, b_end in near if b_end > start]
            for b, _ in near:
                yield (a, b) if a.stage < b.stage else (b, a)
            near.append((a, end))


def check_memory(partitions: Sequence[nn.Module]) -> None:
    """Raise if different parameters or buffers of two partitions overlap in memory."""
    for a, b in overlapping(partitions):
        if a.stage != b.stage:
            raise ValueError(
                f"{a} and {b} are two tensors that have memory in common, which they cannot on "
                "different devices: make them one parameter (a.weight = b.weight), or copies of "
                "their own"
            )
