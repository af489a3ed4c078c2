"""A stage in one call: how its cells run, and how they run once more.

    (input, skips in)  -->  layer, layer, layer  -->  (output, skips out)

Each run is a *cell* (micro-batch ``i``, stage ``j``). It is more than a loop over layers: they get
their random numbers, skips come and go, deferred BatchNorm collects its statistics, exceptions get
a note. What the caller still needs stays as it is, and a cell that is re-materialized is told how
to be computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils.checkpoint import checkpoint

from syncpipe.data import map_tensors, tensors_in
from syncpipe.layers.batchnorm import MiniBatchStatistics, collect
from syncpipe.layers.unpack import Unpacked, call_note
from syncpipe.options import ByLayer, Selective, StageMode
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.interrupts import swapped
from syncpipe.runtime.module_state import OUTERMOST, CellState, ModuleState
from syncpipe.runtime.random_numbers import (
    changed,
    fingerprint,
    never_draws,
    run_seeded,
    states_of,
)
from syncpipe.runtime.recomputation import (
    Recomputation,
    UnchangedObjects,
    stored_by,
    without_storing,
)
from syncpipe.runtime.recorder import as_range
from syncpipe.skip.layout import layer_skips
from syncpipe.skip.namespace import SkipKey, describe
from syncpipe.skip.store import current_store, use_store
from syncpipe.stages.inplace import Given, aliased, entering, may_write
from syncpipe.stages.selective import Saved
from syncpipe.stages.stage import CELL, Stage
from syncpipe.stages.swaps import ShallowCopy, Swap

__all__ = ["Inputs", "StageRun"]

#: The value that travels along the layers, and skips.
Inputs = tuple[Any, tuple[Any, ...]]
#: Of a cell that is recomputed: for each layer the generators that it may draw from, and the
#: fingerprint of what it gave.
Drawn = dict[int, Any]

_T = TypeVar("_T")
_BACKWARD = 0x9E3779B9  # sets what a backward draws apart from what its layers draw


class StageRun:
    """A stage in one call, bound to what is the same for all of its cells.

    Args:
        stage: the stage.
        m: the number of micro-batches.
        seed: of the call's random numbers.
        mode: what of it is recomputed.
        grad: whether a graph is recorded.
        through: of the stage of which this one is a unit.

    Attributes:
        through: how many cells went forward so far, in a list.
        statistics: collects those of deferred BatchNorm, for all replicas of the stage.
        others: by the identity of a tensor of its modules what it computes with instead.
        swaps: what puts them into the modules for the time of a run.
        shallow: copies of the modules for that, if other threads run these.
        modules: the modules as they are in this call, if it recomputes.
        backward_draws: the generators that its backward draws from; None until one went back.
        units: its pieces, if they are recomputed one by one, and whether each is.
    """

    def __init__(
        self,
        stage: Stage,
        m: int,
        seed: int,
        mode: StageMode,
        *,
        grad: bool,
        through: list[int] | None = None,
    ) -> None:
        self.stage, self.m, self.seed, self.grad = stage, m, seed, grad
        self.partition = stage.partition
        self.through = [0] if through is None else through
        self.policy = mode if isinstance(mode, Selective) else None
        self.statistics: MiniBatchStatistics | None = None
        self.others: dict[int, Tensor] = {}
        self.swaps: Sequence[Swap] = ()
        self.shallow: ShallowCopy | None = None
        self.modules: ModuleState | None = None
        self.backward_draws: int | None = None
        self.first = stage.j == 0 and stage.whole is None
        self.words = f"stage {stage.j} ({stage.layers_in_words}), micro-batch"
        self.units = [
            (StageRun(unit, m, seed, "never", grad=grad, through=self.through), again)
            for unit, again in (stage.units(mode.spans) if isinstance(mode, ByLayer) else ())
        ]
        self._plain = not (stage.has_skips or stage.defers or stage.hooked)
        self._quiet: Sequence[bool] = ()  # for each layer whether it never draws
        self._new = True  # never re-materialized
        self._compared = 0  # the last cell whose recomputation may be compared

    @property
    def all(self) -> list[StageRun]:
        """All that runs layers: itself and its units."""
        return [self, *[unit for unit, _ in self.units]]

    @cached_property
    def writes(self) -> bool:
        """Whether its layers may write into inputs as they are in this call."""
        return may_write(self.stage.partition, pops=bool(self.stage.pops))

    # -- forward

    def forward(
        self, i: int, inputs: Inputs, marks: Sequence[int] = (), target: Any = None
    ) -> Inputs:
        """Computes cell ``(i, j)``.

        Args:
            i: the micro-batch.
            inputs: the input of the first layer, and the skips that this stage pops.
            marks: for each tensor of the inputs who else it belongs to; nothing if nobody.
            target: what came with the inputs from the caller.

        Returns:
            The output of the last layer with the skips for other stages.
        """
        plain = self._plain and not (self.stage.changes.any or self.swaps or self.shallow or marks)
        if plain and not (profiler._is_profiler_enabled or (self.first and self.writes)):
            outputs = self._layers(self.partition, i, None, False, inputs[0]), ()  # mostly
            self._count()
            return outputs
        return self._locked(self._forward, i, inputs, marks, target)

    def _forward(self, i: int, inputs: Inputs, marks: Sequence[int], target: Any) -> Inputs:
        if self.first and self.writes:
            marks = entering(inputs[0], target)
        if any(marks):
            given = Given(inputs, marks, copy=self.writes)
            outputs = self._run(i, given.tree, None)
            given.written(f"{self.words} {i}")
        else:
            outputs = self._run(i, inputs, None)
        self._count()
        return outputs

    def forward_without_storing(
        self, i: int, inputs: Inputs, detached: Inputs, marks: Sequence[int], target: Any = None
    ) -> tuple[Inputs, Recomputation]:
        """Computes cell ``(i, j)``, whose graph is dropped.

        Args:
            i: the micro-batch.
            inputs: as for :meth:`forward`.
            detached: the inputs without their graph.
            marks: as for :meth:`forward`.
            target: as for :meth:`forward`.

        Returns:
            The outputs, and what :meth:`recompute` computes them from again.
        """
        if self.modules is None:
            self.modules = ModuleState(self.stage.partition, self.stage.changes)
        return self._locked(self._without_storing, i, inputs, detached, marks, target)

    def _without_storing(
        self, i: int, inputs: Inputs, detached: Inputs, marks: Sequence[int], target: Any
    ) -> tuple[Inputs, Recomputation]:
        assert self.modules is not None
        where = f"{self.words} {i}"
        state, drawn = CellState(self.modules, where), Drawn()
        saved = None if self.policy is None else Saved(self.policy, self.stage.generators)
        run = partial(self._run, i, drawn=drawn, saved=saved)
        if self.first and self.writes:
            marks = entering(inputs[0], target)
        # The first cell of a call is compared with its recomputation.
        compared = i <= self._compared
        begins = [tensor.grad_fn for tensor in tensors_in(inputs)] if compared else []
        wrote = False
        if self.writes or any(marks):
            given = Given(inputs, marks, copy=self.writes, kept=detached)
            unchanged = UnchangedObjects(inputs)
            outputs = without_storing(run, given.tree)
            written = given.written(where)
            unchanged.check(where)
            wrote, detached = True in written, given.settle(written)
        else:
            outputs = without_storing(run, inputs)
        state.learn()
        if self._new or state.modules.lazy:
            self._learn(state)
        self._count()
        recomputation = Recomputation(
            partial(run, again=True),
            detached,
            mutates_inputs=wrote,
            state=state,
            where=where,
            stored=self._stored(outputs, begins) if compared and not wrote else None,
        )
        return outputs, recomputation

    def checkpointed(self, i: int, inputs: Inputs, marks: Sequence[int]) -> Inputs:
        """Computes cell ``(i, j)`` as a part of a graph that stores nothing of it.

        Args:
            i: the micro-batch.
            inputs: as for :meth:`forward`.
            marks: as for :meth:`forward`.
        """
        recomputation: Recomputation | None = None
        flags = [tensor.requires_grad for tensor in tensors_in(inputs)]

        def run(_: Tensor) -> Inputs:
            nonlocal recomputation, inputs
            if recomputation is None:
                detached = map_tensors(lambda tensors: [t.detach() for t in tensors], inputs)
                outputs, recomputation = self.forward_without_storing(i, inputs, detached, marks)
                inputs = detached
                return outputs
            following = iter(flags)
            given = map_tensors(
                lambda tensors: [t.detach().requires_grad_(next(following)) for t in tensors],
                recomputation.inputs,
            )
            moment = torch._C._current_graph_task_id()
            return self.recompute(recomputation, given, moment, keep=True)

        like = torch.empty(0, device=self.stage.device)  # tells what kind of device it is
        outputs: Inputs = checkpoint(
            run, like, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )
        return outputs

    def recompute(
        self, recomputation: Recomputation, inputs: Inputs, moment: object, *, keep: bool = False
    ) -> Inputs:
        """The outputs of a cell whose graph was dropped once more, with a new graph.

        Args:
            recomputation: of the cell.
            inputs: its inputs, as the begin of the graph.
            moment: the same as long as the user's code cannot have changed any module.
            keep: let it be done again.
        """
        outputs: Inputs = self._locked(recomputation, inputs, moment, keep)
        return outputs

    def run_loss(
        self, i: int, function: Callable[[Any], Any], given: Any, draws: int | None
    ) -> tuple[Any, int]:
        """Calls a function (the loss) as if it were one more layer after those of this stage.

        Args:
            i: the micro-batch.
            function: the function.
            given: its argument.
            draws: bit mask of the generators that it draws from; None if that is not known yet.

        Returns:
            What the function returns, and the bit mask.
        """
        if draws == 0:
            return function(given), 0
        stage, observe = self.stage, draws is None
        which = stage.generators.all if draws is None else draws
        cell = (self.seed, stage.first + len(stage.names), i)
        result, seen = run_seeded(stage.generators, which, cell, function, given, observe=observe)
        if observe or seen.nests:
            stage.learn(seen)
        return result, seen.draws if draws is None else draws

    def backward(self, i: int, run: Callable[..., None], *args: Any) -> None:
        """Runs the backward of cell ``(i, j)``: seeded, as layers are, where it may draw.

        Args:
            i: the micro-batch.
            run: runs it.
            args: what that is given.
        """
        stage, draws = self.stage, self.backward_draws
        first = draws is None and not (stage.nests or stage.quiet_backward)
        if first:
            draws = stage.generators.all
        elif draws is None:
            draws = self.backward_draws = stage.backward_draws
        if not draws:
            run(*args)
            return
        cell = (self.seed + _BACKWARD, stage.first, i)

        def seeded() -> None:
            _, seen = run_seeded(
                stage.generators, draws, cell, lambda _: run(*args), None, observe=first
            )
            if first:
                stage.backward_draws |= 0 if stage.nests else seen.draws
                self.backward_draws = stage.backward_draws

        self._locked(seeded)  # the order of locks is: stage before random state

    def _locked(self, run: Callable[..., _T], *args: Any) -> _T:
        """Runs something that may touch the buffers of this stage."""
        changes = self.stage.changes
        if not changes.any or OUTERMOST.get() is not None:
            return run(*args)
        with changes.lock:
            token = OUTERMOST.set(changes.lock)
            try:
                return run(*args)
            finally:
                OUTERMOST.reset(token)

    def _count(self) -> None:
        if self.stage.whole is None:
            self.through[0] += 1
        if self.stage.commits and self.through[0] == self.m and self.statistics is not None:
            self.statistics.commit()

    def _stored(self, outputs: Inputs, begins: list[Any]) -> Counter[Any] | None:
        """What a cell stored; in the first call with shapes."""
        if self.stage.compares_later:  # a script compiles itself in its second run, and stores
            self.stage.compares_later, self._compared = False, 1  # other tensors then
            return None
        training = self.stage.partition.training
        return stored_by(outputs, begins, shapes=self.stage.is_new(("stored", training)))

    def _learn(self, state: CellState) -> None:
        self._new = False  # it may have made its parameters only now
        after = ModuleState(self.stage.partition, self.stage.changes)
        if state.modules.lazy or not after.like(state.modules):
            state.modules = self.modules = after

    # -- from inputs to outputs

    def _run(
        self,
        i: int,
        inputs: Inputs,
        drawn: Drawn | None,
        *,
        again: bool = False,
        saved: Saved | None = None,
    ) -> Inputs:
        """The cell, from inputs to outputs.

        Args:
            i: the micro-batch.
            inputs: its inputs.
            drawn: filled, and compared when it runs again.
            again: whether it does.
            saved: the operations that are not recomputed.
        """
        stage = self.stage
        if profiler._is_profiler_enabled:
            kind = "recompute" if again else "forward"
            name = f"syncpipe {kind} stage {stage.j} micro-batch {i}"
            return as_range(name, self._inside, i, inputs, drawn, again, saved)
        wrapped = self.swaps or self.shallow or saved or stage.changes.renorming
        if self._plain and not wrapped:
            return self._layers(self.partition, i, drawn, again, inputs[0]), ()
        return self._inside(i, inputs, drawn, again, saved)

    def _inside(
        self, i: int, inputs: Inputs, drawn: Drawn | None, again: bool, saved: Saved | None
    ) -> Inputs:
        """The same with all that may be around the layers."""
        stage = self.stage
        run: Callable[[], Inputs] = partial(self._with_skips, i, inputs, drawn, again)
        if stage.changes.renorming and not again:
            run = partial(stage.changes.renorm, run)
        if saved is not None:
            run = partial(saved.around, run, again)
        if not stage.defers:
            return run()
        with collect(None if again else self.statistics, i):
            return run()

    def _with_skips(self, i: int, inputs: Inputs, drawn: Drawn | None, again: bool) -> Inputs:
        stage, (value, skips) = self.stage, inputs
        if not stage.has_skips:
            return self._partition(i, drawn, again, value), ()
        store: dict[SkipKey, Any] = dict(zip(stage.pops, skips, strict=True))
        with use_store(store):
            output = self._partition(i, drawn, again, value)
        for key in stage.stashes:
            if key not in store:
                raise RuntimeError(self._did_not_stash(i, key))
        return output, tuple([store.pop(key) for key in stage.stashes])

    def _did_not_stash(self, i: int, key: SkipKey) -> str:
        stage = self.stage
        k = next(k for k, layer in enumerate(stage.partition) if key in layer_skips(layer).stashed)
        return (
            f"{stage.layer(k)} of {self.words} {i} did not stash {describe(key)}, which a "
            "forward that it overrides does: call that one, or decorate the class with "
            "@skippable(stash=[...]), naming what it does stash (nothing: @skippable())"
        )

    def _partition(self, i: int, drawn: Drawn | None, again: bool, value: Any) -> Any:
        if self.shallow is None:
            run = partial(self._layers, self.partition, i, drawn, again)
            if self.swaps:
                return swapped(self.swaps, partial(self._hooked, run, value))
            return self._hooked(run, value)
        other = self.shallow.follow(self.others)
        try:
            return self._hooked(partial(self._layers, other, i, drawn, again), value)
        finally:
            self.shallow.give_back()

    def _hooked(self, layers: Callable[[Any], Any], value: Any) -> Any:
        if not self.stage.hooked:
            return layers(value)
        token = CELL.set((self.stage.partition, layers))
        try:
            return self.stage.partition(value)
        finally:
            CELL.reset(token)

    def _layers(self, partition: Any, i: int, drawn: Drawn | None, again: bool, value: Any) -> Any:
        """The layers one after another."""
        if self.units:
            return self._in_units(i, value)
        stage = self.stage
        first = not again and not self.through[0]
        care, unpack = first or drawn is not None, stage.partition.unpack
        if care and not self._quiet:
            self._quiet = list(map(never_draws, stage.partition._modules.values()))
        k, layer = 0, None  # Ctrl-C may come before the first
        try:
            for k, layer in enumerate(partition._modules.values()):
                call: Any = Unpacked(layer) if unpack else layer
                if stage.draws[k] or (care and not self._quiet[k]):
                    value = self._drawing(i, k, call, value, first, drawn, again)
                else:
                    value = call(value)
        except BaseException as error:
            annotate(error, f"in {stage.layer(k)} of {self.words} {i}")
            if note := call_note(error, layer, value, unpack=unpack):
                annotate(error, note)
            if "more than 1 value per channel" in str(error):
                annotate(error, _ONE_SAMPLE)
            raise
        return value

    def _in_units(self, i: int, value: Any) -> Any:
        """The layers of a cell, one unit after another: those that are recomputed by themselves."""
        store = current_store() if self.stage.has_skips else None
        for run, again in self.units:
            unit = run.stage
            unit.partition.training = self.stage.partition.training
            popped = tuple([store.pop(key) for key in unit.pops]) if store else ()
            inputs = (value, popped)
            if again:
                value, stashed = run.checkpointed(i, inputs, aliased(inputs))
            else:
                value, stashed = run.forward(i, inputs)
            if stashed and store is not None:
                store.update(zip(unit.stashes, stashed, strict=True))
        return value

    def _drawing(
        self, i: int, k: int, layer: Any, value: Any, first: bool, drawn: Drawn | None, again: bool
    ) -> Any:
        """A layer that draws, or may do so."""
        stage = self.stage
        which, wanted = stage.generators.all if first else stage.draws[k], None
        if again:
            which, wanted = (0, None) if drawn is None else drawn.get(k, (0, None))
        elif drawn is not None:
            drawn[k] = which, None  # a backward inside of the layer recomputes this cell now
        if which:
            cell = (self.seed, stage.first + k, i)
            value, seen = run_seeded(
                stage.generators, which, cell, layer, value, observe=first,
                module=stage.partition[k], mark=drawn is not None,
            )  # fmt: skip
            ends = seen.ends
            if first or seen.nests:
                stage.learn(seen, k)
        else:
            mine = [generator for _, generator in stage.generators.pick(stage.generators.all)]
            before = [] if wanted is None else states_of(mine)
            value, ends = layer(value), {}
            if wanted is not None and not changed(mine, before):
                return value  # nobody has drawn
        if drawn is not None and not again:
            drawn[k] = stage.draws[k], (fingerprint(value), ends)
        elif wanted is not None and wanted != (fingerprint(value), {**wanted[1], **ends}):
            stage.draws[k] = stage.generators.all
            raise RuntimeError(
                f"{stage.layer(k)} gave something else when it was recomputed than in the forward, "
                "so that gradients would be wrong. If a thread of yours draws random numbers "
                "meanwhile, give it a torch.Generator of its own. If the layer draws some, but did "
                "not for the first micro-batch of any call so far, that is known from the next "
                "call on. If it depends on anything else that changes, let it ask "
                "syncpipe.is_recomputing(), or use checkpoint='never'"
            )
        return value


#: A normalisation in training was given one sample.
_ONE_SAMPLE = (
    "the last micro-batches of a mini-batch may be smaller than the others: use another batch size "
    "or number of chunks, DataLoader(..., drop_last=True), or eval() of this normalisation"
)
