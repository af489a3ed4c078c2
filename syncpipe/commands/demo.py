"""``python -m syncpipe demo``: train a small ResNeXt on handwritten digits through a pipe.

The data are real and come with scikit-learn. The first step's gradients are compared with those of
the plain model, and at the end a step is timed beside the plain model's.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.commands.demo_model import (
    MOST_PARTITIONS,
    crossing_skips,
    even_balance,
    layer_times,
    resnext,
    synchronize,
)
from syncpipe.commands.demo_options import BATCH_SIZE, default_devices

PEAK_LEARNING_RATE = 3e-3
TIMED_ROUNDS = 12
# Relative to the largest gradient: an accelerator may sum in another order on another device.
TOLERANCE = 1e-3
MISSING = 'demo: {}; it needs scikit-learn and tqdm: pip install "syncpipe[demo]"'

# From images to the output of a model, on the device where it ends.
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Digits:
    """Images of shape ``[N, 1, 8, 8]`` with values from 0 to 1, labels of shape ``[N]``."""

    train_images: Tensor
    test_images: Tensor
    train_labels: Tensor
    test_labels: Tensor


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0, or 1 where an extra is missing or the gradients are not the plain model's.
    """
    try:
        import tqdm  # noqa: F401  # asked for now, needed later

        digits = _load_digits()
    except ImportError as error:
        print(MISSING.format(error), file=sys.stderr)
        return 1

    torch.manual_seed(args.seed)
    pipe, plain = _build(args, digits.train_images[:BATCH_SIZE])
    size, per_epoch = len(digits.train_labels), len(digits.train_labels) // BATCH_SIZE
    order = [b for _ in range(args.epochs) for b in _shuffled(size, per_epoch)]
    equal = _train(pipe, plain, digits, order, per_epoch)

    accuracy = _accuracy(pipe, digits.test_images, digits.test_labels)
    print(f"Test accuracy: {accuracy:.1%} of {len(digits.test_labels)} images", flush=True)
    _report_times(pipe, plain, digits)
    return 0 if equal else 1


def _load_digits() -> Digits:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target, dtype=torch.int64)
    # The same split for every seed, so that accuracies can be compared.
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=data.target, random_state=0
    )
    return Digits(images[train], images[test], labels[train], labels[test])


def _build(args: argparse.Namespace, sample: Tensor) -> tuple[Pipe, nn.Sequential]:
    """The pipe, and a copy of its model to compare with, on the pipe's first device."""
    given: list[torch.device] = args.devices or default_devices()
    devices = given[:MOST_PARTITIONS]
    model = resnext()
    plain = copy.deepcopy(model).to(devices[0])
    micro_batch = sample.chunk(args.chunks)[0].to(devices[0])
    with _one_thread():
        balance = even_balance(layer_times(plain, micro_batch), len(devices))
    pipe = Pipe(model, balance, devices=devices, chunks=args.chunks, checkpoint=args.checkpoint)

    parameters = sum(parameter.numel() for parameter in plain.parameters())
    print(f"Model:      ResNeXt, {len(plain)} layers, {parameters:,} parameters")
    print("Data:       scikit-learn's load_digits: real handwriting, 8x8 pixels")
    print(f"Devices:    {', '.join(map(str, devices))}")
    if len(given) > len(devices):
        print(f"            (the first {len(devices)} of {len(given)}: one per residual block)")
    print(f"Balance:    {balance} layers per partition, from the time that each layer takes")
    print(
        f"Skips:      {crossing_skips(balance)} of {MOST_PARTITIONS} residual connections cross "
        "from one partition to another"
    )
    print(f"Chunks:     {args.chunks} micro-batches per mini-batch of {BATCH_SIZE}")
    print(f"Checkpoint: {args.checkpoint}", flush=True)
    return pipe, plain


def _train(
    pipe: Pipe, plain: nn.Sequential, digits: Digits, order: list[Tensor], per_epoch: int
) -> bool:
    """Train on the batches in ``order``; True if the first gradients are the plain model's."""
    from tqdm import tqdm

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=PEAK_LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=PEAK_LEARNING_RATE, total_steps=len(order)
    )
    equal, right, summary = False, 0, ""
    bar = tqdm(order, unit="step", disable=None)  # on a terminal only
    for k, batch in enumerate(bar):
        images, labels = digits.train_images[batch], digits.train_labels[batch]
        optimizer.zero_grad()
        with _one_thread() if k == 0 else nullcontext():
            loss, output = _backward(partial(_by_pipe, pipe), images, labels)
            if k == 0:
                _backward(partial(_by_micro_batch, plain, pipe.chunks), images, labels)
                equal, verdict = _compare_gradients(pipe, plain)
                bar.write(f"First step: {verdict}")
        optimizer.step()
        scheduler.step()

        epoch, step = divmod(k, per_epoch)
        right = _count_right(output, labels) + (right if step else 0)
        summary = f"loss {loss.item():.3f}, accuracy {right / (step + 1) / BATCH_SIZE:.1%}"
        bar.set_description_str(f"epoch {epoch + 1}", refresh=False)
        bar.set_postfix_str(summary)
    print(f"Training:   {summary} in the last epoch")
    return equal


def _shuffled(size: int, batches: int) -> Iterator[Tensor]:
    """Indices of one epoch's mini-batches; the few images that fill no mini-batch sit it out."""
    indices = torch.randperm(size)
    for k in range(batches):
        yield indices[k * BATCH_SIZE : (k + 1) * BATCH_SIZE]


def _by_pipe(pipe: Pipe, images: Tensor) -> Tensor:
    output: Tensor = pipe(images.to(pipe.devices[0]))
    return output


def _by_micro_batch(model: nn.Sequential, chunks: int, images: Tensor) -> Tensor:
    """What a pipe has to compute: the plain model, fed the micro-batches one after another."""
    return torch.cat([_at_once(model, micro_batch) for micro_batch in images.chunk(chunks)])


def _at_once(model: nn.Sequential, images: Tensor) -> Tensor:
    output: Tensor = model(images.to(next(model.parameters()).device))
    return output


def _backward(forward: Forward, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward; returns the loss and the output."""
    output = forward(images)
    loss = F.cross_entropy(output, labels.to(output.device))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), output.detach()


def _compare_gradients(pipe: Pipe, plain: nn.Sequential) -> tuple[bool, str]:
    """Whether both hold the same gradients, and that in words.

    On the CPU the same means bitwise equal, elsewhere within ``TOLERANCE``.
    """
    pairs = list(zip(pipe.parameters(), plain.parameters(), strict=True))
    ours = [p.grad.cpu() for p, _ in pairs if p.grad is not None]
    theirs = [q.grad.cpu() for _, q in pairs if q.grad is not None]
    if len(ours) < len(pairs) or len(theirs) < len(pairs):
        return False, "WRONG, a parameter of the pipe or of the plain model got no gradient"
    if all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        return True, f"all {len(pairs)} gradients are bitwise equal to the plain model's"

    difference = torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]).max()
    largest = torch.stack([b.abs().max() for b in theirs]).max()
    on_cpu = all(device.type == "cpu" for device in pipe.devices)
    close = not on_cpu and bool(difference <= TOLERANCE * largest)  # False for nan
    return close, (
        f"{'' if close else 'WRONG, '}the {len(pairs)} gradients differ from the plain model's "
        f"by up to {difference:.1e} (the largest gradient is {largest:.1e})"
    )


def _count_right(output: Tensor, labels: Tensor) -> int:
    return int((output.argmax(1).cpu() == labels).sum())


@torch.no_grad()
def _accuracy(pipe: Pipe, images: Tensor, labels: Tensor) -> float:
    pipe.eval()
    right = _count_right(_by_pipe(pipe, images), labels)
    pipe.train()
    return right / len(labels)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One intra-op thread on the CPU: how many share a sum decides its last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _report_times(pipe: Pipe, plain: nn.Sequential, digits: Digits) -> None:
    images, labels = digits.train_images[:BATCH_SIZE], digits.train_labels[:BATCH_SIZE]
    steps = {
        "pipe": _step(pipe, partial(_by_pipe, pipe), images, labels),
        "plain, same micro-batches": _step(
            plain, partial(_by_micro_batch, plain, pipe.chunks), images, labels
        ),
        "plain, whole mini-batch": _step(plain, partial(_at_once, plain), images, labels),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TIMED_ROUNDS):
        for name, step in steps.items():  # in turns, so that a busy machine slows all alike
            for device in {*pipe.devices}:
                synchronize(device)
            start = time.perf_counter()
            step()
            for device in {*pipe.devices}:
                synchronize(device)
            times[name].append(time.perf_counter() - start)

    ours = statistics.median(times["pipe"])
    print(f"Time per step of {BATCH_SIZE} images, median of {TIMED_ROUNDS}:")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"  {name:26} {median * 1e3:7.1f} ms  = {median / ours:.2f} x the pipe's")
    print("A model this small shows what a pipe costs, not what it gains.")


def _step(model: nn.Module, forward: Forward, images: Tensor, labels: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        _backward(forward, images, labels)
        optimizer.step()

    return step
