"""``pipe(x)`` as a plain graph: the stages one after another on the calling thread.

For whoever needs the graph of the layers itself: ``inline(graph=True)``, ``create_graph``,
forward-mode AD, transforms of functions, modes that see operations. Values go between devices by
ordinary copies, and what is computed again is so by ``torch.utils.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import setitem
from typing import Any

from torch import Tensor

from syncpipe.data import map_tensors, tensors_in
from syncpipe.options import StageMode
from syncpipe.runtime.interrupts import undone
from syncpipe.runtime.random_numbers import outside_of_turn
from syncpipe.runtime.streams import same_memory
from syncpipe.skip.namespace import SkipKey
from syncpipe.stages.call import begun
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.sharing.stand_ins import StandIns

__all__ = ["plain"]


def plain(
    pipeline: Pipeline,
    micro_batches: Sequence[Any],
    checkpoint: Sequence[StageMode],
    *,
    seed: int | None = None,
    swaps: Sequence[tuple[dict[str, Any], str, Any]] = (),
) -> list[Any]:
    """Runs a mini-batch.

    Args:
        pipeline: the pipeline.
        micro_batches: trees on the first device.
        checkpoint: for each stage its mode.
        seed: of the random numbers; None: drawn from the caller's generator.
        swaps: what to put into modules meanwhile: a dict, a name and a tensor.

    Returns:
        For each micro-batch its output, on the last device.
    """
    how = begun(pipeline, len(micro_batches), checkpoint, inline=True, recorder=None, seed=seed)
    context, stages = how.context, pipeline.stages[: pipeline.n]
    for tie in pipeline.shared.find():
        for j in tie.stages[1:]:
            if not same_memory(tie.tensor.device, stages[j].device):
                there = {id(tie.tensor): tie.tensor.to(stages[j].device)}
                context.plain[j] = False
                for part in context.runs(stages[j]):
                    before = context.stand_ins.get(part)
                    others = {} if before is None else before.fixed
                    context.stand_ins[part] = StandIns(part.partition, {**others, **there})

    def cell(i: int, value: Any, marks: Sequence[int], store: dict[SkipKey, Any], j: int) -> Any:
        stage = stages[j]
        there = tuple([store.pop(key) for key in stage.pops])
        inputs = _placed((value, tuple([skip for skip, _ in there])), stage.device)
        marks = [*marks, *[mark for _, own in there for mark in own]]
        again = i < how.rematerialized[j]
        with pipeline.workers[pipeline.worker_of[j]].caller_lane().active():
            compute = stage.checkpointed if again else stage.forward
            outputs = compute(i, inputs, context, marks=marks)
        lent = stage.handed_on(inputs, marks, outputs, context, rematerialize=again)
        following = iter(lent or [0] * len(tensors_in(outputs)))
        value, stashed = outputs
        marks = [next(following) for _ in tensors_in(value)]
        for key, skip in zip(stage.stashes, stashed, strict=True):
            store[key] = skip, [next(following) for _ in tensors_in(skip)]
        return value, marks

    def run() -> list[Any]:
        found = []
        for owner, name, tensor in swaps:
            owner[name] = tensor
        for i, value in enumerate(micro_batches):
            store: dict[SkipKey, Any] = {}
            marks: Sequence[int] = ()
            for j in range(pipeline.n):
                value, marks = cell(i, value, marks, store, j)
            found.append(value)
        return found

    owners = [owner for owner, _, _ in swaps]
    names = [name for _, name, _ in swaps]
    values = [owner[name] for owner, name, _ in swaps]
    # Inside another call's layer or loss: the order of locks is stage before random state.
    return outside_of_turn(lambda: undone(run, map(setitem, owners, names, values)))


def _placed(tree: Any, device: Any) -> Any:
    """A tree on a device; gradients find back."""

    def moved(tensors: list[Tensor]) -> list[Tensor]:
        return [t if same_memory(t.device, device) else t.to(device) for t in tensors]

    return map_tensors(moved, tree)
