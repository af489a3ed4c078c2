"""What only an accelerator shows, of which one is enough: times, memory, a host that never waits.

Results are compared by ``tests/accelerators``, on as many accelerators as there are.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe, Worker
from tests.accelerators.four import MODES, model, step, weighted
from tests.support import accelerator as acc

pytestmark = pytest.mark.gpu

CHUNKS = 4
BALANCE = [2, 2, 2, 1]
WORKERS = {
    "one worker": lambda: [acc.device()] * 4,
    "two workers": lambda: [Worker(acc.device()) for _ in range(2)] * 2,
}


def batch(rows: int, width: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, rows, width, device=acc.device())
    return x, target


@pytest.mark.parametrize("how", ["pipe(x)", "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("workers", WORKERS)
def test_the_host_never_waits_for_the_device(workers, how):
    """Not even in a trace, with weights that are tensors, and gradients to be scaled."""
    for checkpoint in MODES:
        pipe = Pipe(
            model(), BALANCE, devices=WORKERS[workers](), chunks=CHUNKS, checkpoint=checkpoint
        )
        x, target = (t.double() for t in batch(16, 8))
        loss_fn = F.mse_loss if how == "pipe(x)" else weighted
        step(pipe, x, target, loss_fn, how)  # streams are made
        pipe.eval_batch(x, target, loss_fn=weighted)
        with pipe.trace() as trace, acc.no_waits():
            step(pipe, x, target, loss_fn, how)
            pipe.eval_batch(x, target, loss_fn=weighted)
        assert trace.spans


def peak(how: str, checkpoint: str, chunks: int) -> int:
    """Bytes that a step takes at most; one worker, so that nothing but the order decides."""
    width = acc.sized(512, 64)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.Tanh())]
    pipe = Pipe(
        nn.Sequential(*layers), [4] * 4, devices=[acc.device()] * 4, chunks=chunks,
        checkpoint=checkpoint,
    )  # fmt: skip
    x, target = batch(chunks * acc.sized(2048, 64), width)
    for _ in range(2):
        pipe.zero_grad()
        found: list[int] = []
        with acc.peak_above(acc.device(), found):
            step(pipe, x, target, F.mse_loss, how)
    return found[0]


def test_rematerialization_saves_memory():
    never, except_last, always = (peak("pipe(x)", mode, 4) for mode in ("never", *MODES[1::-1]))
    assert except_last < never
    assert always < never


def test_memory_of_1f1b_does_not_grow_with_the_number_of_micro_batches():
    few, many = (peak("1f1b", "never", chunks) for chunks in (8, 32))
    assert many < 1.5 * few
    assert peak("gpipe", "never", 32) > 2 * many
