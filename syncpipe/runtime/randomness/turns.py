"""Turns: who has generators to himself, and how the states are put back after it.

Ctrl-C may come between any two lines. So locks are held by ``with`` itself, and the states are put
back by one call (see ``interrupts``).

A layer or a loss function may itself use a pipe. While that one runs, the generators are given
up: it takes locks of stages, and these come before the locks of generators.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from syncpipe.runtime.interrupts import undone
from syncpipe.runtime.randomness.generators import CPU, LOCKS, NoDispatch, NoFunctions
from syncpipe.runtime.randomness.seen import Seen

__all__ = ["draw_seed", "in_a_turn", "in_turn", "outside_of_turn", "quiet", "undisturbed"]

_T = TypeVar("_T")


class _Turns:
    """Who has generators to himself, so that others can tell whether anybody had."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._last = 0
        self.inside: set[int] = set()

    def begin(self) -> int:
        """Begins a turn, which is ``inside`` until somebody takes its number out."""
        number = next(self._numbers)
        self.inside.add(number)  # before `_last`, or `quiet` could take it for one that is over
        self._last = number
        return number

    def quiet(self) -> int | None:
        """The number of the last turn; None while there is one."""
        return None if self.inside else self._last

    def renew(self) -> None:
        """In a forked child."""
        self.__init__()  # type: ignore[misc]


_turns = _Turns()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.renew)


def in_a_turn() -> bool:
    """Whether the calling thread has generators to itself."""
    return getattr(_here, "turn", None) is not None


class _Turn:
    """Generators that the calling thread has to itself, by locks that it holds.

    Args:
        generators: those whose state is put back at the end.
        locks: the locks.
    """

    __slots__ = ("_generators", "_locks", "_number", "_outer", "before", "seen")

    def __init__(self, generators: list[torch.Generator], locks: list[Any]) -> None:
        self._generators = generators
        self._locks = locks
        self._outer = getattr(_here, "turn", None)
        self._number = 0
        self.before: list[Tensor] = []
        self.seen: Seen | None = None

    def begin(self) -> None:
        """The locks are held."""
        self._number = _turns.begin()
        with LOCKS.states:
            self.before[:] = [generator.get_state() for generator in self._generators]
        _here.turn = self

    def end(self) -> None:
        """The states are what they were."""
        deque(self.ending(), maxlen=0)

    def ending(self) -> Iterator[None]:
        """The same as steps that are C functions (see ``interrupts``)."""
        leave = map(setattr, [_here], ["turn"], [self._outer])
        return chain(leave, map(_turns.inside.discard, [self._number]))

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
        self.end()
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
            undo = chain(map(torch.Generator.set_state, generators, turn.before), turn.ending())
            return undone(run, undo, LOCKS.states)
        finally:
            turn.end()  # once more, if Ctrl-C came before that


def quiet() -> int | None:
    """The number of the last turn; None while there is one."""
    return _turns.quiet()


def draw_seed() -> int:
    """Draws the seed of a call from the caller's CPU generator, and nothing more."""
    turn: _Turn | None = getattr(_here, "turn", None)
    if turn is not None and turn.seen is not None:
        turn.seen.share()
    with LOCKS[CPU], LOCKS.states, NoDispatch(), NoFunctions():
        _turns.inside.discard(_turns.begin())  # nobody sees the state before this turn is over
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def undisturbed(run: Callable[[], _T]) -> _T:
    """Runs something on the calling thread that draws from the CPU's generator as the caller would.

    Layers that draw at the same time wait, and do not take back what was drawn in here.
    """
    return in_turn([], [LOCKS[CPU]], run)
