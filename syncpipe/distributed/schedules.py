"""The schedules of ``torch.distributed.pipelining`` over our stages.

Each is a subclass of PyTorch's own class, with a ``step`` around it that checks what it is given
before anything is sent, counts losses as ``train_batch`` does, adds up the gradients of tied
weights, and ends all ranks with a reason when one fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import pipelining

from syncpipe.data import described, gather, map_tensors, scatter_pair, tensors_in
from syncpipe.layers.conversion.signature import call_input
from syncpipe.layers.placement import check_input
from syncpipe.training.loss import Loss, Objective
from syncpipe.training.sources import Source

__all__ = ["SCHEDULES", "Run", "schedule_of", "sends_from_host"]

#: Our names; PyTorch's class, and where the stages of a rank are.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", "one"),
    "1f1b": ("Schedule1F1B", "one"),
    "looped_bfs": ("ScheduleLoopedBFS", "loop"),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", "loop"),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "v"),
    "dualpipev": ("ScheduleDualPipeV", "v"),
}
_NEEDS = {
    "one": "one stage on each rank: a balance with as many numbers as ranks",
    "loop": "stage(..., placement='loop')",
    "v": "two stages on each rank in a V: stage(..., placement='v'), 2 numbers for each rank",
}


class Run(NamedTuple):
    """What the steps of a schedule have in common; gradients are averaged over ``group``."""

    owner: Any  # the `Stages` of this rank
    name: str
    chunks: int
    loss: Loss | None
    group: dist.ProcessGroup | None


def schedule_of(run: Run) -> Any:
    owner, name = run.owner, run.name
    if name not in SCHEDULES:
        shown = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule {name!r}: between processes there are {shown}")
    kind, needed = SCHEDULES[name]
    n, placement = len(owner.stages), owner.placement
    if not (needed == placement if n > 1 else needed in ("one", "loop")):
        raise ValueError(
            f"{name!r} needs {_NEEDS[needed]}. Here each rank has {n}, placed {placement!r}"
        )
    for stage in owner.stages if name in ("interleaved_zero_bubble", "zbv", "dualpipev") else []:
        seen: dict[int, str] = {}
        for own, parameter in stage.submod.named_parameters(remove_duplicate=False):
            if (first := seen.setdefault(id(parameter), own)) != own:
                raise ValueError(
                    f"{name!r} runs backward in halves, and {own!r} is the weight {first!r} of the "
                    f"same stage {stage.stage_index}, which PyTorch's halves get wrong: take "
                    "'interleaved_1f1b', or a balance that puts them on different stages"
                )
    # The last stage gives the loss already, for outputs and targets may be any trees. It counts
    # as the mini-batch's does, so there is nothing left to be divided.
    schedule = _checked(getattr(pipelining, kind))(
        owner.stages[0] if needed == "one" else owner.stages,
        run.chunks,
        loss_fn=None if run.loss is None else lambda loss, _: loss.sum(),
        scale_grads=False,
    )
    schedule._syncpipe = run
    return schedule


def sends_from_host(group: dist.ProcessGroup | None) -> bool:
    return "cpu:" in str(dist.get_backend_config(group))


@cache
def _checked(kind: type) -> type:
    return type(kind.__name__, (_Checked, kind), {"__module__": __name__})


class _Checked:
    _syncpipe: Run
    _has_backward: bool  # PyTorch's: not in eval()

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
            args: the input, on the rank of the first stage, on its device: a tensor
                ``[batch, ...]``, or what ``Pipe`` takes. Elsewhere it is not looked at.
            target: likewise on the rank of the last stage.
            losses: a list, which then holds those of the micro-batches, detached, on the rank of
                the last stage; each with its share, so that their sum is the mini-batch's.
            return_outputs: whether to return the outputs.
            kwargs: keyword arguments of a model made by ``syncpipe.sequential``.

        Returns:
            The outputs on the rank of the last stage, detached; None elsewhere.

        Raises:
            TypeError, ValueError: the arguments do not fit. Where all ranks refuse, all can go on.
            RuntimeError: another rank has failed, refused its arguments or does something else.
        """
        run, owner, backward = self._syncpipe, self._syncpipe.owner, self._has_backward
        first, last = owner.first, owner.last
        what = f"{'step' if backward else 'eval'}() of {run.name!r}"
        step: Any = super().step  # type: ignore[misc]
        index = torch.arange(run.chunks)  # what PyTorch cuts: the numbers of the micro-batches
        with owner.peers.call(f"{what} with {run.chunks} micro-batches"):
            try:
                batch = _MiniBatch(run, args, kwargs, target, backward, return_outputs)
                owner.peers.sent = True
                self._prepare_anew()
                with owner._added_up() if backward else _forward_only(self):
                    # Outputs are kept here, for they may be any trees.
                    given = [] if first is None else [index]
                    step(*given, target=index, return_outputs=False)
            except Exception as error:
                if error.__cause__ is not None and "failed to run" in str(error).lower():
                    own = error.__cause__  # PyTorch wraps it to show the arguments
                    raise own from own.__cause__
                raise
            finally:
                for part in owner.parts.values():
                    part.inputs, part.head = [], None
        if last is None:
            return None
        if losses is not None:
            losses[:] = [share.detach() for share in batch.shares]
        return gather(batch.outputs) if return_outputs else None

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a mini-batch as ``step`` does, but forward only."""
        before, self._has_backward = self._has_backward, False
        try:
            return self.step(*args, **kwargs)
        finally:
            self._has_backward = before

    def _prepare_anew(self) -> None:
        """Lets PyTorch 2.11 prepare for training after evaluation, as later ones do."""
        own = vars(self)
        for back in [name for name in own if name.endswith("_backward_initialized")]:
            if own[back] != self._has_backward:
                own |= {back: False, back.replace("backward", "forward"): False}

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """PyTorch's vote whether all shapes are known: they are.

        Gloo ends a process that gets the vote of another one in the place of a message.
        """
        from torch.distributed.pipelining._utils import InferenceMode  # PyTorch 2.12 or later

        if not (p2p_done or sends_from_host(stages[0].group)):
            super()._warmup_p2p(stages, has_backward, p2p_done)  # type: ignore[misc]
        for each in stages:
            each._inference_mode = InferenceMode.STATIC


class _MiniBatch(Source):
    """A mini-batch on this rank: cut for the first stage; its targets and losses for the last.

    ``outputs`` are those of the last stage, detached; ``shares`` what micro-batches go back from.
    """

    def __init__(
        self, run: Run, args: Any, kwargs: Any, target: Any, backward: bool, keep: bool
    ) -> None:
        owner, m = run.owner, run.chunks
        super().__init__([None] * m, [None] * m, [owner.size] * m)
        first, last = owner.first, owner.last
        self._keep, self._calls = keep, 0
        self.outputs: list[Any] = []
        self.shares: list[Tensor] = []
        # Also where it is not needed, so that all ranks refuse a batch that all are given.
        for what, given in ("input", (args, kwargs)), ("target", target):
            for tensor in tensors_in(given)[:1]:
                total = len(tensor) if tensor.dim() else m * owner.size
                if not total or total % (m * owner.size):
                    raise ValueError(
                        f"the {what} has {total} samples, and chunks={m} micro-batches of "
                        f"{owner.size} (as of the sample) are {m * owner.size}: between processes "
                        "all micro-batches have one size. Give a batch of that size "
                        "(DataLoader(..., drop_last=True)), or make the stages with a sample of "
                        "another one"
                    )
        if first is not None:
            value = call_input(owner, args, kwargs)
            check_input(value, owner.device)
            inputs, _, sizes = scatter_pair(value, None, m)
            found = list(map(described, tensors_in(inputs[0])))
            if found != owner.sample or len(sizes) != m:
                raise ValueError(
                    f"a micro-batch of the input is {', '.join(found)}, and the sample that "
                    f"stage(sample=...) was given {', '.join(owner.sample)}: buffers of the others "
                    "are made for its shapes and dtypes"
                )
            first.inputs = inputs
        if last is None:
            return
        if target is not None:
            self._targets = dict(enumerate(scatter_pair(target, None, m)[0]))
        loss = run.loss if backward or target is not None else None
        self._objective = None if loss is None else Objective(loss, self)
        self._scale = 1
        if self._objective is not None and run.group is not None:
            ranks = dist.get_world_size(run.group)
            self._scale = ranks if self._objective.adds_up else 1
            if self._objective.known is not None:  # the mean weight of what is averaged
                weights, whole = self._objective.known
                mean = torch.as_tensor(whole, dtype=torch.float32).to(owner.device, copy=True)
                dist.all_reduce(mean, group=run.group)
                self._objective.known = weights, mean / ranks
        last.head = self.root

    def root(self, output: Any, device: torch.device) -> Tensor:
        """The loss of the next micro-batch: the one value that PyTorch sees of the last stage."""
        i, self._calls = self._calls, self._calls + 1
        if self._keep:
            self.outputs.append(map_tensors(lambda tensors: [t.detach() for t in tensors], output))
        if self._objective is None:
            return torch.zeros(1, device=device)
        target = self.target(i)
        result = self._objective.call((output, target))
        if isinstance(result, tuple):
            raise TypeError(
                "loss_fn returned a tuple: between processes it returns the loss alone. Weights "
                "are given by weight=... of schedule(), which can be counted before anything runs"
            )
        root = self._objective.root(i, result, output, target) * self._scale
        self.shares.append(root)
        return torch.stack([root.to(torch.float32)])


@contextmanager
def _forward_only(schedule: Any) -> Iterator[None]:
    """Takes what goes back out of a schedule; PyTorch leaves halves of backward in."""
    orders: dict[int, list[Any]] = vars(schedule).get("pipeline_order_with_comms", {})
    before = dict(orders)
    forward = ("F", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    for rank, actions in before.items():
        parts = [part for action in actions for part in action.sub_actions or [action]]
        orders[rank] = [part for part in parts if part.computation_type.value in forward]
    try:
        with torch.no_grad():
            yield
    finally:
        orders.update(before)
