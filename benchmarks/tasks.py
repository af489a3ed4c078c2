"""What is trained, who trains it, and whether all of them do the same.

All train the very same layers: a step begins with gradients of None and leaves gradients in the one
model, whoever makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor], Tensor]
#: What a training step leaves: the loss, and the gradients of all parameters in order.
Outcome = tuple[Tensor, list[Tensor]]

OURS, LOOP, WHOLE = "syncpipe", "plain loop", "plain, whole mini-batch"
#: What ``pipe(x)`` and ``backward()`` are called in the tables, and schedules of ``train_batch``.
CALL = "pipe(x)"
SCHEDULES = ("gpipe", "1f1b", "zb_h1")
#: How far gradients may be from the plain loop's, see ``distance``. A deep network with BatchNorm
#: makes a rounding error a million to a thousand million times as large: in single precision that
#: would hide any mistake, in double precision it hides none.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-4}


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
        name: what it is, in words.
    """

    model: nn.Sequential
    x: Tensor
    target: Tensor
    loss: Loss
    chunks: int
    balance: Sequence[int]
    name: str = ""

    def small(self) -> Task:
        """The same with one sample in each micro-batch, in double precision."""
        x, target = self.x[: self.chunks], self.target[: self.chunks]
        x = x.double() if x.is_floating_point() else x
        return replace(self, x=x, target=target.double() if target.is_floating_point() else target)

    def to(self, device: torch.device) -> Task:
        """The same, all of it on a device."""
        x, target = self.x.to(device), self.target.to(device)
        return replace(self, model=self.model.to(device), x=x, target=target)

    def step(self, peer: Peer) -> Tensor:
        """A training step into gradients of None; returns the loss."""
        self.model.zero_grad()
        return peer.step(self.x, self.target)

    def outcome(self, peer: Peer) -> Outcome:
        """What a training step leaves."""
        return self.step(peer), gradients(self.model)

    def pipe(self, devices: Sequence[Any], checkpoint: Any = "never", **options: Any) -> Pipe:
        """A pipe over the layers."""
        return Pipe(
            self.model, self.balance, devices=devices, chunks=self.chunks, checkpoint=checkpoint,
            **options,
        )  # fmt: skip

    def trained(self, label: str, devices: Sequence[Any], **options: Any) -> Peer:
        """``train_batch`` of a pipe over the layers."""
        return Peer(OURS, label, "", "", trained(self.pipe(devices, **options), self.loss))


@dataclass(frozen=True)
class Peer:
    """Somebody who trains it.

    Attributes:
        library: whose step it is.
        how: by which call and schedule.
        workers: on how many workers, in words; empty for the plain ones.
        checkpoint: the mode of recomputation; empty where there is none.
        step: forward, loss and backward of a mini-batch and its target, gradients added.
        time: measures a step, where it does not run in this process.
    """

    library: str
    how: str
    workers: str
    checkpoint: str
    step: Step
    time: Callable[[], float] | None = None

    @property
    def columns(self) -> dict[str, str]:
        """The first columns of its row."""
        names = ("library", "how", "workers", "checkpoint")
        return {name: getattr(self, name) for name in names}

    @property
    def label(self) -> str:
        """The name of this peer, which nobody else has."""
        return ", ".join(filter(None, self.columns.values()))


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


def trained(pipe: Pipe, loss: Loss, **options: Any) -> Step:
    """A step of ``train_batch``."""
    return lambda x, target: pipe.train_batch(x, target, loss_fn=loss, **options)


def ours(task: Task, places: Mapping[str, Sequence[Any]], modes: Sequence[str]) -> Iterator[Peer]:
    """``pipe(x)`` with ``backward()``, and ``train_batch`` under each schedule.

    Args:
        task: what is trained.
        places: by what they are called, the devices of the partitions.
        modes: of recomputation; ``"except_last"`` for ``pipe(x)`` only.
    """
    for place, devices in places.items():
        for mode in modes:
            yield Peer(OURS, CALL, place, mode, called(task.pipe(devices, mode), task.loss))
        for schedule in SCHEDULES:
            for mode in modes:
                if mode != "except_last":
                    step = trained(task.pipe(devices, mode), task.loss, schedule=schedule)
                    yield Peer(OURS, f"train_batch {schedule}", place, mode, step)


# -- whether they do the same ----------------------------------------------------------------------


def gradients(module: nn.Module) -> list[Tensor]:
    """Of all parameters in order; each has one."""
    found = []
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise SystemExit(f"{name} got no gradient; nothing measured")
        found.append(parameter.grad.clone())
    return found


def distance(got: Outcome, expected: Outcome) -> float:
    """The largest distance of the loss or a gradient, relative to the norm that it should have.

    A tensor whose norm is less than a thousandth of the largest one is measured by that instead:
    it may be zero but for rounding.
    """
    pairs = list(zip([got[0], *got[1]], [expected[0], *expected[1]], strict=True))
    norms = [float(wanted.norm()) for _, wanted in pairs]
    least = 1e-3 * max(norms)
    if any(found.shape != wanted.shape for found, wanted in pairs) or not least > 0:
        return float("inf")
    gaps = [float((found.to(wanted.device) - wanted).norm()) for found, wanted in pairs]
    far = [gap / max(norm, least) for gap, norm in zip(gaps, norms, strict=True)]
    return float("inf") if any(gap != gap for gap in far) else max(far)


def check(label: str, got: Outcome, expected: Outcome) -> float:
    """Refuses to measure something that computes something else; returns the distance.

    Raises:
        SystemExit: the loss or a gradient is not the plain loop's.
    """
    gap = distance(got, expected)
    if gap > TOLERANCE[expected[1][0].dtype]:
        raise SystemExit(
            f"{label}: its gradients are not the plain loop's (distance {gap:.1g}); "
            "nothing measured"
        )
    return gap


def checked(task: Task, peers: Sequence[Peer]) -> dict[str, Callable[[], Tensor]]:
    """A step of the plain loop and of each peer, by ``how``, all seen to do the same."""
    loop = plain(task)[0]
    expected = task.outcome(loop)
    for peer in peers:
        check(peer.how, task.outcome(peer), expected)
    named = {LOOP: loop, **{peer.how: peer for peer in peers}}
    return {name: lambda peer=peer: task.step(peer) for name, peer in named.items()}  # type: ignore[misc]


# -- what they train ------------------------------------------------------------------------------


def mlp(layers: int, width: int, batch: int, chunks: int, stages: int = 2) -> Task:
    """``layers`` times Linear and GELU; the same in every process."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(width, width), nn.GELU()] for _ in range(layers)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    balance, name = [2 * layers // stages] * stages, f"{layers} x (Linear({width}, {width}) + GELU)"
    x, target = torch.randn(2, batch, width)
    return Task(model, x, target, F.mse_loss, chunks, balance, f"{name}, batch {batch}")


def linears(layers: int, width: int, batch: int, chunks: int, stages: int = 2) -> Task:
    """So many layers that compute next to nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    name = f"{layers} x Linear({width}, {width}), batch {batch}"
    x, target = torch.randn(2, batch, width)
    return Task(model, x, target, F.mse_loss, chunks, [layers // stages] * stages, name)
