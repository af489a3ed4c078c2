"""Accelerators, real or simulated: the results are the plain model's on the CPU.

Layouts are of four; where there are fewer, one stands for several, with workers of its own.
"""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.streams import AcceleratorStreams
from tests import simulated
from tests.accelerators.four import (
    CHUNKS,
    LAYOUTS,
    MODES,
    WIDTH,
    assert_close,
    data,
    expected,
    model,
    pipe_of,
    trained,
    weighted,
)
from tests.support import accelerator as acc
from tests.support.running import Residual

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", ["host at the ends", "in turns"])
def test_weights_of_another_device(layout):
    """A weight on an accelerator, of a loss on the host or the other way round."""
    plain = model()

    def elsewhere(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        other = acc.device(2) if output.device.type == "cpu" else torch.device("cpu")
        return F.mse_loss(output, target), (target.to(other) > 0).double().sum()

    pipe = pipe_of(plain, layout)
    x, target = data()
    right = expected(plain, x, target, weighted)
    for k in range(5):
        with acc.late(k):
            assert_close(trained(pipe, x, target, elsewhere), right)


class Index(nn.Module):
    """Makes a tensor on the current device, as layers with kernels of their own do."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return x * 2
        here = torch.device(x.device.type, torch.accelerator.current_device_index())
        return x * torch.full((), 2.0, dtype=x.dtype, device=here)


@pytest.mark.parametrize("layout", ["four", "interleaved", "in turns"])
def test_the_device_of_a_stage_is_current(layout):
    plain = nn.Sequential(Index(), nn.Linear(WIDTH, WIDTH), Index(), Index()).double()
    for checkpoint in MODES:
        pipe = pipe_of(plain, layout, checkpoint=checkpoint)
        x, target = data()
        assert_close(trained(pipe, x, target, F.mse_loss), expected(plain, x, target, F.mse_loss))
        pipe(x.to(pipe.devices[0])).sum().backward()
        assert torch.accelerator.current_device_index() == 0


class Breaks(nn.Module):
    """Fails when it is told to, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""
        self.left = 0

    def come(self, when: str) -> None:
        if when == self.when:
            self.left -= 1
            if self.left == 0:
                raise ValueError(f"in {when}")

    def forward(self, x: Tensor) -> Tensor:
        self.come("forward")
        if x.requires_grad:
            x = x * 1
            x.register_hook(lambda _: self.come("backward"))
        return x


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("layout", ["four", "workers", "in turns"])
def test_an_exception_on_device_2(layout, schedule, where):
    """It arrives as itself, gradients are as before the call, and the pipe works again."""
    plain = nn.Sequential(*model()[1:3], Breaks(), nn.Linear(WIDTH, WIDTH).double())
    pipe = pipe_of(plain, layout, checkpoint="never")
    x, target = data()
    right = expected(plain, x, target, weighted)
    assert_close(trained(pipe, x, target, weighted, schedule=schedule), right)
    before = [p.grad.clone() for p in pipe.parameters()]
    breaks = pipe[2]
    for k in range(1, CHUNKS + 1):
        breaks.when, breaks.left = where, k

        def loss_fn(output: Tensor, target: Tensor) -> Any:
            breaks.come("loss")
            return weighted(output, target)

        with acc.late(k), pytest.raises(ValueError, match=f"in {where}"):
            pipe.train_batch(x.to(pipe.devices[0]), target, loss_fn=loss_fn, schedule=schedule)
        for p, grad in zip(pipe.parameters(), before, strict=True):
            assert torch.equal(p.grad, grad)
        if where != "loss":
            breaks.left = k
            with pytest.raises(ValueError, match=f"in {where}"):
                pipe(x.to(pipe.devices[0])).sum().backward()
            # ``backward()`` leaves what it has added, and the workers' streams may be adding still.
            for device in pipe.devices:
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
            for p, grad in zip(pipe.parameters(), before, strict=True):
                p.grad = grad.clone()
    breaks.when = ""
    assert_close(trained(pipe, x, target, weighted, schedule=schedule), right)


ACCELERATORS = ["four", "backwards", "interleaved", "workers", "two workers on one"]


def test_dropout_draws_the_same_everywhere():
    """Whatever the devices, the balance and the mode; and in the same run again."""
    plain = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Tanh(), nn.Dropout(), nn.Linear(WIDTH, WIDTH)
    ).double()
    x, target = data()
    results = []
    for layout in ACCELERATORS:
        for checkpoint, balance in zip(
            MODES, ([2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 1, 2]), strict=True
        ):
            pipe = Pipe(
                copy.deepcopy(plain), balance, devices=LAYOUTS[layout](), chunks=CHUNKS,
                checkpoint=checkpoint,
            )  # fmt: skip
            with acc.late():
                torch.manual_seed(3)
                results.append([t.cpu() for t in trained(pipe, x, target, F.mse_loss)])
                torch.manual_seed(3)
                pipe.zero_grad()
                given = x.to(pipe.devices[0]).requires_grad_()
                loss = F.mse_loss(pipe(given), target.to(pipe.devices[-1]))
                loss.backward()
                found = [loss.detach(), given.grad, *(p.grad for p in pipe.parameters())]
                results.append([t.cpu() for t in found])
    for result in results[1:]:
        assert_close(result, results[0])


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norm(layout, deferred):
    """Running statistics: of each micro-batch, or (deferred) of the mini-batch."""
    plain = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH)
    ).double()
    for checkpoint in MODES:
        pipe = pipe_of(plain, layout, checkpoint=checkpoint, deferred_batch_norm=deferred)
        other = copy.deepcopy(plain)
        for k in range(2):
            x, _ = data()
            with torch.no_grad():
                for piece in x.chunk(1 if deferred else CHUNKS):
                    other[:2](piece)
            with acc.late(k):
                pipe.train_batch(x.to(pipe.devices[0]), loss_fn=torch.sum)
                pipe.eval()
                pipe.eval_batch(x.to(pipe.devices[0]))
                pipe.train()
            for ours, theirs in zip(pipe[1].buffers(), other[1].buffers(), strict=True):
                torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_h1"])
def test_autocast(schedule, checkpoint):
    plain = nn.Sequential(*(Residual(WIDTH) for _ in range(4)))
    pipe = pipe_of(plain, "four", checkpoint=checkpoint)
    dtype = torch.float16 if schedule == "1f1b" else torch.bfloat16
    dtypes = []
    for layer in pipe:
        layer.linear.register_forward_hook(lambda *args: dtypes.append(args[-1].dtype))
    plain.to(acc.device())
    x, target = (t.float().to(acc.device()) for t in data())
    with torch.autocast(acc.kind(), dtype=dtype):
        loss = sum(
            F.mse_loss(plain(piece), goal) / CHUNKS
            for piece, goal in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
        )
        if schedule is not None:
            pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
        else:
            ours = F.mse_loss(pipe(x), target.to(acc.device(3)))
    if schedule is None:
        ours.backward()  # outside: a recomputation has to bring autocast back
    loss.backward()
    assert {*dtypes} == {dtype}
    for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu(), rtol=2e-2, atol=1e-3)


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd, one by one": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adam, together": functools.partial(torch.optim.Adam, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", ["four", "workers", "in turns"])
def test_optimizers(layout, name):
    """Some steps, with clipped gradients and no wait in between."""
    plain = model()
    pipe = pipe_of(plain, layout)
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](pipe.parameters())
    with acc.late():
        for _ in range(3):
            x, target = data()
            ours.zero_grad()
            pipe.train_batch(x.to(pipe.devices[0]), target, loss_fn=weighted)
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
            ours.step()
            for p, grad in zip(
                plain.parameters(), expected(plain, x, target, weighted)[2:], strict=True
            ):
                p.grad = grad
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
        assert_close([p.detach() for p in pipe.parameters()], [*plain.parameters()])


class OwnStream(nn.Module):
    """A linear layer on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stream: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            y: Tensor = self.linear(x)
            return y
        here = torch.accelerator.current_stream(x.device)
        self.stream = self.stream or torch.Stream(device=x.device)
        self.stream.wait_stream(here)
        x.record_stream(self.stream)
        with AcceleratorStreams(x.device).use(self.stream):
            y = self.linear(x)
        here.wait_stream(self.stream)
        y.record_stream(here)
        return y


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2"])
def test_weight_gradients_of_a_layer_with_a_stream_of_its_own(schedule):
    plain = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), OwnStream(), Residual(WIDTH), nn.Linear(WIDTH, WIDTH)
    ).double()
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    (plain(x) ** 2).mean().backward()
    wanted = [p.grad for p in plain.parameters()]
    for seed in range(6):
        devices = [acc.device(0), acc.device(1)]
        pipe = Pipe(copy.deepcopy(plain), [3, 1], devices=devices, chunks=3, checkpoint="never")
        pipe.zero_grad()
        late = simulated.delays(0.5, 0.5, seed=seed) if simulated.loaded() else nullcontext()
        with late:
            pipe.train_batch(x.to(devices[0]), loss_fn=lambda y: (y**2).mean(), schedule=schedule)
        for p, grad in zip(pipe.parameters(), wanted, strict=True):
            assert p.grad is not None
            assert_close(p.grad.cpu(), grad)
