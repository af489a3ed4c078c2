"""Teaches a small ResNet to read handwritten digits through a pipe, on the devices at hand.

The file is an example as well, of what one does with a model of one's own: plan how to run it, make
a pipe of it, verify that, train it, and look at a step.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncpipe
from syncpipe.commands.arguments import file_to_write, whole_number
from syncpipe.runtime.streams import accelerators
from syncpipe.schedules import build
from syncpipe.timeline import Timeline, save_comparison

__all__ = ["BATCH_SIZE", "Digits", "add_arguments", "batches", "load_digits", "resnet", "run"]

#: Images in a mini-batch of the training, and of the step that is planned and timed: with few a CPU
#: worker has little to do for each micro-batch, and an accelerator nothing.
BATCH_SIZE, CPU_BATCH, ACCELERATOR_BATCH = 128, 256, 16_384
PLAN_SECONDS, TIMED_SECONDS = 2.0, 3.0
PEAK_LEARNING_RATE = 5e-3


# -- a model and data, as anybody has them ---------------------------------------------------------


class Block(nn.Module):
    """A residual block, of a "Deep Residual Network" (https://arxiv.org/abs/1512.03385)."""

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), norm(after))
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1), norm(after))
        self.shortcut = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet(norm: Callable[[int], nn.Module] | None = None) -> nn.Sequential:
    """A ResNet of 7 layers, for images of shape ``[N, 1, 8, 8]``.

    Its own normalization is the same for a mini-batch and for its micro-batches, unlike BatchNorm.
    """
    norm = norm or partial(nn.GroupNorm, 8)
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
    """The 1,797 images that come with scikit-learn, a fifth of them to test with.

    Raises:
        ImportError: without scikit-learn.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    data = datasets.load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target, dtype=torch.int64)
    # The same split for every seed, so that accuracies can be compared.
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=data.target, random_state=0
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def batches(digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
    """The mini-batches of an epoch; the few images that fill none sit it out."""
    order = torch.randperm(len(digits.train_labels))
    for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
        which = order[start : start + BATCH_SIZE]
        yield digits.train_images[which], digits.train_labels[which]


# -- plan, verify, train, look ---------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Runs the demo.

    Returns:
        0, or 1 where scikit-learn is missing or the pipe is not what the plain model is, or 2 where
        devices are not there.
    """
    try:
        digits = load_digits()
    except ImportError as error:
        message = f'demo: {error}; it needs scikit-learn: pip install "syncpipe[demo]"'
        print(message, file=sys.stderr)
        return 1
    torch.manual_seed(args.seed)
    model, all_threads = resnet(), torch.get_num_threads()
    devices = (args.devices or default_devices())[: len(model)]
    n, on_cpu = len(devices), devices[0].type == "cpu"
    say(f"syncpipe {syncpipe.__version__}: a small ResNet learns to read handwritten digits")
    if on_cpu and not args.devices:
        say(f"(on CPU workers of one thread each: {len(accelerators())} accelerators here)")
    # A pipe's CPU workers share out the threads of their caller: that makes one for each.
    with threads(n if on_cpu else all_threads):
        size = CPU_BATCH if on_cpu else ACCELERATOR_BATCH
        which = torch.arange(size) % len(digits.train_labels)
        images, labels = digits.train_images[which], digits.train_labels[which]

        say("\n1. The plan: syncpipe.plan(model, sample, devices=, batch_size=)")
        try:
            plan = syncpipe.plan(
                model, images, devices=devices, batch_size=size, stages=n,
                chunks=args.chunks or [8, 16], timeout=PLAN_SECONDS, progress=False,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            print(f"demo: {error}", file=sys.stderr)
            return 2
        pipe = syncpipe.Pipe(model, **plan.options(), devices=devices)
        digits = Digits(*[tensor.to(devices[0]) for tensor in digits])  # a pipe's input is there
        images, labels = images.to(devices[0]), labels.to(devices[0])
        say(f"   {plan.balance} layers on {', '.join(map(str, devices))}, by {plan.schedule}")
        say(f"   {pipe.chunks} micro-batches of {size // pipe.chunks} images, "
            f"{shown(plan.step_time)} a step predicted")  # fmt: skip

        say("\n2. The check: syncpipe.verify(pipe, input, target, loss_fn=)")
        report = syncpipe.verify(
            pipe, images[:BATCH_SIZE], labels[:BATCH_SIZE], loss_fn=F.cross_entropy,
            schedules=["gpipe", "1f1b"],
        )  # fmt: skip
        verdict = str(report).rsplit("\n\n", 1)[-1].replace("\n", " ")  # its last paragraph
        say(f"   {verdict}" if report.ok else str(report))

        say(f"\n3. The training: pipe.train_batch, {BATCH_SIZE} images in each mini-batch")
        train(pipe, digits, args.epochs)

        say(f"\n4. The gain: a step of {size} images, the median of some")
        speed_up = measure(pipe, images, labels, all_threads)

        say("\n5. The timeline of a step: pipe.trace()")
        with pipe.trace() as trace:
            pipe.train_batch(images, labels, loss_fn=F.cross_entropy)
        draw(trace, plan.timeline(), args.picture)
    if speed_up <= 1:
        say(f"Here the pipe does not win: {n} device{'s' * (n > 1)}, {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f}; handing micro-batches over takes time, too.")  # fmt: skip
    say("Next: docs/guide.md wraps your own model, docs/schedules.md reads the picture.")
    return 0 if report.ok else 1


def train(pipe: syncpipe.Pipe, digits: Digits, epochs: int) -> None:
    """Trains: what one would write for a model of one's own."""
    steps = epochs * (len(digits.train_labels) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=PEAK_LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, steps)
    for epoch in range(1, epochs + 1):
        for images, labels in batches(digits):
            optimizer.zero_grad()
            loss = pipe.train_batch(images, labels, loss_fn=F.cross_entropy)
            optimizer.step()
            scheduler.step()
        output = pipe.eval_batch(digits.test_images)
        right = (output.argmax(1).cpu() == digits.test_labels.cpu()).float().mean()
        say(f"   epoch {epoch:2}: loss {loss.item():.3f}, test accuracy {right:.1%}")


def measure(pipe: syncpipe.Pipe, images: Tensor, labels: Tensor, all_threads: int) -> float:
    """Times steps in turns; returns how many times as fast as the plain model the pipe is."""
    n, m, device = len(pipe.balance), pipe.chunks, pipe.devices[0]
    plain, on_cpu = resnet().to(device), device.type == "cpu"

    def alone() -> None:
        F.cross_entropy(plain(images), labels).backward()  # type: ignore[no-untyped-call]

    def piped(schedule: str) -> Callable[[], object]:
        return lambda: pipe.train_batch(images, labels, loss_fn=F.cross_entropy, schedule=schedule)

    several, count = f"{n} device{'s' * (n > 1)}", n if on_cpu else all_threads
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "plain model, 1 device": (alone, 1 if on_cpu else count),
        f"GPipe, {several}": (piped("gpipe"), count),
        f"1F1B, {several}": (piped("1f1b"), count),
    }
    if on_cpu:
        ways[f"plain model, {all_threads} threads"] = (alone, all_threads)
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + TIMED_SECONDS
    while len(times["plain model, 1 device"]) < 4 or time.perf_counter() < end:
        for name, (step, number) in ways.items():
            pipe.zero_grad()
            with threads(number):
                start = time.perf_counter()
                step()
                for device in pipe.devices if not on_cpu else []:
                    torch.accelerator.synchronize(device)
                times[name].append(time.perf_counter() - start)
    took = {name: median(taken[1:]) for name, taken in times.items()}  # the first warms up
    base = took["plain model, 1 device"]
    say(f"   {'':26}{'time':>10}{'speed-up':>10}{'in memory at most':>20}")
    for name, seconds in took.items():
        kept = "the mini-batch"
        if "plain" not in name:
            kept = f"{max(build(name.split(',')[0].lower(), m, range(n)).in_flight)} of {m}"
        say(f"   {name:26}{shown(seconds):>10}{base / seconds:>10.2f}{kept:>20}")
    say(f"   {'ideal, n m / (m + n - 1)':26}{'':>10}{n * m / (m + n - 1):>10.2f}")
    if on_cpu:
        say("   (One model can have all cores of a CPU to itself, but not several GPUs.)")
    return base / min(took[name] for name in took if "plain" not in name)


def draw(trace: Timeline, planned: Timeline, path: Path) -> None:
    """Draws a measured step above the planned one."""
    try:
        save_comparison(path, {"measured": trace, "simulated, as planned": planned})
        say(f"   {path}: measured above simulated")
    except (ImportError, OSError) as error:
        say(f"   (no picture: {error})")
        print(trace.table())
    for name, timeline in {"measured": trace, "simulated": planned}.items():
        say(f"   {name}: {shown(timeline.makespan)}, bubble {timeline.bubble:.1%}")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many intra-op threads on the CPU; the workers of a pipe share them out."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shown(seconds: float) -> str:
    """A time, in words."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def say(text: str) -> None:
    """Prints, in lines of at most 80 columns."""
    indent = " " * (len(text) - len(text.lstrip(" ")))
    print(text if len(text) <= 80 else fill(text, 80, subsequent_indent=indent), flush=True)


# -- its options -----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to its parser."""
    add = parser.add_argument
    words = "such as 0,1 or cpu:0,cpu:1 (default: all accelerators, or two CPU workers)"
    add("--devices", type=_devices, metavar="D,D,...", help=words)
    words = "micro-batches (default: as planned)"
    add("--chunks", type=whole_number(1, BATCH_SIZE), metavar="M", help=words)
    words = "passes over the images (default: %(default)s)"
    add("--epochs", type=whole_number(1, 10_000), metavar="N", default=12, help=words)
    words = "of weights and order (default: %(default)s)"
    add("--seed", type=whole_number(0, 2**32 - 1), metavar="N", default=0, help=words)
    words, where = ".png or .svg of a step (default: %(default)s)", Path("syncpipe-demo.png")
    add("--picture", type=file_to_write(".png", ".svg"), metavar="FILE", default=where, help=words)


def default_devices() -> list[torch.device]:
    """All accelerators, or two CPU workers: one device has nobody to share the work with."""
    found = accelerators()
    return found if len(found) > 1 else [torch.device("cpu", 0), torch.device("cpu", 1)]


def _devices(text: str) -> list[torch.device]:
    """Devices of this machine, as a pipe takes them."""
    names = [name.strip() for name in text.split(",")]
    try:
        layers = nn.Sequential(*[nn.Identity() for _ in names])
        given = [int(name) if name.isdecimal() else name for name in names]
        found = list(syncpipe.Pipe(layers, "uniform", devices=given).devices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len({*found}) < len(names) or len({device.type for device in found}) > 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the demo puts one stage on each device, and plans for devices of one kind; "
            "name each of them once"
        )
    return found
