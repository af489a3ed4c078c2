"""What the processes of ``test_failures.py`` do: fail in one of them, and go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from syncpipe import Pipe
from syncpipe.distributed import data_parallel
from tests.distributed.equal import batches, differences, pipe_of, whole
from tests.support.running import on_gradient, raising

GUILTY = 1


def told(call: Callable[[], Any]) -> str:
    """The exception that a call raises, in words."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _interrupt(x: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(0.2)


def no_way_back(x: Tensor) -> Any:
    return on_gradient(x, raising(lambda: ArithmeticError("no way back")))


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "forward": raising(lambda: ArithmeticError("no way on")),
    "backward": no_way_back,
    "interrupt": _interrupt,
}


def recovers(how: str, stage: int, before: bool) -> tuple[str, bool, float]:
    """A call that fails in one process; what it raises, whether gradients are what they were.

    Args:
        how: it fails.
        stage: where.
        before: whether there are gradients.

    Returns:
        Also how far the gradients of the next call are from the plain model's.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    pipe, plain = pipe_of("layers", chunks=4)
    pairs = batches([8] * size, 1, masked=True)
    x, target = pairs[rank]
    if before:
        pipe.train_batch(x, target, loss_fn=F.cross_entropy)
        F.cross_entropy(plain(whole(pairs)[0]), whole(pairs)[1]).backward()
    kept = [None if p.grad is None else p.grad.clone() for p in plain.parameters()]
    given: dict[str, Any] = {"input": x, "target": target}
    if rank == GUILTY and how == "iterator":
        given = {"data_iter": zip(x.chunk(2), target.chunk(2), strict=True)}
    elif how in ("iterator", "loss"):
        given = {"data_iter": zip(x.chunk(4), target.chunk(4), strict=True)}
    losses: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        losses.append(0)  # at the second one all know what the mini-batch is assumed to weigh
        if rank == GUILTY and how == "loss" and len(losses) == 2:
            raise ArithmeticError("no loss")
        return F.cross_entropy(output, target)

    if rank == GUILTY and how == "target":
        given["target"] = target[1:]
    if rank == GUILTY and how in HOOKS:
        calls: list[int] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            calls.append(0)
            return HOOKS[how](output) if len(calls) == 3 or how == "backward" else None

        handle = pipe.partitions[stage].register_forward_hook(hook)
    told_us = told(lambda: pipe.train_batch(**given, loss_fn=loss_fn, verify=False))
    if rank == GUILTY and how in HOOKS:
        handle.remove()
    same = all(
        p.grad is None if grad is None else (p.grad - grad).abs().max() < 1e-12
        for p, grad in zip(pipe.parameters(), kept, strict=True)
    )
    pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    F.cross_entropy(plain(whole(pairs)[0]), whole(pairs)[1]).backward()
    return told_us, same, differences(pipe, plain)


def backward_recovers() -> tuple[str, float]:
    """The same for the backward of ``pipe(x)``."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    pipe, plain = pipe_of("layers", chunks=4)
    pairs = batches([8] * size, 1, masked=False)
    x, target = pairs[rank]
    handle = None
    if rank == GUILTY:
        handle = pipe[1].register_forward_hook(lambda *given: no_way_back(given[2]))
    told_us = told(lambda: F.cross_entropy(pipe(x), target).backward())
    if handle is not None:
        handle.remove()
    pipe.zero_grad()
    F.cross_entropy(pipe(x), target).backward()
    F.cross_entropy(plain(whole(pairs)[0]), whole(pairs)[1]).backward()
    return told_us, differences(pipe, plain)


def calls_that_differ(how: str) -> tuple[str, str]:
    """What is raised where processes do not make the same call; and by the next call."""
    rank = distributed.get_rank()
    pipe, _ = pipe_of("layers", chunks=4)
    x, target = batches([8] * 3, 1, masked=False)[rank]
    odd = rank == GUILTY

    def call() -> None:
        if odd and how == "backward":
            F.cross_entropy(pipe(x), target).backward()
            return
        if odd and how == "frozen":
            pipe[2].weight.requires_grad_(False)
        extra = nn.Parameter(torch.ones((), dtype=torch.float64))

        def loss(y: Tensor, t: Tensor) -> Tensor:
            mine = extra if odd and how == "found" else 1
            return F.cross_entropy(y, t) * mine

        accumulate = 2 if odd and how == "accumulate" else 1
        pipe.train_batch(x, target, loss_fn=loss, accumulate=accumulate)

    first = told(call)
    pipe.requires_grad_(True)
    how = ""
    return first, told(call)


def refused(how: str) -> str:
    """What a data-parallel pipe refuses, in all processes alike."""
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(8, 6)
    if how == "sparse":
        layers = nn.Sequential(nn.Embedding(5, 6, sparse=True), *layers)
        x = torch.randint(0, 5, (8,))
    if how in ("reentrant", "hidden"):

        class Again(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                y = checkpoint(super().forward, x, use_reentrant=True)
                return super().forward(y) if how == "reentrant" else y

        layers = nn.Sequential(nn.Linear(6, 6), Again(6, 6), nn.Linear(6, 3))
    devices = ["cpu:0", "cpu:1"]
    pipe = data_parallel(Pipe(layers, [1, len(layers) - 1], devices=devices, chunks=2), timeout=30)
    if how == "sparse":
        return told(lambda: pipe.train_batch(x, loss_fn=lambda y: y.mean()))
    if how == "create_graph":
        return told(lambda: pipe(x).mean().backward(create_graph=True))
    if how == "inside":
        outer = Pipe(nn.Sequential(nn.Linear(6, 6), pipe), [1, 1], devices=devices, chunks=2)
        return told(lambda: outer(x))
    if how == "nested":

        def loss(y: Tensor) -> Tensor:
            pipe.train_batch(x, loss_fn=lambda y: y.mean())
            return y.mean()

        return told(lambda: pipe.train_batch(x, loss_fn=loss))
    return told(lambda: pipe(x).mean().backward())


def models_that_differ(how: str) -> str:
    """What ``data_parallel`` raises."""
    odd = distributed.get_rank() == GUILTY
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    balance = [2, 1]
    if odd and how == "shape":
        layers[2] = nn.Linear(6, 4)
    if odd and how == "number":
        layers[2] = nn.Linear(6, 3, bias=False)
    if odd and how == "frozen":
        layers[1].weight.requires_grad_(False)
    if odd and how == "balance":
        balance = [1, 2]
    if odd and how == "buffer":
        layers[1].register_buffer("count", torch.zeros(2))
    if odd and how == "lazy":
        layers[1] = nn.LazyLinear(6)
    if odd and how == "sync":
        layers[1] = nn.SyncBatchNorm(6)
    pipe = Pipe(layers, balance, devices=["cpu:0", "cpu:1"])
    return told(lambda: data_parallel(pipe, timeout=30))


def does_not_come(waits: str) -> tuple[str, str]:
    """One process makes fewer calls than the others."""
    pipe, _ = pipe_of("layers", chunks=4, timeout=1)
    rank = distributed.get_rank()
    x, target = batches([8] * 3, 1, masked=False)[rank]
    pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    if rank == GUILTY:
        return "", ""

    def call() -> None:
        if waits == "train_batch":
            pipe.train_batch(x, target, loss_fn=F.cross_entropy)
        elif waits == "eval_batch":
            pipe.eval_batch(x, target, loss_fn=F.cross_entropy, global_loss=True)
        else:
            F.cross_entropy(pipe(x), target).backward()

    return told(call), told(call)


def interrupted_while_it_waits() -> tuple[str, float]:
    """Ctrl-C while another process is late."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    pipe, plain = pipe_of("layers", chunks=4)
    pairs = batches([8] * size, 1, masked=False)
    x, target = pairs[rank]
    store = distributed.distributed_c10d._get_default_store()
    key = f"interrupted/{pipe._averaging.processes._control.group_name}"
    if rank == GUILTY:
        store.wait([key])
        told_us = told(lambda: pipe.train_batch(x, target, loss_fn=F.cross_entropy))
    else:
        timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        told_us = told(lambda: pipe.train_batch(x, target, loss_fn=F.cross_entropy))
        store.set(key, "")
    pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    F.cross_entropy(plain(whole(pairs)[0]), whole(pairs)[1]).backward()
    return told_us, differences(pipe, plain)


def interrupted_while_gradients_are_summed() -> tuple[str, float]:
    """Ctrl-C in one process while its last bucket is on its way."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    pipe, plain = pipe_of("layers", chunks=4)
    pairs = batches([8] * size, 1, masked=False)
    processes = pipe._averaging.processes
    wait = processes.wait

    def interrupting(work: Any, tensor: Tensor) -> None:
        reduction, _ = pipe._averaging._current
        if any(tensor is flat for _, flat in reduction._flats):
            processes.wait = wait
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):  # until the caller has been told
                if not reduction.closed:
                    threading.Event().wait(0.1)
        wait(work, tensor)

    if rank == GUILTY:
        processes.wait = interrupting
    told_us = told(lambda: pipe.train_batch(*pairs[rank], loss_fn=F.cross_entropy))
    pipe.train_batch(*pairs[rank], loss_fn=F.cross_entropy)
    F.cross_entropy(plain(whole(pairs)[0]), whole(pairs)[1]).backward()
    return told_us, differences(pipe, plain)


def one_is_gone(how: str) -> tuple[str, str] | None:
    """One process is killed, or ends, between two calls."""
    rank = distributed.get_rank()
    pipe, _ = pipe_of("layers", chunks=4)
    x, target = batches([8] * 3, 1, masked=False)[rank]
    pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    if rank == GUILTY:
        if how == "killed":
            pipe.partitions[1].register_forward_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )
        elif how == "raises":
            raise SystemExit from OSError("the disk is full")
        else:
            raise SystemExit

    def call() -> None:
        pipe.train_batch(x, target, loss_fn=F.cross_entropy)

    return told(call), told(call)
