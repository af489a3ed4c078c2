"""A call: one mini-batch of a pipeline, for all drivers (``pipe(x)``, ``pipe.train_batch``, ...).

The drivers run different programs over the same stages, edges and engine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partial
from itertools import chain
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from syncpipe.data import (
    distinct,
    hidden_tensor,
    map_tensors,
    modules_of,
    objects_in,
    tensors_in,
    with_class_of,
)
from syncpipe.layers.batchnorm import MiniBatchStatistics
from syncpipe.layers.ties import check_replicas
from syncpipe.options import Selective, StageMode
from syncpipe.runtime.engine import RUNNING, Run
from syncpipe.runtime.interrupts import Swap, with_swaps
from syncpipe.runtime.offload import Offload
from syncpipe.runtime.random_numbers import draw_seed, let_modules_hold, without_generators
from syncpipe.runtime.recomputation import is_checkpointing, is_recomputing
from syncpipe.runtime.recorder import Recorder
from syncpipe.runtime.streams import AcceleratorStreams, DeviceStreams, accelerators, same_memory
from syncpipe.runtime.thread_state import CallerState, restoring_process, restoring_thread
from syncpipe.schedules.schedule import Kind
from syncpipe.schedules.steps import Edge, Steps
from syncpipe.skip.store import SkipKey
from syncpipe.stages.inplace import passthrough_flags
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.run import StageRun
from syncpipe.stages.sharing import (
    CallReplicas,
    CallTies,
    has_own_forward,
    substitute,
    use_substitutes,
)


class EntryEvent(NamedTuple):
    """The event at which tensors from outside the pipeline are ready."""

    streams: DeviceStreams  #: the stream that computes the tensors
    event: Any  #: None: to be recorded on that stream when it is needed


class MiniBatch:
    """A mini-batch of ``m`` micro-batches, bound to the caller's state.

    Attributes:
        modes: for each stage and replica its checkpoint mode.
        rematerialized: for each the number of micro-batches, from the first on, to recompute.
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
        counts: dict[Any, int] = {"always": m, "except_last": m - 1}
        self.rematerialized = tuple(
            [m if isinstance(mode, Selective) else counts.get(mode, 0) for mode in self.modes]
        )
        self.seed = draw_seed() if seed is None else seed
        self.runs = [
            StageRun(stage, m, self.seed, mode, grad=state.grad)
            for stage, mode in zip(pipeline.stages, self.modes, strict=True)
        ]
        for indices in pipeline.replica_indices:
            if pipeline.stages[indices[0]].defers_batch_norm:
                statistics = MiniBatchStatistics()
                for each in chain.from_iterable(self.runs[k].with_units for k in indices):
                    each.statistics = statistics


def plain(
    pipeline: Pipeline,
    micro_batches: Sequence[Any],
    checkpoint: Sequence[StageMode],
    *,
    seed: int | None = None,
    swaps: Sequence[Swap] = (),
) -> list[Any]:
    """Runs ``pipe(x)`` as a plain graph: the stages one after another on the calling thread.

    For callers that need the graph of the layers: ``inline(graph=True)``, ``create_graph``,
    forward-mode AD, torch.func, dispatch modes. Devices exchange values by ordinary copies, and
    recomputation uses ``torch.utils.checkpoint``.

    Args:
        pipeline: the pipeline.
        micro_batches: trees on the first device; the results are on the last one.
        checkpoint: for each stage its mode.
        seed: the seed of the random numbers; None: drawn from the caller's generator.
        swaps: values to put into modules during the run.
    """
    call = MiniBatch(pipeline, len(micro_batches), checkpoint=checkpoint, inline=True, seed=seed)
    runs = call.runs[: pipeline.n]
    ties = pipeline.shared.find()
    for run in runs:
        copies = {
            id(tie.tensor): with_class_of(tie.tensor, tie.tensor.to(run.stage.device))
            for tie in ties
            if run.stage.j in tie.stages[1:]
            and not same_memory(tie.tensor.device, run.stage.device)
        }
        if copies:
            use_substitutes(run, copies, {})

    def cell(i: int, value: Any, owners: Sequence[int], store: dict[SkipKey, Any], j: int) -> Any:
        run, stage = runs[j], runs[j].stage
        popped = tuple([store.pop(key) for key in stage.pops])
        inputs = map_tensors(
            lambda tensors: [
                t if same_memory(t.device, stage.device) else t.to(stage.device) for t in tensors
            ],
            (value, tuple([skip for skip, _ in popped])),
        )
        owners = [*owners, *[flag for _, own in popped for flag in own]]
        recomputed = i < call.rematerialized[j]
        with pipeline.workers[pipeline.worker_of[j]].caller_lane().active():
            forward = run.recomputation.checkpointed if recomputed else run.forward
            outputs = forward(i, inputs, owners)
        passed = passthrough_flags(inputs, owners, outputs, all_borrowed=recomputed or j == 0)
        following = iter(passed or [0] * len(tensors_in(outputs)))
        value, stashed = outputs
        owners = [next(following) for _ in tensors_in(value)]
        for key, skip in zip(stage.stashes, stashed, strict=True):
            store[key] = skip, [next(following) for _ in tensors_in(skip)]
        return value, owners

    def run_all() -> list[Any]:
        found = []
        for i, value in enumerate(micro_batches):
            store: dict[SkipKey, Any] = {}
            owners: Sequence[int] = ()
            for j in range(pipeline.n):
                value, owners = cell(i, value, owners, store, j)
            found.append(value)
        return found

    run_held = partial(let_modules_hold, pipeline.drawing_modules, run_all)
    # For a call in another call's layer or loss: locks of stages come before those of generators.
    return without_generators(partial(with_swaps, swaps, run_held) if swaps else run_held)


def check_collectives(pipeline: Pipeline, *, grad: bool, inline: bool) -> None:
    """Refuses layers that start collectives once per micro-batch, or on several workers."""
    sharded: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    several = not inline and len(pipeline.workers) > 1
    parallel: dict[int, int] = {}  # workers of the stages with sharded parameters
    for stage in pipeline.stages:
        for module in modules_of(stage.partition):
            kind: Any = type(module)
            if (grad or several) and (wrapper := _wrapper(kind)):
                raise RuntimeError(
                    f"a layer is wrapped in {wrapper}, which starts collectives: each process's "
                    "workers would start them in any order, once per micro-batch. Unwrap the "
                    "layers, and make the whole pipe parallel: "
                    "syncpipe.distributed.data_parallel(pipe) for train_batch, fully_shard(pipe) "
                    "or DistributedDataParallel(pipe) for pipe(input)"
                )
            if sharded and any(isinstance(p, sharded) for p in module._parameters.values()):
                parallel[stage.index] = pipeline.worker_of[stage.index]
    if several and len({*parallel.values()}) > 1:
        shown = sorted({pipeline.stages[k].j for k in parallel})
        raise RuntimeError(
            f"stages {shown} have DTensor parameters (tensor parallelism, or fully_shard around "
            "the pipe), and workers would start their collectives in any order: choose a balance "
            "that puts these layers into one stage without replicas, or run one process per stage "
            "(syncpipe.distributed.stage)"
        )


@lru_cache(maxsize=1024)
def _wrapper(kind: Any) -> str:
    """The PyTorch class that makes modules of a kind start collectives; empty if there is none."""
    starts = (
        "torch.nn.parallel.distributed",
        "torch.distributed.fsdp",
        "torch.distributed._composable",
    )
    return next((base.__name__ for base in kind.__mro__ if base.__module__.startswith(starts)), "")


class Call(MiniBatch):
    """One mini-batch in a pipeline; made on the caller's thread.

    Here and in the drivers, ``j`` is the index of a stage *or replica* in ``pipeline.stages``, and
    in all lists with an entry per stage. With ``graph``, a node of the caller's graph returns the
    captured gradients.

    Attributes:
        worker_streams: for each worker its device and streams.
        streams_of: for each stage the streams of its worker.
        caller_streams_of: for each stage the caller's current streams on its device.
        substitute_of: for each stage the substitutes of tensors, by identity (see ``StageRun``).
        original_of: for a substitute (by ``id``) its original.
        ties: the tensors that stages share; None if there are none.
        replicas: the replicas of all stages; None if there are none.
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
        check_collectives(pipeline, grad=self.state.grad, inline=inline)
        self.user_code_epoch: object = None
        self.worker_streams = [worker.lane() for worker in pipeline.workers]
        self._caller_streams = [worker.caller_lane() for worker in pipeline.workers]
        self.streams_of = [self.worker_streams[w] for w in pipeline.worker_of]
        self.caller_streams_of = [self._caller_streams[w] for w in pipeline.worker_of]
        self._offloads = {
            j: self._offload(j)
            for j, mode in enumerate(self.modes)
            if mode == "offload" and self.streams_of[j].backend is not None
        }
        self.host_only = recorder is None and all(
            streams.backend is None and same_memory(streams.device, self.worker_streams[0].device)
            for streams in self.worker_streams
        )
        self._entry_events = _entry_events(self._caller_streams)
        self.recorder = recorder
        if recorder is not None:
            recorder.begin(self.worker_streams, pipeline.placement)
        self.substitute_of: list[dict[int, Tensor]] = [{} for _ in pipeline.stages]
        self.original_of: dict[int, Tensor] = {}
        if graph and self.state.grad:
            self._substitute_hooked()
        self.ties: CallTies | None = None
        self.replicas: CallReplicas | None = None
        self._wait_for_caller()  # its stream may still update the weights that are copied next
        if ties := pipeline.shared.find():
            check_replicas(ties, list(map(len, pipeline.replica_indices)))
            self.ties = CallTies(self, ties, in_order=graph)
        if len(pipeline.stages) > pipeline.n:
            self.replicas = CallReplicas(self)
        shallow: dict[Any, Any] = {}
        if any(self.substitute_of):
            watched = [
                j for j, own in enumerate(self.substitute_of) if own and self._is_watched(j, graph)
            ]
            shallow = pipeline.shared.copies_of_modules(ties, self.runs, watched)
        for run, own in zip(self.runs, self.substitute_of, strict=True):
            if own or run.stage in shallow:
                use_substitutes(run, own, shallow)
        edges = pipeline.edges if self.ties is None else (*pipeline.edges, *self.ties.edges)
        # For each edge the streams at both ends, by the micro-batch modulo `_round`.
        self._round = lcm(*map(len, pipeline.replica_indices))
        self._ends = [
            list(zip(self._stage_streams(e.source), self._stage_streams(e.target), strict=True))
            for e in edges
        ]

    def _is_watched(self, j: int, graph: bool) -> bool:
        """Whether other threads may look at the modules of a stage while its cells run.

        Concurrent callers may, so modules are copied if they can be. Otherwise only the loss
        function counts, which runs on the last stage's worker.
        """
        worker_of, n = self.pipeline.worker_of, self.pipeline.n
        if not any(map(has_own_forward, self.runs[j].partition.modules())):
            return True
        return worker_of[j] != worker_of[n - 1] and not (graph or self.inline)

    def _stage_streams(self, j: int) -> list[DeviceStreams]:
        """The streams of stage ``j`` for micro-batches 0, 1, ... of a round."""
        passed = [self.streams_of[k] for k in self.pipeline.replica_indices[j]]
        return passed * (self._round // len(passed))

    def _wait_for_caller(self) -> None:
        for streams, caller in zip(self.worker_streams, self._caller_streams, strict=True):
            streams.wait_for(caller)

    def _substitute_hooked(self) -> None:
        """Substitutes leaves of the same memory for tensors with hooks or a graph, which serve the
        caller's graph once per call."""
        for stage in self.pipeline.stages[: self.pipeline.n]:
            for module in modules_of(stage.partition):
                for tensor in chain(module._parameters.values(), module._buffers.values()):
                    if tensor is None or not tensor.requires_grad or is_lazy(tensor):
                        continue
                    if tensor._backward_hooks or not tensor.is_leaf:
                        leaf = substitute(tensor, tensor, True)  # counts the same versions
                        leaf = self.substitute_of[stage.index].setdefault(id(tensor), leaf)
                        self.original_of[id(leaf)] = tensor

    def run(self, steps: Steps, task: Any) -> None:
        """Runs a program to its end; then the caller's streams wait for all of its work.

        The caller's tensors must live until then.
        """
        self._run(steps, task, inline=self.inline)
        if self.ties is not None:
            self.ties.finish()
        if self.replicas is not None:
            self.replicas.finish()

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
        for j, offload in self._offloads.items():
            offload.set_backward_order(steps.backwards(j) or range(self.m)[::-1])
        engine = self.pipeline.engine
        try:
            # Locks of stages come before those of generators.
            run = partial(engine.run, steps, task.bind, self.state, inline=inline)
            run = partial(let_modules_hold, self.pipeline.drawing_modules, run)
            without_generators(run if inline else partial(restoring_process, run))
        finally:
            self.state.leave_devices()
            for offload in self._offloads.values():
                offload.release_sources()
            for streams, caller in zip(self.worker_streams, self._caller_streams, strict=True):
                caller.wait_for(streams)

    def bind_streams(self, run: Run, kind: Kind, j: int) -> Run:
        """Wraps ``run``, which runs the actions of one kind on stage ``j``, to use the stage's
        streams and record a trace. ``run`` takes a list of :class:`Message`."""
        streams, recorder, stage = self.streams_of[j], self.recorder, self.pipeline.stages[j].j
        offload = self._offloads.get(j)
        if offload is not None and kind == "forward":
            run = offload.wrap_forward(run)
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

    def _offload(self, j: int) -> Offload:
        worker = self.pipeline.workers[self.pipeline.worker_of[j]]
        partition = self.pipeline.stages[j].partition
        own = chain(partition.parameters(), partition.buffers())
        return Offload(self.streams_of[j], *worker.host_streams(), own)

    def send(self, edge: Edge, i: int, value: Any, *, backward: bool = False) -> tuple[Any, Any]:
        """Sends the value of a micro-batch over an edge, or back; called on the sending worker.
        Returns the value on the receiver's device, and the event that the receiver waits for."""
        source, target = self._ends[edge.number][i % self._round]
        if source is target:
            return value, None
        if backward:
            source, target = target, source
        elif not isinstance(value, Tensor):
            self._check_objects(edge, i, value)
        if self.recorder is None:
            return send_tree(source, target, value)
        with self.recorder.transfer(i, edge.source, edge.target, backward=backward):
            return send_tree(source, target, value)

    def _check_objects(self, edge: Edge, i: int, value: Any) -> None:
        """Refuses objects that hide a tensor on an accelerator or with a graph: it must be sent."""

        def has_to_be_sent(tensor: Tensor) -> bool:
            on_device = tensor.device.type not in ("cpu", "meta")
            return (on_device and not isinstance(tensor, nn.Parameter)) or (
                tensor.requires_grad and not tensor.is_leaf
            )

        for thing in objects_in(value):
            at = hidden_tensor(thing, has_to_be_sent)
            if at is not None:
                raise TypeError(
                    f"{self.pipeline.stages[edge.source].describe(i)} returned an object of type "
                    f"{type(thing).__name__} for stage {edge.target}, with a hidden tensor at "
                    f"{at}: neither it nor its gradient can be sent. Return the tensors in a "
                    "tuple, a dict or a dataclass, or register the class by "
                    "torch.utils._pytree.register_pytree_node"
                )

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
        self, tree: Any, j: int, after: Mapping[torch.device, EntryEvent] | None = None
    ) -> Any:
        """A tree from outside the pipeline, on the device of stage ``j``; called on its worker.
        ``after`` has the events at which the tree is ready; None: it came with the call."""
        streams, after = self.streams_of[j], self._entry_events if after is None else after
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

    def release_to_caller(self, j: int, tree: Any) -> None:
        """Keeps the memory of a result of stage ``j`` until the caller's stream has used it."""
        streams = self.streams_of[j]
        if streams.backend is not None:
            self.caller_streams_of[j].record_on_stream(tensors_in(tree), streams)

    def collect_outputs(self, values: list[Any]) -> list[Any]:
        """The last stage's outputs (trees, one per micro-batch) on one device, for the caller."""
        indices, results = self.pipeline.replica_indices[-1], self.pipeline.results_replica
        if len(indices) == 1:
            self.release_to_caller(indices[0], values)
            return values
        target, found = self.streams_of[results], []
        for i, value in enumerate(values):
            j = indices[i % len(indices)]
            source = self.streams_of[j]
            if not same_memory(source.device, target.device):
                value, event = send_tree(source, target, value)
                target.receive(event, tensors_in(value))
                self.caller_streams_of[j].wait_for(source)  # an output may be an input
                j = results
            self.release_to_caller(j, value)
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


def needs_graph() -> bool:
    """Whether the caller of ``pipe(x)`` needs the plain graph of the layers."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (
        bool(RUNNING.get())
        or is_checkpointing()
        or is_recomputing()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None  # torch.jit.trace
        or torch._C._current_graph_task_id() != -1  # recomputed in another backward
        or (hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint")
    )


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
