"""``data_parallel``: the same pipe in several processes, with gradients of all of them.

    process 0   stage 2   F F B F B B | all_reduce in the group of stage 2
                stage 1   F F . B F B B | all_reduce in the group of stage 1
                caller    ...                  | numbers | waits, and writes the gradients

Each stage has a process group of its own, so no order of collectives has to be kept between stages:
the worker that runs the last backward of a stage starts the sum of ``gradient x weight``, and goes
on. At the end of each call the processes tell each other, by one more group on gloo, which call it
was, what their mini-batches weighed, and which tensors have a gradient.

Process ``r`` goes back from ``sum(w_i l_i) / A_r``, ``A_r`` the weight that it assumed for its
mini-batch (``training.loss.objective``). It contributes that times ``A_r``, and the sum over all is
divided by ``W``, the weight of all. What is in ``.grad`` between calls is always such that its mean
over the ``R`` processes is the gradient: after ``no_sync`` what a call added is multiplied by
``R A_r / W``, and an ``R``-th part of what was there before counts in the sum.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from syncpipe.data import tensors_in
from syncpipe.distributed.peers import Peers
from syncpipe.distributed.peers import process_group as process_group_of
from syncpipe.pipe import Pipe
from syncpipe.runtime.engine import RUNNING, Run
from syncpipe.schedules.schedule import Kind, Schedule
from syncpipe.schedules.steps import numbers_of
from syncpipe.training.cell import Gradients, Leaves, is_shared
from syncpipe.training.loss import Objective
from syncpipe.training.train import Watch

__all__ = ["broadcast_buffers", "data_parallel"]

_P = TypeVar("_P", bound=Pipe)
_BACKWARD = ("backward", "backward_input", "backward_weight")


def data_parallel(
    pipe: _P,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    bucket_mb: float = 25,
    *,
    timeout: float = 600,
) -> _P:
    """Train one model by several processes, each with a pipe over devices of its own.

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
        process_group: of these processes, or a mesh of one dimension; None for all. It is made use
            of, but never blocked: collectives are those of groups that are made here, of the same
            processes, one for each stage. They end with the pipe.
        bucket_mb: megabytes of gradients that are reduced at a time, about.
        timeout: seconds that a process waits for another one, before it raises.

    Returns:
        The pipe.

    Raises:
        TypeError: ``pipe`` is no pipe, or has layers that communicate themselves.
        ValueError: an argument does not fit, or the model of another process is another one.
        RuntimeError: there is no process group, or another process has refused its model.
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
    group = process_group_of(process_group, "process_group", "data_parallel")
    if not dist.is_gloo_available():
        raise RuntimeError(
            "data_parallel needs a build of PyTorch with gloo, beside other backends"
        )
    averaging = Averaging(group, len(pipe.balance), float(bucket_mb) * 2**20, float(timeout))
    alike = {"bucket_mb": bucket_mb, "balance": pipe.balance}
    averaging.peers.agree(lambda: _description(pipe), lambda found: {**alike, **found})
    averaging.broadcast(chain(pipe.parameters(), pipe.buffers()))
    pipe._averaging = averaging
    return pipe


def broadcast_buffers(pipe: Pipe) -> None:
    """Give all processes the buffers (BatchNorm's statistics, above all) of process 0.

    Buffers go their own way in each process, by its own mini-batches. What process 0 saves is
    consistent by itself; call this, in all processes, before the others evaluate or save.

    Raises:
        ValueError: the pipe is not data-parallel.
    """
    averaging: Averaging | None = pipe._averaging
    if averaging is None:
        raise ValueError("broadcast_buffers takes a pipe that data_parallel has returned")
    averaging.broadcast_buffers(pipe.buffers())


def _description(pipe: Pipe) -> dict[str, str]:
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
    found = {}
    for kind, named in ("parameter", pipe.named_parameters()), ("buffer", pipe.named_buffers()):
        for name, tensor in named:
            if is_lazy(tensor):
                raise ValueError(
                    f"{kind} {name!r} has no value yet: run the plain model once before it is made "
                    "a Pipe"
                )
            trained = ", trained" if tensor.requires_grad else ", frozen"
            text = f"one of shape {list(tensor.shape)}, {tensor.dtype}"
            found[f"{kind} {name!r}"] = text + (trained if kind == "parameter" else "")
    return found


class Averaging:
    """The other processes, as a data-parallel pipe knows them.

    Args:
        group: of the processes.
        stages: how many the pipe has.
        capacity: bytes that are reduced at a time.
        timeout: seconds to wait for another process.

    Attributes:
        agreed: for each stage the bytes of its parameters that all processes trained in the last
            call, 0 of one that is frozen: sums of other sizes would abort a process.
    """

    agreed: list[list[int]] | None = None

    def __init__(self, group: Any, stages: int, capacity: float, timeout: float) -> None:
        ranks = dist.get_process_group_ranks(group)
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=timeout + 5),  # so that we are the ones to say so
            # Processes that are not in the group know nothing of this.
            "use_local_synchronization": len(ranks) < dist.get_world_size(),
        }
        backend = dist.get_backend_config(group)
        control = dist.new_group(ranks, backend="gloo", **options)
        self.groups = [dist.new_group(ranks, backend=backend, **options) for _ in range(stages)]
        self.peers = Peers(control, "data-parallel pipe", "process", timeout)
        self.capacity, self.syncs = capacity, True
        self._process = os.getpid()
        self._busy = threading.Lock()
        groups = [control, *self.groups]
        weakref.finalize(self, _destroy, groups, os.getpid()).atexit = False

    # --- what a pipe calls -----------------------------------------------------------------------

    def train_batch(
        self, step: Callable[[Any], Any], *, global_loss: bool, accumulate: float
    ) -> Any:
        """``train_batch`` in all processes, of which ``step`` does that of this one."""
        what = {
            "no_sync": not self.syncs, "global_loss": global_loss, "accumulate": accumulate
        }  # fmt: skip

        def run(call: _Call) -> Any:
            result = step(call)
            return self._combined(result, call.share) if global_loss else result

        return self._made("train_batch", what, run)

    def eval_batch(self, step: Callable[[Any], Any]) -> Any:
        """The same, for the loss of all processes."""
        return self._made(
            "eval_batch", {}, lambda call: self._combined(step(call.weighed), call.share)
        )

    def broadcast_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Give all processes the buffers of process 0, as one call of the pipe."""

        def run(call: _Call) -> None:
            call.exchange(1.0)
            self.broadcast(buffers)

        self._made("broadcast_buffers", {}, run)

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Gives all processes the values of process 0."""
        for tensor in tensors:
            dense = tensor.detach().contiguous()
            work = dist.broadcast(dense, None, self.groups[0], True, group_src=0)
            self.peers.wait(work, dense)
            if self.peers.rank and dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay those of this process."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def forward(self, output: Any) -> None:
        """Refuses a backward through ``pipe(x)``, which averages nothing."""
        if not (self.syncs and torch.is_grad_enabled()):
            return

        def refuse(grad: Tensor) -> None:
            raise RuntimeError(
                "backward through pipe(x) of a data-parallel pipe: data_parallel averages the "
                "gradients of train_batch. For pipe(x) wrap the pipe in DistributedDataParallel "
                "instead; gradients of this process alone are those of pipe(x) under pipe.no_sync()"
            )

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(refuse)  # type: ignore[no-untyped-call]

    # --- a call ----------------------------------------------------------------------------------

    def _made(self, name: str, what: dict[str, Any], run: Callable[[_Call], Any]) -> Any:
        if self._process != os.getpid():
            raise RuntimeError(
                "this process is a fork, and the data-parallel pipe belongs to the one it comes "
                "from: let each process make its own process group and pipe"
            )
        if RUNNING.get():
            raise RuntimeError(
                "a data-parallel pipe is trained inside of a call of a pipe (by a layer or "
                "loss_fn), where processes would not do the same in the same order: make the outer "
                "pipe data-parallel"
            )
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "another thread is in a call of this data-parallel pipe: calls of several threads "
                "would begin in any order in each process. Make them one by one"
            )
        try:
            self.peers.begin("a call")  # which one, they tell each other at its end
            call = _Call(self, {"the call": name, **what})
            try:
                return run(call)
            except BaseException as error:
                if not call.begun and isinstance(error, Exception):
                    self.peers.refused(error)
                    raise
                raise self.peers.fail(error, self.groups) from None
            finally:
                self.peers.finish()
        finally:
            self._busy.release()

    def _combined(self, result: Any, share: float) -> Any:
        """The loss of all processes in the place of that of this one, and metrics that are numbers.

        Args:
            result: of ``train_batch`` or ``eval_batch``.
            share: of the weight of all processes that of this one.
        """
        parts = list(result) if isinstance(result, tuple) else [result]
        metrics = parts[-1] if len(parts) > 1 and isinstance(parts[-1], dict) else {}
        names = [name for name, value in metrics.items() if not isinstance(value, list)]
        own = [float(value) for value in (parts[0], *map(metrics.get, names))]
        rows = self.peers.exchange([value * share if share else 0.0 for value in own])
        loss, *numbers = (sum(column) for column in zip(*rows, strict=True))
        parts[0] = torch.full_like(parts[0], loss)
        for name, number in zip(names, numbers, strict=True):
            there = metrics[name]
            if isinstance(there, Tensor):
                dtype = torch.promote_types(there.dtype, torch.float32)
                number = torch.full_like(there, number, dtype=dtype)
            metrics[name] = number
        return tuple(parts) if isinstance(result, tuple) else parts[0]


class _Bucket(NamedTuple):
    """Leaves of one device and dtype, and the sum of their gradients that is on its way."""

    leaves: list[Tensor]
    flat: Tensor
    work: Any
    scale: float  # by which what is summed has been divided


class _Call:
    """One call in all processes; for ``train_batch`` as of ``training.train.train``.

    Attributes:
        begun: something may have been sent.
        share: of the weight of all processes that of this one, in the end.
    """

    def __init__(self, owner: Averaging, what: dict[str, Any]) -> None:
        self._owner, self._what = owner, what
        self.begun = False
        self.share = 1.0
        self._sent: dict[int, list[_Bucket]] = {}

    def begin(
        self, plan: Schedule, leaves: Leaves, gradients: Gradients, objective: Objective
    ) -> Watch:
        """The call begins: what starts the sums of a stage after its last backward."""
        self.begun = True
        self._leaves, self._gradients = leaves, gradients
        self._objective = objective
        stages = leaves.parameters[: plan.n]
        self._sizes = [[leaf.requires_grad * leaf.nbytes for leaf in stage] for stage in stages]
        self._stages = [[leaf for leaf in stage if leaf.requires_grad] for stage in stages]
        agreed = self._owner.syncs and self._sizes == self._owner.agreed
        known = objective.assumed
        if not agreed or plan.n != len(self._owner.groups) or known is None or known[1] is not None:
            return lambda kind, j, run: run  # the caller starts them
        own = float(known[0])
        replicated = [len(numbers) > 1 for numbers in numbers_of(plan.device_of)]
        left = [plan.m] * plan.n  # backwards, each half for itself
        for _, j in plan.splits:
            left[j] += 1
        left = [1 if replicated[j] else count for j, count in enumerate(left)]

        def watch(kind: Kind, j: int, run: Run) -> Run:
            last = ("reduce",) if j < plan.n and replicated[j] else _BACKWARD
            if j >= plan.n or kind not in last:
                return run

            def counting(i: int, given: list[Any]) -> Sequence[Any]:
                made = run(i, given)
                left[j] -= 1
                if not left[j] and self._complete(j):
                    self._start(j, own)
                return made

            return counting

        return watch

    def weighed(self, objective: Objective) -> None:
        """A call without gradients, at its end."""
        assert objective.assumed is not None
        assumed, total = objective.assumed
        self.exchange(float(assumed if total is None else total), objective.adds_up)

    def finish(self) -> float:
        """Makes gradients those of all processes; as of ``training.train.train``."""
        owner, objective = self._owner, self._objective
        assert objective.assumed is not None
        assumed, total = objective.assumed
        own = float(assumed)  # what gradients were divided by
        there: list[bool] = []
        if owner.syncs:
            self._stages.append([leaf for leaf in self._leaves.found() if leaf.requires_grad])
            there = [_dense(leaf) is not None for leaf in chain(*self._stages)]
        sizes = [*self._sizes, [leaf.nbytes for leaf in self._stages[-1]]] if owner.syncs else []
        weight = own if total is None else float(total)
        rows = self.exchange(weight, objective.adds_up, sizes, there)
        factor = 1.0 if objective.adds_up else own / self._whole
        if not owner.syncs:
            if (factor := factor * owner.peers.size) != 1:
                self._gradients.scale(factor)
            return factor
        owner.agreed = self._sizes
        for j in range(len(self._stages)):
            if j not in self._sent:
                self._start(j, own, self._whole)
        buckets = list(chain.from_iterable(self._sent.values()))
        for bucket in buckets:
            owner.peers.wait(bucket.work, bucket.flat)
            if bucket.flat.device.type != "cpu":  # made on a worker's stream, read on the caller's
                stream = torch.accelerator.current_stream(bucket.flat.device)
                bucket.flat.record_stream(stream)
        anywhere = map(any, zip(*rows, strict=True))
        used = {id(leaf) for leaf, one in zip(chain(*self._stages), anywhere, strict=True) if one}
        for bucket in buckets:
            bucket.flat.mul_(bucket.scale / self._whole)
            _write(bucket, used)
        return factor * owner.peers.size

    def exchange(
        self,
        weight: float,
        adds_up: bool = False,
        sizes: Sequence[Sequence[int]] = (),
        there: Sequence[bool] = (),
    ) -> list[Sequence[bool]]:
        """Tells all which call this is, and what it weighs; returns ``there`` of all.

        Raises:
            ValueError: processes make different calls.
        """
        self.begun = True
        what = {**self._what, "loss_reduction='sum'": adds_up}
        rows = self._owner.peers.exchange((what, sizes, weight, there))
        for rank, row in enumerate(rows):
            if row[:2] != rows[0][:2]:
                raise _difference(rank, _named(*row[:2]), _named(*rows[0][:2]))
        whole = sum(row[2] for row in rows)
        self.share = 1.0 if adds_up else weight / whole if whole else 0.0
        self._whole = 1.0 if adds_up else whole or 1.0  # where nothing counts there is no gradient
        return [row[3] for row in rows]

    def _complete(self, j: int) -> bool:
        """Whether gradients of a stage are whole, and may be summed before weights are known."""
        return not any(
            self._gradients.before(leaf) is not None  # which counts by the weight of all
            or leaf.dtype == torch.float16  # the sum may be too large
            for leaf in self._stages[j]
        )

    @torch.no_grad()
    def _start(self, j: int, own: float, whole: float = 1.0) -> None:
        """Starts the sums of a stage: of what this process contributes to its gradients.

        Args:
            j: the stage.
            own: the weight of the mini-batch.
            whole: that of all, where it is known.
        """
        group = self._owner.groups[j if j < len(self._owner.groups) else 0]
        sent = self._sent[j] = []
        for leaves in _bucketed(self._stages[j], self._owner.capacity):
            half = leaves[0].dtype == torch.float16
            parts, before = [], [self._gradients.before(leaf) for leaf in leaves]
            for leaf in leaves:
                grad = _dense(leaf)
                parts.append((torch.zeros_like(leaf) if grad is None else grad).reshape(-1))
            scale = whole if half else 1.0
            flat = torch.cat(parts).mul_(own / scale)
            if any(grad is not None for grad in before):
                there = zip(leaves, before, strict=True)
                rest = [torch.zeros_like(leaf) if b is None else b for leaf, b in there]
                part = whole / self._owner.peers.size - own
                flat.add_(torch.cat([each.reshape(-1) for each in rest]), alpha=part / scale)
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            work = dist.all_reduce(real, group=group, async_op=True)
            sent.append(_Bucket(leaves, flat, work, scale))


def _difference(rank: int, found: dict[str, Any], first: dict[str, Any]) -> ValueError:
    """Says in what a call is another one than that of process 0."""
    name = next(name for name in {**found, **first} if found.get(name) != first.get(name))
    return ValueError(
        f"processes {rank} and 0 do not make the same call of a data-parallel pipe: {name} is "
        f"{found.get(name)} there and {first.get(name)} in process 0. All train the same tensors "
        "by the same calls"
    )


def _named(what: dict[str, Any], sizes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """By name what has to be the same of a call."""
    named = dict(what)
    for j, stage in enumerate(sizes):
        for k, size in enumerate(stage):
            name = f"parameter {k} of stage {j}"
            if j == len(sizes) - 1:
                name = f"tensor {k} that requires grad and is no parameter of the pipe"
            named[name] = f"of {size} bytes" if size else "frozen"
    return named


def _bucketed(leaves: Sequence[Tensor], capacity: float) -> list[list[Tensor]]:
    """Leaves by device and dtype, in pieces of about so many bytes."""
    found: dict[Any, list[Tensor]] = {}
    sizes: Counter[Any] = Counter()
    for leaf in leaves:
        kind = leaf.device, leaf.dtype
        found.setdefault((kind, sizes[kind] // capacity), []).append(leaf)
        sizes[kind] += leaf.nbytes
    return list(found.values())


@torch.no_grad()
def _write(bucket: _Bucket, used: set[int]) -> None:
    """Makes the gradients of leaves what is in the sum of all processes."""
    into: list[Tensor] = []
    values: list[Tensor] = []
    parts = torch.split(bucket.flat, [leaf.numel() for leaf in bucket.leaves])
    for leaf, part in zip(bucket.leaves, parts, strict=True):
        if id(leaf) not in used:
            continue
        if leaf.grad is None or is_shared(leaf.grad):
            leaf.grad = part.view(leaf.shape).clone()
        else:
            into.append(leaf.grad)
            values.append(part.view(leaf.shape))
    if into:
        torch._foreach_copy_(into, values)


def _dense(leaf: Tensor) -> Tensor | None:
    """The gradient of a leaf.

    Raises:
        TypeError: it is sparse.
    """
    grad = leaf.grad
    if grad is not None and grad.layout is not torch.strided:
        raise TypeError(
            f"a parameter of shape {list(leaf.shape)} has a sparse gradient, which data_parallel "
            "does not average: make its layer with sparse=False"
        )
    return grad


def _destroy(groups: list[dist.ProcessGroup], process: int) -> None:
    """Ends the groups of a pipe that is gone."""
    for group in groups if process == os.getpid() else []:
        with contextlib.suppress(Exception):  # all may have been destroyed by the user
            dist.destroy_process_group(group)
