"""What travels over the edges between stages, in both drivers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from syncpipe.runtime.engine import Message
from syncpipe.stages.inplace import sent
from syncpipe.stages.pipeline import Call, Edge
from syncpipe.stages.run import Inputs
from syncpipe.tree import tensors_in

__all__ = ["Parcel", "keys", "packed", "received", "unpacked"]

_OWN = (0,)


class Parcel(NamedTuple):
    """What travels over an edge.

    Attributes:
        value: a tree of tensors, or on the way back a list of gradients.
        event: tells when it is there.
        marks: for each tensor of the value who else it belongs to (see ``inplace``).
        along: what a driver sends along.
    """

    value: Any
    event: Any
    marks: Sequence[int] = ()
    along: Sequence[Any] = ()


def keys(call: Call, i: int, j: int) -> list[Hashable]:
    """The messages that the forward of cell ``(i, j)`` needs."""
    return [(edge.number, i) for edge in call.pipeline.incoming[j]]


def received(call: Call, j: int, parcels: Sequence[Parcel]) -> None:
    """What stage ``j`` does from now on comes after these parcels have arrived."""
    lane = call.lane_of(j)
    for parcel in parcels:
        if parcel.event is not None:
            lane.receive(parcel.event, tensors_in(parcel.value))


def unpacked(parcels: list[Parcel]) -> tuple[Inputs, list[int]]:
    """The inputs of a stage that is not the first, and their marks; the list is used up."""
    values = [parcel.value for parcel in parcels]
    marks = [mark for parcel in parcels for mark in parcel.marks]
    parcels.clear()
    return (values[0], tuple(values[1:])), marks


def packed(
    call: Call,
    i: int,
    j: int,
    outputs: Inputs,
    lent: Sequence[int],
    prepare: Callable[[Edge, Any], tuple[Any, Sequence[Any]]],
    *,
    graph: bool,
) -> list[Message]:
    """The outputs of a cell as messages to the stages that need them.

    Args:
        call: the call.
        i: the micro-batch.
        j: the stage.
        outputs: its outputs.
        lent: the marks of the outputs; empty if nobody else needs any of them.
        prepare: takes an edge and a value; returns what to send, and ``Parcel.along``.
        graph: let gradients come back the same way when autograd asks for them.
    """
    output, skips = outputs
    marks: list[Sequence[int]] = [_OWN]
    if lent or skips or not isinstance(output, Tensor):
        marks = sent(outputs, lent)
    messages: list[Message] = []
    for edge in call.pipeline.outgoing[j]:
        value, k = (output, 0) if edge.skip is None else (skips[edge.skip], 1 + edge.skip)
        value, along = prepare(edge, value)
        value, event = call.send(edge, i, value, graph=graph)
        w = call.pipeline.worker_of[edge.target]
        messages.append((w, (edge.number, i), Parcel(value, event, marks[k], along)))
    return messages
