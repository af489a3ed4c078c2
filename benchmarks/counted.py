"""Bytes that are alive: of a step of a pipe on tensors without values, and of tensors on the host.

A pipe is built whose stages are on the devices ``cpu:0``, ``cpu:1``, ... of ``FakeTensorMode``, and
``train_batch`` runs on the calling thread. A dispatch mode sees every result of every operation,
counts each storage once, on the device of its tensor, and learns by a weak reference when it dies.
(Fake tensors have shapes, devices and storages of the right size, and no memory behind them.)

For each action of a stage (forward, recomputation, backward) it is written down by how many bytes
each device has more afterwards, and how many more at most meanwhile. Sending something over a
border puts a copy on the other device, as between accelerators. The largest sum of each device is
its peak. Not counted: what a kernel takes and gives back inside of one operation, workspaces, and
memory that an allocator holds without using it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import syncpipe
from syncpipe import Pipe, Worker
from syncpipe.runtime.engine import Run
from syncpipe.runtime.streams import Lane
from syncpipe.schedules.schedule import Action, Kind
from syncpipe.training.train import TrainingTask

__all__ = ["Batch", "HostBytes", "actual_peaks"]


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are alive, for each device.

    Attributes:
        bytes: by the index of the device.
        peak: the largest ``bytes`` since :meth:`mark`.
        place: where the results of operations are; None: where their tensors say they are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self.place: int | None = None
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default and self.place is None:
            # A pipe asks whether a forward changed a buffer that it did not write into.
            return True
        result = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def watch(self, tensors: Iterable[Tensor], place: int | None = None) -> None:
        """Counts the storages of tensors, each until it dies."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            size = storage.nbytes()
            at = place if place is not None else self.place
            device = (tensor.device.index or 0) if at is None else at
            self._known[key] = weakref.ref(storage, self._forget(key, size, device))
            self.bytes[device] += size
            self.peak[device] = max(self.peak[device], self.bytes[device])

    def _forget(self, key: int, size: int, device: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            del self._known[key]
            self.bytes[device] -= size

        return forget

    def mark(self) -> Counter[int]:
        """What is alive now; the largest is counted anew from here."""
        self.peak = self.bytes.copy()
        return self.bytes.copy()

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Real tensors do not say on which worker they are: for a while they are all on this."""
        before, self.place = self.place, None if self.place is None else place
        try:
            yield
        finally:
            self.place = before


class HostBytes(StorageCounter):
    """Counts the storages that operations make on the host, each until it dies."""

    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def watch(self, tensors: Iterable[Tensor], place: int | None = None) -> None:
        super().watch([t for t in tensors if t.device.type == "cpu"], place)

    @property
    def alive(self) -> int:
        """Bytes that are alive."""
        return self.bytes[0]

    @property
    def most(self) -> int:
        """The largest number of these since it was set."""
        return self.peak[0]

    @most.setter
    def most(self, value: int) -> None:
        self.peak[0] = value


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

    def __init__(self, device: torch.device, counter: StorageCounter) -> None:
        super().__init__(device, _NoStreams())
        self.counter = counter

    def send(self, tensors: list[Tensor], to: Lane, after: Any = None) -> tuple[list[Tensor], Any]:
        with self.counter.at(to.device.index):
            return [tensor.to(to.device, copy=True) for tensor in tensors], None


class CountedWorker(Worker):
    """A worker on one of the devices ``cpu:0``, ``cpu:1``, ..., each with a memory of its own.

    Args:
        index: of the device.
        counter: counts what is copied to it.
    """

    def __init__(self, index: int, counter: StorageCounter) -> None:
        super().__init__(torch.device("cpu", index))
        self._counter = counter

    def lane(self) -> Lane:
        return _CopyingLane(self.device, self._counter)

    def caller_lane(self) -> Lane:
        return self.lane()


#: Makes input and target of so many samples, on the first and the last device.
Batch = Callable[[int, "torch.device | str", "torch.device | str"], tuple[Any, Any]]
#: An action, by how many bytes each device has more at most while it runs, and after it.
Log = list[tuple[Action, dict[int, int], dict[int, int]]]


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
                rise = {d: most - before[d] for d, most in counter.peak.items() if most > before[d]}
                change = {d: now - before[d] for d, now in counter.bytes.items()}
                log.append((Action(kind, i, j), rise, change))
                return sent

            return recorded

    return Recording


def _fill(layer: nn.Module, device: torch.device) -> None:
    """Puts fake tensors on a device in place of parameters and buffers on ``meta``."""
    for module in layer.modules():
        for own in (module._parameters, module._buffers):
            for name, old in own.items():
                if old is not None:
                    made = torch.empty(old.shape, dtype=old.dtype, device=device)
                    is_parameter = isinstance(old, nn.Parameter)
                    own[name] = nn.Parameter(made, old.requires_grad) if is_parameter else made


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
    counter, n = StorageCounter(), len(balance)
    counter.place = None if fake else 0
    workers = [CountedWorker(j, counter) for j in range(n)]
    with FakeTensorMode() if fake else nullcontext(), counter:
        layers = iter(model)
        for worker, size in zip(workers, balance, strict=True):
            for layer in itertools.islice(layers, size):
                if fake:
                    _fill(layer, worker.device)
                own = itertools.chain(layer.parameters(), layer.buffers())
                counter.watch(own, worker.device.index)
        pipe = Pipe(model, balance, devices=workers, checkpoint=checkpoint)

        def step(chunks: int, schedule: str, gradients: bool) -> tuple[Log, Counter[int]]:
            log: Log = []
            start: Counter[int] = Counter()
            pipe.chunks = chunks
            if not gradients:
                pipe.zero_grad()
            with counter.at(0):
                x, target = batch(chunks * samples, workers[0].device, workers[-1].device)
            ready = counter.mark()
            recording = _recording(counter, log, start)
            with mock.patch("syncpipe.training.train.TrainingTask", recording), syncpipe.inline():
                pipe.train_batch(x, target, loss_fn=loss_fn, schedule=schedule)
            start.subtract(ready)
            return log, start

        step(2, "gpipe", False)
        log, made = step(m, schedule, gradients)
    now = [made[device] for device in range(n)]
    peaks = list(now)
    for _, rise, change in log:
        for device, most in rise.items():
            peaks[device] = max(peaks[device], now[device] + most)
        for device, more in change.items():
            now[device] += more
    return peaks, [action for action, _, _ in log]
