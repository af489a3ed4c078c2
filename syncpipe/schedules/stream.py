"""A pipeline that never drains (PipeDream): which weights a cell uses, and what runs when.

Each stage runs a backward and a forward in turn, and updates its weights after the backwards of
each mini-batch. *Version* ``v`` are the weights of a stage after ``v`` updates. With ``n = 3``, and
one micro-batch per mini-batch::

    stage 0   F0 F1 F2 B0 U1 F3 B1 U2 F4 B2 U3 ...      F2 and B2 use version 0, F3 and B3 version 1
    stage 1      F0 F1 B0 U1 F2 B1 U2 F3 B2 U3 ...      F2 and B2 use version 1
    stage 2         F0 B0 U1 F1 B1 U2 F2 B2 U3 ...      F2 and B2 use version 2

Replicas of a stage take mini-batches in turn (1F1B with round robin). The stage updates once per
round, with the mean of its gradients. With two replicas and one::

    stage 0, first    F0 F2    B0 U1 F4    B2 U2 ...            F0 and F2 use version 0, F4 uses 1
    stage 0, second   F1 F3       B1 U1 F5    B3 U2 ...
    stage 1              F0 B0 U1 F1 B1 U2 F2 B2 U3 ...

Sources: Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN Training,
sections 3.2 and 3.3 (round robin, weight stashing, vertical sync); Narayanan et al. 2021,
Memory-Efficient Pipeline-Parallel DNN Training, section 3.1 (PipeDream-2BW).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, product
from typing import Literal, get_args

from syncpipe.schedules.schedule import Action, Kind
from syncpipe.schedules.steps import Edge, Step, in_serial_order, step_maker

__all__ = ["VERSIONS", "Extent", "StreamSteps", "Versions", "version_used", "versions_kept"]

#: Which version of its weights a stage uses for a micro-batch, forward and backward.
Versions = Literal["stashing", "vertical_sync", "2bw"]
VERSIONS: tuple[Versions, ...] = get_args(Versions)
_AFTER = 1 << 64  # messages between replicas are numbered after all others
_KINDS: tuple[Kind, ...] = ("forward", "recompute", "backward", "reduce", "update")


def version_used(
    i: int, j: int, replicas: Sequence[int], versions: Versions = "stashing", chunks: int = 1
) -> int:
    """Version of its weights that stage ``j`` uses for micro-batch ``i``, forward and backward.

    ``"stashing"``: the newest at the time of the forward, with one replica ``max(0, i - (n-j) +
    1)``. ``"vertical_sync"``: the version that the first stage uses. ``"2bw"``: on all stages the
    version before the last mini-batch of ``chunks`` micro-batches.
    """
    if versions == "2bw":
        return max(0, i // chunks - 1)
    j = 0 if versions == "vertical_sync" else j
    return max(0, i // replicas[j] - _in_flight(j, replicas) + 1)


def versions_kept(j: int, replicas: Sequence[int], versions: Versions = "stashing") -> int:
    """Largest number of weight versions that stage ``j`` holds, the newest included."""
    return 2 if versions == "2bw" else _in_flight(0 if versions == "vertical_sync" else j, replicas)


def _in_flight(j: int, replicas: Sequence[int]) -> int:
    """Number of micro-batches in flight on each replica of a stage."""
    return -(-sum(replicas[j:]) // replicas[j])


class Extent:
    """The length of a stream: the number of cells that go forward, and backward, on each stage."""

    def __init__(self, most: float = math.inf, replicas: int = 1) -> None:
        self.forwards = self.backwards = most
        self._replicas = replicas

    def end(self, i: int) -> None:
        """End before micro-batch ``i``; one empty cell per replica notifies all stages."""
        self.backwards = i
        self.forwards = i + self._replicas


class StreamSteps:
    """The steps of one call, generated lazily; the engine uses them as a ``Steps``.

    ``indices`` has for each stage the indices of its replicas, first of the owner of the weights.
    Each replica has its worker (or all share worker 0) and the number of micro-batches to
    recompute. Weights are updated after every ``chunks`` micro-batches and after the last one.
    """

    def __init__(
        self, edges: Sequence[Edge], indices: Sequence[tuple[int, ...]], worker_of: Sequence[int],
        rematerialized: Sequence[int], extent: Extent, chunks: int = 1,
    ) -> None:  # fmt: skip
        self._rematerialized, self._extent, self._chunks = rematerialized, extent, chunks
        self._indices, self._worker_of = list(indices), list(worker_of)

        def worker(i: int, j: int) -> int:
            return worker_of[indices[j][i % len(indices[j])]]

        self._step = step_maker(edges, worker, indices)
        self.rows: tuple[Iterable[Step], ...] = (self.serial,)
        if max(worker_of) > 0:
            rows = dict(zip(worker_of, self._make_rows(), strict=True))
            self.rows = tuple([rows[w] for w in range(len(rows))])
        self.keys = tuple(product(_KINDS, range(len(worker_of))))

    @property
    def serial(self) -> Iterator[Step]:
        """An order in which one thread can run all steps."""
        return in_serial_order(self._make_rows())

    def _make_rows(self) -> list[Iterator[Step]]:
        places = {own[k]: (j, k) for j, own in enumerate(self._indices) for k in range(len(own))}
        return [self._row(*places[index]) for index in range(len(places))]

    def _row(self, j: int, k: int) -> Iterator[Step]:
        """The steps of a replica, which takes part in every round, even without a micro-batch."""
        extent, own = self._extent, self._indices[j]
        every = len(own)
        ahead = every * (_in_flight(j, list(map(len, self._indices))) - 1)
        for i in count(k - ahead, every):
            if i + ahead < extent.forwards:
                yield self._step(Action("forward", i + ahead, j))
            if i < 0:
                continue
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
        """The update of a replica in the round that begins with micro-batch ``i``: the owner gets
        the gradients and returns the weights.
        """
        owner, *others = self._indices[j]
        gradients = [_AFTER + 2 * (i * len(self._worker_of) + index) for index in others]
        weights = [message + 1 for message in gradients]
        if k == 0:
            workers = [self._worker_of[index] for index in others]
            action = Action("update", i, j)
            yield Step(("update", owner), action, tuple(gradients), tuple(weights), tuple(workers))
        else:
            own, to = others[k - 1], self._worker_of[owner]
            action = Action("reduce", i + k, j)
            yield Step(("reduce", own), action, (), (gradients[k - 1],), (to,))
            action = Action("update", i + k, j)
            yield Step(("update", own), action, (weights[k - 1],), (), ())
