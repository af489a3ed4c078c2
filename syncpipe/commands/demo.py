"""Trains a small ResNet on handwritten digits through a pipe, on the devices of this machine.

The file is also an example for your own model: plan, build the pipe, verify it, train it, and draw
the timeline of a step.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncpipe
from syncpipe.commands.plan import whole_number
from syncpipe.runtime.streams import accelerators
from syncpipe.schedules import build
from syncpipe.timeline import compare

#: Images in a mini-batch of the training, and of the step that is planned and timed. The latter
#: has more images, so that each micro-batch keeps its device busy.
BATCH_SIZE, CPU_BATCH, ACCELERATOR_BATCH = 128, 256, 16_384
PLAN_SECONDS, TIMED_SECONDS, PEAK_LEARNING_RATE = 2.0, 3.0, 5e-3
PICTURE = "syncpipe-demo.png"

say = partial(print, flush=True)


class Block(nn.Module):
    """A block of a "Deep Residual Network" (https://arxiv.org/abs/1512.03385)."""

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), norm(after))
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1), norm(after))
        self.shortcut = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet(norm: Callable[[int], nn.Module] | None = None) -> nn.Sequential:
    """A ResNet of 7 layers, for images of shape ``[N, 1, 8, 8]``."""
    norm = norm or partial(nn.GroupNorm, 8)  # independent of the micro-batch, unlike BatchNorm
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), norm(32), nn.ReLU()),
        Block(32, 32, 1, norm),
        Block(32, 32, 1, norm),
        Block(32, 64, 2, norm),
        Block(64, 64, 1, norm),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, 10),
    )


class Digits(NamedTuple):
    """Images of shape ``[N, 1, 8, 8]`` with values from 0 to 1, labels of shape ``[N]``."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """The 1,797 images of scikit-learn; a fifth of them is the test set."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    data = datasets.load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target, dtype=torch.int64)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=data.target, random_state=0
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status, 1 if the pipe differs from the plain model."""
    try:
        digits = load_digits()
    except ImportError as error:
        say(f'demo: {error}; it needs scikit-learn: pip install "syncpipe[demo]"', file=sys.stderr)
        return 2
    torch.manual_seed(0)
    model, all_threads = resnet(), torch.get_num_threads()
    devices: list[Any] = accelerators()
    if len(devices) < 2:
        devices = ["cpu:0", "cpu:1"]
    if args.devices is not None:
        devices = [int(d) if d.isdecimal() else d for d in args.devices.split(",")]
    devices = devices[: len(model)]
    n, on_cpu = len(devices), str(devices[0]).startswith("cpu")
    say(f"syncpipe {syncpipe.__version__}: a small ResNet learns to read handwritten digits")
    size = CPU_BATCH if on_cpu else ACCELERATOR_BATCH
    which = torch.arange(size) % len(digits.train_labels)
    images, labels = digits.train_images[which], digits.train_labels[which]
    # The CPU workers of a pipe share the threads of the caller: one thread each here.
    with threads(n if on_cpu else all_threads):
        say("\n1. The plan: syncpipe.plan(model, sample, devices=, batch_size=)")
        try:
            plan = syncpipe.plan(
                model, images, devices=devices, batch_size=size, stages=n, chunks=[8, 16],
                timeout=PLAN_SECONDS, progress=False,
            )  # fmt: skip
        except (TypeError, ValueError) as error:  # for example a missing device
            say(f"demo: {error}", file=sys.stderr)
            return 2
        pipe = syncpipe.Pipe(model, **plan.options(), devices=plan.devices)
        first = pipe.devices[0]  # the device of the input
        digits = Digits(*[tensor.to(first) for tensor in digits])
        images, labels = images.to(first), labels.to(first)
        say(f"   {plan.balance} layers on {', '.join(map(str, devices))}, by {plan.schedule}")
        say(f"   {pipe.chunks} micro-batches, {1e3 * plan.step_time:.1f} ms a step predicted")

        say("\n2. The check: syncpipe.verify(pipe, input, target, loss_fn=)")
        report = syncpipe.verify(
            pipe, images[:BATCH_SIZE], labels[:BATCH_SIZE], loss_fn=F.cross_entropy,
            schedules=["gpipe", "1f1b"],
        )  # fmt: skip
        say(str(report).rsplit("\n\n", 1)[-1] if report.ok else str(report))  # the verdict

        say(f"\n3. The training: pipe.train_batch, {BATCH_SIZE} images in each mini-batch")
        train(pipe, digits, args.epochs)

        say(f"\n4. The gain: a step of {size} images, the median of some")
        measure(pipe, images, labels, all_threads)

        say("\n5. The timeline of a step: pipe.trace()")
        with pipe.trace() as trace:
            pipe.train_batch(images, labels, loss_fn=F.cross_entropy)
        timelines = {"measured": trace, "simulated": plan.timeline()}
        try:
            compare(timelines).savefig(PICTURE)
            say(f"   {PICTURE}: measured above simulated")
        except (ImportError, OSError) as error:
            say(f"   (no picture: {error})\n{trace.table()}")
        for name, timeline in timelines.items():
            say(f"   {name}: {timeline.summary}")
    say("Next: docs/tutorial.md for your own model, docs/schedules.md for the picture.")
    return 0 if report.ok else 1


def train(pipe: syncpipe.Pipe, digits: Digits, epochs: int) -> None:
    data = TensorDataset(digits.train_images, digits.train_labels)
    batches = DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=PEAK_LEARNING_RATE)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LEARNING_RATE, epochs * len(batches)
    )
    for epoch in range(1, epochs + 1):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = pipe.train_batch(images, labels, loss_fn=F.cross_entropy)
            optimizer.step()
            rates.step()
        output = pipe.eval_batch(digits.test_images)
        right = (output.argmax(1).cpu() == digits.test_labels.cpu()).float().mean()
        say(f"   epoch {epoch:2}: loss {loss.item():.3f}, test accuracy {right:.1%}")


def measure(pipe: syncpipe.Pipe, images: Tensor, labels: Tensor, all_threads: int) -> None:
    """Prints the times of steps of the plain model and of the pipe, measured in turns."""
    n, m, device = len(pipe.balance), pipe.chunks, pipe.devices[0]
    plain, on_cpu = resnet().to(device), device.type == "cpu"

    def alone() -> None:
        F.cross_entropy(plain(images), labels).backward()  # type: ignore[no-untyped-call]

    several, count = f"{n} device{'s' * (n > 1)}", n if on_cpu else all_threads
    way: Callable[[], object] = alone
    ways = [("plain model, 1 device", way, 1 if on_cpu else count, "the mini-batch")]
    for title, name in {"GPipe": "gpipe", "1F1B": "1f1b"}.items():
        way = partial(pipe.train_batch, images, labels, loss_fn=F.cross_entropy, schedule=name)
        held = f"{max(build(name, m, range(n)).in_flight)} of {m}"
        ways.append((f"{title}, {several}", way, count, held))
    if on_cpu:  # a plain model can use all cores of a CPU, but not several GPUs
        ways.append((f"plain model, {all_threads} threads", alone, all_threads, "the mini-batch"))
    times: list[list[float]] = [[] for _ in ways]
    end = time.perf_counter() + TIMED_SECONDS
    while len(times[-1]) < 4 or time.perf_counter() < end:
        for (_, step, number, _), taken in zip(ways, times, strict=True):
            pipe.zero_grad()
            with threads(number):
                start = time.perf_counter()
                step()
                for device in pipe.devices if not on_cpu else []:
                    torch.accelerator.synchronize(device)
                taken.append(time.perf_counter() - start)
    took = [median(taken[1:]) for taken in times]  # the first warms up
    say(f"   {'':26}{'time':>10}{'speed-up':>10}{'in memory at most':>20}")
    for (name, _, _, most), seconds in zip(ways, took, strict=True):
        say(f"   {name:26}{1e3 * seconds:>7.1f} ms{took[0] / seconds:>10.2f}{most:>20}")
    say(f"   {'ideal, n m / (m + n - 1)':26}{'':>10}{n * m / (m + n - 1):>10.2f}")
    if min(took[1:3]) >= took[0]:
        say(f"   Here the pipe does not win: load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of intra-op threads on the CPU, which the workers of a pipe share."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "for example 0,1 or cpu:0,cpu:1 (default: all accelerators, or two CPU workers)"
    parser.add_argument("--devices", metavar="D,D,...", help=words)
    words, epochs = "passes over the images (default: %(default)s)", whole_number(1, 10_000)
    parser.add_argument("--epochs", type=epochs, metavar="N", default=12, help=words)
