"""Peers side by side: the plain model, ours, torchgpipe, fairscale, torch.distributed.pipelining.

Four parts on the CPU: ``tiny`` (layers that compute next to nothing: the overhead), ``linear``
(8 x Linear(1024)), ``resnext`` (a small one) and ``transformer`` (a small one). Two on
one GPU, ``gpu-resnext101`` and ``gpu-gpt2``, which are skipped where there is none. In each part
all peers train the very same layers in every round, in an order that changes from round to round,
after they were seen to give the plain loop's gradients. Libraries that are missing are skipped, and
the report says so.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import ranks
from benchmarks.common import Group, Options, Part, Spread, number, rounds
from benchmarks.models import gpt2_small, resnet, resnext101_32x8d, small_resnext
from benchmarks.ranks import Ranks, Stages
from benchmarks.tasks import (
    CALL,
    OURS,
    TOLERANCE,
    WHOLE,
    Peer,
    Task,
    called,
    check,
    linears,
    mlp,
    ours,
    plain,
)
from syncpipe import Worker
from syncpipe.balance import balance_by_time
from syncpipe.commands.demo import threads

#: By the name on the package index: the module and name of its pipe.
LIBRARIES = {"torchgpipe": ("torchgpipe", "GPipe"), "fairscale": ("fairscale.nn", "Pipe")}
DISTRIBUTED = "torch.distributed"
OVER = {name: f"over {name}" for name in (*LIBRARIES, DISTRIBUTED)}
CPU = torch.device("cpu")
PARTITIONS = 2
MODES = ("never", "always")
PLACES = {"1 worker": ("cpu", "cpu"), "2 workers": ("cpu:0", "cpu:1")}
MIB = 2**20

_OVER = {
    "over the loop": "time over that of the plain loop over the same micro-batches, in the same "
    "round; the loop never recomputes.",
    "over torchgpipe, over fairscale": "time over theirs of the same checkpoint mode in the same "
    "round: below 1 ours is faster.",
    f"over {DISTRIBUTED}": "the same beside torch.distributed.pipelining: gpipe for `pipe(x)` and "
    "gpipe, 1f1b for 1f1b and zb_h1.",
}

# -- who takes part --------------------------------------------------------------------------------


def gathered(
    task: Task, part: Part, own: Iterable[Peer], device: torch.device, modes: Sequence[str]
) -> list[Peer]:
    """All that run here and give what the plain loop gives, which is the first; notes about others.

    Args:
        task: what is trained.
        part: where notes go.
        own: our own peers.
        device: for all partitions of the older libraries.
        modes: of recomputation that these are tried with.

    Raises:
        SystemExit: one of our own gives something else.
    """
    small, far = task.small(), [0.0]
    task.model.double()
    try:
        found = plain(task)
        small.step(found[0])
        expected = small.outcome(found[0])
        # BatchNorm on the whole mini-batch is another function, right as it is.
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in task.model.modules()):
            part.tell(f"'{WHOLE}' is not checked: its BatchNorm sees the whole mini-batch.")
        else:
            far.append(check(WHOLE, small.outcome(found[1]), expected))
        for peer in own:
            far.append(check(peer.label, small.outcome(peer), expected))
            found.append(peer)
        for library in LIBRARIES:
            why = missing(library)
            if why is not None:
                part.tell(f"Skipped: {library}: {why}.")
                continue
            try:
                for peer in theirs(small, library, device, modes):
                    far.append(check(peer.label, small.outcome(peer), expected))
                    found.append(peer)
            except (Exception, SystemExit) as error:  # theirs, not ours
                first = (str(error).splitlines() or [""])[0]
                told = f"{library} does not run here: {type(error).__name__}: {first}"
                part.tell(f"Not measured: {told}")
    finally:
        task.model.float()
        task.model.zero_grad()
    part.tell(
        "First each of them was seen to leave the plain loop's loss and gradients, in double "
        f"precision and on one sample in each micro-batch: all to within {number(max(far))} of "
        f"their norm ({TOLERANCE[torch.float64]:.0e} was allowed; it is rounding)."
    )
    return found


def missing(library: str) -> str | None:
    """Why a library cannot be used here; None if it can."""
    try:
        _imported(LIBRARIES[library][0])
    except ModuleNotFoundError as error:
        if error.name == library:
            return f'it is not installed; pip install "{library}"'
        return f"it cannot be imported: {error}"
    except Exception as error:
        return f"it cannot be imported: {type(error).__name__}: {error}"
    return None


def theirs(task: Task, library: str, device: torch.device, modes: Sequence[str]) -> Iterator[Peer]:
    """The pipe of an older library with ``backward()``, all partitions on one device."""
    module, name = LIBRARIES[library]
    made, balance = getattr(_imported(module), name), list(task.balance)
    for mode in modes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated is why we are here
            devices = [device] * len(balance)
            pipe = made(task.model, balance, devices=devices, chunks=task.chunks, checkpoint=mode)
        if hasattr(getattr(pipe, "pipeline", None), "in_queues"):
            _with_threads.add(pipe.pipeline)
        yield Peer(library, CALL, "1 worker", mode, called(pipe, task.loss))


#: fairscale's, whose __del__ waits for the answer of a thread: for ever, once the process ends.
_with_threads: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    for pipeline in list(_with_threads):
        pipeline.__del__()  # while its threads can still answer
        pipeline.in_queues, pipeline.out_queues = [], []  # nothing is left to wait for


def _imported(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def in_processes(task: Task, part: Part, others: Ranks, least: float) -> Iterator[Peer]:
    """torch.distributed's, once they were seen to do what the plain loop does."""
    loop = plain(task)[0]
    expected, times = task.outcome(loop), steps_in(task, loop, least)
    for schedule in ranks.SCHEDULES:
        take = partial(others.step, schedule, task.chunks, times)
        workers = f"{PARTITIONS} processes"
        peer = Peer(DISTRIBUTED, schedule, workers, "never", loop.step, take)
        try:
            parts = others.outcomes(schedule, task.chunks)
            gradients = [gradient for _, part in parts for gradient in part]
            check(peer.label, (parts[-1][0], gradients), expected)
        except SystemExit as error:
            part.tell(f"Not measured: {error}.")
            continue
        part.tell(f"{DISTRIBUTED} was seen to do so in single precision.")
        yield peer


# -- one beside the other --------------------------------------------------------------------------


def measured(
    part: Part,
    task: Task,
    peers: Sequence[Peer],
    repeats: int,
    label: str,
    *,
    first: Mapping[str, Any] | None = None,
    least: float = 0.0,
    device: torch.device = CPU,
) -> list[dict[str, Any]]:
    """Measures all of them in every round; a row for each, and where ours are behind.

    Args:
        part: gets the rows.
        task: what is trained.
        peers: who takes part.
        repeats: number of rounds.
        label: stands before the bar that shows how far it is.
        first: the first columns of all rows.
        least: seconds for each of them in each round; 0 for one step, however long.
        device: an accelerator is waited for, and its peak of memory measured.
    """
    first, peaks = first or {}, dict.fromkeys((peer.label for peer in peers), 0)
    peers = fitting(part, task, peers)
    jobs = {
        peer.label: peer.time or _job(task, peer, steps_in(task, peer, least), device, peaks)
        for peer in peers
    }
    samples = rounds(jobs, repeats, label)
    task.model.zero_grad()
    rows = []
    for peer in sorted(peers, key=lambda peer: peer.library == OURS):
        times = samples[peer.label]
        row: dict[str, Any] = {**first, **peer.columns}
        row["ms"] = Spread.of([1e3 * took for took in times])
        if device.type != "cpu":
            row["samples/s"] = Spread.of([len(task.x) / took for took in times])
            row["peak MiB"] = peaks[peer.label] / MIB
        row["over the loop"] = Spread.ratio(times, samples[peers[0].label])
        for library, other in counterparts(peers, peer).items():
            row[OVER[library]] = Spread.ratio(times, samples[other])
        rows.append(row)
    part.rows += rows
    where = "".join(f"{value} {key}, " for key, value in first.items())
    for library, column in OVER.items():
        ratios = {
            f"{row['how']}, {row['workers']}, {row['checkpoint']}": row[column].median
            for row in rows
            if column in row
        }
        if ratios:
            behind = [f"{name} ({number(r)})" for name, r in ratios.items() if r >= 1]
            told = f"**behind**: {'; '.join(behind)}" if behind else "none is behind"
            part.tell(f"{where}beside {library}, {len(ratios)} of our rows: {told}.")
    return rows


def fitting(part: Part, task: Task, peers: Sequence[Peer]) -> list[Peer]:
    """Those that have enough memory for a step; the others are told of."""
    fit = []
    for peer in peers:
        try:
            if peer.time is None:
                task.step(peer)
            fit.append(peer)
        except torch.OutOfMemoryError:
            part.tell(f"Out of memory: {peer.label}.")
        task.model.zero_grad()
        if peer not in fit:  # out here the traceback, and what it held, is gone
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
    return fit


def _job(
    task: Task, peer: Peer, times: int, device: torch.device, peaks: dict[str, int]
) -> Callable[[], float]:
    """Seconds of one step, the mean of so many; the peak of memory on the way."""
    accelerator = device.type != "cpu"

    def run() -> float:
        task.model.zero_grad()  # what the one before has left counts for nobody
        if accelerator:
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)
        start = time.perf_counter()
        for _ in range(times):
            task.step(peer)
        if accelerator:
            torch.accelerator.synchronize(device)
        took = time.perf_counter() - start
        if accelerator:
            most = torch.accelerator.max_memory_allocated(device)
            peaks[peer.label] = max(peaks[peer.label], most)
        return took / times

    return run


def steps_in(task: Task, peer: Peer, least: float) -> int:
    """How many steps take about so many seconds."""
    if least == 0:
        return 1
    for _ in range(3):
        task.step(peer)
    start = time.perf_counter()
    for _ in range(3):
        task.step(peer)
    return max(1, round(3 * least / (time.perf_counter() - start)))


def counterparts(peers: Sequence[Peer], mine: Peer) -> dict[str, str]:
    """For one of ours and each other library: its peer of the same mode, and schedule."""
    if mine.library != OURS:
        return {}
    kind = "gpipe" if mine.how in (CALL, "train_batch gpipe") else "1f1b"
    return {
        other.library: other.label
        for other in peers
        if other.library in OVER
        and other.checkpoint == mine.checkpoint
        and (other.library != DISTRIBUTED or other.how == kind)
    }


# -- models ----------------------------------------------------------------------------------------


def pictures(side: int, classes: int, batch: int) -> tuple[Tensor, Tensor]:
    """Pictures with a class each."""
    return torch.rand(batch, 3, side, side), torch.randint(classes, (batch,))


def sentences(words: int, length: int, batch: int) -> tuple[Tensor, Tensor]:
    """Tokens, and the tokens that follow them."""
    tokens = torch.randint(words, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over samples and positions."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def balanced(task: Task, partitions: int, quick: bool) -> Sequence[int]:
    """Partitions of equal time, as it was measured."""
    x, timeout = task.x[: len(task.x) // task.chunks], 0.05 if quick else 1.0
    return balance_by_time(partitions, task.model, x, timeout=timeout, progress=False)


def tiny_task(quick: bool) -> Task:
    """Layers that compute next to nothing."""
    return linears(4, 4, 4, 4) if quick else linears(4, 4, 8, 8)


def linear_task(quick: bool) -> Task:
    """Large matrices, all of one size."""
    return mlp(4, 32, 32, 4) if quick else mlp(8, 1024, 512, 8)


def resnext_task(quick: bool) -> Task:
    """A small ResNeXt."""
    batch, m = (8, 4) if quick else (128, 8)
    torch.manual_seed(0)
    model = small_resnext()
    x, target = torch.rand(batch, 1, 8, 8), torch.randint(10, (batch,))
    name = f"ResNeXt of 20 convolutions (a small ResNeXt), batch {batch}, 8x8 pixels"
    return Task(model, x, target, F.cross_entropy, m, [4, len(model) - 4], name)


def transformer_task(quick: bool) -> Task:
    """A small transformer that predicts the next token."""
    layers, width, words, length, batch, m = (
        (2, 16, 50, 8, 8, 4) if quick else (4, 256, 1000, 64, 16, 8)
    )
    torch.manual_seed(0)
    model = gpt2_small(layers=layers, width=width, heads=4, vocabulary=words, length=length)
    x, target = sentences(words, length, batch)
    name = f"transformer as GPT-2 is, {layers} blocks of width {width}, {words} words, batch "
    name += f"{batch} x {length} tokens"
    return Task(model, x, target, next_token, m, [layers + 1, layers + 2], name)


def resnext101_task(quick: bool) -> Task:
    """ResNeXt-101 32x8d, 224x224 pixels."""
    if quick:
        model = resnet((1, 1, 1, 1), channels=8, groups=2, group_width=16, num_classes=10)
        return Task(model, *pictures(64, 10, 16), F.cross_entropy, 8, [], "a small ResNeXt")
    samples, name = pictures(224, 1000, 64), "ResNeXt-101 32x8d, 224x224 pixels"
    return Task(resnext101_32x8d(), *samples, F.cross_entropy, 8, [], name)


def gpt2_task(quick: bool) -> Task:
    """GPT-2 small, not tied, 1024 tokens."""
    if quick:
        model = gpt2_small(layers=2, width=16, heads=2, vocabulary=50, length=8)
        return Task(model, *sentences(50, 8, 16), next_token, 8, [], "GPT-2 of 2 blocks")
    name = "GPT-2 small, not tied, 1024 tokens"
    return Task(gpt2_small(), *sentences(50_257, 1024, 16), next_token, 8, [], name)


# -- parts of the report ---------------------------------------------------------------------------


def on_cpu(
    make: Callable[[bool], Task], title: str, options: Options, *, least: float = 0.0
) -> Part:
    """Measures one model in two partitions, with as many intra-op threads for everybody.

    Args:
        make: the model and what goes with it.
        title: of the part.
        options: of the command line.
        least: seconds for each peer in each round, see ``measured``.
    """
    total, repeats = 1 if options.quick else PARTITIONS, options.rounds(11)
    with threads(total):
        task = make(options.quick)
        part = Part(
            f"Peers on the CPU: {title}",
            f"{task.name}, {task.chunks} micro-batches, {PARTITIONS} partitions of "
            f"{' and '.join(map(str, task.balance))} layers; {repeats} rounds of "
            f"{f'{least} s' if least else 'one step'} for each. {total} intra-op threads in total "
            "for everybody (but one at least for each worker and process): one worker has all of "
            "them, several share them out.",
            {
                "workers": "threads (of torch.distributed: processes) that share out the "
                "partitions. torchgpipe and fairscale have one for all partitions on the CPU.",
                "ms": "measured: forward, loss and backward of one mini-batch, from gradients of "
                "None; of torch.distributed that of the rank that took longer, both having started "
                "from a barrier.",
                **_OVER,
            },
        )
        peers = gathered(task, part, ours(task, PLACES, MODES), CPU, MODES)
        why = ranks.missing()
        if why is not None:
            part.tell(f"Skipped: torch.distributed.pipelining: {why}.")
            measured(part, task, peers, repeats, title, least=least)
            return part
        with Ranks(total // PARTITIONS or 1, _stages, make, options.quick) as others:
            peers += in_processes(task, part, others, least)
            measured(part, task, peers, repeats, title, least=least)
    return part


def _stages(make: Callable[[bool], Task], quick: bool) -> Stages:
    """In a process of its own."""
    return Stages(make(quick))


def on_gpu(make: Callable[[bool], Task], title: str, options: Options) -> Part:
    """Measures one model in two and in four partitions on one GPU.

    One GPU cannot overlap partitions as several would, so this says what a pipe costs and saves
    there (the bookkeeping, the kernels of small micro-batches, the memory), not what several gain.
    """
    part = Part(f"Peers on one GPU: {title}", "")
    if not torch.cuda.is_available():
        part.notes = ["Skipped: PyTorch finds no CUDA GPU here."]
        return part
    device, repeats = torch.device("cuda", torch.cuda.current_device()), options.rounds(7)
    torch.manual_seed(0)
    task = make(options.quick).to(device)
    part.setting = (
        f"{task.name}, batch {len(task.x)}, {task.chunks} micro-batches, float32 with PyTorch's "
        f"defaults; all partitions on {torch.cuda.get_device_name(device)}; {repeats} rounds."
    )
    part.definitions = {
        **_OVER,
        "partitions": "all rows are measured once for each number of them, the plain ones as well.",
        "workers": "threads that share out the partitions, each with streams of its own; with one "
        "worker, ours runs on the calling thread and its current stream.",
        "peak MiB": "torch.accelerator.max_memory_allocated, the highest of all rounds.",
    }
    part.notes = ["torch.distributed.pipelining is left out: NCCL wants a GPU for each rank."]
    for n in (2, 4):
        each = replace(task, balance=balanced(task, n, options.quick))
        part.tell(f"Layers in {n} partitions: {', '.join(map(str, each.balance))}.")
        places: dict[str, Sequence[Any]] = {
            "1 worker": [device] * n,
            f"{n} workers": [Worker(device) for _ in range(n)],
        }
        modes = ("never", "except_last", "always")
        peers = gathered(each, part, ours(each, places, modes), device, modes)
        first = {"partitions": n}
        label = f"{title}, {n} partitions"
        measured(part, each, peers, repeats, label, first=first, device=device)
    return part


CPU_PARTS: dict[str, Callable[[Options], Part]] = {
    "tiny": lambda options: on_cpu(
        tiny_task, "tiny layers", options, least=0.002 if options.quick else 0.05
    ),
    "linear": partial(on_cpu, linear_task, "large linear layers"),
    "resnext": partial(on_cpu, resnext_task, "a small ResNeXt"),
    "transformer": partial(on_cpu, transformer_task, "a small transformer"),
}
GPU_PARTS: dict[str, Callable[[Options], Part]] = {
    "gpu-resnext101": partial(on_gpu, resnext101_task, "ResNeXt-101"),
    "gpu-gpt2": partial(on_gpu, gpt2_task, "GPT-2 small"),
}
GROUP = Group(
    "peers",
    "Peers side by side",
    {**CPU_PARTS, **GPU_PARTS},
    versions=tuple(LIBRARIES),
    one_thread=False,
)
