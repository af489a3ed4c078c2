"""What travels over the edges between stages, in both drivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from syncpipe.schedules.steps import Edge
from syncpipe.stages.call import Call
from syncpipe.stages.inplace import sent
from syncpipe.stages.run import Inputs

__all__ = ["Parcel", "new_parcel", "packed", "unpacked"]

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


#: A :class:`Parcel` from a tuple of all that is in it, without a way through Python.
new_parcel: Callable[[tuple[Any, ...]], Parcel] = partial(tuple.__new__, Parcel)


def unpacked(parcels: list[Parcel]) -> tuple[Inputs, Sequence[int], list[Sequence[Any]]]:
    """The inputs of a stage that is not the first, their marks, and what came along with each.

    The list is used up.
    """
    if len(parcels) == 1:
        value, _, marks, along = parcels.pop()
        return (value, ()), marks, [along]
    values = [each.value for each in parcels]
    marks = [mark for each in parcels for mark in each.marks]
    alongs = [each.along for each in parcels]
    parcels.clear()
    return (values[0], tuple(values[1:])), marks, alongs


def packed(
    call: Call,
    i: int,
    j: int,
    outputs: Inputs,
    lent: Sequence[int],
    prepare: Callable[[Edge, Any], tuple[Any, Sequence[Any]]],
) -> list[Parcel]:
    """The outputs of a cell for the stages that need them, in the order of the edges.

    Args:
        call: the call.
        i: the micro-batch.
        j: the stage.
        outputs: its outputs.
        lent: the marks of the outputs; empty if nobody else needs any of them.
        prepare: takes an edge and a value; returns what to send, and ``Parcel.along``.
    """
    output, skips = outputs
    marks: list[Sequence[int]] = [_OWN]
    if lent or skips or not isinstance(output, Tensor):
        marks = sent(outputs, lent)
    parcels: list[Parcel] = []
    for edge in call.pipeline.outgoing[j]:
        value, k = (output, 0) if edge.skip is None else (skips[edge.skip], 1 + edge.skip)
        value, along = prepare(edge, value)
        value, event = call.send(edge, i, value)
        parcels.append(new_parcel((value, event, marks[k], along)))
    return parcels
