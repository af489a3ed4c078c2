"""Every named schedule with every mode of ``checkpoint``, on workers and inline.

python -m tests.fuzz.modes --models 40
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import warnings
from contextlib import nullcontext

import torch

from syncpipe import Pipe, inline
from tests.support.models import CHANNELS, CHECKPOINT_MODES, LAYERS, LENGTH, SENDS, Spec
from tests.support.training import (
    RUNS,
    assert_same_step,
    orders_of,
    pipe_step,
    plain_step,
    schedule_of,
    weigh,
)

MODES = [*CHECKPOINT_MODES, ("always", "never", "except_last", "always")]
KINDS = [*LAYERS, "inplace", "fork", "join", *SENDS, "receive"]


def check(model: int, run: str, mode: object, by_hand: bool) -> None:
    """Two steps of a random model of at least four layers, each beside the plain loop."""
    chance = random.Random(model)
    spec = Spec(tuple(chance.choices(KINDS, k=chance.randint(4, 8))), model)
    size = len(spec.layers)
    edges = [0, *sorted(chance.sample(range(1, size), 3)), size]
    balance = [b - a for a, b in itertools.pairwise(edges)]
    options, devices = RUNS[run]
    chunks = chance.randint(1, 6)
    pipe = Pipe(spec.build(), balance, devices=devices, chunks=chunks, checkpoint=mode)
    x = torch.randn(chance.randint(1, 9), CHANNELS, LENGTH, requires_grad=True)
    plain = spec.build()
    schedule = schedule_of(pipe, len(x.chunk(chunks)), **options)
    for _ in range(2):
        expected = plain_step(
            plain, x, loss_fn=weigh, chunks=chunks, orders=orders_of(schedule), balance=balance
        )
        with inline() if by_hand else nullcontext():
            actual = pipe_step(pipe, x, loss_fn=weigh, **options)
        assert_same_step(actual, expected, exact=not schedule.splits)
        pipe.zero_grad()
        plain.zero_grad()


def main() -> int:
    """Runs all; the number of those that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.modes", description=__doc__)
    parser.add_argument("--models", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of a loss that weighs each sample, which is no mean
    done = failed = 0
    for case in itertools.product(range(options.models), RUNS, MODES, (False, True)):
        torch.manual_seed(0)
        done += 1
        try:
            check(*case)
        except Exception as error:
            failed += 1
            print(f"{case}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{done} runs of {len(RUNS)} schedules with {len(MODES)} modes, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main()))
