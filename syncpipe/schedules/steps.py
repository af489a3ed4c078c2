"""Compile, then run: what depends on the pipeline and the schedule alone is decided here, once.

    compile  edges x program     ->  steps for each worker       kept; sees no tensor
    bind     steps x a call      ->  one function for each kind of action and stage
    run      for each step:          put(sends, run(i, take(needs)))

To what runs, a replica is one more stage. Stages come first, each standing for its first replica;
the numbers after them are those of all others, stage by stage.
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
    """A way from one stage to another: of the activation, or of one of the source's skips."""

    number: int
    source: int
    target: int
    skip: int | None


class Step(NamedTuple):
    """An action, ready to be bound and run; messages have numbers."""

    what: tuple[Kind, int]  # what is bound once for a call: the kind, and the number of the stage
    i: int
    needs: tuple[int, ...]  # messages without which it cannot start, taken in this order
    sends: tuple[int, ...]  # messages that it returns, in this order
    to: tuple[int, ...]  # for each of them the worker that it is for

    @property
    def action(self) -> Action:
        """The action."""
        kind, j = self.what
        return Action(kind, self.i, j)


@dataclass(frozen=True, eq=False)
class Steps:
    """A program, compiled: for each worker its steps, in order."""

    of: tuple[tuple[Step, ...], ...]

    @cached_property
    def kinds(self) -> tuple[tuple[Kind, int], ...]:
        """All that has to be bound."""
        return tuple({step.what: None for steps in self.of for step in steps})

    def backwards(self, j: int) -> list[int]:
        """The micro-batches in the order in which they go back on a stage, or replica."""
        steps = (step for row in self.of for step in row if step.what[1] == j)
        return [step.i for step in steps if KINDS[step.what[0]].sends == "gradient"]

    @cached_property
    def serial(self) -> tuple[Step, ...]:
        """An order in which one thread can run all of them."""
        return self.of[0] if len(self.of) == 1 else tuple(in_serial_order(self.of))


def in_serial_order(rows: Iterable[Iterable[Step]]) -> Iterator[Step]:
    """An order in which one thread can run everything: the next step of each row in turn.

    Rows may be made on the way; one is asked for its next step when the last one has run.
    """
    left = [iter(row) for row in rows]
    heads = [next(row, None) for row in left]
    there: set[int] = set()
    ran = True
    while ran:
        ran = False
        for k, row in enumerate(left):
            step = heads[k]
            if step is not None and there.issuperset(step.needs):
                yield step
                there.difference_update(step.needs)
                there.update(step.sends)
                heads[k], ran = next(row, None), True
    for step in filter(None, heads):
        raise RuntimeError(f"this schedule can never finish: nothing lets {step.action} start")


def replica_indices(worker_of: Devices) -> list[tuple[int, ...]]:
    """For each stage the numbers of its replicas."""
    following, stages = count(len(worker_of)), range(len(worker_of))
    return [(j, *islice(following, len(devices_of(worker_of, j)) - 1)) for j in stages]


@lru_cache(maxsize=128)
def forward_steps(edges: tuple[Edge, ...], m: int, worker_of: Devices) -> Steps:
    """The steps of the forward half of :func:`.gpipe`.

    A lone worker takes one micro-batch after another through all stages, as the plain model does.
    """
    steps = training_steps(edges, gpipe(m, worker_of), (0,) * len(worker_of))
    return Steps(tuple([tuple([s for s in row if s.what[0] == "forward"]) for row in steps.of]))


@lru_cache(maxsize=128)
def training_steps(
    edges: tuple[Edge, ...], schedule: Schedule, rematerialized: tuple[int, ...], *,
    returns: tuple[Edge, ...] = (),
) -> Steps:  # fmt: skip
    """The steps of a valid schedule; further arguments are those of :func:`step_maker`.

    Of each stage so many micro-batches, the first ones, are recomputed, right before their backward
    and as an action of its own: it needs nothing from anybody, so it begins before the gradient is
    there. Each replica sends the sum of its gradients as soon as it is through with its stage; the
    first one adds them to its own, in order, when it has nothing else to do.
    """
    program = schedule.recomputing(rematerialized)
    for j in reversed(range(schedule.n)):
        devices = devices_of(schedule.device_of, j)
        for i, d in enumerate(devices[: schedule.m] if len(devices) > 1 else ()):
            last = max(k for k, action in enumerate(program[d]) if action.j == j)
            program[d].insert(last + 1 if i else len(program[d]), Action("reduce", i, j))
    numbers = replica_indices(schedule.device_of)
    step = step_maker(edges, schedule.device, numbers, schedule.m, returns=returns)
    return Steps(tuple([tuple(map(step, row)) for row in program]))


def step_maker(
    edges: Sequence[Edge], worker_of: Callable[[int, int], int],
    numbers: Sequence[tuple[int, ...]], m: int = 0, *, returns: Sequence[Edge] = (),
) -> Callable[[Action], Step]:  # fmt: skip
    """What makes a step of an action, given the edges, the worker of each cell, the numbers of the
    replicas of each stage and, if there are several, of micro-batches.

    Messages are in the order of the edges, which are numbered from 0 on. ``returns`` are more of
    them, numbered after the others, over which only gradients go.
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
        if kind == "reduce":  # the sums of a stage's replicas have the numbers after all others
            sums = [2 * m * size + number for number in numbers[j][:m]]
            needs, sends = ([], [sums[i]]) if i else (sums[1:], [])
            workers = [worker_of(0, j)] * len(sends)
        what = kind, numbers[j][i % len(numbers[j])]
        return Step(what, i, tuple(needs), tuple(sends), tuple(workers))

    return step
