"""The layers of a stage, and what it takes to run them for one micro-batch.

    (input, skips in)  -->  layer, layer, layer  -->  (output, skips out)

Each run is a *cell* (micro-batch ``i``, stage ``j``). It is more than a loop over layers: they get
their random numbers, skips come and go, deferred BatchNorm collects its statistics, and exceptions
get a note. What becomes of a cell in backward is for ``stage`` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from syncpipe.layers.batchnorm import DeferredBatchNorm, MiniBatchStatistics, collect
from syncpipe.layers.unpack import Unpacked, call_note, chained
from syncpipe.options import Selective
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.module_state import Changes, ModuleState
from syncpipe.runtime.random_numbers import (
    Generators,
    Turn,
    changed,
    fingerprint,
    let_modules_hold,
    never_draws,
    run_seeded,
    states_of,
)
from syncpipe.runtime.recorder import Recorder, as_range
from syncpipe.runtime.thread_state import CallerState
from syncpipe.skip.layout import layer_skips
from syncpipe.skip.namespace import SkipKey, describe
from syncpipe.skip.skippable import is_skippable
from syncpipe.skip.store import use_store
from syncpipe.stages.sharing.stand_ins import StandIns

__all__ = ["CallContext", "Inputs", "Partition", "StageLayers", "StageRun"]

#: The value that travels along the layers, and skips.
Inputs = tuple[Any, tuple[Any, ...]]


class Partition(nn.Sequential):
    """The layers of one stage; called by hand it is an ordinary ``nn.Sequential``."""

    defers = False  #: whether running statistics of context normalisations move once per mini-batch
    unpack = False  #: whether tuples and dicts are spread over the arguments of the next layer
    tied: frozenset[str] = frozenset()  #: the tensors that it shared with others when it was cut

    def forward(self, input: Any) -> Any:
        cell = _current_cell.get()
        if cell is None or cell.stage.partition is not self:  # called by hand, or by a layer
            if self.unpack:
                return chained(self._modules.values(), input)
            return super().forward(input)  # type: ignore[no-untyped-call]
        return cell.layers(input)


@dataclass(slots=True)
class CallContext:
    """What all cells of one call have in common. A replica counts as a stage of its own.

    Attributes:
        m: number of micro-batches.
        seed: of the call's random numbers.
        state: the caller's.
        threads: intra-op threads of the CPU workers (0: the calling thread's own).
        forwards: for each stage the number of cells that went forward so far.
        statistics: accumulators of deferred BatchNorm, for each stage that has any; its replicas
            have them in common.
        recorder: writes down what runs when, for a trace.
        plain: for each stage ``StageLayers.plain``.
        stand_ins: for each stage that computes with other tensors than its modules hold.
        modules: for each stage that re-materializes its modules as they are.
        divided: for each stage that re-materializes some of its layers how it runs them.
        selective: for each stage that saves some operations which.
        backward_draws: for each stage that went back the generators that its backward draws from.
        writes: for each stage that was given what others need whether it may write into that.
        moment: another object when the user's code may have changed modules since.
    """

    m: int
    seed: int
    state: CallerState
    threads: int
    forwards: list[int]
    statistics: dict[int, MiniBatchStatistics]
    recorder: Recorder | None
    plain: list[bool]
    stand_ins: dict[StageLayers, StandIns] = field(default_factory=dict)
    modules: dict[StageLayers, ModuleState] = field(default_factory=dict)
    divided: dict[StageLayers, Any] = field(default_factory=dict)
    selective: dict[StageLayers, Selective] = field(default_factory=dict)
    backward_draws: dict[int, int] = field(default_factory=dict)
    writes: dict[StageLayers, bool] = field(default_factory=dict)
    moment: object = None

    def runs(self, stage: StageLayers) -> list[StageLayers]:
        """All that runs layers of a stage: itself, and if it is divided its units."""
        return [stage, *(self.divided[stage].units if stage in self.divided else ())]


class StageLayers:
    """One partition on one device.

    Attributes:
        number: its place among all stages and replicas.

    Args:
        j: the stage's index.
        partition: its layers.
        names: for each layer its name in the wrapped module.
        first: index of the first layer in the wrapped module.
        device: where the layers are.
        pops: the skips that come from other stages.
        stashes: the skips that go to other stages.
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
    ) -> None:
        self.j = self.number = j
        self.partition = partition
        self.names = list(names)
        self.first = first
        self.pops = list(pops)
        self.stashes = list(stashes)
        self.changes = Changes(partition)
        self.has_skips = any(is_skippable(child) for child in partition.modules())
        self.defers = partition.defers and any(
            isinstance(child, DeferredBatchNorm) for child in partition.modules()
        )
        self.device = device
        self.generators = Generators(device)
        if self.generators.in_modules:
            let_modules_hold(partition)
        self.draws = [0] * len(self.names)  # for each layer: the generators it ever drew from
        self._looked: set[Any] = set()  # modes in which it was observed
        self.backward_draws = 0  # the generators that any backward ever drew from
        self._nests = False
        self._new = True  # never re-materialized
        self.divided: Any = None  # its units, if it was ever divided into some

    @property
    def layers_in_words(self) -> str:
        """Which layers of the wrapped module these are."""
        first, last = self.first, self.first + len(self.names) - 1
        return f"layer {first}" if first == last else f"layers {first} to {last}"

    @property
    def hooked(self) -> bool:
        """Whether hooks run around the partition as a whole."""
        partition = self.partition
        return bool(
            partition._forward_hooks
            or partition._forward_pre_hooks
            or partition._backward_hooks
            or partition._backward_pre_hooks
        )

    @property
    def plain(self) -> bool:
        """Whether its run is that of its layers alone; but for embeddings that keep rows short."""
        return not (self.has_skips or self.defers or self.hooked)

    def look(self, mode: Any) -> bool:
        """Whether it runs for the first time in a mode."""
        if mode in self._looked:
            return False
        self._looked.add(mode)
        return True

    def learn(self, seen: Turn, k: int | None = None) -> None:
        """Remembers what a first run showed of layer ``k`` (None: of the loss function)."""
        if k is not None:
            self.draws[k] |= seen.draws
        if seen.nests:  # cells of that pipe go back with this one, and take locks of their stages
            self._nests = True
        if seen.touches:
            self.backward_draws = self.generators.all
        if self._nests:
            self.backward_draws = 0

    def describe(self, i: int) -> str:
        """Cell ``(i, j)`` in words."""
        return f"stage {self.j} ({self.layers_in_words}), micro-batch {i}"


class StageRun:
    """One run of a stage for one micro-batch."""

    tied: tuple[Any, ...] = ()  #: tensors of its own in the place of shared ones
    recomputing = False
    #: If it will be computed again: for each layer the generators that it may draw from, and the
    #: fingerprint of what it gave.
    drawn: dict[int, Any] | None = None

    def __init__(self, stage: StageLayers, i: int, context: CallContext) -> None:
        self.stage = stage
        self.partition = stage.partition
        self.i = i
        self.context = context

    def __str__(self) -> str:
        """The cell in words."""
        return self.stage.describe(self.i)

    def recomputed(self, inputs: Inputs) -> Inputs:
        """The recomputation of this cell."""
        again = StageRun(self.stage, self.i, self.context)
        again.recomputing, again.drawn = True, self.drawn
        return again.run(inputs)

    def run(self, inputs: Inputs) -> Inputs:
        """From inputs to outputs, through the partition."""
        stage = self.stage
        if profiler._is_profiler_enabled:
            kind = "recompute" if self.recomputing else "forward"
            name = f"syncpipe {kind} stage {stage.j} micro-batch {self.i}"
            return as_range(name, self._renorming, inputs)
        if self.context.plain[stage.number] and not stage.changes.renorming:
            return self.layers(inputs[0]), ()
        return self._renorming(inputs)

    def _renorming(self, inputs: Inputs) -> Inputs:
        changes = self.stage.changes
        if self.recomputing or not changes.renorming:
            return self._through(inputs)
        outputs: Inputs = changes.renorm(lambda: self._through(inputs))
        return outputs

    def _through(self, inputs: Inputs) -> Inputs:
        stage = self.stage
        if not stage.defers:
            return self._with_skips(inputs)
        statistics = None if self.recomputing else self.context.statistics[stage.number]
        with collect(statistics, self.i):
            return self._with_skips(inputs)

    def _with_skips(self, inputs: Inputs) -> Inputs:
        stand_ins = self.context.stand_ins.get(self.stage)
        if stand_ins is None:
            return self._stashing(*inputs)
        value, skips = inputs
        count = len(self.stage.pops)
        self.tied = skips[count:]
        with stand_ins.holding(self.tied) as self.partition:
            return self._stashing(value, skips[:count])

    def _stashing(self, value: Any, skips: tuple[Any, ...]) -> Inputs:
        stage = self.stage
        if not stage.has_skips:
            return self._partition(value), ()
        store: dict[SkipKey, Any] = dict(zip(stage.pops, skips, strict=True))
        with use_store(store):
            output = self._partition(value)
        missing = [key for key in stage.stashes if key not in store]
        if missing:
            raise RuntimeError(self._did_not_stash(missing[0]))
        return output, tuple([store.pop(key) for key in stage.stashes])

    def _did_not_stash(self, key: SkipKey) -> str:
        partition = self.stage.partition
        k = next(k for k, layer in enumerate(partition) if key in layer_skips(layer).stashed)
        return (
            f"{self._layer(k)} of {self} did not stash {describe(key)}, which a forward that "
            "it overrides does: call that one, or decorate the class with @skippable(stash=[...]), "
            "naming what it does stash (nothing: @skippable())"
        )

    def _partition(self, value: Any) -> Any:
        if not self.stage.hooked:
            return self.layers(value)
        token = _current_cell.set(self)
        try:
            return self.stage.partition(value)
        finally:
            _current_cell.reset(token)

    def layers(self, value: Any) -> Any:
        """The layers of the partition, one after another."""
        stage = self.stage
        if self.context.divided and (units := self.context.divided.get(stage)) is not None:
            return units.run(self, value)
        first = not self.recomputing and not self.context.forwards[stage.number]
        care = first or self.drawn is not None
        unpack = stage.partition.unpack
        k, layer = 0, None  # Ctrl-C may come before the first
        try:
            for k, layer in enumerate(self.partition._modules.values()):
                call: Any = Unpacked(layer) if unpack else layer
                if stage.draws[k] or (care and not never_draws(layer)):
                    value = self._drawing(k, call, value, first)
                else:
                    value = call(value)
        except BaseException as error:
            annotate(error, f"in {self._layer(k)} of {self}")
            if note := call_note(error, layer, value, unpack=unpack):
                annotate(error, note)
            if "more than 1 value per channel" in str(error):
                annotate(error, _ONE_SAMPLE)
            raise
        return value

    def _drawing(self, k: int, layer: Any, value: Any, first: bool) -> Any:
        """A layer that draws, or may do so."""
        stage, drawn = self.stage, self.drawn
        which, wanted = stage.generators.all if first else stage.draws[k], None
        if self.recomputing:
            which, wanted = (0, None) if drawn is None else drawn.get(k, (0, None))
        elif drawn is not None:
            drawn[k] = which, None  # a backward inside of the layer recomputes this cell now
        if which:
            cell = (self.context.seed, stage.first + k, self.i)
            value, seen = run_seeded(
                stage.generators, which, cell, layer, value, observe=first, mark=drawn is not None
            )
            ends = seen.ends
            if first or seen.nests:
                stage.learn(seen, k)
        else:
            mine = [generator for _, generator in stage.generators.pick(stage.generators.all)]
            before = [] if wanted is None else states_of(mine)
            value, ends = layer(value), {}
            if wanted is not None and not changed(mine, before):
                return value  # nobody has drawn
        if drawn is not None and not self.recomputing:
            drawn[k] = stage.draws[k], (fingerprint(value), ends)
        elif wanted is not None and wanted != (fingerprint(value), {**wanted[1], **ends}):
            stage.draws[k] = stage.generators.all
            raise RuntimeError(
                f"{self._layer(k)} gave something else when it was recomputed than in the forward, "
                "so that gradients would be wrong. If a thread of yours draws random numbers "
                "meanwhile, give it a torch.Generator of its own. If the layer draws some, but did "
                "not for the first micro-batch of any call so far, that is known from the next "
                "call on. If it depends on anything else that changes, let it ask "
                "syncpipe.is_recomputing(), or use checkpoint='never'"
            )
        return value

    def _layer(self, k: int) -> str:
        kind = type(self.stage.partition[k]).__name__
        return f"layer {self.stage.first + k} ({self.stage.names[k]!r}: {kind})"


#: A normalisation in training was given one sample.
_ONE_SAMPLE = (
    "the last micro-batches of a mini-batch may be smaller than the others: use another batch size "
    "or number of chunks, DataLoader(..., drop_last=True), or eval() of this normalisation"
)
_current_cell: ContextVar[StageRun | None] = ContextVar("syncpipe_cell", default=None)
