"""``data_parallel``: one pipe in each of several processes, with averaged gradients.

    process 0   stage 2   F F B F B B | all_reduce in the group of stage 2
                stage 1   F F . B F B B | all_reduce in the group of stage 1
                caller    ...                  | weights | waits, then writes the gradients

Each stage has its own process group, so stages need no common order of collectives: the worker that
runs the last backward of a stage starts the sum of ``gradient x weight``. At the end of each call
the processes exchange, over one more group on gloo, the name of the call, the weights of their
mini-batches, and which tensors have a gradient.

Process ``r`` runs backward from ``sum(w_i l_i) / A_r``, where ``A_r`` is the weight assumed for its
mini-batch (``training.loss.Objective``). It contributes its gradient times ``A_r``, and the sum is
divided by ``W``, the weight of all mini-batches. Between calls the gradient is the mean of
``.grad`` over the ``R`` processes: under ``no_sync`` the part that a call adds is multiplied by
``R A_r / W``, and ``1 / R`` of an earlier ``.grad`` enters the next sum.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from syncpipe.data.trees import described, tensors_in
from syncpipe.distributed.peers import Peers, checked_number, given_group
from syncpipe.distributed.private import in_buckets
from syncpipe.pipe import Pipe
from syncpipe.runtime.engine import RUNNING, Run
from syncpipe.schedules.schedule import Kind, Schedule
from syncpipe.schedules.steps import replica_indices
from syncpipe.stages.part import Part
from syncpipe.training.leaves import Accumulated
from syncpipe.training.loss import Objective

__all__ = ["broadcast_buffers", "data_parallel"]

_P = TypeVar("_P", bound=Pipe)
_BACKWARD: tuple[Kind, ...] = ("backward", "backward_input", "backward_weight")


def data_parallel(
    pipe: _P,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    bucket_mb: float = 25,
    *,
    timeout: float = 600,
) -> _P:
    """Train one model in several processes, each with a pipe over its own devices.

    Call it in every process, with the same model. All processes receive the parameters and buffers
    of process 0. Each ``train_batch`` then ends with the gradients of the mini-batches of all
    processes. They match, up to rounding, a single process that is given all mini-batches.
    (For ``pipe(x)`` and ``backward()`` use ``DistributedDataParallel(pipe)``.) Under ``torchrun``::

        dist.init_process_group()
        pipe = data_parallel(Pipe(model, [2, 2], devices=mine, chunks=8))
        for input, target in loader:                 # of this process
            optimizer.zero_grad()
            loss = pipe.train_batch(input, target, loss_fn=F.cross_entropy)
            optimizer.step()

    The gradients of a stage are summed while earlier stages still run backward (Li et al. 2020,
    "PyTorch Distributed"). If a call fails in one process, it raises in all with the reason,
    ``.grad`` stays as before the call, and the processes have to start again.

    Args:
        pipe: the pipe, changed in place. Copies (``deepcopy``, pickle) are not data-parallel.
        process_group: the processes, or a mesh of one dimension. None: all processes. Collectives
            use new groups, one for each stage, which end with the pipe.
        bucket_mb: the approximate size of one all-reduce, in MiB of gradients.
        timeout: seconds that a process waits for another one before it raises.

    Raises:
        TypeError: ``pipe`` is not a ``Pipe``, or a layer runs collectives itself.
        ValueError: an argument does not fit, there is no process group, or processes have
            different models.
        RuntimeError: another process refused its model.
    """
    if not isinstance(pipe, Pipe):
        raise TypeError(
            f"data_parallel takes a Pipe, not {type(pipe).__name__}: write data_parallel(Pipe("
            "model, ...)), without a wrapper around the pipe"
        )
    capacity = checked_number("bucket_mb", bucket_mb) * 2**20
    seconds = checked_number("timeout", timeout)
    group = given_group(process_group, "process_group")
    averaging = Averaging(group, len(pipe.balance), capacity, seconds)
    alike = {"bucket_mb": bucket_mb, "balance": pipe.balance}
    averaging.peers.agree(lambda: ({**alike, **_description(pipe)}, None))
    averaging.broadcast(chain(pipe.parameters(), pipe.buffers()))
    pipe._averaging = averaging
    return pipe


def broadcast_buffers(pipe: Pipe) -> None:
    """Copy the buffers of process 0, for example BatchNorm's statistics, to all processes.

    Training changes buffers in each process by itself. Call this in all processes before a process
    other than 0 evaluates or saves.
    """
    averaging: Averaging | None = pipe._averaging
    if averaging is None:
        raise ValueError("broadcast_buffers takes a pipe that data_parallel has returned")
    with averaging.call("broadcast_buffers") as call:
        averaging.peers.agree(lambda: (call.what, None))
        averaging.broadcast(pipe.buffers())


def _description(pipe: Pipe) -> dict[str, str]:
    for name, module in pipe.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise TypeError(
                f"layer {name!r} is a SyncBatchNorm, whose collectives would start in a different "
                "order in each process: use BatchNorm, or Pipe(..., deferred_batch_norm=True)"
            )
    found = {f"buffer {name!r}": described(buffer) for name, buffer in pipe.named_buffers()}
    for name, parameter in pipe.named_parameters():
        how = "trained" if parameter.requires_grad else "frozen"
        found[f"parameter {name!r}"] = f"{described(parameter)}, {how}"
    return found


class Averaging:
    """The process groups of a data-parallel pipe, and the calls that all processes make together.

    ``agreed`` has, for each stage, the gradient bytes of each parameter in the last call (0 if
    frozen), equal in all processes: an all-reduce of unequal sizes would abort a process.
    """

    agreed: list[list[int]] | None = None
    trained = 0  #: calls of ``train_batch``

    def __init__(self, group: Any, stages: int, capacity: float, timeout: float) -> None:
        self.peers = peers = Peers(group, "data-parallel pipe", "process", timeout)
        self.groups = [peers.new_group(f"stage {j}") for j in range(stages)]
        self.capacity, self.syncs = capacity, True
        self._process, self._busy = os.getpid(), threading.Lock()

    def train_batch(
        self, step: Callable[[Any], Any], *, global_loss: bool, accumulate: float
    ) -> Any:
        what = {"no_sync": not self.syncs, "global_loss": global_loss, "accumulate": accumulate}
        with self.call("train_batch", **what) as call:
            return call.with_results(step(call))

    def eval_batch(self, step: Callable[[Any], Any]) -> Any:
        with self.call("eval_batch", global_loss=True) as call:
            return call.with_results(step(call.weighed))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def forward(self, output: Any) -> None:
        """Makes a backward through ``pipe(x)`` an error, because its gradients are not averaged."""

        def refuse(grad: Tensor) -> None:
            raise RuntimeError(
                "backward through pipe(x) of a data-parallel pipe: data_parallel averages the "
                "gradients of train_batch. For pipe(x) wrap the pipe in DistributedDataParallel "
                "instead. For gradients of this process alone, run pipe(x) under pipe.no_sync()"
            )

        for tensor in tensors_in(output) if self.syncs and torch.is_grad_enabled() else []:
            if tensor.requires_grad:
                tensor.register_hook(refuse)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
            data = dense.reshape(-1).view(torch.uint8)  # backends lack int16 and float8
            work = dist.broadcast(data, None, self.groups[0], True, group_src=0)
            self.peers.wait(work, dense)
            if self.peers.rank and dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)

    @contextmanager
    def call(self, name: str, **what: Any) -> Iterator[_Call]:
        forked = self._process != os.getpid()
        if RUNNING.get() or forked or not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "a data-parallel pipe is called inside of a call of a pipe (by a layer or loss_fn),"
                " by two threads at once or in a fork of its process: make the calls one by one"
            )
        try:
            with self.peers.call("a call"):  # processes compare ``what`` at its end
                yield _Call(self, {"the call": name, **what})
        finally:
            self._busy.release()


class _AfterBackward(Part):
    """Calls ``then(j)`` on each stage after its last action, ``left[j]`` of these ``kinds[j]``."""

    def __init__(
        self, kinds: list[tuple[Kind, ...]], left: list[int], then: Callable[[int], None]
    ) -> None:
        self._kinds, self._left, self._then = kinds, left, then

    def around(self, kind: Kind, j: int, run: Run) -> Run:
        if j >= len(self._left) or kind not in self._kinds[j]:
            return run

        def counting(i: int, given: list[Any]) -> Sequence[Any]:
            made = run(i, given)
            self._left[j] -= 1
            if not self._left[j]:
                self._then(j)
            return made

        return counting


class _Call:
    """One call in all processes. ``training.train.train`` calls ``begin`` and ``finish``."""

    def __init__(self, owner: Averaging, what: dict[str, Any]) -> None:
        self._owner, self.what = owner, what
        self._total = 1.0  # the weight of the mini-batches of all processes, set by _exchange
        self._results: dict[Any, float] = {}  # the loss (key None) and metrics of all processes
        #: By stage: leaves, their gradients in one tensor, and the all-reduce of it.
        self._sums: dict[int, list[tuple[list[Tensor], Tensor, Any]]] = {}

    def begin(self, plan: Schedule, leaves: Accumulated, objective: Objective) -> Part:
        """Returns the part of a call that starts the sums of a stage after its last backward."""
        owner = self._owner
        owner.peers.sent = True
        self._leaves, self._objective = leaves, objective
        stages = leaves.parameters[: plan.n]
        owner.trained += 1
        if not owner.trained & owner.trained - 1:  # calls 1, 2, 4, ...
            for j, stage in enumerate(stages):
                self.what[
                    f"the values of the parameters of stage {j} (their checksum; "
                    "data_parallel(pipe) copies the values of process 0)"
                ] = _checksum(stage)
        self._sizes = [[leaf.requires_grad * leaf.nbytes for leaf in stage] for stage in stages]
        self._stages = [[leaf for leaf in stage if leaf.requires_grad] for stage in stages]
        agreed = owner.syncs and self._sizes == owner.agreed
        divisor = objective.divisor
        if not agreed or plan.n != len(owner.groups) or divisor is None:
            return Part()  # finish() starts the sums
        own = float(divisor)
        replicated = [len(numbers) > 1 for numbers in replica_indices(plan.device_of)]
        left = [plan.m] * plan.n  # backward actions, where each half counts
        for _, j in plan.splits:
            left[j] += 1
        left = [1 if replicated[j] else count for j, count in enumerate(left)]

        def start(j: int) -> None:
            # The factor of an earlier .grad needs the weight of all, known in finish().
            if all(leaves.grad_before(x) is None for x in self._stages[j]):
                self._start_sums(j, own)

        return _AfterBackward([("reduce",) if r else _BACKWARD for r in replicated], left, start)

    def weighed(self, objective: Objective) -> None:
        self._objective = objective
        self._exchange()

    def with_results(self, result: Any) -> Any:
        """The result, with the loss and metrics of all processes if ``global_loss`` is set."""
        parts = list(result) if isinstance(result, tuple) else [result]
        for name, total in self._results.items():
            place, key = (parts, 0) if name is None else (parts[-1], name)
            value: Any = place[key]
            if isinstance(value, Tensor):
                dtype = value.dtype if value.is_floating_point() else torch.float32
                place[key] = torch.full_like(value, total, dtype=dtype)
            else:
                place[key] = total
        return tuple(parts) if isinstance(result, tuple) else parts[0]

    @torch.no_grad()
    def finish(self) -> float:
        """Averages ``.grad`` over all processes; returns the factor for the input's gradients."""
        owner, objective = self._owner, self._objective
        assert objective.divisor is not None
        own = float(objective.divisor)
        sizes: list[list[int]] = []
        present: list[bool] = []
        if owner.syncs:
            self._stages.append([leaf for leaf in self._leaves.others() if leaf.requires_grad])
            sizes = [*self._sizes, [leaf.nbytes for leaf in self._stages[-1]]]
            present = [_has_dense_grad(leaf) for leaf in chain(*self._stages)]
        rows = self._exchange(sizes, present)
        factor = (1.0 if objective.is_sum else own / self._total) * owner.peers.size
        if not owner.syncs:
            if factor != 1:
                self._leaves.scale(factor)
            return factor
        owner.agreed = self._sizes
        for j in range(len(self._stages)):
            if j not in self._sums:
                self._start_sums(j, own)
        anywhere = map(any, zip(*rows, strict=True))
        used = {id(leaf) for leaf, one in zip(chain(*self._stages), anywhere, strict=True) if one}
        for leaves, flat, work in chain.from_iterable(self._sums.values()):
            owner.peers.wait(work, flat)
            if flat.device.type != "cpu":  # written on a worker's stream, read on the caller's
                flat.record_stream(torch.accelerator.current_stream(flat.device))
            parts = torch.split(flat.div_(self._total), [leaf.numel() for leaf in leaves])
            for leaf, part in zip(leaves, parts, strict=True):
                if id(leaf) in used:
                    leaf.grad = torch.empty_like(leaf) if leaf.grad is None else leaf.grad
                    leaf.grad.copy_(part.view(leaf.shape))
        return factor

    def _exchange(self, sizes: Any = (), present: Sequence[bool] = ()) -> list[Sequence[bool]]:
        """Compares the call in all processes and adds up weights; returns every ``present``."""
        objective, weight = self._objective, float(self._objective.total())
        found: dict[Any, Any] = {}
        if self.what["global_loss"]:
            metrics = objective.metrics() or {}
            found = {None: objective.loss(), **{k: v for k, v in metrics.items() if _is_number(v)}}
        what = {**self.what, "loss_reduction='sum'": objective.is_sum, "metrics": [*found][1:]}
        for j, stage in enumerate(sizes):
            whose = f"stage {j}" if j + 1 < len(sizes) else "what is no parameter of the pipe"
            what[f"the bytes of gradients of {whose} (0: frozen)"] = stage
        factor = 1.0 if objective.is_sum else weight
        parts = {name: float(x) * factor if factor else 0.0 for name, x in found.items()}
        rows = self._owner.peers.agree(lambda: (what, (weight, present, parts)))
        if not objective.is_sum:  # without any weight, all gradients are zero
            self._total = sum(row[0] for row in rows) or 1.0
        self._results = {name: sum(row[2][name] for row in rows) / self._total for name in parts}
        return [row[1] for row in rows]

    @torch.no_grad()
    def _start_sums(self, j: int, own: float) -> None:
        """Starts the all-reduces of a stage; the gradients of this process have weight ``own``."""
        owner = self._owner
        group = owner.groups[j if j < len(owner.groups) else 0]
        sent = self._sums[j] = []
        stage = self._stages[j]
        for indices in in_buckets(stage, int(owner.capacity)):
            leaves = [stage[k] for k in indices]
            flat = _flat(leaves, [leaf.grad for leaf in leaves]).mul_(own)
            before = [self._leaves.grad_before(leaf) for leaf in leaves]
            if any(grad is not None for grad in before):
                flat.add_(_flat(leaves, before), alpha=self._total / owner.peers.size - own)
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            sent.append((leaves, flat, dist.all_reduce(real, group=group, async_op=True)))


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _checksum(tensors: Sequence[Tensor]) -> int:
    """The sum of the tensors' bytes, read as integers of the element size."""
    sums: list[Tensor] = []
    for tensor in tensors:
        dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor
        dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        words = dense.contiguous().view(_WORDS[dense.element_size()])
        sums.append(words.sum(dtype=torch.int64))
    return int(torch.stack(sums).sum()) if sums else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and not value.dim())


def _flat(leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor:
    """Gradients in one flat tensor, float32 in place of float16, in which sums would overflow."""
    pairs = zip(leaves, grads, strict=True)
    parts = [(torch.zeros_like(a) if grad is None else grad).reshape(-1) for a, grad in pairs]
    flat = torch.cat(parts)
    return flat.float() if flat.dtype == torch.float16 else flat


def _has_dense_grad(leaf: Tensor) -> bool:
    if leaf.grad is not None and leaf.grad.layout is not torch.strided:
        raise TypeError(
            f"a parameter of shape {list(leaf.shape)} has a sparse gradient, which data_parallel "
            "does not average: make its layer with sparse=False"
        )
    return leaf.grad is not None
