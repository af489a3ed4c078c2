"""Locks of a pipe, between its calls."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from syncpipe.runtime.interrupts import forkable_lock, run_and_undo
from syncpipe.runtime.random_numbers import without_generators

_T = TypeVar("_T")


class ModesLock:
    """A lock for the modes of modules: many threads may use them, or one thread may change them."""

    def __init__(self) -> None:
        self._ended = threading.Condition(forkable_lock())
        self._running: Counter[threading.Thread] = Counter()
        self._changing: threading.Thread | None = None

    def using(self, run: Callable[[], _T]) -> _T:
        """Runs a function that uses the modes, while no other thread changes them."""
        thread = threading.current_thread()
        before = self._running[thread]

        def enter() -> None:
            with self._ended:
                while self._changing not in (None, thread):
                    self._ended.wait()
                self._running[thread] = before + 1

        def leave() -> None:
            with self._ended:
                self._running[thread] = before
                self._ended.notify_all()

        # The thread that holds this lock may wait for a generator that this thread holds.
        return run_and_undo(lambda: (without_generators(enter), run())[1], leave)

    def changing(self, run: Callable[[], _T]) -> _T:
        """Runs a function that changes the modes and restores them."""
        thread, before = threading.current_thread(), self._changing

        def enter() -> None:
            with self._ended:
                while self._changing not in (None, thread) or any(
                    number for other, number in self._running.items() if other is not thread
                ):
                    self._ended.wait()
                self._running = +self._running  # drops the threads that have finished
                self._changing = thread

        def leave() -> None:
            with self._ended:
                if self._changing is thread and before is not thread:
                    self._changing = None
                    self._ended.notify_all()

        return run_and_undo(lambda: (without_generators(enter), run())[1], leave)


class CallLocks:
    """The locks of a pipe. Calls of an older pipeline may still hold them when a new one begins.

    Attributes:
        training: a failed call must restore its own gradients only.
        modes: used by each forward of ``pipe(x)``, changed by each evaluation.
        process: the id of the process that made them; in a fork of it they may stay locked.
    """

    def __init__(self) -> None:
        self.training, self.modes = threading.RLock(), ModesLock()
        self.process = os.getpid()
