"""Stages that are served by several devices, which micro-batches are dealt to in turn.

    stage 0, replica 0   micro-batches 0 2 4 ..  --+
                                                   +-->  stage 1   0 1 2 3 4 ..
    stage 0, replica 1   micro-batches 1 3 5 ..  --+

The first replica is the owner: it runs the modules themselves. To what runs, each other one is a
stage of its own, over stand-ins of the modules that hold tensors of its own: copies on its device,
as fresh as the originals are when a call begins, or where that is the same memory the very same
values, as leaves of their own. So no two workers ever run one module, or add to one gradient.

A replica adds up the gradients of its micro-batches in its own leaves. When it is through with its
stage it sends them to the owner, who adds them to its own: replica 1, 2, and so on, whenever they
come. Each goes through the parameter's hooks as one gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from syncpipe.layers.batchnorm import DeferredBatchNorm
from syncpipe.runtime.module_state import version_of
from syncpipe.runtime.streams import Lane, same_memory
from syncpipe.stages.run import CallContext, Partition, StageLayers
from syncpipe.stages.sharing.copies import Copy
from syncpipe.stages.sharing.stand_ins import Lasting

__all__ = ["CallReplicas", "Replica"]


class Replica:
    """The layers of a stage once more, from call to call.

    Args:
        original: the partition.

    Attributes:
        partition: the same with tensors of its own.
    """

    def __init__(self, original: Partition) -> None:
        self._lasting = Lasting(original)
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: original, and own
        self._copies: dict[int, Copy] = {}
        self.partition: Any = self._lasting.follow({})

    def follow(self, tensors: Sequence[Tensor], owner: Lane, lane: Lane, *, trains: bool) -> None:
        """Makes it what the partition is now.

        Args:
            tensors: all parameters and buffers of the partition.
            owner: the lane of the first replica, where they are.
            lane: its own.
            trains: whether there will be gradients, a reason to change the originals.
        """
        before, self._leaves = self._leaves, {}
        copies, self._copies = self._copies, {}
        own: dict[int, Tensor] = {}
        for tensor in tensors:
            _, leaf = before.get(id(tensor), (None, None))
            leaf = self._fresh(tensor, leaf, copies.get(id(tensor)), owner, lane, trains=trains)
            if leaf.requires_grad != tensor.requires_grad:
                leaf.requires_grad_(tensor.requires_grad)
            self._leaves[id(tensor)] = tensor, leaf
            own[id(tensor)] = leaf
        self._lasting.follow(own)

    def follow_modes(self) -> None:
        """Goes by the modes of the modules once more; the tensors stay."""
        self._lasting.follow({key: leaf for key, (_, leaf) in self._leaves.items()})

    def of(self, tensor: Tensor) -> Tensor:
        """What it has in the place of a tensor."""
        return self._leaves[id(tensor)][1]

    def _fresh(
        self,
        tensor: Tensor,
        leaf: Tensor | None,
        known: Copy | None,
        owner: Lane,
        lane: Lane,
        *,
        trains: bool,
    ) -> Tensor:
        """A tensor's values on this device; the one that was there before wherever that can be."""
        like = leaf is not None and (leaf.shape, leaf.dtype) == (tensor.shape, tensor.dtype)
        with torch.inference_mode(False), torch.no_grad():
            if same_memory(tensor.device, lane.device):
                if like and leaf is not None and _places(leaf) == _places(tensor):
                    return leaf
                return tensor.detach()
            if known is None or leaf is None or not known.serves(tensor):
                known = Copy.made(tensor, owner, lane, kept=True)
                lane.receive(known.event, [known.copy])
                if not like or leaf is None:
                    leaf = known.copy
                else:
                    with lane.active():  # graphs of earlier calls may still be using it
                        leaf.data.copy_(known.copy)
            kept = not (trains and tensor.requires_grad)
            known = replace(known, copy=leaf, kept=kept)
            self._copies[id(tensor)] = known
            return leaf


class CallReplicas:
    """The replicas in one call; to be made on the caller's thread.

    Args:
        replicas: for each stage those that are not the first.
        numbers: for each stage the numbers of all.
        stages: by number.
        lanes: by number, the lane of its worker, which waits for the caller already.
        context: the call's.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[Replica]],
        numbers: Sequence[tuple[int, ...]],
        stages: Sequence[StageLayers],
        lanes: Sequence[Lane],
        context: CallContext,
    ) -> None:
        self._stages, self._numbers, self._context = stages, numbers, context
        self._trained: dict[int, list[Tensor]] = {}  # by number: what gets gradients
        self._before: list[tuple[StageLayers, list[tuple[nn.Module, str, Tensor, int]]]] = []
        #: Stages that go by what they knew of their draws, and that.
        self._trusting: list[tuple[StageLayers, list[int], int]] = []
        grad = context.state.grad
        for j, more in enumerate(replicas):
            if not more:
                continue
            owner = stages[j]
            check_replicated(owner)
            tensors = _tensors_of(owner.partition)
            for number, replica in zip(numbers[j][1:], more, strict=True):
                replica.follow(tensors, lanes[j], lanes[number], trains=grad)
            trained = [t for t in tensors if grad and t.requires_grad]
            self._trained[j] = trained
            for number, replica in zip(numbers[j][1:], more, strict=True):
                self._trained[number] = list(map(replica.of, trained))
            for number in numbers[j][1:]:
                self._trust(owner, stages[number])
            for number in numbers[j]:
                self._before.append((stages[number], _noted(stages[number].partition)))

    def _trust(self, owner: StageLayers, stage: StageLayers) -> None:
        """Lets a replica go by what was seen in earlier calls of which layers draw.

        The first cell of a stage is watched under the lock of the generators. If all replicas were
        each call would begin with one replica after the other.
        """
        context = self._context
        flags = [
            module.training and (not isinstance(module, _DropoutNd) or module.p > 0)
            for module in stage.partition.modules()
        ]
        mode = ("replica", context.state.grad, *flags)
        if stage.look(mode):
            return
        for one, other in _pairs(owner, stage, context):
            other.draws[:] = [a | b for a, b in zip(one.draws, other.draws, strict=True)]
        stage.backward_draws |= owner.backward_draws
        context.forwards[stage.number] = context.m + 1
        context.backward_draws[stage.number] = stage.backward_draws
        for one, other in _pairs(owner, stage, context):
            known = list(other.draws), stage.backward_draws
            self._trusting += [(one, *known), (other, *known)]

    def trained(self, number: int) -> list[Tensor]:
        """What gets gradients on a replica, in one order on all of a stage."""
        return self._trained[number]

    # -- after the last cell

    def finish(self) -> None:
        """Moves running statistics; refuses what cannot have replicas.

        Raises:
            RuntimeError: a forward wrote into a parameter or a buffer.
        """
        for stage, before in self._before:
            for module, name, tensor, version in before:
                now = module._parameters.get(name, module._buffers.get(name))
                if now is not tensor or version_of(tensor) != version:
                    raise RuntimeError(_changed(stage, module, name))
        for stage, draws, backward in self._trusting:
            for k, (drawn, known) in enumerate(zip(stage.draws, draws, strict=True)):
                if drawn & ~known:
                    raise RuntimeError(_drew(stage, k))
            if stage.backward_draws & ~backward:
                raise RuntimeError(_drew(stage, None))
        for j, numbers in enumerate(self._numbers):
            if len(numbers) > 1 and j in self._context.statistics:
                self._context.statistics[j].commit()


def _pairs(
    owner: StageLayers, stage: StageLayers, context: CallContext
) -> list[tuple[StageLayers, StageLayers]]:
    """The stage on the first replica and on another one, and the same of each of its units."""
    return list(zip(context.runs(owner), context.runs(stage), strict=True))


def _drew(stage: StageLayers, k: int | None) -> str:
    what = f"layer {stage.first + k} ({stage.names[k]!r})" if k is not None else "a backward"
    return (
        f"{what} of stage {stage.j}, which has replicas, drew random numbers for the first time "
        "only now, and other replicas did not know that it would. It is known from the next call "
        "on: call again"
    )


def check_replicated(stage: StageLayers) -> None:
    """Refuses layers that cannot run on several devices at a time.

    Raises:
        ValueError: with the layer, and what to do.
    """
    for k, layer in enumerate(stage.partition._modules.values()):
        for module in () if layer is None else layer.modules():
            if reason := _reason(module):
                raise ValueError(
                    f"stage {stage.j} has replicas, but layer {stage.first + k} "
                    f"({stage.names[k]!r}: {type(layer).__name__}) {reason}"
                )


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


def _tensors_of(partition: nn.Module) -> list[Tensor]:
    """All parameters and buffers, each once."""
    found = {
        id(tensor): tensor
        for module in partition.modules()
        for tensor in chain(module._parameters.values(), module._buffers.values())
        if tensor is not None
    }
    return list(found.values())


def _places(tensor: Tensor) -> Any:
    """Where the values of a tensor are."""
    return (
        id(tensor) if tensor.layout is not torch.strided else (tensor.data_ptr(), tensor.stride())
    )


def _noted(partition: nn.Module) -> list[tuple[nn.Module, str, Tensor, int]]:
    """All parameters and buffers where they are, and as they are."""
    return [
        (module, name, tensor, version_of(tensor))
        for module in partition.modules()
        for name, tensor in chain(module._parameters.items(), module._buffers.items())
        if tensor is not None
    ]


def _changed(stage: StageLayers, module: nn.Module, name: str) -> str:
    return (
        f"{name!r} of a {type(module).__name__} changed in a call, and stage {stage.j} has "
        "replicas: each of them sees some of the micro-batches only, and what a layer counts in "
        "its buffers, or writes into its parameters, would be of these. Give the stage one device, "
        "or let the layer return it"
    )
