"""``pipe(x)`` as a plain graph: the stages one after another on the calling thread.

For whoever needs the graph of the layers itself: ``inline(graph=True)``, ``create_graph``,
forward-mode AD, transforms of functions, modes that see operations. Values go between devices by
ordinary copies, and what is computed again is so by ``torch.utils.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from syncpipe.data import map_tensors, tensors_in
from syncpipe.options import StageMode
from syncpipe.runtime.interrupts import Swap, swapped
from syncpipe.runtime.random_numbers import outside_of_turn
from syncpipe.runtime.streams import same_memory
from syncpipe.skip.store import SkipKey
from syncpipe.stages.call import MiniBatch
from syncpipe.stages.inplace import handed_on
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.sharing import stand_in


def plain(
    pipeline: Pipeline,
    micro_batches: Sequence[Any],
    checkpoint: Sequence[StageMode],
    *,
    seed: int | None = None,
    swaps: Sequence[Swap] = (),
) -> list[Any]:
    """Runs a mini-batch.

    Args:
        pipeline: the pipeline.
        micro_batches: trees on the first device.
        checkpoint: for each stage its mode.
        seed: of the random numbers; None: drawn from the caller's generator.
        swaps: what to put into modules meanwhile.

    Returns:
        For each micro-batch its output, on the last device.
    """
    call = MiniBatch(pipeline, len(micro_batches), checkpoint=checkpoint, inline=True, seed=seed)
    runs = call.runs[: pipeline.n]
    ties = pipeline.shared.find()
    for run in runs:
        there = {
            id(tie.tensor): tie.tensor.to(run.stage.device)
            for tie in ties
            if run.stage.j in tie.stages[1:]
            and not same_memory(tie.tensor.device, run.stage.device)
        }
        if there:
            stand_in(run, there, {})

    def cell(i: int, value: Any, marks: Sequence[int], store: dict[SkipKey, Any], j: int) -> Any:
        run, stage = runs[j], runs[j].stage
        there = tuple([store.pop(key) for key in stage.pops])
        inputs = map_tensors(
            lambda tensors: [_placed(t, stage.device) for t in tensors],
            (value, tuple([skip for skip, _ in there])),
        )
        marks = [*marks, *[mark for _, own in there for mark in own]]
        again = i < call.rematerialized[j]
        with pipeline.workers[pipeline.worker_of[j]].caller_lane().active():
            outputs = (run.checkpointed if again else run.forward)(i, inputs, marks)
        lent = handed_on(inputs, marks, outputs, all_lent=again or j == 0)
        following = iter(lent or [0] * len(tensors_in(outputs)))
        value, stashed = outputs
        marks = [next(following) for _ in tensors_in(value)]
        for key, skip in zip(stage.stashes, stashed, strict=True):
            store[key] = skip, [next(following) for _ in tensors_in(skip)]
        return value, marks

    def run_all() -> list[Any]:
        found = []
        for i, value in enumerate(micro_batches):
            store: dict[SkipKey, Any] = {}
            marks: Sequence[int] = ()
            for j in range(pipeline.n):
                value, marks = cell(i, value, marks, store, j)
            found.append(value)
        return found

    # Inside another call's layer or loss: the order of locks is stage before random state.
    return outside_of_turn(partial(swapped, swaps, run_all) if swaps else run_all)


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; gradients find back."""
    return tensor if same_memory(tensor.device, device) else tensor.to(device)
