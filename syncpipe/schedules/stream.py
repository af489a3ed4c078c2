"""A pipeline that never drains (PipeDream): which weights a cell uses, and what runs when.

Each stage takes one backward and one forward in turn, and updates its weights after the backwards
of each mini-batch. So there are always ``n - j`` mini-batches in flight on stage ``j``, and no two
of them need have met the same weights. *Version* ``v`` are the weights of a stage after ``v``
updates. With ``n = 3``, one mini-batch at a time::

    stage 0   F0 F1 F2 B0 U1 F3 B1 U2 F4 B2 U3 ...      F2 and B2 use version 0, F3 and B3 version 1
    stage 1      F0 F1 B0 U1 F2 B1 U2 F3 B2 U3 ...      F2 and B2 use version 1
    stage 2         F0 B0 U1 F1 B1 U2 F2 B2 U3 ...      F2 and B2 use version 2

A stage with replicas deals mini-batches to them in turn (1F1B with round robin). Each goes there
and back on one of them, and the stage updates once a round, with the mean of its gradients. With
two replicas and one::

    stage 0, first    F0 F2    B0 U1 F4    B2 U2 ...            F0 and F2 use version 0, F4 uses 1
    stage 0, second   F1 F3       B1 U1 F5    B3 U2 ...
    stage 1              F0 B0 U1 F1 B1 U2 F2 B2 U3 ...

When the mini-batches will end is unknown, so the order is not a list but made on the way.

Sources: Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN Training,
sections 3.2 and 3.3 (round robin, weight stashing, vertical sync); Narayanan et al. 2021,
Memory-Efficient Pipeline-Parallel DNN Training, section 3.1 (PipeDream-2BW).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Literal, get_args

from syncpipe.schedules.schedule import Action, Kind
from syncpipe.schedules.steps import Edge, Step, in_turn, maker

__all__ = ["VERSIONS", "Extent", "StreamSteps", "Versions", "version_used", "versions_kept"]

#: Which version of its weights a stage uses for a micro-batch, there and back.
Versions = Literal["stashing", "vertical_sync", "2bw"]
VERSIONS: tuple[Versions, ...] = get_args(Versions)
_AFTER = 1 << 64  # messages between replicas have the numbers after all others


def version_used(
    i: int,
    j: int,
    replicas: Sequence[int],
    versions: Versions = "stashing",
    chunks: int = 1,
) -> int:
    """Which version of its weights stage ``j`` uses for micro-batch ``i``, there and back.

    Args:
        i: the micro-batch; but for ``"2bw"`` that is the mini-batch.
        j: the stage.
        replicas: for each stage how many it has; 1 everywhere but for ``"stashing"``.
        versions: ``"stashing"``: the newest that there is at the forward, with one replica
            ``max(0, i - (n-j) + 1)``; ``"vertical_sync"``: that of the first stage, on all of them;
            ``"2bw"``: that before the last mini-batch, on all of them.
        chunks: micro-batches in a mini-batch.
    """
    if versions == "2bw":
        return max(0, i // chunks - 1)
    j = 0 if versions == "vertical_sync" else j
    return max(0, i // replicas[j] - _ahead(j, replicas) + 1)


def versions_kept(j: int, replicas: Sequence[int], versions: Versions = "stashing") -> int:
    """How many versions of its weights stage ``j`` holds at most, the newest among them."""
    return 2 if versions == "2bw" else _ahead(0 if versions == "vertical_sync" else j, replicas)


def _ahead(j: int, replicas: Sequence[int]) -> int:
    """How many micro-batches are in flight on each replica of a stage: one for each worker on."""
    return -(-sum(replicas[j:]) // replicas[j])


class Extent:
    """How far a stream goes. Whoever takes mini-batches from the caller says when there are none.

    Args:
        most: so many micro-batches at most.
        replicas: the most that a stage has.

    Attributes:
        forwards: so many cells go forward on each stage; the last ones may find nothing there.
        backwards: so many go back.
    """

    def __init__(self, most: float = math.inf, replicas: int = 1) -> None:
        self.forwards = self.backwards = most
        self._replicas = replicas

    def end(self, i: int) -> None:
        """There is no micro-batch ``i``: empty cells go forward, to tell all stages."""
        self.backwards = i
        self.forwards = i + self._replicas


class StreamSteps:
    """The steps of one call, made as they are asked for; to the engine they are a ``Steps``.

    Args:
        edges: those of the pipeline.
        numbers: for each stage those of its replicas, the owner's first.
        worker_of: by number the index of the worker: a worker each, or one for all.
        rematerialized: by number so many micro-batches, the first ones, are recomputed.
        extent: where it ends.
        chunks: weights are updated after so many micro-batches, and after the last one.

    Attributes:
        of: for each worker its steps, in order; to be gone through once.
        kinds: all that has to be bound.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        numbers: Sequence[tuple[int, ...]],
        worker_of: Sequence[int],
        rematerialized: Sequence[int],
        extent: Extent,
        chunks: int = 1,
    ) -> None:
        self._rematerialized, self._extent, self._chunks = rematerialized, extent, chunks
        self._numbers, self._worker_of = list(numbers), list(worker_of)

        def worker(i: int, j: int) -> int:
            return worker_of[numbers[j][i % len(numbers[j])]]

        self._step = maker(edges, worker, numbers)
        workers = 1 + max(worker_of)
        self.of: tuple[Iterable[Step], ...] = (self.serial,)
        if workers > 1:
            rows = dict(zip(worker_of, self._rows(), strict=True))
            self.of = tuple([rows[w] for w in range(workers)])
        kinds: list[Kind] = ["forward", "recompute", "backward", "reduce", "update"]
        self.kinds = tuple([(kind, number) for kind in kinds for number in range(len(worker_of))])

    @property
    def serial(self) -> Iterator[Step]:
        """An order in which one thread can run all of them: each stage's next one in turn."""
        return in_turn(self._rows())

    def _rows(self) -> list[Iterator[Step]]:
        """The steps of each replica, by number."""
        places = {
            number: (j, k) for j, own in enumerate(self._numbers) for k, number in enumerate(own)
        }
        return [self._row(*places[number]) for number in range(len(places))]

    def _row(self, j: int, k: int) -> Iterator[Step]:
        """The steps of a replica: forwards until gradients come back, then in turn.

        Every replica takes part in each round, also where there is no micro-batch for it.
        """
        extent, own = self._extent, self._numbers[j]
        ahead, every = _ahead(j, list(map(len, self._numbers))) - 1, len(own)
        for i in range(k, every * ahead, every):
            if i < extent.forwards:
                yield self._step(Action("forward", i, j))
        for i in count(k, every):
            if i + every * ahead < extent.forwards:
                yield self._step(Action("forward", i + every * ahead, j))
            if i - k >= extent.backwards:
                return
            if i < extent.backwards:
                if i < self._rematerialized[own[k]]:
                    yield self._step(Action("recompute", i, j))
                yield self._step(Action("backward", i, j))
            if every > 1:
                yield from self._round(i - k, j, k)
            elif (i + 1) % self._chunks == 0 or i + 1 == extent.backwards:
                yield self._step(Action("update", i, j))

    def _round(self, i: int, j: int, k: int) -> Iterator[Step]:
        """The update of a replica: gradients go to the owner, and weights come back.

        Args:
            i: the first micro-batch of the round.
            j: the stage.
            k: the replica.
        """
        owner, *others = self._numbers[j]
        gradients = [_AFTER + 2 * (i * len(self._worker_of) + number) for number in others]
        weights = [number + 1 for number in gradients]
        if k == 0:
            workers = [self._worker_of[number] for number in others]
            yield Step(("update", owner), i, tuple(gradients), tuple(weights), tuple(workers))
        else:
            own, to = others[k - 1], self._worker_of[owner]
            yield Step(("reduce", own), i + k, (), (gradients[k - 1],), (to,))
            yield Step(("update", own), i + k, (weights[k - 1],), (), ())
