"""What comes from the replicas of the last stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from syncpipe.data import tensors_in
from syncpipe.runtime.streams import same_memory
from syncpipe.stages.call import Call
from syncpipe.stages.transfer import sent

__all__ = ["collected", "on_one_device"]


def collected(call: Call, values: list[Any]) -> list[Any]:
    """What the last stage gave for each micro-batch, for the caller and on one device.

    Args:
        call: the call, which has run.
        values: trees, each on the device of its replica.
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
            value, event = sent(source, results, value)
            results.receive(event, tensors_in(value))
        found.append(value)
    call.caller_of(call.pipeline.results).wait_for(results)
    call.release_to_caller(call.pipeline.results, found)
    return found


def on_one_device(call: Call, bring: Callable[[torch.device], None]) -> None:
    """Lets what the replicas of the last stage have noted be brought to one device."""
    if len(call.pipeline.numbers[-1]) > 1:
        bring(call.lane_of(call.pipeline.results).device)
