"""What the interpreter lock costs: the same interpreter with it and without it.

A free-threaded build of CPython (``--disable-gil``) runs with the lock under ``PYTHON_GIL=1`` and
without it under ``PYTHON_GIL=0``. Two processes, one of each kind, take turns: both train the same
pipe on 1, 2, 4 and 8 workers, with layers that do a given time of Python work in each pass. Any
other build knows the lock only, and then so does the report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Part, Spread, number, rounds
from benchmarks.group import Options
from benchmarks.schedules.model import PipeStep, Problem
from benchmarks.schedules.overhead import calibrated

STAGES, WIDTH = 8, 4
WORKERS = (1, 2, 4, 8)
#: Milliseconds of Python in each pass of each layer.
WORK = (0.0, 0.2, 1.0)
#: By label: the value of PYTHON_GIL.
KINDS = {"with the lock": "1", "without": "0"}
_LOOP = "plain loop"


class Busy(torch.autograd.Function):
    """The identity, with so many turns of a Python loop forward, and as many backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: int) -> Tensor:
        ctx.turns = turns
        spin(turns)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spin(ctx.turns)
        return grad, None


def spin(turns: int) -> None:
    """Work that only the interpreter does."""
    for _ in range(turns):
        pass


class BusyLinear(nn.Linear):
    """A linear map that takes its time in Python."""

    turns = 0

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return Busy.apply(y, self.turns) if self.turns else y  # type: ignore[no-untyped-call]


# -- the process that measures ---------------------------------------------------------------------


def serve() -> None:
    """Takes orders, a line of JSON each, and answers each by a line, until there are no more."""
    torch.set_num_threads(1)
    known: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        name, order = json.loads(line)
        if name == "turns per second":
            answer = _turns_per_second()
        else:
            if name not in known:
                known[name] = _job(**order)
            answer = known[name]()
        print(json.dumps(answer), flush=True)


def _turns_per_second() -> float:
    def once() -> float:
        start = time.perf_counter()
        spin(200_000)
        return time.perf_counter() - start

    return 200_000 / min(once() for _ in range(20))


def _job(workers: int, turns: int, m: int, least: float) -> Callable[[], float]:
    """Measures a step, after it was seen to do what the plain loop does; no workers: the loop."""
    torch.manual_seed(0)
    layers = [BusyLinear(WIDTH, WIDTH) for _ in range(STAGES)]
    for layer in layers:
        layer.turns = turns
    problem = Problem(nn.Sequential(*layers), torch.randn(m, WIDTH), torch.randn(m, WIDTH))
    if not workers:
        return calibrated(problem.loop(m), least)
    devices = [f"cpu:{j * workers // STAGES}" for j in range(STAGES)]
    step: PipeStep = problem.pipe(devices if workers > 1 else ["cpu"] * STAGES, m, "1f1b")
    return calibrated(step.checked(f"{workers} workers", problem.expected(m)), least)


# -- the process that asks -------------------------------------------------------------------------


class Interpreter:
    """This interpreter once more, in a process of its own.

    Args:
        gil: the value of PYTHON_GIL; None where only one is known.
    """

    def __init__(self, gil: str | None) -> None:
        extra = {} if gil is None else {"PYTHON_GIL": gil}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.schedules.interpreter_lock"],
            env={**os.environ, **extra},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()  # the end of its orders ends it

    def ask(self, name: str, **order: Any) -> float:
        """The seconds of a step, or whatever was asked for."""
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        orders.write(json.dumps([name, order]) + "\n")
        orders.flush()
        answer = answers.readline()
        if not answer:
            raise SystemExit(f"{name}: the process ended without an answer; nothing measured")
        return float(json.loads(answer))


def run(options: Options) -> Part:
    """Measures it."""
    m = 4 if options.quick else 16
    repeats, least = options.rounds(9), 0.002 if options.quick else 0.05
    workers, work = (WORKERS[:2], WORK[:2]) if options.quick else (WORKERS, WORK)
    switches = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    kinds = KINDS if switches else {"with the lock": None}
    part = Part(
        "Interpreter lock",
        f"{STAGES} stages of one Linear({WIDTH}, {WIDTH}), {m} micro-batches of one sample, 1f1b, "
        f"checkpoint='never', stages shared out evenly; {repeats} rounds of {least} s.",
        {
            "Python ms": "work of the interpreter alone (an empty loop) in each forward and as "
            "much in each backward of a layer; so many turns as take this long on an idle core.",
            "cells/s": "micro-batches x stages over the wall time of a training step.",
            "us/cell": "the same the other way round.",
            "lock over none": "time with the lock over that without it in the same round.",
            "quickest": "the same of the quickest rounds with and without it, which is what other "
            "work on the machine changes least.",
            "over the loop": "time over that of the plain loop in the same round, which has one "
            "thread, by the same interpreter in the same mode.",
        },
    )
    if not switches:
        part.notes.append(
            "This interpreter cannot run without the lock; a free-threaded build can do both."
        )
    for ms in work:
        _measure(part, kinds, ms, workers, m, repeats, least)
    return part


def _measure(
    part: Part,
    kinds: dict[str, Any],
    ms: float,
    workers: tuple[int, ...],
    m: int,
    repeats: int,
    least: float,
) -> None:
    """All numbers of workers with so much work in Python, with the lock and without it."""
    labels = {f"{w} worker{'s' * (w > 1)}": w for w in workers}
    with ExitStack() as stack:
        running = {k: stack.enter_context(Interpreter(gil)) for k, gil in kinds.items()}
        turns = round(ms / 1e3 * running["with the lock"].ask("turns per second"))
        jobs = {
            f"{label} {kind}": partial(
                each.ask, label, workers=count, turns=turns, m=m, least=least
            )
            for label, count in {_LOOP: 0, **labels}.items()
            for kind, each in running.items()
        }
        samples = rounds(jobs, repeats, f"interpreter lock, {number(ms)} ms")
    cells = m * STAGES
    for label in (_LOOP, *labels):
        row: dict[str, Any] = {"Python ms": ms, "what": label}
        for kind in kinds:
            times = samples[f"{label} {kind}"]
            row[f"cells/s {kind}"] = Spread.of([cells / took for took in times])
            row[f"us/cell {kind}"] = Spread.of([1e6 * took / cells for took in times])
            if label != _LOOP:
                loop = samples[f"{_LOOP} {kind}"]
                row[f"over the loop {kind}"] = Spread.ratio(times, loop)
        if len(kinds) > 1:
            locked, free = (samples[f"{label} {kind}"] for kind in kinds)
            row["lock over none"] = Spread.ratio(locked, free)
            row["quickest"] = min(locked) / min(free)
        part.rows.append(row)


if __name__ == "__main__":
    serve()
