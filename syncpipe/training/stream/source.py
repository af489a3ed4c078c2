"""Mini-batches one after another, as long as there are any, and their losses."""

from __future__ import annotations

import math
import threading
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
        replicas: the most that a stage has; those of the first stage take turns.

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
        replicas: int,
    ) -> None:
        super().__init__(0)
        self.chunks = chunks
        self.extent = Extent(math.inf if steps is None else steps * chunks, replicas)
        self._most = math.inf if steps is None else (steps - 1) * chunks
        self.objectives: dict[int, tuple[Objective, int]] = {}
        self._iterator, self._where, self._pack, self._loss = iterator, where, pack, loss
        self._lock = threading.Lock()
        self._following = 0
        self._waiting: dict[int, tuple[FromMiniBatch, int]] = {}  # micro-batches to be pulled

    def there(self, i: int) -> bool:
        """Whether there is a micro-batch ``i``; to be asked once for each, in any order."""
        with self._lock:
            while self._following <= min(i, self.extent.backwards - 1):
                self._take(self._following)
            return i < self.extent.backwards

    def _take(self, i: int) -> None:
        """Takes the mini-batch that begins with micro-batch ``i``; or the stream ends there."""
        batch = i // self.chunks
        taken = self._taken(batch)
        m = 0 if taken is None else taken.m
        if m < self.chunks:  # the end, or a last mini-batch that has fewer samples
            self.extent.end(i + m)
        if 0 < m < self.chunks and i < self._most and self._taken(batch + 1) is not None:
            raise ValueError(
                f"mini-batch {batch} gave {m} micro-batches, and is not the last one, but "
                f"versions='2bw' updates the weights after chunks={self.chunks} of them: use "
                "another batch size or number of chunks, or DataLoader(..., drop_last=True)"
            )
        if taken is not None:
            self._waiting.update((i + k, (taken, k)) for k in range(m))
            self._sizes += map(taken.size, range(m))
        self._following = i + self.chunks

    def pull(self, i: int) -> Any:
        taken, k = self._waiting[i]
        return taken.pull(k)

    def target(self, i: int) -> Any:
        taken, k = self._waiting.pop(i)
        return taken.target(k)

    def inputs(self, i: int) -> list[Tensor]:
        return []  # those that need a gradient are refused

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

    Used by the workers of the last stage under a lock, but for what is there when all is over.

    Attributes:
        known: None: each objective knows its own weights.
        call: calls the loss function with output and target.
        quiet: whether it never draws.
        found: by mini-batch the loss, detached, and the metrics, or None.
    """

    known = None

    def __init__(self, source: StreamSource, loss: Loss) -> None:
        any_one = Objective(loss, m=1, total=1)
        self.call, self.quiet = any_one.call, any_one.quiet
        self.found: dict[int, tuple[Tensor, dict[str, Any] | None]] = {}
        self._source = source
        self._noted: dict[int, tuple[Any, ...]] = {}

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
                "before the first of them runs backward: give train_stream weight=, a function of "
                "the target, and let loss_fn return the loss alone"
            )
        self._noted[i] = objective.noted(k)
        if k == m - 1:
            del self._source.objectives[batch]
            with torch.no_grad():
                self.found[batch] = self._noted[i] = objective.loss(), objective.metrics()
        return root

    def noted(self, i: int) -> tuple[Any, ...]:
        """What was noted of a micro-batch, with which the caller goes on; to be asked once."""
        return self._noted.pop(i)
