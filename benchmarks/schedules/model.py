"""What ``benchmarks.schedules`` trains, by the plain loop and by pipes, and whether they agree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import Options, Outcome, Part, Spread, check, gradients, timed
from syncpipe import Pipe

#: Devices, a schedule, and its slots.
Subject = tuple[Sequence[str], str, Any]


@dataclass(frozen=True)
class Problem:
    """A model, a mini-batch for it, and how it is trained.

    Attributes:
        model: the layers; everybody who trains them takes a copy.
        x: the mini-batch.
        target: what the outputs should be, by :func:`torch.nn.functional.mse_loss`.
    """

    model: nn.Sequential
    x: Tensor
    target: Tensor

    def loop(self, m: int) -> Callable[[], Tensor]:
        """A step of the plain loop over ``m`` micro-batches, weighted as by ``train_batch``."""
        model = copy.deepcopy(self.model)
        return lambda: loop_step(model, self.x, self.target, m)

    def pipe(self, devices: Sequence[str], m: int, schedule: str, slots: Any = None) -> PipeStep:
        """A step of ``train_batch``; the layers are shared out evenly."""
        n = len(devices)
        each = len(self.model) // n
        model = copy.deepcopy(self.model)
        pipe = Pipe(model, [each] * n, devices=devices, chunks=m, checkpoint="never")
        return PipeStep(pipe, self.x, self.target, schedule, slots)

    def jobs(self, m: int, subjects: Mapping[str, Subject]) -> dict[str, Callable[[], float]]:
        """To measure: pipes, after they were seen to do what the plain loop does."""
        expected = self.expected(m)
        return {
            label: timed(self.pipe(devices, m, schedule, slots).checked(label, expected))
            for label, (devices, schedule, slots) in subjects.items()
        }

    def expected(self, m: int) -> Outcome:
        """What the plain loop over ``m`` micro-batches leaves."""
        model = copy.deepcopy(self.model)
        return loop_step(model, self.x, self.target, m), gradients(model)


def mlp(layers: int, width: int, batch: int) -> Problem:
    """``layers`` times Linear and GELU; the same in every process."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(width, width), nn.GELU()] for _ in range(layers)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    return Problem(model, torch.randn(batch, width), torch.randn(batch, width))


def linears(n: int, batch: int, width: int = 4) -> Problem:
    """So many layers that compute next to nothing."""
    problem = mlp(n, width, batch)
    layers = [layer for layer in problem.model if isinstance(layer, nn.Linear)]
    return Problem(nn.Sequential(*layers), problem.x, problem.target)


def big(options: Options) -> tuple[Problem, str, tuple[int, ...]]:
    """The model of three parts, what it is called, and the numbers of micro-batches."""
    layers, width, batch, chunks = (4, 64, 64, (4,)) if options.quick else (8, 1024, 512, (8, 16))
    name = f"{layers} x (Linear({width}, {width}) + GELU), batch {batch}"
    return mlp(layers, width, batch), name, chunks


def reported(
    part: Part, m: int, samples: Mapping[str, list[float]]
) -> Iterator[tuple[str, list[float], dict[str, Any]]]:
    """A row for each job, beside the plain loop: its label, its times, and the row to add to."""
    for label, times in samples.items():
        row = {
            "m": m,
            "what": label,
            "ms": Spread.of([1e3 * time for time in times]),
            "over the loop": Spread.ratio(times, samples["plain loop"]),
        }
        part.rows.append(row)
        yield label, times, row


def loop_step(model: nn.Module, x: Tensor, target: Tensor, m: int) -> Tensor:
    """Forward, loss and backward of one micro-batch after another, into gradients of None."""
    model.zero_grad()
    total = torch.zeros((), device=target.device)
    for c, t in zip(x.chunk(m), target.chunk(m), strict=True):
        loss = F.mse_loss(model(c), t) * (len(c) / len(x))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@dataclass(frozen=True)
class PipeStep:
    """A training step of a pipe, into gradients of None."""

    pipe: Pipe
    x: Tensor
    target: Tensor
    schedule: str
    slots: Any = None

    def __call__(self) -> Tensor:
        self.pipe.zero_grad()
        loss: Tensor = self.pipe.train_batch(
            self.x, self.target, loss_fn=F.mse_loss, schedule=self.schedule, slots=self.slots
        )
        return loss

    def checked(self, label: str, expected: Outcome) -> PipeStep:
        """The same, after it was seen to do what the plain loop does."""
        check(label, (self(), gradients(self.pipe)), expected)
        return self


class Halves:
    """The plain loops over the two halves of a model, which know nothing of each other.

    Together they do what the loop over the model does. Run at once, each on a thread of its own,
    they are what two cores give to two stages that never wait.
    """

    def __init__(self, problem: Problem, m: int) -> None:
        model = copy.deepcopy(problem.model)
        half = len(model) // 2
        self._first, self._second = model[:half], model[half:]
        self._inputs = problem.x.chunk(m)
        self._targets = problem.target.chunk(m)
        hidden = [self._first(c).detach() for c in self._inputs]
        self._hidden = [h.requires_grad_() for h in hidden]
        self._back()
        self._grads = [h.grad.clone() for h in hidden if h.grad is not None]
        self._threads = ThreadPoolExecutor(2, "half", torch.set_num_threads, (1,))

    def jobs(self) -> dict[str, Callable[[], float]]:
        """To measure: each half alone, and both at once."""
        return {
            "first half alone": timed(lambda: self._run(self._forth)),
            "second half alone": timed(lambda: self._run(self._back)),
            "both halves at once": timed(lambda: self._run(self._forth, self._back)),
        }

    def _run(self, *loops: Callable[[], None]) -> None:
        for running in [self._threads.submit(loop) for loop in loops]:
            running.result()

    def _forth(self) -> None:
        self._first.zero_grad()
        for c, gy in zip(self._inputs, self._grads, strict=True):
            torch.autograd.backward(self._first(c), gy)

    def _back(self) -> None:
        self._second.zero_grad()
        share = 1 / len(self._hidden)
        for h, t in zip(self._hidden, self._targets, strict=True):
            h.grad = None
            (F.mse_loss(self._second(h), t) * share).backward()  # type: ignore[no-untyped-call]
