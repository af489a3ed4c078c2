"""Bytes that are alive: of a step of a pipe on the CPU, and of tensors on the host.

A dispatch mode sees every result of every operation, and counts each storage once until it dies.
Not counted: what a kernel takes and gives back inside of one operation, workspaces, and memory that
an allocator holds without using it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import syncpipe
from syncpipe import Pipe, Worker
from syncpipe.balance.stored import Live
from syncpipe.runtime.engine import Run
from syncpipe.runtime.streams import Lane
from syncpipe.schedules.schedule import Kind
from syncpipe.training.train import TrainingTask

__all__ = ["HostBytes", "actual_peaks"]


class HostBytes(Live):
    """Counts the bytes that operations make on the host: ``alive``, and ``most``, may be set."""

    def watch(self, tensors: Iterable[Tensor]) -> None:
        super().watch(tensor for tensor in tensors if tensor.device.type == "cpu")


class StageBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts for each stage the bytes that are alive, and the most, of what was made ``at`` it."""

    def __init__(self, stages: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive, self.most = [0] * stages, [0] * stages
        self._stage = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of tensors, each until it dies."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key, size, j = storage._cdata, storage.nbytes(), self._stage
            if key not in self._known:
                self._known[key] = weakref.ref(storage, partial(self._forget, key, size, j))
                self.alive[j] += size
                self.most[j] = max(self.most[j], self.alive[j])

    def _forget(self, key: int, size: int, j: int, _: Any) -> None:
        del self._known[key]
        self.alive[j] -= size

    @contextmanager
    def at(self, j: int) -> Iterator[None]:
        """What is made in here is on this stage."""
        before, self._stage = self._stage, j
        try:
            yield
        finally:
            self._stage = before


class _NoStreams:
    """Streams of a device that has none, so that the pipe copies over borders all the same."""

    def _nothing(self, *_: Any) -> None: ...

    current = new = record = stamp = wait = keep = _nothing

    def done(self, event: Any) -> bool:
        return True

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()


class _CopyingLane(Lane):
    """A lane to which every other one is another memory, as accelerators are to each other."""

    def __init__(self, device: torch.device, counter: StageBytes) -> None:
        super().__init__(device, _NoStreams())
        self.counter = counter

    def send(self, tensors: list[Tensor], to: Lane, after: Any = None) -> tuple[list[Tensor], Any]:
        with self.counter.at(to.device.index):
            return [tensor.to(to.device, copy=True) for tensor in tensors], None


class CountedWorker(Worker):
    """A worker on ``cpu:j``, which stands for a device with a memory of its own."""

    def __init__(self, j: int, counter: StageBytes) -> None:
        super().__init__(torch.device("cpu", j))
        self._counter = counter

    def lane(self) -> Lane:
        return _CopyingLane(self.device, self._counter)

    caller_lane = lane


def _counting(counter: StageBytes) -> type[TrainingTask]:
    """The training driver's task, whose actions make everything at their stage."""

    class Counting(TrainingTask):
        def bind(self, kind: Kind, j: int) -> Run:
            run, stage = super().bind(kind, j), self.call.lane_of[j].device.index

            def counted(i: int, received: list[Any]) -> Sequence[Any]:
                with counter.at(stage):
                    return run(i, received)

            return counted

    return Counting


def actual_peaks(
    model: nn.Sequential,
    balance: Sequence[int],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    loss_fn: Callable[..., Tensor],
    *,
    samples: int,
    m: int,
    schedule: str,
    checkpoint: str,
    gradients: bool = False,
) -> list[int]:
    """What a whole step of ``m`` micro-batches takes, counted while it runs on one thread.

    Args:
        model: on the CPU.
        balance: how many layers each stage has.
        batch: makes input and target of so many samples.
        loss_fn: for ``train_batch``.
        samples: in a micro-batch.
        m: number of micro-batches.
        schedule: its name.
        checkpoint: ``"always"``, ``"except_last"`` or ``"never"``.
        gradients: whether parameters have gradients before the step.

    Returns:
        For each stage the most bytes besides parameters, buffers, the mini-batch and gradients
        that are there before the step; gradients that it makes and copies included.
    """
    counter = StageBytes(len(balance))
    workers = [CountedWorker(j, counter) for j in range(len(balance))]
    pipe = Pipe(model, balance, devices=workers, checkpoint=checkpoint)
    counter.watch([*model.parameters(), *model.buffers()])
    # The first step learns about the layers.
    for chunks, name, kept in ((2, "gpipe", False), (m, schedule, gradients)):
        pipe.chunks = chunks
        if not kept:
            pipe.zero_grad()
        counting = mock.patch("syncpipe.training.train.TrainingTask", _counting(counter))
        with counter, counting, syncpipe.inline():
            x, target = batch(chunks * samples)
            before = list(counter.alive)
            counter.most = list(before)
            pipe.train_batch(x, target, loss_fn=loss_fn, schedule=name)
    return [most - b for most, b in zip(counter.most, before, strict=True)]
