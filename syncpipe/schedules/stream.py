"""A pipeline that never drains (PipeDream): which weights a cell uses, and what runs when.

Each stage takes one backward and one forward in turn, and updates its weights after the backwards
of each mini-batch. So there are always ``n - j`` mini-batches in flight on stage ``j``, and no two
of them need have met the same weights. *Version* ``v`` are the weights of a stage after ``v``
updates. With ``n = 3``, one mini-batch at a time::

    stage 0   F0 F1 F2 B0 U1 F3 B1 U2 F4 B2 U3 ...      F2 and B2 use version 0, F3 and B3 version 1
    stage 1      F0 F1 B0 U1 F2 B1 U2 F3 B2 U3 ...      F2 and B2 use version 1
    stage 2         F0 B0 U1 F1 B1 U2 F2 B2 U3 ...      F2 and B2 use version 2

Nobody knows when the mini-batches will end, so the order is not a list but made on the way.

Sources: Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN Training,
section 3.3 (weight stashing, vertical sync); Narayanan et al. 2021, Memory-Efficient
Pipeline-Parallel DNN Training, section 3.1 (PipeDream-2BW).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Literal, get_args

from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.schedule import Action
from syncpipe.schedules.steps import Edge, Step, in_turn, maker

__all__ = ["VERSIONS", "Extent", "StreamSteps", "Versions", "version_used", "versions_kept"]

#: Which version of its weights a stage uses for a micro-batch, there and back.
Versions = Literal["stashing", "vertical_sync", "2bw"]
VERSIONS: tuple[Versions, ...] = get_args(Versions)


def version_used(i: int, j: int, n: int, versions: Versions = "stashing", chunks: int = 1) -> int:
    """Which version of its weights stage ``j`` uses for micro-batch ``i``, there and back.

    Args:
        i: the micro-batch; but for ``"2bw"`` that is the mini-batch.
        j: the stage.
        n: number of stages.
        versions: ``"stashing"``: the newest that there is at the forward, ``max(0, i - (n-j) + 1)``
            updates old; ``"vertical_sync"``: that of the first stage, on all of them; ``"2bw"``:
            that before the last mini-batch, on all of them.
        chunks: micro-batches in a mini-batch.
    """
    if versions == "2bw":
        return max(0, i // chunks - 1)
    return max(0, i - (n if versions == "vertical_sync" else n - j) + 1)


def versions_kept(j: int, n: int, versions: Versions = "stashing") -> int:
    """How many versions of its weights stage ``j`` holds at most, the newest among them."""
    return {"stashing": n - j, "vertical_sync": n, "2bw": 2}[versions]


class Extent:
    """How far a stream goes. Whoever takes mini-batches from the caller says when there are none.

    Attributes:
        forwards: so many cells go forward on each stage; the last one may find nothing there.
        backwards: so many go back.
    """

    def __init__(self, most: float = math.inf) -> None:
        self.forwards = self.backwards = most

    def end(self, i: int) -> None:
        """There is no micro-batch ``i``: its cells go forward empty, to tell all stages."""
        self.backwards = i
        self.forwards = i + 1


class StreamSteps:
    """The steps of one call, made as they are asked for; to the engine they are a ``Steps``.

    Args:
        edges: those of the pipeline.
        worker_of: for each stage the index of its worker: a worker each, or one for all.
        rematerialized: for each stage so many micro-batches, the first ones, are recomputed.
        extent: where it ends.
        chunks: weights are updated after so many micro-batches, and after the last one.

    Attributes:
        of: for each worker its steps, in order; to be gone through once.
        kinds: all that has to be bound.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        worker_of: Sequence[int],
        rematerialized: Sequence[int],
        extent: Extent,
        chunks: int = 1,
    ) -> None:
        self._rematerialized, self._extent, self._chunks = rematerialized, extent, chunks
        self._n = n = len(worker_of)
        numbers = [(j,) for j in range(n)]
        self._step = maker(edges, lambda _, j: worker_of[j], numbers, targets=n > 1)
        workers = 1 + max(worker_of)
        self.of: tuple[Iterable[Step], ...]
        if workers == 1:
            self.of = (self.serial,)
        else:
            self.of = tuple([self._row(worker_of.index(w)) for w in range(workers)])
        kinds: list[Kind] = ["forward", "recompute", "backward", "update"]
        self.kinds = tuple([(kind, j) for kind in kinds for j in range(n)])

    @property
    def serial(self) -> Iterator[Step]:
        """An order in which one thread can run all of them: each stage's next one in turn."""
        return in_turn([self._row(j) for j in range(self._n)])

    def _row(self, j: int) -> Iterator[Step]:
        """The steps of a stage: ``n - j`` forwards, then back and forth in turn."""
        extent, ahead = self._extent, self._n - j
        for i in range(ahead - 1):
            if i < extent.forwards:
                yield self._step(Action("forward", i, j))
        for i in count():
            if i + ahead - 1 < extent.forwards:
                yield self._step(Action("forward", i + ahead - 1, j))
            if i >= extent.backwards:
                return
            if i < self._rematerialized[j]:
                yield self._step(Action("recompute", i, j))
            yield self._step(Action("backward", i, j))
            if (i + 1) % self._chunks == 0 or i + 1 == extent.backwards:
                yield self._step(Action("update", i, j))
