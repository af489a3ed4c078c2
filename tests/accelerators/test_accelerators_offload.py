"""``checkpoint="offload"`` on accelerators, real or simulated: what moves, and when."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.weight_gradients import WeightGradients
from syncpipe.stages import offload
from tests import simulated
from tests.accelerators.four import LAYOUTS, WIDTH, trained
from tests.fuzz.models import OwnStream
from tests.support import accelerator as acc
from tests.support.running import Do, on_gradient, raising

pytestmark = pytest.mark.gpu
everything = pytest.mark.usefixtures("offloads_everything")

SIZE = (256, 512)  # half a MiB in a micro-batch of 256
ONE = 256 * 512 * 4
SCHEDULES = ["pipe(x)", "gpipe", "1f1b", "zb_h1"]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy that was made on the host."""
    made: list[int] = []
    on_host = offload._on_host
    monkeypatch.setattr(offload, "_on_host", lambda size: (made.append(size), on_host(size))[1])
    return made


def results(pipe: Pipe, how: str, x: Tensor) -> list[Tensor]:
    found = trained(pipe, x, torch.zeros(len(x)), lambda y, _: y.square().mean(), how)
    return [tensor.cpu() for tensor in found]


def both(module: nn.Sequential, **options: Any) -> Iterator[Pipe]:
    """Pipes of copies of a module, one that keeps what it stores and one that offloads it."""
    devices = LAYOUTS["four"]()[: len(module)]
    for checkpoint in ("never", "offload"):
        arguments = {"devices": devices, **options, "checkpoint": checkpoint}
        yield Pipe(copy.deepcopy(module), [1] * len(module), **arguments)


@everything
def test_what_layers_store_on_streams_of_their_own_stays_there(copies):
    def sines(x: Tensor) -> Tensor:
        for _ in range(2 * offload.AHEAD):
            x = x.sin() + x
        return x

    module = nn.Sequential(OwnStream(Do(sines)), Do(torch.cos))
    pipe = Pipe(module, [2], devices=[acc.device(1)], checkpoint="offload")
    pipe(torch.randn(12, WIDTH, device=acc.device(1), requires_grad=True))
    assert len(copies) == 1  # what the cosine stores


def test_products_are_left_to_the_weight_halves(monkeypatch):
    accumulate, left = WeightGradients.accumulate, []

    def counting(gradients: WeightGradients) -> None:
        left.append(len(gradients.pending))
        accumulate(gradients)

    monkeypatch.setattr(WeightGradients, "accumulate", counting)
    for pipe in both(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4)), chunks=4):
        results(pipe, "zb_h1", torch.rand(8, WIDTH, device=acc.device(0)))
    assert left == [1] * 16


def flush() -> None:
    """Autograd's thread of the device lets go of an error when it does something else."""
    torch.ones(1, device=acc.device(1), requires_grad=True).sum().backward()
    gc.collect()


def test_memory_of_a_copy_that_nobody_asked_for_is_not_used_before_it_is_there():
    def sines(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x.sin()
        return on_gradient(x, raising(lambda: ValueError("told"))).sin().sin()

    device = acc.device(1)
    pipe = Pipe(nn.Sequential(Do(sines)), [1], devices=[device], chunks=1, checkpoint="offload")
    y = pipe(torch.ones(SIZE, device=device, requires_grad=True))
    with pytest.raises(ValueError, match="told"):
        y.sum().backward()
    del y
    flush()
    torch.zeros(SIZE, device=device)  # which may get it


def wide(x: Tensor) -> Tensor:
    """Stores ten activations of its size."""
    for _ in range(10):
        x = x.sin()
    return x


WIDE = nn.Sequential(Do(wide), Do(wide))


def test_between_forward_and_backward_the_memory_is_free():
    x, stay = torch.randn(4 * 256, 512, device=acc.device(0), requires_grad=True), []
    for pipe in both(WIDE, chunks=4):
        gc.collect()
        before = acc.allocated(*pipe.devices)
        y = pipe(x)
        stay.append(acc.allocated(*pipe.devices) - before)
        y.sum().backward()
        del y
    # What is left: the output, and of each stage what others hold as well.
    assert stay[0] >= 4 * 20 * ONE
    assert stay[1] <= 4 * 4 * ONE


@pytest.mark.skipif(not simulated.loaded(), reason="other programs use real devices as well")
@pytest.mark.parametrize("how", ["pipe(x)", "gpipe"])
def test_the_peak_of_a_step_is_far_lower(how):
    """What was offloaded comes back a little at a time."""
    peaks, x = [], torch.randn(4 * 256, 512, device=acc.device(0), requires_grad=True)
    for pipe in both(WIDE, chunks=4):
        for _ in range(2):
            acc.allocated()
            torch.accelerator.reset_peak_memory_stats(1)
            before = simulated.live_bytes(acc.device(1))
            results(pipe, how, x)
            acc.synchronize()
        stats = torch.accelerator.memory_stats(1)
        peaks.append((stats["active_bytes.all.peak"] - before) // ONE)
    assert peaks[0] >= 4 * 10
    # On their way out, on their way back, what a layer works on; and the output, four times.
    assert peaks[1] <= 2 * offload.AHEAD + 16


def test_parameters_small_tensors_and_what_is_stored_twice(copies):
    class Stores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(512, 512))
            self.register_buffer("scale", torch.ones(512, 512))

        def forward(self, x: Tensor) -> Tensor:
            small = x[:1].sin() * x[:1]
            y = x @ self.weight @ self.scale  # stores x, weight and scale
            return y * y * y.view(512, 512).t().t() + small  # stores y four times

    pipe = Pipe(nn.Sequential(nn.Identity(), Stores()), [1, 1], devices=LAYOUTS["four"]()[:2],
                chunks=1, checkpoint=["never", "offload"])  # fmt: skip
    x = torch.randn(512, 512, device=acc.device(0), requires_grad=True)
    for _ in range(2):
        copies.clear()
        pipe(x).sum().backward()
    assert copies == [512 * 512 * 4] * 3  # x, y, and y * y


@everything
def test_what_was_modified_in_place_is_refused_as_without():
    def wrong(x: Tensor) -> Tensor:
        y = x.exp()
        return y.add_(1)

    for layer in (Do(wrong), nn.Linear(WIDTH, WIDTH)):
        pipe = Pipe(nn.Sequential(nn.Identity(), layer), [1, 1], devices=LAYOUTS["four"]()[:2],
                    checkpoint="offload")  # fmt: skip
        y = pipe(torch.randn(8, WIDTH, device=acc.device(0), requires_grad=True))
        if isinstance(layer, nn.Linear):
            with torch.no_grad():
                layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified in place since the forward"):
            y.sum().backward()
        flush()
    if simulated.loaded():
        simulated.races()  # of copies that so are of no use
