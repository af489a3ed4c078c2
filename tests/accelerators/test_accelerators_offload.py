"""``checkpoint="offload"`` on accelerators, real or simulated: what moves, and when."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime import offload
from syncpipe.runtime.streams import AcceleratorStreams
from tests import simulated
from tests.accelerators.four import LAYOUTS, WIDTH, model
from tests.accelerators.test_accelerators_memory import assert_nothing_stays
from tests.support import accelerator as acc
from tests.support.running import on_gradient, raising

pytestmark = pytest.mark.gpu

SIZE = (256, 512)  # half a MiB in a micro-batch of 256
ONE = 256 * 512 * 4
SCHEDULES = ["pipe(x)", "gpipe", "1f1b", "zb_h1"]


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size are offloaded."""
    monkeypatch.setattr(offload, "SMALL", 1)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy that was made on the host."""
    made: list[int] = []
    on_host = offload._on_host
    monkeypatch.setattr(offload, "_on_host", lambda size: (made.append(size), on_host(size))[1])
    return made


def results(pipe: Pipe, how: str, x: Tensor) -> list[Tensor]:
    pipe.zero_grad()
    x = x.detach().to(pipe.devices[0]).requires_grad_()
    if how == "pipe(x)":
        loss = pipe(x).square().mean()
        loss.backward()
    else:
        loss = pipe.train_batch(x, loss_fn=lambda y: y.square().mean(), schedule=how)
    found = [loss.detach(), x.grad, *(p.grad for p in pipe.parameters())]
    return [tensor.cpu() for tensor in found]


class Odd(nn.Module):
    """Views of one memory, what is transposed, expanded and not contiguous, and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).chunk(3, -1)
        y = (q * k).relu_() + v * v.mean(0, keepdim=True).expand_as(v)
        z = y.t().sin().exp() * y.t()[:, :1]
        return z.t().tanh() + torch.where(y > 0, y.sin(), y[::2].repeat_interleave(2, 0).cos())


@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.usefixtures("everything")
def test_views_come_back_as_views_with_their_strides(how):
    torch.manual_seed(0)
    module, x = nn.Sequential(Odd(), Odd(), Odd(), Odd()), torch.randn(12, WIDTH)
    found = []
    for checkpoint in ("never", "offload"):
        pipe = Pipe(copy.deepcopy(module), [1] * 4, devices=LAYOUTS["four"](), chunks=3,
                    checkpoint=checkpoint)  # fmt: skip
        found.append(results(pipe, how, x))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not simulated.loaded(), reason="kernels can be made late on simulated devices")
@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("everything")
def test_nothing_is_read_before_it_is_there_and_nothing_reused_before_it_was_read(how, seed):
    torch.manual_seed(0)
    module, x = nn.Sequential(Odd(), Odd(), Odd(), Odd()), torch.randn(12, WIDTH)
    found = []
    for checkpoint in ("never", "offload"):
        pipe = Pipe(copy.deepcopy(module), [1] * 4, devices=LAYOUTS["interleaved"](), chunks=3,
                    checkpoint=checkpoint)  # fmt: skip
        if checkpoint == "never":
            found.append(results(pipe, how, x))
            continue
        lanes = [worker.lane() for worker in pipe._layout.workers[:2]]
        for worker, lane in zip(pipe._layout.workers, lanes, strict=False):
            for stream in (*worker.host_streams(), lane.compute):
                with simulated.delays(2.0, 0.7, seed=seed, stream=stream):
                    found.append(results(pipe, how, x))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


class Aside(nn.Module):
    """Computes on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: Any = None

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream(x.device)
        if self.stream is None:
            self.stream = torch.Stream(device=x.device)
        self.stream.wait_event(main.record_event())
        with AcceleratorStreams(x.device).use(self.stream):
            for _ in range(2 * offload.AHEAD):
                x = x.sin() + x
            x.record_stream(main)
        main.wait_event(self.stream.record_event())
        return x.cos()


@pytest.mark.usefixtures("everything")
def test_what_layers_store_on_streams_of_their_own_stays_there(copies):
    pipe = Pipe(nn.Sequential(Aside()), [1], devices=[acc.device(1)], checkpoint="offload")
    pipe(torch.randn(12, WIDTH, device=acc.device(1), requires_grad=True))
    assert len(copies) == 1  # what the cosine stores


def flush() -> None:
    """Autograd's thread of the device lets go of an error when it does something else."""
    torch.ones(1, device=acc.device(1), requires_grad=True).sum().backward()
    gc.collect()


@pytest.mark.skipif(not simulated.loaded(), reason="copies can be made late on simulated devices")
def test_memory_of_a_copy_that_nobody_asked_for_is_not_used_before_it_is_there():
    class Sines(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(10):
                x = x.sin()
            return on_gradient(x, raising(lambda: ValueError("told"))).sin().sin()

    device = acc.device(1)
    pipe = Pipe(nn.Sequential(Sines()), [1], devices=[device], chunks=1, checkpoint="offload")
    y = pipe(torch.ones(SIZE, device=device, requires_grad=True))
    worker = pipe._layout.workers[0]
    acc.synchronize()
    back = worker.host_streams()[1]
    with simulated.delays(20.0, stream=back):
        with simulated.held(back):
            with pytest.raises(ValueError, match="told"):
                y.sum().backward()
            del y
            flush()
            made = [torch.zeros(SIZE, device=device) for _ in range(40)]  # all that is free
        acc.synchronize()
    assert not any(tensor.any() for tensor in made)


class Wide(nn.Module):
    """Stores ten activations of its size."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = x.sin()
        return x


def between(pipe: Pipe, x: Tensor) -> tuple[int, Tensor]:
    """Bytes that stay between forward and backward."""
    gc.collect()
    before = acc.allocated(*set(pipe.devices))
    y = pipe(x)
    return acc.allocated(*set(pipe.devices)) - before, y


def test_between_forward_and_backward_the_memory_is_free_and_comes_back_a_little_at_a_time():
    x = torch.randn(4 * 256, 512, device=acc.device(0), requires_grad=True)
    stay = {}
    for checkpoint in ("never", "offload"):
        pipe = Pipe(nn.Sequential(Wide(), Wide()), [1, 1], devices=LAYOUTS["four"]()[:2], chunks=4,
                    checkpoint=checkpoint)  # fmt: skip
        stay[checkpoint], y = between(pipe, x)
        y.sum().backward()
        del y, pipe
    # What is left: the output, and of each stage what others hold as well.
    assert stay["never"] >= 4 * 20 * ONE
    assert stay["offload"] <= 4 * 4 * ONE


@pytest.mark.skipif(not simulated.loaded(), reason="other programs use real devices as well")
@pytest.mark.parametrize("how", ["pipe(x)", "gpipe"])
def test_the_peak_of_a_step_is_far_lower(how):
    peaks = {}
    x = torch.randn(4 * 256, 512, device=acc.device(0), requires_grad=True)
    for checkpoint in ("never", "offload"):
        pipe = Pipe(nn.Sequential(Wide(), Wide()), [1, 1], devices=LAYOUTS["four"]()[:2], chunks=4,
                    checkpoint=checkpoint)  # fmt: skip
        for _ in range(2):
            acc.allocated()
            torch.accelerator.reset_peak_memory_stats(1)
            before = simulated.live_bytes(1)
            results(pipe, how, x)
            acc.synchronize()
        stats = torch.accelerator.memory_stats(1)
        peaks[checkpoint] = (stats["active_bytes.all.peak"] - before) / ONE
    assert peaks["never"] >= 4 * 10
    # On their way out, on their way back, what a layer works on; and the output, four times.
    assert peaks["offload"] <= 2 * offload.AHEAD + 16


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


@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.usefixtures("everything")
def test_nothing_stays_on_the_devices(how):
    pipe = Pipe(model(), [2, 2, 2, 1], devices=LAYOUTS["four"](), chunks=2, checkpoint="offload")
    x = torch.randn(4, WIDTH, dtype=torch.float64, device=pipe.devices[0], requires_grad=True)
    failing = [False]

    def loss_fn(y: Tensor) -> Tensor:
        if failing[0]:
            raise ValueError("as it was told")
        return y.square().mean()

    def step() -> None:
        if how == "pipe(x)":
            pipe(x)  # never goes back
            loss_fn(pipe(x)).backward()
        else:
            pipe.train_batch(x, loss_fn=loss_fn, schedule=how)
            failing[0] = True
            with pytest.raises(ValueError, match="told"):
                pipe.train_batch(x, loss_fn=loss_fn, schedule=how)
            failing[0] = False
        pipe.zero_grad()
        x.grad = None

    assert_nothing_stays(step)


@pytest.mark.usefixtures("everything")
def test_two_backwards_through_one_graph_and_a_second_derivative():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    found = []
    for checkpoint in ("never", "offload"):
        pipe = Pipe(copy.deepcopy(module), [1, 1, 1], devices=LAYOUTS["four"]()[:3], chunks=2,
                    checkpoint=checkpoint)  # fmt: skip
        given = x.to(pipe.devices[0]).requires_grad_()
        y = pipe(given)
        first = torch.autograd.grad(y.square().sum(), given, retain_graph=True)[0]
        second = torch.autograd.grad(y.square().sum(), given, create_graph=True)[0]
        third = torch.autograd.grad(second.square().sum(), list(pipe.parameters())[:2])
        found.append([t.detach().cpu() for t in (first, second, *third)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("everything")
def test_what_was_modified_in_place_is_refused_as_without():
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            y.add_(1)
            return y

    for layer in (Wrong(), nn.Linear(WIDTH, WIDTH)):
        pipe = Pipe(nn.Sequential(nn.Identity(), layer), [1, 1], devices=LAYOUTS["four"]()[:2],
                    checkpoint="offload")  # fmt: skip
        y = pipe(torch.randn(8, WIDTH, device=acc.device(0), requires_grad=True))
        if isinstance(layer, nn.Linear):
            with torch.no_grad():
                layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified in place since the forward"):
            y.sum().backward()
        flush()


def test_workers_on_the_host_move_nothing(copies):
    pipe = Pipe(nn.Sequential(Wide(), Wide()), [1, 1], devices=["cpu:0", acc.device(0)], chunks=2,
                checkpoint=["offload", "never"])  # fmt: skip
    F.mse_loss(pipe(torch.randn(512, 512)), torch.zeros(512, 512, device=acc.device(0)))
    assert copies == []


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.usefixtures("everything")
def test_layers_that_draw_and_buffers(autocast):
    if autocast and simulated.loaded():
        pytest.skip("the simulated devices have no autocast of their own")
    found: list[Any] = []
    for checkpoint in ("never", "offload"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH),
                               nn.Dropout(0.5))  # fmt: skip
        pipe = Pipe(module, [1] * 4, devices=LAYOUTS["four"](), chunks=2, checkpoint=checkpoint)
        for how in SCHEDULES[:3]:
            torch.manual_seed(1)
            with torch.autocast(acc.kind(), torch.bfloat16, enabled=autocast):
                found.append(results(pipe, how, torch.randn(8, WIDTH)))
        found.append([buffer.cpu() for buffer in pipe.buffers()])
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
