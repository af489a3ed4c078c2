"""Processes on this machine that take orders: ``torch.distributed.pipelining``, one for each stage.

What they train is for whoever starts them to say: anything with a method ``prepared``.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from benchmarks.tasks import Outcome, gradients

#: By name: the class of the schedule in ``torch.distributed.pipelining``.
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
RANKS = 2
_SECONDS = 120.0


def missing() -> str | None:
    """Why there can be no ranks here; None if there can."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        return "this build of torch has no gloo"
    try:
        import torch.distributed.pipelining  # noqa: F401
    except ImportError as error:
        return f"torch.distributed.pipelining cannot be imported: {error}"
    return None


class Work(NamedTuple):
    """What the ranks train together.

    Attributes:
        model: the layers, all of them.
        x: the mini-batch.
        target: what ``loss`` takes as its second argument.
        loss: a mean over the samples.
        first: how many layers the first rank has; the second one has the others.
    """

    model: nn.Sequential
    x: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    first: int

    def prepared(
        self, rank: int, schedule: str, m: int
    ) -> tuple[nn.Module, Callable[[], list[Tensor]]]:
        """The layers of a rank, and a training step of it."""
        module = self.model[: self.first] if rank == 0 else self.model[self.first :]
        return module, _made(rank, self, module, schedule, m)


class Ranks:
    """The processes, from the side of the one that measures.

    ::

        with Ranks(1, make_work, options) as ranks:
            seconds = ranks.step("gpipe", 8)
            loss, gradients = ranks.outcome("gpipe", 8)

    Args:
        threads: intra-op threads of each process.
        make: what they train, by ``make(*arguments)`` in each process anew; a function at the top
            level of a module.
        arguments: what it needs.
    """

    def __init__(self, threads: int, make: Callable[..., Any], *arguments: Any) -> None:
        self.threads = threads
        self._work = threads, partial(make, *arguments)

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory()
        spawn = get_context("spawn")
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(RANKS):
            here, there = spawn.Pipe()
            arguments = (rank, self._folder.name, *self._work, there)
            process = spawn.Process(target=_live, args=arguments, daemon=True)
            self._links.append(here)
            self._processes.append(process)
            process.start()
            there.close()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for link in self._links:
            link.close()  # which ends them
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def step(self, schedule: str, m: int, times: int = 1) -> float:
        """The time of one training step, the mean of so many: of the rank that took the longest."""
        return max(self._order("step", schedule, m, times))

    def outcome(self, schedule: str, m: int) -> Outcome:
        """What a training step leaves, where each rank has a part of the model."""
        parts = self.outcomes(schedule, m)
        return parts[-1][0], [gradient for part in parts for gradient in part[1]]

    def outcomes(self, schedule: str, m: int) -> list[Outcome]:
        """What it leaves in each rank."""
        self._order("outcome", schedule, m, 1)
        return [torch.load(Path(self._folder.name) / f"{rank}.pt") for rank in range(RANKS)]

    def _order(self, *order: Any) -> list[float]:
        for link in self._links:
            link.send(order)
        return [self._answer(rank) for rank in range(RANKS)]

    def _answer(self, rank: int) -> float:
        answer: Any = f"no answer within {_SECONDS:.0f} s"
        if self._links[rank].poll(_SECONDS):  # true at the end of the process, too
            try:
                answer = self._links[rank].recv()
            except EOFError:
                answer = "the process ended without an answer"
        if isinstance(answer, float):
            return answer
        raise SystemExit(f"rank {rank} failed; nothing measured\n{answer}")


def _live(rank: int, folder: str, threads: int, make: Callable[[], Any], link: Connection) -> None:
    """The whole life of a rank; the process ends in here.

    Args:
        rank: which one.
        folder: where the ranks meet.
        threads: how many intra-op threads it has.
        make: what it trains with the others.
        link: to the one that measures.
    """
    code = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(threads)
        meeting = f"file://{folder}/meet"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
        _obey(rank, Path(folder) / f"{rank}.pt", make(), link)
        distributed.destroy_process_group()
        code = 0
    except BaseException:
        link.send(traceback.format_exc())
    finally:
        # A thread of gloo may still be letting go of a tensor, which aborts a process that ends
        # in the usual way meanwhile: do not end in the usual way.
        os._exit(code)


def _obey(rank: int, file: Path, work: Any, link: Connection) -> None:
    """Until the other end is closed: steps, timed; the outcome into the file where asked for."""
    steps: dict[tuple[str, int], tuple[nn.Module, Callable[[], list[Tensor]]]] = {}
    while True:
        try:
            order, schedule, m, times = link.recv()
        except EOFError:
            return
        if (schedule, m) not in steps:
            steps[schedule, m] = work.prepared(rank, schedule, m)
        module, step = steps[schedule, m]
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(times):
            module.zero_grad()
            losses = step()
        took = (time.perf_counter() - start) / times
        if order == "outcome":
            torch.save((sum(losses, torch.zeros(())), gradients(module)), file)
        link.send(took)


def _made(
    rank: int, work: Work, module: nn.Module, schedule: str, m: int
) -> Callable[[], list[Tensor]]:
    """A training step of this rank; returns the losses, where they are."""
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(module, rank, RANKS, work.x.device)
    # A scaled loss is cheaper for it than its own way, scaled gradients.
    runner = getattr(pipelining, SCHEDULES[schedule])(
        stage, m, loss_fn=lambda y, t: work.loss(y, t) / m, scale_grads=False
    )
    quiet: dict[str, Any] = {}
    if "return_outputs" in inspect.signature(runner.step).parameters:
        quiet["return_outputs"] = False  # nor do we gather any

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        if rank == 0:
            runner.step(work.x, **quiet)
        else:
            runner.step(target=work.target, losses=losses, **quiet)
        return [loss.detach() for loss in losses]

    return step
