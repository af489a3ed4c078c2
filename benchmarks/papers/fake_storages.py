"""Counts the storages that are alive, for each device: of fake tensors, or of real ones on the CPU.

Fake tensors have shapes, devices (``cpu:0``, ``cpu:1``, ...) and storages of the right size, and no
memory behind them; an operation on tensors of two devices is refused, so nothing is on the wrong
one unnoticed. Real tensors on the CPU do not say on which worker they are; it is told for them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from syncpipe import Worker
from syncpipe.runtime.streams import Lane

__all__ = ["CountedWorker", "StorageCounter"]


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are alive, for each device.

    Attributes:
        alive: bytes by the index of the device.
        most: the largest ``alive`` since :meth:`mark`.
        place: where the results of operations are; None: where their tensors say they are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
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
            self.alive[device] += size
            self.most[device] = max(self.most[device], self.alive[device])

    def _forget(self, key: int, size: int, device: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            del self._known[key]
            self.alive[device] -= size

        return forget

    def mark(self) -> Counter[int]:
        """What is alive now; the largest is counted anew from here."""
        self.most = self.alive.copy()
        return self.alive.copy()

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Real tensors do not say on which worker they are: for a while they are all on this."""
        before, self.place = self.place, None if self.place is None else place
        try:
            yield
        finally:
            self.place = before


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
