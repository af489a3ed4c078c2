"""What ``Pipe.auto`` gains over devices that take turns, as under ``device_map="auto"``.

Layers lie one after another on the devices, and with turns only one of these works at a time: the
same cut, under the schedule "naive", or with the mini-batch in one piece.

Two parts: ``sleeping`` (layers that sleep, the longer the more samples they have, on 2 and 4 CPU
workers: what devices would gain that share nothing) and ``transformer`` (one on two CPU workers,
which share cores, caches and memory). All ways are measured in every round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import Group, Options, Part, Spread, rounds, timed
from benchmarks.models import Attention, FeedForward
from benchmarks.schedules import NappingLinear, Naps
from benchmarks.tasks import LOOP, OURS, Peer, Task, called, checked, trained
from syncpipe import Pipe

PLAIN, TURNS, WHOLE, AUTO = "plain model", "turns", "turns, in one piece", "Pipe.auto"
#: Samples in a mini-batch.
BATCH = 32
COLUMNS = {
    "turns": "an equal number of layers on each worker, one working at a time.",
    "times as fast as turns": "the quicker of both ways to take turns, over this, in one round.",
}


def compared(part: Part, model: nn.Sequential, x: Tensor, n: int, repeats: int) -> None:
    """Adds what each way takes on so many workers."""
    devices = [f"cpu:{d}" for d in range(n)]
    auto = Pipe.auto(model, x[:4], batch_size=len(x), devices=devices, verbose=False)
    each = len(model) // n
    cut = [each] * (n - 1) + [len(model) - each * (n - 1)]
    options: dict[str, Any] = {"devices": devices, "checkpoint": "never", "schedule": "naive"}
    pipes = {
        WHOLE: Pipe(model, cut, chunks=1, **options),
        TURNS: Pipe(model, cut, chunks=auto.chunks, **options),
        AUTO: auto,
    }
    task = Task(model, x, torch.zeros_like(x), F.mse_loss, auto.chunks, cut)
    peers = [Peer("", PLAIN, "", "", called(model, F.mse_loss))]
    for label, pipe in pipes.items():
        peers.append(Peer(OURS, label, "", "", trained(pipe, F.mse_loss, verify=False)))
    jobs = {label: timed(step) for label, step in checked(task, peers).items() if label != LOOP}
    samples = rounds(jobs, repeats, f"{n} workers")
    base = [min(pair) for pair in zip(samples[TURNS], samples[WHOLE], strict=True)]
    for label, times in samples.items():
        part.rows.append(
            {
                "workers": n,
                "what": label,
                "stages": len(pipes[label].balance) if label in pipes else 1,
                "micro-batches": pipes[label].chunks if label in pipes else 1,
                "ms": Spread.of([1e3 * took for took in times]),
                "times as fast as turns": Spread.ratio(base, times),
            }
        )


def sleeping(options: Options) -> Part:
    """Layers that sleep."""
    seconds, repeats = 1e-4 if options.quick else 1e-3, options.rounds(7)
    part = Part(
        "Emulated devices",
        f"Eight layers that sleep {1e3 * seconds:g} ms a sample forward and twice that backward, "
        f"{BATCH} samples; {repeats} rounds.",
        COLUMNS,
    )
    for n in (2, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*(NappingLinear(4, Naps(seconds)) for _ in range(8)))
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
        layers += [Attention(width, 4), FeedForward(width)]
    model = nn.Sequential(*layers, nn.Linear(width, width))
    compared(part, model, F.normalize(torch.randn(BATCH, length, width), dim=-1), 2, repeats)
    return part


GROUP = Group(
    "one_call",
    "Pipe.auto beside devices that take turns",
    {"sleeping": sleeping, "transformer": transformer},
)
