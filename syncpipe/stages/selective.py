"""Cells that are computed again but for some operations, whose results are saved.

PyTorch does it by two dispatch modes, one around the forward that saves, one around the
recomputation that gives back what was saved. What they leave to us is randomness: a random
operation that is saved draws once only, and those after it in the same layer would draw other
numbers the second time. So the state of the generators after each random operation is noted in the
forward, and is what it is after the same one in the recomputation.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from syncpipe.options import Selective
from syncpipe.runtime.random_numbers import holds_generators, is_random, put_back_states, states_of
from syncpipe.stages.run import CallContext, Inputs, StageLayers, StageRun

__all__ = ["SelectiveRun"]


class SelectiveRun(StageRun):
    """A run of a stage that saves what a policy says."""

    __slots__ = ("_policy", "_states")

    def __init__(self, stage: StageLayers, i: int, context: CallContext, policy: Selective) -> None:
        super().__init__(stage, i, context)
        self._policy = policy.contexts()  # what was saved lives in these
        self._states: deque[list[Tensor]] = deque()

    def run(self, inputs: Inputs) -> Inputs:
        """From inputs to outputs, for the first time."""
        with self._policy[0], _Noted(self._generators, self._states):
            return super().run(inputs)

    def recomputed(self, inputs: Inputs) -> Inputs:
        """The recomputation of this cell."""
        with self._policy[1], _PutBack(self._generators, self._states):
            return super().recomputed(inputs)

    @property
    def _generators(self) -> list[torch.Generator]:
        generators = self.stage.generators
        return [generator for _, generator in generators.pick(generators.all)]


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the states of generators after each random operation."""

    def __init__(self, generators: list[torch.Generator], states: deque[list[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = generators
        self._states = states

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_random(func) and kwargs.get("generator") is None:
            self._drawn()
        return result

    def _drawn(self) -> None:
        self._states.append(states_of(self._generators))


class _PutBack(_Noted):  # type: ignore[no-untyped-call]
    """Sets the states of generators to those that were noted."""

    def _drawn(self) -> None:
        # There is none if other operations are run this time, which whoever looks for their
        # results will say. Operations that may be random and are not need no turn.
        states = self._states.popleft() if self._states else []
        if holds_generators():
            put_back_states(self._generators, states)
