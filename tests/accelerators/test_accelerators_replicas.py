"""Replicas on accelerators, real or simulated: copies, sums of gradients, results on one device."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.streams import same_memory
from syncpipe.runtime.worker import Worker
from tests.accelerators.four import ROWS, WAYS, WIDTH, data, expected, model, weighted
from tests.support import accelerator as acc

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]

#: Balance, replicas, devices.
SHAPES: dict[str, tuple[list[int], list[int], Any]] = {
    "first": ([3, 2, 2], [2, 1, 1], [0, 1, 2, 3]),
    "middle": ([3, 2, 2], [1, 2, 1], [0, 1, 2, 3]),
    "last": ([3, 2, 2], [1, 1, 2], [0, 1, 2, 3]),
    "hybrid": ([4, 3], [2, 2], [0, 1, 2, 3]),
    "data parallel": ([7], [4], [0, 1, 2, 3]),
    "in rounds": ([2, 2, 2, 1], [2, 2, 2, 2], [0, 1, 2, 3, 0, 1, 2, 3]),
    "three and one": ([4, 3], [3, 1], [3, 1, 0, 2]),
    "workers": ([4, 3], [2, 2], [0, 1, 2, 3]),
}
HELD: list[Any] = []
HOWS = ["pipe(x)", "gpipe", "1f1b", "zb_h1"]


def pipe_of(module: nn.Sequential, shape: str, **options: Any) -> Pipe:
    balance, replicas, devices = SHAPES[shape]
    worker = Worker if shape == "workers" else torch.device  # with streams of their own
    options = {"chunks": 6, "devices": [worker(acc.device(k)) for k in devices], **options}
    return Pipe(copy.deepcopy(module), balance, replicas=replicas, **options)


def stepped(pipe: nn.Module, how: str, x: Tensor, target: Tensor, loss_fn: Any) -> list[Tensor]:
    """A step of SGD; loss, gradients of the input and of parameters, and the parameters."""
    pipe.zero_grad()
    x = x.detach().clone().requires_grad_()
    if isinstance(pipe, Pipe) and how != "pipe(x)":
        loss = pipe.train_batch(x, target, loss_fn=loss_fn, schedule=how, verify=False)
    else:
        loss = loss_fn(pipe(x), target)
        loss.backward()
    found = [loss.detach(), x.grad, *(p.grad for p in pipe.parameters())]
    found = [tensor.to("cpu", copy=True) for tensor in found]
    acc.synchronize()
    # Autograd made them on streams of its own: they are there until they are read no more.
    HELD[:] = [p.grad for p in pipe.parameters()]
    with torch.no_grad():
        for p in pipe.parameters():
            p -= 0.1 * p.grad  # which is late for the next step
    return found


@pytest.mark.parametrize(
    ("shape", "checkpoint", "how"),
    [(shape, *way) for k, shape in enumerate(SHAPES) for way in WAYS[k % 2 :: 2]],
)
def test_training_equals_the_plain_model_whoever_is_late(shape, checkpoint, how):
    plain = model()
    pipes = [pipe_of(plain, shape, checkpoint=checkpoint) for _ in range(2)]
    x, target = data()
    there, answer = x.to(pipes[0].devices[0]), target.to(pipes[0].devices[-1])
    for _ in range(3):
        wanted = stepped(plain, how, x, target, nn.functional.mse_loss)
        ours = []
        for k, pipe in enumerate(pipes):
            with acc.late(seed=k):
                ours.append(stepped(pipe, how, there, answer, nn.functional.mse_loss))
        for a, b, right in zip(*ours, wanted, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, right)


@pytest.mark.parametrize("how", ["gpipe", "1f1b"])
@pytest.mark.parametrize("shape", ["first", "last", "data parallel"])
def test_losses_with_weights(shape, how):
    plain = model()
    x, target = data()
    pipe = pipe_of(plain, shape, chunks=4)
    right = expected(plain, x, target, weighted)
    with acc.late():
        pipe.zero_grad()
        given = x.to(pipe.devices[0]).requires_grad_()
        loss = pipe.train_batch(given, target, loss_fn=weighted, schedule=how, verify=False)
    found = [loss, given.grad, *(p.grad for p in pipe.parameters())]
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_on_the_last_device_and_parameters_on_the_first_of_their_stage(shape):
    plain = model()
    pipe = pipe_of(plain, shape)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=pipe.devices[0])
    with acc.late(), torch.no_grad():
        output = pipe(x)
        evaluated, loss = pipe.eval_batch(x), pipe.eval_batch(x, x.cpu(), loss_fn=weighted)
    assert output.device == evaluated.device == loss.device == pipe.devices[-1]
    assert torch.equal(output, evaluated)
    torch.testing.assert_close(output.cpu(), plain(x.cpu()).detach())
    first = 0
    for partition, count in zip(pipe.partitions, pipe.replicas, strict=True):
        for p in partition.parameters():
            assert same_memory(p.device, pipe.devices[first])
        first += count


def test_micro_batches_of_an_iterator():
    plain = model()
    x, target = data()
    for shape in ("first", "data parallel"):
        pipe = pipe_of(plain, shape, chunks=4)
        pairs = zip(x.chunk(4), target.chunk(4), strict=True)
        with acc.late():
            loss = pipe.train_batch(data_iter=pairs, loss_fn=nn.functional.mse_loss)
        torch.testing.assert_close(loss.cpu(), nn.functional.mse_loss(plain(x), target).detach())


def test_two_workers_on_one_device():
    plain, x = model(), data()[0]
    workers = [Worker(acc.device(1)), Worker(acc.device(1)), acc.device(0)]
    pipe = Pipe(copy.deepcopy(plain), [4, 3], replicas=[2, 1], devices=workers, chunks=4)
    right = stepped(plain, "pipe(x)", x, x, nn.functional.mse_loss)
    for how in HOWS:
        pipe.load_state_dict(plain.state_dict())
        with torch.no_grad():
            for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
                p += 0.1 * q.grad.to(p.device)  # as before its step
        with acc.late():
            there = x.to(pipe.devices[0]), x.to(pipe.devices[-1])
            found = stepped(pipe, how, *there, nn.functional.mse_loss)
        for ours, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_deferred_statistics_are_those_of_one_device():
    norm = nn.BatchNorm1d(WIDTH)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)).double()
    x, found = data()[0], []
    for replicas in (1, 4):
        devices = [acc.device(k) for k in range(replicas)]
        pipe = Pipe(
            copy.deepcopy(plain), [3], replicas=replicas, devices=devices, chunks=4,
            deferred_batch_norm=True,
        )  # fmt: skip
        for how in HOWS:
            with acc.late():
                stepped(pipe, how, x.to(devices[0]), x.to(devices[-1]), nn.functional.mse_loss)
        found.append([buffer.cpu() for buffer in pipe.buffers()])
    torch.testing.assert_close(*found)


def test_nothing_stays_of_a_step():
    pipe = pipe_of(model(), "hybrid", checkpoint="except_last")
    x, target = data()
    x, target = x.to(pipe.devices[0]), target.to(pipe.devices[-1])
    for how in HOWS:
        for _ in range(3):
            stepped(pipe, how, x, target, nn.functional.mse_loss)
        before = acc.allocated()
        for _ in range(10):
            stepped(pipe, how, x, target, nn.functional.mse_loss)
        assert acc.allocated() == before


def test_copies_are_freed_with_the_replicas():
    pipe = pipe_of(model(), "hybrid")
    x, target = data()
    x, target = x.to(pipe.devices[0]), target.to(pipe.devices[-1])
    stepped(pipe, "1f1b", x, target, nn.functional.mse_loss)
    pipe.zero_grad()
    HELD.clear()
    assert acc.allocated(acc.device(3)) > 0
    pipe.replicas = 1
    gc.collect()
    assert acc.allocated(acc.device(2), acc.device(3)) <= 2 * (x.nbytes + target.nbytes)


def test_activations_go_to_the_host_from_each_replica():
    plain = model()
    x, target = data()
    for how in ("pipe(x)", "1f1b"):
        found = []
        for checkpoint in ("never", "offload"):
            pipe = pipe_of(plain, "hybrid", checkpoint=checkpoint)
            there = x.to(pipe.devices[0]), target.to(pipe.devices[-1])
            with acc.late():
                found.append(stepped(pipe, how, *there, nn.functional.mse_loss))
        assert all(map(torch.equal, *found))
