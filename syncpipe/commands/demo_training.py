"""The demo's training loop: what one would write for a model of one's own."""

import sys
import time

import torch
import torch.nn.functional as F

from syncpipe import Pipe
from syncpipe.commands.demo_data import BATCH_SIZE, Digits, batches

__all__ = ["train"]

PEAK_LEARNING_RATE = 5e-3


def train(pipe: Pipe, digits: Digits, epochs: int) -> None:
    """Trains, with a bar on a terminal, and elsewhere a line for each epoch."""
    from tqdm import tqdm

    steps = epochs * (len(digits.train_labels) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=PEAK_LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=PEAK_LEARNING_RATE, total_steps=steps
    )
    begin, right, watched = time.perf_counter(), 0.0, sys.stdout.isatty()
    # (With sizes of its own: some terminals say that they have no rows, and would get no bar.)
    options = {"file": sys.stdout, "disable": not watched, "ncols": 96, "nrows": 24}
    with tqdm(total=steps, unit="step", **options) as bar:
        for epoch in range(1, epochs + 1):
            for images, labels in batches(digits):
                optimizer.zero_grad()
                loss = pipe.train_batch(images.to(pipe.devices[0]), labels, loss_fn=F.cross_entropy)
                optimizer.step()
                scheduler.step()
                bar.update()
            right = _accuracy(pipe, digits)
            told = f"   epoch {epoch:2}: loss {loss.item():.3f}, test accuracy {right:.1%}"
            bar.set_description_str(told)
            if not watched:
                print(told, flush=True)
    seconds, count = time.perf_counter() - begin, len(digits.test_labels)
    print(f"   it reads {right:.1%} of {count} new images, after {seconds:.1f} s", flush=True)


def _accuracy(pipe: Pipe, digits: Digits) -> float:
    output = pipe.eval_batch(digits.test_images.to(pipe.devices[0]))
    right = output.argmax(1).cpu() == digits.test_labels
    return int(right.sum()) / len(right)
