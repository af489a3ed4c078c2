"""Two processes that train one model: ``data_parallel`` beside ``DistributedDataParallel``.

Each process (gloo, loopback) has a pipe of its own over one or two CPU workers, and half of the
mini-batch. Two parts: ``large_layers``, whose gradients are 32 megabytes, and ``small_layers``,
where everything is overhead. All ways are measured in every round, in an order that changes from
round to round, after they were seen to leave the plain model's gradients of the whole mini-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Group, Options, Part, Spread, rounds
from benchmarks.ranks import RANKS, Ranks, missing
from benchmarks.tasks import Outcome, Task, check, mlp, plain
from syncpipe import Pipe
from syncpipe.distributed import data_parallel

ALONE = "train_batch, alone"
DDP_LOOP = "DDP(model), loop"
DDP = "DDP(pipe)"
OURS = "train_batch"
#: Ways to train, for each number of mini-batches that make a step.
WAYS = {
    1: (
        ALONE,
        "train_batch, averaged after it",
        DDP_LOOP,
        DDP,
        OURS,
        "train_batch zb_h1",
    ),
    2: (ALONE, DDP_LOOP, DDP, OURS),
}


class Size(NamedTuple):
    """What is trained.

    Attributes:
        layers, width: so many, so wide.
        rows: samples of a process.
        m: micro-batches.
        times: steps that are timed as one.
    """

    layers: int
    width: int
    rows: int
    m: int
    times: int


LARGE, SMALL = Size(8, 1024, 256, 8, 1), Size(4, 16, 64, 8, 10)
QUICK = Size(4, 32, 32, 4, 1)


class Work(NamedTuple):
    """What a process does.

    Attributes:
        task: the model, and the mini-batches of all.
        stages: of each pipe; a worker for each.
    """

    task: Task
    stages: int

    def prepared(
        self, rank: int, what: str, m: int
    ) -> tuple[nn.Module, Callable[[], list[Tensor]]]:
        """The model of a process, and a training step of it."""
        way, _, accumulate = what.rpartition(" x")
        k = int(accumulate)
        model = copy.deepcopy(self.task.model)
        mine = [t.chunk(RANKS)[rank].chunk(k) for t in (self.task.x, self.task.target)]
        batches = list(zip(*mine, strict=True))
        if way != DDP_LOOP:
            each = len(model) // self.stages
            model = Pipe(
                model,
                [each] * self.stages,
                devices=[f"cpu:{j}" for j in range(self.stages)],
                chunks=m // k,
                checkpoint="never",
            )
        step = _STEPS[way](model, batches, m // k)
        return model, step


def _alone(pipe: Pipe, batches: Any, m: int) -> Callable[[], list[Tensor]]:
    def step() -> list[Tensor]:
        return [
            pipe.train_batch(*batch, loss_fn=F.mse_loss, accumulate=len(batches))
            for batch in batches
        ]

    return step


def _after(pipe: Pipe, batches: Any, m: int) -> Callable[[], list[Tensor]]:
    train = _alone(pipe, batches, m)

    def step() -> list[Tensor]:
        losses = train()
        flat = torch.cat([p.grad.reshape(-1) for p in pipe.parameters()])
        distributed.all_reduce(flat)
        flat /= RANKS
        parts = flat.split([p.numel() for p in pipe.parameters()])
        for p, part in zip(pipe.parameters(), parts, strict=True):
            p.grad.copy_(part.view_as(p))
        return losses

    return step


def _loop(model: nn.Module, batches: Any, m: int) -> Callable[[], list[Tensor]]:
    """The usual accumulation: micro-batch by micro-batch, the last one averages."""
    ddp = DistributedDataParallel(model)
    pairs = [pair for batch in batches for pair in zip(*(t.chunk(m) for t in batch), strict=True)]

    def step() -> list[Tensor]:
        losses = []
        for i, (x, target) in enumerate(pairs):
            with nullcontext() if i == len(pairs) - 1 else ddp.no_sync():
                loss = F.mse_loss(ddp(x), target) / len(pairs)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach() * len(batches))
        return losses

    return step


def _backward(pipe: Any, batches: Any, m: int) -> Callable[[], list[Tensor]]:
    """``pipe(x)``; each mini-batch but the last under ``no_sync``."""

    def step() -> list[Tensor]:
        losses = []
        for k, (x, target) in enumerate(batches):
            with nullcontext() if k == len(batches) - 1 else pipe.no_sync():
                loss = F.mse_loss(pipe(x), target)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        return losses

    return step


def _train_batch(
    pipe: Pipe, batches: Any, m: int, schedule: str = "1f1b"
) -> Callable[[], list[Tensor]]:
    pipe = data_parallel(pipe)

    def step() -> list[Tensor]:
        losses = []
        for k, batch in enumerate(batches):
            with nullcontext() if k == len(batches) - 1 else pipe.no_sync():
                options: Any = {"accumulate": len(batches), "schedule": schedule}
                losses.append(pipe.train_batch(*batch, loss_fn=F.mse_loss, **options))
        return losses

    return step


_STEPS: dict[str, Callable[..., Callable[[], list[Tensor]]]] = {
    ALONE: _alone,
    "train_batch, averaged after it": _after,
    DDP_LOOP: _loop,
    DDP: lambda pipe, *rest: _backward(DistributedDataParallel(pipe), *rest),
    OURS: _train_batch,
    "train_batch zb_h1": partial(_train_batch, schedule="zb_h1"),
}


def _work(size: Size, stages: int) -> Work:
    """In a process of its own."""
    return Work(mlp(size.layers, size.width, RANKS * size.rows, size.m), stages)


def measured(full: Size, options: Options) -> Part:
    """One part of the report; without gloo there is nothing but a note."""
    size = QUICK if options.quick else full
    repeats = options.rounds(15)
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
            "one, all but the last under no_sync; always one worker.",
            "train_batch, averaged after it: gradients in one all_reduce when the call is over.",
        ],
    )
    why = missing()
    if why is not None:
        part.notes = [f"Not measured: {why}."]
        return part
    whole = mlp(size.layers, size.width, RANKS * size.rows, size.m)
    expected = whole.outcome(plain(whole)[0])
    for stages in (1, 2):
        with Ranks(1, _work, size, stages) as ranks:
            for k, ways in WAYS.items():
                jobs: dict[str, Callable[[], float]] = {}
                for way in ways:
                    if not (way.endswith("zb_h1") and stages == 1):
                        _check(ranks, f"{way} x{k}", k, size, expected)
                        jobs[way] = partial(ranks.step, f"{way} x{k}", size.m, size.times)
                label = f"data_parallel, {stages} workers, {k} mini-batches"
                _report(part, stages, k, rounds(jobs, repeats, label))
    return part


def _check(ranks: Ranks, what: str, k: int, size: Size, expected: Outcome) -> None:
    """Refuses to measure what does not leave the plain model's gradients."""
    outcomes = ranks.outcomes(what, size.m)
    if what.startswith(ALONE):
        return
    loss = torch.stack([found[0] for found in outcomes]).mean() / k
    for _, gradients in outcomes:
        check(what, (loss, gradients), expected)


def _report(part: Part, stages: int, k: int, samples: dict[str, list[float]]) -> None:
    for way, times in samples.items():
        row = {
            "workers": stages,
            "mini-batches": k,
            "how": way,
            "ms": Spread.of([1e3 * time for time in times]),
            "over alone": Spread.ratio(times, samples[ALONE]),
            "over DDP(pipe)": Spread.ratio(times, samples[DDP]),
        }
        part.rows.append(row)
        if way == OURS and stages == 2:
            ratio = Spread.ratio(times, samples[DDP])
            aim = f"train_batch, 2 workers, {k} mini-batches: faster than DDP(pipe)"
            part.aim(aim, ratio.median < 1, f"{ratio.median:.3g} times")


GROUP = Group(
    "data_parallel",
    "Two processes, one model",
    {
        "large_layers": partial(measured, LARGE),
        "small_layers": partial(measured, SMALL),
    },
)
