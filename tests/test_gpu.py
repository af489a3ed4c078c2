"""What only an accelerator shows. Two workers made by hand put a pipeline on one GPU."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from syncpipe.runtime.worker import Worker
from syncpipe.skip import pop, skippable, stash

pytestmark = pytest.mark.gpu

MODES = ["always", "except_last", "never"]
WIDTH = 64


@skippable(stash=["skip"])
class Remember(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Add(nn.Module):
    def forward(self, x):
        return x + (yield pop("skip"))


class Residual(nn.Module):
    """Uses its input twice, so that gradients meet where the input came from."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


DEVICES = {
    "two workers": lambda: [Worker("cuda:0"), Worker("cuda:0")],
    "one worker": lambda: ["cuda:0", "cuda:0"],
    "cpu first": lambda: ["cpu", "cuda:0"],
    "cpu last": lambda: ["cuda:0", "cpu"],
    "cpu and a private worker": lambda: ["cpu", Worker("cuda:0")],
}


@pytest.fixture(autouse=True)
def precise():
    """Full single precision, so that a comparison says something."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def model() -> nn.Sequential:
    return nn.Sequential(
        Remember(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), Residual(), Add(), nn.Linear(WIDTH, WIDTH)
    )


def step(run, x):
    """One forward and backward: the output, the input's gradient, the parameters' gradients."""
    x = x.detach().clone().requires_grad_()
    y = run(x)
    (y * torch.linspace(0.5, 1.5, y.numel(), device=y.device).view_as(y)).sum().backward()
    return y.detach(), x.grad


def check(module, pipe, x, **tolerance) -> None:
    """Compares a pipe, on whatever devices, with the plain model on the first GPU."""
    module = copy.deepcopy(module).to("cuda:0")
    chunks = pipe.chunks
    y, gx = step(lambda x: torch.cat([module(c) for c in x.chunk(chunks)]), x.to("cuda:0"))
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
    devices = [Worker("cuda:0"), Worker("cuda:0")] if private else ["cuda:0", "cuda:0"]
    pipe = Pipe(copy.deepcopy(plain), [3, 3], devices=devices, chunks=4, checkpoint=checkpoint)
    plain.to("cuda:0")
    source = torch.randn(512, WIDTH, device="cuda:0")
    expected = torch.cat([plain(c) for c in source.chunk(4)]).detach()
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.zeros_like(source)
            torch.cuda._sleep(20_000_000)
            x.copy_(source)
            y = pipe(x)
            with torch.no_grad():
                x.fill_(float("nan"))  # must wait until the pipe has read it
            result = y.detach().clone()
            del y
        torch.cuda.synchronize()
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_stress_of_two_workers():
    """Wide layers and many micro-batches: a missing wait would show in some of the runs."""
    plain = nn.Sequential(*(Residual(1024) for _ in range(4)))
    devices = [Worker("cuda:0") for _ in range(4)]
    pipe = Pipe(copy.deepcopy(plain), [1] * 4, devices=devices, chunks=8)
    for _ in range(10):
        check(plain, pipe, torch.randn(256, 1024), rtol=1e-3, atol=1e-3)


def peak(checkpoint: str) -> int:
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())]
    pipe = Pipe(
        nn.Sequential(*layers), [8, 8], devices=["cuda:0", "cuda:0"], chunks=4,
        checkpoint=checkpoint,
    )  # fmt: skip
    x = torch.randn(32768, 256, device="cuda:0")
    pipe(x).sum().backward()
    pipe.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pipe(x).sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_rematerialization_saves_memory():
    never, except_last, always = (peak(mode) for mode in ("never", "except_last", "always"))
    assert except_last < never
    assert always < never


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", ["two workers", "one worker"])
def test_memory_goes_back(devices, checkpoint):
    pipe = Pipe(model(), [3, 3], devices=DEVICES[devices](), chunks=4, checkpoint=checkpoint)
    x = torch.randn(64, WIDTH, device="cuda:0")

    def memory() -> int:
        pipe(x).sum().backward()
        pipe.zero_grad()
        torch.cuda.synchronize()
        # What was recorded on other streams is freed for good at the next allocation.
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    for _ in range(3):
        start = memory()
    assert [memory() for _ in range(10)] == [start] * 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("checkpoint", MODES)
def test_autocast(dtype, checkpoint):
    if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        pytest.skip("this GPU has no bfloat16")
    plain = model()
    devices = [Worker("cuda:0"), Worker("cuda:0")]
    pipe = Pipe(copy.deepcopy(plain), [3, 3], devices=devices, chunks=4, checkpoint=checkpoint)
    plain.to("cuda:0")
    x = torch.randn(16, WIDTH, device="cuda:0")
    with torch.autocast("cuda", dtype=dtype):
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
        expected = copy.deepcopy(plain[:2]).to("cuda:0")
        x = torch.randn(32, 8, device="cuda:0")
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
    x = torch.randn(16, WIDTH, device="cuda:0")
    pipe(x).sum().backward()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pipe(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("private", [False, True])
def test_several_gpus(checkpoint, private):
    names = [f"cuda:{k}" for k in range(min(3, torch.cuda.device_count()))]
    devices = [Worker(name) for name in names] if private else names
    plain = model()
    balance = [3, 3] if len(names) == 2 else [2, 2, 2]
    pipe = Pipe(copy.deepcopy(plain), balance, devices=devices, chunks=4, checkpoint=checkpoint)
    for _ in range(5):
        check(plain, pipe, torch.randn(64, WIDTH), rtol=1e-4, atol=1e-5)


SANITIZED = """
    import sys
    import torch
    from torch import nn
    from torch.cuda import _sanitizer
    from syncpipe import Pipe
    from syncpipe.runtime.worker import Worker

    assert _sanitizer.cuda_sanitizer.enabled
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    pipe = Pipe(
        nn.Sequential(*layers), [4, 4], devices=[Worker("cuda:0"), Worker("cuda:0")], chunks=4,
        checkpoint=sys.argv[1],
    )
    if sys.argv[2] == "broken":
        from syncpipe.runtime.streams import Lane
        Lane.receive = lambda self, event, tensors: None
    for _ in range(3):
        x = torch.randn(16, 32, device="cuda:0", requires_grad=True)
        pipe(x).sum().backward()
    print("finished")
"""


def sanitized(checkpoint: str, how: str) -> subprocess.CompletedProcess[str]:
    """A step under the sanitizer, whose mode is active here, so that the pipe runs inline."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SANITIZED), checkpoint, how],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("checkpoint", MODES)
def test_sanitizer(checkpoint):
    done = sanitized(checkpoint, "whole")
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert "data race" not in done.stderr


def test_sanitizer_sees_a_missing_wait():
    done = sanitized("never", "broken")
    assert done.returncode != 0
    assert "data race" in done.stderr or "CUDASanitizerErrors" in done.stderr, done.stderr
