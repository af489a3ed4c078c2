"""Stages that several devices share, of layers that sleep: as fast as their simulation says?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.common import Outcome, Part, number
from benchmarks.group import Options
from benchmarks.schedules.model import PipeStep, Problem
from benchmarks.schedules.sleeping.bare import COLUMNS, Bare, beside_bare
from benchmarks.schedules.sleeping.naps import NappingLinear, Naps
from syncpipe import Pipe
from syncpipe.options.replicas import consecutive
from syncpipe.schedules import build
from syncpipe.schedules.simulation import Costs

#: At most so much more than the simulated makespan.
TARGET = 1.05
WIDTH = 4


@dataclass(frozen=True)
class Shape:
    """Stages, and on how many devices each of them is.

    Attributes:
        replicas: of each stage; it takes as many times longer than a stage on one device.
        chunks: micro-batches.
    """

    replicas: tuple[int, ...]
    chunks: int

    @property
    def label(self) -> str:
        """As in the papers."""
        return "-".join(map(str, self.replicas))


SHAPES = (Shape((2, 1, 1), 16), Shape((7, 1), 28), Shape((2, 2), 16), Shape((4,), 16))


class Run:
    """One shape on its pipe, and on threads that do nothing but sleep."""

    def __init__(self, shape: Shape, chunks: int, seconds: float) -> None:
        self.label = shape.label
        self.naps = [Naps(r * seconds, r * seconds, r * seconds) for r in shape.replicas]
        self.schedule = build("1f1b", chunks, consecutive(shape.replicas))
        times = tuple(r * seconds for r in shape.replicas)
        self.costs = Costs(times, times, times)
        problem = napping(self.naps, chunks)
        pipe = Pipe(
            problem.model,
            [1] * len(shape.replicas),
            replicas=shape.replicas,
            devices=[f"cpu:{k}" for k in range(sum(shape.replicas))],
            chunks=chunks,
            checkpoint="never",
        )
        self.step = PipeStep(pipe, problem.x, problem.target, "1f1b", None)
        self.bare = Bare(self.schedule, self.costs)

    def check(self) -> None:
        """The gradients are those of the plain loop."""
        m = self.schedule.m
        expected: Outcome = napping([Naps(0, 0, 0) for _ in self.naps], m).expected(m)
        self.step.checked(self.label, expected)


def run(options: Options) -> Part:
    """Measures it."""
    # Long naps: where many processes share the cores, threads wake up late.
    seconds = 0.001 if options.quick else 0.1
    repeats = options.rounds(3)
    ms = number(1e3 * seconds)
    part = Part(
        "Replicas on emulated devices",
        f"1F1B-RR; a stage on r devices is one layer that sleeps r times {ms} ms forward and "
        f"{number(2e3 * seconds)} ms backward; a CPU worker for each device; {repeats} rounds.",
        {
            **COLUMNS,
            "busy": "of the devices, simulated.",
        },
    )
    runs = [Run(shape, 8 if options.quick else shape.chunks, seconds) for shape in SHAPES]
    for each in runs:
        each.check()
    for each, simulation, row in beside_bare(part, runs, repeats, "replicas", TARGET):
        about = {
            "replicas": each.label,
            "devices": len(each.schedule.actions),
            "m": each.schedule.m,
            "busy": f"{100 * (1 - simulation.bubble):.0f} %",
        }
        part.rows.append({**about, **row})
    return part


def napping(naps: Sequence[Naps], batch: int) -> Problem:
    """A layer that naps for each stage; the same weights and data every time."""
    torch.manual_seed(0)
    layers = [NappingLinear(WIDTH, each, splits=False) for each in naps]
    x, target = (torch.randn(batch, WIDTH) for _ in range(2))
    return Problem(nn.Sequential(*layers), x, target)
