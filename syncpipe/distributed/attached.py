"""What ``data_parallel`` attaches to a pipe: for each way to use a pipe, how processes share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from syncpipe.distributed.averaging import Averaging
from syncpipe.distributed.backward import average_backward
from syncpipe.distributed.batches import TrainBatch
from syncpipe.distributed.reduction import Reduction
from syncpipe.training.loss.objective import Objective

__all__ = ["Attached"]


class Attached(Averaging):
    """The other processes, as a pipe knows them."""

    def train_batch(
        self, step: Callable[[TrainBatch], Any], *, global_loss: bool, accumulate: float
    ) -> Any:
        """``train_batch`` in all processes, of which ``step`` does that of this one."""

        def run(reduction: Reduction) -> Any:
            reduction.signature += (
                ("no_sync", not self.syncs),
                ("global_loss", global_loss),
                ("accumulate", accumulate),
            )
            result = step(TrainBatch(self, reduction))
            return self.combined(result, reduction.share) if global_loss else result

        return self.run("train_batch", run)

    def eval_batch(self, step: Callable[[Callable[[Objective], None]], Any]) -> Any:
        """The same, for the loss of all processes."""

        def run(reduction: Reduction) -> Any:
            def weighed(objective: Objective) -> None:
                reduction.adds_up = objective.adds_up
                reduction.signature += (("loss_reduction='sum'", objective.adds_up),)
                assumed, total = objective.assumed, objective.total
                assert assumed is not None
                reduction.begin(assumed[0] if total is None else total, True)

            result = step(weighed)
            self.finish(reduction)
            return self.combined(result, reduction.share)

        return self.run("eval_batch", run)

    def forward(self, partitions: Sequence[nn.Module], output: Any) -> None:
        """What ``pipe(x)`` does with its output."""
        average_backward(self, partitions, output)
