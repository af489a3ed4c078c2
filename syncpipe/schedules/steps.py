"""Compile schedules: what depends on the pipeline and the schedule alone is decided here, once.

    compile  edges x program     ->  steps for each worker       cached; sees no tensor
    bind     steps x a call      ->  one function for each kind of action and stage
    run      for each step:          put(sends, run(i, take(needs)))

At run time each replica has an index ``r``. Index ``j < n`` is the first replica of stage ``j``;
the other replicas follow, stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count, islice
from typing import NamedTuple

from syncpipe.schedules.named import gpipe
from syncpipe.schedules.schedule import KINDS, Action, Devices, Kind, Schedule, devices_of

__all__ = [
    "Edge", "Step", "Steps", "forward_steps", "in_serial_order", "replica_indices", "step_maker",
    "training_steps",
]  # fmt: skip


class Edge(NamedTuple):
    """A connection between two stages: carries the activation, or one skip of the source."""

    number: int
    source: int
    target: int
    skip: int | None


class Step(NamedTuple):
    """An action, ready to be bound and run; messages are identified by numbers."""

    key: tuple[Kind, int]  # the key of its bound function: kind, and index of the replica
    action: Action
    needs: tuple[int, ...]  # messages that it waits for, in the order of its arguments
    sends: tuple[int, ...]  # messages that it returns, in this order
    to: tuple[int, ...]  # the receiving worker of each message that it returns


@dataclass(frozen=True, eq=False)
class Steps:
    """A compiled program: for each worker its steps in order."""

    rows: tuple[tuple[Step, ...], ...]

    @cached_property
    def keys(self) -> tuple[tuple[Kind, int], ...]:
        """The keys of all functions to bind."""
        return tuple({step.key: None for steps in self.rows for step in steps})

    def backwards(self, r: int) -> list[int]:
        """The micro-batches of a replica in the order of their backwards."""
        steps = (step for row in self.rows for step in row if step.key[1] == r)
        return [step.action.i for step in steps if KINDS[step.key[0]].sends == "gradient"]

    @cached_property
    def serial(self) -> tuple[Step, ...]:
        """An order in which one thread can run all steps."""
        return self.rows[0] if len(self.rows) == 1 else tuple(in_serial_order(self.rows))


def in_serial_order(rows: Iterable[Iterable[Step]]) -> Iterator[Step]:
    """An order in which one thread can run all steps: from each row in turn a step that can start.

    A row may be a generator; it is advanced only after the step that it yielded has run.
    """
    iterators = [iter(row) for row in rows]
    heads = [next(row, None) for row in iterators]
    arrived: set[int] = set()
    ran = True
    while ran:
        ran = False
        for k, row in enumerate(iterators):
            step = heads[k]
            if step is not None and arrived.issuperset(step.needs):
                yield step
                arrived.difference_update(step.needs)
                arrived.update(step.sends)
                heads[k], ran = next(row, None), True
    for step in filter(None, heads):
        raise RuntimeError(f"deadlock in this schedule: {step.action} can never start")


def replica_indices(worker_of: Devices) -> list[tuple[int, ...]]:
    """For each stage the indices of its replicas."""
    following, stages = count(len(worker_of)), range(len(worker_of))
    return [(j, *islice(following, len(devices_of(worker_of, j)) - 1)) for j in stages]


@lru_cache(maxsize=128)
def forward_steps(edges: tuple[Edge, ...], m: int, worker_of: Devices) -> Steps:
    """The steps of the forward half of :func:`.gpipe`.

    A single worker takes each micro-batch through all stages before the next one.
    """
    steps = training_steps(edges, gpipe(m, worker_of), (0,) * len(worker_of))
    return Steps(tuple([tuple([s for s in row if s.key[0] == "forward"]) for row in steps.rows]))


@lru_cache(maxsize=128)
def training_steps(
    edges: tuple[Edge, ...], schedule: Schedule, rematerialized: tuple[int, ...], *,
    returns: tuple[Edge, ...] = (),
) -> Steps:  # fmt: skip
    """The steps of a valid schedule; for ``edges`` and ``returns`` see :func:`step_maker`.

    The first ``rematerialized[j]`` micro-batches of stage ``j`` are recomputed, as an action that
    needs no message and so starts before the gradient arrives. Each replica sends its summed
    gradients after its last action. The first replica adds them, in order, as its last action.
    """
    program = schedule.recomputing(rematerialized)
    for j in reversed(range(schedule.n)):
        devices = devices_of(schedule.device_of, j)
        for i, d in enumerate(devices[: schedule.m] if len(devices) > 1 else ()):
            last = max(k for k, action in enumerate(program[d]) if action.j == j)
            program[d].insert(last + 1 if i else len(program[d]), Action("reduce", i, j))
    indices = replica_indices(schedule.device_of)
    step = step_maker(edges, schedule.device, indices, schedule.m, returns=returns)
    return Steps(tuple([tuple(map(step, row)) for row in program]))


def step_maker(
    edges: Sequence[Edge], worker_of: Callable[[int, int], int],
    indices: Sequence[tuple[int, ...]], m: int = 0, *, returns: Sequence[Edge] = (),
) -> Callable[[Action], Step]:  # fmt: skip
    """Return a function that compiles an action to a step.

    ``worker_of`` gives the worker of a cell, ``indices`` the replicas of a stage; ``m`` is needed
    with replicas only. ``returns``, for gradients only, are numbered after the edges.
    """
    size, both = len(edges) + len(returns), [*edges, *returns]

    def step(action: Action) -> Step:
        kind, i, j = action
        into: list[Edge] = []
        out: list[Edge] = []
        if kind == "forward":
            into = [edge for edge in edges if edge.target == j]
            out = [edge for edge in edges if edge.source == j]
        elif KINDS[kind].sends == "gradient":
            into = [edge for edge in both if edge.source == j]
            out = [edge for edge in both if edge.target == j]
        back = kind != "forward"
        needs, sends = (
            [2 * (i * size + edge.number) + back for edge in some] for some in (into, out)
        )
        workers = [worker_of(i, edge.source if back else edge.target) for edge in out]
        if kind == "reduce":  # the gradient sums of replicas are numbered after all other messages
            sums = [2 * m * size + index for index in indices[j][:m]]
            needs, sends = ([], [sums[i]]) if i else (sums[1:], [])
            workers = [worker_of(0, j)] * len(sends)
        key = kind, indices[j][i % len(indices[j])]
        return Step(key, action, tuple(needs), tuple(sends), tuple(workers))

    return step
