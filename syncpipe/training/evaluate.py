"""``eval_batch``: a mini-batch in ``eval()`` mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from operator import setitem
from typing import Any

import torch
from torch import nn

from syncpipe.runtime.interrupts import run_and_undo
from syncpipe.schedules.steps import forward_steps
from syncpipe.stages.call import Call
from syncpipe.stages.checks import check_not_running
from syncpipe.stages.pipeline import Pipeline
from syncpipe.training.forward import outputs_of
from syncpipe.training.loss import LossHead, Objective
from syncpipe.training.loss_check import LossCounts
from syncpipe.training.loss_function import known_loss
from syncpipe.training.sources import Source
from syncpipe.training.task import TrainingTask
from syncpipe.training.train import results_of


def evaluate(
    pipeline: Pipeline, source: Source, *, module: nn.Module, modules: Sequence[nn.Module],
    loss_fn: Any, loss_reduction: str | None, weight: Any, verify: bool | None, counts: LossCounts,
    weighed: Callable[[Objective], None] | None = None, **running: Any,
) -> Any:  # fmt: skip
    """A forward in ``eval()`` mode; see ``Pipe.eval_batch``. ``weighed`` gets the losses."""
    objective = None
    if loss_fn is not None:
        several = pipeline.turns[-1] > 1
        objective = Objective(known_loss(loss_fn, loss_reduction, weight), source, several)

    def run() -> Any:
        call = Call(pipeline, source.m, **running)
        if objective is None:
            return outputs_of(call, source)
        check = counts.check(objective, source.targets, verify)
        head = LossHead(call, objective, check=check)
        task = TrainingTask(call, source, head)
        steps = forward_steps(pipeline.edges, source.m, pipeline.placement)
        call.run(steps, task)
        results = results_of(call, head, objective, source, counts)
        if weighed is not None:
            weighed(objective)
        return results

    check_not_running(pipeline, "eval_batch")
    # Modes are shared by all users of the module, so other calls of the pipe wait.
    with pipeline.training_lock, torch.no_grad():
        if not any(each.training for each in modules):
            return run()
        return pipeline.modes_lock.changing(partial(_in_eval_mode, module, modules, run))


def _in_eval_mode(module: nn.Module, modules: Sequence[nn.Module], run: Callable[[], Any]) -> Any:
    """Runs a function with a module in ``eval()`` mode, then puts back the mode of each submodule.

    The modules' own ``eval`` and ``train`` are called, because these may merge weights as well.
    """
    modes = [each.training for each in modules]
    plain = [each for each in modules if "training" in each.__dict__]
    script = [each for each in modules if "training" not in each.__dict__]  # TorchScript's
    undo = chain(  # not by `setattr`, where Ctrl-C could come in between
        map(setitem, [m.__dict__ for m in plain], repeat("training"), [m.training for m in plain]),
        map(setattr, script, repeat("training"), [m.training for m in script]),
    )

    def restore() -> None:
        # Parents first, which switch their children; twice, as a child may have two parents.
        for each, mode in [*zip(modules, modes, strict=True)] * 2:
            if each.training != mode:
                each.train(mode)

    def evaluated() -> Any:
        module.eval()
        return run()

    return run_and_undo(lambda: run_and_undo(evaluated, restore), undo)
