"""A stage in one call: runs its layers.

    (input, skips in)  -->  layer, layer, layer  -->  (output, skips out)

Everything else is a wrapper of the layers (``wrappers.WRAPPERS``), decided once per call, so that a
plain stage pays nothing. Recomputation and borrowed inputs have paths of their own (``recompute``,
``inplace``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

from syncpipe.layers.batchnorm import MiniBatchStatistics
from syncpipe.layers.unpack import call_note, spread
from syncpipe.layers.writes import is_hooked, may_write
from syncpipe.options import ByLayer, StageMode
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.interrupts import Swap
from syncpipe.runtime.recomputation import OUTERMOST
from syncpipe.stages import drawing, recompute, wrappers
from syncpipe.stages.inplace import GuardedInputs
from syncpipe.stages.stage import Stage

#: The activation, and the skips.
Inputs = tuple[Any, tuple[Any, ...]]
#: Runs a cell: micro-batch, inputs, record of a recomputed cell, whether this is the recomputation.
Runner = Callable[[int, Inputs, Any, bool], Inputs]

_T = TypeVar("_T")
#: For a normalisation in training that got one sample.
_ONE_SAMPLE = (
    "the last micro-batches of a mini-batch may be smaller than the others: use another batch size "
    "or number of chunks, DataLoader(..., drop_last=True), or eval() of this normalisation"
)
#: For a layer that torch.utils.checkpoint cannot run.
_NO_HOOKS = (
    "single layers are recomputed by torch.utils.checkpoint, which does not support torch.func in "
    "a layer: give the stage checkpoint='always', or leave the layer out"
)


class StageRun:
    """A stage in one call of ``m`` micro-batches.

    Attributes:
        forwards_done: the number of cells that ran forward, in a list that all units share.
        statistics: collects the statistics of deferred BatchNorm, for all runs of the stage.
        parent: the run of the stage of which this is a unit; or itself.
        substitute_of: for a tensor of its modules (by ``id``) the tensor that its cells use, which
            ``swaps`` put into the modules during a run, or ``shallow`` copies of them hold.
        units: pieces of the stage, and for each whether it is recomputed by itself.
    """

    def __init__(
        self,
        stage: Stage,
        m: int,
        seed: int,
        mode: StageMode,
        *,
        grad: bool,
        parent: StageRun | None = None,
    ) -> None:
        self.stage, self.m, self.seed, self.grad = stage, m, seed, grad
        self.partition = self.running = stage.partition
        self.parent: StageRun = parent or self
        self.forwards_done: list[int] = parent.forwards_done if parent else [0]
        self.statistics: MiniBatchStatistics | None = None
        self.substitute_of: dict[int, Any] = {}
        self.swaps: Sequence[Swap] = ()
        self.shallow: Any = None  # a ShallowCopy
        self.units = [
            (StageRun(unit, m, seed, "never", grad=grad, parent=self), recomputed)
            for unit, recomputed in (stage.units(mode.spans) if isinstance(mode, ByLayer) else ())
        ]
        self.drawing = drawing.Drawing(self)
        self.recomputation = recompute.StageRecomputation(self, mode)

    @property
    def with_units(self) -> list[StageRun]:
        return [self, *[unit for unit, _ in self.units]]

    @cached_property
    def writes(self) -> bool:
        partition = self.stage.partition
        return is_hooked(partition) or may_write(partition, pops=bool(self.stage.pops))

    def forward(self, i: int, inputs: Inputs, owners: Sequence[int] = ()) -> Inputs:
        """Computes cell ``(i, j)``: the output of the last layer, and the skips for other stages.

        Args:
            i: the micro-batch.
            inputs: the input of the first layer, and the skips that this stage pops.
            owners: for each tensor of the inputs its ownership flags (``inplace``); empty: all 0.
        """
        return self.locked(self._guarded, i, inputs, owners)

    def _guarded(self, i: int, inputs: Inputs, owners: Sequence[int]) -> Inputs:
        given = GuardedInputs(inputs, owners, copy=self.writes) if any(owners) else None
        tree = inputs if given is None else given.tree
        outputs = self.wrapped_layers(i, tree, None, False)
        if given is not None:
            given.check_writes(self.stage.describe(i))
        self.count()
        return outputs

    def count(self) -> None:
        """Counts a forward; the last one moves running statistics."""
        self.forwards_done[0] += self.parent is self
        if self.stage.commits and self.forwards_done[0] == self.m and self.statistics is not None:
            self.statistics.commit()

    @cached_property
    def wrapped_layers(self) -> Runner:
        run: Runner = self.layers
        for wrap in wrappers.WRAPPERS:
            run = wrap(self, run)
        return run

    def layers(
        self, i: int, inputs: Inputs, record: Any, recomputing: bool, around: Sequence[Any] = ()
    ) -> Inputs:
        """Runs the layers one after another; ``around`` has for each what calls it, or None."""
        value, k, layer = inputs[0], 0, None  # Ctrl-C may come before the first
        unpack = self.partition.unpack
        try:
            for k, layer in enumerate(self.running._modules.values()):
                if not around or around[k] is None:
                    value = spread(layer, value) if unpack else layer(value)
                else:
                    call = partial(spread, layer) if unpack else layer
                    value = around[k](i, call, value, record, recomputing)
        except BaseException as error:
            self.explain(error, i, k, layer, value)
            raise
        return value, ()

    def explain(self, error: BaseException, i: int, k: int, layer: Any, value: Any) -> None:
        """Adds the layer that raised an exception, and possible causes, as notes."""
        annotate(error, f"in {self.stage.describe_layer(k)} of {self.stage.describe(i)}")
        if note := call_note(error, layer, value, unpack=self.partition.unpack):
            annotate(error, note)
        if "more than 1 value per channel" in str(error):
            annotate(error, _ONE_SAMPLE)
        if self.stage.parent is not None and "saved tensor hooks" in str(error):
            annotate(error, _NO_HOOKS)

    def locked(self, run: Callable[..., _T], *args: Any) -> _T:
        """Runs a function that may use the buffers of this stage, under its lock."""
        changes = self.stage.changes
        if not changes.needs_lock or OUTERMOST.get() is not None:
            return run(*args)
        with changes.lock:
            token = OUTERMOST.set(changes.lock)
            try:
                return run(*args)
            finally:
                OUTERMOST.reset(token)
