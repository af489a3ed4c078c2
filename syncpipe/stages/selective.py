"""Cells that are recomputed but for some operations, whose results are saved.

PyTorch does it by two dispatch modes, one around the forward that saves, one around the
recomputation that gives back what was saved. What they leave to us is randomness: a random
operation that is saved draws once only, and those after it in the same layer would draw other
numbers the second time. So the state of the generators after each random operation is noted in the
forward, and is what it is after the same one in the recomputation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from syncpipe.options import Selective
from syncpipe.runtime.random_numbers import (
    Generators,
    holds_generators,
    is_random,
    put_back_states,
    states_of,
)

__all__ = ["Saved"]

_T = TypeVar("_T")


class Saved:
    """What a policy saves of one cell.

    Args:
        policy: says of which operations.
        generators: those of the stage's device.
    """

    def __init__(self, policy: Selective, generators: Generators) -> None:
        self._policy = policy.contexts()  # what was saved lives in these
        self._generators = [generator for _, generator in generators.pick(generators.all)]
        self._states: deque[list[Tensor]] = deque()

    def around(self, run: Callable[[], _T], again: bool) -> _T:
        """Runs the cell, for the first time or again."""
        with self._policy[again], _States(self._put_back if again else self._note):
            return run()

    def _note(self) -> None:
        self._states.append(states_of(self._generators))

    def _put_back(self) -> None:
        # There is none if other operations are run this time, which whoever looks for their
        # results will say. Operations that may be random and are not need no turn.
        states = self._states.popleft() if self._states else []
        if holds_generators():
            put_back_states(self._generators, states)


class _States(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function after each random operation."""

    def __init__(self, drawn: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = drawn

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_random(func) and kwargs.get("generator") is None:
            self._drawn()
        return result
