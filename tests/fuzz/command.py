"""Cases from the command line.

    python -m tests.fuzz --models 5000 --seed 1        # as many as there is time for
    python -m tests.fuzz --seed 1 --first 812 --models 1       # one of them once more
    python -m tests.fuzz lives --models 5000 --seed 1  # lives

What fails is printed as the arguments that run it once more; a life as a short program, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch


def by_hand(
    name: str,
    draw: Callable[[random.Random], Any],
    check: Callable[[Any], None],
    arguments: Sequence[str] | None = None,
    shrink: Callable[[Any], Any] = lambda case: case,
) -> int:
    """Runs cases from the command line ``python -m name``; the number of those that failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first model")
    parser.add_argument("--stop", action="store_true", help="stop at the first that fails")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed, begun = 0, time.monotonic()
    for k in range(options.first, options.first + options.models):
        case = draw(random.Random(f"{options.seed}/{k}"))
        faulthandler.dump_traceback_later(180, exit=True)
        try:
            check(case)
        except Exception as error:
            failed += 1
            print(f"--seed {options.seed} --first {k} --models 1\n{shrink(case)}", flush=True)
            if options.models == 1:
                traceback.print_exc()
            else:
                print(f"  {type(error).__name__}: {str(error)[:300]}", flush=True)
            if options.stop:
                break
        done = k - options.first + 1
        if done % 50 == 0 or done == options.models:
            seconds = time.monotonic() - begun
            print(f"{done} models, {failed} failed, {seconds:.0f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return failed
