"""``data_parallel``: the same pipe in several processes, with gradients of all of them."""

from __future__ import annotations

import math
from itertools import chain
from numbers import Real
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from syncpipe.distributed.averaging import Averaging
from syncpipe.pipe import Pipe

__all__ = ["broadcast_buffers", "data_parallel"]

_P = TypeVar("_P", bound=Pipe)
_Description = list[tuple[str, str]]


def data_parallel(
    pipe: _P,
    process_group: dist.ProcessGroup | None = None,
    bucket_mb: float = 25,
    *,
    timeout: float = 600,
) -> _P:
    """Trains one model by several processes, each with a pipe over devices of its own.

    To be called in every process, with the same model; all get the values that parameters and
    buffers have in process 0. From then on ``train_batch`` ends with the gradients of the
    mini-batches of all processes: those of one process that was given all of them, to rounding.
    (For ``pipe(x)`` and ``backward()`` there is ``DistributedDataParallel(pipe)``.) Under
    ``torchrun``::

        dist.init_process_group()
        pipe = data_parallel(Pipe(model, [2, 2], devices=mine, chunks=8))
        for input, target in loader:                 # of this process
            optimizer.zero_grad()
            loss = pipe.train_batch(input, target, loss_fn=F.cross_entropy)
            optimizer.step()

    Each stage has a process group of its own, in which its gradients are summed as soon as it is
    through with its last micro-batch, while the stages before it still go back (Li et al. 2020,
    "PyTorch Distributed"). Where a call fails in one process, those of the others raise with the
    reason, ``.grad`` is what it was everywhere, and the processes have to start again. See
    docs/distributed.md.

    Args:
        pipe: the pipe, which is changed. Copies of it (``deepcopy``, pickle) know no processes.
        process_group: of these processes; None for all. It is made use of, but never blocked:
            collectives are those of groups that are made here, of the same processes, one for each
            stage. They end with the pipe.
        bucket_mb: megabytes of gradients that are reduced at a time, at most.
        timeout: seconds that a process waits for another one, before it raises.

    Returns:
        The pipe.

    Raises:
        TypeError: ``pipe`` is no pipe, or has layers that communicate themselves.
        ValueError: an argument does not fit, or the model of another process is another one.
        RuntimeError: there is no process group.
    """
    if not isinstance(pipe, Pipe):
        raise TypeError(
            f"data_parallel takes a Pipe, not {type(pipe).__name__}: data_parallel(Pipe(model, "
            "...)), and nothing around it"
        )
    if not (isinstance(bucket_mb, Real) and 0 < float(bucket_mb) < math.inf):
        raise ValueError(f"bucket_mb={bucket_mb!r}: it is a number of megabytes, above 0")
    if not (isinstance(timeout, Real) and 0 < float(timeout) < math.inf):
        raise ValueError(f"timeout={timeout!r}: it is a number of seconds, above 0")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "data_parallel needs a process group: call torch.distributed.init_process_group() "
            "before, in a process that torchrun has started"
        )
    if not dist.is_gloo_available():
        raise RuntimeError(
            "data_parallel needs a build of PyTorch with gloo, beside other backends"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError("process_group: this process is not one of it")
    group = dist.group.WORLD if process_group is None else process_group
    stages, capacity = len(pipe.balance), float(bucket_mb) * 2**20
    averaging = Averaging(group, stages, capacity, float(timeout))
    try:
        own: Any = _description(pipe)
    except (TypeError, ValueError) as error:
        own = error
    _compare(averaging.peers.everywhere(own))
    averaging.broadcast(chain(pipe.parameters(), pipe.buffers()))
    pipe._averaging = averaging
    return pipe


def broadcast_buffers(pipe: Pipe) -> None:
    """Gives all processes the buffers (BatchNorm's statistics, above all) of process 0.

    Buffers go their own way in each process, by its own mini-batches. What process 0 saves is
    consistent by itself; call this, in all processes, before the others evaluate or save.

    Raises:
        ValueError: the pipe is not data-parallel.
    """
    averaging: Averaging | None = pipe._averaging
    if averaging is None:
        raise ValueError("broadcast_buffers takes a pipe that data_parallel has returned")
    averaging.broadcast_buffers(pipe.buffers())


def _description(pipe: Pipe) -> _Description:
    """All that has to be the same in all processes, by name.

    Raises:
        TypeError, ValueError: this pipe cannot be trained so.
    """
    for name, module in pipe.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise TypeError(
                f"layer {name!r} is a SyncBatchNorm, which starts collectives of its own for each "
                "micro-batch, and the stages of each process would start theirs in any order: use "
                "BatchNorm, or Pipe(..., deferred_batch_norm=True)"
            )
    found = [("balance", str(pipe.balance))]
    for kind, named in ("parameter", pipe.named_parameters()), ("buffer", pipe.named_buffers()):
        for name, tensor in named:
            if is_lazy(tensor):
                raise ValueError(
                    f"{kind} {name!r} has no value yet: run the plain model once before it is made "
                    "a Pipe"
                )
            text = f"of shape {list(tensor.shape)}, {tensor.dtype}"
            if kind == "parameter":
                text += ", trained" if tensor.requires_grad else ", frozen"
            found.append((f"{kind} {name!r}", text))
    return found


def _compare(descriptions: list[Any]) -> None:
    """Refuses models that differ.

    Raises:
        ValueError: with the first difference.
    """
    for rank, found in enumerate(descriptions):
        if isinstance(found, Exception):
            raise type(found)(f"in process {rank}: {found}")
    first: _Description = descriptions[0]
    for rank, found in enumerate(descriptions):
        for k in range(max(len(first), len(found))):
            here, there = ([*each, *[("nothing more", "")] * k][k] for each in (first, found))
            if here != there:
                raise ValueError(
                    f"processes have different models: process {rank} has {' '.join(there)} where "
                    f"process 0 has {' '.join(here)}"
                )
