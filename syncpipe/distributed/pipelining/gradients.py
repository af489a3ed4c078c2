"""What ranks of a pipeline do to gradients together: tied weights, and the norm of all.

One process holds one tensor at two places; two processes hold two. The values are those of the
first stage that has it. After each step the gradients are added up over the ranks that hold the
weight, so that each of them has the whole, as if there were one tensor, and takes the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from syncpipe.distributed.peers import Peers
from syncpipe.layers.ties import Tie

__all__ = ["SharedWeights", "grad_norm", "local"]


class SharedWeights:
    """What this rank holds of the tensors that are in stages of several ranks.

    Args:
        module: the stages of this rank.
        ties: of the whole model.
        rank_of: for each stage its rank.
        peers: the ranks.
    """

    def __init__(
        self, module: nn.Module, ties: Sequence[Tie], rank_of: Sequence[int], peers: Peers
    ) -> None:
        self._module, self._peers = module, peers
        self._shared: list[tuple[str, bool, tuple[int, ...]]] = []
        for tie in ties:
            ranks = tuple(sorted({rank_of[stage] for stage in tie.stages}))
            mine = [p for p in tie.places if rank_of[p.stage] == peers.rank]
            if len(ranks) > 1 and mine:
                name, owner = mine[0].full_name, rank_of[tie.owner]
                self._shared.append((name, mine[0].is_parameter, ranks))
                with torch.no_grad():
                    tensor = self._tensor(name)
                    tensor.copy_(self._exchange(tensor.detach().contiguous(), ranks, [owner])[0])

    def counted_elsewhere(self) -> set[int]:
        """The parameters, by identity, that a rank before this one holds, too."""
        mine = self._peers.rank
        return {id(parameter) for parameter, ranks in self._parameters() if ranks[0] != mine}

    def set_aside(self) -> list[Tensor | None]:
        """Takes what earlier steps have accumulated, which is added up already."""
        before = []
        for parameter, _ in self._parameters():
            before.append(parameter.grad)
            parameter.grad = None
        return before

    def add_up(self, before: list[Tensor | None]) -> None:
        """Makes the gradients of this step those of all places, and puts back the earlier ones."""
        for (parameter, ranks), old in zip(self._parameters(), before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad)
            first, *others = self._exchange(own.contiguous(), ranks, ranks)
            own.copy_(sum(others, first))  # in one order, so that all have the same bits
            if old is not None:
                parameter.grad = old.add_(parameter.grad)

    def _parameters(self) -> list[tuple[Any, tuple[int, ...]]]:
        found = [(self._tensor(name), ranks) for name, is_one, ranks in self._shared if is_one]
        return [(parameter, ranks) for parameter, ranks in found if parameter.requires_grad]

    def _tensor(self, full_name: str) -> Any:
        """A parameter or buffer by its name; looked up anew, for ``fully_shard`` makes others."""
        path, _, name = full_name.rpartition(".")
        holder = self._module.get_submodule(path)
        return {**holder._buffers, **holder._parameters}[name]

    def _exchange(
        self, tensor: Tensor, ranks: Sequence[int], senders: Sequence[int]
    ) -> list[Tensor]:
        """Sends a contiguous tensor between some ranks, which all call this.

        Returns:
            For each sender its tensor; the own one as it is.
        """
        peers, operations, found = self._peers, [], []
        for rank in senders:
            found.append(tensor if rank == peers.rank else torch.empty_like(tensor))
            if rank != peers.rank and peers.rank in ranks:
                there = peers.ranks[rank]
                operations.append(dist.P2POp(dist.irecv, found[-1], there, peers.group, tag=1))
        if peers.rank in senders:
            others = [peers.ranks[rank] for rank in ranks if rank != peers.rank]
            operations += [
                dist.P2POp(dist.isend, tensor, rank, peers.group, tag=1) for rank in others
            ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return found


def local(tensor: Any) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def grad_norm(
    parameters: Iterable[Any],
    norm_type: float,
    peers: Peers,
    shared: SharedWeights,
    device: torch.device,
) -> Tensor:
    """The norm of the gradients of all stages, over all parts of what is sharded."""
    largest = math.isinf(norm_type)
    combine = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    elsewhere = shared.counted_elsewhere()
    # By the process groups over which a gradient is sharded: one reduction for all of them.
    parts: dict[tuple[Any, ...], list[Tensor]] = {(): [torch.zeros((), device=device)]}
    for parameter in parameters:
        grad, own = parameter.grad, local(parameter.grad)
        groups: tuple[Any, ...] = ()
        if isinstance(grad, DTensor):
            # Of two dimensions that shard one dimension of a tensor one is no Shard by is_shard().
            replicated = [placement.is_replicate() for placement in grad.placements]
            groups = tuple(
                grad.device_mesh.get_group(k) for k, all in enumerate(replicated) if not all
            )
        part = torch.zeros((), device=device)
        if own.numel() and id(parameter) not in elsewhere:
            part = torch.linalg.vector_norm(own, norm_type, dtype=torch.float32)
        parts.setdefault(groups, []).append(part)
    total = []
    for groups, norms in parts.items():
        part = _combined(norms, norm_type)
        for group in groups:
            dist.all_reduce(part, combine, group=group)
        total.append(part)
    whole = torch.stack(total).max() if largest else torch.stack(total).sum()
    dist.all_reduce(whole, combine, group=peers.group)
    return whole if largest else whole ** (1 / norm_type)


def _combined(norms: list[Tensor], norm_type: float) -> Tensor:
    """What is reduced of some norms: the largest, or the sum of their powers."""
    stacked = torch.stack(norms)
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()
