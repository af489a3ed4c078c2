"""What is measured on four accelerators, real or simulated: traces, profiles, balances, plans.

Layers sleep on the device, so that what is measured is known; bounds are loose, and from one side.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe, plan
from syncpipe.balance import balance_by_size, balance_by_time, profile
from syncpipe.timeline.timeline import Span
from tests.support import accelerator as acc
from tests.support.running import on_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]

WIDTH, CHUNKS = 4, 4
SLEEP = 8.0  # milliseconds
ALMOST = SLEEP / 2e3  # seconds by which the clocks of two devices may differ


class Sleeps(nn.Linear):
    """Takes some time on the device, forward and backward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        acc.sleep(SLEEP)
        return on_gradient(super().forward(x), lambda grad: acc.sleep(SLEEP))


def traced(devices: list[torch.device], how: str, checkpoint: str) -> tuple[list[Span], float]:
    """What a step did, without transfers, and its bubble."""
    layers = nn.Sequential(*(Sleeps() for _ in devices))
    pipe = Pipe(
        layers, [1] * len(devices), devices=devices, chunks=CHUNKS, checkpoint=checkpoint
    )  # fmt: skip
    x = torch.randn(8, WIDTH, device=devices[0], requires_grad=True)

    def step() -> None:
        if how == "pipe(x)":
            pipe(x).sum().backward()
        else:
            pipe.train_batch(x, loss_fn=torch.sum, loss_reduction="sum", schedule=how)

    step()  # streams and threads are made
    acc.synchronize()
    with pipe.trace() as trace:
        step()
    return [span for span in trace.spans if span.kind != "transfer"], trace.bubble


def test_naive_is_one_after_another(four_devices):
    """So at most one of three devices is busy at a time."""
    spans, bubble = traced(four_devices[:3], "naive", "never")
    spans.sort(key=lambda span: span.start)
    for earlier, later in itertools.pairwise(spans):
        assert later.start > earlier.end - ALMOST
    assert bubble > 0.5


@pytest.mark.parametrize("how", ["pipe(x)", "gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_no_span_begins_before_its_input_is_there(four_devices, checkpoint, how):
    """Waiting is no work: a cell begins after the one that it gets its input from."""
    spans, bubble = traced(four_devices, how, checkpoint)
    cells = {(span.kind, span.i, span.j): span for span in spans}
    seen = 0
    for (kind, i, j), span in cells.items():
        assert span.start <= span.end
        before = {"forward": j - 1, "backward": j + 1, "backward_input": j + 1}.get(kind)
        earlier = cells.get((kind, i, before))
        if earlier is not None:
            end = earlier.end
            if how == "pipe(x)" and kind == "backward":
                # Weights come after what is sent on; what is recomputed inside is taken out.
                end = earlier.start + (SLEEP / 1e3 if checkpoint == "never" else 0.0)
            assert span.start > end - ALMOST
            seen += 1
        if kind in ("forward", "recompute"):
            assert span.end - span.start > ALMOST
    assert seen == 2 * 3 * CHUNKS
    assert bubble > 0.15  # 0.43 by the schedule; that of zero bubble is smaller


class Here(nn.Module):
    """Works on the current device, whatever its input says, as kernels of other libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.accelerator.current_device_index()
        assert x.device.index == index
        acc.sleep(2 * SLEEP)
        return x * torch.full((), 2.0, device=acc.device(index))


def layers() -> nn.Sequential:
    return nn.Sequential(Here(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


@pytest.mark.parametrize("k", [0, 2])
def test_profile(k):
    """Of a layer that uses the current device, its kernels are timed, on the device asked for."""
    found = profile(
        layers(), torch.randn(8, WIDTH), sizes=[2, 8], device=acc.device(k), timeout=0.1,
        progress=False,
    )  # fmt: skip
    assert found.device.startswith(str(acc.device(k)))
    assert min(found.layers[0].forward.values()) > SLEEP / 1e3
    assert found.layers[1].output_bytes[8] == 8 * WIDTH * 4
    assert torch.accelerator.current_device_index() == 0


def test_profile_where_the_layers_are():
    module = layers().to(acc.device(3))
    sample = torch.randn(8, WIDTH, device=acc.device(3))
    found = profile(module, sample, sizes=[8], timeout=0.1, progress=False)
    assert found.layers[0].forward[8] > SLEEP / 1e3


def test_balance_by_time():
    balance = balance_by_time(
        2, layers(), torch.randn(8, WIDTH), timeout=0.1, device=acc.device(1), progress=False
    )
    assert balance == [1, 3]


def test_balance_by_size():
    balance = balance_by_size(
        3, layers(), torch.randn(8, WIDTH), chunks=2, device=acc.device(1), progress=False
    )
    assert balance == [2, 1, 1]


def test_plan(four_devices):
    """What it says runs on the devices that it says it for."""
    module = layers()
    sample = torch.randn(8, WIDTH, device=four_devices[1])
    found = plan(
        module.to(four_devices[1]), sample, devices=four_devices, batch_size=8, memory="1GB",
        bandwidth="10GB/s", timeout=0.2, progress=False,
    )  # fmt: skip
    pipe = Pipe(module, **found.options())
    pipe.train_batch(sample.to(pipe.devices[0]), loss_fn=torch.sum, loss_reduction="sum")
    assert all(p.grad is not None for p in pipe.parameters())


def test_the_host_does_not_wait_for_a_trace(four_devices):
    pipe = Pipe(nn.Sequential(*(Sleeps() for _ in range(4))), [1] * 4, devices=four_devices)
    x = torch.randn(8, WIDTH, device=four_devices[0])
    pipe.train_batch(x, loss_fn=torch.sum)
    with pipe.trace() as trace, acc.no_waits():
        pipe.train_batch(x, loss_fn=torch.sum)
    assert trace.spans
