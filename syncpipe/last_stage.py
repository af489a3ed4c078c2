"""What comes after the last stage: the loss, and the outputs for the caller."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from syncpipe.kept import Kept, cut, ends_of, leaves_of, without_grad
from syncpipe.objective import Objective
from syncpipe.pipeline import Call
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.gradients import Gradients
from syncpipe.runtime.state import without_autocast
from syncpipe.tree import map_tensors, tensors_in

__all__ = ["LastStage"]


class LastStage:
    """Takes the outputs of the last stage. Used by the worker of that stage.

    Args:
        call: the call.
        objective: makes losses of the outputs; None if the outputs are all that is wanted.
        gradients: what to put back if the call fails.
        keep_outputs: whether the outputs are wanted.

    Attributes:
        outputs: for each micro-batch its output, detached; None if they are not wanted.
        beside: parameters that the loss itself depends on, with gradients yet to be added.
        goes_back: whether any loss needed a gradient.
    """

    def __init__(
        self, call: Call, objective: Objective | None, gradients: Gradients, *, keep_outputs: bool
    ) -> None:
        self._batch = call.batch
        self._stage = call.pipeline.stages[-1]
        self._objective = objective
        self._gradients = gradients
        self._elsewhere: set[Tensor] | None = None
        self._call = call
        self._draws: int | None = None  # generators that the loss function draws from
        self.outputs: list[Any] | None = [None] * call.batch.m if keep_outputs else None
        self.beside: list[tuple[Tensor, Tensor]] = []
        self.goes_back = False

    def take(self, i: int, output: Any, target: Any, size: int, kept: Kept) -> None:
        """Takes the output of a micro-batch.

        Args:
            i: the micro-batch.
            output: what the last layer returned.
            target: its target.
            size: the number of samples in it.
            kept: learns how the cell goes back.
        """
        if self.outputs is not None:
            self.outputs[i] = map_tensors(lambda tensors: [t.detach() for t in tensors], output)
        if self._objective is None:
            return
        if self._batch.state.grad:
            output, target = self._cut(output, target, kept)
        root = self._loss(self._objective, i, (output, target), size)
        if root.requires_grad:
            self.goes_back = True
            kept.root = root
            self._watch(kept, output, target)

    def _cut(self, output: Any, target: Any, kept: Kept) -> tuple[Any, Any]:
        """Begins the graph of the loss, which is one of its own.

        So it is not recomputed with its cell: it stores little, and may have side effects.
        """
        ends = ends_of(output)
        kept.output, output = cut(output)
        kept.expected.append(len(ends))
        if kept.again is None:
            kept.ends.append(ends)
        kept.targets = [tensor for tensor in tensors_in(target) if tensor.requires_grad]
        if kept.targets:
            kept.target, target = cut(target)
        return output, target

    def _loss(self, objective: Objective, i: int, given: tuple[Any, Any], size: int) -> Tensor:
        try:
            result, self._draws = self._stage.beyond(
                i, self._batch, objective.call, given, self._draws, objective.name
            )
            root = objective.root(i, result, size)
            # The caller goes on with what was noted.
            noted = (objective._losses[i], objective._weights[i], objective._base)
            self._call.hand_over(-1, noted)
            return root
        except BaseException as error:
            annotate(error, f"in loss_fn, micro-batch {i}")
            raise

    def _watch(self, kept: Kept, output: Any, target: Any) -> None:
        """Looks for parameters that the loss itself depends on."""
        leaves = leaves_of([kept.root], (output, target))
        for leaf in leaves:
            self._call.for_caller(self._stage.j, self._gradients.watch, leaf)
        self._call.hand_over(-1, [leaf.grad for leaf in leaves])
        kept.leaves = without_grad(leaves)
        if leaves and not self._of_others().isdisjoint(leaves):
            with without_autocast(self._batch.state):
                self._go_back_alone(kept, output, target, leaves)

    def _of_others(self) -> set[Tensor]:
        """The parameters that other workers are in charge of."""
        if self._elsewhere is None:
            pipeline = self._call.pipeline
            self._elsewhere = {
                parameter
                for stage, w in zip(pipeline.stages, pipeline.worker_of, strict=True)
                if w != pipeline.worker_of[-1]
                for parameter in stage.partition.parameters()
            }
        return self._elsewhere

    def _go_back_alone(self, kept: Kept, output: Any, target: Any, leaves: list[Tensor]) -> None:
        """Backward of a loss that depends on parameters of other workers.

        Two threads that add to one gradient add in any order. So the loss goes back here and now,
        and what its leaves get is added when all workers are through.
        """
        assert kept.root is not None
        crossed = [(kept.output, output), (kept.target, target)]
        borders = [(border, tree) for border, tree in crossed if border is not None]
        begins = [[t for t in tensors_in(tree) if t.requires_grad] for _, tree in borders]
        inputs = [*chain(*begins), *leaves]
        grads = iter(torch.autograd.grad(kept.root, inputs, allow_unused=True))
        kept.root = None
        for (border, _), tensors in zip(borders, begins, strict=True):
            border.grads = list(islice(grads, len(tensors)))
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                self._call.hand_over(-1, grad)
                self.beside.append((leaf, grad))
