"""One training step, made in the same way for each library that is compared.

All of them train the very same layers: a step begins with gradients of None and leaves gradients
in the one model, whoever makes it.
"""

from __future__ import annotations

import atexit
import importlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.skips import translated
from syncpipe import Pipe

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor], Tensor]

OURS, LOOP, WHOLE = "syncpipe", "plain loop", "plain, whole mini-batch"
#: By the name on the package index: the module and name of its pipe, and the module of its skips.
LIBRARIES = {
    "torchgpipe": ("torchgpipe", "GPipe", "torchgpipe.skip"),
    "fairscale": ("fairscale.nn", "Pipe", "fairscale.nn.pipe.skip"),
}
DISTRIBUTED = "torch.distributed"
#: What ``pipe(x)`` and ``backward()`` are called in the tables, and schedules of ``train_batch``.
CALL = "pipe(x)"
SCHEDULES = ("gpipe", "1f1b", "zb_h1")


@dataclass(frozen=True)
class Task:
    """What everybody trains.

    Attributes:
        model: the layers, all on the device of ``x``.
        x: the mini-batch.
        target: what ``loss`` takes as its second argument.
        loss: a mean over the samples.
        chunks: number of micro-batches, of the same size.
        balance: how many layers each partition has.
    """

    model: nn.Sequential
    x: Tensor
    target: Tensor
    loss: Loss
    chunks: int
    balance: Sequence[int]

    def small(self) -> Task:
        """The same with one sample in each micro-batch, in double precision."""
        x, target = self.x[: self.chunks], self.target[: self.chunks]
        x = x.double() if x.is_floating_point() else x
        return replace(self, x=x, target=target.double() if target.is_floating_point() else target)

    def step(self, peer: Peer) -> Tensor:
        """A training step into gradients of None; returns the loss."""
        self.model.zero_grad()
        return peer.step(self.x, self.target)


@dataclass(frozen=True)
class Peer:
    """Somebody who trains it.

    Attributes:
        library: whose step it is.
        how: by which call and schedule.
        workers: on how many workers, in words; empty for the plain ones.
        checkpoint: the mode of re-materialization; empty where there is none.
        step: forward, loss and backward of a mini-batch and its target, gradients added.
    """

    library: str
    how: str
    workers: str
    checkpoint: str
    step: Step

    @property
    def label(self) -> str:
        """The name of this peer, which nobody else has."""
        return ", ".join(filter(None, self.columns.values()))

    @property
    def columns(self) -> dict[str, str]:
        """The first columns of its row."""
        return {
            "library": self.library,
            "how": self.how,
            "workers": self.workers,
            "checkpoint": self.checkpoint,
        }


# -- without any library --------------------------------------------------------------------------


def plain(task: Task) -> list[Peer]:
    """The loop over the micro-batches, and the model on the whole mini-batch."""

    def loop(x: Tensor, target: Tensor) -> Tensor:
        losses = []
        for c, t in zip(x.chunk(task.chunks), target.chunk(task.chunks), strict=True):
            loss = task.loss(task.model(c), t) * (len(c) / len(x))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return [Peer(LOOP, "", "", "", loop), Peer(WHOLE, "", "", "", called(task.model, task.loss))]


def called(model: Callable[[Tensor], Tensor], loss_of: Loss) -> Step:
    """Forward of a mini-batch, its loss, one backward."""

    def step(x: Tensor, target: Tensor) -> Tensor:
        loss = loss_of(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


# -- ours -----------------------------------------------------------------------------------------


def ours(
    task: Task,
    places: Mapping[str, Sequence[Any]],
    modes: Sequence[str],
    training_modes: Sequence[str],
) -> Iterator[Peer]:
    """``pipe(x)`` with ``backward()``, and ``train_batch`` under each schedule.

    Args:
        task: what is trained.
        places: by what they are called, the devices of the partitions.
        modes: of re-materialization, for ``pipe(x)``.
        training_modes: the same for ``train_batch``.
    """
    for place, devices in places.items():
        for mode in modes:
            step = called(pipe(task, devices, mode), task.loss)
            yield Peer(OURS, CALL, place, mode, step)
        for schedule in SCHEDULES:
            for mode in training_modes:
                step = trained(pipe(task, devices, mode), task.loss, schedule)
                yield Peer(OURS, f"train_batch {schedule}", place, mode, step)


def pipe(task: Task, devices: Sequence[Any], mode: str) -> Pipe:
    """A pipe of our own over the layers of the task."""
    return Pipe(task.model, task.balance, devices=devices, chunks=task.chunks, checkpoint=mode)


def trained(pipe: Pipe, loss: Loss, schedule: str) -> Step:
    """A step of ``train_batch``."""

    def step(x: Tensor, target: Tensor) -> Tensor:
        found: Tensor = pipe.train_batch(x, target, loss_fn=loss, schedule=schedule)
        return found

    return step


# -- theirs ---------------------------------------------------------------------------------------


def missing(library: str) -> str | None:
    """Why a library cannot be used here; None if it can."""
    try:
        for module in (LIBRARIES[library][0], LIBRARIES[library][2]):
            _imported(module)
    except ModuleNotFoundError as error:
        if error.name == library:
            return f'it is not installed; pip install "{library}"'
        return f"it cannot be imported: {error}"
    except Exception as error:
        return f"it cannot be imported: {type(error).__name__}: {error}"
    return None


def theirs(task: Task, library: str, device: torch.device, modes: Sequence[str]) -> Iterator[Peer]:
    """The pipe of an older library with ``backward()``, all partitions on one device."""
    module, name, skips = LIBRARIES[library]
    made = getattr(_imported(module), name)
    model = translated(task.model, _imported(skips), task.x[:1])
    for mode in modes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated is why we are here
            pipe = made(
                model,
                list(task.balance),
                devices=[device] * len(task.balance),
                chunks=task.chunks,
                checkpoint=mode,
            )
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
