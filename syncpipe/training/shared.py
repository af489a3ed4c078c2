"""Gradients of tensors that stages share, and of replicas (``sharing``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncpipe.stages.call import Call, send_tree
from syncpipe.stages.sharing import CallReplicas, CallTies
from syncpipe.training.cell import Cell, Message, ends_of


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
