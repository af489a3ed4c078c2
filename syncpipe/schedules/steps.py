"""Compile, then run: what depends on the pipeline and the schedule alone is decided here, once.

    compile  edges x program     ->  steps for each worker       kept; sees no tensor
    bind     steps x a call      ->  one function for each kind of action and stage
    run      for each step:          put(sends, run(i, take(needs)))

A step is an action, the messages without which it cannot start, and those that it sends. Messages
have numbers, so that nobody has to work out on the way what anything is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from syncpipe.schedules.kinds import KINDS, Kind
from syncpipe.schedules.schedule import (
    Action,
    Devices,
    Program,
    Schedule,
    devices_of,
    forward_program,
    training_program,
)

__all__ = [
    "Edge",
    "Step",
    "Steps",
    "compiled",
    "forward_steps",
    "in_turn",
    "numbers_of",
    "training_steps",
]


class Edge(NamedTuple):
    """A way from one stage to another: of the activation, or of one of the source's skips."""

    number: int
    source: int
    target: int
    skip: int | None


class Step(NamedTuple):
    """An action, ready to be bound and run.

    Attributes:
        what: what is bound once for a call: the kind of the action, and the number of its stage, or
            replica (see :func:`numbers_of`).
        i: the micro-batch.
        needs: the numbers of the messages that it takes, in this order.
        sends: the numbers of the messages that it returns, in this order.
        to: for each of them the worker that it is for.
    """

    what: tuple[Kind, int]
    i: int
    needs: tuple[int, ...]
    sends: tuple[int, ...]
    to: tuple[int, ...]

    @property
    def action(self) -> Action:
        """The action."""
        kind, j = self.what
        return Action(kind, self.i, j)


@dataclass(frozen=True, eq=False)
class Steps:
    """A program, compiled.

    Attributes:
        of: for each worker its steps, in order.
    """

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
        """An order in which one thread can run all of them: each worker's next one in turn.

        Raises:
            RuntimeError: there is none, which no valid schedule meets.
        """
        return self.of[0] if len(self.of) == 1 else tuple(in_turn(self.of))


def in_turn(rows: Iterable[Iterable[Step]]) -> Iterator[Step]:
    """An order in which one thread can run everything: the next step of each row in turn.

    Args:
        rows: may be made on the way; one is asked for its next step when the last one has run.

    Raises:
        RuntimeError: there is none, which no valid schedule meets.
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


def numbers_of(worker_of: Devices) -> list[tuple[int, ...]]:
    """For each stage the numbers of its replicas.

    To what runs, a replica is one more stage. Stages come first, each standing for its first
    replica; the numbers after them are those of all others, stage by stage.
    """
    numbers: list[tuple[int, ...]] = []
    following = len(worker_of)
    for j in range(len(worker_of)):
        more = len(devices_of(worker_of, j)) - 1
        numbers.append((j, *range(following, following + more)))
        following += more
    return numbers


@lru_cache(maxsize=128)
def forward_steps(
    edges: tuple[Edge, ...], m: int, worker_of: Devices, *, targets: bool = False
) -> Steps:
    """The steps of :func:`forward_program`.

    Args:
        edges: those of the pipeline.
        m: number of micro-batches.
        worker_of: for each stage the index of the worker that serves it, or those of its replicas.
        targets: the first stage sends targets to the last one.
    """
    return compiled(edges, forward_program(m, worker_of), numbers_of(worker_of), targets=targets)


@lru_cache(maxsize=128)
def training_steps(
    edges: tuple[Edge, ...],
    schedule: Schedule,
    rematerialized: tuple[int, ...],
    *,
    targets: bool = False,
    returns: tuple[Edge, ...] = (),
) -> Steps:
    """The steps of :func:`training_program`.

    Args:
        edges: those of the pipeline.
        schedule: a valid one.
        rematerialized: for each stage so many micro-batches, the first ones, are recomputed.
        targets: the first stage sends targets to the last one.
        returns: more edges, over which only gradients go.
    """
    program = training_program(schedule, rematerialized)
    numbers = numbers_of(schedule.device_of)
    if any(len(those) > 1 for those in numbers):
        program = _reducing(program, schedule)
    return compiled(edges, program, numbers, targets=targets, returns=returns)


def _reducing(program: Program, schedule: Schedule) -> Program:
    """The program in which the gradients of replicas are added up.

    Each replica sends the sum of its own as soon as it is through with its stage; the first one
    adds them to its own, in order, when it has nothing else to do.
    """
    rows = [list(row) for row in program]
    for j in reversed(range(schedule.n)):
        devices = devices_of(schedule.device_of, j)
        for i, d in enumerate(devices[: schedule.m] if len(devices) > 1 else ()):
            last = max(k for k, action in enumerate(rows[d]) if action.j == j)
            rows[d].insert(last + 1 if i else len(rows[d]), Action("reduce", i, j))
    return rows


def compiled(
    edges: Iterable[Edge],
    program: Program,
    numbers: Sequence[tuple[int, ...]],
    *,
    targets: bool = False,
    returns: Sequence[Edge] = (),
) -> Steps:
    """Works out who needs and sends which messages.

    Args:
        edges: numbered from 0 on; the order of those that come to a stage, or leave it, is that of
            the messages.
        program: for each worker its actions in order. A cell belongs to the worker that has its
            forward.
        numbers: for each stage those of its replicas.
        targets: the first stage sends targets, last, to the last stage, which takes them last.
        returns: more edges, numbered after the others, over which only gradients go.
    """
    edges = list(edges)
    count = len(edges) + len(returns)
    worker_of = {(a.i, a.j): w for w, row in enumerate(program) for a in row if a.kind == "forward"}
    last = max(j for _, j in worker_of)

    def there(edge: Edge, i: int) -> int:
        return 2 * (i * count + edge.number)

    def summed(i: int, j: int) -> int:
        return 2 * (1 + max(i for i, _ in worker_of)) * count + numbers[j][i]

    stages = range(last + 1)
    incomings = [[edge for edge in edges if edge.target == j] for j in stages]
    outgoings = [[edge for edge in edges if edge.source == j] for j in stages]
    back_to = [[*incomings[j], *[edge for edge in returns if edge.target == j]] for j in stages]
    back_from = [[*outgoings[j], *[edge for edge in returns if edge.source == j]] for j in stages]

    def step(action: Action) -> Step:
        kind, i, j = action
        incoming, outgoing = incomings[j], outgoings[j]
        needs: list[int] = []
        sends: list[int] = []
        to: list[int] = []
        if kind == "forward":
            needs = [there(edge, i) for edge in incoming]
            sends, to = [there(edge, i) for edge in outgoing], [edge.target for edge in outgoing]
            if targets and j == last:
                needs.append(~i)
            if targets and j == 0:
                sends.append(~i)
                to.append(last)
        elif KINDS[kind].sends == "gradient":
            needs = [there(edge, i) + 1 for edge in back_from[j]]
            sends = [there(edge, i) + 1 for edge in back_to[j]]
            to = [edge.source for edge in back_to[j]]
        what, workers = (kind, numbers[j][i % len(numbers[j])]), [worker_of[i, k] for k in to]
        if kind == "reduce" and i:
            sends, workers = [summed(i, j)], [worker_of[0, j]]
        elif kind == "reduce":
            needs = [summed(k, j) for k in range(1, len(numbers[j])) if (k, j) in worker_of]
        return Step(what, i, tuple(needs), tuple(sends), tuple(workers))

    return Steps(tuple(tuple(map(step, row)) for row in program))
