"""``train_batch`` on an accelerator. Two workers made by hand put a pipeline on one device."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe
from syncpipe.runtime.worker import Worker
from tests.accelerators.gpu.test_gpu import WIDTH, model, precise
from tests.support import accelerator as acc
from tests.support.running import Residual

__all__ = ["precise"]  # a fixture

pytestmark = pytest.mark.gpu

MODES = ["always", "never"]
SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]
CHUNKS = 4
BALANCE = [2, 1, 1, 2]


def two_workers() -> list[Worker]:
    a, b = Worker(acc.device()), Worker(acc.device())
    return [a, b, a, b]


DEVICES = {
    "one worker": lambda: [acc.device()] * 4,
    "two workers": two_workers,
    "four workers": lambda: [Worker(acc.device()) for _ in range(4)],
    "cpu first": lambda: ["cpu", acc.device(), "cpu", acc.device()],
}


def batch(rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and a target on the first accelerator."""
    x, target = (torch.randn(rows, WIDTH, device=acc.device()) for _ in range(2))
    return x, target


def reference(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """The loss and all gradients of the plain model, on the first accelerator."""
    module = copy.deepcopy(module).to(acc.device())
    x = x.detach().to(acc.device()).requires_grad_()
    pairs = zip(x.chunk(CHUNKS), target.to(acc.device()).chunk(CHUNKS), strict=True)
    losses = []
    for piece, goal in pairs:
        losses.append(F.mse_loss(module(piece), goal) / CHUNKS)
        losses[-1].backward(retain_graph=True)
    grads = [x.grad, *(p.grad for p in module.parameters())]
    return [torch.stack(losses).sum().detach(), *grads]


def check(module: nn.Module, pipe: Pipe, schedule: str, target_on: torch.device | str) -> None:
    x, target = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    pipe.zero_grad()
    there = x.to(pipe.devices[0]).requires_grad_()
    loss = pipe.train_batch(there, target.to(target_on), loss_fn=F.mse_loss, schedule=schedule)
    found = [loss, there.grad, *(p.grad for p in pipe.parameters())]
    for ours, theirs in zip(found, reference(module, x, target), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", DEVICES)
def test_same_result(devices, schedule, checkpoint):
    plain = model()
    pipe = Pipe(
        copy.deepcopy(plain), BALANCE, devices=DEVICES[devices](), chunks=CHUNKS,
        checkpoint=checkpoint,
    )  # fmt: skip
    for target_on in (acc.device(), "cpu", acc.device()):
        check(plain, pipe, schedule, target_on)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_devices(schedule, private, checkpoint):
    if acc.count() < 2:
        pytest.skip("needs two accelerators")
    several = [acc.device(k % acc.count()) for k in range(4)]
    workers = {device: Worker(device) if private else device for device in several}
    plain = model()
    pipe = Pipe(
        copy.deepcopy(plain), BALANCE, devices=[workers[name] for name in several], chunks=CHUNKS,
        checkpoint=checkpoint,
    )  # fmt: skip
    for target_on in (acc.device(), several[-1], "cpu"):
        check(plain, pipe, schedule, target_on)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_data_iter(schedule):
    plain = model()
    pipe = Pipe(copy.deepcopy(plain), BALANCE, devices=two_workers(), chunks=CHUNKS)
    x, target = batch()
    expected = reference(plain, x, target)
    for _ in range(3):
        pipe.zero_grad()
        data = ((a * 1, b * 1) for a, b in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True))
        loss = pipe.train_batch(data_iter=data, loss_fn=F.mse_loss, schedule=schedule)
        found = [loss, *(p.grad for p in pipe.parameters())]
        for ours, theirs in zip(found, [expected[0], *expected[2:]], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("private", [False, True])
def test_stream_of_the_caller(private, schedule):
    """On streams of the caller's own, behind work that takes a while, and overwritten at once."""
    rows, width = acc.sized((256, 512), (16, 32))
    plain = nn.Sequential(*(Residual(width) for _ in range(4)))
    devices = two_workers() if private else [acc.device()] * 4
    pipe = Pipe(copy.deepcopy(plain), [1] * 4, devices=devices, chunks=CHUNKS)
    source, goal = (torch.randn(rows, width, device=acc.device()) for _ in range(2))
    expected = reference(plain, source, goal)
    acc.synchronize()
    for _ in range(5):
        with torch.Stream(device=acc.device()):
            x, target = torch.zeros_like(source), torch.zeros_like(goal)
            acc.sleep()
            x.copy_(source)
            target.copy_(goal)
            x.requires_grad_()
            loss = pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
            with torch.no_grad():
                x.fill_(float("nan"))  # must wait until the pipe has read it
                target.fill_(float("nan"))
            found = [loss, x.grad, *(p.grad for p in pipe.parameters())]
            found = [tensor.clone() for tensor in found]
            pipe.zero_grad()
            del loss
        acc.synchronize()
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stress(schedule):
    """Wide layers, many micro-batches and a step: a missing wait would show in some of the runs."""
    rows, width = acc.sized((256, 1024), (64, 64))
    layers = nn.Sequential(*(Residual(width) for _ in range(4))).to(acc.device())
    data = [torch.randn(2, rows, width, device=acc.device()) for _ in range(6)]

    def losses(devices) -> list[torch.Tensor]:
        pipe = Pipe(copy.deepcopy(layers), [1] * 4, devices=devices, chunks=8)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found = []
        for x, target in data:
            optimizer.zero_grad()
            found.append(pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule))
            optimizer.step()
        return found

    expected = losses([acc.device()] * 4)
    for devices in (two_workers(), [Worker(acc.device()) for _ in range(4)]):
        torch.testing.assert_close(losses(devices), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_host_never_waits(devices, schedule):
    """Not for the device: not even with weights that are tensors, and gradients to be scaled."""

    def loss_fn(output, target):
        return F.mse_loss(output, target), (target > 0).sum()

    pipe = Pipe(model(), BALANCE, devices=DEVICES[devices](), chunks=CHUNKS)
    x, target = batch()

    def step() -> None:
        pipe.train_batch(x, target, loss_fn=loss_fn, schedule=schedule)
        pipe.eval_batch(x, target, loss_fn=loss_fn)

    step()  # streams are made, and autograd's threads
    with acc.no_waits():
        step()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_trace_has_times_of_the_device(devices, schedule):
    """The host is done long before: it would see next to nothing of what a sleep takes."""

    class Slow(nn.Module):
        def forward(self, x):
            acc.sleep(5.0)
            return x

    layers = nn.Sequential(*(nn.Sequential(Slow(), Residual(WIDTH)) for _ in range(4)))
    pipe = Pipe(layers, [1] * 4, devices=DEVICES[devices](), chunks=CHUNKS, checkpoint="always")
    x, target = batch()
    pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
    begin, end = (torch.Event(acc.device(), enable_timing=True) for _ in range(2))
    sleep = math.inf  # the shortest of some: a host that is busy wakes up late
    for _ in range(5):
        begin.record()
        acc.sleep(5.0)
        end.record()
        end.synchronize()
        sleep = min(sleep, begin.elapsed_time(end) / 1e3)
    with pipe.trace() as trace:
        pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
    spans = trace.spans
    for kind in ("forward", "recompute"):
        durations = [span.end - span.start for span in spans if span.kind == kind]
        assert len(durations) == 4 * CHUNKS
        assert min(durations) > sleep / 2
    for i in range(CHUNKS):  # each stage after the one before
        row = sorted((s for s in spans if s.kind == "forward" and s.i == i), key=lambda s: s.j)
        for earlier, later in itertools.pairwise(row):
            assert earlier.end <= later.end


def peak(schedule: str, devices: list[Worker], chunks: int) -> int:
    width = acc.sized(512, 64)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.Tanh())]
    pipe = Pipe(
        nn.Sequential(*layers), [4] * 4, devices=devices, chunks=chunks, checkpoint="never"
    )  # fmt: skip
    rows = chunks * acc.sized(2048, 64)
    x, target = (torch.randn(rows, width, device=acc.device()) for _ in range(2))
    for _ in range(2):
        pipe.zero_grad()
        found: list[int] = []
        with acc.peak_above(acc.device(), found):
            pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
    return found[0]


def test_memory_of_1f1b_does_not_grow_with_the_number_of_micro_batches():
    """On one worker nothing but the order decides what is alive; micro-batches are of one size."""
    one = Worker(acc.device())
    few, many = (peak("1f1b", [one] * 4, chunks) for chunks in (8, 32))
    assert many < 1.5 * few
    assert peak("gpipe", [one] * 4, 32) > 2 * many


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_memory_goes_back(devices, schedule):
    pipe = Pipe(model(), BALANCE, devices=DEVICES[devices](), chunks=CHUNKS)
    x, target = batch(64)

    def memory() -> int:
        pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
        pipe.zero_grad()
        return acc.allocated()

    for _ in range(3):
        start = memory()
    assert [memory() for _ in range(10)] == [start] * 10


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_autocast_with_a_scaler(devices, schedule):
    """Some steps of mixed precision: losses fall with those of the plain model."""
    plain = model().to(acc.device())
    pipe = Pipe(copy.deepcopy(plain), BALANCE, devices=DEVICES[devices](), chunks=CHUNKS)
    x, target = batch()

    def train(module, step) -> list[float]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler(acc.kind(), init_scale=2.0**10)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast(acc.kind(), dtype=torch.float16):
                losses.append(step(scaler).item())
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**10
        return losses

    def plainly(scaler):
        loss = torch.zeros((), device=acc.device())
        for piece, goal in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            part = F.mse_loss(plain(piece), goal) / CHUNKS
            scaler.scale(part).backward()
            loss += part.detach()
        return loss

    def piped(scaler):
        return pipe.train_batch(
            x, target, loss_fn=F.mse_loss, schedule=schedule, grad_scaler=scaler
        )  # fmt: skip

    expected = train(plain, plainly)
    assert expected[-1] < expected[0]
    assert train(pipe, piped) == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_failure_puts_gradients_back(schedule):
    pipe = Pipe(model(), BALANCE, devices=two_workers(), chunks=CHUNKS)
    x, target = batch()
    pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
    before = [p.grad.clone() for p in pipe.parameters()]
    calls = itertools.count()

    def fails(output, target):
        if next(calls) == CHUNKS - 1:
            raise ValueError("as it was told")
        return F.mse_loss(output, target)

    with pytest.raises(ValueError, match="as it was told"):
        pipe.train_batch(x, target, loss_fn=fails, schedule=schedule)
    for p, grad in zip(pipe.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)
