"""Substitutes for tensors in modules: leaves for tied weights and replicas, versions of a stream.

Between calls there is one tensor, owned by the first stage that has it, or by the first replica of
its stage. Every other stage or replica computes with a leaf of its own: a copy, made when a call
begins, or in the same memory an alias. So no two workers add to one gradient. The gradients of such
leaves go to the owner in a fixed order::

    owner (stage 0)   weight ----- copy, once ------> stage 3      before the first cell
                        ^                               |
                        +---- gradient of cell (i, 3) --+          in the backward of each cell

    stage 0, replica 0   micro-batches 0 2 4 ..  --+
                                                   +-->  stage 1   0 1 2 3 4 ..
    stage 0, replica 1   micro-batches 1 3 5 ..  --+

Cell ``(i, 0)`` adds its own gradient of a tied weight to the one that it receives, in the order of
the plain model. (A third stage in between adds its gradient, too.) A replica sends the sums of
its gradients to the owner, which adds those of replica 1, 2, and so on. In a program a replica is
one more stage, over shallow copies of the modules, like those of ``torch.nn.parallel.replicate``.

A cell also runs on shallow copies if other threads may run its modules or look at them (another
call; the loss function, which may read all parameters). Versions of a stream, and leaves for
modules with their own ``forward`` (compiled), are put into the modules, and removed after the run,
under the lock of the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from operator import or_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from syncpipe.layers.batchnorm import ORIGINAL, DeferredBatchNorm
from syncpipe.layers.ties import Tie, check_modes, check_replicas, find_ties, move_layers
from syncpipe.runtime.interrupts import Swap, forkable_lock
from syncpipe.runtime.recomputation import version_of
from syncpipe.runtime.streams import DeviceStreams, same_memory
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.steps import Edge
from syncpipe.stages.part import Part
from syncpipe.stages.run import StageRun
from syncpipe.stages.stage import Partition, Stage
from syncpipe.storage import modules_of, place_of, places_of, renorming, with_class_of

_OWN_FORWARD = ("forward", "_compiled_call_impl")
_OF_PIPES = ("_layout", "_modules", "_pipeline")  # attributes that a copied Pipe makes for itself
_MISSING = object()

# Throughout, ``substitute_of`` maps the identity of a tensor to its substitute.


def substitute(tensor: Tensor, value: Tensor, trained: bool | None = None) -> Tensor:
    """A leaf with the memory of ``value`` and the class and attributes of ``tensor``."""
    leaf = value.detach()
    if type(leaf) is not type(tensor):
        leaf = torch.Tensor._make_subclass(type(tensor), leaf)
    return with_class_of(tensor, leaf).requires_grad_(
        tensor.requires_grad if trained is None else trained
    )


def use_substitutes(
    run: StageRun, substitute_of: dict[int, Tensor], shallow: dict[Stage, ShallowCopy]
) -> None:
    """Makes the cells of a stage compute with substitutes."""
    for each in run.with_units:
        each.substitute_of, each.shallow = substitute_of, shallow.get(each.stage)
        each.swaps = [] if each.shallow else swaps_of(each.partition, substitute_of)
        each.stage.changes.needs_lock = True  # all threads see the modules


def swaps_of(partition: nn.Module, substitute_of: dict[int, Tensor]) -> list[Swap]:
    """The swaps that put substitutes into the modules themselves."""
    found: list[Swap] = [
        (place, name, substitute_of[id(tensor)])
        for _, place, name, tensor in places_of(partition)
        if id(tensor) in substitute_of
    ]
    for module in modules_of(partition):
        for name, value in module.__dict__.items():
            if type(value) is list and any(id(item) in substitute_of for item in value):
                found.append((module.__dict__, name, _substituted(value, substitute_of)))
    return found


def _substituted(weights: list[Any], substitute_of: dict[int, Tensor]) -> list[Any]:
    """A list of tensors, for example the flat weights of an LSTM, with their substitutes."""
    return [substitute_of.get(id(item), item) for item in weights]


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module has its own ``forward``, which knows the module: it cannot be copied."""
    own = [module.__dict__.get(name) for name in _OWN_FORWARD]
    return any(value is not None and type(value) is not MethodType for value in own)


class ShallowCopy:
    """Copies of a partition's modules with substitutes; they live from call to call."""

    def __init__(self, partition: nn.Module) -> None:
        self._original = partition
        self._made: dict[int, tuple[nn.Module, Any]] = {}
        self._first: list[tuple[Any, Any, dict[str, Any], Sequence[str]]] = []
        self._original_of: dict[int, Any] = {}
        self.partition: Any = self.follow({})

    def follow(self, substitute_of: dict[int, Tensor]) -> Any:
        """Updates and returns the copy; ``ValueError`` if a module has its own ``forward``."""
        made: dict[int, tuple[nn.Module, Any]] = {}
        first: list[tuple[Any, Any, dict[str, Any], Sequence[str]]] = []
        own = [t for *_, t in places_of(self._original) if id(t) in substitute_of]
        original_of: dict[int, Any] = {id(substitute_of[id(tensor)]): tensor for tensor in own}
        inside: set[nn.Module] = set()
        for _, module in self._original.named_modules(inside):
            pipe = getattr(module, "_syncpipe_skips_are_internal", False)
            if pipe and not any(id(p) in substitute_of for p in module.parameters()):
                inside.update(module.modules())  # its layers stay as they are
                continue
            _, other = self._made.get(id(module), (None, None))
            if type(other) is not type(module):
                other = object.__new__(type(module))
            made[id(module)] = module, other
        for module, other in made.values():
            state = _state(module, substitute_of, made)
            object.__setattr__(other, "__dict__", state)  # `__setattr__` may be the user's
            original_of[id(other)] = module
            internal = _OF_PIPES if hasattr(module, "_syncpipe_skips_are_internal") else ()
            for name in ("__dict__", "_parameters", "_modules", "_buffers"):
                source, target = getattr(module, name), getattr(other, name)
                if source is not target:
                    first.append((source, target, dict(target), internal))
        # Set at the end, so that after Ctrl-C the next call finds the former copies.
        self._made, self._first, self._original_of = made, first, original_of
        self.partition = made[id(self._original)][1]
        return self.partition

    def copy_attributes_back(self) -> None:
        """Sets attributes on the modules that a forward has set on their copies."""
        for source, target, first, internal in self._first:
            for name in {**first, **target}:
                value = target.get(name, _MISSING)
                if first.get(name, _MISSING) is value or name in internal:
                    continue
                if value is _MISSING:
                    source.pop(name, None)
                else:
                    source[name] = self._original_of.get(id(value), value)


def _state(
    module: nn.Module, substitute_of: dict[int, Tensor], made: dict[int, tuple[nn.Module, Any]]
) -> dict[str, Any]:
    state = {ORIGINAL: module, **module.__dict__}  # a copy of a copy keeps the first original
    for name, value in list(state.items()):
        if type(value) is MethodType and id(value.__self__) in made:
            state[name] = MethodType(value.__func__, made[id(value.__self__)][1])
        elif type(value) is list and any(id(item) in substitute_of for item in value):
            state[name] = _substituted(value, substitute_of)
        elif substitute_of and name in _OWN_FORWARD and value is not None:
            raise ValueError(
                f"a {type(module).__name__} has replicas, or shares weights with another stage, "
                "so shallow copies of it run; but its forward was compiled or replaced, and is "
                "bound to this one module: give the stage one device, choose a balance that puts "
                "tied layers into one stage, or do not compile this layer"
            )
    state["_modules"] = {
        name: made.get(id(child), (None, child))[1] for name, child in module._modules.items()
    }
    state["_parameters"] = {k: substitute_of.get(id(t), t) for k, t in module._parameters.items()}
    if any(id(t) in substitute_of for t in module._buffers.values()):
        state["_buffers"] = {k: substitute_of.get(id(t), t) for k, t in module._buffers.items()}
    return state


#: By ``id`` of a tensor and device: the tensor, its copy, the event at which the copy is ready.
#: Later calls make new ones: writes into the ``data`` of the original leave no trace.
_Copies = dict[tuple[int, torch.device], tuple[Tensor, Tensor, Any]]


def _leaf(tensor: Tensor, owner: DeviceStreams, streams: DeviceStreams, copies: _Copies) -> Tensor:
    """A leaf with the values of a tensor of ``owner``'s device, for use on ``streams``."""
    with torch.inference_mode(False), torch.no_grad():
        value = tensor
        if not same_memory(owner.device, streams.device):
            key = (id(tensor), streams.device)
            if key not in copies:
                (copy,), event = owner.send([tensor.detach()], streams)
                copies[key] = tensor, copy, event
            _, value, event = copies[key]
            streams.receive(event, [value])
        return substitute(tensor, value)


class SharedTensors:
    """The tensors and modules that stages of a pipeline share; lives from call to call."""

    def __init__(self, stages: Sequence[Stage], workers: Sequence[Worker]) -> None:
        self._partitions = [stage.partition for stage in stages]
        self._workers = list(workers)
        self._places = {(stage.j, name) for stage in stages for name in stage.partition.tied}
        self._shallow: dict[Stage, ShallowCopy] = {}  # of modules that are in several stages

    def find(self) -> list[Tie]:
        """Returns the current ties; moves layers to their devices if ties have changed."""
        if len(self._partitions) < 2:
            return []
        ties = find_ties(self._partitions)
        places = {(place.stage, place.full_name) for tie in ties for place in tie.places}
        if places != self._places:
            move_layers(self._partitions, [worker.device for worker in self._workers])
            self._places = places
        if not ties:
            self._shallow = {}
        return ties

    def copies_of_modules(
        self, ties: Sequence[Tie], runs: Sequence[StageRun], watched: Sequence[int]
    ) -> dict[Stage, ShallowCopy]:
        """Makes copies for stages whose modules other workers run, or look at (``watched``)."""
        homes: dict[nn.Module, set[int]] = {}
        for place in chain.from_iterable(tie.places for tie in ties):
            homes.setdefault(place.module, set()).add(place.stage)
        copied = set(watched)
        for home in homes.values():
            if len({self._workers[j] for j in home}) > 1:
                copied |= home
            for run in [run for j in home for run in runs[j].with_units]:
                # Two callers of the pipe would swap tensors in one module.
                run.stage.changes.lock = runs[min(home)].stage.changes.lock
        before, self._shallow = self._shallow, {}
        for stage in [run.stage for j in copied for run in runs[j].with_units]:
            self._shallow[stage] = before.get(stage) or ShallowCopy(stage.partition)
        return self._shallow


def share(call: Any) -> None:
    """Makes the cells of a call compute with substitutes, where stages share tensors, a stage has
    replicas, or tensors have hooks or a graph."""
    pipeline = call.pipeline
    substitute_of: list[dict[int, Tensor]] = [{} for _ in pipeline.stages]
    if call.graph and call.state.grad:
        _substitute_hooked(call, substitute_of)
    if ties := pipeline.shared.find():
        check_replicas(ties, list(map(len, pipeline.indices)))
        call.parts.append(CallTies(call, ties, substitute_of))
    if len(pipeline.stages) > pipeline.n:
        call.parts.append(CallReplicas(call, substitute_of))
    shallow: dict[Any, Any] = {}
    if any(substitute_of):
        watched = [r for r, own in enumerate(substitute_of) if own and _is_watched(call, r)]
        shallow = pipeline.shared.copies_of_modules(ties, call.runs, watched)
    for run, own in zip(call.runs, substitute_of, strict=True):
        if own or run.stage in shallow:
            use_substitutes(run, own, shallow)


def _substitute_hooked(call: Any, substitute_of: list[dict[int, Tensor]]) -> None:
    """Substitutes leaves of the same memory for tensors with hooks or a graph, which serve the
    caller's graph once per call."""
    for stage in call.pipeline.stages[: call.pipeline.n]:
        for *_, tensor in places_of(stage.partition):
            if not tensor.requires_grad or is_lazy(tensor):
                continue
            if tensor._backward_hooks or not tensor.is_leaf:
                leaf = substitute(tensor, tensor, True)  # counts the same versions
                leaf = substitute_of[stage.index].setdefault(id(tensor), leaf)
                call.original_of[id(leaf)] = tensor


def _is_watched(call: Any, r: int) -> bool:
    """Whether other threads may look at the modules of a stage while its cells run.

    Concurrent callers may, so modules are copied if they can be. Otherwise only the loss function
    counts, which runs on the last stage's worker.
    """
    worker_of, n = call.pipeline.worker_of, call.pipeline.n
    if not any(map(has_own_forward, call.runs[r].partition.modules())):
        return True
    return bool(worker_of[r] != worker_of[n - 1]) and not (call.graph or call.inline)


class CallTies(Part):
    """The tied tensors of one call; made on the caller's thread after its streams were awaited.
    Fills ``substitute_of``, and the leaves and edges of the call.

    Attributes:
        receivers: for each stage, and each of ``call.returns`` that leaves it (from a stage back to
            the one before it with the same weight), the leaves that get the gradients.
        senders: for each stage, and each of them that ends there, the leaves that send gradients.
    """

    def __init__(
        self, call: Any, ties: Sequence[Tie], substitute_of: list[dict[int, Tensor]]
    ) -> None:
        streams_of, grad = call.streams_of, call.state.grad
        # A lone worker runs forward in the plain model's order, also for writes into tied tensors.
        alone = all(each is streams_of[0] for each in streams_of)
        self._in_order = alone and (call.graph or not grad)
        if not self._in_order:
            check_modes(ties)
        copies: _Copies = {}
        hops: dict[tuple[int, int], list[Tensor]] = {}
        for tie in ties:
            trained = grad and tie.tensor.requires_grad
            for j in tie.stages[1:]:
                call.owned_elsewhere[j].add(id(tie.tensor))
                owner, streams = streams_of[tie.stages[0]], streams_of[j]
                if trained or not same_memory(owner.device, streams.device):
                    leaf = _leaf(tie.tensor, owner, streams, copies)
                    substitute_of[j][id(tie.tensor)] = leaf
                    call.original_of[id(leaf)] = tie.tensor
                    call.extra_leaves[j] += [leaf] if trained else []
            for source, target in pairwise(tie.stages if trained else ()):
                hops.setdefault((target, source), []).append(tie.tensor)
        self._versions = [(tie, tie.tensor, version_of(tie.tensor)) for tie in ties]
        for tensor, copy, _ in copies.values():
            tie = next(tie for tie in ties if tie.tensor is tensor)
            self._versions.append((tie, copy, version_of(copy)))
        number = len(call.pipeline.edges)
        call.returns = tuple(
            [Edge(number + k, source, j, None) for k, (j, source) in enumerate(hops)]
        )
        self.receivers: list[list[list[Tensor]]] = [[] for _ in streams_of]
        self.senders: list[list[list[Tensor]]] = [[] for _ in streams_of]
        for edge in call.returns:
            tensors = hops[edge.target, edge.source]
            source_leaves, target_leaves = substitute_of[edge.source], substitute_of[edge.target]
            self.receivers[edge.source].append([source_leaves.get(id(t), t) for t in tensors])
            self.senders[edge.target].append([target_leaves[id(t)] for t in tensors])
            call.incoming[edge.target] = [*call.incoming[edge.target], edge]

    def finish(self) -> None:
        """Checks after the last cell; ``RuntimeError`` if a forward wrote into a tied tensor."""
        for tie, tensor, version in () if self._in_order else self._versions:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"{tie} are one tensor, and a layer modified it in place in its forward (an "
                    "embedding with max_norm, or a buffer that it counts in). Stages would apply "
                    "the changes in another order than the plain model: choose a balance that puts "
                    "these layers into one stage, or untie them"
                )


class Replica:
    """A replica of a stage's layers; lives from call to call."""

    def __init__(self, original: Partition) -> None:
        self._copy, self._lock = ShallowCopy(original), forkable_lock()
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: original, substitute

    @property
    def partition(self) -> Any:
        return self._copy.partition

    def follow(
        self, tensors: Sequence[Tensor], owner: DeviceStreams, streams: DeviceStreams
    ) -> None:
        """Updates the replica to the partition, which has these parameters and buffers."""
        with self._lock:  # several threads may call the pipe
            copies: _Copies = {}
            leaves = {}
            for tensor in tensors:
                leaf = _leaf(tensor, owner, streams, copies)
                _, last = self._leaves.get(id(tensor), (tensor, leaf))
                if (last.shape, last.dtype) == (leaf.shape, leaf.dtype):
                    if place_of(last) != place_of(leaf):
                        last.data = leaf.data
                    leaf = last.requires_grad_(tensor.requires_grad)  # a concurrent call uses it
                leaves[id(tensor)] = tensor, leaf
            self._leaves = leaves
            self._copy.follow({key: leaf for key, (_, leaf) in leaves.items()})

    def separate_memory(self) -> None:
        """Gives trained leaves memory of their own until the next call."""
        leaves = {}
        for key, (tensor, leaf) in self._leaves.items():
            shared = leaf.requires_grad and place_of(leaf) == place_of(tensor)
            leaves[key] = substitute(tensor, leaf.data.clone()) if shared else leaf
        self._copy.follow(leaves)

    def substitute_of(self, tensor: Tensor) -> Tensor:
        return self._leaves[id(tensor)][1]


class CallReplicas(Part):
    """The replicas of one call, as :class:`CallTies`.

    Attributes:
        trained: by index the tensors that need gradients, in the same order on all replicas.
    """

    def __init__(self, call: Any, substitute_of: list[dict[int, Tensor]]) -> None:
        pipeline, runs, streams_of = call.pipeline, call.runs, call.streams_of
        self._owners = [runs[j] for j, *others in pipeline.indices if others]
        self.trained: dict[int, list[Tensor]] = {}
        self._before: list[tuple[Stage, nn.Module, str, Tensor, int]] = []
        self._places: list[tuple[Stage, int]] = []  # stages, their number of parameters and buffers
        #: Owners and replicas, their modes, and whether the replicas trust earlier calls.
        self._draws: list[tuple[StageRun, StageRun, Any, bool]] = []
        for (j, *others), replicas in zip(pipeline.indices, pipeline.replicas, strict=True):
            if not others:
                continue
            _check_replicated(runs[j].stage)
            tensors = list({id(t): t for *_, t in places_of(runs[j].partition)}.values())
            trained = [t for t in tensors if call.state.grad and t.requires_grad]
            self.trained[j] = [substitute_of[j].get(id(t), t) for t in trained]
            for k, (index, replica) in enumerate(zip(others, replicas, strict=True), 1):
                replica.follow(tensors, streams_of[j], streams_of[index])
                own = self.trained[index] = list(map(replica.substitute_of, trained))
                call.original_of.update(zip(map(id, own), trained, strict=True))
                if k < runs[j].m:  # it has a micro-batch in this call
                    self._trust(runs[j], runs[index])
            for stage in [runs[index].stage for index in (j, *others)]:
                places = list(places_of(stage.partition))
                self._places.append((stage, len(places)))
                self._before += [(stage, m, name, t, version_of(t)) for m, _, name, t in places]

    def _trust(self, owner: StageRun, run: StageRun) -> None:
        """Lets a replica trust earlier calls for which layers draw.

        Observing the first cell holds the generators: replicas would begin one after another.
        """
        kinds = [
            (type(m), m.training and (not isinstance(m, _DropoutNd) or m.p > 0))
            for m in run.partition.modules()
        ]
        mode = (run.grad, *kinds)
        trusted = all(mode in each.stage.draws_by_mode for each in run.with_units)
        self._draws.append((owner, run, mode, trusted))
        for each in run.with_units if trusted else ():
            each.drawing.trusted, each.drawing.draws = True, list(each.stage.draws_by_mode[mode])
        if trusted and not (owner.stage.backward_draws or run.stage.backward_draws):
            run.drawing.backward_draws = 0

    def allow_updates(self, replicas: Sequence[Sequence[Replica]]) -> None:
        """Prepares a call that updates the weights of each replica by itself."""
        for replica in chain.from_iterable(replicas):
            replica.separate_memory()
        self._before = [each for each in self._before if not each[3].requires_grad]

    def finish(self) -> None:
        """Moves running statistics after the last cell; ``RuntimeError`` if a forward wrote into a
        parameter or a buffer, or drew unexpectedly."""
        for stage, module, name, tensor, version in self._before:
            now = module._parameters.get(name, module._buffers.get(name))
            if now is not tensor or version_of(tensor) != version:
                raise RuntimeError(
                    f"{name!r} of a {type(module).__name__} changed in a call, and stage {stage.j} "
                    "has replicas: each replica sees only some micro-batches, so counts in buffers "
                    "and writes into parameters would differ between replicas. Give the stage one "
                    "device, or let the layer return the value"
                )
        for stage, size in self._places:
            if len(list(places_of(stage.partition))) != size:
                raise RuntimeError(
                    f"a layer of stage {stage.j}, which has replicas, made or removed a parameter, "
                    "a buffer or a module in its forward, on each replica separately. The next "
                    "call copies those of the first replica: call again, or run the plain model "
                    "once before making it a Pipe"
                )
        unexpected: list[str] = []
        for owner, run, mode, trusted in self._draws:
            for one, other in zip(owner.with_units, run.with_units, strict=True):
                draws = list(map(or_, one.drawing.draws, other.drawing.draws))
                known = other.stage.draws_by_mode.get(mode, draws)
                other.stage.draws_by_mode[mode] = draws
                unexpected += [
                    f"{one.stage.describe_layer(k)} of stage {one.stage.j}"
                    for k, (now, then) in enumerate(zip(draws, known, strict=True))
                    if trusted and now & ~then
                ]
            if trusted and owner.drawing.backward_draws and run.drawing.backward_draws == 0:
                unexpected.append(f"a backward of stage {owner.stage.j}")
        if unexpected:
            raise RuntimeError(
                f"{unexpected[0]}, which has replicas, drew random numbers for the first time, "
                "which other replicas did not expect. Call again: the next call expects it. If a "
                "thread of yours draws random numbers meanwhile, give it a torch.Generator of its "
                "own"
            )
        for owner in self._owners:
            if owner.statistics is not None:
                owner.statistics.commit()


def _check_replicated(stage: Stage) -> None:
    """Raises ``ValueError`` for layers that cannot have replicas."""
    for k, layer in enumerate(stage.partition._modules.values()):
        for module in () if layer is None else layer.modules():
            if reason := _reason(module):
                raise ValueError(
                    f"stage {stage.j} has replicas, but {stage.describe_layer(k)} {reason}"
                )


def _reason(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, which computes with its own tensors only: give it one device"
    if getattr(module, "_syncpipe_skips_are_internal", False):
        return "contains a Pipe, whose layers stay on their devices: give it one device"
    if any(t is not None and is_lazy(t) for t in module._parameters.values()):
        return "has parameters without values: run the plain model once before making it a Pipe"
    moves = isinstance(module, _NormBase) and module.training and module.running_mean is not None
    if moves and not isinstance(module, DeferredBatchNorm):
        return (
            f"has running statistics in its {type(module).__name__}, which micro-batches update "
            "one after another: make the Pipe with deferred_batch_norm=True, call eval() of that "
            "normalisation, or give the stage one device"
        )
    if renorming(module):
        return "has an embedding with max_norm, which writes into its weight: give it one device"
    return ""
