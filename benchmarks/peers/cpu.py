"""Peers on the CPU: four small models in two partitions, as many intra-op threads for everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import Options, Part
from benchmarks.models.gpt2 import gpt2_small
from benchmarks.models.small_resnext import resnext
from benchmarks.peers.check import Field, distance, gathered, outcome, tell, threads_seen, too_far
from benchmarks.peers.libraries import DISTRIBUTED, Task, ours, plain
from benchmarks.peers.measure import Meter, measured, steps_in
from benchmarks.ranks import SCHEDULES as THEIRS
from benchmarks.ranks import Ranks, Work
from benchmarks.ranks import missing as ranks_missing
from benchmarks.schedules.model import linears, mlp
from syncpipe.balance import balance_by_time
from syncpipe.commands.demo import threads

PARTITIONS = 2
MODES = ("never", "always")
PLACES = {"1 worker": ("cpu", "cpu"), "2 workers": ("cpu:0", "cpu:1")}
CPU = torch.device("cpu")

DEFINITIONS = {
    "workers": "threads (of torch.distributed: processes) that share out the partitions. "
    "torchgpipe and fairscale have one for all partitions on the CPU, whatever `devices` says.",
    "threads": "measured: intra-op threads of each thread that ran layers forward, or again. "
    "Backward of `pipe(x)` and of the older libraries runs on the calling thread, which has all.",
    "ms": "measured: forward, loss and backward of one mini-batch, from gradients of None; of "
    "torch.distributed that of the rank that took longer, both having started from a barrier.",
    "quickest": "ms of the quickest round, which other work on the machine changes least.",
    "over the loop": "time over that of the plain loop over the same micro-batches, in the same "
    "round; the loop never re-materializes.",
    "over torchgpipe, over fairscale": "time over theirs of the same checkpoint mode in the same "
    "round: below 1 ours is faster.",
    f"over {DISTRIBUTED}": "the same beside torch.distributed.pipelining: gpipe for `pipe(x)` and "
    "gpipe, 1f1b for 1f1b and zb_h1.",
}


# -- the models -----------------------------------------------------------------------------------


def tiny_task(quick: bool, balance: Sequence[int] = ()) -> tuple[Task, str]:
    """Layers that compute next to nothing."""
    n, m = (4, 4) if quick else (4, 8)
    problem = linears(n, m)
    task = Task(problem.model, problem.x, problem.target, F.mse_loss, m, balance or [2, 2])
    return task, f"{n} x Linear(4, 4), batch {m}"


def linear_task(quick: bool, balance: Sequence[int] = ()) -> tuple[Task, str]:
    """Large matrices, all of one size."""
    layers, width, batch, m = (4, 32, 32, 4) if quick else (8, 1024, 512, 8)
    problem = mlp(layers, width, batch)
    task = Task(problem.model, problem.x, problem.target, F.mse_loss, m, balance or [layers] * 2)
    return task, f"{layers} x (Linear({width}, {width}) + GELU), batch {batch}"


def resnext_task(quick: bool, balance: Sequence[int] = ()) -> tuple[Task, str]:
    """A small ResNeXt; a skip crosses the border."""
    batch, m = (8, 4) if quick else (128, 8)
    torch.manual_seed(0)
    model = resnext()
    x, target = torch.rand(batch, 1, 8, 8), torch.randint(10, (batch,))
    timeout = 0.05 if quick else 1.0
    balance = balance or balance_by_time(
        PARTITIONS, model, x[: batch // m], timeout=timeout, progress=False
    )
    name = f"ResNeXt of 20 convolutions (a small ResNeXt), batch {batch}, 8x8 pixels"
    return Task(model, x, target, F.cross_entropy, m, balance), name


def transformer_task(quick: bool, balance: Sequence[int] = ()) -> tuple[Task, str]:
    """A small transformer that predicts the next token."""
    layers, width, words, length, batch, m = (
        (2, 16, 50, 8, 8, 4) if quick else (4, 256, 1000, 64, 16, 8)
    )
    torch.manual_seed(0)
    model = gpt2_small(layers=layers, width=width, heads=4, vocabulary=words, length=length)
    tokens = torch.randint(words, (batch, length + 1))
    x, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    timeout = 0.05 if quick else 1.0
    balance = balance or balance_by_time(
        PARTITIONS, model, x[: batch // m], timeout=timeout, progress=False
    )
    name = f"transformer as GPT-2 is, {layers} blocks of width {width}, {words} words, "
    return Task(model, x, target, next_token, m, balance), name + f"batch {batch} x {length} tokens"


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over samples and positions."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# -- a part of the report -------------------------------------------------------------------------


def run(
    make: Callable[..., tuple[Task, str]],
    title: str,
    options: Options,
    *,
    least: float = 0.0,
    distributed: bool = True,
) -> Part:
    """Measures one model.

    Args:
        make: the model and what goes with it, and its name.
        title: of the part.
        options: of the command line.
        least: seconds for each peer in each round, see ``measured``.
        distributed: whether the model can do without skips.
    """
    total = 1 if options.quick else PARTITIONS
    with threads(total):
        task, name = make(options.quick)
        repeats = options.rounds(11)
        part = Part(
            f"Peers on the CPU: {title}",
            f"{name}, {task.chunks} micro-batches, {PARTITIONS} partitions of "
            f"{' and '.join(map(str, task.balance))} layers; {repeats} rounds"
            + (f" of {least} s for each. " if least else ", one step of each in each. ")
            + (
                f"{total} intra-op threads in total for everybody: one worker has all of them, "
                f"{PARTITIONS} workers or processes share them out."
                if total >= PARTITIONS
                else "One intra-op thread for each worker and process."
            ),
            DEFINITIONS,
        )
        own = ours(task, PLACES, MODES, MODES)
        found = gathered(task, part, own, CPU, MODES)
        for peer in found.peers:
            seen = threads_seen(task, peer)
            found.extra[peer.label] = {"threads": seen}
        why = ranks_missing() if distributed else "it has no skips"
        if why is not None:
            part.notes.append(f"Skipped: torch.distributed.pipelining: {why}.")
            measured(found, Meter(), repeats, title, {}, least)
            return part
        each = total // PARTITIONS or 1
        with Ranks(each, work_of, make, options.quick, task.balance) as ranks:
            _enter(found, ranks, least)
            measured(found, Meter(), repeats, title, {}, least)
    return part


def work_of(make: Callable[..., tuple[Task, str]], quick: bool, balance: Sequence[int]) -> Work:
    """In a process of its own."""
    task, _ = make(quick, balance)
    return Work(task.model, task.x, task.target, task.loss, task.balance[0])


def _enter(found: Field, ranks: Ranks, least: float) -> None:
    """The ranks take part, once they were seen to do what the plain loop does."""
    task = found.task
    loop = plain(task)[0]
    expected = outcome(task, loop)
    times = steps_in(task, loop, least)
    for schedule in THEIRS:
        label = f"{DISTRIBUTED}, {schedule}"
        why = too_far(distance(ranks.outcome(schedule, task.chunks), expected), expected)
        if why is not None:
            found.part.notes.append(f"Not measured: {label}: {why}.")
            continue
        columns = {
            "library": DISTRIBUTED,
            "how": schedule,
            "workers": f"{PARTITIONS} processes",
            "checkpoint": "never",
        }
        found.jobs[label] = columns, partial(ranks.step, schedule, task.chunks, times)
        tell(found.part, f"{DISTRIBUTED} was seen to do so in single precision.")
        found.extra[label] = {"threads": " + ".join([str(ranks.threads)] * PARTITIONS)}


PARTS: dict[str, Callable[[Options], Part]] = {
    "tiny": lambda options: run(
        tiny_task, "tiny layers", options, least=0.002 if options.quick else 0.05
    ),
    "linear": partial(run, linear_task, "large linear layers"),
    "resnext": partial(run, resnext_task, "a small ResNeXt with skips", distributed=False),
    "transformer": partial(run, transformer_task, "a small transformer"),
}
