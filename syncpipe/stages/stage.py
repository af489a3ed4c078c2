"""A stage: one partition on one device; lives from call to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn

from syncpipe.layers.batchnorm import DeferredBatchNorm
from syncpipe.layers.unpack import chained
from syncpipe.runtime.random_numbers import Generators, has_hooks
from syncpipe.runtime.recomputation import Changes
from syncpipe.skip.layout import layer_skips
from syncpipe.skip.skippable import is_skippable
from syncpipe.skip.store import SkipKey
from syncpipe.storage import modules_of, renorming

#: The cell that runs on this thread: its partition, and the function that runs the layers.
CELL: ContextVar[tuple[nn.Module, Callable[[Any], Any]] | None] = ContextVar(
    "syncpipe_cell", default=None
)


class Partition(nn.Sequential):
    """The layers of one stage; outside a cell an ordinary ``nn.Sequential``."""

    defers_batch_norm = False  #: whether running statistics move once per mini-batch
    unpack = False  #: whether tuples and dicts are spread over the arguments of the next layer
    tied: frozenset[str] = frozenset()  #: the tensors shared with other partitions at the start

    def forward(self, input: Any) -> Any:
        partition, layers = CELL.get() or (None, None)
        if layers is not None and partition is self:
            return layers(input)
        if self.unpack:
            return chained(self._modules.values(), input)
        return super().forward(input)  # type: ignore[no-untyped-call]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer by itself: a pipe runs layers one by one."""
        for layer in self:
            layer._compiled_call_impl = torch.compile(_called(layer._call_impl), *args, **kwargs)


def _called(call: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch before 2.15 compiles its own layers only inside a function."""
    return lambda *args, **kwargs: call(*args, **kwargs)


class Stage:
    """One partition on one device; or a unit: layers of a stage that are recomputed by themselves.

    Args:
        j: the stage's index.
        partition: its layers.
        names: for each layer its name in the wrapped module.
        first: index of the first layer in the wrapped module.
        device: the device of the layers.
        pops, stashes: the skips from other stages, and the skips for other stages.
        parent: the stage of which this is a unit.

    Attributes:
        index: the index in ``Pipeline.stages``, which has all replicas as well.
        commits: whether its run moves running statistics; replicas leave that to the call.
        late_layers: the layers that first drew in a later micro-batch of a call.
        backward_draws: bit mask of the generators that backwards of the last call drew from.
        draws_by_mode: for replicas, by the modes of modules, the ``Drawing.draws`` of a call.
        changes: the changes of its modules by forwards.
        compared_modes: the modes in which a recomputation was compared with its forward by shapes.
    """

    def __init__(
        self,
        j: int,
        partition: Partition,
        names: Sequence[str],
        first: int,
        device: torch.device,
        pops: Sequence[SkipKey],
        stashes: Sequence[SkipKey],
        parent: Stage | None = None,
    ) -> None:
        self.j = self.index = j
        self.partition, self.names, self.first = partition, list(names), first
        self.device, self.parent = device, parent
        last = first + len(self.names) - 1
        self.layer_range = f"layer {first}" if first == last else f"layers {first} to {last}"
        self.pops, self.stashes = list(pops), list(stashes)
        modules = list(partition.modules())
        self.changes = Changes(partition)
        self.changes.needs_lock |= self.renorms
        self.has_skips = any(map(is_skippable, modules))
        self.defers_batch_norm = partition.defers_batch_norm and any(
            isinstance(m, DeferredBatchNorm) for m in modules
        )
        self.commits = self.defers_batch_norm and parent is None
        self.generators = Generators(device)
        self.late_layers: set[int] = set()
        self.backward_draws = 0
        self.draws_by_mode: dict[Any, list[int]] = {}
        self.compares_later = any(isinstance(m, torch.jit.ScriptModule) for m in modules)
        self.compared_modes: set[bool] = set()
        self._units: tuple[Any, list[tuple[Stage, bool]]] = (None, [])
        if parent is not None:
            self.index = parent.index
            self.changes.lock = parent.changes.lock  # modules may be in several units

    @property
    def hooked(self) -> bool:
        return has_hooks(self.partition)

    @property
    def backward_is_deterministic(self) -> bool:
        """Whether all layers are PyTorch's own (these draw in forward only) and have no hooks."""
        for module in modules_of(self.partition):
            of_torch = type(module).__module__.startswith("torch.nn.modules.")
            if has_hooks(module) or not (of_torch or module is self.partition):
                return False
            for p in module._parameters.values():
                if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                    return False
        return True

    @property
    def renorms(self) -> bool:
        """Whether a forward writes into a weight, so that it cannot be run again."""
        return bool(renorming(self.partition))

    def describe(self, i: int) -> str:
        return f"stage {self.j} ({self.layer_range}), micro-batch {i}"

    def describe_layer(self, k: int) -> str:
        kind = type(self.partition[k]).__name__
        return f"layer {self.first + k} ({self.names[k]!r}: {kind})"

    def units(self, spans: tuple[tuple[int, int], ...]) -> list[tuple[Stage, bool]]:
        """Cuts the stage into units; ``spans`` are the layers to recompute. Returns each unit, and
        whether it is recomputed."""
        if self._units[0] != spans:
            self._units = spans, list(self._cut(spans))
            # Backward recomputes units, so the stage's lock must come before those of generators.
            self.changes.needs_lock = True
        return [(unit, again and not unit.renorms) for unit, again in self._units[1]]

    def _cut(self, spans: tuple[tuple[int, int], ...]) -> Iterator[tuple[Stage, bool]]:
        ends = [0, *[end for span in spans for end in span], len(self.names)]
        for n, (first, last) in enumerate(pairwise(ends)):
            if first == last:
                continue
            part = Partition()
            part._modules.update(islice(self.partition._modules.items(), first, last))
            part.defers_batch_norm = self.partition.defers_batch_norm
            part.unpack = self.partition.unpack
            pops: list[SkipKey] = []
            stashes: list[SkipKey] = []
            for layer in part:
                skips = layer_skips(layer)
                pops += [key for key in skips.popped if key not in stashes]
                stashes = [key for key in stashes if key not in skips.popped]
                stashes += skips.stashed
            names, at = self.names[first:last], self.first + first
            yield Stage(self.j, part, names, at, self.device, pops, stashes, self), n % 2 == 1
