"""Turns: who has generators to himself, and how the states are put back after it.

Ctrl-C may come between any two lines. So locks are held by ``with`` itself, and the states are put
back by one call (see ``interrupts``).

A layer or a loss function may itself use a pipe. While that one runs, the generators are given
up: it takes locks of stages, and these come before the locks of generators.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from syncpipe.runtime.interrupts import undone
from syncpipe.runtime.randomness.generators import CPU, LOCKS, NoDispatch, NoFunctions
from syncpipe.runtime.randomness.seen import Seen

__all__ = ["draw_seed", "in_a_turn", "in_turn", "outside_of_turn", "undisturbed"]

_T = TypeVar("_T")


def in_a_turn() -> bool:
    """Whether the calling thread has generators to itself."""
    return getattr(_here, "turn", None) is not None


class _Turn:
    """Generators that the calling thread has to itself, by locks that it holds.

    Args:
        generators: those whose state is put back at the end.
        locks: the locks.
    """

    __slots__ = ("_generators", "_locks", "_outer", "before", "seen")

    def __init__(self, generators: list[torch.Generator], locks: list[Any]) -> None:
        self._generators = generators
        self._locks = locks
        self._outer = getattr(_here, "turn", None)
        self.before: list[Tensor] = []
        self.seen: Seen | None = None

    def begin(self) -> None:
        """The locks are held."""
        with LOCKS.states:
            self.before[:] = [generator.get_state() for generator in self._generators]
        _here.turn = self

    def end(self) -> Iterator[None]:
        """The states are what they were: steps that are C functions (see ``interrupts``)."""
        return map(setattr, [_here], ["turn"], [self._outer])

    def outside(self, run: Callable[[], _T]) -> _T:
        """Runs something meanwhile, for others as if the turn had not begun yet."""
        look = None if self.seen is None else self.seen.look
        looking = look is not None and sys.getprofile() == look
        if looking:
            sys.setprofile(None)
        try:
            return self._outside(run)
        finally:
            if looking:
                sys.setprofile(look)

    def _outside(self, run: Callable[[], _T]) -> _T:
        if self.seen is not None:
            self.seen.nests = True
        with LOCKS.states, NoDispatch(), NoFunctions():
            now = [generator.get_state() for generator in self._generators]
            self.set(self.before)
        _here.turn = self._outer
        try:
            for lock in self._locks:
                lock.release()
            return run()
        finally:
            try:
                self._hold()
            finally:  # has nothing left to do, unless Ctrl-C came right before it
                self._hold()
            with NoDispatch(), NoFunctions():
                self.begin()
                with LOCKS.states:
                    self.set(now)

    def _hold(self) -> None:
        interrupt: BaseException | None = None
        for lock in self._locks:
            while not lock._is_owned():
                try:
                    lock.acquire()
                except BaseException as error:  # Ctrl-C; whoever took the lock will release it
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def set(self, states: list[Tensor]) -> None:
        """Sets the states of the generators."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


_here = threading.local()  # its attribute `turn` is the one that the thread has


def outside_of_turn(run: Callable[[], _T]) -> _T:
    """Runs something that takes other locks: gives up the generators that the thread has."""
    turn: _Turn | None = getattr(_here, "turn", None)
    return run() if turn is None else turn.outside(run)


def in_turn(
    generators: list[torch.Generator],
    locks: list[Any],
    run: Callable[[], _T],
    seen: Seen | None = None,
) -> _T:
    """Runs something that has generators to itself; then their states are what they were."""
    with locks[0], locks[1] if len(locks) > 1 else nullcontext():
        turn = _Turn(generators, locks)
        turn.seen = seen
        try:
            turn.begin()
            undo = chain(map(torch.Generator.set_state, generators, turn.before), turn.end())
            return undone(run, undo, LOCKS.states)
        finally:
            _here.turn = turn._outer  # once more, if Ctrl-C came before that


def draw_seed() -> int:
    """Draws the seed of a call from the caller's CPU generator, and nothing more."""
    with LOCKS[CPU], LOCKS.states, NoDispatch(), NoFunctions():
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def undisturbed(run: Callable[[], _T]) -> _T:
    """Runs something on the calling thread that draws from the CPU's generator as the caller would.

    Layers that draw at the same time wait, and do not take back what was drawn in here.
    """
    return in_turn([], [LOCKS[CPU]], run)
