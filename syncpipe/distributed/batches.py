"""``train_batch`` in all processes: what is told of it, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from syncpipe.distributed.averaging import Averaging
from syncpipe.distributed.reduction import Reduction
from syncpipe.runtime.engine import Run
from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.schedule import Schedule
from syncpipe.schedules.steps import numbers_of
from syncpipe.training.gradients import Gradients
from syncpipe.training.leaves import Leaves
from syncpipe.training.loss.objective import Objective
from syncpipe.training.task import Watch

__all__ = ["TrainBatch"]

_BACKWARD = ("backward", "backward_input", "backward_weight")


class TrainBatch:
    """One call of ``train_batch``: tells which stages are through, and what they weigh."""

    def __init__(self, averaging: Averaging, reduction: Reduction) -> None:
        self._averaging, self._reduction = averaging, reduction

    def begin(
        self,
        plan: Schedule,
        leaves: Leaves,
        gradients: Gradients,
        objective: Objective,
        extra: Mapping[int, Mapping[Tensor, Tensor]],
    ) -> Watch:
        """As of ``training.train.Averaging``."""
        reduction = self._reduction
        self._leaves, self._gradients, self._objective = leaves, gradients, objective
        buckets = self._averaging.buckets(leaves.parameters[: plan.n])
        reduction.signature += (
            ("loss_reduction='sum'", objective.adds_up),
            ("what its parameters are", buckets.signature),
        )
        reduction.adds_up = objective.adds_up
        reduction.before = gradients.before
        reduction.late = lambda leaf: any(leaf in aside for aside in extra.values())
        if self._averaging.syncs:
            reduction.buckets = buckets.all
        replicated = [len(numbers) > 1 for numbers in numbers_of(plan.device_of)]
        left = [plan.m] * plan.n  # backwards, each half for itself
        for _, j in plan.splits:
            left[j] += 1
        for j in range(plan.n):
            left[j] = 1 if replicated[j] else left[j]  # when replicas are added up
        if known := objective.assumed:
            reduction.begin(*known)

        def watch(kind: Kind, j: int, run: Run) -> Run:
            if kind == "forward" and j == plan.n - 1 and not known:
                return self._weighing(run)
            if j < plan.n and kind in (("reduce",) if replicated[j] else _BACKWARD):
                return self._counting(run, left, j, buckets.of_stage[j])
            return run

        return watch

    def _weighing(self, run: Run) -> Run:
        """The forward of the last stage, with the loss."""
        begun = False

        def weighing(i: int, given: list[Any]) -> Sequence[Any]:
            nonlocal begun
            made = run(i, given)
            if not begun and (known := self._objective.assumed):
                begun = True
                self._reduction.begin(*known)
            return made

        return weighing

    def _counting(self, run: Run, left: list[int], j: int, buckets: list[int]) -> Run:
        """A backward of a stage, the last of which makes its buckets ready."""

        def counting(i: int, given: list[Any]) -> Sequence[Any]:
            made = run(i, given)
            left[j] -= 1
            if not left[j] and self._averaging.syncs and buckets:
                self._reduction.ready(buckets)
            return made

        return counting

    def finish(self) -> float:
        """As of ``training.train.Averaging``."""
        total = self._objective.total
        if self._averaging.syncs:
            self._reduction.found = [leaf for leaf in self._leaves.found() if leaf.requires_grad]
        factor = self._averaging.finish(self._reduction, None if total is None else float(total))
        if not self._averaging.syncs and factor != 1:
            self._gradients.scale(factor)
        return factor
