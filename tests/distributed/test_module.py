"""A data-parallel pipe is the pipe that it was."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

import syncpipe
from syncpipe import Pipe
from syncpipe.distributed import broadcast_buffers, data_parallel
from tests.distributed.processes import told
from tests.distributed.test_gradients import (
    batches,
    counted,
    differences,
    mine,
    pipe_of,
    weigh,
    whole,
)
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


def test_all_begin_with_the_values_of_process_0(three):
    (keys, first), *others = three.run(values)
    assert keys[:3] == ["0.weight", "0.bias", "1.weight"]
    assert all(values == first for _, values in others)


def copies() -> None:
    """Copies are trained by one process alone."""
    pipe, _ = pipe_of()
    if distributed.get_rank():
        return
    for other in copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe)):
        other.train_batch(*mine(), loss_fn=F.cross_entropy)
        assert told(other.no_sync).startswith("RuntimeError: no_sync() is for a pipe in several")
        assert syncpipe.verify(other, *mine(), loss_fn=F.cross_entropy, schedules=["1f1b"]).ok
    assert "the pipe is data-parallel" in told(
        lambda: syncpipe.verify(pipe, *mine(), loss_fn=F.cross_entropy)
    )


def test_copies_are_alone(two):
    two.run(copies)


def evaluated() -> tuple[float, float, float, float]:
    """The loss here and of all, beside the plain model's; and so for a metric."""
    rank = distributed.get_rank()
    pipe, plain = pipe_of()
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
    assert pipe.training
    all_x, all_t = whole(pairs)
    return (
        abs(float(here.nan_to_num(-1) - F.cross_entropy(y, t).detach().nan_to_num(-1))),
        abs(float(everywhere - F.cross_entropy(plain(all_x), all_t).detach())),
        abs(float(metrics["right"] - fraction(plain(all_x), all_t))),
    )


def test_eval_batch_here_and_everywhere(three):
    assert max(map(max, three.run(evaluated))) < 1e-12


def batch_norm() -> None:
    """Statistics are those of each process, until those of process 0 are asked for."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    alone = Pipe(copy.deepcopy(layers), [2, 1], devices=TWO, chunks=2)
    pipe = data_parallel(Pipe(layers, [2, 1], devices=TWO, chunks=2), timeout=30)
    for model in pipe, alone:
        model.train_batch(*mine(), loss_fn=F.cross_entropy)
    assert torch.equal(pipe[1].running_mean, alone[1].running_mean)
    broadcast_buffers(pipe)
    shared = alone[1].running_mean.clone()
    distributed.broadcast(shared, src=0)
    assert torch.equal(pipe[1].running_mean, shared)


def test_buffers_are_those_of_each_process_until_asked_for(two):
    two.run(batch_norm)


def overlap() -> list[int]:
    """How many numbers there are in each bucket, in order.

    The first stage waits in its last backward until a bucket of the last stage is on its way.
    """
    pipe, _ = pipe_of(chunks=3)
    on_its_way, sizes, left = threading.Event(), [], [3]
    all_reduce = distributed.all_reduce
    pipe.checkpoint = "never"
    x, target = batches([6] * 3, 2, masked=False)[distributed.get_rank()]
    pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    pipe.zero_grad()

    def watched(tensor: Tensor, *args: Any, **options: Any) -> Any:
        work = all_reduce(tensor, *args, **options)
        sizes.append(tensor.numel())
        on_its_way.set()
        return work

    def wait(grad: Tensor) -> None:
        left[0] -= 1
        assert left[0] or on_its_way.wait(20), "no bucket before the first stage is through"

    pipe.partitions[0].register_forward_hook(lambda *given: on_gradient(given[2], wait))
    distributed.all_reduce = watched
    try:
        pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    finally:
        distributed.all_reduce = all_reduce
    return sizes


def test_the_last_stage_is_reduced_while_the_first_one_goes_back(two):
    # 6 x 6 + 6 of the first layer and of the second stage; two layers of the third.
    for sizes in two.run(overlap):
        assert sizes[0] == 42 + 42 // 2
        assert sizes[1:] == [42, 42]


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


def test_some_of_the_processes(three):
    assert max(three.run(subgroup)) < 1e-12


def dropped() -> list[int]:
    """Threads, process groups and stores, with no pipe, with five, and when these are gone."""

    def count() -> int:
        gc.collect()
        stores = sum(isinstance(o, distributed.Store) for o in gc.get_objects())
        return stores + len(distributed.distributed_c10d._world.pg_map) + _threads()

    def five() -> int:
        pipes = [pipe_of()[0] for _ in range(5)]
        for pipe in pipes:
            pipe.train_batch(*mine(), loss_fn=F.cross_entropy)
        return count()

    five()
    before = count()
    during = five()
    return [before, during, count()]


def _threads() -> int:
    """Of all kinds, gloo's as well, but not those of pipes, which end by themselves."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def test_nothing_is_left_of_a_pipe_that_is_gone(two):
    for before, during, after in two.run(dropped):
        assert during > before
        assert after <= before


def pipe_x() -> tuple[str, str, float]:
    """What the backward of pipe(x) says, and that under no_sync it is that of this process."""
    pipe, plain = pipe_of()
    x, target = mine()
    refused = told(lambda: F.cross_entropy(pipe(x), target).backward())
    with torch.no_grad():
        evaluated = told(lambda: pipe(x))
    pipe.zero_grad()
    with pipe.no_sync():
        F.cross_entropy(pipe(x), target).backward()
    F.cross_entropy(plain(x), target).backward()
    return refused, evaluated, differences(pipe, plain)


def test_backward_of_pipe_x_is_refused_and_that_of_one_process_alone_is_not(two):
    for refused, evaluated, difference in two.run(pipe_x):
        assert refused.startswith("RuntimeError: backward through pipe(x) of a data-parallel pipe")
        assert "DistributedDataParallel" in refused
        assert evaluated == "nothing"
        assert difference < 1e-12


def fork() -> str:
    """What a fork of the process may not do."""
    pipe, _ = pipe_of()
    pipe.train_batch(*mine(), loss_fn=F.cross_entropy)
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        text = told(lambda: pipe.train_batch(*mine(), loss_fn=F.cross_entropy))
        os.write(writable, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(readable, 4096).decode()


def test_a_fork_is_refused(two):
    for found in two.run(fork):
        assert found.startswith("RuntimeError: this process is a fork")


def many_steps() -> bool:
    """Objects after a few steps, and after some more."""
    pipe, _ = pipe_of(chunks=2)

    def count() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    counts = []
    for _ in range(3):
        for _ in range(10):
            pipe.zero_grad()
            pipe.train_batch(*mine(), loss_fn=F.cross_entropy)
        counts.append(count())
    return counts[2] < counts[1] + 10  # the thread may still have some of the last call


def test_steps_leave_nothing_behind(two):
    assert two.run(many_steps) == [True, True]


def test_arguments():
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu:0"])
    with pytest.raises(TypeError, match="data_parallel takes a Pipe, not Linear"):
        data_parallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="bucket_mb=0: it is a number of megabytes"):
        data_parallel(pipe, bucket_mb=0)
    with pytest.raises(ValueError, match="timeout=-1: it is a number of seconds"):
        data_parallel(pipe, timeout=-1)
    with pytest.raises(RuntimeError, match="init_process_group"):
        data_parallel(pipe)
    with pytest.raises(ValueError, match="takes a pipe that data_parallel has returned"):
        broadcast_buffers(pipe)
    with pytest.raises(ValueError, match="global_loss=True, but this pipe knows of no other"):
        pipe.train_batch(None, loss_fn=nn.MSELoss(), global_loss=True)
    with pytest.raises(RuntimeError, match=r"no_sync\(\) is for a pipe in several processes"):
        pipe.no_sync()
