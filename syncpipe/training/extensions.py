"""What may be in the actions of a task beside the plain path, innermost first.

A function that has nothing to do on a stage in this call returns ``inner``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from syncpipe.data.trees import tensors_in
from syncpipe.runtime.engine import Run
from syncpipe.stages.call import Call, send_tree
from syncpipe.stages.drawing import seeded
from syncpipe.stages.inplace import in_place
from syncpipe.stages.sharing import CallReplicas, CallTies
from syncpipe.training.cell import Cell, Message, ends_of
from syncpipe.training.weight_gradients import accumulate, split

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


def inspected(task: Any, r: int, inner: Any) -> Any:
    """Lets the leaves inspect the graph of each cell after its forward, if they do."""
    return inner if task.leaves is None else task.leaves.around_forward(r, inner)


def tied(task: Any, r: int, inner: Any) -> Any:
    """Adds gradients from later stages to those of the cell; takes those for earlier stages."""
    ties = task.call.part(CallTies)
    if ties is None or not (ties.receivers[r] or ties.senders[r]):
        return inner
    receivers, senders = ties.receivers[r], ties.senders[r]

    def outer(i: int, cell: Cell, grads: list[Any]) -> list[Any]:
        cell.ends = [*cell.ends, *map(ends_of, receivers)]
        parts = inner(i, cell, grads)
        return [*parts, *[task.leaves.pop_grads(r, leaves) for leaves in senders]]

    return outer


def recompute(task: Any, r: int, i: int, messages: list[Any]) -> Sequence[Any]:
    """The action that runs a cell again."""
    call, cell = task.call, task.cells[r][i]
    recomputation, cell.recomputation = cell.recomputation, None
    if recomputation is None:
        return []
    given = cell.cut.enter(recomputation.inputs)
    epoch, keep, run = call.user_code_epoch, task.keeps_graph, call.runs[r]
    output, skips = run.locked(recomputation, given, epoch, keep)
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


def reduce(task: Any, r: int, i: int, messages: list[Message]) -> Sequence[Message]:
    """Sends the gradients of a replica to the first one, which adds them to its own."""
    trained = task.call.part(CallReplicas).trained[r]
    if i > 0:
        grads = task.leaves.pop_grads(r, trained)
        return [message_to(task.call, r, task.call.pipeline.stages[r].j, grads)]
    for message in messages:  # replica 1, 2, ...
        task.leaves.add(r, trained, message.value)
    return []


def message_to(call: Call, r: int, other: int, value: Any) -> Message:
    """A message from one replica to another."""
    return Message(*send_tree(call.streams_of[r], call.streams_of[other], value))


#: Around the forward of a cell. ``in_place`` needs the outputs of the one that ``recomputed`` runs;
#: ``inspected`` looks for leaves in graphs, which copies for other stages do not have.
FORWARD: list[Callable[[Any, int, Any], Any]] = [recomputed, inspected, in_place]
#: Around the backward of a cell. ``seeded`` holds locks: all else runs under them.
BACKWARD: list[Callable[[Any, int, Any], Any]] = [tied, split, seeded]
#: Further kinds of action.
ACTIONS: dict[str, Callable[[Any, int], Run]] = {
    "recompute": lambda task, r: partial(recompute, task, r),
    "backward_weight": lambda task, r: partial(accumulate, task, r),
    "reduce": lambda task, r: partial(reduce, task, r),
}
