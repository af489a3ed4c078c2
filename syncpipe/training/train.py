"""The training driver: ``pipe.train_batch(...)`` and ``pipe.eval_batch(...)``.

The loss is computed inside the pipeline, so a micro-batch can go back while others still go
forward. What the workers do is in ``task``; here is what comes before and after it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from numbers import Real
from operator import setitem
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from syncpipe.data import gather
from syncpipe.options import StageMode
from syncpipe.runtime.interrupts import undone
from syncpipe.runtime.recorder import Recorder
from syncpipe.runtime.streams import moved
from syncpipe.runtime.thread_state import backward_here
from syncpipe.schedules.build import ScheduleLike, build
from syncpipe.schedules.schedule import Schedule
from syncpipe.schedules.steps import forward_steps, training_steps
from syncpipe.stages.call import Call
from syncpipe.stages.pipeline import Pipeline
from syncpipe.training.leaves import Gradients, Leaves
from syncpipe.training.loss.check import LossCheck, LossCounts
from syncpipe.training.loss.head import LossHead
from syncpipe.training.loss.known import Loss, Weight, known_loss
from syncpipe.training.loss.objective import Objective
from syncpipe.training.sources import Source
from syncpipe.training.task import TrainingTask, Watch

__all__ = ["Averaging", "check_can_train", "evaluate", "objective_of", "train"]


class Averaging(Protocol):
    """The part of one call in what several processes do together; see ``syncpipe.distributed``."""

    def begin(
        self,
        plan: Schedule,
        leaves: Leaves,
        gradients: Gradients,
        objective: Objective,
        extra: Mapping[int, Mapping[Tensor, Tensor]],
    ) -> Watch:
        """Call before anything runs.

        Args:
            plan: the schedule.
            leaves: what gets gradients.
            gradients: what these were before.
            objective: the losses.
            extra: for workers the leaves to whose gradients more is added when all are through.
        """

    def finish(self) -> float:
        """Makes gradients those of all processes.

        Returns:
            By what those are to be multiplied that go on into the caller's graph.
        """


def train(
    pipeline: Pipeline,
    source: Source,
    *,
    loss_fn: Callable[..., Any],
    schedule: ScheduleLike,
    loss_reduction: str | None,
    weight: Any,
    verify: bool | None,
    accumulate: float,
    grad_scaler: Any,
    return_outputs: bool,
    checkpoint: Sequence[StageMode],
    inline: bool,
    recorder: Recorder | None,
    counts: LossCounts,
    averaging: Averaging | None = None,
) -> Any:
    """Forward and backward of a mini-batch; see ``Pipe.train_batch``."""
    check_can_train(pipeline, "train_batch")
    loss = known_loss(loss_fn, loss_reduction, weight)
    if grad_scaler is not None and not callable(getattr(grad_scaler, "scale", None)):
        raise TypeError(
            f"grad_scaler must be a torch.amp.GradScaler, not {type(grad_scaler).__name__}"
        )
    plan = build(schedule, source.m, pipeline.placement)
    if not (isinstance(accumulate, Real) and 0 < float(accumulate) < math.inf):
        raise ValueError(
            f"accumulate={accumulate!r}: it is the number of mini-batches of one optimizer step, "
            "by which gradients are divided"
        )
    objective = objective_of(loss, source, scaler=grad_scaler, accumulate=float(accumulate))
    # One after the other: what a call that fails puts back must be its own.
    with pipeline.training:
        gradients = Gradients()
        try:
            call = Call(pipeline, source.m, checkpoint=checkpoint, inline=inline, recorder=recorder)
            leaves = Leaves(call, gradients)
            check = _check(counts, loss, objective, source, verify)
            head = LossHead(call, objective, leaves, keep_outputs=return_outputs, check=check)
            watch = None
            if averaging is not None:
                watch = averaging.begin(plan, leaves, gradients, objective, head.extra_gradients)
            task = TrainingTask(call, source, head, splits=plan.splits, leaves=leaves, watch=watch)
            steps = training_steps(
                pipeline.edges,
                plan,
                call.rematerialized[: pipeline.n],
                targets=task.targets_travel,
                returns=() if call.ties is None else call.ties.edges,
            )
            hooks = _Hooks(chain(*leaves.parameters))
            hooks.held(lambda: call.run(steps, task, source.entering()))
            results = _results(call, head, objective)
            if check is not None:
                _compare(counts, objective, check, draws=head.draws)
            _complete(task, head, objective, gradients, averaging)
            hooks.run()
        except BaseException:
            gradients.restore()
            raise
    return results


class _Hooks:
    """Post-accumulate-grad hooks, which run once a call, when gradients are whole.

    An optimizer in backward would make a step for each micro-batch otherwise.

    Args:
        leaves: what gets gradients.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        hooked = [leaf for leaf in leaves if leaf._post_accumulate_grad_hooks]
        self._leaves = hooked
        self._dicts: list[Any] = [leaf._post_accumulate_grad_hooks for leaf in hooked]
        self._hooks = list(map(OrderedDict, self._dicts))

    def held(self, run: Callable[[], None]) -> None:
        """Runs something, in which gradients are added up, without the hooks."""

        def without() -> None:
            for each in self._dicts:
                each.clear()
            run()

        undone(without, map(OrderedDict.update, self._dicts, self._hooks))

    def run(self) -> None:
        """Runs the hooks."""
        for leaf, hooks in zip(self._leaves, self._hooks, strict=True):
            if leaf.grad is not None:
                for hook in hooks.values():
                    hook(leaf)


def check_can_train(pipeline: Pipeline, what: str) -> None:
    """Refuses to train where that cannot be.

    Raises:
        RuntimeError: gradients are switched off, or a call of the same pipe is on its way.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} needs gradients, but grad mode is off (torch.no_grad or "
            "torch.inference_mode): call it outside of that, or use eval_batch"
        )
    check_alone(pipeline, what)


def check_alone(pipeline: Pipeline, what: str) -> None:
    """Refuses what changes gradients or modes inside of a call of the same pipe (RuntimeError)."""
    if pipeline.engine.is_running():
        raise RuntimeError(
            f"{what} was called inside of a call of the same pipe (by its loss_fn, its data_iter "
            "or a layer), whose gradients and modes it would change. Call it before or after that; "
            "pipe(input) can be called inside"
        )


def _complete(
    task: TrainingTask,
    head: LossHead,
    objective: Objective,
    gradients: Gradients,
    averaging: Averaging | None,
) -> None:
    """Gradients of the micro-batches are added up; makes them those of the mini-batch."""
    if not head.goes_back:
        raise RuntimeError(
            "the loss does not require grad, so there is nothing to train: all parameters are "
            "frozen, or loss_fn detaches what it is given"
        )
    extra = chain.from_iterable(aside.items() for aside in head.extra_gradients.values())
    for leaf, grad in extra:  # their hooks have run already
        grad = moved(grad, leaf.device)
        if leaf.grad is None:
            leaf.grad = grad
        else:
            leaf.grad += grad
    factor: float | Tensor | None
    if averaging is not None:
        factor = averaging.finish()
    elif (factor := objective.factor()) is not None:
        gradients.scale(factor)
    if task.returned:
        tensors = [tensor for tensor, _ in task.returned]
        grads = [grad.to(tensor.device) for tensor, grad in task.returned]
        if isinstance(factor, Tensor):
            grads = [grad * moved(factor, grad.device) for grad in grads]
        elif factor is not None:
            grads = [grad * factor for grad in grads]
        # Here, for it runs under a lock that a recomputation may want.
        backward_here(partial(torch.autograd.backward, tensors, grads))


def evaluate(
    pipeline: Pipeline,
    source: Source,
    *,
    module: nn.Module,
    modules: Sequence[nn.Module],
    loss_fn: Callable[..., Any] | None,
    loss_reduction: str | None,
    weight: Any,
    checkpoint: Sequence[StageMode],
    inline: bool,
    recorder: Recorder | None,
    weighed: Callable[[Objective], None] | None = None,
) -> Any:
    """Forward of a mini-batch; see ``Pipe.eval_batch``."""
    objective = None
    if loss_fn is not None:
        objective = objective_of(known_loss(loss_fn, loss_reduction, weight), source)

    def run() -> Any:
        call = Call(pipeline, source.m, checkpoint=checkpoint, inline=inline, recorder=recorder)
        head = LossHead(call, objective, keep_outputs=objective is None)
        task = TrainingTask(call, source, head)
        steps = forward_steps(
            pipeline.edges, source.m, pipeline.placement, targets=task.targets_travel
        )
        call.run(steps, task, source.entering())
        results = _results(call, head, objective)
        if weighed is not None and objective is not None:
            weighed(objective)
        return results

    check_alone(pipeline, "eval_batch")
    # The modes of a module are everybody's: training waits, and another evaluation.
    with pipeline.training, torch.no_grad():
        return _in_eval_mode(module, list(modules), run)


def objective_of(loss: Loss, source: Source, **options: Any) -> Objective:
    """The losses of a mini-batch, with the weights of its micro-batches if they can be known."""
    weights: list[Weight] | None = None
    if loss.numbers is not None and len(loss.numbers) != source.m:
        raise ValueError(
            f"weight has {len(loss.numbers)} numbers, but there are {source.m} micro-batches: give "
            "one for each of them, or a function of the target"
        )
    if loss.weighted and source.targets is not None:
        found = [loss.weight(i, target) for i, target in enumerate(source.targets)]
        sizes = [source.size(i) for i in range(source.m)]
        weights = [size if w is None else w for w, size in zip(found, sizes, strict=True)]
    return Objective(loss, m=source.m, total=source.total, weights=weights, **options)


def _check(
    counts: LossCounts, loss: Loss, objective: Objective, source: Source, verify: bool | None
) -> LossCheck | None:
    """What checks the loss function, if that is due or asked for."""
    if verify is False:
        counts[loss.function] = math.inf
    if verify is False or source.m == 1 or (verify is None and loss.exact):
        return None
    if verify is None and not counts.due(loss.function):
        counts[loss.function] += 1
        return None
    return LossCheck(objective, source.targets, asked=bool(verify))


def _compare(counts: LossCounts, objective: Objective, check: LossCheck, *, draws: bool) -> None:
    """Checks the loss function, unless it draws random numbers."""
    warned = not draws and check.compare()
    counts[objective.function] += math.inf if warned else 1


def _results(call: Call, head: LossHead, objective: Objective | None) -> Any:
    """What the caller gets: the loss, the outputs, the metrics, or several of them."""
    pipeline = call.pipeline
    with torch.no_grad():
        if objective is not None and len(pipeline.numbers[-1]) > 1:
            objective.bring(call.lane_of[pipeline.results].device)
        loss = None if objective is None else objective.loss()
        metrics = None if objective is None else objective.metrics()
        call.release_to_caller(pipeline.results, (loss, metrics))
        outputs = None if head.outputs is None else gather(call.collected(head.outputs))
    if loss is None:
        return outputs
    found = [
        loss,
        *([outputs] if head.outputs is not None else []),
        *([metrics] if metrics else []),
    ]
    return loss if len(found) == 1 else tuple(found)


def _in_eval_mode(module: nn.Module, modules: list[nn.Module], run: Callable[[], Any]) -> Any:
    """Runs something with a module in ``eval()`` mode; each part of it then gets back its own mode.

    By the modules' own ``eval`` and ``train``, which may do more than to set a flag: merge weights,
    or pass the mode on to what is in plain lists.
    """
    modes = [each.training for each in modules]
    if not any(modes):
        return run()
    plain = [each for each in modules if "training" in each.__dict__]
    script = [each for each in modules if "training" not in each.__dict__]  # TorchScript's
    undo = chain(  # not by `setattr`, where Ctrl-C could come in between
        map(setitem, [m.__dict__ for m in plain], repeat("training"), [m.training for m in plain]),
        map(setattr, script, repeat("training"), [m.training for m in script]),
    )

    def there_and_back() -> Any:
        try:
            module.eval()
            return run()
        finally:
            try:
                _back_in(modules, modes)
            except BaseException:  # Ctrl-C in a `train` of the user's
                _back_in(modules, modes)
                raise

    return undone(there_and_back, undo)


def _back_in(modules: list[nn.Module], modes: list[bool]) -> None:
    """Has each module go back to its own mode, parents first, who take their children along."""
    for _ in range(2):  # a child of two parents may have followed the other one
        for module, mode in zip(modules, modes, strict=True):
            if module.training != mode:
                module.train(mode)
