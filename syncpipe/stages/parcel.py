"""What travels over the edges between stages, in both drivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from syncpipe.schedules.steps import Edge
from syncpipe.stages.call import Call
from syncpipe.stages.inplace import sent
from syncpipe.stages.run import Inputs

__all__ = ["Parcel", "packed", "unpacked"]

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


def unpacked(parcels: list[Parcel]) -> tuple[Inputs, Sequence[int]]:
    """The inputs of a stage that is not the first, and their marks; the list is used up."""
    if len(parcels) == 1:
        parcel = parcels.pop()
        return (parcel.value, ()), parcel.marks
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
) -> list[Parcel]:
    """The outputs of a cell for the stages that need them, in the order of the edges.

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
    parcels: list[Parcel] = []
    for edge in call.pipeline.outgoing[j]:
        value, k = (output, 0) if edge.skip is None else (skips[edge.skip], 1 + edge.skip)
        value, along = prepare(edge, value)
        value, event = call.send(edge, i, value, graph=graph)
        parcels.append(Parcel(value, event, marks[k], along))
    return parcels
