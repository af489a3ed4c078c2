"""Two processes that train one model: ``data_parallel`` beside ``DistributedDataParallel``.

Each process (gloo, loopback) has a pipe of its own over one or two CPU workers, and half of the
mini-batch. Two parts: ``large_layers``, whose gradients are 32 megabytes, and ``small_layers``,
where everything is overhead. All ways are measured in every round, in an order that changes from
round to round, after they were seen to leave the plain model's gradients of the whole mini-batch.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Group, Options, Part, Spread, rounds
from benchmarks.ranks import RANKS, Ranks, Step, missing
from benchmarks.tasks import Task, check, mlp, plain
from syncpipe import Pipe
from syncpipe.distributed import data_parallel

ALONE, DDP_LOOP, DDP = "train_batch, alone", "DDP(model), loop", "DDP(pipe)"
OURS, ZB = "train_batch", "train_batch zb_h1"
WAYS = (ALONE, DDP_LOOP, DDP, OURS, ZB)


class Size(NamedTuple):
    """So many layers so wide, samples of a process, micro-batches, steps that are timed as one."""

    layers: int
    width: int
    rows: int
    m: int
    times: int

    def task(self) -> Task:
        """The model, and the mini-batch of all."""
        return mlp(self.layers, self.width, RANKS * self.rows, self.m)


LARGE, SMALL = Size(8, 1024, 256, 8, 1), Size(4, 16, 64, 8, 10)
QUICK = Size(4, 32, 32, 4, 1)


class Work(NamedTuple):
    """What a process trains: a pipe of so many stages, a worker for each, or the plain model."""

    size: Size
    stages: int

    def prepared(self, rank: int, what: str, m: int) -> tuple[nn.Module, Step]:
        """The model of a process, and a step; ``what``: the way, and its number of mini-batches."""
        way, _, k = what.rpartition(" x")
        task = self.size.task()
        # A plain loop takes micro-batches where a pipe takes mini-batches.
        cut = m if way == DDP_LOOP else int(k)
        mine = [t.chunk(RANKS)[rank].chunk(cut) for t in (task.x, task.target)]
        batches = list(zip(*mine, strict=True))
        model: Any = copy.deepcopy(task.model)
        if way != DDP_LOOP:
            balance = [len(model) // self.stages] * self.stages
            devices = [f"cpu:{j}" for j in range(self.stages)]
            model = Pipe(model, balance, devices=devices, chunks=m // cut, checkpoint="never")
        if way in (DDP_LOOP, DDP):
            return model, _backward(DistributedDataParallel(model), batches)
        if way != ALONE:
            model = data_parallel(model)
        return model, _trained(model, batches, "zb_h1" if way == ZB else "1f1b", way == ALONE)


def _backward(ddp: Any, batches: Any) -> Step:
    """Each batch but the last under ``no_sync``."""

    def step() -> Tensor:
        losses = []
        for k, (x, target) in enumerate(batches):
            with nullcontext() if k == len(batches) - 1 else ddp.no_sync():
                loss = F.mse_loss(ddp(x), target)
                (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


def _trained(pipe: Any, batches: Any, schedule: str, alone: bool) -> Step:
    """The same by ``train_batch``."""
    options: Any = {"loss_fn": F.mse_loss, "accumulate": len(batches), "schedule": schedule}

    def step() -> Tensor:
        losses = []
        for k, batch in enumerate(batches):
            with nullcontext() if alone or k == len(batches) - 1 else pipe.no_sync():
                losses.append(pipe.train_batch(*batch, **options))
        return torch.stack(losses).mean()

    return step


def measured(full: Size, options: Options) -> Part:
    """One part of the report; without gloo there is nothing but a note."""
    size, repeats = QUICK if options.quick else full, options.rounds(15)
    part = Part(
        f"Data parallel, {size.layers} layers of {size.width}",
        f"{size.layers} x (Linear({size.width}, {size.width}) + GELU), two processes with "
        f"{size.rows} samples each in {size.m} micro-batches, one intra-op thread for each worker; "
        f"{repeats} rounds, in which all take turns, {size.times} steps of each.",
        {
            "ms": "one training step from gradients of None, of the process that took longer, both "
            "having started from a barrier.",
            "workers": "of each process, a stage on each.",
            "mini-batches": "that make a step, all but the last under no_sync; together they are "
            "the same samples.",
            "over alone": "time over that of train_batch with the same number of workers, and "
            "without any communication, in the same round.",
            "over DDP(pipe)": "time over that of DistributedDataParallel(pipe), pipe(x) and "
            "backward(), in the same round: below 1 is faster.",
        },
        notes=[
            "DDP(model), loop: DistributedDataParallel around the layers, the micro-batches one by "
            "one, all but the last under no_sync; always one worker."
        ],
    )
    why = missing()
    if why is not None:
        part.notes = [f"Not measured: {why}."]
        return part
    whole = size.task()
    expected = whole.outcome(plain(whole)[0])
    for stages in (1, 2):
        with Ranks(1, Work, size, stages) as ranks:
            for k in (1, 2):
                ways = [way for way in WAYS if way != ZB or (stages, k) == (2, 1)]
                for way in ways:
                    outcomes = ranks.outcomes(f"{way} x{k}", size.m)
                    loss = torch.stack([found[0] for found in outcomes]).mean()
                    for _, gradients in outcomes if way != ALONE else ():
                        check(way, (loss, gradients), expected)
                jobs = {way: partial(ranks.step, f"{way} x{k}", size.m, size.times) for way in ways}
                label = f"data_parallel, {stages} workers, {k} mini-batches"
                _report(part, stages, k, rounds(jobs, repeats, label))
    return part


def _report(part: Part, stages: int, k: int, samples: dict[str, list[float]]) -> None:
    for way, times in samples.items():
        over = Spread.ratio(times, samples[DDP])
        row = {"workers": stages, "mini-batches": k, "how": way}
        row |= {"ms": Spread.of([1e3 * time for time in times])}
        part.rows.append(
            row | {"over alone": Spread.ratio(times, samples[ALONE]), "over DDP(pipe)": over}
        )
        if way == OURS and stages == 2:
            aim = f"train_batch, 2 workers, {k} mini-batches: faster than DDP(pipe)"
            part.aim(aim, over.median < 1, f"{over.median:.3g} times")


GROUP = Group(
    "data_parallel",
    "Two processes, one model",
    {"large_layers": partial(measured, LARGE), "small_layers": partial(measured, SMALL)},
)
