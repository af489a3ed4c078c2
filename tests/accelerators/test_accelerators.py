"""Accelerators, real or simulated: the results are the plain model's on the CPU.

Layouts are of four; where there are fewer, one stands for several, with workers of its own.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe, verify
from tests.accelerators.four import (
    CHUNKS,
    HOST,
    LAYOUTS,
    MODES,
    WIDTH,
    assert_close,
    data,
    model,
    pipe_of,
    step,
    trained,
    weighted,
)
from tests.support import accelerator as acc
from tests.support.running import Residual
from tests.support.skips import Receive, Send

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("layout", [*LAYOUTS, "data parallel"])
def test_deferred_batch_norm(layout):
    plain = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH),
        *(nn.Identity() for _ in range(3)),
    ).double()  # fmt: skip
    for checkpoint in MODES:
        pipe = pipe_of(plain, layout, checkpoint=checkpoint, deferred_batch_norm=True)
        other = copy.deepcopy(plain)
        for _ in range(2):
            x, _ = data()
            with torch.no_grad():
                other[:2](x)
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


@pytest.mark.parametrize("how", ["pipe(x)", "1f1b", "zb_h1"])
@pytest.mark.parametrize("layout", ["four", "workers"])
def test_an_optimizer_and_a_scaler(layout, how):
    """Some steps, with clipped gradients and no wait in between.

    A scaler unscales gradients on all devices, and passes over a step that overflows on one.
    """
    plain, batches, found = model().float(), [data() for _ in range(4)], []
    for where in (layout, HOST):
        pipe = pipe_of(plain, where)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(pipe.devices[0].type, 16.0, growth_interval=100)
        for k, (x, target) in enumerate(batches):
            given, goal = x.float().to(pipe.devices[0]), target.float().to(pipe.devices[-1])
            goal = torch.cat([goal[:-1], goal[-1:] * (float("inf") if k == 2 else 1)])
            optimizer.zero_grad()
            if how == "pipe(x)":
                scaler.scale(F.mse_loss(pipe(given), goal)).backward()
            else:
                step(pipe, given, goal, F.mse_loss, how, grad_scaler=scaler)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            # Gradients lie in memory of the workers' streams, which wait for the caller's when they
            # go on. Simulated memory is spoilt when it is handed back, not used again.
            acc.synchronize()
            assert scaler.get_scale() == (8 if k >= 2 else 16)
        found.append([p.detach().cpu() for p in pipe.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["pipe(x)", "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("layout", ["one", "two workers on one"])
def test_the_host_never_waits_for_the_device(layout, how):
    """Not even in a trace, with weights that are tensors, and gradients to be scaled."""
    for checkpoint in MODES:
        pipe = pipe_of(model(), layout, checkpoint=checkpoint)
        x, target = (t.to(acc.device(1)) for t in data())
        loss_fn = F.mse_loss if how == "pipe(x)" else weighted
        step(pipe, x, target, loss_fn, how)  # streams are made
        pipe.eval_batch(x, target, loss_fn=weighted)
        with pipe.trace() as trace, acc.no_waits():
            step(pipe, x, target, loss_fn, how)
            pipe.eval_batch(x, target, loss_fn=weighted)
        assert trace.spans


# --- a module like any other ---------------------------------------------------------------------


def test_the_default_is_all_accelerators(four_devices):
    pipe = Pipe(model(), [2, 2, 2, 1], chunks=CHUNKS)
    assert pipe.devices == four_devices
    numbers = Pipe(model(), [2, 2, 2, 1], devices=[3, 0, 1, 0], chunks=CHUNKS)
    assert numbers.devices == [four_devices[k] for k in (3, 0, 1, 0)]


@pytest.mark.parametrize("there", [0, "cpu"])
def test_verify_finds_nothing(there: int | str) -> None:
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    layers = [Send(), linears[0], nn.Dropout(), nn.BatchNorm1d(WIDTH), Receive(), linears[1]]
    devices = [acc.device(1), acc.device(2), "cpu:0" if there == "cpu" else acc.device(there)]
    pipe = Pipe(
        nn.Sequential(*layers), [2, 2, 2], devices=devices, chunks=4, deferred_batch_norm=True
    )
    x, y = torch.randn(12, WIDTH), torch.arange(12) % WIDTH
    before = [t.detach().clone() for t in [*pipe.parameters(), *pipe.buffers()]]
    state = torch.get_rng_state()
    report = verify(pipe, x.to(devices[0]), y, loss_fn=F.cross_entropy)
    assert report.pipe_ok, report
    assert report["1f1b"].comparisons["buffers"].status in ("equal", "rounding")
    assert "BatchNorm sees micro-batches" in str(report)
    after = [*pipe.parameters(), *pipe.buffers()]
    assert all(map(torch.equal, before, after))
    assert all(p.grad is None for p in pipe.parameters())
    assert torch.equal(state, torch.get_rng_state())
