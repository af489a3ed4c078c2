"""The driver of a stream: ``pipe.train_stream(...)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from syncpipe.layers.ties import overlapping
from syncpipe.options import StageMode
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.interrupts import undone
from syncpipe.runtime.recorder import Recorder
from syncpipe.runtime.streams import moved
from syncpipe.schedules.stream import StreamSteps, Versions, version_used, versions_kept
from syncpipe.stages.call import Call
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.stage import Stage
from syncpipe.training.loss.head import LossHead
from syncpipe.training.loss.known import known_loss
from syncpipe.training.stream.source import Losses, StreamSource
from syncpipe.training.stream.task import StreamLeaves, StreamTask
from syncpipe.training.stream.weights import StageWeights, trained
from syncpipe.training.train import check_can_train

__all__ = ["OptimizerFactory", "Streamed", "stream"]

_MANY = 1 << 62  #: more micro-batches than there will ever be
#: Makes the optimizer of a stage.
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Streamed:
    """What ``Pipe.train_stream`` returns.

    Attributes:
        losses: of each mini-batch, shape ``[steps]``, detached, on the last device.
        metrics: for each mini-batch a dict of what the loss function returned beside its loss, or
            None.
        optimizers: for each stage its optimizer, None where nothing is trained: to go on with.
        versions: for each micro-batch (that is each mini-batch, but for ``"2bw"``) and each stage
            the version of the weights that was used there and back: the number of updates before.
        kept: for each stage the largest number of versions of its weights that it held at a time.
    """

    losses: Tensor
    metrics: list[dict[str, Any] | None]
    optimizers: list[Optimizer | None]
    versions: list[tuple[int, ...]]
    kept: tuple[int, ...]


def stream(
    pipeline: Pipeline,
    iterator: Iterator[Any],
    *,
    pack: Callable[[Any], Any],
    chunks: int,
    optimizer: OptimizerFactory | Sequence[Optimizer | None],
    loss_fn: Any,
    steps: int | None,
    target: Any,
    versions: Versions,
    loss_reduction: str | None,
    weight: Any,
    checkpoint: Sequence[StageMode],
    inline: bool,
    recorder: Recorder | None,
) -> Streamed:
    """Trains without a flush; see ``Pipe.train_stream``."""
    check_can_train(pipeline, "train_stream")
    loss = known_loss(loss_fn, loss_reduction, weight)
    n, replicas = pipeline.n, list(map(len, pipeline.numbers))
    if versions != "2bw":
        chunks = 1  # a mini-batch goes through in one piece
    elif chunks < n:
        raise ValueError(
            f"versions='2bw' with chunks={chunks} and {n} stages: two versions of the weights are "
            f"enough only for at least as many micro-batches as stages. Set pipe.chunks to {n} or "
            "more, or use versions='stashing'"
        )
    with pipeline.training:
        _check(pipeline, checkpoint, versions)
        optimizers = _optimizers(pipeline, optimizer)
        # The last stage goes back at once with every micro-batch, as others only with the last one.
        *others, last = checkpoint
        checkpoint = [*others, "never" if last == "except_last" else last]
        source = StreamSource(iterator, chunks, steps, target, pack, loss, max(replicas))
        losses: Any = Losses(source, loss)

        def weights_of(stage: Stage) -> StageWeights:
            most = versions_kept(stage.j, replicas, versions)
            rule = None
            if versions != "stashing":
                rule = partial(
                    version_used, j=stage.j, replicas=replicas, versions=versions, chunks=chunks
                )
            updates = optimizers[stage.j] if stage.number < n else None  # others follow the owner
            return StageWeights(stage, updates, most, rule, every=replicas[stage.j])

        weights = list(map(weights_of, pipeline.stages[:n]))
        copied: list[Tensor] = []  # by replicas

        def run() -> None:
            pipeline.streaming = n > 1
            if n > 1:  # casts of all stages go with an update of one, in the middle of a cell
                torch.set_autocast_cache_enabled(False)
            call = Call(pipeline, _MANY, checkpoint=checkpoint, inline=inline, recorder=recorder)
            if call.replicas is not None:
                call.replicas.let_train(pipeline.replicas)
            weights.extend(map(weights_of, pipeline.stages[n:]))
            copied.extend(chain.from_iterable(own.parameters for own in weights[n:]))
            for stage, own in zip(pipeline.stages, weights, strict=True):
                if own.several:
                    own.stand_in(call.runs[stage.number])
            leaves = StreamLeaves(call, weights)
            head = LossHead(call, losses, leaves, keep_outputs=False)
            task = StreamTask(call, source, head, leaves, weights)
            program: Any = StreamSteps(
                pipeline.edges, pipeline.numbers, pipeline.worker_of, call.rematerialized,
                source.extent, chunks,
            )  # fmt: skip
            try:
                call.run(program, task, None)
            except BaseException as error:
                updates = [own.updates for own in weights[:n]]
                annotate(error, f"in train_stream, after {updates} updates of the stages' weights")
                raise
            for stage, own in zip(pipeline.stages, weights, strict=True):
                call.release_to_caller(stage.number, own.state)

        undone(
            run,
            chain(
                map(setattr, [pipeline], ["streaming"], [False]),
                map(torch._C._set_grad_enabled, [False]),
                chain.from_iterable([own.undo() for own in weights]),
                map(setattr, copied, repeat("grad"), repeat(None)),
                map(torch.set_autocast_cache_enabled, [torch.is_autocast_cache_enabled()]),
                map(torch._C._set_grad_enabled, [True]),
            ),
        )
        if not losses.found:
            raise ValueError("data_iter gave no mini-batch, so there is nothing to train")
        found = [losses.found[batch] for batch in range(len(losses.found))]
        device = pipeline.workers[pipeline.worker_of[pipeline.results]].device
        own = [[weights[number] for number in numbers] for numbers in pipeline.numbers]
        with torch.no_grad():
            return Streamed(
                torch.stack([moved(loss, device) for loss, _ in found]),
                [metrics for _, metrics in found],
                optimizers,
                [
                    tuple([those[i % len(those)].used[i // len(those)] for those in own])
                    for i in range(sum(len(each.used) for each in own[0]))
                ],
                tuple([max(each.kept for each in those) for those in own]),
            )


def _check(pipeline: Pipeline, checkpoint: Sequence[StageMode], versions: Versions) -> None:
    """Refuses what has no meaning without a flush, or none yet.

    Raises:
        ValueError: with the way out.
    """
    n, replicas = pipeline.n, list(map(len, pipeline.numbers))
    if len(pipeline.stages) > n and versions != "stashing":
        raise ValueError(
            f"versions={versions!r} of a pipe with replicas={replicas}: stages with more replicas "
            "update less often, so there is no version of the whole model. Use "
            "versions='stashing', or give each stage one device"
        )
    if 1 < len(pipeline.workers) < len(pipeline.stages):
        raise ValueError(
            f"train_stream of {n} stages with replicas={replicas} on {len(pipeline.workers)} "
            "devices: give each stage, and each replica, a device of its own (or all of them one), "
            "or choose a balance with as many stages"
        )
    if ties := pipeline.shared.find():
        raise ValueError(
            f"{ties[0]} are one tensor, and stages {list(ties[0].stages)} have it: in train_stream "
            "each of them would compute with another version. Choose a balance that puts these "
            "layers into one stage, untie them, or use train_batch"
        )
    if any(stage.defers for stage in pipeline.stages):
        raise ValueError(
            "deferred_batch_norm=True moves running statistics when a mini-batch is through, and "
            "in train_stream the next one has begun by then: make the Pipe without it"
        )
    if "offload" in checkpoint:
        raise ValueError(
            "checkpoint='offload' fetches activations in the order of a mini-batch, and "
            "train_stream has no end to count from: use 'always' or 'never'"
        )
    for stage in pipeline.stages[:n]:
        script = any(isinstance(m, torch.jit.ScriptModule) for m in stage.partition.modules())
        if script and versions_kept(stage.j, replicas, versions) > 1:
            raise ValueError(
                f"stage {stage.j} has a layer in TorchScript, which computes with its own tensors "
                "only, and several versions of its weights: leave it as it is, or put it into a "
                "stage that has one version (the last one, with versions='stashing')"
            )
        if any(is_lazy(p) for p in stage.partition.parameters()):
            raise ValueError(
                f"stage {stage.j} has parameters without values, and its optimizer is made before "
                "the first mini-batch: run the plain model once before it is made a Pipe"
            )
    moved = {
        id(parameter)
        for stage in pipeline.stages[:n]
        if versions_kept(stage.j, replicas, versions) > 1
        for parameter in trained(stage.partition)
    }
    for a, b in overlapping([stage.partition for stage in pipeline.stages[:n]]):
        if moved & {id(a.tensor), id(b.tensor)}:
            raise ValueError(
                f"{a} and {b} are two tensors that have memory in common, which versions of them "
                "would not: make them one parameter (a.weight = b.weight), or copies of their own"
            )


def _optimizers(
    pipeline: Pipeline, optimizer: OptimizerFactory | Sequence[Optimizer | None]
) -> list[Optimizer | None]:
    """For each stage its optimizer.

    Raises:
        TypeError, ValueError: ``optimizer`` makes none, or they are not those of the stages.
    """
    parameters = [trained(stage.partition) for stage in pipeline.stages[: pipeline.n]]
    if not any(parameters):
        raise ValueError("there is nothing to train: all parameters of the pipe are frozen")
    if isinstance(optimizer, Optimizer) or not (
        callable(optimizer) or isinstance(optimizer, list | tuple)
    ):
        raise TypeError(
            f"optimizer={type(optimizer).__name__}: each stage updates its weights by itself, so "
            "give a function that makes an optimizer of a list of parameters, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1), or the optimizers that an "
            "earlier call returned"
        )
    found: list[Any] = []
    if callable(optimizer):
        for j, own in enumerate(parameters):
            try:
                found.append(optimizer(own) if own else None)
            except BaseException as error:
                annotate(error, f"in optimizer, for the parameters of stage {j}")
                raise
    else:
        found += optimizer
    if len(found) != pipeline.n:
        raise ValueError(
            f"optimizer has {len(found)} optimizers, but there are {pipeline.n} stages: give one "
            "for each, None where nothing is trained"
        )
    for j, (each, own) in enumerate(zip(found, parameters, strict=True)):
        if not isinstance(each, Optimizer) and (each is not None or own):
            raise TypeError(
                f"optimizer of stage {j}, which has {len(own)} parameters to train, is "
                f"{type(each).__name__}: it must be a torch.optim.Optimizer"
            )
        if isinstance(each, torch.optim.LBFGS):
            raise ValueError(
                f"the optimizer of stage {j} is an LBFGS, which computes the loss of all stages "
                "anew in its step, and in train_stream each stage updates its weights by itself: "
                "use another optimizer, or LBFGS in a loop with loss_fn(pipe(input), target)"
            )
        groups = [] if each is None else each.param_groups
        there = {id(p) for group in groups for p in group["params"]}
        if strange := len(there ^ set(map(id, own))):
            raise ValueError(
                f"the optimizer of stage {j} is not for the {len(own)} parameters that are trained "
                f"there: {strange} are its only, or the stage's only. Freeze what is not to be "
                "trained; after the balance has changed make new optimizers, by a function"
            )
    return found
