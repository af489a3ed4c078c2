"""The training driver: ``pipe.train_batch(...)`` and ``pipe.eval_batch(...)``.

The loss is computed inside the pipeline, so a micro-batch can go back while others still go
forward. What the workers do is in ``cells``; here is what comes before and after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.cells import Cells
from syncpipe.last_stage import LastStage
from syncpipe.microbatch import gather
from syncpipe.objective import REDUCTIONS, Objective
from syncpipe.pipeline import Call, Pipeline
from syncpipe.runtime.gradients import Gradients
from syncpipe.runtime.recorder import Recorder
from syncpipe.schedule import forward_program, training_program
from syncpipe.schedules import build
from syncpipe.sources import Source

__all__ = ["evaluate", "train"]


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
    checkpoint: Sequence[str],
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
    if pipeline.engine.running() is not None:
        raise RuntimeError(
            "train_batch was called inside of a call of the same pipe (by its loss_fn, its "
            "data_iter or a layer): gradients of two calls cannot add up at a time. Call it "
            "before or after that; eval_batch and pipe(input) can be called inside"
        )
    if grad_scaler is not None and not callable(getattr(grad_scaler, "scale", None)):
        raise TypeError(
            f"grad_scaler must be a torch.amp.GradScaler, not {type(grad_scaler).__name__}"
        )
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
            last = LastStage(call, objective, gradients, keep_outputs=return_outputs)
            watch = gradients.watch if objective.open else None
            task = Cells(call, source, last, splits=plan.splits, watch=watch)
            call.run(training_program(plan, call.rematerialized), task, source.entering())
            results = _results(call, last, objective)
            _complete(task, last, objective, gradients)
        except BaseException:
            gradients.restore()
            raise
    return results


def _complete(task: Cells, last: LastStage, objective: Objective, gradients: Gradients) -> None:
    """Gradients of the micro-batches are added up; makes them those of the mini-batch.

    Whoever has to average them over processes does it after this.
    """
    if not last.goes_back:
        raise RuntimeError(
            "the loss does not require grad, so there is nothing to train: all parameters are "
            "frozen, or loss_fn detaches what it is given"
        )
    for leaf, grad in last.beside:  # whose hooks have seen it
        if leaf.grad is None:  # memory of its own: two gradients may be one tensor, or expanded
            leaf.grad = torch.zeros_like(leaf)
        leaf.grad += grad
    factor = objective.factor()
    if factor is not None:
        gradients.scale(factor)
    if task.returned:
        tensors = [tensor for tensor, _ in task.returned]
        grads = [grad.to(tensor.device) for tensor, grad in task.returned]
        if isinstance(factor, Tensor):
            grads = [grad * factor.to(grad.device, non_blocking=True) for grad in grads]
        elif factor is not None:
            grads = [grad * factor for grad in grads]
        torch.autograd.backward(tensors, grads)


def evaluate(
    pipeline: Pipeline,
    source: Source,
    *,
    modules: Iterable[nn.Module],
    loss_fn: Callable[..., Any] | None,
    loss_reduction: str,
    checkpoint: Sequence[str],
    inline: bool,
    recorder: Recorder | None,
) -> Any:
    """Forward of a mini-batch; see ``Pipe.eval_batch``."""
    objective = None
    if loss_fn is not None:
        _check_loss_fn(loss_fn, loss_reduction)
        objective = Objective(loss_fn, reduction=loss_reduction, m=source.m, total=source.total)

    def run() -> Any:
        call = Call(pipeline, source.m, checkpoint=checkpoint, inline=inline, recorder=recorder)
        last = LastStage(call, objective, Gradients([]), keep_outputs=objective is None)
        program = forward_program(source.m, pipeline.worker_of)
        call.run(program, Cells(call, source, last), source.entering())
        return _results(call, last, objective)

    # The modes of a module are everybody's: training waits, and another evaluation. If it is the
    # training that asks for this (loss_fn does), its other workers wait.
    running = pipeline.engine.running()
    if running is not None:
        with torch.no_grad():
            return running.alone(lambda: _in_eval_mode(list(modules), run))
    with pipeline.training, torch.no_grad():
        return _in_eval_mode(list(modules), run)


def _results(call: Call, last: LastStage, objective: Objective | None) -> Any:
    """What the caller gets: the loss, the outputs, or both."""
    with torch.no_grad():
        loss = None if objective is None else objective.loss()
        call.hand_over(-1, (loss, last.outputs))
        if last.outputs is None:
            return loss
        outputs = gather(last.outputs)
    return outputs if loss is None else (loss, outputs)


def _in_eval_mode(modules: list[nn.Module], run: Callable[[], Any]) -> Any:
    """Runs something with modules in ``eval()`` mode; each then gets back its own mode."""
    plain = [module for module in modules if "training" in module.__dict__]
    script = [module for module in modules if "training" not in module.__dict__]  # TorchScript's
    owners, modes = [module.__dict__ for module in plain], [module.training for module in plain]
    undo = chain(  # not by `setattr`, where Ctrl-C could come in between
        map(setitem, owners, repeat("training"), modes),
        map(setattr, script, repeat("training"), [module.training for module in script]),
    )
    try:
        for module in modules:
            module.training = False
        return run()
    finally:
        try:
            deque(undo, maxlen=0)
        finally:  # has nothing left to do, unless Ctrl-C came right before it
            deque(undo, maxlen=0)


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
