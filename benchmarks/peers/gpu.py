"""Peers on one GPU: models of the papers in two and in four partitions on it.

One GPU cannot overlap partitions as several would, so this says what a pipe costs and saves there
(the bookkeeping, the kernels of small micro-batches, the memory), not what several GPUs would gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import Options, Part
from benchmarks.models.gpt2 import gpt2_small
from benchmarks.models.resnet import resnet, resnext101_32x8d
from benchmarks.models.unet import unet
from benchmarks.peers.check import gathered
from benchmarks.peers.cpu import DEFINITIONS, next_token
from benchmarks.peers.libraries import Loss, Task, ours
from benchmarks.peers.measure import Meter, measured
from syncpipe import Worker
from syncpipe.balance import balance_by_time

PARTITIONS = (2, 4)
CHUNKS = 8
MODES = ("never", "except_last", "always")
TRAINING_MODES = ("never", "always")
Samples = Callable[[int], tuple[Tensor, Tensor]]


class Case(NamedTuple):
    """A model, how to make so many samples on the CPU, its loss, and the size of a mini-batch."""

    name: str
    build: Callable[[], nn.Sequential]
    samples: Samples
    loss: Loss
    batch: int


def pictures(side: int, classes: int | None, batch: int) -> tuple[Tensor, Tensor]:
    """Pictures with a class each; with None for the classes, a mask each."""
    x = torch.rand(batch, 3, side, side)
    if classes is None:
        return x, torch.rand(batch, 1, side, side).round()
    return x, torch.randint(classes, (batch,))


def sentences(words: int, length: int, batch: int) -> tuple[Tensor, Tensor]:
    """Tokens, and the tokens that follow them."""
    tokens = torch.randint(words, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _resnext(quick: bool) -> Case:
    if quick:
        build = partial(resnet, (1, 1, 1, 1), channels=8, groups=2, group_width=16, num_classes=10)
        samples = partial(pictures, 64, 10)
        return Case("ResNeXt of 4 blocks, 64x64 pixels", build, samples, F.cross_entropy, 16)
    samples = partial(pictures, 224, 1000)
    name = "ResNeXt-101 32x8d, 224x224 pixels"
    return Case(name, resnext101_32x8d, samples, F.cross_entropy, 64)


def _unet(quick: bool) -> Case:
    loss = F.binary_cross_entropy_with_logits
    if quick:
        build = partial(unet, depth=2, num_convs=1, base_channels=4)
        return Case("U-Net (1, 4)", build, partial(pictures, 16, None), loss, 16)
    samples = partial(pictures, 192, None)
    return Case("U-Net (5, 64), 192x192 pixels", partial(unet, 5, 5, 64), samples, loss, 32)


def _gpt2(quick: bool) -> Case:
    if quick:
        build = partial(gpt2_small, layers=2, width=16, heads=2, vocabulary=50, length=8)
        samples = partial(sentences, 50, 8)
        return Case("GPT-2 of 2 blocks, 8 tokens", build, samples, next_token, 16)
    samples = partial(sentences, 50_257, 1024)
    return Case("GPT-2 small, not tied, 1024 tokens", gpt2_small, samples, next_token, 16)


# -- measuring ------------------------------------------------------------------------------------


def cuda_meter(device: torch.device) -> Meter:
    """The clock waits for the GPU; memory is what PyTorch's allocator has handed out."""
    return Meter(
        partial(torch.cuda.synchronize, device),
        partial(torch.cuda.reset_peak_memory_stats, device),
        partial(torch.cuda.max_memory_allocated, device),
    )


def run(
    case: Callable[[bool], Case],
    title: str,
    options: Options,
    device: torch.device | None = None,
    meter: Meter | None = None,
) -> Part:
    """Measures one model; without a GPU there is nothing but a line that says so.

    Args:
        case: the model, by whether it is quick.
        title: of the part.
        options: of the command line.
        device: where; the first GPU by default.
        meter: for this device.
    """
    part = Part(f"Peers on one GPU: {title}", "")
    if device is None:
        if not torch.cuda.is_available():
            part.notes = ["Skipped: PyTorch finds no CUDA GPU here."]
            return part
        device = torch.device("cuda", torch.cuda.current_device())
    meter = meter or cuda_meter(device)
    chosen, repeats = case(options.quick), options.rounds(7)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    part.setting = (
        f"{chosen.name}, batch {chosen.batch}, {CHUNKS} micro-batches, float32 with PyTorch's "
        f"defaults; {' and '.join(map(str, PARTITIONS))} partitions, all of them on {where}; "
        f"{repeats} rounds, one step of each in each."
    )
    part.definitions = {
        **{name: text for name, text in DEFINITIONS.items() if name.startswith("over ")},
        "partitions": "all rows are measured once for each number of them, the plain ones as well.",
        "workers": "threads that share out the partitions, each with streams of its own; with one "
        "worker, ours runs on the calling thread and its current stream.",
        "samples/s": "throughput of forward, loss and backward, until the GPU is through.",
        "peak MiB": "torch.cuda.max_memory_allocated, the highest of all rounds.",
    }
    part.notes = ["torch.distributed.pipelining is left out: NCCL wants a GPU for each rank."]
    for n in PARTITIONS:
        task = made(chosen, n, device, options.quick)
        part.notes.append(f"Layers in {n} partitions: {', '.join(map(str, task.balance))}.")
        own = ours(task, places(n, device), MODES, TRAINING_MODES)
        found = gathered(task, part, own, device, MODES)
        measured(found, meter, repeats, f"{title}, {n} partitions", {"partitions": n})
    return part


def made(case: Case, partitions: int, device: torch.device, quick: bool) -> Task:
    """The model with its mini-batch on the device, the partitions balanced by measured time."""
    torch.manual_seed(0)
    with device:
        model = case.build()
    x, target = (tensor.to(device) for tensor in case.samples(case.batch))
    sample = x[: case.batch // CHUNKS]
    timeout = 0.05 if quick else 1.0
    balance = balance_by_time(partitions, model, sample, timeout=timeout, progress=False)
    return Task(model, x, target, case.loss, CHUNKS, balance)


def places(partitions: int, device: torch.device) -> dict[str, Sequence[Any]]:
    """All partitions on one worker, which runs inline, and each on a worker with streams."""
    workers = [Worker(device) for _ in range(partitions)]
    return {"1 worker": [device] * partitions, f"{partitions} workers": workers}


PARTS: dict[str, Callable[[Options], Part]] = {
    "gpu-resnext101": partial(run, _resnext, "ResNeXt-101"),
    "gpu-unet": partial(run, _unet, "U-Net (5, 64)"),
    "gpu-gpt2": partial(run, _gpt2, "GPT-2 small"),
}
