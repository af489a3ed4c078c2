"""Processes on this machine that train together: an executor of one process for each rank.

What they train is for whoever starts them to say: anything with a method ``prepared``.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from benchmarks.tasks import Outcome, Task, gradients

#: By name: the class of the schedule in ``torch.distributed.pipelining``.
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
RANKS = 2
_SECONDS = 120.0
#: A training step of a rank; returns its loss, 0 where another rank has it.
Step = Callable[[], Tensor]


def missing() -> str | None:
    """Why there can be no ranks here; None if there can."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        return "this build of torch has no gloo"
    return None


class Ranks:
    """The processes, from the side of the one that measures; a context manager.

    Args:
        threads: intra-op threads of each process.
        make: what they train, by ``make(*arguments)`` in each process anew; a function at the top
            level of a module. Its ``prepared(rank, what, m)`` gives the module of a rank, and a
            training step of it.
        arguments: what it needs.
    """

    def __init__(self, threads: int, make: Callable[..., Any], *arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        begin = self._folder.name, threads, make, arguments
        self._ranks = [
            ProcessPoolExecutor(1, get_context("spawn"), _begin, (rank, *begin))
            for rank in range(RANKS)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for rank in [rank.submit(_end) for rank in self._ranks]:
            rank.exception(_SECONDS)
        for each in self._ranks:
            each.shutdown()
        self._folder.cleanup()

    def step(self, what: str, m: int, times: int = 1) -> float:
        """The time of one training step, the mean of so many: of the rank that took the longest."""
        return max(took for took, _ in self._run(what, m, times))

    def outcomes(self, what: str, m: int) -> list[Outcome]:
        """What a training step leaves in each rank."""
        found = [outcome for _, outcome in self._run(what, m, 1, outcome=True)]
        return [(torch.tensor(loss), list(map(torch.from_numpy, g))) for loss, g in found]

    def _run(self, *order: Any, **more: Any) -> list[Any]:
        running = [rank.submit(_run, *order, **more) for rank in self._ranks]
        try:
            return [each.result(_SECONDS) for each in running]
        except Exception as error:
            raise SystemExit(f"a rank failed, nothing measured: {error!r}") from error


# -- in each process -------------------------------------------------------------------------------

_rank = 0
_work: Any = None
_steps: dict[tuple[str, int], tuple[nn.Module, Step]] = {}


def _begin(
    rank: int, folder: str, threads: int, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    global _rank, _work
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    meeting = f"file://{folder}/meet"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    _rank, _work = rank, make(*arguments)


def _end() -> None:
    # A thread of gloo may still be letting go of a tensor, which aborts a process that ends in the
    # usual way meanwhile: the executor finds its process gone.
    distributed.destroy_process_group()
    os._exit(0)


def _run(what: str, m: int, times: int, outcome: bool = False) -> tuple[float, Any]:
    """Seconds of a step; the loss and all gradients where they are asked for."""
    if (what, m) not in _steps:
        _steps[what, m] = _work.prepared(_rank, what, m)
    module, step = _steps[what, m]
    distributed.barrier()
    start = time.perf_counter()
    for _ in range(times):
        module.zero_grad()
        loss = step()
    took = (time.perf_counter() - start) / times
    return took, (float(loss), [g.numpy() for g in gradients(module)]) if outcome else None


class Stages(NamedTuple):
    """A task for ``torch.distributed.pipelining``, a stage on each rank; ``what``: its schedule."""

    task: Task

    def prepared(self, rank: int, schedule: str, m: int) -> tuple[nn.Module, Step]:
        """The layers of a rank, and a training step of it."""
        from torch.distributed import pipelining

        task, first = self.task, self.task.balance[0]
        module = task.model[:first] if rank == 0 else task.model[first:]
        stage = pipelining.PipelineStage(module, rank, RANKS, task.x.device)
        # A scaled loss is cheaper for it than its own way, scaled gradients.
        runner = getattr(pipelining, SCHEDULES[schedule])(
            stage, m, loss_fn=lambda y, t: task.loss(y, t) / m, scale_grads=False
        )
        quiet: dict[str, Any] = {}
        if "return_outputs" in inspect.signature(runner.step).parameters:
            quiet["return_outputs"] = False  # nor do we gather any

        def step() -> Tensor:
            losses: list[Tensor] = []
            if rank == 0:
                runner.step(task.x, **quiet)
            else:
                runner.step(target=task.target, losses=losses, **quiet)
            return sum((loss.detach() for loss in losses), torch.zeros(()))

        return module, step
