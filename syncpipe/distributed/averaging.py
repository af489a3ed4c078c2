"""What a data-parallel pipe has besides: the other processes, and how gradients become one.

    process 0   stage 2   F F B F B B | all_reduce in the group of stage 2
                stage 1   F F . B F B B | all_reduce in the group of stage 1
                caller    numbers ...          | numbers | waits, and writes the gradients

Each stage has a process group of its own, so whoever is through first begins: the worker that runs
the last backward of a stage starts the sum of ``gradient x weight``, and goes on. Numbers go by one
more group, on gloo: when a call begins what it is and what its mini-batch weighs, and when it ends
what it weighed, and what there is besides. Where weights are known only in the end, or another
process is late, the caller starts the sums.

Process ``r`` goes back from ``sum(w_i l_i) / A_r``, ``A_r`` the weight that it assumed for its
mini-batch (``training.loss.objective``), and contributes that times ``A_r / W``, ``W`` the weight
of all. What is in ``.grad`` between calls is always such that its mean over the ``R`` processes is
the gradient: after ``no_sync`` what a call added is multiplied by ``R A_r / W``, and an ``R``-th
part of what was there before goes into the sum.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from syncpipe.data import tensors_in
from syncpipe.distributed.peers import LostProcess, Peers
from syncpipe.runtime.engine import RUNNING, Run
from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.schedule import Schedule
from syncpipe.schedules.steps import numbers_of
from syncpipe.training.gradients import Gradients
from syncpipe.training.leaves import Leaves, is_shared
from syncpipe.training.loss.objective import Objective
from syncpipe.training.task import Watch

__all__ = ["Averaging"]

_BACKWARD = ("backward", "backward_input", "backward_weight")
_LOOK_SECONDS = 0.25  # so often whoever waits looks what the others do, and hears of Ctrl-C
_Step = Callable[[Any], Any]


class Averaging:
    """The other processes, as a data-parallel pipe knows them.

    Args:
        group: of the processes.
        stages: how many the pipe has.
        capacity: bytes that are reduced at a time.
        timeout: seconds to wait for another process.
    """

    def __init__(
        self, group: dist.ProcessGroup, stages: int, capacity: float, timeout: float
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=timeout + 5),  # so that we are the ones to say so
            # Processes that are not in the group know nothing of this.
            "use_local_synchronization": len(ranks) < dist.get_world_size(),
        }
        backend = dist.get_backend_config(group)
        control = dist.new_group(ranks, backend="gloo", **options)
        self.groups = [dist.new_group(ranks, backend=backend, **options) for _ in range(stages)]
        self.peers = Peers(control, "data-parallel pipe", "process")
        self.capacity, self._timeout = capacity, timeout
        self.syncs = True
        self._process = os.getpid()
        self._busy = threading.Lock()
        groups = [control, *self.groups]
        weakref.finalize(self, _destroy, groups, os.getpid()).atexit = False

    # --- what a pipe calls -----------------------------------------------------------------------

    def train_batch(self, step: _Step, *, global_loss: bool, accumulate: float) -> Any:
        """``train_batch`` in all processes, of which ``step`` does that of this one."""
        what = {
            "no_sync": not self.syncs, "global_loss": global_loss, "accumulate": accumulate
        }  # fmt: skip

        def run(call: _Call) -> Any:
            result = step(call)
            return self._combined(result, call.share) if global_loss else result

        return self._made("train_batch", what, run)

    def eval_batch(self, step: _Step) -> Any:
        """The same, for the loss of all processes."""

        def run(call: _Call) -> Any:
            def weighed(objective: Objective) -> None:
                assumed, total = objective.assumed, objective.total
                assert assumed is not None
                call.adds_up = objective.adds_up
                call.weigh(assumed[0] if total is None else total)

            result = step(weighed)
            return self._combined(result, call.share)

        return self._made("eval_batch", {}, run)

    def broadcast_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Gives all processes the buffers of process 0, as one call of the pipe."""

        def run(call: _Call) -> None:
            call.weigh(1.0)
            self.broadcast(buffers)

        self._made("broadcast_buffers", {}, run)

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Gives all processes the values of process 0."""
        for tensor in tensors:
            dense = tensor.detach().contiguous()
            work = dist.broadcast(dense, None, self.groups[0], True, group_src=0)
            self.wait(work, dense)
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

    def forward(self, partitions: Sequence[nn.Module], output: Any) -> None:
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
            self.peers.begin("a call", watched=False)  # which one, they tell each other
            call = _Call(self, name, what)
            try:
                return run(call)
            except BaseException as error:
                if not call.begun and isinstance(error, Exception):
                    self.peers.refused(error)
                    raise
                found = self.peers.fail(error)
                for group in self.groups:
                    self.peers.close(group)
                raise found from None
            finally:
                self.peers.finish()
        finally:
            self._busy.release()

    def wait(self, work: Any, tensor: Tensor) -> None:
        """Waits for a collective; on an accelerator the current stream does, not the host.

        Raises:
            LostProcess: another process does something else, or takes too long.
        """
        while tensor.device.type == "cpu" and not work.is_completed():
            with suppress(RuntimeError):  # the time is over
                work.wait(timedelta(seconds=_LOOK_SECONDS))
            if work.is_completed():
                break
            if reason := self.peers.difference():
                raise LostProcess(reason)
            if self.peers.waited() > self._timeout:
                raise LostProcess(self.peers.missing(self._timeout))
        work.wait()

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Tells everybody some numbers, and returns those of everybody."""
        rows, work = self.started(numbers)
        self.wait(work, rows[0])
        return [row.tolist() for row in rows]

    def started(self, numbers: Sequence[float]) -> tuple[list[Tensor], Any]:
        """The same, without waiting: the rows, and what to wait for."""
        own = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.peers.size)]
        return rows, dist.all_gather(rows, own, self.peers.group, async_op=True)

    def _combined(self, result: Any, share: float) -> Any:
        """The loss of all processes in the place of that of this one, and metrics that are numbers.

        Args:
            result: of ``train_batch`` or ``eval_batch``.
            share: of the weight of all processes that of this one.
        """
        parts = list(result) if isinstance(result, tuple) else [result]
        metrics = parts[-1] if len(parts) > 1 and isinstance(parts[-1], dict) else {}
        names = [name for name, value in metrics.items() if not isinstance(value, list)]
        own = [float(parts[0]), *[float(metrics[name]) for name in names]]
        rows = self.exchange([value * share if share else 0.0 for value in own])
        loss, *numbers = (sum(column) for column in zip(*rows, strict=True))
        parts[0] = torch.full_like(parts[0], loss)
        if metrics:
            found = {
                name: torch.full_like(metrics[name], number, dtype=torch.promote_types(
                    metrics[name].dtype, torch.float32
                )) if isinstance(metrics[name], Tensor) else number
                for name, number in zip(names, numbers, strict=True)
            }  # fmt: skip
            parts[-1] = {**metrics, **found}
        return tuple(parts) if isinstance(result, tuple) else parts[0]


class _Bucket(NamedTuple):
    """Leaves of one device and dtype, and the sum of their gradients that is on its way."""

    leaves: list[Tensor]
    flat: Tensor
    work: Any


class _Call:
    """One call in all processes; for ``train_batch`` as of ``training.train.Averaging``.

    Attributes:
        begun: whether others know of it.
        adds_up: losses are sums, and so is that of all processes.
        share: of the weight of all processes that of this one, in the end.
    """

    def __init__(self, owner: Averaging, name: str, what: dict[str, Any]) -> None:
        self._owner, self._what = owner, {"the call": name, **what}
        self.begun = self.adds_up = False
        self.share = 1.0
        self._lock = threading.Lock()
        self._sent: dict[int, list[_Bucket]] = {}
        self._stages: list[list[Tensor]] = []

    def begin(
        self,
        plan: Schedule,
        leaves: Leaves,
        gradients: Gradients,
        objective: Objective,
        extra: Mapping[int, Mapping[Tensor, Tensor]],
    ) -> Watch:
        """Announces the call, and starts to tell what the mini-batch weighs, if that is known."""
        self._leaves, self._gradients = leaves, gradients
        self._objective, self._extra = objective, extra
        self.adds_up = objective.adds_up
        self._stages = [
            [leaf for leaf in stage if leaf.requires_grad] for stage in leaves.parameters[: plan.n]
        ]
        known = objective.assumed
        weight = float(known[0]) if known is not None and known[1] else None
        self._announce(weight)
        replicated = [len(numbers) > 1 for numbers in numbers_of(plan.device_of)]
        left = [plan.m] * plan.n  # backwards, each half for itself
        for _, j in plan.splits:
            left[j] += 1
        left = [1 if replicated[j] else count for j, count in enumerate(left)]

        def watch(kind: Kind, j: int, run: Run) -> Run:
            last = ("reduce",) if j < plan.n and replicated[j] else _BACKWARD
            if j >= plan.n or kind not in last or plan.n != len(self._owner.groups):
                return run

            def counting(i: int, given: list[Any]) -> Sequence[Any]:
                made = run(i, given)
                left[j] -= 1
                if not left[j]:
                    self._start_early(j)
                return made

            return counting

        return watch

    def weigh(self, weight: Any) -> None:
        """A call without gradients: announces it, and learns its share."""
        self._announce(float(weight))
        self._end(float(weight), 0.0)

    def _announce(self, weight: float | None) -> None:
        shapes = [[_shape(leaf) for leaf in stage] for stage in self._stages]
        self._what["loss_reduction='sum'"] = self.adds_up
        self._what["what its parameters are"] = _digest(shapes)
        self._own, self.begun = weight, True
        mine = [_digest(self._what), float("nan") if weight is None else weight]
        self._rows, self._told = self._owner.started(mine)

    def _start_early(self, j: int) -> None:
        """Starts the sums of a stage, if it is known what all weigh; in the worker of the stage."""
        aside = {id(leaf) for leaves in self._extra.values() for leaf in leaves}
        if not self._owner.syncs or not self._told.is_completed():
            return  # the caller starts them in the end
        rows = [row.tolist() for row in self._rows]
        whole = sum(row[1] for row in rows)  # no number as long as one is not known
        if any(row[0] != rows[0][0] for row in rows) or not whole > 0 or self._own is None:
            return
        if not any(id(leaf) in aside for leaf in self._stages[j]):
            self._start(j, self._own, whole)

    @torch.no_grad()
    def _start(self, j: int, own: float, whole: float) -> None:
        """Starts the sums of a stage: of what this process contributes to its gradients."""
        group = self._owner.groups[j] if j < len(self._owner.groups) else self._owner.groups[0]
        size, gradients = self._owner.peers.size, self._gradients
        scale = 1.0 if self.adds_up else own / whole if whole else 0.0
        sent = self._sent.setdefault(j, [])
        for leaves in _bucketed(self._stages[j], self._owner.capacity):
            parts, rest = [], []
            for leaf in leaves:
                grad, before = _dense(leaf), gradients.before(leaf)
                parts.append((torch.zeros_like(leaf) if grad is None else grad).reshape(-1))
                rest.append(torch.zeros_like(leaf) if before is None else before)
            flat = torch.cat(parts).mul_(scale)
            if any(gradients.before(leaf) is not None for leaf in leaves):
                flat.add_(torch.cat([part.reshape(-1) for part in rest]), alpha=1 / size - scale)
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            sent.append(_Bucket(leaves, flat, dist.all_reduce(real, group=group, async_op=True)))

    def finish(self) -> float:
        """Makes gradients those of all processes; as of ``training.train.Averaging``."""
        owner, objective = self._owner, self._objective
        assumed, total = objective.assumed, objective.total
        assert assumed is not None
        own = float(assumed[0])  # what gradients were divided by
        weight = own if total is None else float(total)
        missing, found = 0.0, 0.0
        if owner.syncs:
            outside = [leaf for leaf in self._leaves.found() if leaf.requires_grad]
            found = float(_digest([_shape(leaf) for leaf in outside]))
            self._stages.append(outside)
            missing = float(sum(_dense(leaf) is None for stage in self._stages for leaf in stage))
        ended = self._end(weight, missing, found)
        factor = float(owner.peers.size)
        if not self.adds_up:
            factor *= own / self._whole if self._whole else 0.0
        if not owner.syncs:
            if factor != 1:
                self._gradients.scale(factor)
            return factor
        if any(row[2] != ended[0][2] for row in ended):
            raise RuntimeError(
                "loss_fn or a layer uses tensors that require grad and are no parameters of the "
                "pipe, and other ones in another process: their gradients cannot be averaged. Let "
                "all processes use the same, or make them parameters of a layer"
            )
        for j in range(len(self._stages)):
            if j not in self._sent:
                self._start(j, own, self._whole)
        for bucket in [bucket for j in sorted(self._sent) for bucket in self._sent[j]]:
            owner.wait(bucket.work, bucket.flat)
            if bucket.flat.device.type != "cpu":  # made on a worker's stream, read on the caller's
                stream = torch.accelerator.current_stream(bucket.flat.device)
                bucket.flat.record_stream(stream)
        nowhere = self._without_gradient() if any(row[1] for row in ended) else set()
        for buckets in self._sent.values():
            for bucket in buckets:
                _write(bucket, nowhere)
        return factor

    def _end(self, weight: float, missing: float, found: float = 0.0) -> list[list[float]]:
        """The numbers after the last backward.

        Raises:
            ValueError: processes make different calls.
        """
        self._owner.wait(self._told, self._rows[0])
        if any(float(row[0]) != float(self._rows[0][0]) for row in self._rows):
            raise self._difference()
        ended = self._owner.exchange([weight, missing, found])
        self._whole = sum(row[0] for row in ended)
        self.share = 1.0 if self.adds_up else weight / self._whole if self._whole else 0.0
        return ended

    def _without_gradient(self) -> set[int]:
        """The leaves, by identity, that have no gradient in any process."""
        leaves = [leaf for stage in self._stages for leaf in stage]
        rows = self._owner.exchange([float(leaf.grad is not None) for leaf in leaves])
        columns = zip(leaves, zip(*rows, strict=True), strict=True)
        return {id(leaf) for leaf, there in columns if not any(there)}

    def _difference(self) -> ValueError:
        """Says in what calls differ."""
        everywhere = self._owner.peers.everywhere(self._what)
        first, text = everywhere[0], ""
        for rank, found in enumerate(everywhere):
            for name in {**found, **first}:
                if not text and found.get(name) != first.get(name):
                    text = (
                        f"processes {rank} and 0 do not make the same call of a data-parallel pipe:"
                        f" {name} is {found.get(name)!r} there and {first.get(name)!r} in process 0"
                    )
        return ValueError(text)


def _bucketed(leaves: Sequence[Tensor], capacity: float) -> list[list[Tensor]]:
    """Leaves in the order of backward, by device and dtype, in pieces of so many bytes."""
    full: list[list[Tensor]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for leaf in reversed(leaves):
        there = filling.setdefault((leaf.device, leaf.dtype), [])
        if there and sum(t.nbytes for t in there) + leaf.nbytes > capacity:
            full.append(filling.pop((leaf.device, leaf.dtype)))
            there = filling.setdefault((leaf.device, leaf.dtype), [])
        there.append(leaf)
    return [*full, *filling.values()]


@torch.no_grad()
def _write(bucket: _Bucket, nowhere: set[int]) -> None:
    """Makes the gradients of leaves what is in the sum of all processes."""
    into: list[Tensor] = []
    values: list[Tensor] = []
    parts = torch.split(bucket.flat, [leaf.numel() for leaf in bucket.leaves])
    for leaf, part in zip(bucket.leaves, parts, strict=True):
        if id(leaf) in nowhere:
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


def _shape(leaf: Tensor) -> tuple[list[int], str]:
    return list(leaf.shape), str(leaf.dtype)


def _digest(value: Any) -> int:
    """A number of 48 bits for a value, the same in all processes."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=6).digest(), "big")


def _destroy(groups: list[dist.ProcessGroup], process: int) -> None:
    """Ends the groups of a pipe that is gone."""
    for group in groups if process == os.getpid() else []:
        with suppress(Exception):  # all may have been destroyed by the user
            dist.destroy_process_group(group)
