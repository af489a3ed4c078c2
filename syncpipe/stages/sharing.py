"""Copies of leaves: what tied weights are on other stages, and all weights on replicas.

Outside of running cells there is one tensor. Its owner is the first stage that has it, or the first
replica of its stage. Whoever else computes with it has a leaf of its own: a copy on its device, as
fresh as the original is when a call begins, or where that is the same memory the very same values.
So no two workers ever add to one gradient. What such a leaf gets goes to the owner, in a fixed
order::

    owner (stage 0)   weight ----- copy, once ------> stage 3      before the first cell
                        ^                               |
                        +---- gradient of cell (i, 3) --+          in the backward of each cell

The gradient of a tied weight begins the backward of the weight in cell ``(i, 0)``, and that of the
cell is added to it: the plain model's order. (Over a third stage in between it goes from stage to
stage.) A replica adds up those of its micro-batches::

    stage 0, replica 0   micro-batches 0 2 4 ..  --+
                                                   +-->  stage 1   0 1 2 3 4 ..
    stage 0, replica 1   micro-batches 1 3 5 ..  --+

When it is through with its stage it sends them to the owner, who adds them to its own: replica 1,
2, and so on, whenever they come. Each goes through the parameter's hooks as one gradient. To what
runs, a replica is a stage of its own, over shallow copies of the modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from syncpipe.data import place_of
from syncpipe.layers.batchnorm import DeferredBatchNorm
from syncpipe.layers.placement import move_layers
from syncpipe.layers.ties import Tie, check_modes, find_ties
from syncpipe.runtime.locks import forkable
from syncpipe.runtime.module_state import version_of
from syncpipe.runtime.streams import Lane, same_memory
from syncpipe.runtime.thread_state import CallerState
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.steps import Edge
from syncpipe.stages.run import StageRun
from syncpipe.stages.stage import Partition, Stage
from syncpipe.stages.swaps import ShallowCopy, swaps_of

__all__ = ["CallReplicas", "CallTies", "Replica", "SharedTensors", "stand_in"]


def stand_in(run: StageRun, others: dict[int, Tensor], shallow: dict[Stage, ShallowCopy]) -> None:
    """Lets the cells of a stage compute with other tensors.

    Args:
        run: the stage.
        others: by the identity of a tensor of its modules what is in its place.
        shallow: the copies of its modules, if others run these at the same time.
    """
    for each in run.all:
        each.others, each.shallow = others, shallow.get(each.stage)
        each.swaps = [] if each.shallow else swaps_of(each.partition, others)
        each.stage.changes.any = True  # what is in modules is seen by all threads


@dataclass(frozen=True)
class _Copy:
    """A copy of a tensor on another device, and what tells whether it still is one.

    Attributes:
        tensor: the original.
        mark: its memory and its version, when the copy was made.
        copy: on another device.
        event: tells when it is there.
        version: its own, then.
    """

    tensor: Tensor
    mark: tuple[Any, ...]
    copy: Tensor
    event: Any
    version: int

    @property
    def serves(self) -> bool:
        """Whether nobody has written into either."""
        return self.mark == _mark(self.tensor) and self.version == version_of(self.copy)


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), version_of(tensor), tensor.shape, tensor.dtype


class Copies:
    """Copies on other devices, from call to call."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device], _Copy] = {}

    def begun(self, state: CallerState) -> CallCopies:
        """Those of one call, which may use what the last one made."""
        kept, self._kept = self._kept, {}
        return CallCopies(state, kept, self._kept)


class CallCopies:
    """The leaves that stand for others in one call."""

    def __init__(self, state: CallerState, before: Any, kept: Any) -> None:
        self._state, self._before, self._kept = state, before, kept
        self.made: dict[tuple[int, torch.device], _Copy] = {}

    def leaf(self, tensor: Tensor, owner: Lane, lane: Lane) -> Tensor:
        """A leaf with the values of a tensor, where a lane is.

        Args:
            tensor: a parameter or a buffer.
            owner: the lane of its device.
            lane: the other one.
        """
        with torch.inference_mode(False), torch.no_grad():
            value = tensor
            if not same_memory(owner.device, lane.device):
                value = self._brought(tensor, owner, lane)
            return value.detach().requires_grad_(tensor.requires_grad)

    def _brought(self, tensor: Tensor, owner: Lane, lane: Lane) -> Tensor:
        key = (id(tensor), lane.device)
        found = self.made.get(key)
        if found is None:
            found = self._before.pop(key, None)
            if found is None or not found.serves:
                found = None  # its memory can be used again
                (copy,), event = owner.send([tensor.detach()], lane)
                found = _Copy(tensor, _mark(tensor), copy, event, version_of(copy))
            self.made[key] = found
            # A gradient is a reason to change the original, and what is written into its `data`
            # then leaves no trace.
            trained = self._state.grad and tensor.requires_grad
            if not (trained or self._state.needs_inline):
                self._kept[key] = found
        lane.receive(found.event, [found.copy])
        return found.copy


# -- tied weights


class SharedTensors:
    """What the stages of a pipeline share, from call to call.

    Args:
        stages: all of them.
        workers: for each its worker.
    """

    def __init__(self, stages: Sequence[Stage], workers: Sequence[Worker]) -> None:
        self._partitions = [stage.partition for stage in stages]
        self._workers = list(workers)
        self._places = {(stage.j, name) for stage in stages for name in stage.partition.tied}
        self.copies = Copies()
        self._shallow: dict[Stage, ShallowCopy] = {}  # of modules that are in several stages

    def find(self) -> list[Tie]:
        """The ties that there are now; what was tied or untied is moved to where it belongs now."""
        if len(self._partitions) < 2:
            return []
        ties = find_ties(self._partitions)
        places = {(place.stage, place.full_name) for tie in ties for place in tie.places}
        if places != self._places:
            move_layers(self._partitions, self._workers, ties)
            self._places = places
        if not ties:
            self.copies, self._shallow = Copies(), {}
        return ties

    def copies_of_modules(
        self, ties: Sequence[Tie], runs: Sequence[StageRun], watched: Sequence[int]
    ) -> dict[Stage, ShallowCopy]:
        """For stages whose modules others run or look at meanwhile, copies of these.

        Args:
            ties: what stages share.
            runs: all stages.
            watched: those at whose modules others look.
        """
        homes: dict[nn.Module, set[int]] = {}
        for place in chain.from_iterable(tie.places for tie in ties):
            homes.setdefault(place.module, set()).add(place.stage)
        copied = set(watched)
        for home in homes.values():
            if len({self._workers[j] for j in home}) > 1:
                copied |= home
            for run in [run for j in home for run in runs[j].all]:
                # Two threads may call the pipe, and would swap in one module.
                run.stage.changes.lock = runs[min(home)].stage.changes.lock
        before, self._shallow = self._shallow, {}
        for stage in [run.stage for j in sorted(copied) for run in runs[j].all]:
            self._shallow[stage] = before.get(stage) or ShallowCopy(stage.partition)
        return self._shallow


class CallTies:
    """The tied tensors of one call; to be made on the caller's thread.

    Args:
        ties: what the stages share.
        shared: what is kept of it from call to call.
        lanes: for each stage the lane of its worker, which waits for the caller already.
        edges: those of the pipeline; ours have the numbers after them.
        state: the caller's.
        instead: for each stage, by the identity of a tensor, what stands in its place; filled.
        originals: by the identity of a leaf what it stands for; filled.
        in_order: one worker alone goes forward in the plain model's order.

    Attributes:
        edges: over which gradients go back, from a stage to the one before it that has the weight.
        leaves: for each stage those of these that get gradients.
        receivers: for each stage, and each of ``edges`` that leaves it, the leaves that its
            gradients are for.
        senders: for each stage the ``edges`` that come to it, with the leaves whose gradients go
            back.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        shared: SharedTensors,
        lanes: Sequence[Lane],
        edges: Sequence[Edge],
        state: CallerState,
        instead: list[dict[int, Tensor]],
        originals: dict[int, Tensor],
        *,
        in_order: bool,
    ) -> None:
        several = any(lane is not lanes[0] for lane in lanes)
        #: What is written into a tied tensor is then seen as in the plain model.
        self._in_order = not several and (in_order or not state.grad)
        if not self._in_order:
            check_modes(ties)
        self._ties = ties
        self._versions = [version_of(tie.tensor) for tie in ties]
        self._copies = shared.copies.begun(state)
        self.leaves: list[list[Tensor]] = [[] for _ in lanes]
        hops: dict[tuple[int, int], list[Tensor]] = {}
        for tie in ties:
            trained = state.grad and tie.tensor.requires_grad
            for j in tie.stages[1:]:
                owner, lane = lanes[tie.owner], lanes[j]
                if trained or not same_memory(owner.device, lane.device):
                    leaf = instead[j][id(tie.tensor)] = self._copies.leaf(tie.tensor, owner, lane)
                    originals[id(leaf)] = tie.tensor
                    self.leaves[j] += [leaf] if trained else []
            for source, target in pairwise(tie.stages if trained else ()):
                hops.setdefault((target, source), []).append(tie.tensor)
        self.edges = tuple(
            [Edge(len(edges) + k, source, j, None) for k, (j, source) in enumerate(sorted(hops))]
        )
        self.receivers: list[list[list[Tensor]]] = [[] for _ in lanes]
        self.senders: list[list[tuple[Edge, list[Tensor]]]] = [[] for _ in lanes]
        for edge in self.edges:
            tensors = hops[edge.target, edge.source]
            here, there = instead[edge.source], instead[edge.target]
            self.receivers[edge.source].append([here.get(id(t), t) for t in tensors])
            self.senders[edge.target].append((edge, [there[id(t)] for t in tensors]))

    def foreign(self, j: int) -> set[int]:
        """The tensors, by identity, that are in stage ``j`` but not its own."""
        return {id(tie.tensor) for tie in self._ties if j in tie.stages[1:]}

    def finish(self) -> None:
        """Call after the last cell.

        Raises:
            RuntimeError: a forward wrote into a tied tensor.
        """
        for tie, version in () if self._in_order else zip(self._ties, self._versions, strict=True):
            copies = [each for each in self._copies.made.values() if each.tensor is tie.tensor]
            if version_of(tie.tensor) != version or not all(each.serves for each in copies):
                raise RuntimeError(
                    f"{tie} are one tensor, and a layer modified it in place in its forward (an "
                    "embedding with max_norm, or a buffer that it counts in). Stages see the "
                    "micro-batches in another order than the plain model does, so it is not the "
                    "same: choose a balance that puts these layers into one stage, or untie them"
                )


# -- replicas


class Replica:
    """The layers of a stage once more, from call to call.

    Args:
        original: the partition.
    """

    def __init__(self, original: Partition) -> None:
        self._copy, self._copies, self._lock = ShallowCopy(original), Copies(), forkable()
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: original, and own

    @property
    def partition(self) -> Any:
        """The partition with tensors of its own."""
        return self._copy.partition

    def follow(
        self, tensors: Sequence[Tensor], owner: Lane, lane: Lane, state: CallerState
    ) -> None:
        """Makes it what the partition is now.

        Args:
            tensors: all parameters and buffers of the partition.
            owner: the lane of the first replica, where they are.
            lane: its own.
            state: the caller's.
        """
        with self._lock:  # several threads may call the pipe
            copies, leaves = self._copies.begun(state), {}
            for tensor in tensors:
                leaf = copies.leaf(tensor, owner, lane)
                _, last = self._leaves.get(id(tensor), (tensor, leaf))
                if (last.shape, last.dtype) == (leaf.shape, leaf.dtype):
                    if place_of(last) != place_of(leaf):
                        last.data = leaf.data
                    leaf = last.requires_grad_(tensor.requires_grad)  # another call has it
                leaves[id(tensor)] = tensor, leaf
            self._leaves = leaves
            self.follow_modes()

    def follow_modes(self) -> None:
        """Goes by the modules as they are now; the tensors stay."""
        self._copy.follow({key: leaf for key, (_, leaf) in self._leaves.items()})

    def part(self) -> None:
        """Gives what is trained memory of its own until the next call, where it is the owner's."""
        leaves = {}
        for key, (tensor, leaf) in self._leaves.items():
            shared = leaf.requires_grad and place_of(leaf) == place_of(tensor)
            leaves[key] = leaf.data.clone().requires_grad_() if shared else leaf
        self._copy.follow(leaves)

    def of(self, tensor: Tensor) -> Tensor:
        """What it has in the place of a tensor."""
        return self._leaves[id(tensor)][1]


class CallReplicas:
    """The replicas in one call; to be made on the caller's thread.

    Args:
        replicas: for each stage those that are not the first.
        numbers: for each stage the numbers of all.
        runs: by number.
        lanes: by number, the lane of its worker, which waits for the caller already.
        state: the caller's.
        instead: as for :class:`CallTies`.
        originals: likewise.

    Attributes:
        trained: by number what gets gradients, in one order on all of a stage.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[Replica]],
        numbers: Sequence[tuple[int, ...]],
        runs: Sequence[StageRun],
        lanes: Sequence[Lane],
        state: CallerState,
        instead: Sequence[dict[int, Tensor]],
        originals: dict[int, Tensor],
    ) -> None:
        self._owners = [runs[those[0]] for those in numbers if len(those) > 1]
        self.trained: dict[int, list[Tensor]] = {}
        self._before: list[tuple[Stage, nn.Module, str, Tensor, int]] = []
        #: Stages that go by what they knew of their draws, and that.
        self._trusting: list[tuple[Stage, list[int], int]] = []
        #: Stages whose draws this call shows, if it comes to its end, in which mode.
        self._seen: list[tuple[Stage, Any]] = []
        for (j, *others), more in zip(numbers, replicas, strict=True):
            if not more:
                continue
            check_replicated(runs[j].stage)
            tensors = list({id(t): t for _, _, t in _places(runs[j].partition)}.values())
            trained = [t for t in tensors if state.grad and t.requires_grad]
            self.trained[j] = [instead[j].get(id(t), t) for t in trained]
            for number, replica in zip(others, more, strict=True):
                replica.follow(tensors, lanes[j], lanes[number], state)
                self.trained[number] = list(map(replica.of, trained))
                originals.update(zip(map(id, self.trained[number]), trained, strict=True))
                self._trust(runs[j], runs[number])
            for stage in [runs[number].stage for number in (j, *others)]:
                places = _places(stage.partition)
                self._before += [(stage, m, name, t, version_of(t)) for m, name, t in places]

    def _trust(self, owner: StageRun, run: StageRun) -> None:
        """Lets a replica go by what was seen in earlier calls of which layers draw.

        The first cell of a stage is watched under the lock of the generators. If all replicas were
        each call would begin with one replica after the other.
        """
        flags = [
            module.training and (not isinstance(module, _DropoutNd) or module.p > 0)
            for module in run.partition.modules()
        ]
        mode = ("replica", run.grad, *flags)
        if mode not in run.stage.seen:
            self._seen.append((run.stage, mode))
            return
        run.stage.backward_draws |= owner.stage.backward_draws
        run.through[0] = run.m + 1
        known = run.backward_draws = run.stage.backward_draws
        for one, other in zip(owner.all, run.all, strict=True):
            draws = [a | b for a, b in zip(one.stage.draws, other.stage.draws, strict=True)]
            other.stage.draws[:] = draws
            self._trusting += [(one.stage, draws, known), (other.stage, draws, known)]

    def let_train(self, replicas: Sequence[Sequence[Replica]]) -> None:
        """Call where what is trained changes in the call itself, on each replica by itself."""
        for replica in chain.from_iterable(replicas):
            replica.part()
        self._before = [each for each in self._before if not each[3].requires_grad]

    def finish(self) -> None:
        """Call after the last cell: moves running statistics.

        Raises:
            RuntimeError: a forward wrote into a parameter or a buffer, or drew unexpectedly.
        """
        for stage, module, name, tensor, version in self._before:
            now = module._parameters.get(name, module._buffers.get(name))
            if now is not tensor or version_of(tensor) != version:
                raise RuntimeError(
                    f"{name!r} of a {type(module).__name__} changed in a call, and stage {stage.j} "
                    "has replicas: each of them sees some of the micro-batches only, and what a "
                    "layer counts in its buffers, or writes into its parameters, would be of "
                    "these. Give the stage one device, or let the layer return it"
                )
        for stage, draws, backward in self._trusting:
            for k, (drawn, known) in enumerate(zip(stage.draws, draws, strict=True)):
                if drawn & ~known:
                    raise RuntimeError(
                        _drew(f"layer {stage.first + k} ({stage.names[k]!r})", stage)
                    )
            if stage.backward_draws & ~backward:
                raise RuntimeError(_drew("a backward", stage))
        for stage, mode in self._seen:
            stage.seen.add(mode)
        for owner in self._owners:
            if owner.statistics is not None:
                owner.statistics.commit()


def _drew(what: str, stage: Stage) -> str:
    return (
        f"{what} of stage {stage.j}, which has replicas, drew random numbers for the first time "
        "only now, and other replicas did not know that it would. It is known from the next call "
        "on: call again"
    )


def check_replicated(stage: Stage) -> None:
    """Refuses layers that cannot run on several devices at a time.

    Raises:
        ValueError: with the layer, and what to do.
    """
    for k, layer in enumerate(stage.partition._modules.values()):
        for module in () if layer is None else layer.modules():
            if reason := _reason(module):
                raise ValueError(f"stage {stage.j} has replicas, but {stage.layer(k)} {reason}")


def _reason(module: nn.Module) -> str:
    """Why a module cannot have replicas; empty if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, which computes with its own tensors only: give it one device"
    if getattr(module, "_syncpipe_skips_are_internal", False):
        return "has a Pipe in it, which keeps its layers where they are: give it one device"
    if any(t is not None and is_lazy(t) for t in module._parameters.values()):
        return "has parameters without values: run the plain model once before it is made a Pipe"
    moves = isinstance(module, _NormBase) and module.training and module.running_mean is not None
    if moves and not isinstance(module, DeferredBatchNorm):
        return (
            f"has running statistics in its {type(module).__name__}, which micro-batches move one "
            "after another: make the Pipe with deferred_batch_norm=True, call eval() of that "
            "normalisation, or give the stage one device"
        )
    if getattr(module, "max_norm", None) is not None and isinstance(
        module, (nn.Embedding, nn.EmbeddingBag)
    ):
        return "has an embedding with max_norm, which writes into its weight: give it one device"
    return ""


def _places(partition: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """All parameters and buffers where they are."""
    return [
        (module, name, tensor)
        for module in partition.modules()
        for name, tensor in chain(module._parameters.items(), module._buffers.items())
        if tensor is not None
    ]
