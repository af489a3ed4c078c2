"""What the processes of ``test_module.py`` do: look at a data-parallel pipe from outside."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

import syncpipe
from syncpipe import Pipe
from syncpipe.distributed import broadcast_buffers, data_parallel
from tests.distributed.equal import batches, counted, differences, pipe_of, weigh, whole
from tests.distributed.failing import told
from tests.support.running import on_gradient

TWO = ["cpu:0", "cpu:1"]


def values() -> tuple[list[str], list[float]]:
    """The keys of the state, and the sum of each tensor."""
    torch.manual_seed(distributed.get_rank())
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    layers[1].running_mean += distributed.get_rank()
    pipe = data_parallel(Pipe(layers, [2, 1], devices=TWO), timeout=30)
    state = pipe.state_dict()
    return list(state), [float(value.double().sum()) for value in state.values()]


def copies() -> list[str]:
    """Copies are trained by one process alone."""
    pipe, _ = pipe_of("layers", chunks=4)
    if distributed.get_rank():
        return []
    x, target = batches([8], 1, masked=False)[0]
    found = []
    for other in copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe)):
        found.append(
            told(lambda other=other: other.train_batch(x, target, loss_fn=F.cross_entropy))
        )
        found.append(told(other.no_sync))
        assert syncpipe.verify(other, x, target, loss_fn=F.cross_entropy, schedules=["1f1b"]).ok
    assert "the pipe is data-parallel" in told(
        lambda: syncpipe.verify(pipe, x, target, loss_fn=F.cross_entropy)
    )
    return found


def evaluated() -> tuple[float, float, float, float]:
    """The loss here and of all, beside the plain model's; and so for a metric."""
    rank = distributed.get_rank()
    pipe, plain = pipe_of("layers", chunks=4)
    pairs = batches([12, 5, 9], 2, masked=True)[: distributed.get_world_size()]

    def fraction(y: Tensor, target: Tensor) -> Tensor:
        kept = target != -100
        return (y.argmax(1) == target)[kept].double().mean()

    def function(y: Tensor, target: Tensor) -> Any:
        found, weight = counted(y, target)
        return found, weight, {"right": fraction(y, target).nan_to_num(), "sizes": [len(y)]}

    x, target = pairs[rank]
    y, t = plain(x), target
    here = pipe.eval_batch(x, target, loss_fn=F.cross_entropy)
    everywhere, metrics = pipe.eval_batch(x, target, loss_fn=function, global_loss=True)
    assert sum(map(sum, metrics["sizes"])) == len(x)
    all_x, all_t = whole(pairs)
    return (
        abs(float(here.nan_to_num(-1) - F.cross_entropy(y, t).detach().nan_to_num(-1))),
        abs(float(everywhere - F.cross_entropy(plain(all_x), all_t).detach())),
        abs(float(metrics["right"] - fraction(plain(all_x), all_t))),
        pipe.training,
    )


def batch_norm() -> tuple[bool, bool]:
    """Statistics are those of each process, until those of process 0 are asked for."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    alone = Pipe(copy.deepcopy(layers), [2, 1], devices=TWO, chunks=2)
    pipe = data_parallel(Pipe(layers, [2, 1], devices=TWO, chunks=2), timeout=30)
    pairs = batches([8, 8], 2, masked=False)
    for model in pipe, alone:
        model.train_batch(*pairs[rank], loss_fn=F.cross_entropy)
    local = torch.equal(pipe[1].running_mean, alone[1].running_mean)
    broadcast_buffers(pipe)
    shared = pipe[1].running_mean.clone()
    distributed.broadcast(shared, src=0)
    return local, torch.equal(pipe[1].running_mean, shared)


def draws(alike: bool) -> float:
    """A number that depends on what dropout draws."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    pipe = data_parallel(Pipe(layers, [1, 1], devices=TWO), timeout=30)
    torch.manual_seed(1 if alike else distributed.get_rank())
    return float(pipe.train_batch(torch.ones(64, 6), loss_fn=lambda y: y.pow(2).mean()))


def overlap() -> list[int]:
    """How many numbers there are in each bucket, in order.

    The first stage waits in its last backward until a bucket of the last stage is on its way, and
    the last stage before its last one until all processes have begun.
    """
    pipe, _ = pipe_of("layers", chunks=3)
    on_its_way, sizes, told_all = threading.Event(), [], []
    all_reduce, all_gather = distributed.all_reduce, distributed.all_gather

    def watched(tensor: Tensor, *args: Any, **options: Any) -> Any:
        work = all_reduce(tensor, *args, **options)
        sizes.append(tensor.numel())
        on_its_way.set()
        return work

    def noted(*args: Any, **options: Any) -> Any:
        told_all.append(all_gather(*args, **options))
        return told_all[-1]

    left = {0: 3, 2: 3}

    def wait(stage: int, grad: Tensor) -> None:
        left[stage] -= 1
        if not left[stage] and stage:
            while not told_all[0].is_completed():
                threading.Event().wait(0.01)
        elif not left[stage]:
            assert on_its_way.wait(20), "no bucket before the last stage is through"

    for stage in left:
        pipe.partitions[stage].register_forward_hook(
            lambda *given, stage=stage: on_gradient(given[2], partial(wait, stage))
        )
    pipe.checkpoint = "never"
    x, target = batches([6] * 3, 2, masked=False)[distributed.get_rank()]
    distributed.all_reduce, distributed.all_gather = watched, noted
    try:
        pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    finally:
        distributed.all_reduce, distributed.all_gather = all_reduce, all_gather
    return sizes


def subgroup() -> float:
    """Processes 0 and 2 of three; the one between them goes on alone."""
    rank = distributed.get_rank()
    group = distributed.new_group([0, 2])
    if rank == 1:
        return 0.0
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    pipe = data_parallel(Pipe(layers, [2, 1], devices=TWO, chunks=2), group, timeout=30)
    plain = copy.deepcopy(pipe[:])
    pairs = batches([8, 4], 2, masked=False)
    pipe.train_batch(*pairs[rank // 2], loss_fn=weigh)
    weigh(plain(whole(pairs)[0]), whole(pairs)[1]).backward()
    return differences(pipe, plain)


def dropped() -> list[int]:
    """Threads, process groups and stores, with no pipe, with five, and when these are gone."""

    def count() -> int:
        gc.collect()
        stores = sum(isinstance(o, distributed.Store) for o in gc.get_objects())
        return stores + len(distributed.distributed_c10d._world.pg_map) + _threads()

    def five() -> int:
        pipes = [pipe_of("layers", chunks=4)[0] for _ in range(5)]
        x, target = batches([8] * 3, 1, masked=False)[distributed.get_rank()]
        for pipe in pipes:
            pipe.train_batch(x, target, loss_fn=F.cross_entropy)
        return count()

    five()
    before = count()
    during = five()
    return [before, during, count()]


def _threads() -> int:
    """Of all kinds, gloo's as well, but not those of pipes, which end by themselves."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def pipe_x() -> tuple[str, str, float]:
    """What the backward of pipe(x) says, and that under no_sync it is that of this process."""
    pipe, plain = pipe_of("layers", chunks=4)
    x, target = batches([8] * 3, 1, masked=False)[distributed.get_rank()]
    refused = told(lambda: F.cross_entropy(pipe(x), target).backward())
    with torch.no_grad():
        evaluated = told(lambda: pipe(x))
    pipe.zero_grad()
    with pipe.no_sync():
        F.cross_entropy(pipe(x), target).backward()
    F.cross_entropy(plain(x), target).backward()
    return refused, evaluated, differences(pipe, plain)


def fork() -> str:
    """What a fork of the process may not do."""
    pipe, _ = pipe_of("layers", chunks=4)
    x, target = batches([8] * 3, 1, masked=False)[distributed.get_rank()]
    pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        text = told(lambda: pipe.train_batch(x, target, loss_fn=F.cross_entropy))
        os.write(writable, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(readable, 4096).decode()


def many_steps() -> bool:
    """Objects after a few steps, and after some more."""
    pipe, _ = pipe_of("layers", chunks=2)
    x, target = batches([4] * 3, 1, masked=False)[distributed.get_rank()]

    def count() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    counts = []
    for _ in range(3):
        for _ in range(10):
            pipe.zero_grad()
            pipe.train_batch(x, target, loss_fn=F.cross_entropy)
        counts.append(count())
    return counts[2] < counts[1] + 10  # the thread may still have some of the last call
