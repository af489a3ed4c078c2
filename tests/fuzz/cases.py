"""Random pipes for random models, and calls of them, in words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from syncpipe import Pipe
from tests.fuzz.models import Model, drawn_model
from tests.support.models import CHECKPOINT_MODES
from tests.support.training import fitting

__all__ = ["Case", "drawn_case"]

DRIVERS = ["forward", "forward", "train", "train", "train", "iterator", "no_grad", "eval"]


@dataclass(frozen=True)
class Call:
    """One call of a pipe.

    Attributes:
        driver: one of ``DRIVERS``.
        schedule: of ``train_batch``.
        loss: ``"mean"``, ``"sum"`` or ``"weighted"``.
        sizes: the samples of each micro-batch, or of the mini-batch alone.
        autocast: run it under autocast.
        zero: forget the gradients of earlier calls.
    """

    driver: str
    schedule: str
    loss: str
    sizes: tuple[int, ...]
    autocast: bool
    zero: bool


@dataclass(frozen=True)
class Case:
    """A pipe in words, and what is done with it."""

    model: Model
    balance: tuple[int, ...]
    devices: tuple[int, ...]
    chunks: int
    checkpoint: Any
    by_hand: bool
    input_grad: bool
    calls: tuple[Call, ...]
    listed: bool = False
    unpack: bool = False

    def pipe(self, devices: Sequence[Any] | None = None) -> Pipe:
        """The pipe, by default on CPU workers."""
        torch.manual_seed(self.model.seed)
        return Pipe(
            self.model.listed() if self.listed and not self.model.ties else self.model.build(),
            self.balance,
            devices=devices or [f"cpu:{k}" for k in self.devices],
            chunks=self.chunks,
            checkpoint=self.checkpoint,
            unpack=self.unpack,
        )


def drawn_case(chance: random.Random, *, kinds: Sequence[str] | None = None) -> Case:
    """Draws a model, a pipe for it, and calls."""
    model = drawn_model(chance, most=9, kinds=kinds)
    count = len(model.layers)
    stages = chance.randint(1, min(4, count))
    edges = [0, *sorted(chance.sample(range(1, count), stages - 1)), count]
    workers = chance.randint(1, stages)
    layout = chance.random()
    if layout < 0.5:  # in turn, as interleaved schedules have it
        devices = [j % workers for j in range(stages)]
    elif layout < 0.75:  # there and back, as schedules in a V have it
        devices = [min(j, stages - 1 - j) for j in range(stages)]
    else:
        devices = [chance.randrange(workers) for _ in range(stages)]
    devices = [list(dict.fromkeys(devices)).index(k) for k in devices]
    modes = [chance.choice(CHECKPOINT_MODES) for _ in range(stages)]
    chunks = chance.randint(1, 5)
    autocast = chance.random() < 0.15
    calls = []
    for _ in range(chance.randint(1, 3)):
        driver = chance.choice(DRIVERS)
        if driver == "forward" and "noisy_hook" in model.layers:
            driver = "train"  # hooks in the backward of `pipe(x)` draw in autograd's order
        schedule = chance.choice(fitting(devices))
        sizes = [chunks if chance.random() < 0.3 else chance.randint(1, 9)]
        if driver == "iterator":
            sizes *= chunks
            if chance.random() < 0.3:
                sizes = [chance.randint(1, 3) for _ in range(chunks)]
        loss = chance.choice(["mean", "mean", "mean", "sum", "weighted"])
        calls.append(Call(driver, schedule, loss, tuple(sizes), autocast, chance.random() < 0.6))
    case = Case(
        model,
        tuple(b - a for a, b in pairwise(edges)),
        tuple(devices),
        chunks,
        modes[0] if chance.random() < 0.7 else tuple(modes),
        chance.random() < 0.1,
        chance.random() < 0.6,
        tuple(calls),
        chance.random() < 0.3,
    )
    checkpoint = _by_layer(chance, modes, edges) or case.checkpoint
    lone = not {"fork", "twice"} & {*model.layers}  # what these make is one argument
    return replace(case, checkpoint=checkpoint, unpack=lone and chance.random() < 0.2)


def _by_layer(chance: random.Random, modes: Sequence[str], edges: Sequence[int]) -> Any:
    """Layers to be computed again, of all stages or of some; mostly nothing."""
    if chance.random() < 0.7:
        return None
    if chance.random() < 0.5:
        return _layers(chance, edges[0], edges[-1]) or None
    each = [
        (chance.random() < 0.6 and _layers(chance, *edge)) or mode
        for mode, edge in zip(modes, pairwise(edges), strict=True)
    ]
    named = any(isinstance(mode, str) for mode in each)
    return tuple(each) if named else sum(each, ())


def _layers(chance: random.Random, first: int, last: int) -> tuple[Any, ...]:
    runs: list[tuple[int, ...]] = []
    for k in range(first, last):
        if chance.random() < 0.4:
            continue
        if runs and runs[-1][-1] == k - 1 and chance.random() < 0.3:
            runs[-1] = (*runs[-1], k)
        else:
            runs.append((k,))
    return tuple(run if len(run) > 1 else run[0] for run in runs)
