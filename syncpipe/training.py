"""The training driver: ``pipe.train_batch(...)`` and ``pipe.eval_batch(...)``.

The loss is computed inside the pipeline, so a micro-batch can go back while others still go
forward. What the workers do is in ``cells``; here is what comes before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.cells import Cells
from syncpipe.microbatch import gather
from syncpipe.objective import REDUCTIONS, Objective
from syncpipe.pipeline import Call, Pipeline
from syncpipe.runtime.gradients import Gradients
from syncpipe.runtime.recorder import Recorder
from syncpipe.schedule import forward_program, training_program
from syncpipe.schedules import build
from syncpipe.sources import Source

__all__ = ["evaluate", "evaluating", "train"]


def train(
    pipeline: Pipeline,
    source: Source,
    *,
    parameters: Iterable[Tensor],
    loss_fn: Callable[..., Any],
    schedule: Any,
    slots: Any,
    loss_reduction: str,
    grad_scaler: Any,
    return_outputs: bool,
    checkpoint: str,
    inline: bool,
    recorder: Recorder | None,
) -> Any:
    """Forward and backward of a mini-batch; see ``Pipe.train_batch``."""
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "train_batch needs gradients, but grad mode is off (torch.no_grad or "
            "torch.inference_mode): call it outside of that, or use eval_batch"
        )
    _check_loss_fn(loss_fn, loss_reduction)
    options = {} if slots is None else {"slots": slots}
    plan = build(schedule, source.m, pipeline.worker_of, **options)
    objective = Objective(
        loss_fn, reduction=loss_reduction, m=source.m, total=source.total, scaler=grad_scaler
    )
    # One after the other: what a call that fails puts back must be its own.
    with pipeline.training:
        gradients = Gradients(parameters)
        try:
            call = Call(pipeline, source.m, checkpoint=checkpoint, inline=inline, recorder=recorder)
            task = Cells(
                call, source, objective, gradients, splits=plan.splits, keep_outputs=return_outputs
            )
            call.run(training_program(plan, call.rematerialized), task, source.entering())
            _complete(task, objective, gradients)
        except BaseException:
            gradients.restore()
            raise
    return _results(call, task, objective)


def _complete(task: Cells, objective: Objective, gradients: Gradients) -> None:
    """Gradients of the micro-batches are added up; makes them those of the mini-batch.

    Whoever has to average them over processes does it after this.
    """
    if not task.goes_back:
        raise RuntimeError(
            "the loss does not require grad, so there is nothing to train: all parameters are "
            "frozen, or loss_fn detaches what it is given"
        )
    factor = objective.factor()
    if factor is not None:
        gradients.scale(factor)
    if task.returned:
        tensors, grads = zip(*task.returned, strict=True)
        if factor is not None:
            grads = tuple(
                grad * (factor.to(grad.device) if isinstance(factor, Tensor) else factor)
                for grad in grads
            )
        torch.autograd.backward(tensors, grads)


def evaluate(
    pipeline: Pipeline,
    source: Source,
    *,
    loss_fn: Callable[..., Any] | None,
    loss_reduction: str,
    checkpoint: str,
    inline: bool,
    recorder: Recorder | None,
) -> Any:
    """Forward of a mini-batch; see ``Pipe.eval_batch``."""
    objective = None
    if loss_fn is not None:
        _check_loss_fn(loss_fn, loss_reduction)
        objective = Objective(loss_fn, reduction=loss_reduction, m=source.m, total=source.total)
    with torch.no_grad():
        call = Call(pipeline, source.m, checkpoint=checkpoint, inline=inline, recorder=recorder)
        task = Cells(call, source, objective, None, keep_outputs=objective is None)
        call.run(forward_program(source.m, pipeline.worker_of), task, source.entering())
    return _results(call, task, objective)


def _results(call: Call, task: Cells, objective: Objective | None) -> Any:
    """What the caller gets: the loss, the outputs, or both."""
    with torch.no_grad():
        loss = None if objective is None else objective.loss()
        call.hand_over(-1, (loss, task.outputs))
        if not task.keep_outputs:
            return loss
        outputs = gather(task.outputs)
    return outputs if loss is None else (loss, outputs)


class evaluating(AbstractContextManager[None]):
    """A module in ``eval()`` mode for a while; each part then gets back its own mode."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._modes = [(child, child.training) for child in self._module.modules()]
        self._module.eval()

    def __exit__(self, *exc_info: object) -> None:
        for child, training in self._modes:
            child.training = training


def _check_loss_fn(loss_fn: Any, reduction: str) -> None:
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be callable, as loss_fn(output, target), not {type(loss_fn).__name__}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction={reduction!r}: must be one of {', '.join(map(repr, REDUCTIONS))}, "
            "whichever loss_fn does over the samples of a micro-batch"
        )
