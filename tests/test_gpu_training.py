"""``train_batch`` on an accelerator. Two workers made by hand put a pipeline on one GPU."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe
from syncpipe.runtime.worker import Worker
from tests.test_gpu import WIDTH, Residual, model, precise

__all__ = ["precise"]  # a fixture

pytestmark = pytest.mark.gpu

MODES = ["always", "never"]
SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]
CHUNKS = 4
BALANCE = [2, 1, 1, 2]


def two_workers() -> list[Worker]:
    a, b = Worker("cuda:0"), Worker("cuda:0")
    return [a, b, a, b]


DEVICES = {
    "one worker": lambda: ["cuda:0"] * 4,
    "two workers": two_workers,
    "four workers": lambda: [Worker("cuda:0") for _ in range(4)],
    "cpu first": lambda: ["cpu", "cuda:0", "cpu", "cuda:0"],
}
SEVERAL = [f"cuda:{k % max(1, torch.cuda.device_count())}" for k in range(4)]


def reference(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """The loss and all gradients of the plain model, on the first GPU."""
    module = copy.deepcopy(module).to("cuda:0")
    x = x.detach().to("cuda:0").requires_grad_()
    pairs = zip(x.chunk(CHUNKS), target.to("cuda:0").chunk(CHUNKS), strict=True)
    losses = []
    for piece, goal in pairs:
        losses.append(F.mse_loss(module(piece), goal) / CHUNKS)
        losses[-1].backward(retain_graph=True)
    grads = [x.grad, *(p.grad for p in module.parameters())]
    return [torch.stack(losses).sum().detach(), *grads]


def check(module: nn.Module, pipe: Pipe, schedule: str, target_on: str) -> None:
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
    for target_on in ("cuda:0", "cpu", "cuda:0"):
        check(plain, pipe, schedule, target_on)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_gpus(schedule, private, checkpoint):
    workers = {name: Worker(name) if private else name for name in SEVERAL}
    plain = model()
    pipe = Pipe(
        copy.deepcopy(plain), BALANCE, devices=[workers[name] for name in SEVERAL], chunks=CHUNKS,
        checkpoint=checkpoint,
    )  # fmt: skip
    for target_on in ("cuda:0", SEVERAL[-1], "cpu"):
        check(plain, pipe, schedule, target_on)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_data_iter(schedule):
    plain = model()
    pipe = Pipe(copy.deepcopy(plain), BALANCE, devices=two_workers(), chunks=CHUNKS)
    x, target = torch.randn(16, WIDTH, device="cuda:0"), torch.randn(16, WIDTH, device="cuda:0")
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
    plain = nn.Sequential(*(Residual(512) for _ in range(4)))
    devices = two_workers() if private else ["cuda:0"] * 4
    pipe = Pipe(copy.deepcopy(plain), [1] * 4, devices=devices, chunks=CHUNKS)
    source, goal = (torch.randn(256, 512, device="cuda:0") for _ in range(2))
    expected = reference(plain, source, goal)
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            x, target = torch.zeros_like(source), torch.zeros_like(goal)
            torch.cuda._sleep(20_000_000)
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
        torch.cuda.synchronize()
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stress(schedule):
    """Wide layers, many micro-batches and a step: a missing wait would show in some of the runs."""
    layers = nn.Sequential(*(Residual(1024) for _ in range(4))).to("cuda:0")
    data = [torch.randn(2, 256, 1024, device="cuda:0") for _ in range(6)]

    def losses(devices) -> list[torch.Tensor]:
        pipe = Pipe(copy.deepcopy(layers), [1] * 4, devices=devices, chunks=8)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found = []
        for x, target in data:
            optimizer.zero_grad()
            found.append(pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule))
            optimizer.step()
        return found

    expected = losses(["cuda:0"] * 4)
    for devices in (two_workers(), [Worker("cuda:0") for _ in range(4)]):
        torch.testing.assert_close(losses(devices), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_host_never_waits(devices, schedule):
    """Not for the device: not even with weights that are tensors, and gradients to be scaled."""

    def loss_fn(output, target):
        return F.mse_loss(output, target), (target > 0).sum()

    pipe = Pipe(model(), BALANCE, devices=DEVICES[devices](), chunks=CHUNKS)
    x, target = torch.randn(16, WIDTH, device="cuda:0"), torch.randn(16, WIDTH, device="cuda:0")

    def step() -> None:
        pipe.train_batch(x, target, loss_fn=loss_fn, schedule=schedule)
        pipe.eval_batch(x, target, loss_fn=loss_fn)

    step()  # streams are made, and autograd's threads
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_trace_has_times_of_the_device(devices, schedule):
    """The host is done long before: it would see next to nothing of what a sleep takes."""

    class Slow(nn.Module):
        def forward(self, x):
            torch.cuda._sleep(10_000_000)
            return x

    layers = nn.Sequential(*(nn.Sequential(Slow(), Residual()) for _ in range(4)))
    pipe = Pipe(layers, [1] * 4, devices=DEVICES[devices](), chunks=CHUNKS, checkpoint="always")
    x, target = torch.randn(16, WIDTH, device="cuda:0"), torch.randn(16, WIDTH, device="cuda:0")
    pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    sleep = begin.elapsed_time(end) / 1e3
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
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh())]
    pipe = Pipe(
        nn.Sequential(*layers), [4] * 4, devices=devices, chunks=chunks, checkpoint="never"
    )  # fmt: skip
    x = torch.randn(chunks * 2048, 512, device="cuda:0")
    target = torch.randn(chunks * 2048, 512, device="cuda:0")
    for _ in range(2):
        pipe.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_1f1b_does_not_grow_with_the_number_of_micro_batches():
    """On one worker nothing but the order decides what is alive; micro-batches are of one size."""
    one = Worker("cuda:0")
    few, many = (peak("1f1b", [one] * 4, chunks) for chunks in (8, 32))
    assert many < 1.5 * few
    assert peak("gpipe", [one] * 4, 32) > 2 * many


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_memory_goes_back(devices, schedule):
    pipe = Pipe(model(), BALANCE, devices=DEVICES[devices](), chunks=CHUNKS)
    x, target = torch.randn(64, WIDTH, device="cuda:0"), torch.randn(64, WIDTH, device="cuda:0")

    def memory() -> int:
        pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
        pipe.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what was recorded on other streams is freed for good
        return torch.cuda.memory_allocated()

    for _ in range(3):
        start = memory()
    assert [memory() for _ in range(10)] == [start] * 10


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_autocast_with_a_scaler(devices, schedule):
    """Some steps of mixed precision: losses fall with those of the plain model."""
    plain = model().to("cuda:0")
    pipe = Pipe(copy.deepcopy(plain), BALANCE, devices=DEVICES[devices](), chunks=CHUNKS)
    x, target = torch.randn(16, WIDTH, device="cuda:0"), torch.randn(16, WIDTH, device="cuda:0")

    def train(module, step) -> list[float]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                losses.append(step(scaler).item())
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**10
        return losses

    def plainly(scaler):
        loss = torch.zeros((), device="cuda:0")
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
    x, target = torch.randn(16, WIDTH, device="cuda:0"), torch.randn(16, WIDTH, device="cuda:0")
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
