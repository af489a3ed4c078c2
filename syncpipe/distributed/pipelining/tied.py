"""Tied weights in several processes: each has its own, they begin alike and stay so.

One process holds one tensor at two places; two processes hold two. The values are those of the
first stage that has it. After each step the gradients are added up over the ranks that hold the
weight, so that each of them has the whole, as if there were one tensor, and takes the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.distributed.pipelining.together import Together
from syncpipe.layers.ties import Tie

__all__ = ["SharedWeights"]


class SharedWeights:
    """What this rank holds of the tensors that are in stages of several ranks.

    Args:
        ties: of the whole model.
        rank_of: for each stage its rank.
        together: the ranks.
    """

    def __init__(self, ties: Sequence[Tie], rank_of: Sequence[int], together: Together) -> None:
        self._together = together
        self._shared: list[tuple[str, bool, tuple[int, ...], int]] = []
        for tie in ties:
            ranks = tuple(sorted({rank_of[stage] for stage in tie.stages}))
            mine = [p for p in tie.places if rank_of[p.stage] == together.rank]
            if len(ranks) > 1 and mine:
                place = mine[0]
                found = place.full_name, place.is_parameter, ranks, rank_of[tie.owner]
                self._shared.append(found)

    def begin_alike(self, module: nn.Module) -> None:
        """Gives all of them the values of their owner."""
        with torch.no_grad():
            for name, _, ranks, owner in self._shared:
                tensor = _tensor(module, name)
                (values,) = self._together.exchange(tensor.detach().contiguous(), ranks, [owner])
                tensor.copy_(values)

    def set_aside(self, module: nn.Module) -> list[Tensor | None]:
        """Takes what earlier steps have accumulated, which is added up already."""
        before = []
        for parameter, _ in self._parameters(module):
            before.append(parameter.grad)
            parameter.grad = None
        return before

    def add_up(self, module: nn.Module, before: list[Tensor | None]) -> None:
        """Makes the gradients of this step those of all places, and puts back the earlier ones."""
        for (parameter, ranks), old in zip(self._parameters(module), before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Of a parameter that is sharded on each rank, alike, the own part.
            local = getattr(parameter.grad, "to_local", lambda grad=parameter.grad: grad)()
            first, *others = self._together.exchange(local.contiguous(), ranks, ranks)
            local.copy_(sum(others, first))  # in one order, so that all have the same bits
            if old is not None:
                parameter.grad = old.add_(parameter.grad)

    def _parameters(self, module: nn.Module) -> list[tuple[Any, tuple[int, ...]]]:
        found = [
            (_tensor(module, name), ranks) for name, is_one, ranks, _ in self._shared if is_one
        ]
        return [(parameter, ranks) for parameter, ranks in found if parameter.requires_grad]


def _tensor(module: nn.Module, full_name: str) -> Any:
    """A parameter or buffer by its name; looked up anew, for ``fully_shard`` makes other ones."""
    path, _, name = full_name.rpartition(".")
    holder = module.get_submodule(path)
    return {**holder._buffers, **holder._parameters}[name]
