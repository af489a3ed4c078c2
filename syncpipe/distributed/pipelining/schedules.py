"""The schedules of ``torch.distributed.pipelining`` over our stages.

Each is a subclass of PyTorch's own class, with a ``step`` around it that checks what it is given
before anything is sent, counts losses as ``train_batch`` does, adds up the gradients of tied
weights, and ends all ranks with a reason when one fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import pipelining

from syncpipe.data import described, gather, map_tensors, scatter_pair, tensors_in
from syncpipe.distributed.pipelining.module import StageModule
from syncpipe.layers.conversion.sequential import call_input
from syncpipe.layers.placement import check_input
from syncpipe.training.loss import Loss, Objective
from syncpipe.training.sources import Source

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


def make(owner: Any, name: str, chunks: int, loss: Loss | None, group: Any) -> Any:
    """A schedule over the stages of this rank.

    Args:
        owner: the ``Stages`` of this rank.
        name: one of ``SCHEDULES``; that it fits the placement has been checked.
        chunks: the number of micro-batches.
        loss: the loss function; None for a schedule that only goes forward.
        group: over which gradients are averaged besides; None for none.
    """
    kind, placement = SCHEDULES[name]
    known = [base.__name__ for base in getattr(pipelining, kind).__mro__]
    sends_to_itself = placement == "v" and "_PipelineScheduleRuntime" not in known
    if sends_to_itself and owner.peers.by_host and len(owner.balance) > 2:
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
    _check_private(schedule, owner.stages, placement)
    schedule._syncpipe = _Step(owner, name, chunks, loss, group)
    if "return_outputs" in inspect.signature(getattr(pipelining, kind).step).parameters:
        schedule._syncpipe.quiet = {"return_outputs": False}
    return schedule


def _check_private(schedule: Any, stages: list[Any], placement: str) -> None:
    """Refuses a PyTorch in which the private attributes that we use are other ones.

    Raises:
        RuntimeError: with its version.
    """
    missing = [name for name in _OF_SCHEDULES if not hasattr(schedule, name)]
    missing += [name for name in _OF_STAGES if not all(hasattr(each, name) for each in stages)]
    if placement != "one" and not any(name in vars(schedule) for name in _ORDERS):
        missing.append(_ORDERS[-1])
    if missing:
        raise RuntimeError(
            f"torch.distributed.pipelining of PyTorch {torch.__version__} has no "
            f"{', '.join(missing)}, which stage() needs to evaluate and to start: use another "
            "version of PyTorch (2.13 is tested), or a later syncpipe"
        )


_OF_SCHEDULES = ("_has_backward",)
_OF_STAGES = ("_get_init_p2p_neighbors_ops",)


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
        run, peers = self._syncpipe, self._syncpipe.owner.peers
        backward = self._has_backward
        step: Callable[..., Any] = super().step  # type: ignore[misc]
        with_target = "" if backward or target is None else " with a loss"
        peers.begin(f"{'step' if backward else 'eval'}(){with_target} of {run.what}", watched=True)
        try:
            run.prepare(args, kwargs, target, backward, return_outputs)
        except BaseException as error:
            run.forget()
            peers.refused(error)
            raise
        _reset(self, backward)
        shared = run.owner.shared
        try:
            before = shared.set_aside() if backward else []
            with nullcontext() if backward else _forward_only(self):
                step(*run.first, target=run.index, **run.quiet)
            if backward:
                shared.add_up(before)
            found = run.results(losses, return_outputs)
        except BaseException as error:
            cause = error.__cause__
            if cause is not None and "failed to run" in str(error).lower():
                error = cause  # PyTorch wraps it to show the arguments
            raise peers.fail(error) from None
        finally:
            run.forget()
        peers.finish()
        return found

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a mini-batch forward only, without gradients; arguments as for ``step``.

        Without ``target`` there is no loss. Modules stay in the mode in which they are.
        """
        backward, self._has_backward = self._has_backward, False
        try:
            return self.step(*args, **kwargs)
        finally:
            self._has_backward = backward

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """PyTorch's vote whether all shapes are known: they are.

        Gloo ends a process that gets the vote of another one in the place of a message.
        """
        from torch.distributed.pipelining._utils import InferenceMode  # PyTorch 2.12 or later

        if not (p2p_done or self._syncpipe.owner.peers.by_host):
            super()._warmup_p2p(stages, has_backward, p2p_done)  # type: ignore[misc]
        for each in stages:
            each._inference_mode = InferenceMode.STATIC


class _Step:
    """One mini-batch on this rank.

    Args:
        owner: the ``Stages`` of this rank.
        name: of the schedule.
        chunks: number of micro-batches.
        loss: the loss function.
        group: over which gradients are averaged besides.
    """

    def __init__(
        self, owner: Any, name: str, chunks: int, loss: Loss | None, group: dist.ProcessGroup | None
    ) -> None:
        self.owner, self.chunks, self._loss, self._group = owner, chunks, loss, group
        self.what = f"{name!r} with {chunks} micro-batches"
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
        # Also where it is not needed, so that all ranks refuse a batch that all are given.
        for what, given in ("input", (args, kwargs)), ("target", target):
            for tensor in tensors_in(given)[:1]:
                whole = self.chunks * self.owner.size
                if tensor.dim() and (len(tensor) % whole or not len(tensor)):
                    raise ValueError(self._fit(what, len(tensor)))
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
            sizes = [self.owner.size] * len(targets)
            source = Source([None] * len(targets), targets, sizes)
            objective = None if loss is None else Objective(loss, source)
            if objective is not None and objective.known is not None and self._group is not None:
                objective.known = objective.known[0], self._mean(objective.known[1])
            scale = 1 if self._group is None or loss is None or loss.reduction != "sum" else None
            scale = dist.get_world_size(self._group) if scale is None else scale
            self._head = last.head = _Head(objective, source, backward, keep, scale)

    def _mean(self, total: Any) -> Tensor:
        """The mean of the weights of the mini-batches over which gradients are averaged."""
        mean = torch.as_tensor(total, dtype=torch.float32).to(self.owner.device, copy=True)
        dist.all_reduce(mean, group=self._group)
        return mean / dist.get_world_size(self._group)

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
        scale: by what losses are multiplied.

    Attributes:
        outputs: detached.
        shares: what micro-batches go back from.
    """

    def __init__(
        self,
        objective: Objective | None,
        source: Source,
        backward: bool,
        keep: bool,
        scale: int,
    ) -> None:
        self._objective, self._source, self._scale = objective, source, scale
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
        root = self._objective.root(i, result, output, target)
        root = root * self._scale if self._scale != 1 else root
        if self._backward and not root.requires_grad:
            raise RuntimeError(
                "the loss does not require grad, so there is nothing to train: loss_fn, or a layer "
                "of the last stage, detaches what it is given"
            )
        self.shares.append(root)
        return torch.stack([root.to(torch.float32)])


@contextmanager
def _forward_only(schedule: Any) -> Iterator[None]:
    """Takes what goes back out of a schedule; PyTorch leaves halves of backward in."""
    kept = {name: vars(schedule)[name] for name in _ORDERS if name in vars(schedule)}
    for name, orders in kept.items():
        fill = name == "pipeline_order"  # which goes by time steps
        found = {rank: _forward_actions(actions, fill) for rank, actions in orders.items()}
        setattr(schedule, name, found)
    try:
        with torch.no_grad():
            yield
    finally:
        vars(schedule).update(kept)


_ORDERS = ("pipeline_order", "pipeline_order_with_comms")
_FORWARD = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")


def _forward_actions(actions: list[Any], fill: bool) -> list[Any]:
    found: list[Any] = []
    for action in actions:
        parts = [] if action is None else getattr(action, "sub_actions", None) or [action]
        kept = [part for part in parts if part.computation_type.value in _FORWARD]
        found += kept[:1] or [None] if fill else kept
    return found


def _reset(schedule: Any, backward: bool) -> None:
    """Lets PyTorch 2.9 to 2.11 prepare anew for training after evaluation, as later ones do."""
    if vars(schedule).get("_syncpipe_backward") not in (None, backward):
        for name in ("_stage_initialized", "_stages_initialized"):
            if name in vars(schedule):
                setattr(schedule, name, False)
    schedule._syncpipe_backward = backward
