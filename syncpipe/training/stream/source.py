"""Mini-batches one after another, as long as there are any, and their losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from syncpipe.data import tensors_in
from syncpipe.runtime.errors import annotate
from syncpipe.schedules.stream import Extent
from syncpipe.training.loss.known import Loss
from syncpipe.training.loss.objective import Objective
from syncpipe.training.sources import FromMiniBatch, Source, pair_of
from syncpipe.training.train import objective_of

__all__ = ["Losses", "StreamSource"]


class StreamSource(Source):
    """Takes mini-batches from an iterator, each only when the first stage is ready for it.

    Args:
        iterator: yields them.
        chunks: each is cut into so many micro-batches.
        steps: at most so many are taken; None: all.
        where: where each has its target.
        pack: makes of an input what the first layer gets.
        loss: the loss function, and how much micro-batches count.

    Attributes:
        extent: how many micro-batches there are.
        objectives: the losses of those mini-batches that have come in, and are not through yet, and
            how many micro-batches each has.
    """

    lazy = True

    def __init__(
        self,
        iterator: Iterator[Any],
        chunks: int,
        steps: int | None,
        where: Any,
        pack: Callable[[Any], Any],
        loss: Loss,
    ) -> None:
        super().__init__(0)
        self.chunks = chunks
        self.extent = Extent() if steps is None else Extent(steps * chunks)
        self._most = math.inf if steps is None else (steps - 1) * chunks
        self.objectives: dict[int, tuple[Objective, int]] = {}
        self._iterator, self._where, self._pack, self._loss = iterator, where, pack, loss
        self._mini_batch: FromMiniBatch | None = None
        self._size: dict[int, int] = {}  # of micro-batches that have not come to their end yet

    def there(self, i: int) -> bool:
        """Whether there is a micro-batch ``i``; to be asked in order, once for each."""
        batch, k = divmod(i, self.chunks)
        if k == 0:
            self._mini_batch = self._taken(batch)
            m = 0 if self._mini_batch is None else self._mini_batch.m
            if m < self.chunks:  # the end, or a last mini-batch that has fewer samples
                self.extent.end(i + m)
        elif i == self.extent.backwards:
            if i < self._most and self._taken(batch + 1) is not None:
                raise ValueError(
                    f"mini-batch {batch} gave {k} micro-batches, and is not the last one, but "
                    f"versions='2bw' updates the weights after chunks={self.chunks} of them: use "
                    "another batch size or number of chunks, or DataLoader(..., drop_last=True)"
                )
            self._mini_batch = None
        return self._mini_batch is not None

    def pull(self, i: int) -> Any:
        k = i % self.chunks
        assert self._mini_batch is not None
        self._size[i] = self._mini_batch.size(k)
        return self._mini_batch.pull(k)

    def target(self, i: int) -> Any:
        assert self._mini_batch is not None
        return self._mini_batch.target(i % self.chunks)

    def inputs(self, i: int) -> list[Tensor]:
        return []  # those that need a gradient are refused

    def size(self, i: int) -> int:
        """The number of samples in a micro-batch; to be asked once."""
        return self._size.pop(i)

    def _taken(self, batch: int) -> FromMiniBatch | None:
        """The next mini-batch, cut; None if there is none."""
        try:
            item = next(self._iterator)
        except StopIteration:
            return None
        except BaseException as error:
            annotate(error, f"in data_iter, when asked for mini-batch {batch}")
            raise
        input, target = pair_of(item, self._where, f" for mini-batch {batch}")
        if any(tensor.requires_grad for tensor in tensors_in((input, target))):
            raise ValueError(
                f"mini-batch {batch} has a tensor that requires grad, but train_stream gives no "
                "gradients to what its inputs were made of: detach() it"
            )
        cut = FromMiniBatch(self._pack(input), target, self.chunks)
        objective = objective_of(self._loss, cut)
        if objective.known is not None:  # here, where targets are; the loss may be elsewhere
            weights, total = objective.known
            objective.known = list(map(float, weights)), float(total)
        self.objectives[batch] = objective, cut.m
        return cut


class Losses:
    """The losses of all mini-batches: an ``Objective`` for one after another.

    Used by the worker of the last stage, but for what is there when all is over.

    Attributes:
        known: None: each objective knows its own weights.
        call: calls the loss function with output and target.
        losses: for each mini-batch that is through its loss, detached.
        metrics: for each the metrics, or None.
    """

    known = None

    def __init__(self, source: StreamSource, loss: Loss) -> None:
        self.call = Objective(loss, m=1, total=1).call
        self.losses: list[Tensor] = []
        self.metrics: list[dict[str, Any] | None] = []
        self._source = source
        self._noted: tuple[Any, ...] = ()

    def root_and_gradient(
        self, i: int, result: Any, size: int, output: Any, target: Any, known: Any = None
    ) -> tuple[Tensor, float]:
        """As that of an ``Objective``, for micro-batch ``i`` of the stream."""
        chunks = self._source.chunks
        batch, k = divmod(i, chunks)
        objective, m = self._source.objectives[batch]
        root = objective.root_and_gradient(k, result, size, output, target)
        if not root[0].requires_grad:
            raise RuntimeError(
                "the loss does not require grad, so there is nothing to train: loss_fn detaches "
                "what it is given, or does not use it"
            )
        if objective.came_with_weights and chunks > 1:
            raise ValueError(
                "loss_fn returned (loss, weight), but the weights of all micro-batches are needed "
                "before the first of them goes back: give train_stream weight=, a function of the "
                "target, and let loss_fn return the loss alone"
            )
        self._noted = objective.noted(k)
        if k == m - 1:
            del self._source.objectives[batch]
            with torch.no_grad():
                self.losses.append(objective.loss())
                self.metrics.append(objective.metrics())
            self._noted = self.losses[-1], self.metrics[-1]
        return root

    def noted(self, i: int) -> tuple[Any, ...]:
        """What was noted last, with which the caller goes on."""
        return self._noted
