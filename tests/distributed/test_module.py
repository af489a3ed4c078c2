"""A data-parallel pipe is the pipe that it was."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import syncpipe
from syncpipe import Pipe
from syncpipe.distributed import broadcast_buffers, data_parallel, stage
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
from tests.support.running import Do, on_gradient

TWO = ["cpu:0", "cpu:1"]


def copies() -> None:
    """Copies are trained by one process alone."""
    pipe, _ = pipe_of()
    if distributed.get_rank():
        return
    for other in copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe)):
        other.train_batch(*mine(), loss_fn=F.cross_entropy)
        assert told(other.no_sync).startswith("RuntimeError: no_sync() is for a pipe in several")
        assert syncpipe.verify(other, *mine(), loss_fn=F.cross_entropy, schedules=["1f1b"]).ok
    refused = told(lambda: syncpipe.verify(pipe, *mine(), loss_fn=F.cross_entropy))
    assert "the pipe is data-parallel" in refused


def evaluated() -> None:
    """The loss here and of all, and a metric, beside the plain model's."""
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
    all_x, all_t = whole(pairs)
    here = pipe.eval_batch(x, target, loss_fn=F.cross_entropy)
    everywhere, metrics = pipe.eval_batch(x, target, loss_fn=function, global_loss=True)
    assert sum(map(sum, metrics["sizes"])) == len(x)
    assert pipe.training
    close = {"rtol": 0, "atol": 1e-12, "equal_nan": True}
    torch.testing.assert_close(here, F.cross_entropy(plain(x), target).detach(), **close)
    torch.testing.assert_close(everywhere, F.cross_entropy(plain(all_x), all_t).detach(), **close)
    torch.testing.assert_close(metrics["right"], fraction(plain(all_x), all_t), **close)
    layers = nn.Sequential(nn.Linear(6, 3), Do(lambda y: {"y": y, "k": 2})).double()
    pipe = data_parallel(Pipe(layers, [1, 1], devices=TWO, chunks=2))
    function, options = lambda o, t: F.cross_entropy(o["y"], t), {"return_outputs": True}
    _, outputs = pipe.train_batch(x, target, loss_fn=function, global_loss=True, **options)
    assert type(outputs["k"]) is int  # outputs are no metrics


def buffers() -> None:
    """All begin with the values of process 0; statistics go their own way until asked for."""
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    layers[1].running_mean += rank
    for dtype in torch.int16, torch.float8_e4m3fn, torch.bool:  # gloo knows only the last
        layers[2].register_buffer(str(dtype).partition(".")[2], torch.randn(5).to(dtype))
    pipe = data_parallel(Pipe(layers, [2, 1], devices=TWO, chunks=2))
    assert list(pipe.state_dict())[:3] == ["0.weight", "0.bias", "1.weight"]
    for value in pipe.state_dict().values():
        first = value.double()
        distributed.broadcast(first, src=0)
        assert torch.equal(value.double(), first)
    alone = Pipe(copy.deepcopy(pipe[:]), [2, 1], devices=TWO, chunks=2)
    for model in pipe, alone:
        model.train_batch(*mine(), loss_fn=F.cross_entropy)
    assert torch.equal(pipe[1].running_mean, alone[1].running_mean)
    broadcast_buffers(pipe)
    shared = alone[1].running_mean.clone()
    distributed.broadcast(shared, src=0)
    assert torch.equal(pipe[1].running_mean, shared)


def overlap() -> None:
    """The first stage waits in its last backward until a bucket of the last one is on its way."""
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
        assert left[0] or on_its_way.wait(500), "no bucket before the first stage is through"

    pipe.partitions[0].register_forward_hook(lambda *given: on_gradient(given[2], wait))
    distributed.all_reduce = watched
    try:
        pipe.train_batch(x, target, loss_fn=F.cross_entropy)
    finally:
        distributed.all_reduce = all_reduce
    # Two layers of the third stage; 6 x 6 + 6 of the second one and of the first layer.
    assert sizes == [42 + 42 // 2, 42, 42]


def subgroup() -> None:
    """Processes 0 and 2 of three, twice; the one between them goes on alone.

    One of the two has dropped its first pipe by then, which the other one keeps.
    """
    rank = distributed.get_rank()
    group = distributed.new_group([0, 2])
    if rank == 1:
        return
    kept = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        pipe = data_parallel(Pipe(layers, [2, 1], devices=TWO, chunks=2), group)
        plain = copy.deepcopy(pipe[:])
        pairs = batches([8, 4], 2, masked=False)
        pipe.train_batch(*pairs[rank // 2], loss_fn=weigh)
        weigh(plain(whole(pairs)[0]), whole(pairs)[1]).backward()
        assert differences(pipe, plain) < 1e-12
        kept += [pipe] if rank == 0 else []
        del pipe
        gc.collect()


def dropped() -> None:
    """Threads, groups, stores and tensors go with the pipes, and with stages."""

    def count() -> int:
        gc.collect()
        # Threads of all kinds, gloo's as well, but not those of pipes, which end by themselves.
        threads = len(os.listdir("/proc/self/task")) - threading.active_count()
        kept = sum(isinstance(o, (distributed.Store, Tensor)) for o in gc.get_objects())
        return kept + len(distributed.distributed_c10d._world.pg_map) + threads

    def five() -> int:
        pipes = [pipe_of()[0] for _ in range(5)]
        for pipe in pipes:
            for _ in range(3):
                pipe.train_batch(*mine(), loss_fn=F.cross_entropy)
        x = torch.randn(4, 2)
        stages = range(5 if torch.__version__ >= "2.13" else 0)
        made = [stage([nn.Linear(2, 2), nn.Linear(2, 2)], [1, 1], sample=x[:2]) for _ in stages]
        for each in made:
            each.schedule("1f1b", chunks=2, loss_fn=F.mse_loss).step(x, target=x)
            each.clip_grad_norm_(1.0)
        return count()

    five()
    before = count()
    assert five() > before
    assert count() <= before


def pipe_x() -> None:
    """The backward of pipe(x) is refused; under no_sync it is that of this process."""
    pipe, plain = pipe_of()
    x, target = mine()
    refused = told(lambda: F.cross_entropy(pipe(x), target).backward())
    assert refused.startswith("RuntimeError: backward through pipe(x) of a data-parallel pipe")
    assert "DistributedDataParallel" in refused
    with torch.no_grad():
        pipe(x)
    pipe.zero_grad()
    with pipe.no_sync():
        F.cross_entropy(pipe(x), target).backward()
    F.cross_entropy(plain(x), target).backward()
    assert differences(pipe, plain) < 1e-12


def apart() -> None:
    """What differs between processes is noticed in calls 1, 2, 4, ..."""
    pipe, _ = pipe_of()
    pipe.train_batch(*mine(), loss_fn=F.cross_entropy)
    with torch.no_grad():
        next(pipe.parameters()).add_(distributed.get_rank())  # load_state_dict in one process
    said = told(lambda: pipe.train_batch(*mine(), loss_fn=F.cross_entropy))
    assert said.startswith("ValueError: processes differ in the values of the parameters of stage")
    assert "data_parallel(pipe) copies the values" in said


def warned() -> None:
    """``train_batch`` warns once inside of ``DistributedDataParallel``, never as data parallel."""
    pipe, plain = pipe_of()
    ddp = DistributedDataParallel(Pipe(plain, [3, 3], devices=TWO))
    for each, times in (ddp.module, 1), (pipe, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                each.train_batch(*mine(), loss_fn=F.cross_entropy)
        assert len(caught) == times
        for warning in caught:
            assert warning.filename.endswith("tests/distributed/test_module.py")
            assert "this is one of 2 processes" in str(warning.message)
            assert "syncpipe.distributed.data_parallel(pipe)" in str(warning.message)


def fork() -> None:
    """A fork of the process may not train."""
    pipe, _ = pipe_of()
    pipe.train_batch(*mine(), loss_fn=F.cross_entropy)
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        text = told(lambda: pipe.train_batch(*mine(), loss_fn=F.cross_entropy))
        os.write(writable, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "in a fork of its process" in os.read(readable, 4096).decode()


@pytest.mark.parametrize("act", [apart, copies, overlap, dropped, pipe_x, warned, fork])
def test_in_two_processes(two, act):
    two.run(act)


@pytest.mark.parametrize("act", [evaluated, buffers, subgroup])
def test_in_three_processes(three, act):
    three.run(act)


def test_arguments():
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu:0"])
    for error, message, call in [
        (TypeError, "takes a Pipe, not Linear", lambda: data_parallel(nn.Linear(2, 2))),
        (ValueError, "bucket_mb=0 must be a number", lambda: data_parallel(pipe, bucket_mb=0)),
        (ValueError, "timeout=-1 must be a number", lambda: data_parallel(pipe, timeout=-1)),
        (ValueError, "init_process_group", lambda: data_parallel(pipe)),
        (ValueError, "that data_parallel has returned", lambda: broadcast_buffers(pipe)),
        (
            ValueError,
            "global_loss=True, but this pipe knows of no other",
            lambda: pipe.train_batch(None, loss_fn=nn.MSELoss(), global_loss=True),
        ),
        (RuntimeError, r"no_sync\(\) is for a pipe in several processes", pipe.no_sync),
    ]:
        with pytest.raises(error, match=message):
            call()
