"""What comes after the last stage: the loss, and the outputs for the caller."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from syncpipe.runtime.errors import annotate
from syncpipe.runtime.thread_state import without_autocast
from syncpipe.stages.pipeline import Call
from syncpipe.training.border import ANCHOR
from syncpipe.training.leaves import Leaves
from syncpipe.training.objective import Objective
from syncpipe.training.pending_backward import PendingBackward, cut, ends_of, leaves_of
from syncpipe.tree import compact, distinct, map_tensors

__all__ = ["LossHead"]


class LossHead:
    """Takes the outputs of the last stage. Used by the worker of that stage.

    Args:
        call: the call.
        objective: makes losses of the outputs; None if the outputs are all that is wanted.
        leaves: what gets gradients; None if nothing does.
        keep_outputs: whether the outputs are wanted.

    Attributes:
        outputs: for each micro-batch its output, detached; None if they are not wanted.
        extra_gradients: leaves that the loss itself depends on, with the gradient yet to be added.
        goes_back: whether any loss needed a gradient.
    """

    def __init__(
        self,
        call: Call,
        objective: Objective | None,
        leaves: Leaves | None = None,
        *,
        keep_outputs: bool,
    ) -> None:
        self._context = call.context
        self._stage = call.pipeline.stages[-1]
        self._objective = objective
        self._leaves: Any = leaves
        self._call = call
        self._draws: int | None = None  # generators that the loss function draws from
        self.outputs: list[Any] | None = [None] * call.context.m if keep_outputs else None
        self.extra_gradients: dict[Tensor, Tensor] = {}
        self.goes_back = False

    def take(self, i: int, output: Any, target: Any, size: int, pending: PendingBackward) -> None:
        """Takes the output of a micro-batch.

        Args:
            i: the micro-batch.
            output: what the last layer returned.
            target: its target.
            size: the number of samples in it.
            pending: learns how the cell goes back.
        """
        if self.outputs is not None:
            self.outputs[i] = map_tensors(lambda tensors: [t.detach() for t in tensors], output)
        if self._objective is not None:
            if self._context.state.grad:
                output, target = self._cut(output, target, pending)
            root = self._loss(self._objective, i, (output, target), size)
            if root.requires_grad:
                self.goes_back = True
                pending.root = root
                self._look(pending, output, target)
        if self.outputs is not None and self._context.m > 1:  # loss_fn may have written into it
            self.outputs[i] = map_tensors(lambda ts: [compact(t) for t in ts], self.outputs[i])

    def _cut(self, output: Any, target: Any, pending: PendingBackward) -> tuple[Any, Any]:
        """Begins the graph of the loss, which is one of its own.

        So it is not recomputed with its cell: it stores little, and may have side effects.
        """
        ends = ends_of(distinct(output))
        pending.output, output = cut(output)
        pending.expected.append(len(ends))
        if pending.recomputation is None:
            pending.ends.append(ends)
        pending.targets = [tensor for tensor in distinct(target) if tensor.requires_grad]
        if pending.targets:
            pending.target, target = cut(target)
        return output, target

    def _loss(self, objective: Objective, i: int, given: tuple[Any, Any], size: int) -> Tensor:
        try:
            result, self._draws = self._stage.run_loss(
                i, self._context, objective.call, given, self._draws, objective.name
            )
            root = objective.root(i, result, size)
            self._call.release_to_caller(-1, objective.noted(i))
            return root
        except BaseException as error:
            annotate(error, f"in loss_fn, micro-batch {i}")
            raise

    def _look(self, pending: PendingBackward, output: Any, target: Any) -> None:
        """Looks for leaves that the loss itself depends on."""
        assert pending.root is not None
        j, leaves = self._stage.j, leaves_of([pending.root.grad_fn])
        if self._leaves.are_of(j, leaves):
            self._leaves.look(j, leaves)
            return
        leaves = [leaf for leaf in leaves if leaf is not ANCHOR]
        self._leaves.register(j, leaves)
        with without_autocast(self._context.state):
            self._go_back_alone(pending, output, target, leaves)

    def _go_back_alone(
        self, pending: PendingBackward, output: Any, target: Any, leaves: list[Tensor]
    ) -> None:
        """Backward of a loss that depends on parameters of other workers.

        Two threads that add to one gradient add in any order. So the loss goes back here and now,
        and what its leaves get is added when all workers are through.
        """
        assert pending.root is not None
        crossed = [(pending.output, output), (pending.target, target)]
        borders = [(border, tree) for border, tree in crossed if border is not None]
        begins = [[t for t in distinct(tree) if t.requires_grad] for _, tree in borders]
        inputs = [*chain(*begins), *leaves]
        grads = iter(torch.autograd.grad(pending.root, inputs, allow_unused=True))
        pending.root = None
        for (border, _), tensors in zip(borders, begins, strict=True):
            border.grads = list(islice(grads, len(tensors)))
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                if leaf in self.extra_gradients:
                    self.extra_gradients[leaf] += grad
                else:  # memory of its own: two gradients may be one tensor, or expanded
                    self.extra_gradients[leaf] = torch.zeros_like(leaf) + grad
                self._call.release_to_caller(-1, self.extra_gradients[leaf])
