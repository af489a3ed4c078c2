"""What ``Pipe.auto`` gains over devices that take turns, as under ``device_map="auto"``.

Layers lie one after another on the devices, and with turns only one of these works at a time: the
same cut, under the schedule "naive", or with the mini-batch in one piece.

Two parts: ``sleeping`` (layers that sleep, the longer the more samples they have, on 2 and 4 CPU
workers: what devices would gain that share nothing) and ``transformer`` (one on two CPU workers,
which share cores, caches and memory). All ways are measured in every round.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import Group, Options, Outcome, Part, Spread, check, gradients, rounds, timed
from benchmarks.models.transformer import Attention, FeedForward
from syncpipe import Pipe

PLAIN, TURNS, WHOLE, AUTO = "plain model", "turns", "turns, in one piece", "Pipe.auto"
#: Samples in a mini-batch.
BATCH = 32


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds * len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(2 * ctx.seconds * len(grad))
        return grad, None


class Sleeper(nn.Module):
    """A linear map that sleeps so many seconds for each sample, and twice as long in backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Nap.apply(self.linear(x), self.seconds)
        return y


def loss_fn(output: Tensor) -> Tensor:
    return output.square().mean()


def compared(part: Part, model: nn.Sequential, x: Tensor, n: int, repeats: int) -> None:
    """Adds what each way takes on so many workers."""
    devices = [f"cpu:{d}" for d in range(n)]
    auto = Pipe.auto(copy.deepcopy(model), x[:4], batch_size=len(x), devices=devices, verbose=False)
    each = len(model) // n
    cut = [each] * (n - 1) + [len(model) - each * (n - 1)]
    options: dict[str, Any] = {"devices": devices, "checkpoint": "never"}
    turns = Pipe(copy.deepcopy(model), cut, chunks=auto.chunks, schedule="naive", **options)
    whole = Pipe(copy.deepcopy(model), cut, chunks=1, schedule="naive", **options)
    plain = copy.deepcopy(model)

    def step(module: nn.Module) -> Tensor:
        module.zero_grad()
        if isinstance(module, Pipe):
            return module.train_batch(x, loss_fn=loss_fn, verify=False)
        loss = loss_fn(module(x))
        loss.backward()
        return loss.detach()

    ways: dict[str, nn.Module] = {PLAIN: plain, WHOLE: whole, TURNS: turns, AUTO: auto}
    expected: Outcome = step(plain), gradients(plain)
    for label, module in ways.items():
        check(label, (step(module), gradients(module)), expected)
    jobs = {label: timed(lambda module=module: step(module)) for label, module in ways.items()}  # type: ignore[misc]
    samples = rounds(jobs, repeats, f"{n} workers")
    base = [min(pair) for pair in zip(samples[TURNS], samples[WHOLE], strict=True)]
    for label in ways:
        part.rows.append(
            {
                "workers": n,
                "what": label,
                "stages": len(auto.balance) if label == AUTO else n if label != PLAIN else 1,
                "micro-batches": auto.chunks if label in (AUTO, TURNS) else 1,
                "ms": Spread.of([1e3 * took for took in samples[label]]),
                "times as fast as turns": Spread.ratio(base, samples[label]),
            }
        )


COLUMNS = {
    "turns": "an equal number of layers on each worker, one working at a time.",
    "times as fast as turns": "the quicker of both ways to take turns, over this, in one round.",
}


def sleeping(options: Options) -> Part:
    """Layers that sleep."""
    seconds = 1e-4 if options.quick else 1e-3
    repeats = options.rounds(7)
    part = Part(
        "Emulated devices",
        f"Eight layers that sleep {1e3 * seconds:g} ms a sample forward and twice that backward, "
        f"{BATCH} samples; {repeats} rounds.",
        COLUMNS,
    )
    for n in (2, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*(Sleeper(seconds) for _ in range(8)))
        compared(part, model, torch.randn(BATCH, 4), n, repeats)
    return part


def transformer(options: Options) -> Part:
    """A transformer on two CPU workers."""
    width, depth, length = (32, 2, 16) if options.quick else (256, 6, 128)
    repeats = options.rounds(7)
    part = Part(
        "A transformer on two CPU workers",
        f"{depth} blocks of width {width}, {length} tokens, {BATCH} samples; {repeats} rounds.",
        COLUMNS,
        notes=["The plain model has one intra-op thread here, as each worker has."],
    )
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [Attention(width, 4, fused=True), FeedForward(width, 4 * width, nn.GELU)]
    model = nn.Sequential(*layers, nn.Linear(width, width))
    compared(part, model, F.normalize(torch.randn(BATCH, length, width), dim=-1), 2, repeats)
    return part


GROUP = Group(
    "one_call",
    "Pipe.auto beside devices that take turns",
    __doc__,
    {"sleeping": sleeping, "transformer": transformer},
)
