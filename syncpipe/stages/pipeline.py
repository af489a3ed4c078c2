"""Partitions on their workers: what is kept from call to call."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from syncpipe.runtime.engine import Engine
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.steps import Edge
from syncpipe.skip.layout import inspect_layout
from syncpipe.stages.run import Partition
from syncpipe.stages.stage import Stage
from syncpipe.stages.ties import SharedTensors

__all__ = ["Pipeline"]


class Pipeline:
    """Partitions on their workers, ready to run.

    Args:
        partitions: the partitions, already on their devices.
        names: for each layer its name in the wrapped module.
        workers: for each partition the worker that serves it.
    """

    def __init__(
        self, partitions: Sequence[Partition], names: Sequence[str], workers: Sequence[Worker]
    ) -> None:
        layout = inspect_layout(partitions)
        self.stages: list[Stage] = []
        first = 0
        for j, partition in enumerate(partitions):
            last = first + len(partition)
            self.stages.append(
                Stage(
                    j,
                    partition,
                    names[first:last],
                    first,
                    workers[j].device,
                    list(layout.incoming[j]),
                    list(layout.outgoing[j]),
                )
            )
            first = last
        self.workers = list(dict.fromkeys(workers))
        self.worker_of = tuple(self.workers.index(worker) for worker in workers)
        self.engine = Engine(self.workers)
        self.training = threading.RLock()  # what a failed call puts back must be its own
        self.process = os.getpid()
        self.shared = SharedTensors(partitions, workers)
        self.checked: set[Any] = set()  # names of loss functions
        n = len(partitions)
        ways: list[tuple[int, int, int | None]] = [(j, j + 1, None) for j in range(n - 1)]
        for j, stage in enumerate(self.stages):
            for key in stage.pops:
                source = layout.incoming[j][key]
                ways.append((source, j, self.stages[source].stashes.index(key)))
        self.edges = edges = tuple([Edge(number, *way) for number, way in enumerate(ways)])
        self.incoming = [[edge for edge in edges if edge.target == j] for j in range(n)]
        self.outgoing = [[edge for edge in edges if edge.source == j] for j in range(n)]

    @property
    def on_cpu(self) -> bool:
        """Whether all workers are CPU workers."""
        return all(worker.device.type == "cpu" for worker in self.workers)
