"""Teaches a small ResNet to read handwritten digits through a pipe, on the devices at hand.

The file is an example as well, of what one does with a model of one's own: plan how to run it, make
a pipe of it, verify that, train it, and look at a step.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncpipe
from syncpipe.runtime.streams import accelerators
from syncpipe.schedules import build
from syncpipe.timeline import Timeline, save_comparison

__all__ = [
    "BATCH_SIZE", "Digits", "add_arguments", "batches", "load_digits", "resnet", "run", "threads",
]  # fmt: skip

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


def group_norm(channels: int) -> nn.Module:
    """Unlike BatchNorm it is the same for a mini-batch and for its micro-batches."""
    return nn.GroupNorm(8, channels)


def resnet(norm: Callable[[int], nn.Module] = group_norm) -> nn.Sequential:
    """A ResNet of 7 layers, for images of shape ``[N, 1, 8, 8]``."""
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
        print(
            f'demo: {error}; it needs scikit-learn: pip install "syncpipe[demo]"', file=sys.stderr
        )
        return 1
    torch.manual_seed(args.seed)
    model, all_threads = resnet(), torch.get_num_threads()
    devices = (args.devices or default_devices())[: len(model)]
    on_cpu, n = devices[0].type == "cpu", len(devices)
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
        m = pipe.chunks
        say(f"   {plan.balance} layers on {', '.join(map(str, devices))}, by {plan.schedule}")
        say(f"   {m} micro-batches of {size // m} images, {shown(plan.step_time)} a step predicted")

        say("\n2. The check: syncpipe.verify(pipe, input, target, loss_fn=)")
        report = syncpipe.verify(
            pipe, images[:BATCH_SIZE], labels[:BATCH_SIZE], loss_fn=F.cross_entropy,
            schedules=["gpipe", "1f1b"],
        )  # fmt: skip
        verdict = str(report).rsplit("\n\n", 1)[-1].replace("\n", " ")  # its last paragraph
        say(f"   {verdict}" if report.ok else str(report))

        say(f"\n3. The training: pipe.train_batch, {BATCH_SIZE} images in each mini-batch")
        train(pipe, digits, args.epochs)
        speed_up = measure(pipe, images, labels, all_threads)
        with pipe.trace() as trace:
            pipe.train_batch(images, labels, loss_fn=F.cross_entropy)
    draw(trace, plan.timeline(), args.picture)
    if speed_up <= 1:
        say(
            f"Here the pipe does not win: {n} device{'s' * (n > 1)}, {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f}; handing micro-batches over takes time, too."
        )
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
    devices, n, m = pipe.devices, len(pipe.balance), pipe.chunks
    on_cpu, plain = devices[0].type == "cpu", resnet().to(devices[0])
    near, targets = images.to(devices[0]), labels.to(devices[0])

    def alone() -> None:
        F.cross_entropy(plain(near), targets).backward()  # type: ignore[no-untyped-call]

    def piped(schedule: str) -> None:
        pipe.zero_grad()
        pipe.train_batch(images, labels, loss_fn=F.cross_entropy, schedule=schedule)

    count, several = n if on_cpu else all_threads, f"{n} device{'s' * (n > 1)}"
    ways: dict[str, tuple[int, Callable[[], None]]] = {
        "plain model, 1 device": (1 if on_cpu else count, alone),
        f"GPipe, {several}": (count, lambda: piped("gpipe")),
        f"1F1B, {several}": (count, lambda: piped("1f1b")),
    }
    if on_cpu:
        ways[f"plain model, {all_threads} threads"] = (all_threads, alone)
    times: dict[str, list[float]] = {name: [] for name in ways}
    end, rounds = time.perf_counter() + TIMED_SECONDS, 0
    while rounds < 4 or time.perf_counter() < end:
        for name, (number, step) in ways.items():
            with threads(number):
                start = time.perf_counter()
                step()
                for device in devices if not on_cpu else []:
                    torch.accelerator.synchronize(device)
                times[name] += [time.perf_counter() - start] * (rounds > 0)  # one warms up
        rounds += 1
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    base, gpipe, one, *_ = medians.values()
    say(f"\n4. The gain: a step of {len(labels)} images, median of {rounds - 1} rounds")
    say(f"   {'':26}{'time':>10}{'speed-up':>10}{'in memory at most':>20}")
    held = [m, *(max(build(name, m, range(n)).in_flight) for name in ("gpipe", "1f1b")), m]
    for (name, taken), most in zip(medians.items(), held, strict=False):
        kept = "the mini-batch" if "plain" in name else f"{most} of {m}"
        say(f"   {name:26}{shown(taken):>10}{base / taken:>10.2f}{kept:>20}")
    say(f"   {'ideal, n m / (m + n - 1)':26}{'':>10}{n * m / (m + n - 1):>10.2f}")
    if on_cpu:
        say("   (One model can have all cores of a CPU to itself, but not several GPUs.)")
    return base / min(gpipe, one)


def draw(trace: Timeline, planned: Timeline, path: Path) -> None:
    """Draws a measured step above the planned one."""
    say("\n5. The timeline of a step: pipe.trace()")
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
    """Prints, in lines as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    indent = " " * (len(text) - len(text.lstrip(" ")))
    lines = text if len(text) <= width else fill(text, width, subsequent_indent=indent)
    print(lines, flush=True)


# -- its options -----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to its parser."""
    where = Path("syncpipe-demo.png")
    options: list[tuple[str, Any, str, Any, str]] = [
        ("--devices", _devices, "D,D,...", None,
         "such as 0,1 or cpu:0,cpu:1 (default: all accelerators, or two CPU workers)"),
        ("--chunks", _integer(1, BATCH_SIZE), "M", None, "micro-batches (default: as planned)"),
        ("--epochs", _integer(1, 10_000), "N", 12, "passes over the images (default: %(default)s)"),
        ("--seed", _integer(0, 2**32 - 1), "N", 0, "of weights and order (default: %(default)s)"),
        ("--picture", _picture, "FILE", where, ".png or .svg of a step (default: %(default)s)"),
    ]  # fmt: skip
    for name, kind, metavar, default, words in options:
        parser.add_argument(name, type=kind, metavar=metavar, default=default, help=words)


def default_devices() -> list[torch.device]:
    """All accelerators, or two CPU workers: one device has nobody to share the work with."""
    found = accelerators()
    return found if len(found) > 1 else [torch.device("cpu", 0), torch.device("cpu", 1)]


def _devices(text: str) -> list[torch.device]:
    """Devices of this machine, as a pipe takes them."""
    names = [name.strip() for name in text.split(",")]
    try:
        layout = syncpipe.Pipe(
            nn.Sequential(*[nn.Identity() for _ in names]),
            [1] * len(names),
            devices=[int(name) if name.isdecimal() else name for name in names],
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    for device in layout.devices:
        if layout.devices.count(device) > 1 or device.type != layout.devices[0].type:
            raise argparse.ArgumentTypeError(
                f"{text!r}: the demo puts one stage on each device, and plans for devices of one "
                "kind; name each of them once"
            )
        if (device.index or 0) < 0:  # torch.device wraps around in silence
            raise argparse.ArgumentTypeError(f"{text!r}: CPU workers are cpu:0 to cpu:127")
    return list(layout.devices)


def _integer(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to {most}"
            )
        return int(text)

    return read


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png or .svg")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return path
