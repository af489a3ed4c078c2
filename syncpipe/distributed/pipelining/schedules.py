"""The schedules of ``torch.distributed.pipelining`` over our stages.

Each is a subclass of PyTorch's own class, with a ``step`` around it that checks what it is given
on all ranks before anything is sent, counts losses as ``train_batch`` does, adds up the gradients
of tied weights, and ends all ranks with a reason when one fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from syncpipe.distributed.pipelining.module import StageModule
from syncpipe.distributed.pipelining.together import Together
from syncpipe.layers.conversion.sequential import call_input
from syncpipe.layers.placement import check_input
from syncpipe.microbatch import gather, scatter_pair
from syncpipe.training.loss.known import Loss
from syncpipe.training.loss.objective import Objective
from syncpipe.training.sources import Source
from syncpipe.training.train import objective_of
from syncpipe.tree import described, map_tensors, tensors_in

__all__ = ["SCHEDULES", "make"]

#: Our names; PyTorch's class, and whether it is for one stage on each rank, several, or two in a V.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", "one"),
    "1f1b": ("Schedule1F1B", "one"),
    "looped_bfs": ("ScheduleLoopedBFS", "loop"),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", "loop"),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "v"),
    "dualpipev": ("ScheduleDualPipeV", "v"),
}


def make(owner: Any, name: str, chunks: int, loss: Loss | None) -> Any:
    """A schedule over the stages of this rank.

    Args:
        owner: the ``Stages`` of this rank.
        name: one of ``SCHEDULES``; that it fits the placement has been checked.
        chunks: the number of micro-batches.
        loss: the loss function; None for a schedule that only goes forward.
    """
    kind, placement = SCHEDULES[name]
    sends_to_itself = placement == "v" and not issubclass(
        getattr(pipelining, kind), _PipelineScheduleRuntime
    )
    if sends_to_itself and owner.together.by_host and len(owner.balance) > 2:
        raise ValueError(
            f"{name!r} of PyTorch {torch.__version__} sends from a rank to itself, which gloo "
            "cannot: take 'dualpipev', or a later PyTorch"
        )
    stages = owner.stages[0] if placement == "one" else owner.stages
    # The last stage gives the loss already, for outputs and targets may be any trees. It counts
    # as the mini-batch's does, so there is nothing left to be divided.
    schedule = _checked(getattr(pipelining, kind))(
        stages, chunks, loss_fn=None if loss is None else _found, scale_grads=False
    )
    schedule._syncpipe = _Step(owner, chunks, loss)
    if "return_outputs" in inspect.signature(getattr(pipelining, kind).step).parameters:
        schedule._syncpipe.quiet = {"return_outputs": False}
    return schedule


def _found(loss: Tensor, _: Tensor) -> Tensor:
    return loss.sum()


@cache
def _checked(kind: type) -> type:
    return type(kind.__name__, (_Checked, kind), {"__module__": __name__})


class _Checked:
    """What comes before and after a step of PyTorch's schedule."""

    _syncpipe: _Step
    _has_backward: bool  # PyTorch's

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Runs a mini-batch; called on all ranks, with the same arguments if you like.

        Args:
            args: the input, on the rank of the first stage, on its device; elsewhere it is not
                looked at. A tensor ``[batch, ...]``, or what ``Pipe`` takes.
            target: likewise on the rank of the last stage.
            losses: a list, which then holds those of the micro-batches, detached, on the rank of
                the last stage; each with its share, so that their sum is the mini-batch's.
            return_outputs: whether to return the outputs.
            kwargs: keyword arguments of a model made by ``syncpipe.sequential``.

        Returns:
            The outputs on the rank of the last stage, detached; None elsewhere.

        Raises:
            TypeError, ValueError: the arguments do not fit; nothing has been sent, and all ranks
                can go on.
            RuntimeError: another rank has refused its arguments, or has failed.
        """
        run = self._syncpipe
        owner, together = run.owner, run.owner.together
        together.check()
        backward = self._has_backward
        step: Callable[..., Any] = super().step  # type: ignore[misc]
        try:
            together.agree(lambda: run.prepare(args, kwargs, target, backward, return_outputs))
        except BaseException:
            run.forget()
            raise
        _reset(self, backward)
        shared = owner.shared if backward else None
        before = [] if shared is None else shared.set_aside(owner)
        try:
            with nullcontext() if backward else torch.no_grad():
                step(*run.first, target=run.index, **run.quiet)
            if shared is not None:
                shared.add_up(owner, before)
            return run.results(losses, return_outputs)
        except BaseException as error:
            owner.let_go()
            raise _to_raise(error, together) from None
        finally:
            run.forget()

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a mini-batch forward only, without gradients; arguments as for ``step``.

        Without ``target`` there is no loss. Modules stay in the mode in which they are.
        """
        backward, self._has_backward = self._has_backward, False
        try:
            return self.step(*args, **kwargs)
        finally:
            self._has_backward = backward


class _Step:
    """One mini-batch on this rank.

    Args:
        owner: the ``Stages`` of this rank.
        chunks: number of micro-batches.
        loss: the loss function.
    """

    def __init__(self, owner: Any, chunks: int, loss: Loss | None) -> None:
        self.owner, self.chunks, self._loss = owner, chunks, loss
        self._head: _Head | None = None
        #: What PyTorch cuts: the numbers of the micro-batches.
        self.index = torch.arange(chunks)
        self.first = () if owner.first is None else (self.index,)
        self.quiet: dict[str, Any] = {}  # outputs are kept here, for they may be any trees

    def prepare(self, args: Any, kwargs: Any, target: Any, backward: bool, keep: bool) -> None:
        """Checks what this rank was given, and lays it where its stages find it."""
        if backward and not torch.is_grad_enabled():
            raise RuntimeError(
                "step() needs gradients, but grad mode is off (torch.no_grad or "
                "torch.inference_mode): call it outside of that, or use eval()"
            )
        first: StageModule | None = self.owner.first
        last: StageModule | None = self.owner.last
        if first is not None:
            value = call_input(self.owner, args, kwargs)
            check_input(value, self.owner.device)
            inputs, sizes = self._cut(value, "input")
            self._check(inputs[0], sizes)
            first.inputs = inputs
        if last is not None:
            targets = [None] * self.chunks
            if target is not None:
                targets, sizes = self._cut(target, "target")
                if any(size % self.owner.size for size in sizes):
                    raise ValueError(self._fit("target", sum(sizes)))
            loss = self._loss if backward or target is not None else None
            source = _Targets(targets, self.owner.size)
            objective = None if loss is None else objective_of(loss, source)
            self._head = last.head = _Head(objective, source, backward, keep)

    def _cut(self, value: Any, what: str) -> tuple[list[Any], list[int]]:
        pieces, _, sizes = scatter_pair(value, None, self.chunks)
        if len(pieces) != self.chunks or len(set(sizes)) > 1:
            raise ValueError(self._fit(what, sum(sizes)))
        return pieces, sizes

    def _check(self, piece: Any, sizes: list[int]) -> None:
        if set(sizes) != {self.owner.size}:
            raise ValueError(self._fit("input", sum(sizes)))
        found = [(t.dtype, t.shape) for t in tensors_in(piece)]
        if found != self.owner.sample:
            shown = ", ".join(map(described, tensors_in(piece)))
            raise ValueError(
                f"a micro-batch of the input is {shown}, which is not of the shape and dtype of "
                "the sample that stage(sample=...) was given: buffers of the others are made for it"
            )

    def _fit(self, what: str, total: int) -> str:
        size = self.owner.size
        return (
            f"the {what} has {total} samples, and chunks={self.chunks} micro-batches of {size} (as "
            f"of the sample) are {self.chunks * size}: between processes all micro-batches have "
            "one size. Give a batch of that size (DataLoader(..., drop_last=True)), or make the "
            f"stages with a sample of another one{self._hint(total)}"
        )

    def _hint(self, total: int) -> str:
        fits = total and total % self.chunks == 0
        return f" ({total // self.chunks} for this batch)" if fits else ""

    def results(self, losses: list[Any] | None, return_outputs: bool) -> Any:
        """What the caller gets."""
        if self._head is None:
            return None  # the last stage is on another rank
        if losses is not None:
            losses[:] = [share.detach() for share in self._head.shares]
        return gather(self._head.outputs) if return_outputs else None

    def forget(self) -> None:
        """Lets go of the mini-batch."""
        if self.owner.first is not None:
            self.owner.first.inputs = []
        if self.owner.last is not None:
            self.owner.last.head = None
        self._head = None


class _Head:
    """What the last stage does with its outputs, one micro-batch after another.

    Args:
        objective: puts the loss together; None where there is none.
        source: of the targets.
        backward: whether it goes back.
        keep: whether outputs are kept.

    Attributes:
        outputs: detached.
        shares: what micro-batches go back from.
    """

    def __init__(
        self, objective: Objective | None, source: Source, backward: bool, keep: bool
    ) -> None:
        self._objective, self._source = objective, source
        self._backward, self._keep = backward, keep
        self._calls = 0
        self.outputs: list[Any] = []
        self.shares: list[Tensor] = []

    def __call__(self, output: Any, device: torch.device) -> Tensor:
        """The loss, as the one value that PyTorch sees of the last stage."""
        i, self._calls = self._calls, self._calls + 1
        if self._keep:
            self.outputs.append(map_tensors(lambda tensors: [t.detach() for t in tensors], output))
        if self._objective is None:
            return torch.zeros(1, device=device)
        target = self._source.target(i)
        result = self._objective.call((output, target))
        if isinstance(result, tuple):
            raise TypeError(
                "loss_fn returned a tuple: between processes it returns the loss alone. Weights "
                "are given by weight=... of schedule(), which can be counted before anything runs"
            )
        root = self._objective.root(i, result, self._source.size(i), output, target)
        if self._backward and not root.requires_grad:
            raise RuntimeError(
                "the loss does not require grad, so there is nothing to train: loss_fn, or a layer "
                "of the last stage, detaches what it is given"
            )
        self.shares.append(root)
        return torch.stack([root.to(torch.float32)])


class _Targets(Source):
    """The targets of a mini-batch, and as many samples in each micro-batch."""

    def __init__(self, targets: list[Any], size: int) -> None:
        super().__init__(len(targets))
        self._targets, self._sizes = targets, [size] * len(targets)
        self.total = size * len(targets)


def _to_raise(error: BaseException, together: Together) -> BaseException:
    """The reason why a step has failed: what a layer raised here, or what another rank says.

    No frame may hold it in a circle with its traceback: there are references to the process group,
    which has to die with the last one, or else the others wait in it for ever.
    """
    cause = error.__cause__
    if cause is not None and ("failed to run" in str(error) or "Failed to run" in str(error)):
        error.__cause__ = None  # PyTorch wraps it to show the arguments
        error = cause
    instead = together.failed(error)
    return error if instead is None or not isinstance(error, Exception) else instead


def _reset(schedule: Any, backward: bool) -> None:
    """Lets PyTorch 2.9 to 2.11 prepare anew for training after evaluation, as later ones do."""
    if vars(schedule).get("_syncpipe_backward") not in (None, backward):
        for name in ("_stage_initialized", "_stages_initialized"):
            if name in vars(schedule):
                setattr(schedule, name, False)
    schedule._syncpipe_backward = backward
