"""Tied weights in one call: what stages compute with that are not their owner.

    owner (stage 0)   weight ----- copy, once ------> stage 3      before the first cell
                        ^                               |
                        +---- gradient of cell (i, 3) --+          in the backward of each cell

The copy is a leaf of its own. What a cell adds to its gradient goes to cell ``(i, 0)``, begins the
backward of the weight there, and the gradient of that cell is added to it: the plain model's order.
(Over a third stage in between it goes from stage to stage.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from syncpipe.layers.ties import Tie, check_modes, find_ties, move_tensors
from syncpipe.runtime.module_state import version_of
from syncpipe.runtime.streams import Lane, same_memory
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.steps import Edge
from syncpipe.stages.run import CallContext, Partition
from syncpipe.stages.sharing.copies import Copy

__all__ = ["CallTies", "SharedTensors"]


_Copies = dict[tuple[int, torch.device], Copy]  # by the identity of a tensor, and a device


class SharedTensors:
    """What the stages of a pipeline share, from call to call.

    Args:
        partitions: those of the stages.
        workers: for each its worker.

    Attributes:
        copies: those that the last call used, if it came to its end and they may serve the next.
    """

    def __init__(self, partitions: Sequence[Partition], workers: Sequence[Worker]) -> None:
        self.partitions = list(partitions)
        self._workers = list(workers)
        self._places = {(j, name) for j, part in enumerate(partitions) for name in part.tied}
        self.copies: _Copies = {}

    def find(self) -> list[Tie]:
        """The ties that there are now; what was tied or untied is moved to where it belongs now."""
        if len(self.partitions) < 2:
            return []
        ties = find_ties(self.partitions)
        places = {(place.stage, place.full_name) for tie in ties for place in tie.places}
        if places != self._places:
            move_tensors(self.partitions, self._workers, ties, places ^ self._places)
            self._places = places
        if not ties:
            self.copies = {}
        return ties


class CallTies:
    """The tied tensors of one call; to be made on the caller's thread.

    Args:
        ties: what the stages share.
        shared: what is kept of it from call to call.
        lanes: for each stage the lane of its worker, which waits for the caller already.
        edges: those of the pipeline; ours have the numbers after them.
        context: the call's.
        fixed: for each stage, by the identity of a tensor, what stands in its place; filled.
        in_order: one worker alone goes forward in the plain model's order.

    Attributes:
        edges: over which gradients go back, from a stage to the one before it that has the weight.
        leaves: for each stage those of these that get gradients.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        shared: SharedTensors,
        lanes: Sequence[Lane],
        edges: Sequence[Edge],
        context: CallContext,
        fixed: list[dict[int, Tensor]],
        *,
        in_order: bool,
    ) -> None:
        several = any(lane is not lanes[0] for lane in lanes)
        #: What is written into a tied tensor is then seen as in the plain model.
        self._in_order = not several and (in_order or not context.state.grad)
        if not self._in_order:
            check_modes(ties)
        self._lanes = lanes
        self._context = context
        self._shared = shared
        self._before, shared.copies = shared.copies, {}
        self._copies: _Copies = {}
        self._ties = ties
        self._versions = [version_of(tie.tensor) for tie in ties]
        trained = [tie for tie in ties if context.state.grad and tie.tensor.requires_grad]
        self.leaves: list[list[Tensor]] = [[] for _ in lanes]
        self.fixed = fixed
        for tie in ties:
            for j in tie.stages[1:]:
                value = tie.tensor.detach()
                apart = not same_memory(lanes[tie.owner].device, lanes[j].device)
                if apart:
                    value = self._brought(tie, j)
                if tie in trained:
                    value = value.detach().requires_grad_()
                    self.leaves[j].append(value)
                if tie in trained or apart:
                    self.fixed[j][id(tie.tensor)] = value
        self._plan_return(trained, len(edges))

    def foreign(self, j: int) -> set[int]:
        """The tensors, by identity, that are in stage ``j`` but not its own."""
        return {id(tie.tensor) for tie in self._ties if j in tie.stages[1:]}

    def _brought(self, tie: Tie, j: int) -> Tensor:
        """The tensor on the device of stage ``j``."""
        tensor, owner, lane = tie.tensor, self._lanes[tie.owner], self._lanes[j]
        key = (id(tensor), lane.device)
        found = self._copies.get(key)
        if found is None:
            found = self._before.pop(key, None)
            state = self._context.state
            kept = not ((state.grad and tensor.requires_grad) or state.needs_inline)
            if found is not None and found.serves(tensor):
                found = replace(found, kept=kept)
            else:
                found = None  # its memory can be used again
                found = Copy.made(tensor, owner, lane, kept=kept)
            self._copies[key] = found
        lane.receive(found.event, [found.copy])
        return found.copy

    def _plan_return(self, returning: Sequence[Tie], number: int) -> None:
        """Which gradients go back from where to where."""
        hops: dict[tuple[int, int], list[Tensor]] = {}
        for tie in returning:
            for source, target in pairwise(tie.stages):
                hops.setdefault((target, source), []).append(tie.tensor)
        self.edges = tuple(
            [Edge(number + k, source, j, None) for k, (j, source) in enumerate(sorted(hops))]
        )
        stages = range(len(self._lanes))
        self._receivers: list[list[list[Tensor]]] = [[] for _ in stages]
        self._senders: list[list[tuple[Edge, list[Tensor]]]] = [[] for _ in stages]
        for edge in self.edges:
            tensors = hops[edge.target, edge.source]
            here, there = self.fixed[edge.source], self.fixed[edge.target]
            self._receivers[edge.source].append([here.get(id(t), t) for t in tensors])
            self._senders[edge.target].append((edge, [there[id(t)] for t in tensors]))

    def receivers(self, j: int) -> list[list[Tensor]]:
        """For each of ``edges`` that leaves stage ``j`` the leaves that its gradients are for."""
        return self._receivers[j]

    def senders(self, j: int) -> list[tuple[Edge, list[Tensor]]]:
        """For each of ``edges`` that comes to stage ``j`` the leaves whose gradients go back."""
        return self._senders[j]

    # -- after the last cell

    def finish(self) -> None:
        """Keeps the copies for the next call, unless a forward wrote into a tied tensor.

        Raises:
            RuntimeError: one did.
        """
        for tie, version in () if self._in_order else zip(self._ties, self._versions, strict=True):
            copies = [copy for copy in self._copies.values() if copy.tensor is tie.tensor]
            if version_of(tie.tensor) != version or any(
                version_of(each.copy) != each.version for each in copies
            ):
                raise RuntimeError(_written(tie))
        self._shared.copies = {key: copy for key, copy in self._copies.items() if copy.kept}


def _written(tie: Tie) -> str:
    return (
        f"{tie} are one tensor, and a layer modified it in place in its forward (an embedding "
        "with max_norm, or a buffer that it counts in). Stages see the micro-batches in another "
        "order than the plain model does, so it is not the same: choose a balance that puts these "
        "layers into one stage, or untie them"
    )
