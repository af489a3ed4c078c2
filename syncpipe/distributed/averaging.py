"""What a data-parallel pipe has besides: the other processes, and a thread that talks to them.

The thread belongs to :class:`Averaging`, is started by its first call, and ends with it. It runs
one :class:`Reduction` after the other, each to its end: also that of a call which has raised here
already, whose part the others wait for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from syncpipe.distributed.buckets import Buckets
from syncpipe.distributed.processes import Processes
from syncpipe.distributed.reduction import Lanes, Reduction
from syncpipe.runtime.engine import RUNNING, stop_threads
from syncpipe.runtime.worker import WorkerThread

__all__ = ["Averaging"]

_T = TypeVar("_T")


class Averaging:
    """Gradients are averaged over processes. Used by one thread at a time.

    Args:
        processes: all that have the pipe.
        capacity: bytes in a bucket.

    Attributes:
        processes: the same.
        syncs: whether gradients are reduced now; not under ``no_sync``.
        backward: the last backward of autograd's that was one of all processes.
    """

    def __init__(self, processes: Processes, capacity: float) -> None:
        self.processes = processes
        self.syncs = True
        self.backward = -1
        self._capacity = capacity
        self._lanes = Lanes()
        self._threads: list[WorkerThread] = []
        self._buckets: Buckets | None = None
        self._current: tuple[Reduction, int] | None = None
        self._lost = ""
        self._ended_well = 0
        weakref.finalize(self, stop_threads, self._threads, os.getpid())

    def run(self, what: str, step: Callable[[Reduction], _T]) -> _T:
        """Makes a call in all processes.

        Args:
            what: the name of the call.
            step: does it here, and calls ``finish`` of the reduction it is given.
        """
        reduction = self.start(what)
        try:
            return step(reduction)
        except BaseException as error:
            reduction.close(error)
            raise

    def start(self, what: str) -> Reduction:
        """Begins a call; whoever asks for it has to ``finish`` or ``close`` it.

        Raises:
            RuntimeError: it cannot be made here, or nobody would answer.
        """
        self._check()
        reduction = Reduction(self.processes, self._lanes)
        reduction.signature = (
            ("the call", what),
            ("the number of calls that came to a good end", self._ended_well),
        )
        self._current = reduction, threading.get_ident()
        self._thread().jobs.put((reduction.serve, _nothing))
        return reduction

    def finish(self, reduction: Reduction, total: float | None = None) -> float:
        """As :meth:`Reduction.finish`."""
        factor = reduction.finish(total)
        self._ended_well += 1
        self._current = None
        return factor

    def buckets(self, leaves: Sequence[Iterable[Tensor]]) -> Buckets:
        """The buckets for the leaves of each stage; those that were made before, if they fit."""
        trained = [[leaf for leaf in stage if leaf.requires_grad] for stage in leaves]
        key = tuple(tuple(map(id, stage)) for stage in trained)
        if self._buckets is None or self._buckets.key != key:
            self._buckets = Buckets(trained, self._capacity)
        return self._buckets

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay those of this process."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def combined(self, result: Any, share: float) -> Any:
        """The loss of all processes in the place of that of this one, and metrics that are numbers.

        Args:
            result: of ``train_batch`` or ``eval_batch``.
            share: of the weight of all processes that of this one.
        """
        parts = list(result) if isinstance(result, tuple) else [result]
        metrics = parts[-1] if len(parts) > 1 and isinstance(parts[-1], dict) else {}
        names = [name for name, value in metrics.items() if not isinstance(value, list)]
        values = [parts[0], *[torch.as_tensor(metrics[name]) for name in names]]
        kind = torch.promote_types(parts[0].dtype, torch.float32)
        own = torch.stack([value.to(parts[0].device, kind) for value in values])
        own = own * share if share else torch.zeros_like(own)
        self.processes.wait(self.processes.all_reduce(own), own)
        parts[0] = own[0].to(parts[0].dtype)
        if metrics:
            numbers = dict(zip(names, own[1:], strict=True))
            parts[-1] = {
                name: _like(value, numbers[name]) if name in numbers else value
                for name, value in metrics.items()
            }
        return tuple(parts) if isinstance(result, tuple) else parts[0]

    def _check(self) -> None:
        if self.processes.inherited:
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
        current, self._current = self._current, None
        if current is None:
            return
        reduction, thread = current
        if not reduction.closed:
            if thread != threading.get_ident():
                self._current = current
                raise RuntimeError(
                    "another thread is in a call of this data-parallel pipe: calls of several "
                    "threads would begin in any order in each process. Make them one by one"
                )
            reduction.close(KeyboardInterrupt("at a bad moment"))
        reduction.wait()  # the others may still be in it
        self._lost = self._lost or reduction.lost
        if self._lost:
            raise RuntimeError(
                f"the processes of this data-parallel pipe have lost each other: {self._lost}. "
                "Start them again"
            )

    def _thread(self) -> WorkerThread:
        if not (self._threads and self._threads[0].alive):
            done = SimpleQueue[None]()
            for thread in self._threads:
                thread.stop()  # if Ctrl-C came while it was started
            self._threads[:] = [WorkerThread("data parallel")]
            self._threads[0].start()
            mine = torch.get_num_threads()
            self._threads[0].jobs.put((_one_core, partial(done.put, None)))
            done.get()
            torch.set_num_threads(mine)  # threads that start later inherit what was set last
        return self._threads[0]


def _one_core() -> None:
    torch.get_num_threads()  # or the thread's first operation would set what others have set last
    torch.set_num_threads(1)


def _nothing() -> None:
    pass


def _like(value: Any, number: Tensor) -> Any:
    return number.to(value.device) if isinstance(value, Tensor) else number.item()
