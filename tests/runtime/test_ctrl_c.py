"""Ctrl-C: the settings of the calling thread are what they were, and no worker is left behind."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe, inline
from syncpipe.runtime import engine, worker
from tests.conftest import our_threads
from tests.support.interrupts import interrupted, modes_on
from tests.support.running import Do, another_thread, pipe_of

RUNS: dict[str, Callable[[Pipe, Tensor], Any]] = {
    "forward": lambda pipe, x: pipe(x).sum().backward(),
    "train_batch": lambda pipe, x: pipe.train_batch(
        x, loss_fn=torch.mean, schedule="zb_h1", verify=False
    ),
    "eval_batch": lambda pipe, x: pipe.eval_batch(x),
}


def settings() -> list[Any]:
    return [modes_on(), torch.is_grad_enabled(), sys.getprofile()]


# A destructor, or the callback of a weak reference, cannot pass an exception on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("run", RUNS)
def test_settings_are_what_they_were(run: str) -> None:
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1)) for _ in range(2)]
    checkpoint = "never" if run == "train_batch" else "always"
    pipe = Pipe(
        nn.Sequential(*layers), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint
    )
    x = torch.randn(4, 5)

    stopped = 0
    call = partial(RUNS[run], pipe, x)
    with inline(), another_thread():  # so that layers draw in a mode
        call()
        before, (calls, _) = settings(), interrupted(0, call)
        places = range(1, calls, 3)  # each of PyTorch's ways out takes some functions
        for at in places:
            stopped += interrupted(at, call)[1]
            assert settings() == before, at
            call()
    assert stopped > 0.9 * len(places)


class _Lines:
    """Ctrl-C at the n-th line of some files that the main thread comes to."""

    FILES = (engine.__file__, worker.__file__, threading.__file__)

    def __init__(self, at: int) -> None:
        self.seen, self.at, self.begun = 0, at, False

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        self.begun = self.begun or code is engine.Engine.run.__code__
        if code.co_filename not in self.FILES or not self.begun:
            return None
        if code.co_name in ("__init__", "start"):  # Python's own threads and locks stay half made
            return None
        text = linecache.getline(code.co_filename, frame.f_lineno).split()
        # Python looks for no signals between the body of a `with` in C, or a `try`, and its end.
        if event == "line" and text[0] not in ("with", "try:"):
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def test_no_worker_is_left_behind_wherever_it_comes() -> None:
    inside, entered = [], []

    def layer(x: Tensor) -> None:
        inside.append(None)
        time.sleep(0.002)  # is there when Ctrl-C comes
        entered.append(None)
        inside.pop()

    layers = nn.Sequential(Do(layer), nn.Linear(3, 3), Do(layer))
    options: Any = {"balance": [1, 2], "chunks": 2, "checkpoint": "never"}
    pipe = pipe_of(layers, **options)
    x = torch.randn(4, 3)

    def call() -> None:
        pipe.train_batch(x, loss_fn=torch.mean)

    def run(at: int) -> int:
        lines = _Lines(at)
        gc.disable()  # a finalizer loses what is raised in it
        sys.settrace(lines)
        try:
            call()
        except (KeyboardInterrupt, RuntimeError):  # Python's `Condition` may not hold its lock
            pass
        finally:
            sys.settrace(None)
            gc.enable()
        return lines.seen

    for new in (False, True):  # threads are there, or started in this call
        for at in count(1, 3 if new else 1):
            if new:
                pipe = pipe_of(layers, **options)
            seen = run(at)
            assert not inside, at
            before = len(entered)
            call()
            assert len(entered) - before == 4, at
            if seen < at:
                break
        assert at > 20
        gc.collect()
        assert len(our_threads()) == 2
