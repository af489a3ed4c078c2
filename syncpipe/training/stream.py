"""Training without a flush: ``pipe.train_stream(...)``.

The task is that of ``train_batch``, for an unknown number of micro-batches and several versions of
the weights. The parameters are always the newest version, which the optimizer updates. A cell
computes with leaves of its version, which replace the parameters while the cell runs. Such a leaf
shares memory with its parameter until the next update::

    weight (version 2) ---- memory ---- leaf of version 2         cells 4, 5 are in flight

    weight (version 3) ---- a copy of it, then updated in place
                            memory ---- leaf of version 2         until cells 4, 5 ran backward

So a version costs memory only if cells need it after the next update. A stage that never needs an
old version, for example the last one, computes with the parameters themselves, unless these are
views of a flat buffer, whose version counter changes with the updates of other parameters.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from syncpipe.data.batches import scatter_pair
from syncpipe.data.trees import described, tensors_in
from syncpipe.layers.ties import overlapping
from syncpipe.options import StageMode
from syncpipe.runtime.engine import Run
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import go_back
from syncpipe.runtime.interrupts import Swap, run_and_undo
from syncpipe.runtime.random_numbers import with_cpu_generator
from syncpipe.runtime.recomputation import version_of
from syncpipe.runtime.streams import moved
from syncpipe.schedules.schedule import Kind
from syncpipe.schedules.stream import Extent, StreamSteps, Versions, version_used, versions_kept
from syncpipe.stages.call import Call
from syncpipe.stages.checks import check_can_train
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.run import StageRun
from syncpipe.stages.sharing import CallReplicas, substitute, swaps_of
from syncpipe.stages.stage import Stage
from syncpipe.storage import is_slice, storage_of
from syncpipe.training.cell import Message
from syncpipe.training.extensions import message_to
from syncpipe.training.leaves import Accumulated
from syncpipe.training.loaders import FromIterator
from syncpipe.training.loss import LossHead, Objective
from syncpipe.training.loss_function import Loss, known_loss
from syncpipe.training.sources import Source
from syncpipe.training.task import TrainingTask

_UNBOUNDED = 1 << 62  #: more micro-batches than there will ever be
_END: Any = object()  #: sentinel in place of a micro-batch: the end of the stream
#: Makes the optimizer of a stage, from its parameters.
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Streamed:
    """The result of ``Pipe.train_stream``.

    Attributes:
        losses: the loss of each mini-batch, shape ``[steps]``, detached, on the last device.
        metrics: for each mini-batch the dict of metrics from the loss function, or None.
        optimizers: for each stage its optimizer, to pass to the next call; None if it is frozen.
        versions: for each micro-batch (a mini-batch, except for ``"2bw"``) and each stage the
            version of the weights in its forward and backward: the number of updates before.
        kept: for each stage the largest number of versions that it held at a time.
    """

    losses: Tensor
    metrics: list[dict[str, Any] | None]
    optimizers: list[Optimizer | None]
    versions: list[tuple[int, ...]]
    kept: tuple[int, ...]


def stream(
    pipeline: Pipeline, iterator: Iterator[Any], *, pack: Any, chunks: int, optimizer: Any,
    loss_fn: Any, steps: int | None, target: Any, versions: Versions, loss_reduction: str | None,
    weight: Any, checkpoint: Sequence[StageMode], **running: Any,
) -> Streamed:  # fmt: skip
    check_can_train(pipeline, "train_stream")
    loss = known_loss(loss_fn, loss_reduction, weight)
    n, replicas = pipeline.n, pipeline.turns
    chunks = chunks if versions == "2bw" else 1  # otherwise a mini-batch is one micro-batch
    with pipeline.training_lock:
        _check(pipeline, checkpoint, versions, chunks)
        optimizers = _optimizers(pipeline, optimizer)
        # On the last stage every micro-batch runs backward at once, so none is recomputed.
        *others, last = checkpoint
        checkpoint = [*others, "never" if last == "except_last" else last]
        source = _MiniBatches(iterator, chunks, steps, target, pack, loss, max(replicas))

        def weights_of(stage: Stage) -> _StageWeights:
            updates = optimizers[stage.j] if stage.index < n else None  # others follow the owner
            return _StageWeights(stage, updates, versions, replicas, chunks)

        weights = list(map(weights_of, pipeline.stages[:n]))
        copied: list[Tensor] = []  # by replicas

        def run() -> None:
            pipeline.streaming = n > 1
            if n > 1:  # the update of one stage would clear casts that cells of others use
                torch.set_autocast_cache_enabled(False)
            call = Call(pipeline, _UNBOUNDED, checkpoint=checkpoint, **running)
            if (copies := call.part(CallReplicas)) is not None:
                copies.allow_updates(pipeline.replicas)
            weights.extend(map(weights_of, pipeline.stages[n:]))
            copied.extend(chain.from_iterable(own.parameters for own in weights[n:]))
            for stage, own in zip(pipeline.stages, weights, strict=True):
                own.use_versions(call.runs[stage.index])
            leaves = _StreamLeaves(call, weights)
            head = LossHead(call, source, leaves, keep_outputs=False)
            program: Any = StreamSteps(
                pipeline.edges, pipeline.indices, pipeline.worker_of, call.recomputed,
                source.extent, chunks,
            )  # fmt: skip
            try:
                call.run(program, _StreamTask(call, source, head, leaves, weights))
            except BaseException as error:
                updates = [own.updates for own in weights[:n]]
                annotate(error, f"in train_stream, after {updates} updates of the stages' weights")
                raise
            for stage, own in zip(pipeline.stages, weights, strict=True):
                call.release_to_caller(stage.index, own.state)

        run_and_undo(run, _undoing(pipeline, weights, copied))
        if not (source.results or source.metrics):
            raise ValueError("data_iter gave no mini-batch, so there is nothing to train")
        return _streamed(pipeline, source, weights, optimizers)


def _undoing(
    pipeline: Pipeline, weights: Iterable[_StageWeights], copied: Iterable[Tensor]
) -> Iterator[Any]:
    """What the end of a stream undoes: in C, so that Ctrl-C cannot come in between."""
    return chain(
        map(setattr, [pipeline], ["streaming"], [False]),
        map(torch._C._set_grad_enabled, [False]),
        chain.from_iterable([own.undo() for own in weights]),
        map(setattr, copied, repeat("grad"), repeat(None)),
        map(torch.set_autocast_cache_enabled, [torch.is_autocast_cache_enabled()]),
        map(torch._C._set_grad_enabled, [True]),
    )


def _streamed(
    pipeline: Pipeline, source: _MiniBatches, weights: Sequence[_StageWeights],
    optimizers: list[Optimizer | None],
) -> Streamed:  # fmt: skip
    """The results of all mini-batches, in their order."""
    found = [source.results[batch] for batch in sorted(source.results)]
    losses = [*source.blocks, *[loss for loss, _ in found]]
    device = pipeline.workers[pipeline.worker_of[pipeline.results_index]].device
    rows = [[weights[number] for number in numbers] for numbers in pipeline.indices]
    with torch.no_grad():
        return Streamed(
            torch.cat([moved(loss.reshape(-1), device) for loss in losses]),
            source.metrics + [metrics for _, metrics in found],
            optimizers,
            [
                tuple([row[i % len(row)].used[i // len(row)] for row in rows])
                for i in range(sum(len(each.used) for each in rows[0]))
            ],
            tuple([max(each.kept for each in row) for row in rows]),
        )


def _check(
    pipeline: Pipeline, checkpoint: Sequence[StageMode], versions: Versions, chunks: int
) -> None:
    """Raises ValueError for pipes and options that train_stream does not support."""
    n, replicas = pipeline.n, pipeline.turns
    if versions == "2bw" and chunks < n:
        raise ValueError(
            f"versions='2bw' with chunks={chunks} and {n} stages: two versions of the weights need "
            f"at least as many micro-batches as stages. Set pipe.chunks to {n} or more, or use "
            "versions='stashing'"
        )
    if len(pipeline.stages) > n and versions != "stashing":
        raise ValueError(
            f"versions={versions!r} of a pipe with replicas={replicas}: stages with more replicas "
            "update less often, so no version of the whole model exists. Use versions='stashing', "
            "or give each stage one device"
        )
    if 1 < len(pipeline.workers) < len(pipeline.stages):
        raise ValueError(
            f"train_stream of {n} stages with replicas={replicas} on {len(pipeline.workers)} "
            "devices: give each stage and each replica its own device, or all of them one"
        )
    if ties := pipeline.shared.find():
        raise ValueError(
            f"{ties[0]} are one tensor in stages {list(ties[0].stages)}, and in train_stream each "
            "would compute with another version: put them into one stage by the balance, untie "
            "them, or use train_batch"
        )
    if any(stage.defers_batch_norm for stage in pipeline.stages):
        raise ValueError(
            "deferred_batch_norm=True updates running statistics at the end of a mini-batch, and "
            "in train_stream the next one has begun by then: make the Pipe without it"
        )
    if "offload" in checkpoint:
        raise ValueError(
            "checkpoint='offload' fetches activations in the order of a mini-batch of known size, "
            "which train_stream does not have: use 'always' or 'never'"
        )
    stages = pipeline.stages[:n]
    several = [stage for stage in stages if versions_kept(stage.j, replicas, versions) > 1]
    for stage in stages:
        script = any(isinstance(m, torch.jit.ScriptModule) for m in stage.partition.modules())
        if script and stage in several:
            raise ValueError(
                f"stage {stage.j} has a layer in TorchScript, which cannot compute with several "
                "versions of its weights: use the plain layer, or put it into the last stage, with "
                "versions='stashing'"
            )
        if any(is_lazy(p) for p in stage.partition.parameters()):
            raise ValueError(
                f"stage {stage.j} has lazy parameters, and its optimizer is made before the first "
                "mini-batch: run the plain model once before making a Pipe of it"
            )
    moves = {id(parameter) for stage in several for parameter in _trained(stage.partition)}
    for a, b in overlapping([stage.partition for stage in stages]):
        if moves & {id(a.tensor), id(b.tensor)}:
            raise ValueError(
                f"{a} and {b} are two tensors that share memory, and versions of them would not: "
                "make them one parameter (a.weight = b.weight), or give each its own copy"
            )


def _optimizers(
    pipeline: Pipeline, optimizer: OptimizerFactory | Sequence[Optimizer | None]
) -> list[Optimizer | None]:
    """The optimizer of each stage (TypeError, ValueError if it is not for the stage's weights)."""
    parameters = [_trained(stage.partition) for stage in pipeline.stages[: pipeline.n]]
    if not any(parameters):
        raise ValueError("there is nothing to train: all parameters of the pipe are frozen")
    found: list[Any] = []
    if isinstance(optimizer, list | tuple):
        found += optimizer
    elif isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__}: each stage has its own, so give a function of "
            "a list of parameters, for example lambda parameters: torch.optim.SGD(parameters, "
            "lr=0.1), or the optimizers that an earlier call returned"
        )
    else:
        for j, own in enumerate(parameters):
            try:
                found.append(optimizer(own) if own else None)
            except BaseException as error:
                annotate(error, f"in optimizer, for the parameters of stage {j}")
                raise
    if len(found) != pipeline.n:
        raise ValueError(
            f"optimizer has {len(found)} optimizers, but there are {pipeline.n} stages: give one "
            "for each, None for a frozen stage"
        )
    for j, (each, own) in enumerate(zip(found, parameters, strict=True)):
        if not isinstance(each, Optimizer) and (each is not None or own):
            raise TypeError(
                f"optimizer of stage {j}, which has {len(own)} parameters to train, is "
                f"{type(each).__name__}: it must be a torch.optim.Optimizer"
            )
        step = None if each is None else signature(each.step).parameters.get("closure")
        if step is not None and step.default is step.empty:
            raise TypeError(
                f"optimizer of stage {j} is {type(each).__name__}, whose step computes the loss "
                "several times (closure), and train_stream runs each mini-batch once: use an "
                "optimizer whose step() needs no closure, for example SGD or Adam"
            )
        groups = [] if each is None else each.param_groups
        optimized = {id(p) for group in groups for p in group["params"]}
        if differing := len(optimized ^ set(map(id, own))):
            raise ValueError(
                f"the optimizer of stage {j} is not for the {len(own)} parameters that are trained "
                f"there: {differing} are in one of the two only. Freeze parameters that are not to "
                "be trained; after a change of the balance give a function, for new optimizers"
            )
    return found


class _StageWeights:
    """The versions of the weights of one stage. Used by one thread at a time: worker or caller.

    Micro-batches go to the replicas of the stage in turn.

    Attributes:
        parameters: the trained ones.
        leaves: for each version that can be held, the leaves that replace the parameters; empty if
            cells compute with the parameters.
        used: for each micro-batch so far the version that it used.
        updates: the number of updates so far, which is the newest version.
        kept: the largest number of versions that were held at a time.
    """

    def __init__(
        self, stage: Stage, optimizer: Optimizer | None, versions: Versions,
        replicas: Sequence[int], chunks: int,
    ) -> None:  # fmt: skip
        self.parameters = _trained(stage.partition)
        self._optimizer, self._every = optimizer, replicas[stage.j]
        #: The version for a micro-batch; None: the newest at its forward.
        self._rule: Callable[[int], int] | None = None
        if versions != "stashing":
            self._rule = partial(
                version_used, j=stage.j, replicas=replicas, versions=versions, chunks=chunks
            )
        most = versions_kept(stage.j, replicas, versions)
        self.used = array("q")
        self.updates, self.kept = 0, 1
        self._current: list[Tensor] = []
        self._markers: list[Any] = []
        self._swaps: list[tuple[StageRun, dict[int, list[Swap]]]] = []
        self._memory = [parameter.data for parameter in self.parameters]
        self._free: list[list[Tensor]] = []  # memory of released versions
        #: Frozen parameters in a flat buffer, whose version counter others change.
        self._fixed = [
            p for p in stage.partition.parameters() if not p.requires_grad and is_slice(p)
        ]
        flat = bool(self._fixed) or any(map(is_slice, self.parameters))
        if any(isinstance(m, torch.jit.ScriptModule) for m in stage.partition.modules()):
            flat = False
        held = most if (most > 1 and self.parameters) or flat else 0
        self.leaves = [list(map(_leaf, self.parameters)) for _ in range(held)]
        self._unused = list(self.leaves)
        #: Held versions, oldest first: the number, the leaves, and their write markers.
        self._held: deque[tuple[int, list[Tensor], list[Any]]] = deque()
        if self.leaves:
            self._hold()
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def state(self) -> list[Any]:
        states = [] if self._optimizer is None else self._optimizer.state.values()
        return [dict(each) if isinstance(each, dict) else each for each in states]

    def enter(self, i: int) -> None:
        """Chooses the version of micro-batch ``i``, the next one; call before its forward."""
        self.used.append(self.updates if self._rule is None else self._rule(i))
        self.use(i)

    def use(self, i: int) -> None:
        """Switches to the version of micro-batch ``i``; call before every other action for it."""
        if self.leaves:
            version = self.used[i // self._every]
            _, self._current, self._markers = self._held[version - self._held[0][0]]
            for run, swaps in self._swaps:
                run.swaps = swaps[id(self._current)]

    def use_versions(self, run: StageRun) -> None:
        """Makes the cells of a stage compute with the version in use."""
        for each in run.with_units:
            swaps: dict[int, list[Swap]] = {}
            for leaves in self.leaves:
                others = dict(zip(map(id, self.parameters), leaves, strict=True))
                others.update(zip(map(id, self._fixed), map(_leaf, self._fixed), strict=True))
                each.substitute_of = others  # by whose versions a recomputation goes
                swaps[id(leaves)] = swaps_of(each.partition, others)
            self._swaps.append((each, swaps))

    def gradients(
        self, i: int, others: Sequence[Sequence[Tensor | None] | None] = ()
    ) -> list[Tensor]:
        """Sets ``.grad`` of the parameters to the mean over this replica and ``others``.

        An item of ``others`` is None if its replica had no mini-batch. ``i`` is the next
        micro-batch of this replica. Returns new memory, if the parameters were moved into it.
        """
        if not (self.leaves or others):
            return []
        replicas = [self.pop_grads(), *[grads for grads in others if grads is not None]]
        means: list[Tensor | None] = []
        for grads in zip(*replicas, strict=True):
            found = [grad for grad in grads if grad is not None]  # None: not used there
            mean: Any = sum(found[1:], found[0]) if found else None
            means.append(mean / len(replicas) if found and len(replicas) > 1 else mean)
        made = self._release_old_versions(i)
        _set_grads(self.parameters, means)
        return made

    def pop_grads(self) -> list[Tensor | None]:
        """Takes the gradients from the version in use."""
        if self.leaves and self._markers != list(map(_write_marker, self._current)):
            raise RuntimeError(
                "a layer modified a parameter in its forward, in place (as an embedding with "
                "max_norm does) or through .data, and train_stream has several versions of it: put "
                "the layer into the last stage, with versions='stashing', or use train_batch"
            )
        leaves = self._current if self.leaves else self.parameters
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def _release_old_versions(self, i: int) -> list[Tensor]:
        """Releases versions that no micro-batch from ``i`` on needs; call before an update.

        Moves the parameters if the newest version is still needed; returns new memory for that.
        """
        if i // self._every < len(self.used):
            oldest = self.used[i // self._every]
        else:
            oldest = self.updates + 1 if self._rule is None else self._rule(i)
        while self._held and self._held[0][0] < oldest:
            version, leaves, _ = self._held.popleft()
            self._unused.append(leaves)
            if version < self.updates:  # else it is the memory of the parameters
                self._free.append([leaf.data for leaf in leaves])
        made: list[Tensor] = []
        if self._held:
            if not self._free:
                made = [torch.empty_like(parameter.data) for parameter in self.parameters]
                self._free.append(made)
            for parameter, memory in zip(self.parameters, self._free.pop(), strict=True):
                parameter.data = memory.copy_(parameter.data)
        return made

    @torch.no_grad()
    def follow(self, i: int, newest: Sequence[Tensor]) -> list[Tensor]:
        """Copies the next version from the owner; otherwise as :meth:`gradients`."""
        made = self._release_old_versions(i)
        for parameter, value in zip(self.parameters, newest, strict=True):
            parameter.copy_(value)
        self.update()
        return made

    def update(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.updates += 1
        if self.leaves:
            self._hold()

    def _hold(self) -> None:
        leaves = self._unused.pop()
        for parameter, leaf in zip(self.parameters, leaves, strict=True):
            leaf.data = parameter.data
        self._held.append((self.updates, leaves, list(map(_write_marker, leaves))))
        self.kept = max(self.kept, len(self._held))

    def undo(self) -> Iterator[Any]:
        """Steps that put the newest weights into the memory they began in, for ``run_and_undo``."""
        moved = self.parameters if self.leaves else []
        return chain(
            map(Tensor.copy_, self._memory, moved),
            map(setattr, moved, repeat("data"), self._memory),
            map(setattr, self.parameters, repeat("grad"), repeat(None)),
        )


def _trained(partition: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in partition.parameters() if parameter.requires_grad]


def _leaf(parameter: nn.Parameter) -> Tensor:
    """A leaf with the same memory; ``detach()`` would share the version counter."""
    return substitute(parameter, parameter.data)


def _write_marker(leaf: Tensor) -> tuple[int, int]:
    """A value that changes with each write into a leaf, or to its ``data``."""
    return version_of(leaf), storage_of(leaf)


def _set_grads(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Sets ``.grad`` of parameters, and runs their hooks."""
    hooked: list[tuple[nn.Parameter, Tensor]] = []
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is None or not parameter.requires_grad:  # frozen by a hook
            continue
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            hooked.append((parameter, grad))
        else:
            parameter.grad = grad
    if hooked:  # in one backward, for hooks on several tensors
        go_back([get_gradient_edge(p) for p, _ in hooked], [grad for _, grad in hooked])


_BLOCK_SIZE = 1000  #: losses stacked into one tensor


class _MiniBatches(FromIterator):
    """Takes mini-batches from an iterator, each when the first stage is ready for it.

    Each is cut into ``chunks`` micro-batches and has its own ``Objective``. This class is the
    objective of the stream, which the workers of the last stage use under a lock.

    Attributes:
        extent: the number of micro-batches, as far as it is known.
        results: mini-batch -> its detached loss and its metrics, or None; of the latest ones.
        metrics: the metrics of the mini-batches before these.
        blocks: their losses, stacked: a tensor of its own would take half a kilobyte more for each.
    """

    known_weights = None  # each Objective has its own

    def __init__(
        self, iterator: Iterator[Any], chunks: int, steps: int | None, where: Any, pack: Any,
        loss: Loss, replicas: int,
    ) -> None:  # fmt: skip
        super().__init__(iterator, 0, where, pack)
        self.chunks, self.call_loss, self.draws, self._loss = chunks, loss.call, loss.draws, loss
        self.extent = Extent(math.inf if steps is None else steps * chunks, replicas)
        self._most = math.inf if steps is None else (steps - 1) * chunks
        self.results: dict[int, tuple[Tensor, dict[str, Any] | None]] = {}
        self.metrics: list[dict[str, Any] | None] = []
        self.blocks: list[Tensor] = []
        self._one_worker = replicas == 1  # which computes all losses, in order
        self._objectives: dict[int, Objective] = {}  # of mini-batches in flight
        self._noted: dict[int, tuple[Any, ...]] = {}

    def has(self, i: int) -> bool:
        """Whether micro-batch ``i`` exists; call once for each, in any order."""
        while self._next_index <= min(i, self.extent.backwards - 1):
            self._fetch_mini_batch(self._next_index)
        return i < self.extent.backwards

    def _fetch_mini_batch(self, i: int) -> None:
        """Takes the mini-batch that begins with micro-batch ``i``, or ends the stream."""
        batch = i // self.chunks
        taken = self._cut(batch)
        m = 0 if taken is None else taken.m
        if m < self.chunks:  # the end, or a smaller last mini-batch
            self.extent.end(i + m)
        if 0 < m < self.chunks and i < self._most and self._cut(batch + 1) is not None:
            raise ValueError(
                f"mini-batch {batch} gave {m} micro-batches, and is not the last one, but "
                f"versions='2bw' updates the weights after chunks={self.chunks} of them: change "
                "the batch size or chunks, or use DataLoader(..., drop_last=True)"
            )
        if taken is not None:
            for k in range(m):
                self._waiting[i + k], self._targets[i + k] = taken.pull(k), taken.target(k)
            self.sizes += taken.sizes
        self._next_index = i + self.chunks

    def _cut(self, batch: int) -> Source | None:
        if (pair := self._next_pair(f"mini-batch {batch}")) is None:
            return None
        if any(tensor.requires_grad for tensor in tensors_in(pair)):
            raise ValueError(
                f"mini-batch {batch} has a tensor that requires grad, but train_stream returns no "
                "gradients of its inputs: detach() it"
            )
        cut = Source(*scatter_pair(self._pack(pair[0]), pair[1], self.chunks))
        objective = self._objectives[batch] = Objective(self._loss, cut)
        if objective.known_weights is not None:  # the loss may be on another device
            weights, total = objective.known_weights
            objective.known_weights = list(map(float, weights)), float(total)
        return cut

    def root_and_gradient(self, i: int, *args: Any) -> tuple[Tensor, float]:
        """As of an ``Objective``, for micro-batch ``i`` of the stream."""
        batch, k = divmod(i, self.chunks)
        objective = self._objectives[batch]
        root = objective.root_and_gradient(k, *args)
        if not root[0].requires_grad:
            raise RuntimeError(
                "the loss does not require grad, so there is nothing to train: loss_fn detaches "
                "its arguments, or does not use them"
            )
        last = k == objective.m - 1
        late = objective.returns_weights or (last and objective.factor() is not None)
        if late and self.chunks > 1:
            raise ValueError(
                "train_stream needs all weights before the first micro-batch runs backward, but "
                "loss_fn returns them with the losses: give train_stream weight=, a function of "
                "the target, and let loss_fn return the loss alone, not (loss, weight)"
            )
        self._noted[i] = objective.records(k)
        if last:
            del self._objectives[batch]
            with torch.no_grad():
                self.results[batch] = self._noted[i] = objective.loss(), objective.metrics()
                if self._one_worker and len(self.results) == _BLOCK_SIZE:
                    found = list(self.results.values())
                    self.blocks.append(torch.stack([loss for loss, _ in found]))
                    self.metrics += [metrics for _, metrics in found]
                    self.results.clear()
                    self._noted[i] += (self.blocks[-1],)
        return root

    def records(self, i: int) -> tuple[Any, ...]:
        """The tensors of a micro-batch that the caller will use; call once for each."""
        return self._noted.pop(i)


class _StreamLeaves(Accumulated):
    """The leaves of all versions; cells may add gradients to no others."""

    def __init__(self, call: Call, weights: Sequence[_StageWeights]) -> None:
        versions: list[Any] = [each.leaves or [each.parameters] for each in weights]
        known = [list(chain.from_iterable(leaves)) for leaves in versions]
        super().__init__(call, known)

    def adopt(self, r: int, new: list[Tensor]) -> None:
        stage = self._call.pipeline.stages[r].j
        raise RuntimeError(
            f"{described(new[0])}, which requires grad, is used by stage {stage} or by loss_fn, "
            "and no optimizer of train_stream would update it: make it a parameter of a layer "
            "there, used as its attribute (not through a list, a dict or a closure), or detach() it"
        )


class _StreamTask(TrainingTask):
    def __init__(
        self, call: Call, source: _MiniBatches, head: LossHead, leaves: Accumulated, weights: Any
    ) -> None:
        super().__init__(call, source, head, leaves)
        self._stream, self._weights = source, weights

    def action(self, kind: Kind, r: int) -> Run:
        others: dict[str, Any] = {"reduce": self._reduce, "update": self._update}
        return partial(others[kind], r) if kind in others else super().action(kind, r)

    def bind(self, kind: Kind, r: int) -> Run:
        run, weights = super().bind(kind, r), self._weights[r]
        if kind in ("reduce", "update"):
            return run

        def forward(i: int, messages: list[Message]) -> Sequence[Message]:
            if self.first[r]:
                with self._stream.lock:
                    there = with_cpu_generator(partial(self._has_micro_batch, i))
            else:
                there = messages[0].value is not _END
            if not there:
                return [Message(_END)] * len(self.call.outgoing[r])
            weights.enter(i)
            return run(i, messages)

        def with_weights(i: int, messages: list[Message]) -> Sequence[Message]:
            weights.use(i)
            return run(i, messages)

        return forward if kind == "forward" else with_weights

    def _has_micro_batch(self, i: int) -> bool:
        with self.call.as_caller():
            return self._stream.has(i)

    def _reduce(self, r: int, i: int, messages: list[Message]) -> list[Message]:
        """Sends the gradients of a replica to the owner; None if it had no mini-batch."""
        grads = self._weights[r].pop_grads() if i < self._stream.extent.backwards else None
        return [message_to(self.call, r, self.call.pipeline.stages[r].j, grads)]

    def _update(self, r: int, i: int, messages: list[Message]) -> list[Message]:
        owner, *others = self.call.pipeline.indices[self.call.pipeline.stages[r].j]
        chunks, weights = self._stream.chunks, self._weights[r]
        following = i + len(others) + 1 if others else (i // chunks + 1) * chunks
        given = [message.value for message in messages]
        try:
            if r == owner:
                streams = self.call.streams_of[r]
                streams.wait_for(streams)  # until the weights are copied to other replicas
                self.call.release_to_caller(r, weights.gradients(following, given))
                weights.update()
            else:
                self.call.release_to_caller(r, weights.follow(following, *given))
        except BaseException as error:
            stage = self.call.pipeline.stages[r].j
            annotate(error, f"in the update of stage {stage}, after micro-batch {i}")
            raise
        for run in self.call.runs[r].with_units:
            if run.recomputation.modules is not None:
                run.recomputation.modules.note_versions()
        if self.call.state.nested:  # its casts are of the old weights
            torch.clear_autocast_cache()
        self.leaves.expect_first_grads(r)
        newest = [parameter.detach() for parameter in weights.parameters]
        followers = others if r == owner else []
        return [message_to(self.call, r, other, newest) for other in followers]
