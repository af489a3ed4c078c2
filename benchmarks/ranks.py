"""``torch.distributed.pipelining`` on this machine: for each stage a process that takes orders."""

from __future__ import annotations

import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import distributed, nn

from benchmarks.schedules.model import Options, Outcome, big, gradients

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


_Self = TypeVar("_Self", bound="Ranks")


class Ranks:
    """The processes, from the side of the one that measures.

    ::

        with Ranks(options) as ranks:
            seconds = ranks.step("gpipe", 8)
            loss, gradients = ranks.outcome("gpipe", 8)
    """

    def __init__(self, work: Any, serve: Callable[..., None] | None = None) -> None:
        """What the ranks are told; and what they do, by default steps under schedules."""
        self._work, self._serve = work, serve or _serve

    def __enter__(self: _Self) -> _Self:
        self._folder = tempfile.TemporaryDirectory()
        spawn = get_context("spawn")
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(RANKS):
            here, there = spawn.Pipe()
            arguments = (rank, self._folder.name, self._work, there)
            process = spawn.Process(target=self._serve, args=arguments, daemon=True)
            self._links.append(here)
            self._processes.append(process)
            process.start()
            there.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for link in self._links:
            link.close()  # which ends them
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def step(self, schedule: str, m: int) -> float:
        """The time of one training step: of the rank that took the longest."""
        return max(self._order("step", schedule, m))

    def outcome(self, schedule: str, m: int) -> Outcome:
        """What a training step leaves."""
        self._order("outcome", schedule, m)
        parts = [torch.load(Path(self._folder.name) / f"{rank}.pt") for rank in range(RANKS)]
        return parts[-1][0], [gradient for part in parts for gradient in part[1]]

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


def live(rank: int, folder: str, threads: int, link: Connection, work: Callable[[], None]) -> None:
    """The whole life of a rank; the process ends in here.

    Args:
        rank: which one.
        folder: where the ranks meet.
        threads: how many intra-op threads it has.
        link: to the one that measures.
        work: what it does among the others.
    """
    code = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(threads)
        meeting = f"file://{folder}/meet"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
        work()
        distributed.destroy_process_group()
        code = 0
    except BaseException:
        link.send(traceback.format_exc())
    finally:
        # A thread of gloo may still be letting go of a tensor, which aborts a process that ends
        # in the usual way meanwhile: do not end in the usual way.
        os._exit(code)


def _serve(rank: int, folder: str, options: Options, link: Connection) -> None:
    live(rank, folder, 1, link, lambda: _Stage(rank, folder, options).obey(link))


class _Stage:
    """What a rank has: its layers, and a schedule for each number of micro-batches."""

    def __init__(self, rank: int, folder: str, options: Options) -> None:
        self._rank = rank
        self._file = Path(folder) / f"{rank}.pt"
        self._problem, _, _ = big(options)
        each = len(self._problem.model) // RANKS
        self._module: nn.Module = self._problem.model[rank * each : (rank + 1) * each]
        self._steps: dict[tuple[str, int], Callable[[], list[torch.Tensor]]] = {}

    def obey(self, link: Connection) -> None:
        """Until the other end is closed."""
        while True:
            try:
                order, schedule, m = link.recv()
            except EOFError:
                return
            if (schedule, m) not in self._steps:
                self._steps[schedule, m] = self._made(schedule, m)
            step = self._steps[schedule, m]
            distributed.barrier()
            start = time.perf_counter()
            losses = step()
            took = time.perf_counter() - start
            if order == "outcome":
                torch.save((sum(losses, torch.zeros(())), gradients(self._module)), self._file)
            link.send(took)

    def _made(self, schedule: str, m: int) -> Callable[[], list[torch.Tensor]]:
        """A training step, into gradients of None; returns the losses, where they are."""
        from torch.distributed import pipelining

        stage = pipelining.PipelineStage(self._module, self._rank, RANKS, torch.device("cpu"))
        # A scaled loss is cheaper for it than its own way, scaled gradients.
        runner = getattr(pipelining, SCHEDULES[schedule])(
            stage, m, loss_fn=lambda y, t: F.mse_loss(y, t) / m, scale_grads=False
        )
        quiet: dict[str, Any] = {}
        if "return_outputs" in inspect.signature(runner.step).parameters:
            quiet["return_outputs"] = False  # nor do we gather any

        def step() -> list[torch.Tensor]:
            self._module.zero_grad()
            losses: list[torch.Tensor] = []
            if self._rank == 0:
                runner.step(self._problem.x, **quiet)
            else:
                runner.step(target=self._problem.target, losses=losses, **quiet)
            return [loss.detach() for loss in losses]

        return step
