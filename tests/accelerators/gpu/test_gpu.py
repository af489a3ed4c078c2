"""What only an accelerator shows. Two workers made by hand put a pipeline on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from syncpipe.runtime.worker import Worker
from tests.support import accelerator as acc
from tests.support.running import Residual
from tests.support.skips import Receive, Send

pytestmark = pytest.mark.gpu

MODES = ["always", "except_last", "never"]
WIDTH = 64


DEVICES = {
    "two workers": lambda: [Worker(acc.device()), Worker(acc.device())],
    "one worker": lambda: [acc.device(), acc.device()],
    "cpu first": lambda: ["cpu", acc.device()],
    "cpu last": lambda: [acc.device(), "cpu"],
    "cpu and a private worker": lambda: ["cpu", Worker(acc.device())],
}


@pytest.fixture(autouse=True)
def precise():
    """Full single precision, so that a comparison says something."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def model() -> nn.Sequential:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(Send(), first, nn.ReLU(), Residual(WIDTH), Receive(), last)


def step(run, x):
    """One forward and backward: the output, the input's gradient, the parameters' gradients."""
    x = x.detach().clone().requires_grad_()
    y = run(x)
    (y * torch.linspace(0.5, 1.5, y.numel(), device=y.device).view_as(y)).sum().backward()
    return y.detach(), x.grad


def check(module, pipe, x, **tolerance) -> None:
    """Compares a pipe, on whatever devices, with the plain model on the first accelerator."""
    module = copy.deepcopy(module).to(acc.device())
    chunks = pipe.chunks
    y, gx = step(lambda x: torch.cat([module(c) for c in x.chunk(chunks)]), x.to(acc.device()))
    pipe.zero_grad()
    z, gz = step(pipe, x.to(pipe.devices[0]))
    torch.testing.assert_close(z.cpu(), y.cpu(), **tolerance)
    torch.testing.assert_close(gz.cpu(), gx.cpu(), **tolerance)
    for p, q in zip(pipe.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu(), **tolerance)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("devices", DEVICES)
def test_same_result(devices, chunks, checkpoint):
    plain = model()
    pipe = Pipe(
        copy.deepcopy(plain), [3, 3], devices=DEVICES[devices](), chunks=chunks,
        checkpoint=checkpoint,
    )  # fmt: skip
    for _ in range(3):
        check(plain, pipe, torch.randn(16, WIDTH), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("private", [False, True])
def test_stream_of_the_caller(checkpoint, private):
    """All on a stream of the caller's own, behind work that takes a while."""
    plain = model()
    devices = DEVICES["two workers" if private else "one worker"]()
    pipe = Pipe(copy.deepcopy(plain), [3, 3], devices=devices, chunks=4, checkpoint=checkpoint)
    plain.to(acc.device())
    source = torch.randn(acc.sized(512, 16), WIDTH, device=acc.device())
    expected = torch.cat([plain(c) for c in source.chunk(4)]).detach()
    acc.synchronize()
    for _ in range(5):
        with torch.Stream(device=acc.device()):
            x = torch.zeros_like(source)
            acc.sleep()
            x.copy_(source)
            y = pipe(x)
            with torch.no_grad():
                x.fill_(float("nan"))  # must wait until the pipe has read it
            result = y.detach().clone()
            del y
        acc.synchronize()
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_stress_of_two_workers():
    """Wide layers and many micro-batches: a missing wait would show in some of the runs."""
    width = acc.sized(1024, 64)
    plain = nn.Sequential(*(Residual(width) for _ in range(4)))
    devices = [Worker(acc.device()) for _ in range(4)]
    pipe = Pipe(copy.deepcopy(plain), [1] * 4, devices=devices, chunks=8)
    for _ in range(10):
        check(plain, pipe, torch.randn(acc.sized(256, 64), width), rtol=1e-3, atol=1e-3)


def peak(checkpoint: str) -> int:
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())]
    pipe = Pipe(
        nn.Sequential(*layers), [8, 8], devices=[acc.device(), acc.device()], chunks=4,
        checkpoint=checkpoint,
    )  # fmt: skip
    x = torch.randn(acc.sized(32768, 512), 256, device=acc.device())
    pipe(x).sum().backward()
    pipe.zero_grad()
    found: list[int] = []
    with acc.peak_above(acc.device(), found):
        pipe(x).sum().backward()
    return found[0]


def test_rematerialization_saves_memory():
    never, except_last, always = (peak(mode) for mode in ("never", "except_last", "always"))
    assert except_last < never
    assert always < never


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_memory_goes_back(devices, checkpoint):
    pipe = Pipe(model(), [3, 3], devices=DEVICES[devices](), chunks=4, checkpoint=checkpoint)
    x = torch.randn(64, WIDTH, device=acc.device())

    def memory() -> int:
        pipe(x).sum().backward()
        pipe.zero_grad()
        return acc.allocated()

    for _ in range(3):
        start = memory()
    assert [memory() for _ in range(10)] == [start] * 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("checkpoint", MODES)
def test_autocast(dtype, checkpoint):
    if dtype is torch.bfloat16 and acc.kind() == "cuda" and not torch.cuda.is_bf16_supported():
        pytest.skip("this GPU has no bfloat16")
    plain = model()
    devices = [Worker(acc.device()), Worker(acc.device())]
    pipe = Pipe(copy.deepcopy(plain), [3, 3], devices=devices, chunks=4, checkpoint=checkpoint)
    plain.to(acc.device())
    x = torch.randn(16, WIDTH, device=acc.device())
    with torch.autocast(acc.kind(), dtype=dtype):
        y, z = plain(x), pipe(x)
    assert z.dtype == y.dtype == dtype
    y.float().sum().backward()
    z.float().sum().backward()  # outside: a recomputation has to bring autocast back
    torch.testing.assert_close(z, y, rtol=2e-2, atol=2e-2)
    for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=5e-2, atol=1e-1)


@pytest.mark.parametrize("devices", ["two workers", "one worker", "cpu first"])
def test_dropout_draws_the_same(devices):
    """The same numbers in each mode, and what is recomputed draws what was drawn before."""
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout()
    )
    results = []
    for checkpoint in MODES:
        pipe = Pipe(
            copy.deepcopy(layers), [3, 2], devices=DEVICES[devices](), chunks=4,
            checkpoint=checkpoint,
        )  # fmt: skip
        x = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH)
        torch.manual_seed(1)
        y, gx = step(pipe, x.to(pipe.devices[0]))
        results.append([y, gx, *(p.grad for p in pipe.parameters())])
        assert 0.3 < (y == 0).float().mean().item() < 0.7
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_deferred_batch_norm(devices):
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8))
    with torch.no_grad():  # whole mini-batches for the first layers' statistics
        expected = copy.deepcopy(plain[:2]).to(acc.device())
        x = torch.randn(32, 8, device=acc.device())
        expected(x)
    pipe = Pipe(
        copy.deepcopy(plain), [2, 2], devices=DEVICES[devices](), chunks=4, checkpoint="always",
        deferred_batch_norm=True,
    )  # fmt: skip
    pipe(x).sum().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        ours, theirs = getattr(pipe[1], name), getattr(expected[1], name)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_host_never_waits(devices, checkpoint):
    """Neither forward nor backward may wait for the device."""
    pipe = Pipe(model(), [3, 3], devices=DEVICES[devices](), chunks=4, checkpoint=checkpoint)
    x = torch.randn(16, WIDTH, device=acc.device())
    pipe(x).sum().backward()
    with acc.no_waits():
        pipe(x).sum().backward()


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("private", [False, True])
def test_several_devices(checkpoint, private):
    if acc.count() < 2:
        pytest.skip("needs two accelerators")
    names = [acc.device(k) for k in range(min(3, acc.count()))]
    devices = [Worker(name) for name in names] if private else names
    plain = model()
    balance = [3, 3] if len(names) == 2 else [2, 2, 2]
    pipe = Pipe(copy.deepcopy(plain), balance, devices=devices, chunks=4, checkpoint=checkpoint)
    for _ in range(5):
        check(plain, pipe, torch.randn(64, WIDTH), rtol=1e-4, atol=1e-5)
