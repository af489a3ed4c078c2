"""``train_batch``: what comes before and after a mini-batch runs."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from syncpipe.runtime.interrupts import run_and_undo
from syncpipe.runtime.streams import moved
from syncpipe.runtime.thread_state import backward_here
from syncpipe.schedules.named import ScheduleLike, build
from syncpipe.schedules.steps import training_steps
from syncpipe.stages.call import Call
from syncpipe.stages.checks import check_can_train
from syncpipe.stages.pipeline import Pipeline
from syncpipe.training.forward import common_leaves_of, join_outputs
from syncpipe.training.leaves import Accumulated
from syncpipe.training.loss import LossHead, Objective
from syncpipe.training.loss_check import LossCounts
from syncpipe.training.loss_function import known_loss
from syncpipe.training.sources import Source
from syncpipe.training.task import TrainingTask


def train(
    pipeline: Pipeline, source: Source, *, loss_fn: Any, schedule: ScheduleLike,
    loss_reduction: str | None, weight: Any, verify: bool | None, accumulate: float,
    grad_scaler: Any, return_outputs: bool, counts: LossCounts, averaging: Any = None,
    **running: Any,
) -> Any:  # fmt: skip
    """Forward and backward of a mini-batch; see ``Pipe.train_batch``.

    With several processes ``averaging.begin`` returns a part of the call.
    ``averaging.finish`` averages the gradients of leaves over processes, and returns the factor
    for the gradients that go on into the caller's graph.
    """
    check_can_train(pipeline, "train_batch")
    loss = known_loss(loss_fn, loss_reduction, weight)
    if grad_scaler is not None and not callable(getattr(grad_scaler, "scale", None)):
        raise TypeError(
            f"grad_scaler must be a torch.amp.GradScaler, not {type(grad_scaler).__name__}"
        )
    built = build(schedule, source.m, pipeline.placement)
    number = isinstance(accumulate, Real) and not isinstance(accumulate, bool)
    if not (number and 0 < float(accumulate) < math.inf):
        raise ValueError(f"accumulate={accumulate!r}: must be the number of mini-batches, above 0")
    several = pipeline.turns[-1] > 1  # workers compute losses
    objective = Objective(loss, source, several, grad_scaler, float(accumulate))
    # One call at a time: a call that fails puts gradients back, which must be its own.
    with pipeline.training_lock:
        leaves = None
        try:
            call = Call(pipeline, source.m, **running)
            leaves = Accumulated(call)
            check = counts.check(objective, source.targets, verify)
            head = LossHead(call, objective, leaves, keep_outputs=return_outputs, check=check)
            if averaging is not None:
                call.parts.append(averaging.begin(built, leaves, objective))
            task = TrainingTask(call, source, head, leaves, splits=built.splits)
            recomputed = call.recomputed[: pipeline.n]
            steps = training_steps(pipeline.edges, built, recomputed, returns=call.returns)
            # Post-accumulate hooks (an optimizer step, for example) run once, at the end of a call
            # that added to the gradient.
            hooked = [p for p in chain(*leaves.parameters) if p._post_accumulate_grad_hooks]
            places: list[Any] = [leaf._post_accumulate_grad_hooks for leaf in hooked]
            hooks = list(map(OrderedDict, places))

            def run() -> None:
                for place in places:
                    place.clear()
                call.run(steps, task)

            run_and_undo(run, map(OrderedDict.update, places, hooks))
            results = results_of(call, head, objective, source, counts)
            _finish_gradients(task, head, objective, leaves, averaging)
            for leaf, saved in zip(hooked, hooks, strict=True):
                for hook in saved.values() if leaves.added_to(leaf) else ():
                    hook(leaf)
        except BaseException:
            if leaves is not None:
                leaves.restore()
            raise
    return results


def results_of(
    call: Call, head: LossHead, objective: Objective, source: Source, counts: LossCounts
) -> Any:
    """Checks the loss; returns loss, outputs, metrics, or a tuple of these."""
    pipeline = call.pipeline
    with torch.no_grad():
        if pipeline.turns[-1] > 1:
            objective.bring(call.streams_of[pipeline.results_index].device)
        found: list[Any] = [objective.loss()]
        if head.outputs is not None:
            found.append(join_outputs(pipeline, call.collect_outputs(head.outputs), source))
        if metrics := objective.metrics():
            found.append(metrics)
    if head.check is not None:
        counts.compare(head.check, common_leaves_of(pipeline), draws=any(head.draws.values()))
    return found[0] if len(found) == 1 else tuple(found)


def _finish_gradients(
    task: TrainingTask, head: LossHead, objective: Objective, leaves: Accumulated, averaging: Any
) -> None:
    """Scales gradients to those of the mini-batch; runs the caller's graph backward."""
    if not head.loss_requires_grad:
        raise RuntimeError(
            "the loss does not require grad, so there is nothing to train: all parameters are "
            "frozen, or loss_fn detaches its arguments"
        )
    factor: float | Tensor | None
    if averaging is not None:
        factor = averaging.finish()
    elif (factor := objective.factor()) is not None:
        leaves.scale(factor)
    if pairs := task.caller_grads():
        tensors, grads = [tensor for tensor, _ in pairs], [g.to(t.device) for t, g in pairs]
        if isinstance(factor, Tensor):
            grads = [grad * moved(factor, grad.device) for grad in grads]
        elif factor is not None:
            grads = [grad * factor for grad in grads]
        # On this thread, because it holds the lock of the pipe, which a recomputation may need.
        backward_here()
        torch.autograd.backward(tensors, grads)
