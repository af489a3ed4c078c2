"""The schedules of ``torch.distributed.pipelining`` over our stages.

Each is a subclass of PyTorch's own class, with a ``step`` around it that checks what it is given
before anything is sent, counts losses as ``train_batch`` does, adds up the gradients of tied
weights, and ends all ranks with a reason when one fails.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import pipelining

from syncpipe.data import described, gather, map_tensors, scatter_pair, tensors_in
from syncpipe.distributed.private import Warmup
from syncpipe.layers.conversion.signature import call_input, refresh
from syncpipe.layers.placement import check_input
from syncpipe.training.loss import Loss, Objective
from syncpipe.training.sources import Source

__all__ = ["SCHEDULES", "schedule_over"]

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


def schedule_over(
    owner: Any, name: str, m: int, loss: Loss | None, group: dist.ProcessGroup | None
) -> Any:
    """Of the stages of a rank, its ``owner``; gradients are averaged over ``group``."""
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
        m,
        loss_fn=None if loss is None else lambda loss, _: loss.sum(),
        scale_grads=False,
    )
    schedule._owner, schedule._name = owner, name
    schedule._m, schedule._trains = m, loss is not None
    schedule._begun = partial(_MiniBatch, owner, m, loss, group)
    return schedule


@cache
def _checked(kind: type) -> type:
    return type(kind.__name__, (_Checked, kind), {"__module__": __name__})


class _Checked(Warmup):
    _owner: Any
    _name: str
    _m: int
    _trains: bool
    _begun: partial[_MiniBatch]
    _running = False

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
        run, options = super().step, {"target": target, "return_outputs": return_outputs}  # type: ignore[misc]
        if self._running:  # by PyTorch's eval(), with any arguments that it has
            return run(*args, losses=losses, **options, **kwargs)
        return self._mini_batch("step", run, losses, args, kwargs, **options)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Runs forward only. Arguments, outputs and errors are those of :meth:`step`."""
        run, options = super().eval, {"target": target, "return_outputs": return_outputs}  # type: ignore[misc]
        return self._mini_batch("eval", run, losses, args, kwargs, **options)

    def _mini_batch(
        self, name: str, run: Any, losses: list[Any] | None, args: Any, kwargs: Any,
        *, target: Any, return_outputs: bool,
    ) -> Any:  # fmt: skip
        owner, m, backward = self._owner, self._m, name == "step" and self._trains
        index = torch.arange(m)  # what PyTorch cuts: the numbers of the micro-batches
        with owner.peers.call(f"{name}() of {self._name!r} with {m} micro-batches"):
            self._running = True
            try:
                batch = self._begun(args, kwargs, target, backward, return_outputs)
                owner.peers.sent = True
                with owner._added_up() if backward else torch.no_grad():
                    # Outputs are kept here, for they may be any trees.
                    given = [] if owner.first is None else [index]
                    run(*given, target=index, return_outputs=False)
            except Exception as error:
                if error.__cause__ is not None and "failed to run" in str(error).lower():
                    own = error.__cause__  # PyTorch wraps it to show the arguments
                    raise own from own.__cause__
                raise
            finally:
                self._running = False
                for part in owner.parts.values():
                    part.inputs, part.head = [], None
        if owner.last is None:
            return None
        if losses is not None:
            losses[:] = [share.detach() for share in batch.shares]
        return gather(batch.outputs) if return_outputs else None


class _MiniBatch(Source):
    """A mini-batch on this rank: cut for the first stage; its targets and losses for the last.

    ``outputs`` are those of the last stage, detached; ``shares`` what micro-batches go back from.
    """

    _objective: Objective | None = None

    def __init__(
        self, owner: Any, m: int, loss: Loss | None, group: dist.ProcessGroup | None,
        args: Any, kwargs: Any, target: Any, backward: bool, keep: bool,
    ) -> None:  # fmt: skip
        super().__init__([None] * m, [None] * m, [owner.size] * m)
        first, last = owner.first, owner.last
        refresh(owner)
        self._keep, self._calls, self._device = keep, 0, owner.device
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
        last.head, self._scale = self.root, 1
        if target is not None:
            self._targets = dict(enumerate(scatter_pair(target, None, m)[0]))
        if loss is None or not (backward or target is not None):
            return
        self._objective = Objective(loss, self)
        if group is not None and self._objective.adds_up:
            self._scale = dist.get_world_size(group)
        elif group is not None and self._objective.known is not None:  # by the mean weight
            weights, whole = self._objective.known
            mean = torch.as_tensor(whole, dtype=torch.float32).to(owner.device, copy=True)
            dist.all_reduce(mean, group=group)
            self._objective.known = weights, mean / dist.get_world_size(group)

    def root(self, output: Any) -> Tensor:
        """The loss of the next micro-batch: the one value that PyTorch sees of the last stage."""
        i, self._calls = self._calls, self._calls + 1
        if self._keep:
            self.outputs.append(map_tensors(lambda tensors: [t.detach() for t in tensors], output))
        if self._objective is None:
            return torch.zeros(1, device=self._device)
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
