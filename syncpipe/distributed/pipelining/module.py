"""The layers of one stage as PyTorch's ``PipelineStage`` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.distributed.pipelining.carried import Boundary, start
from syncpipe.runtime.errors import annotate
from syncpipe.skip.layout import SkipLayout
from syncpipe.skip.store import SkipKey, use_store
from syncpipe.stages.stage import Partition

__all__ = ["StageModule", "passing_skips"]


def passing_skips(layout: SkipLayout) -> list[list[SkipKey]]:
    """For each stage the skips that arrive with its input: to be popped there, or further on.

    In the order in which they were stashed, which is the same in all processes; the keys are not,
    for a namespace is made anew in each.
    """
    found: list[list[SkipKey]] = [[] for _ in layout.incoming]
    for source, skips in enumerate(layout.outgoing):
        for key, target in skips.items():
            for stage in range(source + 1, target + 1):
                found[stage].append(key)
    return found


class StageModule(Partition):
    """The layers of one stage, under the names that they have in the model.

    ``fully_shard`` and ``parallelize_module`` take it as they take any module.

    Attributes:
        where: the stage, for errors.
        inward: what it gets from the stage before; None for the first stage.
        outward: what it gives to the stage after; None for the last stage.
        inputs: of the first stage in a step, for each micro-batch.
        head: of the last stage in a step, what makes the loss of its outputs.
    """

    inward: Boundary | None = None
    outward: Boundary | None = None

    def __init__(
        self,
        layers: Iterable[tuple[str, nn.Module]],
        where: str,
        arriving: Sequence[SkipKey],
        leaving: Sequence[SkipKey],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._modules.update(layers)
        self.where = where
        self._arriving, self._leaving = list(arriving), list(leaving)
        self._device = device
        self.inputs: list[Any] = []
        self.head: Callable[[Any, torch.device], Tensor] | None = None

    def forward(self, *wire: Tensor) -> Any:
        """From what arrives to what is sent; the last stage gives the loss, in a step.

        Args:
            wire: what was sent; for the first stage the index of the micro-batch.
        """
        if self.inward is None:
            tree, token = (self.inputs[int(wire[0])], ()), start(self._device)
        else:
            tree, token = self.inward.opened(wire)
        value, skips = self.run(*tree)
        if self.outward is not None:
            return self.outward.closed((value, skips), token)
        return value if self.head is None else self.head(value, self._device)

    def run(self, value: Any, skips: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The layers, and the skips that pass by: they lie in the store meanwhile."""
        store = dict(zip(self._arriving, skips, strict=True))
        try:
            with use_store(store):
                value = super().forward(value)
        except Exception as error:
            annotate(error, f"in {self.where}")
            raise
        return value, tuple([store[key] for key in self._leaving])
