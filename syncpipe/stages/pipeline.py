"""A pipeline: partitions on their workers; lives from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

from torch import nn

from syncpipe.runtime.engine import Engine
from syncpipe.runtime.recomputation import Changes
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.schedule import Devices
from syncpipe.schedules.steps import Edge, replica_indices
from syncpipe.skip.layout import inspect_layout
from syncpipe.stages.locks import CallLocks
from syncpipe.stages.sharing import Replica, SharedTensors
from syncpipe.stages.stage import Partition, Stage

_T = TypeVar("_T")


class Pipeline:
    """Partitions on their workers, ready to run.

    Args:
        partitions: the partitions, already on their devices.
        names: for each layer its name in the wrapped module.
        workers: for each partition its workers, the owner first.
        locks: of the pipe.

    Attributes:
        n: the number of stages.
        indices: for each stage its indices in ``stages``, one for each worker, the owner's first.
        turns: for each stage the number of workers that take its micro-batches in turn.
        stages: the stages, then all other replicas, stage by stage.
        worker_of: for each of ``stages`` the index of its worker.
        placement: for each stage the index of its worker, or those of its replicas' workers.
        drawing: the partitions whose modules may hold the CPU's generator for their own forwards.
        has_joined: whether outputs of several micro-batches were ever gathered.
        streaming: whether ``train_stream`` runs, so that stages have weights of different updates.
        changes: the changes of all modules, as far as ``create_graph`` must know.
        results_index: the index of the stage on whose device the caller gets the outputs.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        names: Sequence[str],
        workers: Sequence[Sequence[Worker]],
        locks: CallLocks,
    ) -> None:
        layout = inspect_layout(partitions)
        self.n = n = len(partitions)
        self.workers = list(dict.fromkeys(chain.from_iterable(workers)))
        indices = [tuple(map(self.workers.index, own)) for own in workers]
        self.placement: Devices = tuple([w if len(w) > 1 else w[0] for w in indices])
        self.indices = replica_indices(self.placement)
        self.turns = list(map(len, self.indices))
        self.results_index = self.indices[-1][-1]
        self.worker_of = tuple(
            [w[0] for w in indices] + list(chain.from_iterable(w[1:] for w in indices))
        )
        self.replicas = [
            [Replica(partition) for _ in own[1:]]
            for partition, own in zip(partitions, workers, strict=True)
        ]
        self.stages: list[Stage] = []
        first = 0
        more: list[Stage] = []
        for j, partition in enumerate(partitions):
            last = first + len(partition)
            skips = list(layout.incoming[j]), list(layout.outgoing[j])
            own = [partition, *[replica.partition for replica in self.replicas[j]]]
            for k, (layers, worker) in enumerate(zip(own, workers[j], strict=True)):
                stage = Stage(j, layers, names[first:last], first, worker.device, *skips)
                stage.index = self.indices[j][k]
                stage.commits &= len(own) == 1
                (more if k else self.stages).append(stage)
            first = last
        self.stages += more
        self.drawing = [s.partition for s in self.stages if s.generators.in_modules]
        self.engine = Engine(self.workers)
        self.has_joined = self.streaming = False
        self.training_lock, self.modes_lock = locks.training, locks.modes
        self.partitions = nn.ModuleList(partitions)
        self.changes = Changes(self.partitions)
        self.shared = SharedTensors(self.stages[:n], [owner for owner, *_ in workers])
        edge_ends: list[tuple[int, int, int | None]] = [(j, j + 1, None) for j in range(n - 1)]
        for j in range(n):
            for key in self.stages[j].pops:
                source = layout.incoming[j][key]
                edge_ends.append((source, j, self.stages[source].stashes.index(key)))
        self.edges = edges = tuple([Edge(number, *ends) for number, ends in enumerate(edge_ends)])
        self.incoming = [[edge for edge in edges if edge.target == s.j] for s in self.stages]
        self.outgoing = [[edge for edge in edges if edge.source == s.j] for s in self.stages]

    def with_modes(self, run: Callable[[], _T]) -> _T:
        """Runs a forward or backward of ``pipe(x)`` while no other thread evaluates."""
        return run() if self.engine.is_running() else self.modes_lock.using(run)
