"""``pipe(x)`` as a plain graph: the stages one after another, on the calling thread.

For callers that need the graph of the layers: ``inline(graph=True)``, ``create_graph``,
forward-mode AD, torch.func, dispatch modes. Devices exchange values by ordinary copies, and
recomputation uses ``torch.utils.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from syncpipe.data.trees import map_tensors, tensors_in
from syncpipe.options import StageMode
from syncpipe.runtime.engine import RUNNING
from syncpipe.runtime.random_numbers import let_modules_hold
from syncpipe.runtime.recomputation import is_checkpointing, is_recomputing
from syncpipe.runtime.streams import same_memory
from syncpipe.skip.store import SkipKey
from syncpipe.stages.call import StageRuns
from syncpipe.stages.inplace import input_flags, passthrough_flags
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.sharing import use_substitutes
from syncpipe.storage import with_class_of


def needs_graph() -> bool:
    """Whether the caller of ``pipe(x)`` needs the plain graph of the layers."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (
        bool(RUNNING.get())
        or is_checkpointing()
        or is_recomputing()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None  # torch.jit.trace
        or torch._C._current_graph_task_id() != -1  # recomputed in another backward
        or (hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint")
    )


def plain(
    pipeline: Pipeline,
    micro_batches: Sequence[Any],
    checkpoint: Sequence[StageMode],
    *,
    seed: int | None = None,
) -> list[Any]:
    """Runs the stages one after another on the calling thread.

    Takes trees on the first device and a mode for each stage; returns trees on the last device.
    Without a ``seed`` of the random numbers, the caller's generator draws it.
    """
    call = StageRuns(pipeline, len(micro_batches), checkpoint=checkpoint, inline=True, seed=seed)
    runs = call.runs[: pipeline.n]
    ties = pipeline.shared.find()
    for run in runs:
        copies = {
            id(tie.tensor): with_class_of(tie.tensor, tie.tensor.to(run.stage.device))
            for tie in ties
            if run.stage.j in tie.stages[1:]
            and not same_memory(tie.tensor.device, run.stage.device)
        }
        if copies:
            use_substitutes(run, copies, {})

    def cell(i: int, value: Any, owners: Sequence[int], store: dict[SkipKey, Any], j: int) -> Any:
        run, stage = runs[j], runs[j].stage
        popped = tuple([store.pop(key) for key in stage.pops])
        inputs = map_tensors(
            lambda tensors: [
                t if same_memory(t.device, stage.device) else t.to(stage.device) for t in tensors
            ],
            (value, tuple([skip for skip, _ in popped])),
        )
        owners = [*owners, *[flag for _, own in popped for flag in own]]
        recomputed = i < call.recomputed[j]
        with pipeline.workers[pipeline.worker_of[j]].caller_lane().active():
            forward = run.recomputation.checkpointed if recomputed else run.forward
            outputs = forward(i, inputs, owners)
        passed = passthrough_flags(
            inputs, owners, outputs, all_borrowed=recomputed or j == 0,
            target=None if j else lambda: None,
        )  # fmt: skip
        following = iter(passed or [0] * len(tensors_in(outputs)))
        value, stashed = outputs
        owners = [next(following) for _ in tensors_in(value)]
        for key, skip in zip(stage.stashes, stashed, strict=True):
            store[key] = skip, [next(following) for _ in tensors_in(skip)]
        return value, owners

    def run_all() -> list[Any]:
        found = []
        for i, value in enumerate(micro_batches):
            store: dict[SkipKey, Any] = {}
            owners: Sequence[int] = input_flags(value, None) if runs[0].writes else ()
            for j in range(pipeline.n):
                value, owners = cell(i, value, owners, store, j)
            found.append(value)
        return found

    return let_modules_hold(pipeline.drawing, run_all)
