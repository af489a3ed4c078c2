"""Cells that drop their graph in the forward, and run again before their backward."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from syncpipe.data.trees import tensors_in
from syncpipe.training.cell import Cell, ends_of

_requires_grad = attrgetter("requires_grad")


def recomputed(task: Any, r: int, inner: Any) -> Any:
    """Runs the first micro-batches of a stage without storing."""
    call, count = task.call, task.call.recomputed[r]
    if not count:
        return inner
    forward = call.runs[r].recomputation.forward

    def outer(i: int, cell: Cell, inputs: Any) -> Any:
        if i >= count:
            return inner(i, cell, inputs)
        outputs, recomputation = forward(i, cell.cut.enter(inputs), inputs, cell.owners)
        if call.state.grad and any(map(_requires_grad, tensors_in(outputs))):
            cell.recomputation = recomputation  # a frozen stage has no backward
        return outputs

    return outer


def recompute(task: Any, r: int, i: int, messages: list[Any]) -> Sequence[Any]:
    """The action that runs a cell again."""
    call, cell = task.call, task.cells[r][i]
    recomputation, cell.recomputation = cell.recomputation, None
    if recomputation is None:
        return []
    given = cell.cut.enter(recomputation.inputs)
    epoch, keep, run = call.user_code_epoch, task.keeps_graph, call.runs[r]
    output, skips = run.recompute(recomputation, given, epoch, keep=keep)
    values = [task.head.graph_outputs(output)] if task.last[r] else []
    for edge in call.outgoing[r]:
        values.append(output if edge.skip is None else skips[edge.skip])
    cell.ends = list(map(ends_of, values))
    if tuple(map(len, cell.ends)) != cell.expected_ends:
        raise RuntimeError(
            f"{run.stage.describe(i)} gave other outputs when it was recomputed. Its layers "
            "must do the same both times. If one depends on a global or counts its calls, let "
            "it ask syncpipe.is_recomputing(), or use checkpoint='never'."
        )
    return []
