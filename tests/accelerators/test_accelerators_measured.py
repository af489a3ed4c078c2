"""What is measured on four accelerators, real or simulated: traces, profiles, balances, plans.

Layers sleep on the device, so that what is measured is known; bounds are loose, and from one side.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.balance import profile
from syncpipe.timeline.timeline import Span
from tests.accelerators.four import LAYOUTS, step
from tests.support import accelerator as acc
from tests.support.running import on_gradient

pytestmark = pytest.mark.gpu

WIDTH, CHUNKS = 4, 4
SLEEP = 8.0  # milliseconds
KINDS = {"forward", "recompute", "backward", "backward_input", "backward_weight"}


class Sleeps(nn.Linear):
    """Takes some time on the device, forward and backward."""

    def __init__(self, ms: float = SLEEP) -> None:
        super().__init__(WIDTH, WIDTH)
        self.ms = ms

    def forward(self, x: Tensor) -> Tensor:
        acc.sleep(self.ms)
        return on_gradient(super().forward(x), lambda grad: acc.sleep(self.ms))


def traced(pipe: Pipe, how: str) -> list[Span]:
    """What a step did, in the order in which it began."""
    x, target = torch.randn(8, WIDTH, device=pipe.devices[0], requires_grad=True), torch.zeros(8)

    def run() -> None:
        step(pipe, x, target, lambda y, _: y.sum(), how)

    run()  # streams and threads are made
    acc.synchronize()
    with pipe.trace() as trace:
        run()
    assert 0 < trace.bubble < 1
    return sorted(trace.spans, key=lambda span: span.start)


@pytest.mark.parametrize("how", ["pipe(x)", "naive", "gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("layout", ["four", "two workers on one"])
def test_spans_of_a_device_follow_each_other(layout, checkpoint, how):
    """And last at least as long as their kernels: the host is done long before."""
    layers, devices = nn.Sequential(*(Sleeps() for _ in range(4))), LAYOUTS[layout]()
    spans = traced(
        Pipe(layers, [1] * 4, devices=devices, chunks=CHUNKS, checkpoint=checkpoint), how
    )
    for kind in ("forward", *["recompute"] * (checkpoint == "always")):
        found = sorted((s.i, s.j, s.end) for s in spans if s.kind == kind)
        assert [(i, j) for i, j, _ in found] == [(i, j) for i in range(CHUNKS) for j in range(4)]
        assert min(s.end - s.start for s in spans if s.kind == kind) > SLEEP / 2e3
        if kind == "forward":  # each stage after the one before
            assert all(a[2] <= b[2] for a, b in itertools.pairwise(found) if a[0] == b[0])
            ends = {(i, j): end for i, j, end in found}
    sent = [s for s in spans if s.kind == "transfer" and not s.backward]
    assert all(ends[s.i, s.j] - s.start < SLEEP / 2e3 for s in sent)
    for row in {span.row for span in spans}:
        here = [span for span in spans if span.row == row and span.kind in KINDS]
        assert all(a.end <= b.start for a, b in itertools.pairwise(here))


@pytest.mark.parametrize("how", ["pipe(x)", "gpipe", "1f1b"])
def test_waiting_for_another_device_is_no_work(four_devices, how):
    """A cell that waits for one of 150 ms is quicker than that, at least once."""
    layers = nn.Sequential(Sleeps(150.0), nn.Linear(WIDTH, WIDTH), Sleeps(150.0))
    pipe = Pipe(layers, [1] * 3, devices=four_devices[:3], chunks=CHUNKS, checkpoint="never")
    spans = traced(pipe, how)
    for kind in ("forward", "backward"):
        found = [span.end - span.start for span in spans if (span.kind, span.j) == (kind, 1)]
        assert len(found) == CHUNKS
        assert min(found) < 0.1


class Here(nn.Module):
    """Works on the current device, whatever its input says, as kernels of other libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.accelerator.current_device_index()
        assert x.device.index == index
        acc.sleep(2 * SLEEP)
        return x * torch.full((), 2.0, device=acc.device(index))


def layers() -> nn.Sequential:
    return nn.Sequential(Here(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


@pytest.mark.parametrize("k", [0, 2, None])
def test_profile(k):
    """Of a layer that uses the current device, its kernels are timed, on the device asked for.

    Or on the one where the layers are.
    """
    there = acc.device(3 if k is None else k)
    module, sample = layers(), torch.randn(8, WIDTH)
    if k is None:
        module, sample = module.to(there), sample.to(there)
    device = None if k is None else there
    found = profile(module, sample, sizes=[2, 8], device=device, timeout=0.1, progress=False)
    assert found.device.startswith(str(there))
    assert min(found.layers[0].forward.values()) > SLEEP / 1e3
    assert found.layers[1].output_bytes[8] == 8 * WIDTH * 4
    assert torch.accelerator.current_device_index() == 0
