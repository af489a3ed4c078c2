"""What a call returns: loss, outputs, metrics."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch

from syncpipe.data.batches import gather
from syncpipe.data.uncut import samples_elsewhere
from syncpipe.hints import caller_stacklevel
from syncpipe.layers.conversion.signature import common_outputs
from syncpipe.stages.call import Call
from syncpipe.stages.pipeline import Pipeline
from syncpipe.training.loss import LossHead, Objective
from syncpipe.training.loss_check import LossCounts
from syncpipe.training.sources import Source


def join_outputs(pipeline: Pipeline, outputs: list[Any], source: Source) -> Any:
    """The outputs of micro-batches as one; warns once if samples are not in dimension 0."""
    if len(outputs) > 1 and not pipeline.has_joined:
        pipeline.has_joined = True
        if found := samples_elsewhere(outputs, source.sizes, source.other_sizes):
            warnings.warn(
                f"{found}, it seems, and the outputs of micro-batches are put together along "
                "dimension 0: put samples first in the last layer, output.transpose(0, 1), or "
                "compute the loss in train_batch. Ignore this if samples are in dimension 0",
                stacklevel=caller_stacklevel(),
            )
    return gather(outputs, common_leaves_of(pipeline))


def common_leaves_of(pipeline: Pipeline) -> Collection[int]:
    """The indices of output leaves that are the same in every micro-batch."""
    return common_outputs(pipeline.stages[pipeline.n - 1].partition)


def results_of(
    call: Call, head: LossHead, objective: Objective | None, source: Source, counts: LossCounts
) -> Any:
    """Checks the loss; returns loss, outputs, metrics, or a tuple of these."""
    pipeline = call.pipeline
    with torch.no_grad():
        loss = metrics = None
        if objective is not None:
            if pipeline.turns[-1] > 1:
                objective.bring(call.streams_of[pipeline.results_index].device)
            loss, metrics = objective.loss(), objective.metrics()
        outputs = head.outputs
        if outputs is not None:
            outputs = join_outputs(pipeline, call.collect_outputs(outputs), source)
    if head.check is not None:
        counts.compare(head.check, common_leaves_of(pipeline), draws=any(head.draws.values()))
    if loss is None:
        return outputs
    present = (True, head.outputs is not None, bool(metrics))
    found = [value for value, flag in zip((loss, outputs, metrics), present, strict=True) if flag]
    return loss if len(found) == 1 else tuple(found)
