"""What ranks of a pipeline do to gradients together: tied weights, and the norm of all.

One process holds one tensor at two places; two processes hold two. The values are those of the
first stage that has it. After each step that rank adds up the gradients of all ranks that hold the
weight and sends the sum to each, as if there were one tensor, so all take the same step.
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
        self._shared: list[tuple[str, bool, list[int]]] = []
        for tie in ties:
            ranks = list(dict.fromkeys(rank_of[stage] for stage in tie.stages))
            mine = [place for place in tie.places if rank_of[place.stage] == peers.rank]
            if len(ranks) > 1 and mine:
                self._shared.append((mine[0].full_name, mine[0].is_parameter, ranks))
                with torch.no_grad():
                    self._send(self._tensor(mine[0].full_name), ranks)

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
            first, *others = ranks
            if self._peers.rank != first:
                dist.send(own.contiguous(), group=self._peers.group, tag=1, group_dst=first)
            for rank in others if self._peers.rank == first else ():
                part = torch.empty_like(own, memory_format=torch.contiguous_format)
                dist.recv(part, group=self._peers.group, tag=1, group_src=rank)
                own += part
            self._send(own, ranks)
            if old is not None:
                parameter.grad = old.add_(parameter.grad)

    def _parameters(self) -> list[tuple[Any, list[int]]]:
        found = [(self._tensor(name), ranks) for name, is_one, ranks in self._shared if is_one]
        return [(parameter, ranks) for parameter, ranks in found if parameter.requires_grad]

    def _tensor(self, full_name: str) -> Any:
        """A parameter or buffer by its name; looked up anew, for ``fully_shard`` makes others."""
        path, _, name = full_name.rpartition(".")
        holder = self._module.get_submodule(path)
        return {**holder._buffers, **holder._parameters}[name]

    def _send(self, tensor: Tensor, ranks: list[int]) -> None:
        """Gives all of some ranks the values of the first one; these call it."""
        first, *others = ranks
        dense = tensor.detach().contiguous()
        if self._peers.rank != first:
            dist.recv(dense, group=self._peers.group, tag=1, group_src=first)
            tensor.detach().copy_(dense)
        for rank in others if self._peers.rank == first else ():
            dist.send(dense, group=self._peers.group, tag=1, group_dst=rank)


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
