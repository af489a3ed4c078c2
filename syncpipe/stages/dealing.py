"""Micro-batches on their way to the replicas of the first stage, and from those of the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from syncpipe.runtime.streams import same_memory
from syncpipe.stages.call import Call
from syncpipe.stages.transfer import sent
from syncpipe.tree import tensors_in

__all__ = ["collected", "deal", "on_one_device"]


def deal(call: Call, micro_batches: list[Any]) -> list[Any]:
    """Sends the inputs of a mini-batch to the replicas of the first stage, before the run.

    Args:
        call: the call.
        micro_batches: trees on the first device; those for other replicas are replaced.

    Returns:
        For each the event that says when it is there.
    """
    numbers = call.pipeline.numbers[0]
    events: list[Any] = [None] * len(micro_batches)
    if len(numbers) > 1:
        first = call.lane_of(0)
        caller = replace(first, compute=first.caller)  # whose graph it is that gradients go on into
        for i, value in enumerate(micro_batches):
            j = numbers[i % len(numbers)]
            if j > 0:
                micro_batches[i], events[i] = sent(caller, call.lane_of(j), value, True, None)
    return events


def collected(call: Call, values: list[Any], *, graph: bool = False) -> list[Any]:
    """What the last stage gave for each micro-batch, for the caller and on one device.

    Args:
        call: the call, which has run.
        values: trees, each on the device of its replica.
        graph: let gradients come back the same way when autograd asks for them.
    """
    numbers = call.pipeline.numbers[-1]
    if len(numbers) == 1:
        call.release_to_caller(numbers[0], values)
        return values
    results = call.lane_of(call.pipeline.results)
    found = []
    for i, value in enumerate(values):
        j = numbers[i % len(numbers)]
        source = call.lane_of(j)
        call.release_to_caller(j, value)
        if not same_memory(source.device, results.device):
            value, event = sent(source, results, value, graph, None)
            results.receive(event, tensors_in(value))
        found.append(value)
    call.caller_of(call.pipeline.results).wait_for(results)
    call.release_to_caller(call.pipeline.results, found)
    return found


def on_one_device(call: Call, bring: Callable[[torch.device], None]) -> None:
    """Lets what the replicas of the last stage have noted be brought to one device."""
    if len(call.pipeline.numbers[-1]) > 1:
        bring(call.lane_of(call.pipeline.results).device)
