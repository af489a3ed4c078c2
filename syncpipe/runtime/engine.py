"""Runs a program: each worker runs its own steps in order and waits only for their messages.

The engine knows order, errors and cancelling. The task knows what an action does. The results of an
action go to the inboxes of the workers that need them:

    worker 0   run(0) --put--> inbox 1      run(1) --put--> inbox 1
    worker 1        take(...) run(0)             take(...) run(1)

An engine owns its threads and stops them when it is garbage-collected. An idle thread holds only
its queue of jobs. A call owns its inboxes and their contents. It ends when every worker has
finished its steps, was cancelled, or failed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from syncpipe.runtime.interrupts import forkable_lock
from syncpipe.runtime.thread_state import CallerState, backward_here
from syncpipe.runtime.worker import Item, Worker, WorkerThread
from syncpipe.schedules.schedule import Kind
from syncpipe.schedules.steps import Step, Steps

_JOIN_SECONDS = 2.0  # limit for joining threads, which may be stuck in a layer
_POLL_SECONDS = 1.0  # liveness poll interval

#: Runs an action for one micro-batch. Takes the list of received values, which it may empty, and
#: returns the values to send.
Run = Callable[[int, list[Any]], Sequence[Any]]
#: Returns the function that runs the actions of one kind on one stage in this call.
Bind = Callable[[Kind, int], Run]


#: The engines in whose calls this thread runs; weak, since a layer may keep its context alive.
#: A pipe inside a layer runs inline: autograd orders the nodes of one thread only.
RUNNING: ContextVar[tuple[weakref.ref[Engine], ...]] = ContextVar("syncpipe_running", default=())


class _Cancelled(BaseException):
    """Ends a worker's part of a call that has failed elsewhere."""


class _Inbox:
    """The messages for one worker in one call: (number, value); number None cancels."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int | None, Any]] = SimpleQueue()
        self._arrived: dict[int | None, Any] = {}
        self.put = self._queue.put

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Waits for messages and removes them; raises ``_Cancelled`` if the call is cancelled."""
        arrived = self._arrived
        for number in numbers:
            while number not in arrived:
                found, value = self._queue.get()
                if found is None:
                    raise _Cancelled
                arrived[found] = value
        return list(map(arrived.pop, numbers))


class _Reports:
    """Reports of the workers that they have finished a job and dropped all references to it."""

    def __init__(self, count: int) -> None:
        self._missing = set(range(count))
        self._news: SimpleQueue[None] = SimpleQueue()

    def report(self, w: int) -> None:
        self._missing.discard(w)
        self._news.put(None)

    def wait(
        self, threads: Sequence[WorkerThread], died: Callable[[int], None] = lambda w: None
    ) -> None:
        """Waits until each worker has reported or died; may be called again after Ctrl-C."""
        while self._missing:
            try:
                self._news.get(timeout=_POLL_SECONDS)
            except Empty:
                for w in [w for w in self._missing.copy() if not threads[w].alive]:
                    died(w)
                    self.report(w)


class _Execution:
    """One run of a program."""

    def __init__(self, engine: Engine, steps: Steps, bind: Bind) -> None:
        self.steps, self.running = steps, (*RUNNING.get(), weakref.ref(engine))
        self.runs = {key: bind(*key) for key in steps.keys}
        self.inboxes = [_Inbox() for _ in steps.rows]
        self.failures: list[tuple[tuple[bool, int, int], BaseException]] = []
        self.cancelled = threading.Event()

    def fail(self, rank: tuple[bool, int, int], error: BaseException) -> None:
        self.failures.append((rank, error))
        self.cancel()

    def cancel(self) -> None:
        """Lets every worker stop before its next action."""
        self.cancelled.set()
        for inbox in self.inboxes:
            inbox.put((None, None))

    def work(self, w: int, device: torch.device, state: CallerState) -> None:
        """Runs the steps of worker ``w`` on its thread. Never raises."""
        step: Step | None = None
        RUNNING.set(self.running)  # each job has a context of its own
        take, is_over = self.inboxes[w].take, self.cancelled.is_set
        try:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.set_device_index(device.index)
            with state.applied():
                for step in self.steps.rows[w]:
                    if is_over():
                        raise _Cancelled
                    key, action, needs, sends, to = step
                    received = [take(needs)]
                    # The task gets the only reference to the received values.
                    made = [self.runs[key](action.i, received.pop())]
                    for receiver, number, value in zip(to, sends, made.pop(), strict=True):
                        self.inboxes[receiver].put((number, value))
                        del value  # the receiver owns it
        except _Cancelled:
            pass
        except BaseException as error:
            self.fail((False, -1, w) if step is None else step.action.rank, error)

    def run_here(self) -> None:
        RUNNING.set(self.running)
        backward_here()
        runs = self.runs
        values: dict[int, Any] = {}
        take, put = values.pop, values.__setitem__
        for key, action, needs, sends, _ in self.steps.serial:
            # No name holds a value.
            list(map(put, sends, runs[key](action.i, list(map(take, needs)))))


class Engine:
    """The threads of a pipe, one per worker, started by the first call that needs them."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        self._lock = forkable_lock()
        self._threads: list[WorkerThread] = []
        self._share = 0
        weakref.finalize(self, _stop, self._threads, os.getpid())

    def run(self, steps: Steps, bind: Bind, state: CallerState, *, inline: bool) -> None:
        """Runs a program to its end, under the caller's ``state``.

        Raises the exception of an action; of several, the first by ``Action.rank``.
        """
        execution = _Execution(self, steps, bind)
        if inline or len(steps.rows) == 1 or sys.is_finalizing():  # threads do not run at exit
            # A context of its own drops all variables that are set in it, even after Ctrl-C.
            state.context.copy().run(execution.run_here)
            return
        reports = _Reports(len(self._workers))
        queues: list[SimpleQueue[Item | None]] = []
        jobs = [
            (
                partial(state.context.copy().run, execution.work, w, worker.device, state),
                partial(reports.report, w),
            )
            for w, worker in enumerate(self._workers)
        ]
        submit = map(SimpleQueue.put, queues, jobs)  # all jobs or none: C code defers Ctrl-C

        def died(w: int) -> None:
            name = str(self._workers[w].device)
            error = RuntimeError(
                f"the thread of worker {name!r} was killed from outside the pipe: this call is "
                "lost; call again, which starts a new thread"
            )
            execution.fail((True, 0, w), error)

        try:
            # All workers must see concurrent calls in one order, or two calls could deadlock.
            with self._lock:
                self._start()
                threads = list(self._threads)
                queues += [thread.jobs for thread in threads]
                deque(submit, maxlen=0)
            reports.wait(threads, died)
        except BaseException:  # Ctrl-C
            execution.cancel()
            if queues:
                deque(submit, maxlen=0)  # every worker gets the job, and reports its end
                reports.wait(threads, died)
            raise
        del jobs, submit
        if execution.failures:
            error = min(execution.failures, key=lambda failure: failure[0])[1]
            execution.failures.clear()
            try:
                raise error
            finally:
                del error  # breaks the cycle of this frame and the traceback

    def _start(self) -> None:
        """Starts missing threads and divides the intra-op threads among the CPU workers."""
        for w, worker in enumerate(self._workers):
            if w == len(self._threads) or not self._threads[w].alive:
                self._share = 0
                for thread in self._threads[w : w + 1]:
                    thread.stop()  # Ctrl-C may have interrupted its start
                self._threads[w : w + 1] = [WorkerThread(str(worker.device), self)]
                self._threads[w].start()
        share = self.share()
        if share != self._share:
            mine = torch.get_num_threads()
            done = _Reports(len(self._threads))
            for w, thread in enumerate(self._threads):
                thread.jobs.put((partial(_set_threads, share), partial(done.report, w)))
            done.wait(self._threads)
            # New threads inherit the number that any thread set last: make it the caller's.
            torch.set_num_threads(mine)
            self._share = share

    def is_running(self) -> bool:
        """Whether the current thread runs in a call of this engine."""
        return any(engine() is self for engine in RUNNING.get())

    def share(self) -> int:
        """The number of intra-op threads per CPU worker."""
        cpus = sum(worker.device.type == "cpu" for worker in self._workers)
        return max(1, torch.get_num_threads() // max(1, cpus))


def _set_threads(count: int) -> None:
    torch.get_num_threads()  # else the thread's first operation restores the process-wide number
    torch.set_num_threads(count)


def _stop(threads: list[WorkerThread], process: int) -> None:
    """Stops the threads that this process started, not those of its parent; joins them briefly."""
    if process != os.getpid():
        return
    for thread in threads:
        thread.stop()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
