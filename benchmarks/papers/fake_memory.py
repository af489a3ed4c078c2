"""Peak memory of the real stages of a pipe under a real schedule, on tensors without values.

A pipe is built whose stages are on the devices ``cpu:0``, ``cpu:1``, ... of ``FakeTensorMode``, and
``train_batch`` runs on the calling thread. A dispatch mode sees every result of every operation,
counts each storage once, on the device of its tensor, and learns by a weak reference when it dies
(:mod:`benchmarks.papers.fake_storages`).

For each action of a stage (forward, recomputation, backward) it is written down by how many bytes
each device has more afterwards, and how many more at most meanwhile. Sending something over a
border puts a copy on the other device, as between accelerators. The largest sum of each device is
its peak::

    peak of a device = parameters, gradients, optimizer, mini-batch
                     + max over its actions (what all actions before it left + rise of this one)

Not counted: what a kernel takes and gives back inside of one operation, workspaces of cuDNN, what
the CUDA context takes, and memory that an allocator holds without using it. The backward of an
operation in place on a view (U-Net's ReLU behind InstanceNorm) copies a gradient more on real
tensors than on fake ones. All else that was compared is the same to the byte (the tests do it).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import syncpipe
from benchmarks.papers.fake_storages import CountedWorker, StorageCounter
from syncpipe import Pipe
from syncpipe.runtime.engine import Run
from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.schedule import Action
from syncpipe.training.task import TrainingTask

__all__ = ["Batch", "actual_peaks"]

#: Makes input and target of so many samples, on the first and the last device.
Batch = Callable[[int, "torch.device | str", "torch.device | str"], tuple[Any, Any]]


@dataclass(frozen=True)
class Effect:
    """What an action does to the memory of each device, in bytes.

    Attributes:
        rise: how much more there is at most while it runs.
        change: how much more there is when it is over.
    """

    rise: dict[int, int]
    change: dict[int, int]


Log = list[tuple[Action, Effect]]


def _recording(counter: StorageCounter, log: Log, start: Counter[int]) -> type[TrainingTask]:
    """The training driver's task, which writes down what its actions do to the memory, and what is
    alive when the first of them begins."""

    class Recording(TrainingTask):
        def bind(self, kind: Kind, j: int) -> Run:
            run, device = super().bind(kind, j), self.call.lane_of[j].device.index

            def recorded(i: int, received: list[Any]) -> Sequence[Any]:
                before = counter.mark()
                if not log:
                    start.update(before)
                with counter.at(device):
                    sent = run(i, received)
                now = counter.alive
                rise = {d: most - before[d] for d, most in counter.most.items() if most > before[d]}
                change = {d: now[d] - before[d] for d in now if now[d] != before[d]}
                log.append((Action(kind, i, j), Effect(rise, change)))
                return sent

            return recorded

    return Recording


class _Run:
    """A pipe that is counted.

    Args:
        model: the layers; on ``meta`` if it is to run on fake tensors.
        balance: how many of them each stage has.
        batch: makes inputs and targets.
        loss_fn: for ``train_batch``.
        checkpoint: for the pipe.
        fake: run on fake tensors; False: on the real ones of the model.
    """

    def __init__(
        self,
        model: nn.Sequential,
        balance: Sequence[int],
        batch: Batch,
        loss_fn: Callable[..., Tensor],
        *,
        checkpoint: str,
        fake: bool,
    ) -> None:
        self.model, self.balance, self.batch, self.loss_fn = model, balance, batch, loss_fn
        self.checkpoint, self.fake = checkpoint, fake
        self.counter = StorageCounter()

    @contextmanager
    def ready(self) -> Iterator[Pipe]:
        """Gives the pipe, within the modes that it needs."""
        n = len(self.balance)
        self.counter.place = None if self.fake else 0
        workers = [CountedWorker(j, self.counter) for j in range(n)]
        with ExitStack() as stack:
            if self.fake:
                stack.enter_context(FakeTensorMode())
            stack.enter_context(self.counter)
            layers = iter(self.model)
            for j, size in enumerate(self.balance):
                for layer in itertools.islice(layers, size):
                    if self.fake:
                        _fill(layer, workers[j].device)
                    self.counter.watch(itertools.chain(layer.parameters(), layer.buffers()), j)
            yield Pipe(self.model, self.balance, devices=workers, checkpoint=self.checkpoint)

    def step(
        self, pipe: Pipe, m: int, samples: int, schedule: str, *, gradients: bool = False
    ) -> tuple[Log, Counter[int]]:
        """One ``train_batch`` into gradients of None, or into those that are there.

        Returns:
            What its actions did, and what it had made on each device before the first of them.
        """
        log: Log = []
        start: Counter[int] = Counter()
        pipe.chunks = m
        if not gradients:
            pipe.zero_grad()
        last = len(self.balance) - 1
        with self.counter.at(0):
            x, target = self.batch(m * samples, torch.device("cpu", 0), torch.device("cpu", last))
        ready = self.counter.mark()
        recording = _recording(self.counter, log, start)
        with mock.patch("syncpipe.training.train.TrainingTask", recording), syncpipe.inline():
            pipe.train_batch(x, target, loss_fn=self.loss_fn, schedule=schedule)
        start.subtract(ready)
        return log, start


def _fill(layer: nn.Module, device: torch.device) -> None:
    """Puts fake tensors on a device in place of parameters and buffers on ``meta``."""
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                module._parameters[name] = nn.Parameter(made, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                made = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                module._buffers[name] = made


def actual_peaks(
    model: nn.Sequential,
    balance: Sequence[int],
    batch: Batch,
    loss_fn: Callable[..., Tensor],
    *,
    samples: int,
    m: int,
    schedule: str,
    checkpoint: str,
    fake: bool,
    gradients: bool = False,
) -> tuple[list[int], list[Action]]:
    """What a whole step of ``m`` micro-batches takes, counted while it runs on one thread.

    Args:
        model: on ``meta`` for fake tensors, on the CPU for real ones.
        balance: how many layers each stage has; stage ``j`` is on device ``j``.
        batch: makes inputs and targets.
        loss_fn: for ``train_batch``.
        samples: in a micro-batch.
        m: number of micro-batches.
        schedule: its name.
        checkpoint: ``"always"``, ``"except_last"`` or ``"never"``.
        fake: whether it runs on fake tensors.
        gradients: whether parameters have gradients before the step.

    Returns:
        For each device the most bytes besides parameters, buffers, the mini-batch and gradients
        that are there before the step; gradients that it makes and copies included. And the
        actions in the order in which they ran.
    """
    run = _Run(model, balance, batch, loss_fn, checkpoint=checkpoint, fake=fake)
    with run.ready() as pipe:
        run.step(pipe, 2, samples, "gpipe")
        log, made = run.step(pipe, m, samples, schedule, gradients=gradients)
    now = [made[device] for device in range(len(balance))]
    peaks = list(now)
    for _, effect in log:
        for device, rise in effect.rise.items():
            peaks[device] = max(peaks[device], now[device] + rise)
        for device, change in effect.change.items():
            now[device] += change
    return peaks, [action for action, _ in log]
