"""``Pipe.auto`` on accelerators of unequal size, simulated ones of 64, 128 and 256 MB."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from syncpipe.planner.machine import link_bandwidth
from tests import simulated
from tests.auto.models import Residual
from tests.support import accelerator as acc

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]

SIZES = (64e6, 128e6, 256e6)


@pytest.fixture
def unequal() -> Iterator[list[torch.device]]:
    if not simulated.loaded():
        pytest.skip("real devices have the size that they have")
    devices = simulated.devices(3)
    gc.collect()  # what other tests left in cycles
    with ExitStack() as stack:
        for device, size in zip(devices, SIZES, strict=True):
            stack.enter_context(simulated.capacity(device, int(size)))
        yield devices


def bytes_in(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def trained(pipe: Pipe, devices: list[torch.device], batch: Any, before: list[int]) -> list[int]:
    """The most that is taken on each device in the second step of a training."""
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(2):
        acc.synchronize()
        for device in devices:
            torch.accelerator.reset_peak_memory_stats(device)
        optimizer.zero_grad()
        pipe.train_batch(batch, loss_fn=lambda output: output.mean(), verify=False)
        acc.synchronize()  # the simulated allocator does not wait for what other streams still use
        optimizer.step()
    acc.synchronize()
    peaks = (torch.accelerator.max_memory_allocated(device) for device in devices)
    return [peak - other for peak, other in zip(peaks, before, strict=True)]


@pytest.mark.parametrize(
    ("width", "depth", "batch"),
    [(800, 6, 2048), (1700, 6, 64), (1900, 8, 64)],
)
@pytest.mark.timeout(600)
def test_what_it_prints_of_memory_is_what_a_training_takes(unequal, width, depth, batch, capsys):
    """To 10 %; or it says what is missing, where not even the parameters fit."""
    before = [acc.allocated(device) for device in unequal]
    model = Residual(width, depth)
    whole = 4 * sum(p.nbytes for p in model.parameters())
    options: dict[str, Any] = {"batch_size": batch, "devices": unequal, "timeout": 0.0}
    if whole > sum(SIZES):
        with pytest.raises(ValueError, match=r"needs [\d.]+ MB, [\d.]+ MB more than"):
            Pipe.auto(model, torch.randn(4, 24), **options)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert all(acc.allocated(d) <= old for d, old in zip(unequal, before, strict=True))
        return
    pipe = Pipe.auto(model, torch.randn(4, 24), **options)
    text = capsys.readouterr().out
    printed = dict(re.findall(r"(sim:\d) ([\d.]+ \w+) and", text))
    assert len(pipe.balance) > 1 or whole < max(SIZES)
    peaks = trained(pipe, unequal, torch.randn(batch, 24, device=pipe.devices[0]), before)
    for device, peak in zip(unequal, peaks, strict=True):
        if peak:
            assert bytes_in(printed[str(device)]) == pytest.approx(peak, rel=0.1), text


def test_what_the_model_takes_already_is_free(unequal):
    """On the device where it fills most of the memory when it is given."""
    model, x = Residual(1200, 4).to(unequal[1]), torch.randn(2, 24, device=unequal[1])
    pipe = Pipe.auto(model, x, batch_size=4, devices=[unequal[1]], memory=None, timeout=0.0)
    assert pipe.devices == [unequal[1]]


def test_a_step_that_is_out_of_memory_is_tried_with_less(unequal, capsys):
    """A loss takes memory of which no plan knows."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    tries = []

    def loss_fn(output):
        tries.append(len(output))
        return output.repeat(1, 1000).mean()

    pipe = Pipe.auto(
        model, torch.randn(4, 512), batch_size=128, devices=unequal[:2], loss_fn=loss_fn,
        timeout=0.0,
    )  # fmt: skip
    assert max(tries) > tries[-1] == 128 // pipe.chunks
    assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize(("size", "width", "depth"), [(40e6, 600, 4), (100e6, 1400, 8)])
def test_devices_smaller_than_what_is_usually_measured_at_once(unequal, size, width, depth):
    """Copies for the bandwidth, and layers that are timed one after another."""
    link_bandwidth.cache_clear()
    with ExitStack() as stack:
        for device in unequal:
            stack.enter_context(simulated.capacity(device, int(size)))
        pipe = Pipe.auto(
            Residual(width, depth), torch.randn(4, 24), batch_size=8, devices=unequal,
            optimizer=torch.optim.SGD, timeout=0.0,
        )  # fmt: skip
        assert sum(len(stage) for stage in pipe.partitions) == len(pipe)
    link_bandwidth.cache_clear()
