"""How long until the demo's model reads handwritten digits, with and without a flush."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import Part, Spread, number
from benchmarks.group import Options
from syncpipe import Pipe
from syncpipe.balance import balance_by_time
from syncpipe.commands.demo_data import BATCH_SIZE, Digits, batches, load_digits
from syncpipe.commands.demo_model import resnet

GOAL = 0.97
#: So many epochs of so many mini-batches.
SIZE, QUICK_SIZE = (10, 11), (1, 2)
CHUNKS = 4
MADE = partial(torch.optim.AdamW, lr=2e-3)

Batches = Iterable[tuple[Tensor, Tensor]]
#: An epoch of a pipe: one mini-batch after another.
Epoch = Callable[[Pipe, Batches, dict[str, Any]], None]


def _with_a_flush(pipe: Pipe, data: Batches, state: dict[str, Any], **options: Any) -> None:
    optimizer = state.setdefault("optimizer", MADE(pipe.parameters()))
    for images, labels in data:
        optimizer.zero_grad()
        pipe.train_batch(images, labels, loss_fn=F.cross_entropy, **options)
        optimizer.step()


def _without(pipe: Pipe, data: Batches, state: dict[str, Any], **options: Any) -> None:
    """Each epoch drains once, so that it can be tested after it."""
    optimizer = state.get("optimizer", MADE)
    done = pipe.train_stream(data, optimizer=optimizer, loss_fn=F.cross_entropy, **options)
    state["optimizer"] = done.optimizers


#: For each way the number of stages and of micro-batches, and an epoch of it.
WAYS: dict[str, tuple[int, int, Epoch]] = {
    "one device": (1, 1, partial(_with_a_flush, schedule="1f1b")),
    "1F1B, 4 micro-batches": (2, CHUNKS, partial(_with_a_flush, schedule="1f1b")),
    "stream, stashing": (2, 1, partial(_without, versions="stashing")),
    "stream, vertical_sync": (2, 1, partial(_without, versions="vertical_sync")),
    "stream, 2bw, 4 micro-batches": (2, CHUNKS, partial(_without, versions="2bw")),
}


def run(options: Options) -> Part:
    """Measures it."""
    digits, repeats = load_digits(), options.rounds(3)
    epochs, steps = QUICK_SIZE if options.quick else SIZE
    part = Part(
        "Time to accuracy on handwritten digits",
        f"The demo's ResNet on two CPU workers, mini-batches of {BATCH_SIZE}, {epochs} epochs by "
        f"AdamW with a learning rate of 0.002; {repeats} seeds, in each of them all ways, in "
        "turn. Tests of the model are not in the times.",
        {
            "ms per step": "an epoch over its mini-batches; of a stream with its fill and drain.",
            "over 1F1B": "that over 1F1B's with the same seed.",
            "epochs": f"until {GOAL:.0%} of the test images are read rightly, for each seed.",
            "seconds": "until then.",
            "at the end": f"the images that are read rightly after {epochs} epochs.",
        },
    )
    names, found = list(WAYS), {name: [] for name in WAYS}  # type: dict[str, list[_Run]]
    with tqdm(total=repeats * len(names), desc="accuracy", disable=None) as bar:
        for seed in range(repeats):
            for name in names[seed % len(names) :] + names[: seed % len(names)]:
                found[name].append(_trained(WAYS[name], digits, seed, epochs, steps))
                bar.update()
    base = [each.step for each in found[names[1]]]
    for name, runs in found.items():
        reached = [each.reached for each in runs]
        part.rows.append(
            {
                "way": name,
                "stages": WAYS[name][0],
                "ms per step": Spread.of([1e3 * each.step for each in runs]),
                "over 1F1B": Spread.ratio([each.step for each in runs], base),
                "epochs": ", ".join(str(len(each.accuracies)) if r is None else str(r[0])
                                    for each, r in zip(runs, reached, strict=True)),
                "seconds": ", ".join("never" if r is None else number(r[1]) for r in reached),
                "at the end": Spread.of([each.accuracies[-1] for each in runs]),
            }
        )  # fmt: skip
    synchronous = statistics.median(each.accuracies[-1] for each in found[names[1]])
    for name in names[2:]:
        ours = statistics.median(each.accuracies[-1] for each in found[name])
        part.aim(
            f"{name}: the accuracy of 1F1B, less at most half a percent",
            ours >= synchronous - 0.005,
            f"{ours:.1%}; 1F1B {synchronous:.1%}",
        )
    return part


class _Run:
    """One way with one seed."""

    def __init__(self) -> None:
        self.accuracies: list[float] = []
        self.seconds = 0.0
        self.steps = 0
        self.reached: tuple[int, float] | None = None

    @property
    def step(self) -> float:
        return self.seconds / self.steps

    def epoch(self, seconds: float, steps: int, accuracy: float) -> None:
        self.seconds += seconds
        self.steps += steps
        self.accuracies.append(accuracy)
        if self.reached is None and accuracy >= GOAL:
            self.reached = len(self.accuracies), self.seconds


def _trained(
    way: tuple[int, int, Epoch], digits: Digits, seed: int, epochs: int, steps: int
) -> _Run:
    stages, chunks, epoch = way
    torch.manual_seed(seed)
    model, found = resnet(), _Run()
    state: dict[str, Any] = {}
    balance = [len(model)]
    if stages > 1:
        balance = balance_by_time(stages, model, digits.many(BATCH_SIZE // chunks)[0])
    devices = [f"cpu:{j}" for j in range(stages)]
    pipe = Pipe(model, balance, devices=devices, chunks=chunks, checkpoint="never")
    torch.manual_seed(seed)
    for _ in range(epochs):
        begin = time.perf_counter()
        epoch(pipe, islice(batches(digits), steps), state)
        seconds = time.perf_counter() - begin
        right = pipe.eval_batch(digits.test_images).argmax(1) == digits.test_labels
        found.epoch(seconds, steps, float(right.double().mean()))
    return found
