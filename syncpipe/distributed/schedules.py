"""The schedules of ``torch.distributed.pipelining`` over our stages.

Each is a subclass of PyTorch's class. Its ``step`` checks its arguments before anything is sent,
weights losses as ``train_batch`` does, adds up the gradients of tied weights, and raises on all
ranks, with the reason, if one rank fails.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from syncpipe.data.batches import gather, scatter_pair
from syncpipe.data.trees import described, map_tensors, tensors_in
from syncpipe.distributed.private import Warmup
from syncpipe.layers.conversion.signature import call_input, common_outputs, refresh
from syncpipe.layers.placement import check_input
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import draw_seed, put_back_states, states_of
from syncpipe.training.loss import Objective
from syncpipe.training.loss_check import LossCheck
from syncpipe.training.loss_function import Loss
from syncpipe.training.sources import Source

__all__ = ["SCHEDULES", "schedule_over"]

#: By our name, the name of PyTorch's class and the placement of stages that it needs.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", "one"),
    "1f1b": ("Schedule1F1B", "one"),
    "looped_bfs": ("ScheduleLoopedBFS", "loop"),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", "loop"),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "v"),
    "dualpipev": ("ScheduleDualPipeV", "v"),
}
_HALVES = ("interleaved_zero_bubble", "zbv", "dualpipev")  #: run backward in two halves
_NEEDS = {
    "one": "one stage on each rank: a balance with as many numbers as ranks",
    "loop": "stage(..., placement='loop')",
    "v": "two stages on each rank in a V: stage(..., placement='v'), 2 numbers for each rank",
}


def schedule_over(
    owner: Any, name: str, m: int, loss: Loss | None, group: dist.ProcessGroup | None,
    verify: bool | None,
) -> Any:  # fmt: skip
    """Makes a schedule over the ``Stages`` of a rank; ``group`` is that of ``data_parallel=``."""
    if name not in SCHEDULES:
        shown = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule {name!r} is unknown between processes: use one of {shown}")
    kind, needed = SCHEDULES[name]
    n, placement = len(owner.stages), owner.placement
    if not (needed == placement if n > 1 else needed in ("one", "loop")):
        raise ValueError(
            f"{name!r} needs {_NEEDS[needed]}. Here each rank has {n}, placed {placement!r}"
        )
    schedule = _with_mixin(_Checked, getattr(pipelining, kind))(
        *_schedule_arguments(owner.stages, needed, m, loss)
    )
    schedule._arguments, schedule._needed = (owner, name, m, loss), needed
    schedule._new_mini_batch = partial(_MiniBatch, owner, m, loss, group, verify)
    schedule._check_modules()
    return schedule


def _schedule_arguments(
    stages: list[Any], needed: str, m: int, loss: Loss | None
) -> tuple[Any, ...]:
    # The last stage returns the loss itself, because outputs and targets may be trees.
    function = None if loss is None else lambda loss, _: loss.sum()
    return stages[0] if needed == "one" else stages, m, function


@cache
def _with_mixin(mixin: type, kind: type) -> Any:
    return type(kind.__name__, (mixin, kind), {"__module__": __name__})


class _Checked:
    """A mixin that checks arguments, then runs an inner schedule made for the call's dtypes.

    Attributes:
        metrics: of the last call, on the rank of the last stage, combined as losses are.
        weighs: whether losses may come with weights.
    """

    _arguments: tuple[Any, str, int, Loss | None]  # owner, name, m, loss
    _needed: str
    _new_mini_batch: partial[_MiniBatch]
    _inner: tuple[Any, Any] = None, None  # the stages of the inner schedule, and that schedule
    metrics: dict[str, Any] | None = None
    weighs = _sharded = _replicated = False

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        global_loss: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs forward and backward of a mini-batch; called on all ranks.

        Args:
            args: the input, on the device of the first stage: a tensor ``[batch, ...]``, or what
                ``Pipe`` takes. Other ranks may pass it too; only its size is checked there.
            target: the target, likewise for the rank of the last stage.
            losses: a list that is filled, on the rank of the last stage, with the detached losses
                of the micro-batches. Each is its share: their sum is the mini-batch's loss.
            return_outputs: whether to return the outputs.
            global_loss: whether to fill ``losses`` on all ranks, with means over the ranks of
                ``data_parallel``.
            kwargs: keyword arguments of a model made by ``syncpipe.sequential``.

        Returns:
            The outputs on the rank of the last stage, detached; None elsewhere.

        Raises:
            TypeError, ValueError: an argument does not fit. If all ranks raise, all can go on.
            RuntimeError: another rank failed, refused its arguments or made a different call.
        """
        return self._mini_batch("step", losses, (args, kwargs, target), return_outputs, global_loss)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        global_loss: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs forward only. Arguments, outputs and errors are those of :meth:`step`."""
        return self._mini_batch("eval", losses, (args, kwargs, target), return_outputs, global_loss)

    def _mini_batch(
        self, what: str, losses: list[Any] | None, given: tuple[Any, Any, Any], keep: bool,
        global_loss: bool,
    ) -> Any:  # fmt: skip
        (owner, name, m, loss), index = self._arguments, torch.arange(self._arguments[2])
        backward = what == "step" and loss is not None
        under = "".join(f" under autocast of {kind} to {dtype}" for kind, dtype in owner.autocast())
        words = f"{what}() of {name!r} with {m} micro-batches{under}"
        words += " and a global loss" if global_loss else ""
        with owner._require_peers(what).call(words):
            self._check_modules()
            if backward and not torch.is_grad_enabled():
                raise RuntimeError("step() needs gradients, but grad mode is off: use eval()")
            if global_loss and (losses is None or loss is None):
                raise ValueError("global_loss=True needs losses=[], a list, and a loss_fn")
            batch = self._new_mini_batch(given, backward, keep)
            owner.peers.sent = True
            owner.connect()
            seed, cached = draw_seed(), torch.is_autocast_cache_enabled()
            drawn = states_of([torch.default_generator])
            factor = partial(self._common_factor, batch) if self.weighs else None
            try:
                run = getattr(self._schedule(), what)
                if self._sharded:  # a cached cast of a resharded weight belongs to no graph
                    torch.set_autocast_cache_enabled(False)
                with owner.combining_gradients(factor) if backward else torch.no_grad():
                    batch.begin(seed)
                    # _MiniBatch keeps the outputs, because they may be trees.
                    first = [] if owner.first is None else [index]
                    run(*first, target=index, return_outputs=False)
            except Exception as error:
                if error.__cause__ is not None and "failed to run" in str(error).lower():
                    own = error.__cause__  # PyTorch wraps it in one that shows the arguments
                    raise own from own.__cause__
                raise
            finally:
                # The seeds of later mini-batches stay equal on all ranks.
                put_back_states([torch.default_generator], drawn)
                torch.set_autocast_cache_enabled(cached)
                for part in owner.parts.values():
                    part.inputs, part.head = [], None
            self.metrics = None if owner.last is None else batch.finish(losses)
            if global_loss and losses is not None:
                everywhere = batch.losses_of_all(losses)
                owner.broadcast(everywhere)
                losses[:] = everywhere.unbind()
        if owner.last is None:
            return None
        return gather(batch.outputs, common_outputs(owner.last)) if keep else None

    def _schedule(self) -> Any:
        """PyTorch's schedule over the stages as they are connected now, cached."""
        owner, name, m, loss = self._arguments
        boundaries = [(part.inward, part.outward) for part in owner.parts.values()]
        stages = [*chain(*boundaries), *[each.submod for each in owner.stages]]
        if self._inner[0] != stages:
            kind, made = getattr(pipelining, SCHEDULES[name][0]), owner.pytorch_stages()
            arguments = _schedule_arguments(made, self._needed, m, loss)
            self._inner = stages, _with_mixin(Warmup, kind)(*arguments, scale_grads=False)
        return self._inner[1]

    def _check_modules(self) -> None:
        """Refuses, or adjusts, modules with which PyTorch's schedules give wrong gradients."""
        owner, name, *_ = self._arguments
        if isinstance(owner, FSDPModule):
            raise ValueError(
                "fully_shard(mine) shards the result of stage(), whose forward is not called: "
                "shard its stages, fully_shard(each.submod) for each in mine.stages"
            )
        parts = list(chain(*[stage.submod.modules() for stage in owner.stages]))
        self._sharded = any(isinstance(part, FSDPModule) for part in parts)
        groups = [p.process_group for p in parts if isinstance(p, DistributedDataParallel)]
        meshes = [getattr(p, "device_mesh", None) for p in owner.parameters() if self._sharded]
        self._replicated = any(each is not None and each.size() > 1 for each in [*groups, *meshes])
        for stage in owner.stages if name in _HALVES else ():
            parts = list(stage.submod.modules())
            if any(isinstance(part, DistributedDataParallel) for part in parts):
                raise ValueError(
                    f"{name!r} runs backward in halves, and stage {stage.stage_index} is in "
                    "DistributedDataParallel, which then misses the gradients of weights: use "
                    "'interleaved_1f1b' or '1f1b', or fully_shard(each.submod)"
                )
            sharded = [part for part in parts if isinstance(part, FSDPModule)]
            if sharded and not isinstance(stage.submod, FSDPModule):
                raise ValueError(
                    f"{name!r} runs backward in halves, and in stage {stage.stage_index} layers "
                    "are sharded but the stage is not, so gradients would be reduced for each "
                    "micro-batch: call fully_shard(each.submod) as well, after its layers"
                )
            for part in sharded:  # the second half needs the weights as forward had them
                part.set_reshard_after_forward(False, recurse=False)
            seen: dict[int, str] = {}
            for own, parameter in stage.submod.named_parameters(remove_duplicate=False):
                if (first := seen.setdefault(id(parameter), own)) != own:
                    raise ValueError(
                        f"{name!r} runs backward in halves, and {own!r} is the weight {first!r} of "
                        f"the same stage {stage.stage_index}, for which PyTorch's halves are "
                        "wrong: use 'interleaved_1f1b', or a balance that puts them on different "
                        "stages"
                    )

    def _common_factor(self, batch: _MiniBatch) -> Tensor:
        """The factor of the gradients if losses came with weights, from the last stage's rank."""
        owner = self._arguments[0]
        factor = batch.factor() if owner.last is not None else 1.0
        if batch.weighed and self._replicated and batch.group is None:
            raise ValueError(
                "losses came with weights, and stages are in fully_shard or "
                "DistributedDataParallel, which average gradients of several mini-batches: write "
                "schedule(..., data_parallel=mesh['dp']), so that weights are averaged as well"
            )
        factor = torch.as_tensor(factor).to(owner.device, torch.float64, copy=True).reshape(1)
        owner.broadcast(factor)
        return factor.float()


class _MiniBatch(Source):
    """A mini-batch on this rank: inputs of the first stage, targets and losses of the last one.

    ``outputs`` are detached outputs of the last stage. ``shares`` are the losses that the
    micro-batches run backward from.
    """

    _objective: Objective | None = None
    _check: LossCheck | None = None
    _cached_factor: Any = None

    def __init__(
        self, owner: Any, m: int, loss: Loss | None, group: dist.ProcessGroup | None,
        verify: bool | None, given: tuple[Any, Any, Any], backward: bool, keep: bool,
    ) -> None:  # fmt: skip
        super().__init__([None] * m, [None] * m, [owner.size] * m)
        args, kwargs, target = given
        first, last = owner.first, owner.last
        refresh(owner)
        self._owner, self._keep, self.group, self._scale = owner, keep, group, 1
        self.outputs: list[Any] = []
        self.shares: list[Tensor] = []
        # Also on ranks that do not need it, so that all ranks refuse a batch that all are given.
        for what, tree in ("input", (args, kwargs)), ("target", target):
            for tensor in tensors_in(tree)[:1]:
                total = len(tensor) if tensor.dim() else m * owner.size
                if not total or total % (m * owner.size):
                    raise ValueError(
                        f"the {what} has {total} samples, and chunks={m} micro-batches of "
                        f"{owner.size} (the size of the sample) are {m * owner.size}: between "
                        "processes all micro-batches have one size. Give a batch of that size "
                        "(DataLoader(..., drop_last=True)), or make stages with another sample"
                    )
        if first is not None:
            value = call_input(owner, args, kwargs, unpack=first.unpack)
            check_input(value, owner.device)
            self._parts, _, sizes = scatter_pair(value, None, m)
            found, sample = (
                list(map(described, tensors_in(tree))) for tree in (self._parts[0], owner.sample)
            )
            if found != sample or len(sizes) != m:
                raise ValueError(
                    f"a micro-batch of the input is {', '.join(found)}, and the sample of "
                    f"stage(sample=...) is {', '.join(sample)}: the other ranks expect its shapes "
                    "and dtypes. Give such inputs, or make stages with another sample"
                )
        if last is None:
            return
        if target is not None:
            self._targets = dict(enumerate(scatter_pair(target, None, m)[0]))
        if loss is None or not (backward or target is not None):
            return
        # All micro-batches have one shape, so weights by samples equal weights by elements.
        self._objective = Objective(replace(loss, count=None), self)
        self._draws = loss.draws
        if backward:
            self._check = owner.counts.check(self._objective, self.targets, verify)
        if group is not None and self._objective.is_sum:
            self._scale = dist.get_world_size(group)
        elif group is not None and self._objective.known_weights is not None:  # by the mean weight
            weights, whole = self._objective.known_weights
            self._objective.known_weights = weights, self._mean(whole)

    def begin(self, seed: int) -> None:
        owner = self._owner
        for part in owner.parts.values():
            part.begin(self.m, seed, owner.device)
        if owner.first is not None:
            owner.first.inputs = self._parts
        if owner.last is not None:
            owner.last.head = self._loss_of

    def _loss_of(self, i: int, output: Any) -> Tensor:
        """The loss of a micro-batch, which PyTorch takes for the output of the last stage."""
        if self._keep:
            self.outputs.append(map_tensors(lambda tensors: [t.detach() for t in tensors], output))
        objective, target = self._objective, self.target(i)
        if objective is None:
            return torch.zeros(1, device=self._owner.device)
        if self._check is not None:
            self._check.keep(i, output, target)
        loss = self._owner.last.run.drawing.loss
        try:
            result, self._draws = loss(i, objective.call_loss, (output, target), self._draws)
            root = objective.root(i, result, output, target) * self._scale
        except Exception as error:
            annotate(error, f"in loss_fn, micro-batch {i}")
            raise
        if objective.returns_weights and objective.divisor is not None:
            root = root * objective.divisor  # factor() divides by the weight of the whole step
        self.shares.append(root)
        return torch.stack([root.to(torch.float32)])

    @property
    def weighed(self) -> bool:
        return self._objective is not None and self._objective.returns_weights

    def factor(self) -> Any:
        """1 / the total weight, if losses came with weights; otherwise 1. Cached."""
        if self._cached_factor is None:
            self._cached_factor = 1.0
            if self._objective is not None and self._objective.returns_weights:
                whole = self._mean(self._objective.total())
                self._cached_factor = torch.where(whole == 0, 0.0, 1 / whole)
        return self._cached_factor

    def _mean(self, weight: Any) -> Tensor:
        """The mean of a weight over the ranks of ``group``."""
        mean = torch.as_tensor(weight, dtype=torch.float32).to(self._owner.device, copy=True)
        if self.group is not None:
            dist.all_reduce(mean, group=self.group)
            mean /= dist.get_world_size(self.group)
        return mean

    def losses_of_all(self, losses: list[Any]) -> Tensor:
        """The means of the losses over ``group``, ``[m]``; zeros if the last stage is elsewhere."""
        if self._owner.last is None:
            return torch.zeros(self.m, device=self._owner.device)
        return self._mean(torch.stack(losses))

    def finish(self, losses: list[Any] | None) -> dict[str, Any] | None:
        if self._objective is None:
            return None
        if losses is not None:
            losses[:] = [share.detach() * self.factor() for share in self.shares]
        if self._check is not None:
            common = common_outputs(self._owner.last)
            self._owner.counts.compare(self._check, common, draws=bool(self._draws))
        return self._objective.metrics()
