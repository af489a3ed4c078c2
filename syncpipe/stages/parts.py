"""What may take part in a call, in the order in which it joins."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from syncpipe.runtime.engine import Run
from syncpipe.runtime.offload import Offload
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.schedule import Kind
from syncpipe.schedules.steps import Steps
from syncpipe.stages.checks import check_collectives
from syncpipe.stages.part import Part
from syncpipe.stages.sharing import share


class Offloading(Part):
    """The stages whose stored tensors wait for their backward in host memory."""

    def __init__(self, call: Any, stages: list[int]) -> None:
        self._m, self._offloads = call.m, {r: self._offload(call, r) for r in stages}

    def _offload(self, call: Any, r: int) -> Offload:
        worker: Worker = call.pipeline.workers[call.pipeline.worker_of[r]]
        partition = call.pipeline.stages[r].partition
        own = chain(partition.parameters(), partition.buffers())
        return Offload(call.streams_of[r], *worker.host_streams(), own)

    def begin(self, steps: Steps) -> None:
        for r, offload in self._offloads.items():
            offload.set_backward_order(steps.backwards(r) or range(self._m)[::-1])

    def around(self, kind: Kind, r: int, run: Run) -> Run:
        offload = self._offloads.get(r)
        return run if offload is None or kind != "forward" else offload.wrap_forward(run)

    def end(self) -> None:
        for offload in self._offloads.values():
            offload.release_sources()


def offload(call: Any) -> None:
    accelerated = [r for r, streams in enumerate(call.streams_of) if streams.backend is not None]
    if stages := [r for r in accelerated if call.modes[r] == "offload"]:
        call.parts.append(Offloading(call, stages))


#: ``check_collectives`` refuses; ``share`` may copy weights.
CALL: list[Callable[[Any], None]] = [check_collectives, offload, share]
