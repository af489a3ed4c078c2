"""Stages some of whose layers are computed again, run by run.

    cell    x --> [unit] --> [unit] --> [unit] --> y
                  stores     again      stores

A unit is a stage inside of a stage: it has an input, skips that come and go, and a state from which
it can be computed again, which ``Stage`` does. Backward reaches it inside of that of the cell, and
there ``torch.utils.checkpoint`` computes it again, so nothing of this is seen outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from syncpipe.data import overlap, place_of, tensors_in
from syncpipe.runtime.random_numbers import Turn
from syncpipe.skip.layout import layer_skips
from syncpipe.skip.namespace import SkipKey
from syncpipe.skip.store import current_store
from syncpipe.stages.inplace import ALIASED, TIED
from syncpipe.stages.run import CallContext, Inputs, Partition, StageRun
from syncpipe.stages.stage import Stage

__all__ = ["Divided", "divided"]


class Unit(Stage):
    """Some layers of a stage, one after another.

    Args:
        whole: the stage.
        first: its first layer, counted in the stage.
        last: the one after its last.
        again: whether it is computed again.
    """

    def __init__(self, whole: Stage, first: int, last: int, again: bool) -> None:
        partition = Partition()
        partition._modules.update(islice(whole.partition._modules.items(), first, last))
        partition.defers, partition.unpack = whole.partition.defers, whole.partition.unpack
        super().__init__(
            whole.j,
            partition,
            whole.names[first:last],
            whole.first + first,
            whole.device,
            *_skips_of(partition),
        )
        self.number = whole.number
        self._whole = whole
        self._again = again
        self.changes.lock = whole.changes.lock  # modules may be in several units

    def inside(self, cell: StageRun, inputs: Inputs) -> Inputs:
        """Runs it as a part of a cell."""
        marks = [*_marks(inputs), *[TIED] * len(cell.tied)] if self._again else ()
        inputs = (inputs[0], (*inputs[1], *cell.tied))
        run = self.checkpointed if self._again else self.forward
        return run(cell.i, inputs, cell.context, marks=marks)

    def learn(self, seen: Turn, k: int | None = None) -> None:
        """As that of the stage, which goes back as a whole."""
        super().learn(seen, k)
        self._whole.learn(seen)

    def _marked(
        self, cell: StageRun, inputs: Inputs, marks: Sequence[int], target: Any
    ) -> Sequence[int]:
        return marks  # what the caller lent the stage has seen to

    def _count(self, context: CallContext) -> None:
        pass  # the stage counts


class Divided:
    """A stage as its units.

    Args:
        stage: the stage.
        spans: the layers that are computed again.

    Attributes:
        units: one after another.
    """

    def __init__(self, stage: Stage, spans: tuple[tuple[int, int], ...]) -> None:
        self.spans = spans
        self.units: list[Unit] = []
        at = 0
        for first, last in spans:
            if at < first:
                self.units.append(Unit(stage, at, first, False))
            self.units.append(Unit(stage, first, last, True))
            at = last
        if at < len(stage.names):
            self.units.append(Unit(stage, at, len(stage.names), False))
        # Its backward computes again, and the order of locks is: stage before random state.
        stage.changes.any = True

    def run(self, cell: StageRun, value: Any) -> Any:
        """The layers of a cell, one unit after another."""
        store = current_store() if cell.stage.has_skips else None
        for unit in self.units:
            unit.partition.training = cell.stage.partition.training
            popped = tuple([store.pop(key) for key in unit.pops]) if store else ()
            value, stashed = unit.inside(cell, (value, popped))
            if stashed and store is not None:
                store.update(zip(unit.stashes, stashed, strict=True))
        return value


def divided(stage: Stage, spans: tuple[tuple[int, int], ...]) -> Divided:
    """The units of a stage, which it keeps: they learn what their layers do."""
    if stage.divided is None or stage.divided.spans != spans:
        stage.divided = Divided(stage, spans)
    found: Divided = stage.divided
    return found


def _skips_of(partition: Partition) -> tuple[list[SkipKey], list[SkipKey]]:
    """The skips that come into a run of layers, and those that go out of it."""
    pops: list[SkipKey] = []
    stashes: list[SkipKey] = []
    for layer in partition:
        skips = layer_skips(layer)
        for key in skips.popped:
            if key in stashes:
                stashes.remove(key)
            else:
                pops.append(key)
        stashes += skips.stashed
    return pops, stashes


def _marks(inputs: Inputs) -> list[int]:
    """Which inputs overlap others: what is written into one has to be seen in the other."""
    tensors = tensors_in(inputs)
    return [
        ALIASED
        if any(o is not t and place_of(o) != place_of(t) and overlap(t, o) for o in tensors)
        else 0
        for t in tensors
    ]
