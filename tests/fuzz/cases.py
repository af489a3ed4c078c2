"""Random pipes for random models, and calls of them, in words."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from syncpipe import Pipe, Selective
from syncpipe.schedules import one_f_one_b
from tests.fuzz.models import KINDS, Model, drawn_model
from tests.support.models import CHECKPOINT_MODES
from tests.support.training import any_schedule, fitting

__all__ = ["Case", "drawn_case"]

_ATEN = torch.ops.aten
_SAVED = [_ATEN.addmm.default, _ATEN.mm.default, _ATEN.tanh.default, _ATEN.randn_like.default]
_MODES = [*CHECKPOINT_MODES, *CHECKPOINT_MODES, "offload"]
#: Those that replicas may run at the same time: they write into no state, nor have hidden leaves.
ALIKE = ["linear", "conv", "layer_norm", "tanh", "gelu", "frozen", "residual", "relu_", "mul_"]
ALIKE += ["forward_hook", "backward_hook", "identity", "view", "slice"]
ALIKE += ["fork", "join", "twice", "meet", "send", "send_int", "send_none"]
ALIKE += ["receive", "receive_unused", "dropout", "rrelu", "noise", "dawdle"]

DRIVERS = ["forward", "forward", "train", "train", "train", "iterator", "eval"]
DRIVERS += ["outputs", "no_grad", "inference_mode"]

#: By the loss what the weight is of a micro-batch of some samples, and a tensor with one for each.
WEIGHTS: dict[str, Callable[[int, Tensor], Any]] = {
    "weighted": lambda size, scale: size + 0.5,
    "weighted by a tensor": lambda size, scale: (scale > 0).sum() + 0.5,
    "weighted by a tensor of the host": lambda size, scale: torch.tensor(size + 0.5),
}


@dataclass(frozen=True)
class Call:
    """One call of a pipe.

    Attributes:
        driver: one of ``DRIVERS``.
        schedule: of ``train_batch``.
        loss: ``"mean"``, ``"sum"`` or one of ``WEIGHTS``; or a mean that draws, ``"noisy"``, or
            that calls the pipe, as its data does, ``"nested"``.
        sizes: the samples of each micro-batch, or of the mini-batch alone.
        autocast: run it under autocast, with its casts ``"cached"`` or made ``"anew"``.
        zero: forget the gradients of earlier calls.
        computed: what it is given is no leaf.
        training: the mode of the pipe; None for that in which it is.
    """

    driver: str
    schedule: Any
    loss: str
    sizes: tuple[int, ...]
    autocast: str
    zero: bool
    computed: bool
    training: bool | None


@dataclass(frozen=True)
class Case:
    """A pipe in words, and what is done with it; each of several replicas has a worker."""

    model: Model
    balance: tuple[int, ...]
    devices: tuple[int, ...]
    replicas: tuple[int, ...]
    chunks: int
    checkpoint: Any
    by_hand: bool
    input_grad: bool
    calls: tuple[Call, ...]
    unpack: bool = False
    beside: bool = False  #: a thread of the user's, which draws where no layer does

    @property
    def copied(self) -> bool:
        """Whether a stage has replicas."""
        return max(self.replicas) > 1

    @property
    def workers(self) -> Sequence[int]:
        """For each replica of each stage its worker; stages on one device have them in common."""
        count = dict(zip(self.devices, self.replicas, strict=True))
        first = [0, *accumulate(count[d] for d in sorted(count))]
        return [first[d] + k for d in self.devices for k in range(count[d])]

    def pipe(self, places: Sequence[Any] | None = None, dtype: torch.dtype = torch.float32) -> Pipe:
        """The pipe, with its workers at these places; by default on the CPU."""
        torch.manual_seed(self.model.seed)
        return Pipe(
            self.model.build(dtype),
            self.balance,
            devices=[f"cpu:{k}" if places is None else places[k] for k in self.workers],
            replicas=self.replicas,
            chunks=self.chunks,
            checkpoint=self.checkpoint,
            unpack=self.unpack,
        )


def drawn_case(
    chance: random.Random, *, kinds: Sequence[str] | None = None, copied: float = 0.1
) -> Case:
    """Draws a model, a pipe for it, perhaps with replicas, and calls."""
    has_copies = chance.random() < copied
    alike = ALIKE if kinds is None else [kind for kind in ALIKE if kind in kinds]
    model = drawn_model(chance, most=9, kinds=alike if has_copies else kinds)
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
    stage_of = [j for j, (a, b) in enumerate(pairwise(edges)) for _ in range(b - a)]
    ties = [{stage_of[first], stage_of[second]} for first, second, _ in model.ties]
    alone = {devices[j] for tie in ties if len(tie) > 1 for j in tie} if has_copies else {*devices}
    copies = [1 if d in alone else chance.randint(1, 3) for d in range(max(devices) + 1)]
    replicas = [copies[d] for d in devices]
    # PyTorch refuses to write into what a policy has saved (as an LSTM does under autocast on some
    # CPUs), and operations that are other ones.
    refused = any(KINDS[kind].inplace or kind in ("late", "lstm") for kind in model.layers)
    selective = [] if refused else [Selective(_SAVED)]
    modes = [chance.choice([*_MODES, *selective]) for _ in range(stages)]
    chunks = chance.randint(1, 5)
    autocast = chance.choice(["cached", "anew"]) if chance.random() < 0.15 else ""
    calls = []
    for _ in range(chance.randint(1, 3)):
        driver = chance.choice(DRIVERS)
        schedule = _schedule(chance, devices, model, max(replicas) > 1)
        sizes = [chunks if chance.random() < 0.3 else chance.randint(1, 9)]
        if driver == "iterator":
            sizes *= chunks
            if chance.random() < 0.3:
                sizes = [chance.randint(1, 3) for _ in range(chunks)]
        loss = chance.choice(["mean"] * 4 + ["sum", *WEIGHTS])
        if model.draws and chance.random() < 0.4:
            loss = "noisy" if model.counts else chance.choice(["noisy", "nested"])
        flags = [chance.random() < p for p in (0.6, 0.3, 0.85)]
        calls.append(Call(driver, schedule, loss, tuple(sizes), autocast, *flags))
    case = Case(
        model,
        tuple(b - a for a, b in pairwise(edges)),
        tuple(devices),
        tuple(replicas),
        chunks,
        modes[0] if chance.random() < 0.7 else tuple(modes),
        chance.random() < 0.1,
        chance.random() < 0.6,
        tuple(calls),
    )
    checkpoint = _by_layer(chance, modes, edges) or case.checkpoint
    lone = not {"fork", "twice", "weighs"} & {*model.layers}  # what these make is one argument
    unpack = lone and chance.random() < 0.2
    often = 0.3 if model.draws else 0.1 * (max(replicas) == 1)
    return replace(case, checkpoint=checkpoint, unpack=unpack, beside=chance.random() < often)


def _schedule(chance: random.Random, devices: Sequence[int], model: Model, copied: bool) -> Any:
    """One that has a name, 1F1B with any slots, or any order at all."""
    kinds = [*fitting(devices), "slots", *([] if model.draws else ["any"])]
    kind = chance.choice(kinds)
    if kind == "slots":
        counts = sorted((chance.randint(1, 6) for _ in devices), reverse=True)
        slots = ["textbook", "overlap", "overlap" if copied else counts]
        return partial(one_f_one_b, slots=chance.choice(slots))
    if kind == "any":
        seed, in_order = chance.randrange(1000), model.counts
        return partial(any_schedule, seed=seed, halves=True, in_order=in_order)
    return kind


def _by_layer(chance: random.Random, modes: Sequence[Any], edges: Sequence[int]) -> Any:
    """Layers to be computed again, of all stages or of some; mostly nothing."""
    if chance.random() < 0.7:
        return None
    if chance.random() < 0.5:
        return _layers(chance, edges[0], edges[-1]) or None
    each = [
        (chance.random() < 0.6 and _layers(chance, *edge)) or mode
        for mode, edge in zip(modes, pairwise(edges), strict=True)
    ]
    named = not all(isinstance(mode, tuple) for mode in each)
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
    chance.shuffle(runs)
    return tuple(run if len(run) > 1 else run[0] for run in runs)
