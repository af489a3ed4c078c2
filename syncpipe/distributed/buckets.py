"""Buckets: which gradients are reduced together, in one order in all processes.

The last stage is through first, and in it the last layer; so buckets come in that order. A bucket
holds parameters of one stage, one device and one dtype, in one piece of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from syncpipe.training.leaves import is_shared

__all__ = ["Bucket", "Buckets", "bucketed", "digest"]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some leaves whose gradients are reduced together.

    Attributes:
        stage: whose they are.
        leaves: on one device, of one dtype.
    """

    stage: int
    leaves: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.leaves[0].device

    @property
    def described(self) -> tuple[int, str, list[list[int]]]:
        """What has to be alike in all processes."""
        return self.stage, str(self.leaves[0].dtype), [list(leaf.shape) for leaf in self.leaves]

    @torch.no_grad()
    def nothing(self) -> Tensor:
        """What a process contributes that has nothing to say."""
        first = self.leaves[0]
        return first.new_zeros(sum(leaf.numel() for leaf in self.leaves))

    @torch.no_grad()
    def gathered(self, values: Sequence[Tensor | None]) -> Tensor:
        """A value for each leaf, in one piece of memory of its own; zeros where there is none."""
        parts = [
            (torch.zeros_like(leaf) if value is None else value.detach()).reshape(-1)
            for leaf, value in zip(self.leaves, values, strict=True)
        ]
        return torch.cat(parts).to(self.leaves[0].dtype)

    @torch.no_grad()
    def write(self, flat: Tensor, without: frozenset[int]) -> None:
        """Makes the gradients of the leaves what is in ``flat``.

        Args:
            flat: as of :meth:`gathered`.
            without: the leaves, by identity, that have no gradient in any process.
        """
        into: list[Tensor] = []
        values: list[Tensor] = []
        parts = torch.split(flat, [leaf.numel() for leaf in self.leaves])
        for leaf, part in zip(self.leaves, parts, strict=True):
            value = part.view(leaf.shape)
            if id(leaf) in without:
                continue
            if leaf.grad is None or is_shared(leaf.grad):
                leaf.grad = value.clone()
            else:
                into.append(leaf.grad)
                values.append(value)
        if into:
            torch._foreach_copy_(into, values)


class Buckets:
    """The buckets of a pipe.

    Args:
        leaves: for each stage those that are its own.
        capacity: bytes in a bucket, at most; a larger leaf is alone in one.

    Attributes:
        all: in the order in which they are reduced.
        of_stage: for each stage the indices of its own.
    """

    def __init__(self, leaves: Sequence[Iterable[Tensor]], capacity: float) -> None:
        self.all: list[Bucket] = []
        self.of_stage: list[list[int]] = [[] for _ in leaves]
        self.key = tuple(tuple(map(id, stage)) for stage in leaves)
        for j in reversed(range(len(leaves))):
            first = len(self.all)
            self.all += bucketed(j, reversed(list(leaves[j])), capacity)
            self.of_stage[j] = list(range(first, len(self.all)))

        #: What has to be alike in all processes, in short.
        self.signature = digest([bucket.described for bucket in self.all])


def digest(value: Any) -> int:
    """A number of 48 bits for a value, the same in all processes."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=6).digest(), "big")


def bucketed(j: int, leaves: Iterable[Tensor], capacity: float) -> list[Bucket]:
    """Leaves of a stage in buckets."""
    full: list[Bucket] = []
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for leaf in leaves:
        kind = leaf.device, leaf.dtype
        there = filling.setdefault(kind, [])
        if there and sum(t.nbytes for t in there) + leaf.nbytes > capacity:
            full.append(Bucket(j, tuple(there)))
            there = filling[kind] = []
        there.append(leaf)
    return full + [Bucket(j, tuple(rest)) for rest in filling.values()]
