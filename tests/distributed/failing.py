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

from syncpipe import Pipe
from syncpipe.distributed import data_parallel
from tests.distributed.equal import batches, pipe_of, whole
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


def fails(how: str, stage: int, before: bool) -> tuple[str, bool, str]:
    """A call that fails in one process; what it raises, whether gradients are what they were.

    Args:
        how: it fails.
        stage: where.
        before: whether there are gradients.

    Returns:
        Also what the next call says.
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

        pipe.partitions[stage].register_forward_hook(hook)
    told_us = told(lambda: pipe.train_batch(**given, loss_fn=loss_fn, verify=False))
    same = all(
        p.grad is None if grad is None else (p.grad - grad).abs().max() < 1e-12
        for p, grad in zip(pipe.parameters(), kept, strict=True)
    )
    return told_us, same, told(lambda: pipe.train_batch(x, target, loss_fn=F.cross_entropy))


def calls_that_differ(how: str) -> tuple[str, str]:
    """What is raised where processes do not make the same call; and by the next call."""
    rank = distributed.get_rank()
    pipe, _ = pipe_of("layers", chunks=4)
    x, target = batches([8] * 3, 1, masked=False)[rank]
    odd = rank == GUILTY

    def call() -> None:
        if odd and how == "evaluates":
            pipe.eval_batch(x, target, loss_fn=F.cross_entropy, global_loss=True)
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
    devices = ["cpu:0", "cpu:1"]
    pipe = data_parallel(Pipe(layers, [1, len(layers) - 1], devices=devices, chunks=2), timeout=30)
    if how == "sparse":
        return told(lambda: pipe.train_batch(x, loss_fn=lambda y: y.mean()))
    if how == "nested":

        def loss(y: Tensor) -> Tensor:
            pipe.train_batch(x, loss_fn=lambda y: y.mean())
            return y.mean()

        return told(lambda: pipe.train_batch(x, loss_fn=loss))
    raise AssertionError(how)


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


_kept: list[Pipe] = []


def does_not_come(waits: str) -> tuple[str, str]:
    """One process makes fewer calls than the others."""
    pipe, _ = pipe_of("layers", chunks=4, timeout=1)
    rank = distributed.get_rank()
    x, target = batches([8] * 3, 1, masked=False)[rank]
    pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    if rank == GUILTY:
        _kept.append(pipe)  # one that is gone says so
        return "", ""

    def call() -> None:
        if waits == "train_batch":
            pipe.train_batch(x, target, loss_fn=F.cross_entropy)
        else:
            pipe.eval_batch(x, target, loss_fn=F.cross_entropy, global_loss=True)

    return told(call), told(call)


def interrupted_while_it_waits() -> str:
    """Ctrl-C while another process is late."""
    pipe, _ = pipe_of("layers", chunks=4)
    x, target = batches([8] * 2, 1, masked=False)[distributed.get_rank()]
    store = distributed.distributed_c10d._get_default_store()
    key = f"interrupted/{pipe._averaging.peers.group.group_name}"
    if distributed.get_rank() == GUILTY:
        store.wait([key])
        return told(lambda: pipe.train_batch(x, target, loss_fn=F.cross_entropy))
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    told_us = told(lambda: pipe.train_batch(x, target, loss_fn=F.cross_entropy))
    store.set(key, "")
    return told_us


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
