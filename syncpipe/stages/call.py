"""A call: one mini-batch of a pipeline, for all drivers (``pipe(x)``, ``pipe.train_batch``, ...).

The drivers run different programs over the same stages, edges and engine. What else takes part in a
call plugs in at one place (``parts``), which is asked once, when the call begins:

    CALL    (call) -> None        adds a :class:`Part` to the call, or does nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partial
from math import lcm
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from syncpipe.data.trees import distinct, map_tensors, tensors_in
from syncpipe.options import StageMode, recomputed_micro_batches
from syncpipe.runtime.engine import RUNNING, Run
from syncpipe.runtime.random_numbers import draw_seed, let_modules_hold
from syncpipe.runtime.recomputation import is_checkpointing, is_recomputing
from syncpipe.runtime.recorder import Recorder, as_range
from syncpipe.runtime.streams import AcceleratorStreams, DeviceStreams, accelerators, same_memory
from syncpipe.runtime.thread_state import CallerState, restoring_process, restoring_thread
from syncpipe.schedules.schedule import Kind
from syncpipe.schedules.steps import Edge, Steps
from syncpipe.stages.checks import check_objects
from syncpipe.stages.part import Part
from syncpipe.stages.parts import CALL
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.run import StageRun
from syncpipe.stages.wrappers import share_statistics

_P = TypeVar("_P", bound=Part)


class EntryEvent(NamedTuple):
    """The event at which tensors from outside the pipeline are ready."""

    streams: DeviceStreams  #: the stream that computes the tensors
    event: Any  #: None: to be recorded on that stream when it is needed


class StageRuns:
    """The runs of all stages for ``m`` micro-batches, in the caller's state.

    Attributes:
        modes: for each stage its checkpoint mode.
        recomputed: for each the number of micro-batches, from the first on, to recompute.
        runs: for each its :class:`StageRun`.
        seed: the seed of the random numbers; None: drawn from the caller's generator.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        m: int,
        *,
        checkpoint: Sequence[StageMode],
        inline: bool,
        seed: int | None = None,
    ) -> None:
        if pipeline.streaming and pipeline.engine.is_running():
            raise RuntimeError(
                "this pipe was called inside its own train_stream (by loss_fn, data_iter, a layer "
                "or an optimizer's hook), while other stages update their weights: the result "
                "would depend on timing. Evaluate after train_stream has returned (give it steps=)"
            )
        self.pipeline, self.m = pipeline, m
        self.state = state = CallerState()
        alone = bool(RUNNING.get()) or len(pipeline.workers) == 1
        self.inline = inline or state.needs_inline or alone
        # A recomputed cell of an outer pipe drops the graph of this call anyway.
        recorded = state.grad and not (is_checkpointing() or is_recomputing() or state.transformed)
        self.modes = [checkpoint[s.j] if recorded else "never" for s in pipeline.stages]
        counts = [recomputed_micro_batches(mode, m) for mode in self.modes]
        pairs = zip(counts, pipeline.stages, strict=True)
        self.recomputed = tuple([n if n and not s.renorms else 0 for n, s in pairs])
        self.seed = draw_seed() if seed is None else seed
        self.runs = [
            StageRun(stage, m, self.seed, mode, grad=state.grad)
            for stage, mode in zip(pipeline.stages, self.modes, strict=True)
        ]
        share_statistics(self.runs, pipeline.indices)


class Call(StageRuns):
    """One mini-batch in a pipeline; made on the caller's thread.

    Here and in the drivers, ``r`` is an index in ``pipeline.stages``, and in all lists with an
    entry per stage. With ``graph``, a node of the caller's graph returns the captured gradients.

    Attributes:
        worker_streams: for each worker its device and streams.
        streams_of: for each stage the streams of its worker.
        caller_streams_of: for each stage the caller's current streams on its device.
        outgoing, incoming: for each stage the edges of its outputs; those that its gradients take.
        returns: further edges, for gradients only.
        extra_leaves: for each stage further leaves that need gradients there.
        owned_elsewhere: for each stage the tensors (``id``) whose ``.grad`` is not its own.
        original_of: for a leaf that stands for a tensor (by ``id``) that tensor.
        user_code_epoch: a new object whenever user code may have changed modules.
        host_only: whether all stages are in host memory and no trace is recorded.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        m: int,
        *,
        checkpoint: Sequence[StageMode],
        inline: bool,
        recorder: Recorder | None,
        graph: bool = False,
    ) -> None:
        super().__init__(pipeline, m, checkpoint=checkpoint, inline=inline)
        self.graph = graph
        self.user_code_epoch: object = None
        self.worker_streams = [worker.lane() for worker in pipeline.workers]
        self._caller_streams = [worker.caller_lane() for worker in pipeline.workers]
        self.streams_of = [self.worker_streams[w] for w in pipeline.worker_of]
        self.caller_streams_of = [self._caller_streams[w] for w in pipeline.worker_of]
        self.host_only = recorder is None and all(
            streams.backend is None and same_memory(streams.device, self.worker_streams[0].device)
            for streams in self.worker_streams
        )
        self._entry_events = _entry_events(self._caller_streams)
        self.recorder = recorder
        if recorder is not None:
            recorder.begin(self.worker_streams, pipeline.placement)
        self.outgoing, self.incoming = pipeline.outgoing, list(pipeline.incoming)
        self.returns: tuple[Edge, ...] = ()
        self.extra_leaves: list[list[Tensor]] = [[] for _ in pipeline.stages]
        self.owned_elsewhere: list[set[int]] = [set() for _ in pipeline.stages]
        self.original_of: dict[int, Tensor] = {}
        self.parts: list[Part] = []
        self._wait_for_caller()  # its stream may still update the weights that parts copy
        for join in CALL:
            join(self)
        # For each edge the streams at both ends, by the micro-batch modulo `_round`.
        self._round = lcm(*pipeline.turns)
        self._ends = [
            list(zip(self._stage_streams(e.source), self._stage_streams(e.target), strict=True))
            for e in (*pipeline.edges, *self.returns)
        ]

    def part(self, kind: type[_P]) -> _P | None:
        """The part of a class, if it takes part in this call."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def _stage_streams(self, j: int) -> list[DeviceStreams]:
        """The streams of stage ``j`` for micro-batches 0, 1, ... of a round."""
        passed = [self.streams_of[k] for k in self.pipeline.indices[j]]
        return passed * (self._round // len(passed))

    def _wait_for_caller(self) -> None:
        for streams, caller in zip(self.worker_streams, self._caller_streams, strict=True):
            streams.wait_for(caller)

    def run(self, steps: Steps, task: Any) -> None:
        """Runs a program to its end; then the caller's streams wait for all of its work.

        The caller's tensors must live until then.
        """
        self._run(steps, task, inline=self.inline)
        for part in self.parts:
            part.finish()

    def run_backward(self, steps: Steps, task: Any) -> None:
        """Runs the backward half of a program, on the thread that autograd calls."""
        self.user_code_epoch = object()
        modes = torch._C._len_torch_dispatch_stack() > 0 or torch._C._autograd._profiler_enabled()

        def run_here() -> None:
            with self.state.applied():
                self._run(steps, task, inline=True)

        try:
            # Inline where this thread must not wait for workers, or has modes of its own.
            if self.inline or modes or RUNNING.get():
                restoring_thread(run_here)
            else:
                self._run(steps, task, inline=False)
        finally:
            if self.state.autocasts:  # the caller may have left the autocast
                torch.clear_autocast_cache()

    def _run(self, steps: Steps, task: Any, *, inline: bool) -> None:
        self._wait_for_caller()
        engine = self.pipeline.engine
        try:
            for part in self.parts:
                part.begin(steps)
            run = partial(engine.run, steps, task.bind, self.state, inline=inline)
            run = partial(let_modules_hold, self.pipeline.drawing, run)
            run() if inline else restoring_process(run)
        finally:
            self.state.leave_devices()
            for part in self.parts:
                part.end()
            for streams, caller in zip(self.worker_streams, self._caller_streams, strict=True):
                caller.wait_for(streams)

    def bind_action(self, run: Run, kind: Kind, r: int) -> Run:
        """Wraps ``run``, which runs the actions of one kind on stage ``r``, in what takes part, on
        the stage's streams, with a trace. ``run`` takes a list of :class:`Message`."""
        streams, recorder, stage = self.streams_of[r], self.recorder, self.pipeline.stages[r].j
        for part in self.parts:
            run = part.around(kind, r, run)
        if profiler._is_profiler_enabled:
            run = partial(as_range, f"syncpipe {kind} stage {stage} micro-batch", run)
        if streams.backend is None and recorder is None:
            return run

        def on_streams(i: int, messages: list[Any]) -> Sequence[Any]:
            with streams.active():
                for message in messages:
                    if message.event is not None:
                        streams.receive(message.event, tensors_in(message.value))
                with nullcontext() if recorder is None else recorder.span(kind, i, stage):
                    return run(i, messages)

        return on_streams

    def send(self, edge: Edge, i: int, value: Any, *, backward: bool = False) -> tuple[Any, Any]:
        """Sends the value of a micro-batch over an edge, or back; called on the sending worker.
        Returns the value on the receiver's device, and the event that the receiver waits for."""
        source, target = self._ends[edge.number][i % self._round]
        if source is target:
            return value, None
        if backward:
            source, target = target, source
        elif not isinstance(value, Tensor):
            check_objects(self.pipeline.stages[edge.source], edge.target, i, value)
        if self.recorder is None:
            return send_tree(source, target, value)
        with self.recorder.transfer(i, edge.source, edge.target, backward=backward):
            return send_tree(source, target, value)

    def ready(self, tree: Any) -> dict[torch.device, EntryEvent]:
        """The events at which the tensors of a tree, made or held by this thread, are ready."""
        found = {}
        for device in {tensor.device for tensor in tensors_in(tree)} & self._entry_events.keys():
            backend = self._entry_events[device].streams.backend
            stream = backend.current()
            found[device] = EntryEvent(
                DeviceStreams(device, backend, stream, stream), backend.record(stream)
            )
        return found

    def to_stage(
        self, tree: Any, r: int, after: Mapping[torch.device, EntryEvent] | None = None
    ) -> Any:
        """A tree from outside the pipeline, on the device of stage ``r``; called on its worker.
        ``after`` has the events at which the tree is ready; None: it came with the call."""
        streams, after = self.streams_of[r], self._entry_events if after is None else after
        return map_tensors(lambda tensors: [self._bring(t, streams, after) for t in tensors], tree)

    def _bring(
        self, tensor: Tensor, streams: DeviceStreams, after: Mapping[torch.device, EntryEvent]
    ) -> Tensor:
        found = after.get(tensor.device)
        if same_memory(tensor.device, streams.device):
            if found is not None:
                streams.receive(found.event, [tensor])
            return tensor
        maker, event = found or (DeviceStreams(tensor.device), None)
        workers = [s for s in self.worker_streams if same_memory(s.device, tensor.device)]
        # On a device without a worker, the stream that made the tensor copies it.
        copied, event = (workers[0] if workers else maker).send([tensor], streams, event)
        streams.receive(event, copied)
        return copied[0]

    def as_caller(self) -> AbstractContextManager[Any]:
        """The context of work on the caller's streams; without it a worker's thread uses the
        default streams of other devices."""
        stack = ExitStack()
        for caller in reversed(self._caller_streams):  # the first one's device becomes current
            stack.enter_context(caller.active())
        return stack

    def release_to_caller(self, r: int, tree: Any) -> None:
        """Keeps the memory of a result of stage ``r`` until the caller's stream has used it."""
        streams = self.streams_of[r]
        if streams.backend is not None:
            self.caller_streams_of[r].record_on_stream(tensors_in(tree), streams)

    def collect_outputs(self, values: list[Any]) -> list[Any]:
        """The last stage's outputs (trees, one per micro-batch) on one device, for the caller."""
        indices, results = self.pipeline.indices[-1], self.pipeline.results_index
        if len(indices) == 1:
            self.release_to_caller(indices[0], values)
            return values
        target, found = self.streams_of[results], []
        for i, value in enumerate(values):
            r = indices[i % len(indices)]
            source = self.streams_of[r]
            if not same_memory(source.device, target.device):
                value, event = send_tree(source, target, value)
                target.receive(event, tensors_in(value))
                self.caller_streams_of[r].wait_for(source)  # an output may be an input
                r = results
            self.release_to_caller(r, value)
            found.append(value)
        self.caller_streams_of[results].wait_for(target)
        return found


def send_tree(source: DeviceStreams, target: DeviceStreams, value: Any) -> tuple[Any, Any]:
    """Sends a tree without a graph; returns it on the target's device, and the event to await."""
    if source.backend is None and same_memory(source.device, target.device):
        return value, None
    events: list[Any] = []

    def moved(tensors: list[Tensor]) -> list[Tensor]:
        each = distinct(tensors)
        arrived, event = source.send(each, target)
        events.append(event)
        found = dict(zip(map(id, each), arrived, strict=True))
        return [found[id(tensor)] for tensor in tensors]

    value = map_tensors(moved, value)
    return value, events[0] if events else None


_accelerators = lru_cache(maxsize=1)(accelerators)


def _entry_events(callers: Sequence[DeviceStreams]) -> dict[torch.device, EntryEvent]:
    """The events at which the tensors of a call are ready, also on devices without a worker."""
    found = {
        streams.device: EntryEvent(streams, streams.backend.record(streams.compute))
        for streams in callers
        if streams.backend is not None
    }
    kinds = {device.type for device in found}
    # With CPU workers only, do not query devices: it would keep forked children off the GPUs.
    for device in _accelerators() if kinds else ():
        if device.type in kinds and device not in found:
            # No event yet: recording one would initialize the device.
            backend = AcceleratorStreams(device)
            stream = backend.current()
            found[device] = EntryEvent(DeviceStreams(device, backend, stream, stream), None)
    return found
