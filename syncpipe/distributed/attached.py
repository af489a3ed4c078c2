"""What ``data_parallel`` attaches to a pipe: for each way to use a pipe, how processes share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from syncpipe.distributed.averaging import Averaging
from syncpipe.distributed.backward import average_backward
from syncpipe.distributed.batches import TrainBatch, eval_batch, train_batch
from syncpipe.training.loss.objective import Objective

__all__ = ["Attached"]


class Attached(Averaging):
    """The other processes, as a pipe knows them."""

    def train_batch(
        self, step: Callable[[TrainBatch], Any], *, global_loss: bool, accumulate: float
    ) -> Any:
        """``train_batch`` in all processes, of which ``step`` does that of this one."""
        return train_batch(self, step, global_loss=global_loss, accumulate=accumulate)

    def eval_batch(self, step: Callable[[Callable[[Objective], None]], Any]) -> Any:
        """The same, for the loss of all processes."""
        return eval_batch(self, step)

    def forward(self, partitions: Sequence[nn.Module], output: Any) -> None:
        """What ``pipe(x)`` does with its output."""
        average_backward(self, partitions, output)
