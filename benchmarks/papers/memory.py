"""How much memory an experiment of the papers takes, counted on fake tensors, and how it is cut.

The layers are cut so that the largest stage takes as little memory as possible by the planner's
formula, exactly. What counts in the end is what was then counted (``fake_memory.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import PaperModel, amoebanetd, transformer
from benchmarks.papers.fake_memory import Batch, Effects
from syncpipe.balance import Profile, profile
from syncpipe.planner.costs.chain import Chain


@dataclass(frozen=True)
class Setting:
    """How the experiments of a table are run.

    Attributes:
        samples: in a mini-batch.
        m: number of micro-batches.
        bytes: for each parameter: itself, its gradient, the optimizer.
        limit: of a device, in bytes; infinite where nothing is said of it.
    """

    samples: int
    m: int
    bytes: int
    limit: float = math.inf

    @property
    def each(self) -> int:
        """Samples in a micro-batch."""
        return self.samples // self.m


def batch_and_loss(entry: PaperModel) -> tuple[Batch, Callable[..., Tensor]]:
    """Inputs, targets and a loss for a model: classes, words or pixels, by its output."""
    shape = entry.output
    pixels = len(shape) == 3
    targets = shape if pixels else shape[:-1]

    def batch(samples: int, first: Any, last: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if pixels else torch.long
        target = torch.zeros(samples, *targets, dtype=dtype, device=last)
        return entry.sample(samples, first), target

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if pixels:
            return F.binary_cross_entropy_with_logits(output, target)
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    return batch, loss


def smallest_largest(memory: Tensor, n: int) -> list[int]:
    """The cut whose largest stage is the smallest: exact, by dynamic programming.

    Args:
        memory: in row ``i`` and column ``j`` that of a stage of the layers ``i`` to ``j - 1``.
        n: number of stages.
    """
    best, came = memory[0], []
    for _ in range(n - 1):
        worst = torch.maximum(best.unsqueeze(1), memory)
        best, before = worst.min(0)
        came.append(before)
    ends = [len(memory) - 1]
    for before in reversed(came):
        ends.append(int(before[ends[-1]]))
    ends.append(0)
    return [b - a for b, a in pairwise(ends)][::-1]


def stage_memory(chain: Chain, m: int) -> Tensor:
    """For each pair of borders what a stage between takes, all ``m`` micro-batches in flight."""
    layers = len(chain)
    table = torch.full((layers + 1, layers + 1), math.inf, dtype=torch.float64)
    fixed, stored = (
        torch.tensor(x, dtype=torch.float64) for x in (chain.fixed_to, chain.stored_to)
    )
    for i in range(layers):
        kept = m * chain.inputs[i] + chain.shared[i]
        row = fixed - fixed[i] + stored - stored[i] + kept
        waiting = chain.waiting(i)
        if waiting is not None:
            row = row + m * torch.tensor(waiting, dtype=torch.float64)
        table[i, i + 1 :] = row[i + 1 :]
    return table


def sizes_of(entry: PaperModel, samples: int) -> Profile:
    """What the layers of a model store, without running any of them: measured on ``meta``."""
    sample, _ = batch_and_loss(entry)[0](samples, "meta", "meta")
    return profile(entry.on_meta(), sample, sizes=[samples], time=False, progress=False)


def cut(sizes: Profile, setting: Setting, n: int) -> tuple[list[int], float]:
    """The best cut under GPipe's schedule, and the bytes of its largest stage by the formula."""
    table = stage_memory(Chain.of(sizes, setting.each, setting.bytes / 4), setting.m)
    balance = smallest_largest(table, n)
    ends = [0, *accumulate(balance)]
    return balance, max(float(table[i, j]) for i, j in pairwise(ends))


@dataclass(frozen=True)
class Counted:
    """What was counted for one experiment, in bytes: a number for each device."""

    parameters: list[int]
    fixed: list[int]
    activations: list[int]

    @property
    def largest(self) -> int:
        return max(a + b for a, b in zip(self.fixed, self.activations, strict=True))


def counted(entry: PaperModel, n: int, setting: Setting, *, naive: bool = False) -> Counted:
    """Counts one experiment.

    Args:
        entry: the model.
        n: number of partitions.
        setting: how it is run.
        naive: accumulate gradients over the micro-batches, without re-materialization.
    """
    batch, loss = batch_and_loss(entry)
    balance, _ = cut(sizes_of(entry, setting.each), setting, n)
    effects = Effects(entry.on_meta, balance, batch, loss, setting.each)
    if naive:
        activations = effects.activations("naive", setting.m, "never")
    else:
        activations = effects.activations("gpipe", setting.m, "always")
    fixed = [
        setting.bytes * parameters + buffers
        for parameters, buffers in zip(effects.parameters, effects.buffer_bytes, strict=True)
    ]
    return Counted(effects.parameters, fixed, activations)


# -- larger and smaller models --------------------------------------------------------------------


#: So many lengths are counted until one fits.
_ATTEMPTS = 4


@dataclass(frozen=True)
class Family:
    """Models of one kind and of any length.

    Attributes:
        entry: one of them.
        length: of that one.
        step: by which lengths can differ.
        of: makes the model of some length.
    """

    entry: PaperModel
    length: int
    step: int
    of: Callable[[int], nn.Sequential]

    @classmethod
    def around(cls, entry: PaperModel) -> Family:
        """The family of an AmoebaNet-D (L, D), all of D filters, or of a Transformer-L."""
        kind, _, numbers = entry.name.partition(" (")
        if kind == "AmoebaNet-D":
            layers, filters = map(int, numbers.rstrip(")").split(", "))
            return cls(entry, layers, 3, lambda length: amoebanetd(1000, length, filters))
        return cls(entry, int(entry.name.partition("-")[2]), 1, transformer)

    def member(self, length: int) -> PaperModel:
        """The model of this length."""
        return replace(self.entry, name=f"L = {length}", build=partial(self.of, length))


def largest(family: Family, found: Counted, n: int, setting: Setting) -> int | None:
    """The length of the largest member that fits on ``n`` devices.

    How much a layer more takes is estimated by the formula; that the result fits is counted.

    Args:
        family: the models.
        found: what was counted for ``family.entry``.
        n: number of partitions.
        setting: how they are run.

    Returns:
        None if nothing is found.
    """
    length, step = family.length, family.step
    other = length + max(step * n, length // 4 // step * step)
    here, there = (
        cut(sizes_of(family.member(x), setting.each), setting, n)[1] for x in (length, other)
    )
    each = (there - here) / (other - length)
    tried, most = length, found.largest
    for _ in range(_ATTEMPTS):
        # Further up the first time only: what fits then is taken, what does not is made shorter.
        tried += math.floor((setting.limit - most) / each / step) * step
        if tried < step:
            return None
        if tried != length or most > setting.limit:
            most = counted(family.member(tried), n, setting).largest
        if most <= setting.limit:
            return tried
    return None
