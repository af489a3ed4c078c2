"""Ctrl-C in any function on the calling thread: its settings are what they were."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe, inline
from tests.support.interrupts import interrupted, modes_on
from tests.support.running import another_thread

RUNS: dict[str, Callable[[Pipe, Tensor], Any]] = {
    "forward": lambda pipe, x: pipe(x).sum().backward(),
    "train_batch": lambda pipe, x: pipe.train_batch(x, loss_fn=torch.mean, schedule="zb_h1"),
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
