"""Peak memory of the real stages of a pipe under a real schedule, on tensors without values.

A pipe is built whose stages are on the devices ``cpu:0``, ``cpu:1``, ... of ``FakeTensorMode``, and
``train_batch`` runs on the calling thread. A dispatch mode sees every result of every operation,
counts each storage once, on the device of its tensor, and learns by a weak reference when it dies
(:mod:`benchmarks.papers.fake_storages`).

One micro-batch is enough: for each action of a stage (forward, recomputation, backward) it is
written down by how many bytes each device has more afterwards, and how many more at most meanwhile.
Sending something over a border puts a copy on the other device, as between accelerators. The
schedule does the rest: its actions, in the order in which they end when all stages take equally
long, are added up, and the largest sum of each device is its peak::

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import syncpipe
from benchmarks.papers.fake_storages import CountedWorker, StorageCounter
from syncpipe import Pipe
from syncpipe.runtime.engine import Run
from syncpipe.schedules.build import ScheduleLike, build
from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.schedule import Action, Schedule
from syncpipe.schedules.simulation import Costs, simulate
from syncpipe.training.task import TrainingTask

__all__ = ["Batch", "Effect", "Effects", "actual_peaks"]

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
            run, device = super().bind(kind, j), self._call.lane_of(j).device.index

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


@dataclass
class Effects:
    """What the actions of the stages of a model do to the memory of their devices.

    Args:
        build_model: makes the model on ``meta``, once for each checkpoint mode.
        balance: how many layers each stage has; stage ``j`` is on device ``j``.
        batch: makes inputs and targets.
        loss_fn: for ``train_batch``.
        samples: in a micro-batch.

    Attributes:
        parameters: for each stage the number of its parameters.
        buffer_bytes: for each stage.
        batch_bytes: of the inputs and the targets of one micro-batch.
    """

    build_model: Callable[[], nn.Sequential]
    balance: Sequence[int]
    batch: Batch
    loss_fn: Callable[..., Tensor]
    samples: int
    parameters: list[int] = field(default_factory=list)
    buffer_bytes: list[int] = field(default_factory=list)
    batch_bytes: tuple[int, int] = (0, 0)
    _tables: dict[str, dict[tuple[Any, ...], Effect]] = field(default_factory=dict)

    def activations(self, schedule: ScheduleLike, m: int, checkpoint: str = "always") -> list[int]:
        """For each device the most bytes besides parameters, gradients, optimizer and buffers.

        Gradients of parameters are taken to be there from the step before, as those who count 12
        or 16 bytes for a parameter do: what the backward of a layer adds to them counts here until
        it is added.

        Args:
            schedule: as for :func:`syncpipe.schedules.build`.
            m: number of micro-batches.
            checkpoint: ``"always"``, ``"except_last"`` or ``"never"``.
        """
        n = len(self.balance)
        plan = build(schedule, m, range(n))
        again = {"always": m, "except_last": m - 1, "never": 0}[checkpoint]
        peaks = self.walk(_in_time(plan, again), again, new_gradients=False)
        for device, size in zip((0, n - 1), self.batch_bytes, strict=True):
            peaks[device] += m * size
        return peaks

    def walk(self, order: Iterable[Action], again: int, *, new_gradients: bool) -> list[int]:
        """Adds up the effects of actions, and returns the largest sum of each device.

        Args:
            order: all actions of a mini-batch, one after another.
            again: so many micro-batches, the first ones, are computed again.
            new_gradients: parameters have no gradients before; they stay when they are made.
        """
        n = len(self.balance)
        now, peaks = [0] * n, [0] * n
        first = set(range(n)) if new_gradients else set()
        for kind, i, j in order:
            table = self._table("always" if i < again else "never")
            new = kind == "backward" and j in first
            effect = table[kind, j, new]
            if new:
                first.discard(j)
            for device, rise in effect.rise.items():
                peaks[device] = max(peaks[device], now[device] + rise)
            for device, change in effect.change.items():
                now[device] += change
        return peaks

    def _table(self, mode: str) -> dict[tuple[Any, ...], Effect]:
        if mode not in self._tables:
            self._tables[mode] = self._measured(mode)
        return self._tables[mode]

    def _measured(self, mode: str) -> dict[tuple[Any, ...], Effect]:
        """Runs two micro-batches: the first to go back makes the gradients, the other adds."""
        model = self.build_model()
        self.parameters = [sum(p.numel() for p in part.parameters()) for part in self._cut(model)]
        self.buffer_bytes = [
            sum(b.numel() * b.element_size() for b in part.buffers()) for part in self._cut(model)
        ]
        given = self.batch(self.samples, "meta", "meta")
        self.batch_bytes = (_bytes(given[0]), _bytes(given[1]))
        run = _Run(model, self.balance, self.batch, self.loss_fn, checkpoint=mode, fake=True)
        with run.ready() as pipe:
            # Once before: a pipe learns in its first forward what its layers do.
            run.step(pipe, 2, self.samples, "gpipe")
            log, _ = run.step(pipe, 2, self.samples, "gpipe")
        table: dict[tuple[Any, ...], Effect] = {}
        for (kind, i, j), effect in log:
            table[kind, j, kind == "backward" and i == 1] = effect
        return table

    def _cut(self, model: nn.Sequential) -> list[nn.Module]:
        ends = [0, *itertools.accumulate(self.balance)]
        return [model[a:b] for a, b in itertools.pairwise(ends)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _in_time(plan: Schedule, again: int) -> list[Action]:
    """The actions of a schedule in the order in which they end if all stages take equally long."""
    counts = (again,) * plan.n
    simulation = simulate(plan, Costs.even(plan.n), counts)
    return [span.action for span in sorted(simulation.spans, key=lambda span: span.end)]


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
        balance, batch, loss_fn, samples, m, schedule, checkpoint: as for :class:`Effects`.
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
