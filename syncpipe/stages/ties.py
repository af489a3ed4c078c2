"""Tied weights in one call: what stages compute with that are not their owner.

    owner (stage 0)   weight ----- copy, once ------> stage 3      before the first cell
                        ^                               |
                        +---- gradient of cell (i, 3) --+          in the backward of each cell

In ``train_batch`` the gradient of cell ``(i, 3)`` begins the backward of the weight in cell
``(i, 0)``, which adds its own: the plain model's order. (Over a third stage in between it goes from
stage to stage.) In ``pipe(x)`` the uses of all cells are linked in the autograd graph, so that they
are added in that order, too::

    weight <-- Uses(0) <-- Uses(1) <-- ... <-- Uses(m-1)
                 ^ ^         ^ ^
                 | +- (0,3)  | +- (1,3) over the border to stage 3
                 +--- (0,0)  +--- (1,0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from syncpipe.layers.ties import Tie, check_modes
from syncpipe.runtime.recorder import Recorder
from syncpipe.runtime.rematerialization.guards import version_of
from syncpipe.runtime.streams import Lane, same_memory
from syncpipe.schedules.steps import Edge
from syncpipe.stages.inplace import TIED
from syncpipe.stages.run import CallContext, Inputs
from syncpipe.stages.stand_ins import StandIns
from syncpipe.stages.transfer import SendCopy, Uses

__all__ = ["CallTies", "Copies"]


@dataclass(frozen=True)
class _Copy:
    """A copy of a tensor, and what tells whether it is still one.

    Attributes:
        tensor: the original.
        mark: its memory and its version, when the copy was made.
        copy: on another device.
        event: tells when it is there.
        kept: whether it may serve another call. A gradient is a reason to change the original, and
            what is written into ``tensor.data`` then leaves no trace.
    """

    tensor: Tensor
    mark: tuple[Any, ...]
    copy: Tensor
    event: Any
    kept: bool


#: By the identity of a tensor and a device.
Copies = dict[tuple[int, torch.device], _Copy]


class CallTies:
    """The tied tensors of one call.

    Args:
        ties: what the stages share.
        partitions: those of the stages.
        lanes: for each stage the lane of its worker.
        edges: those of the pipeline; ours have the numbers after them.
        context: the call's.

    Attributes:
        edges: over which gradients go back, from a stage to the one before it that has the weight.
        incoming: for each stage those at which it is the later one.
        outgoing: for each stage those at which it is the earlier one.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        partitions: Sequence[Any],
        lanes: Sequence[Lane],
        edges: Sequence[Edge],
        context: CallContext,
    ) -> None:
        check_modes(ties)
        self._ties = ties
        self._partitions = partitions
        self._lanes = lanes
        self._context = context
        self._versions = [version_of(tie.tensor) for tie in ties]
        self._trains = [context.state.grad and tie.tensor.requires_grad for tie in ties]
        stages = range(len(partitions))
        hops: dict[tuple[int, int], list[Tie]] = {}
        for tie, trains in zip(ties, self._trains, strict=True):
            for source, target in pairwise(tie.stages) if trains else ():
                hops.setdefault((target, source), []).append(tie)
        self.edges = tuple(
            [Edge(len(edges) + k, j[1], j[0], None) for k, j in enumerate(sorted(hops))]
        )
        self.incoming = [[edge for edge in self.edges if edge.target == j] for j in stages]
        self.outgoing = [[edge for edge in self.edges if edge.source == j] for j in stages]
        self._over = {edge.number: hops[edge.target, edge.source] for edge in self.edges}
        self._slots: list[list[Tie]] = [[] for _ in stages]
        self._values: list[tuple[Tensor, ...]] = [() for _ in stages]
        self._linked: list[list[tuple[Tensor, ...]]] = []

    def foreign(self, j: int) -> set[int]:
        """The tensors, by identity, that are in stage ``j`` but not its own."""
        return {id(tie.tensor) for tie in self._ties if j in tie.stages[1:]}

    # -- before the first cell

    def prepare(self, copies: Copies, *, graph: bool, recorder: Recorder | None) -> Copies:
        """Brings the tensors to where they are needed; on the caller's thread.

        Args:
            copies: those of the calls before.
            graph: link all uses in the autograd graph.
            recorder: writes transfers down.

        Returns:
            The copies of this call.
        """
        made: Copies = {}
        tangents = forward_ad._current_level >= 0  # they go with the tensors themselves
        links = graph and not tangents
        brought: dict[tuple[int, int], Tensor] = {}
        for j, partition in enumerate(self._partitions):
            slots = [tie for edge in self.incoming[j] for tie in self._over[edge.number]]
            if links:
                flows = zip(self._ties, self._trains, strict=True)
                slots = [tie for tie, trains in flows if trains and j in tie.stages]
            elif graph:
                slots = []
            slots += [
                tie
                for tie in self._ties
                if j in tie.stages[1:] and tie not in slots and self._is_apart(tie, j)
            ]
            self._slots[j] = slots
            if slots:
                self._context.plain[j] = False
                self._context.stand_ins[j] = StandIns(partition, j, slots)
            for tie in slots:
                value = tie.tensor.detach()
                if self._is_apart(tie, j):
                    value = self._brought(tie, j, copies, made, tangents=tangents)
                brought[id(tie), j] = value
            self._values[j] = tuple([brought[id(tie), j] for tie in slots])
        if links:
            self._link(brought, recorder)
        return made

    def _is_apart(self, tie: Tie, j: int) -> bool:
        return not same_memory(self._lanes[tie.owner].device, self._lanes[j].device)

    def _brought(self, tie: Tie, j: int, copies: Copies, made: Copies, *, tangents: bool) -> Tensor:
        """The tensor on the device of stage ``j``."""
        tensor, lane = tie.tensor, self._lanes[j]
        if tangents:
            (copy,), event = self._lanes[tie.owner].send([tensor], lane)
            lane.receive(event, [copy])
            return copy
        key = (id(tensor), lane.device)
        found = made.get(key)
        if found is None:
            mark = (tensor.data_ptr(), version_of(tensor), tensor.shape, tensor.dtype)
            found = copies.pop(key, None)
            if found is None or found.tensor is not tensor or found.mark != mark or not found.kept:
                found = None  # so that its memory can be used again
                with torch.inference_mode(False), torch.no_grad():  # for calls to come, too
                    (copy,), event = self._lanes[tie.owner].send([tensor.detach()], lane)
            else:
                copy, event = found.copy, found.event
            trains = self._context.state.grad and tensor.requires_grad
            found = _Copy(
                tensor, mark, copy, event, not (trains or self._context.state.needs_inline)
            )
            made[key] = found
        lane.receive(found.event, [found.copy])
        return found.copy

    def _link(self, brought: dict[tuple[int, int], Tensor], recorder: Recorder | None) -> None:
        """Makes the nodes by which gradients of all cells are added up in one order."""
        m, stages = self._context.m, range(len(self._partitions))
        linked: list[dict[tuple[int, int], Tensor]] = [dict(brought) for _ in range(m)]
        for tie, trains in zip(self._ties, self._trains, strict=True):
            if not trains:
                continue
            owner, rest = self._lanes[tie.owner], tie.tensor
            for i in range(m):
                with owner.active():
                    rest, *uses = Uses.apply(len(tie.stages), rest)  # type: ignore[no-untyped-call]
                for j, use in zip(reversed(tie.stages), uses, strict=True):
                    lane = self._lanes[j]
                    if lane is owner or (lane.streams is None and not self._is_apart(tie, j)):
                        linked[i][id(tie), j] = use
                        continue
                    note = None
                    if recorder is not None:
                        note = _noted(recorder, i, tie.owner, j)
                    with lane.active():
                        linked[i][id(tie), j] = SendCopy.apply(  # type: ignore[no-untyped-call]
                            owner, lane, note, brought[id(tie), j], use
                        )
        self._linked = [
            [tuple([table[id(tie), j] for tie in self._slots[j]]) for j in stages]
            for table in linked
        ]

    # -- in a cell

    def joined(self, i: int, j: int, inputs: Inputs, marks: Sequence[int]) -> Any:
        """The inputs of cell ``(i, j)`` with the tensors that it takes for tied ones; and marks."""
        values = self._linked[i][j] if self._linked else self._values[j]
        if not values:
            return inputs, marks
        return (inputs[0], (*inputs[1], *values)), [*marks, *[TIED] * len(values)]

    def flags(self, j: int) -> list[list[bool]]:
        """For each incoming edge of stage ``j`` whether its tensors need a gradient; the rest."""
        if not self._slots[j]:
            return []
        flags = [[True] * len(self._over[edge.number]) for edge in self.incoming[j]]
        return [*flags, [False] * (len(self._slots[j]) - sum(map(len, flags)))]

    def sources(self, j: int, inputs: Inputs) -> list[list[Tensor]]:
        """For each outgoing edge of stage ``j`` the tensors, in its cell, that get its gradients.

        Args:
            j: the stage.
            inputs: those of the cell.
        """
        if not self.outgoing[j]:
            return []
        slots = self._slots[j]
        given = inputs[1][len(inputs[1]) - len(slots) :]
        own = {id(tie): tensor for tie, tensor in zip(slots, given, strict=True)}
        return [
            [own.get(id(tie), tie.tensor) for tie in self._over[edge.number]]
            for edge in self.outgoing[j]
        ]

    # -- after the last one

    def check(self) -> None:
        """Refuses forwards that wrote into a tied tensor.

        Raises:
            RuntimeError: one did.
        """
        for tie, version in zip(self._ties, self._versions, strict=True):
            if version_of(tie.tensor) != version:
                raise RuntimeError(
                    f"{tie} are one tensor, and a layer modified it in place in its forward (an "
                    "embedding with max_norm, or a buffer that it counts in). Stages see the "
                    "micro-batches in another order than the plain model does, so it is not the "
                    "same: choose a balance that puts these layers into one stage, or untie them"
                )


def _noted(recorder: Recorder, i: int, source: int, target: int) -> Any:
    def note(*, backward: bool) -> Any:
        return recorder.transfer(i, source, target, backward=backward)

    return note
