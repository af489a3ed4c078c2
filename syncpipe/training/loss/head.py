"""What comes after the last stage: the loss, and the outputs for the caller."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncpipe.data import compact, distinct, map_tensors
from syncpipe.runtime.errors import annotate
from syncpipe.stages.call import Call
from syncpipe.training.cell import FOREIGN, Cell, cut, ends_of
from syncpipe.training.leaves import Leaves, go_back_of, leaves_of
from syncpipe.training.loss.check import LossCheck
from syncpipe.training.loss.objective import Objective

__all__ = ["LossHead"]


_BACKWARD = (
    "loss_fn must not call backward(): train_batch runs it, once for each micro-batch. Return the "
    "loss. (torch.autograd.grad of the loss by the output is possible)"
)


class LossHead:
    """Takes the outputs of the last stage. Used by the worker of that stage.

    If it has replicas, by several: what they have in common changes under a lock, and nothing that
    is computed depends on who comes first. The loss function itself runs outside of it.

    Args:
        call: the call.
        objective: makes losses of the outputs; None if the outputs are all that is wanted.
        leaves: what gets gradients; None if nothing does.
        keep_outputs: whether the outputs are wanted.
        check: is shown what the loss function is given.

    Attributes:
        outputs: for each micro-batch its output, detached; None if they are not wanted.
        extra_gradients: for each of these workers leaves that the loss itself depends on, with the
            gradient yet to be added.
        goes_back: whether any loss needed a gradient.
    """

    def __init__(
        self,
        call: Call,
        objective: Objective | None,
        leaves: Leaves | None = None,
        *,
        keep_outputs: bool,
        check: LossCheck | None = None,
    ) -> None:
        self._replicas = call.pipeline.numbers[-1]
        self._lock = threading.Lock()
        self._objective = objective
        self._entering = None if objective is None else objective.known
        self._leaves: Any = leaves
        self._call = call
        self._known: dict[int, Any] = {}  # where each worker is
        self._check = check
        # With one stage no border notices a backward by loss_fn that retains the graph.
        alone = leaves.parameters[0] if leaves and len(leaves.parameters) == 1 else []
        self._probe = next((p for p in reversed(alone) if p.requires_grad), None)
        #: For each worker the generators that the loss function draws from; PyTorch's own do not.
        quiet = objective is not None and objective.quiet
        self._draws: dict[int, int] = dict.fromkeys(self._replicas, 0) if quiet else {}
        self.outputs: list[Any] | None = [None] * call.m if keep_outputs else None
        self.extra_gradients: dict[int, dict[Tensor, Tensor]] = {j: {} for j in self._replicas}
        self.goes_back = False

    def first_size(self, size: int) -> None:
        """Says how many samples there are in micro-batch 0, if several workers compute losses."""
        if self._objective is not None:
            self._objective.first_size = size

    def take(self, j: int, i: int, output: Any, target: Any, size: int, pending: Cell) -> None:
        """Takes the output of a micro-batch.

        Args:
            j: the number of the last stage, or of its replica.
            i: the micro-batch.
            output: what the last layer returned.
            target: its target.
            size: the number of samples in it.
            pending: learns how the cell goes back.
        """
        if self.outputs is not None:
            self.outputs[i] = map_tensors(lambda tensors: [t.detach() for t in tensors], output)
        if self._objective is not None:
            if self._call.state.grad:
                output, target = self._begun(output, target, pending)
            root, share = self._loss(self._objective, j, i, (output, target), size)
            if root.requires_grad:
                self.goes_back = True
                pending.root = ends_of(root)[0], torch.full_like(root, share)
        if self.outputs is not None and self._call.m > 1:  # loss_fn may have written into it
            self.outputs[i] = map_tensors(lambda ts: [compact(t) for t in ts], self.outputs[i])

    def _begun(self, output: Any, target: Any, pending: Cell) -> tuple[Any, Any]:
        """Begins the graph of the loss.

        It goes on into the cell's, unless that one comes again: the loss is not recomputed with
        its cell, for it stores little, and may have side effects.
        """
        ends = ends_of(distinct(output))  # now, for the loss function may write into it
        if pending.recomputation is None:
            pending.ends.append(ends)
        else:
            pending.expected += (len(ends),)
            pending.output, output = cut(output)
        pending.targets = [tensor for tensor in distinct(target) if tensor.requires_grad]
        if pending.targets:
            pending.target, target = cut(target)
        return output, target

    def _loss(
        self, objective: Objective, j: int, i: int, given: tuple[Any, Any], size: int
    ) -> tuple[Tensor, float]:
        try:
            if self._check is not None and j == self._replicas[0]:
                self._check.keep(i, *given)
            before = _mark(self._probe)
            result, self._draws[j] = self._call.runs[j].run_loss(
                i, objective.call, given, self._draws.get(j)
            )
            if _mark(self._probe) != before:
                raise RuntimeError(_BACKWARD)
            if j not in self._known and self._entering is not None:
                self._known[j] = self._call.to_stage(self._entering, j)
            with self._lock:
                known = self._known.get(j)
                root = objective.root_and_gradient(i, result, size, *given, known)
            self._call.release_to_caller(j, objective.noted(i))
            return root
        except BaseException as error:
            annotate(error, f"in loss_fn, micro-batch {i}")
            if isinstance(error, RuntimeError) and FOREIGN in str(error):
                raise RuntimeError(_BACKWARD) from error
            raise

    @property
    def draws(self) -> bool:
        """Whether the loss function drew random numbers."""
        return any(self._draws.values())

    def given(self, output: Any) -> list[Tensor]:
        """The tensors of an output whose gradients come from the loss."""
        return distinct(output)

    def go_back(self, j: int, i: int, pending: Cell) -> list[list[Tensor | None]]:
        """Backward of the loss of a micro-batch, and of the cell where their graphs are one.

        Returns:
            The gradients of the outputs, in a list, if the cell's graph is another one.
        """
        if pending.root is not None:
            self._backward(j, pending)
        return [] if pending.output is None else [pending.output.grads]

    def _backward(self, j: int, pending: Cell) -> None:
        leaves = self._leaves
        assert pending.root is not None
        root, grad = pending.root
        pending.root = None
        begin = pending.border if pending.output is None else pending.output
        new = leaves.new(j, [root.node], begin, pending.target)
        others = leaves.of_others(j, new)
        inputs: list[Tensor] = []  # all of them
        if others:
            # The loss depends on parameters of other workers. Two threads that add to one gradient
            # add in any order, so what these get is added when all workers are through.
            ends = [end.node for ends in pending.ends for end in ends]
            leaves.claim(j, leaves.new(j, ends, pending.border))
            grads = torch.autograd.grad(root, others, grad, retain_graph=True, allow_unused=True)
            self._put_aside(j, others, grads)
            aside = set(map(id, others))
            new = [leaf for leaf in new if id(leaf) not in aside]
            inputs = [leaf for leaf in leaves_of([root.node]) if id(leaf) not in aside]
            if not inputs:
                return
        leaves.claim(j, new)
        if not begin.open and pending.output is not None:
            raise RuntimeError(_BACKWARD)
        go_back_of(pending, [root], [grad], inputs)

    def _put_aside(self, j: int, leaves: list[Tensor], grads: Sequence[Tensor | None]) -> None:
        originals = [self._call.originals.get(id(leaf), leaf) for leaf in leaves]
        self._leaves.register(j, originals)
        aside = self.extra_gradients[j]
        for leaf, seen, grad in zip(originals, leaves, grads, strict=True):
            if grad is None:
                continue
            if leaf in aside:
                aside[leaf] += grad
            else:  # memory of its own: two gradients may be one tensor, or expanded
                aside[leaf] = torch.zeros_like(seen) + grad
            self._call.release_to_caller(j, aside[leaf])


def _mark(leaf: Tensor | None) -> Any:
    """Differs when something was added to a gradient."""
    grad = None if leaf is None else leaf.grad
    return None if grad is None else (id(grad), grad._version)
