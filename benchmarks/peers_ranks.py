"""``torch.distributed.pipelining`` for the peers: two processes that train the same task."""

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
from typing import Any

import torch
from torch import distributed

from benchmarks.peers_libraries import Task
from benchmarks.schedules_model import gradients
from benchmarks.schedules_ranks import RANKS, SCHEDULES, Ranks

#: Makes the task, the same one in each process; a function at the top level of a module.
Maker = Callable[..., Task]


class PeerRanks(Ranks):
    """As :class:`benchmarks.schedules_ranks.Ranks`, for any task.

    Args:
        threads: intra-op threads of each process.
        make: the task, by ``make(*arguments)``, in each process anew.
        arguments: what it needs, the balance for two ranks included.
    """

    def __init__(self, threads: int, make: Maker, *arguments: Any) -> None:
        self.threads = threads
        self._work = threads, make, arguments

    def __enter__(self) -> PeerRanks:
        self._folder = tempfile.TemporaryDirectory()
        spawn = get_context("spawn")
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(RANKS):
            here, there = spawn.Pipe()
            arguments = (rank, self._folder.name, self._work, there)
            process = spawn.Process(target=serve, args=arguments, daemon=True)
            self._links.append(here)
            self._processes.append(process)
            process.start()
            there.close()
        return self


def serve(
    rank: int, folder: str, work: tuple[int, Maker, tuple[Any, ...]], link: Connection
) -> None:
    """The whole life of a rank; the process ends in here."""
    code = 1
    threads, make, arguments = work
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(threads)
        meeting = f"file://{folder}/meet"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
        obey(rank, Path(folder) / f"{rank}.pt", make(*arguments), link)
        distributed.destroy_process_group()
        code = 0
    except BaseException:
        link.send(traceback.format_exc())
    finally:
        os._exit(code)  # as in schedules_ranks: gloo may abort a process that ends in the usual way


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
