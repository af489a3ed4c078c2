"""Nothing is left of a step on any of four accelerators, real or simulated.

``SYNCPIPE_STEPS=500`` runs longer than the tests do on their own.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from tests.accelerators.four import LAYOUTS, WIDTH, data, model, pipe_of, trained, weighted
from tests.support import accelerator as acc
from tests.support.models import tie

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]

STEPS = int(os.environ.get("SYNCPIPE_STEPS", "12"))
MODES = ["always", "never", "offload"]


def used() -> tuple[int, int]:
    gc.collect()
    return acc.allocated(), acc.blocks()


def assert_nothing_stays(step: Any, steps: int = STEPS) -> None:
    """After many steps as much memory is in use as after five."""
    for _ in range(5):
        step()
    before = used()
    for _ in range(steps - 5):
        step()
    assert used() == before


@pytest.mark.parametrize(
    ("layout", "how", "checkpoint"),
    [
        (layout, how, MODES[(i + k) % 3])
        for i, layout in enumerate(["four", "tied", "hybrid", "workers", "interleaved", "in turns"])
        for k, how in enumerate(["pipe(x)", "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
        if how != "interleaved_1f1b" or layout in ("interleaved", "in turns")  # two stages on each
    ],
)
@pytest.mark.usefixtures("offloads_everything")
def test_training(layout, how, checkpoint):
    layers = model()
    if layout == "tied":
        tie(layers[1], layers[6])
    pipe = pipe_of(layers, layout.replace("tied", "four"), checkpoint=checkpoint)
    x, target = data()
    x, target = x.to(pipe.devices[0]), target.to(pipe.devices[-1])
    loss_fn = F.mse_loss if how == "pipe(x)" else weighted

    def step() -> None:
        trained(pipe, x, target, loss_fn, how)
        pipe.zero_grad()

    assert_nothing_stays(step)


@pytest.mark.parametrize("checkpoint", ["except_last", "offload"])
@pytest.mark.parametrize("layout", ["four", "in turns"])
@pytest.mark.usefixtures("offloads_everything")
def test_all_else(layout, checkpoint):
    """Evaluation, traces, failures, iterators, skipped backwards, statistics."""
    plain = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH)
    )
    options = {"devices": LAYOUTS[layout](), "checkpoint": checkpoint}
    pipe = Pipe(plain, [1] * 4, chunks=2, deferred_batch_norm=True, **options)
    x, target = torch.randn(4, WIDTH, device=pipe.devices[0]), torch.randn(4, WIDTH)

    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("as it was told")

    def step() -> None:
        pipe(x)  # never goes back
        pipe.eval_batch(x, target, loss_fn=F.mse_loss)
        with pipe.trace() as trace:
            pipe.train_batch(x, target, loss_fn=F.mse_loss)
        assert trace.spans
        with pytest.raises(ValueError, match="as it was told"):
            pipe.train_batch(x, target, loss_fn=fails)
        pieces = zip(x.cpu().chunk(2), target.chunk(2), strict=True)
        pipe.train_batch(data_iter=pieces, loss_fn=F.mse_loss)
        pipe.zero_grad()

    assert_nothing_stays(step)
