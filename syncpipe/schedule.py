"""The order in which the cells (micro-batch, stage) of a mini-batch are computed.

Pure Python: nothing here knows of tensors, threads or devices.

The clock cycles of GPipe (Huang et al. 2019, section 2.3), for three micro-batches on three
stages; a column is a stage, an entry is ``(i, j)``:

    k   (i,j) (i,j) (i,j)
    0   (0,0)
    1   (1,0) (0,1)
    2   (2,0) (1,1) (0,2)
    3         (2,1) (1,2)
    4               (2,2)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

__all__ = ["Action", "Kind", "Program", "clock_cycles", "forward_program"]

Kind = Literal["forward"]


class Action(NamedTuple):
    """One cell of a schedule: what to do with micro-batch ``i`` on stage ``j``."""

    kind: Kind
    i: int
    j: int

    @property
    def clock(self) -> int:
        """The clock cycle in which the fill-drain schedule runs this cell."""
        return self.i + self.j


#: For each worker the actions that it performs, in order.
Program = list[list[Action]]


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yields, for each clock cycle, the cells ``(i, j)`` that run in it.

    Args:
        m: number of micro-batches.
        n: number of stages.
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n))]


@lru_cache(maxsize=128)
def forward_program(m: int, worker_of: tuple[int, ...]) -> Program:
    """The forward half of GPipe's schedule, as a list of actions for each worker (do not modify).

    A lone worker has nobody to wait for it, so it takes the micro-batches one after another
    through all of its stages: exactly what the plain model does with them, and with the fewest
    activations alive between stages.

    Args:
        m: number of micro-batches.
        worker_of: for each stage the index of the worker that serves it.
    """
    n = len(worker_of)
    program: Program = [[] for _ in range(max(worker_of) + 1)]
    if len(program) == 1:
        program[0] = [Action("forward", i, j) for i in range(m) for j in range(n)]
        return program
    for cells in clock_cycles(m, n):
        for i, j in cells:
            program[worker_of[j]].append(Action("forward", i, j))
    return program
