"""``torch.distributed.pipelining`` for the peers: two processes that train the same task."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.peers.libraries import Task
from benchmarks.ranks import RANKS, SCHEDULES, Ranks, live
from benchmarks.schedules.model import gradients

#: Makes the task, the same one in each process; a function at the top level of a module.
Maker = Callable[..., Task]


class PeerRanks(Ranks):
    """As :class:`benchmarks.ranks.Ranks`, for any task.

    Args:
        threads: intra-op threads of each process.
        make: the task, by ``make(*arguments)``, in each process anew.
        arguments: what it needs, the balance for two ranks included.
    """

    def __init__(self, threads: int, make: Maker, *arguments: Any) -> None:
        super().__init__((threads, make, arguments), serve)
        self.threads = threads


def serve(
    rank: int, folder: str, work: tuple[int, Maker, tuple[Any, ...]], link: Connection
) -> None:
    """What a rank does."""
    threads, make, arguments = work
    file = Path(folder) / f"{rank}.pt"
    live(rank, folder, threads, link, lambda: obey(rank, file, make(*arguments), link))


def obey(rank: int, file: Path, task: Task, link: Connection) -> None:
    """Until the other end is closed: steps, timed; the outcome into the file where asked for."""
    cut = task.balance[0]
    module = task.model[:cut] if rank == 0 else task.model[cut:]
    steps: dict[str, Callable[[], list[torch.Tensor]]] = {}
    while True:
        try:
            order, schedule, times = link.recv()
        except EOFError:
            return
        if schedule not in steps:
            steps[schedule] = made(rank, task, module, schedule)
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(times):
            module.zero_grad()
            losses = steps[schedule]()
        took = (time.perf_counter() - start) / times
        if order == "outcome":
            torch.save((sum(losses, torch.zeros(())), gradients(module)), file)
        link.send(took)


def made(
    rank: int, task: Task, module: torch.nn.Module, schedule: str
) -> Callable[[], list[torch.Tensor]]:
    """A training step of this rank; returns the losses, where they are."""
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(module, rank, RANKS, task.x.device)
    # A scaled loss is cheaper for it than its own way, scaled gradients.
    runner = getattr(pipelining, SCHEDULES[schedule])(
        stage,
        task.chunks,
        loss_fn=lambda y, t: task.loss(y, t) / task.chunks,
        scale_grads=False,
    )
    quiet: dict[str, Any] = {}
    if "return_outputs" in inspect.signature(runner.step).parameters:
        quiet["return_outputs"] = False  # nor do we gather any

    def step() -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        if rank == 0:
            runner.step(task.x, **quiet)
        else:
            runner.step(target=task.target, losses=losses, **quiet)
        return [loss.detach() for loss in losses]

    return step
