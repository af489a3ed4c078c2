"""Accelerators, real or simulated: the results are the plain model's on the CPU.

Layouts are of four; where there are fewer, one stands for several, with workers of its own.
"""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from tests.accelerators.four import (
    CHUNKS,
    LAYOUTS,
    MODES,
    ROWS,
    WIDTH,
    OwnStream,
    assert_close,
    data,
    expected,
    model,
    pipe_of,
    step,
    trained,
)
from tests.support import accelerator as acc
from tests.support.running import Residual
from tests.support.watched import Fails, numbered
from tests.training.failures.failing import Grads

pytestmark = pytest.mark.gpu


def masked(output: Tensor, target: Tensor) -> Tensor:
    """A mean over what is not masked; of a micro-batch without any it is 0 / 0."""
    return F.cross_entropy(output, target, reduction="sum") / counted(target)


def counted(target: Tensor) -> Tensor:
    return (target != -100).sum()


def elsewhere(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The weight is on an accelerator, of a loss on the host, or the other way round."""
    other = acc.device(2) if output.device.type == "cpu" else torch.device("cpu")
    return masked(output, target), counted(target.to(other))


WEIGHED: dict[str, dict[str, Any]] = {
    "known": {"loss_fn": F.cross_entropy},
    "weight": {"loss_fn": masked, "weight": counted},
    "with the loss": {"loss_fn": lambda y, t: (masked(y, t), counted(t))},
    "elsewhere": {"loss_fn": elsewhere},
}


@pytest.mark.parametrize("at", [0, -1], ids=["target on the first", "target on the last"])
@pytest.mark.parametrize(
    ("layout", "way"),
    [*product(["four"], WEIGHED), *product(["host at the ends", "in turns"], ["elsewhere"])],
)
def test_masked_losses(layout, way, at):
    """Nobody waits for their weights, but where these are made elsewhere."""
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    pipe, x, target = pipe_of(plain, layout), data()[0].requires_grad_(), torch.arange(ROWS) % WIDTH
    target[[2, 3, 4, 5, 7]] = -100
    loss = F.cross_entropy(plain(x), target)
    loss.backward()
    there, target = x.to(pipe.devices[0]), target.to(pipe.devices[at])
    for _ in range(2):
        with nullcontext() if way == "elsewhere" else acc.no_waits():
            found = trained(pipe, there, target, verify=False, **WEIGHED[way])
        assert_close(found, [loss.detach(), x.grad, *(p.grad for p in plain.parameters())])


@pytest.mark.parametrize(
    ("schedule", "place"),
    [
        *product(["pipe(x)", "gpipe", "1f1b", "zb_h1"], ["forward", "backward"]),
        *product(["gpipe", "1f1b", "zb_h1"], ["loss"]),
    ],
)
@pytest.mark.parametrize("layout", ["four", "workers", "in turns"])
def test_an_exception_on_device_2(layout, schedule, place):
    """It arrives as itself, gradients are as before the call, and the pipe works again."""
    plain = nn.Sequential(*(Fails() for _ in range(4))).double()
    pipe = pipe_of(plain, layout, checkpoint="never")
    x, target = numbered(CHUNKS).double(), torch.randn(2 * CHUNKS, 5, dtype=torch.float64)
    given, right = x.to(pipe.devices[0]), expected(plain, x, target, F.mse_loss)
    fails = pipe[2]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        fails.act("loss", int(output[0, 0]))
        return F.mse_loss(output, target)

    for i in range(CHUNKS):
        before = Grads(pipe)
        fails.error, fails.phase, fails.i = ValueError("bad"), place, i
        with pytest.raises(ValueError, match="bad"):
            step(pipe, given, target, loss_fn, schedule)
        acc.synchronize()
        assert before.unchanged()
        assert_close(trained(pipe, x, target, loss_fn, schedule), right)


ACCELERATORS = ["four", "backwards", "interleaved", "workers", "two workers on one"]


@pytest.mark.usefixtures("offloads_everything")
def test_dropout_draws_the_same_everywhere():
    """Whatever the devices, the balance and the mode; and in the same run again."""
    plain = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Tanh(), nn.Dropout(), nn.Linear(WIDTH, WIDTH)
    ).double()
    x, target = data()
    results = []
    balances = [2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 1, 2], [1, 1, 2, 1]
    modes = zip([*MODES, "offload"], balances, strict=True)
    for layout, (checkpoint, balance) in product(ACCELERATORS, [*modes]):
        pipe = pipe_of(plain, layout, checkpoint=checkpoint)
        pipe.balance = balance
        for how in ("1f1b", "pipe(x)"):
            torch.manual_seed(3)
            results.append([t.cpu() for t in trained(pipe, x, target, F.mse_loss, how)])
    for result in results[1:]:
        assert_close(result, results[0])


@pytest.mark.parametrize(
    ("layout", "deferred"), [*product(LAYOUTS, [False, True]), ("data parallel", True)]
)
def test_batch_norm(layout, deferred):
    """Running statistics: of each micro-batch, or (deferred) of the mini-batch."""
    plain = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH),
        *(nn.Identity() for _ in range(3)),
    ).double()  # fmt: skip
    for checkpoint in MODES:
        pipe = pipe_of(plain, layout, checkpoint=checkpoint, deferred_batch_norm=deferred)
        other = copy.deepcopy(plain)
        for _ in range(2):
            x, _ = data()
            with torch.no_grad():
                for piece in x.chunk(1 if deferred else CHUNKS):
                    other[:2](piece)
            pipe.train_batch(x.to(pipe.devices[0]), loss_fn=torch.sum)
            pipe.eval()
            pipe.eval_batch(x.to(pipe.devices[0]))
            pipe.train()
            for ours, theirs in zip(pipe[1].buffers(), other[1].buffers(), strict=True):
                torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("checkpoint", [*MODES, "offload"])
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_h1"])
@pytest.mark.usefixtures("offloads_everything")
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
@pytest.mark.parametrize(
    ("layout", "how", "scaled"),
    [
        *product(["four", "workers"], ["pipe(x)", "1f1b", "zb_h1"], [True]),
        *product(["workers", "in turns"], ["1f1b"], [False]),
    ],
)
def test_optimizers(layout, how, scaled, name):
    """Some steps, with clipped gradients and no wait in between.

    A scaler unscales gradients on all devices, and passes over a step that overflows on one.
    """
    plain = model().float()
    pipe = pipe_of(plain, layout)
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](pipe.parameters())
    scaler = torch.amp.GradScaler(acc.kind(), 16.0, growth_interval=100, enabled=scaled)
    for k in range(4):
        x, target = (tensor.float() for tensor in data())
        given, goal = x.to(pipe.devices[0]), target.to(pipe.devices[-1])
        overflows = scaled and k == 2
        goal[-1] *= float("inf") if overflows else 1
        ours.zero_grad()
        if how == "pipe(x)":
            scaler.scale(F.mse_loss(pipe(given), goal)).backward()
        else:
            step(pipe, given, goal, F.mse_loss, how, grad_scaler=scaler)
        scaler.unscale_(ours)
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
        scaler.step(ours)
        scaler.update()
        if scaled:
            # Gradients lie in memory of the workers' streams, which wait for the caller's when they
            # go on. Simulated memory is spoilt when it is handed back, not when it is used again.
            acc.synchronize()
            assert scaler.get_scale() == (8 if k >= 2 else 16)
        if overflows:
            continue
        grads = expected(plain, x, target, F.mse_loss)[2:]
        for p, grad in zip(plain.parameters(), grads, strict=True):
            p.grad = grad
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
    for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2"])
def test_weight_gradients_of_a_layer_with_a_stream_of_its_own(schedule):
    plain = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        OwnStream(nn.Linear(WIDTH, WIDTH)),
        Residual(WIDTH),
        nn.Linear(WIDTH, WIDTH),
    ).double()
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    (plain(x) ** 2).mean().backward()
    wanted = [p.grad for p in plain.parameters()]
    devices = [acc.device(0), acc.device(1)]
    pipe = Pipe(copy.deepcopy(plain), [3, 1], devices=devices, chunks=3, checkpoint="never")
    pipe.zero_grad()
    pipe.train_batch(x.to(devices[0]), loss_fn=lambda y: (y**2).mean(), schedule=schedule)
    assert_close([p.grad for p in pipe.parameters()], wanted)
