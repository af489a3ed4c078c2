"""A stage in one call: how its cells run, and how they run once more.

    (input, skips in)  -->  layer, layer, layer  -->  (output, skips out)

Each run is a *cell* (micro-batch ``i``, stage ``j``). Layers get their random numbers, skips come
and go, deferred BatchNorm collects its statistics, exceptions get a note. What the caller still
needs stays as it is, and a cell that is re-materialized is told how to be computed again.

By a ``Selective`` mode some operations are not recomputed: PyTorch has a dispatch mode around the
forward that saves, and one around the recomputation that gives back what was saved. But a random
operation that is saved draws once only, and those after it in the same layer would draw other
numbers the second time. So the state of the generators after each one is noted in the forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from syncpipe.data import map_tensors, tensors_in
from syncpipe.layers.batchnorm import MiniBatchStatistics, collect
from syncpipe.layers.unpack import call_note, spread
from syncpipe.options import ByLayer, Selective, StageMode
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.interrupts import Swap, swapped
from syncpipe.runtime.random_numbers import (
    fingerprint,
    holds_generators,
    is_random,
    never_draws,
    outside_of_turn,
    put_back_states,
    run_seeded,
    states_of,
)
from syncpipe.runtime.recomputation import OUTERMOST, ModuleState, Recomputation
from syncpipe.skip.layout import layer_skips
from syncpipe.skip.store import SkipKey, current_store, describe, use_store
from syncpipe.stages.inplace import Given, aliased, entering, may_write
from syncpipe.stages.stage import CELL, Stage

#: The value that travels along the layers, and skips.
Inputs = tuple[Any, tuple[Any, ...]]
#: Of a cell that is recomputed: for each layer the generators that it may draw from, and the
#: fingerprint of what it gave.
Drawn = dict[int, Any]
#: Of a cell what its policy saves, and the states of the generators after each random operation.
_Saved = tuple[Any, deque[list[Tensor]]]

_T = TypeVar("_T")
_BACKWARD = 0x9E3779B9  # sets what a backward draws apart from what its layers draw
#: A normalisation in training was given one sample.
_ONE_SAMPLE = (
    "the last micro-batches of a mini-batch may be smaller than the others: use another batch size "
    "or number of chunks, DataLoader(..., drop_last=True), or eval() of this normalisation"
)


class StageRun:
    """A stage in one call of ``m`` micro-batches, bound to what is the same for all of its cells.

    Attributes:
        through: how many cells went forward so far, in a list (which units have in common).
        statistics: collects those of deferred BatchNorm, for all replicas of the stage.
        others: by the identity of a tensor of its modules what it computes with instead: ``swaps``
            put that into the modules for the time of a run, or ``shallow`` copies of them have it.
        modules: the modules as they are in this call, if it recomputes.
        backward_draws: the generators that its backward draws from; None until one went back.
        drew: for each layer those that it was seen to draw from.
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
        self.shallow: Any = None  # a ShallowCopy
        self.modules: ModuleState | None = None
        self.backward_draws: int | None = None
        self.drew = [0] * len(stage.names)
        self.first = stage.j == 0 and stage.whole is None
        self.words = f"stage {stage.j} ({stage.layers_in_words}), micro-batch"
        self.units = [
            (StageRun(unit, m, seed, "never", grad=grad, through=self.through), again)
            for unit, again in (stage.units(mode.spans) if isinstance(mode, ByLayer) else ())
        ]
        self._counts = stage.whole is None
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
        """Whether its layers may write into inputs."""
        return may_write(self.stage.partition, pops=bool(self.stage.pops))

    def forward(
        self, i: int, inputs: Inputs, marks: Sequence[int] = (), target: Any = None
    ) -> Inputs:
        """Computes cell ``(i, j)``: the output of the last layer, with the skips for other stages.

        Args:
            i: the micro-batch.
            inputs: the input of the first layer, and the skips that this stage pops.
            marks: for each tensor of the inputs who else it belongs to; nothing if nobody.
            target: what came with the inputs from the caller.
        """
        plain = self._plain and not (self.stage.changes.any or self.swaps or self.shallow or marks)
        if plain and not (profiler._is_profiler_enabled or (self.first and self.writes)):
            outputs = self._layers(self.partition, i, None, False, inputs[0]), ()  # mostly
            self.through[0] += self._counts
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
        self,
        i: int,
        inputs: Inputs,
        detached: Inputs,
        marks: Sequence[int],
        target: Any = None,
        begun: Callable[[Recomputation], None] | None = None,
    ) -> tuple[Inputs, Recomputation]:
        """As :meth:`forward`, but the graph is dropped; with what :meth:`recompute` computes the
        outputs from again: from the inputs without their graph (``detached``). ``begun`` gets it
        before the forward, in the middle of which it may have to do so."""
        if self.modules is None:
            self.modules = ModuleState(self.stage.partition, self.stage.changes)
        return self._locked(
            self._without_storing, self.modules, i, inputs, detached, marks, target, begun
        )

    def _without_storing(
        self,
        modules: ModuleState,
        i: int,
        inputs: Inputs,
        detached: Inputs,
        marks: Sequence[int],
        target: Any,
        begun: Callable[[Recomputation], None] | None,
    ) -> tuple[Inputs, Recomputation]:
        stage, where = self.stage, f"{self.words} {i}"
        cell, drawn = Recomputation(modules, where), Drawn()
        saved = None if self.policy is None else (self.policy.contexts(), deque[list[Tensor]]())
        run = partial(self._run, i, drawn=drawn, saved=saved)
        if self.first and self.writes:
            marks = entering(inputs[0], target)
        writes = self.writes or any(marks)
        if begun is not None:
            cell.keep(partial(run, again=True), detached)
            cell.mutates_inputs = writes  # as long as nobody knows whether it does
            begun(cell)
        shapes = None  # the first cell of a call is compared with its recomputation
        if i <= self._compared and stage.compares_later:  # a script compiles itself in its second
            stage.compares_later, self._compared = False, 1  # run, and stores other tensors then
        elif i <= self._compared:  # in the first call with shapes
            shapes = stage.is_new(("stored", stage.partition.training))
        if writes:
            given = Given(inputs, marks, copy=self.writes, again=True)
            outputs = cell.forward(run, given.tree, shapes, guard=True)
            cell.mutates_inputs = given.written(where)
            if cell.mutates_inputs:
                cell.stored = None
        else:
            outputs = cell.forward(run, inputs, shapes)
        if self._new or modules.lazy:  # it may have made its parameters only now
            self._new = False
            after = ModuleState(self.stage.partition, self.stage.changes)
            if modules.lazy or not after.like(modules):
                cell.modules = self.modules = after
        self._count()
        cell.keep(partial(run, again=True), detached)
        return outputs, cell

    def checkpointed(self, i: int, inputs: Inputs, marks: Sequence[int]) -> Inputs:
        """Computes cell ``(i, j)`` as a part of a graph that stores nothing of it."""
        begun: list[Recomputation] = []
        running = True
        flags = [tensor.requires_grad for tensor in tensors_in(inputs)]

        def run(_: Tensor) -> Inputs:
            nonlocal running, inputs
            if not begun:
                detached = map_tensors(lambda tensors: [t.detach() for t in tensors], inputs)
                outputs = self.forward_without_storing(
                    i, inputs, detached, marks, begun=begun.append
                )[0]
                running, inputs = False, detached
                return outputs
            recomputation, following = begun[0], iter(flags)
            if running:  # a layer runs a backward in its forward
                recomputation.note_all()
                if self._new or recomputation.modules.lazy:
                    recomputation.modules = ModuleState(self.stage.partition, self.stage.changes)
            given = map_tensors(
                lambda tensors: [t.detach().requires_grad_(next(following)) for t in tensors],
                recomputation.inputs,
            )
            moment = torch._C._current_graph_task_id()
            run_again = partial(self.recompute, recomputation, given, moment, keep=True)
            return outside_of_turn(run_again)  # the order of locks is: stage before random state

        like = torch.empty(0, device=self.stage.device)  # tells what kind of device it is
        outputs: Inputs = checkpoint(
            run, like, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )
        return outputs

    def recompute(
        self, recomputation: Recomputation, inputs: Inputs, moment: object, *, keep: bool = False
    ) -> Inputs:
        """The outputs of a cell whose graph was dropped once more, with a new graph that begins
        with its inputs; otherwise as ``Recomputation.__call__``."""
        outputs: Inputs = self._locked(recomputation, inputs, moment, keep)
        return outputs

    def run_loss(
        self, i: int, function: Callable[[Any], Any], given: Any, draws: int | None
    ) -> tuple[Any, int]:
        """Calls a function (the loss) as if it were one more layer after those of this stage.

        ``draws`` is a bit mask of the generators that it draws from, None if that is not known yet;
        it is returned with what the function returns.
        """
        if draws == 0:
            return function(given), 0
        stage, observe = self.stage, draws is None
        which = stage.generators.all if draws is None else draws
        cell = (self.seed, stage.first + len(stage.names), i)
        result, seen = run_seeded(stage.generators, which, cell, function, given, observe=observe)
        if observe:
            stage.learn(seen)
            if seen.touches and self.backward_draws is not None:
                self.backward_draws = stage.backward_draws
        return result, seen.draws if draws is None else draws

    def backward(self, i: int, run: Callable[..., None], *args: Any) -> None:
        """Runs the backward of cell ``(i, j)``: seeded, as layers are, where it may draw."""
        stage, draws = self.stage, self.backward_draws
        first = draws is None and not stage.quiet_backward
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
                stage.backward_draws |= seen.draws
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
        self.through[0] += self._counts
        if self.stage.commits and self.through[0] == self.m and self.statistics is not None:
            self.statistics.commit()

    def _run(
        self,
        i: int,
        inputs: Inputs,
        drawn: Drawn | None,
        *,
        again: bool = False,
        saved: _Saved | None = None,
    ) -> Inputs:
        """The cell, from inputs to outputs, with all that may be around the layers.

        ``drawn`` is filled, and compared when it runs ``again``.
        """
        stage, (value, skips) = self.stage, inputs
        renorms = stage.changes.renorming and not again
        wrapped = self.swaps or self.shallow or saved or renorms or profiler._is_profiler_enabled
        if self._plain and not wrapped:
            return self._layers(self.partition, i, drawn, again, value), ()
        store: dict[SkipKey, Any] = dict(zip(stage.pops, skips, strict=True))
        run = partial(self._partition, i, drawn, again, value)
        with ExitStack() as around:
            if profiler._is_profiler_enabled:
                kind = "recompute" if again else "forward"
                name = f"syncpipe {kind} stage {stage.j} micro-batch {i}"
                around.enter_context(torch._C._profiler._RecordFunctionFast(name))
            if saved is not None:
                # A cast that was found in the cache would be missing when this runs again.
                around.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
                around.enter_context(saved[0][again])
                around.enter_context(_SavedStates(stage, saved[1], again))
            if stage.defers:
                around.enter_context(collect(None if again else self.statistics, i))
            if stage.has_skips:
                around.enter_context(use_store(store))
            output = stage.changes.renorm(run) if renorms else run()
        for key in stage.stashes:
            if key not in store:
                layers = enumerate(stage.partition)
                k = next(k for k, layer in layers if key in layer_skips(layer).stashed)
                raise RuntimeError(
                    f"{stage.layer(k)} of {self.words} {i} did not stash {describe(key)}, which a "
                    "forward that it overrides does: call that one, or decorate the class with "
                    "@skippable(stash=[...]), naming what it does stash (nothing: @skippable())"
                )
        return output, tuple([store.pop(key) for key in stage.stashes])

    def _partition(self, i: int, drawn: Drawn | None, again: bool, value: Any) -> Any:
        """The partition with the tensors that it computes with, and with its hooks."""
        partition = self.partition if self.shallow is None else self.shallow.follow(self.others)
        layers = partial(self._layers, partition, i, drawn, again)

        def run() -> Any:
            if not self.stage.hooked:
                return layers(value)
            token = CELL.set((self.partition, layers))
            try:
                return self.partition(value)
            finally:
                CELL.reset(token)

        try:
            return swapped(self.swaps, run) if self.swaps else run()
        finally:
            if self.shallow is not None:
                self.shallow.give_back()

    def _layers(self, partition: Any, i: int, drawn: Drawn | None, again: bool, value: Any) -> Any:
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
                call: Any = partial(spread, layer) if unpack else layer
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
            unknown = stage.generators.all, None  # the forward has not come so far
            which, wanted = (0, None) if drawn is None else drawn.get(k, unknown)
        elif drawn is not None:
            drawn[k] = which, None  # a backward inside of the layer recomputes this cell now
        if which:
            cell = (self.seed, stage.first + k, i)
            value, seen = run_seeded(
                stage.generators, which, cell, layer, value, observe=first,
                module=stage.partition[k], mark=drawn is not None,
            )  # fmt: skip
            ends = seen.ends
            if first:
                stage.learn(seen, k)
                self.drew[k] |= seen.draws
        else:
            ends, call = {}, partial(layer, value)
            value, drew = (call(), True) if wanted is None else stage.generators.watched(call)
            if not drew:  # nor has anybody else
                return value
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


class _SavedStates(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the states of the generators after each random operation; again: puts them back."""

    def __init__(self, stage: Stage, states: deque[list[Tensor]], again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators, self._states, self._again = stage.generators.own, states, again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_random(func) or kwargs.get("generator") is not None:
            return result
        if not self._again:
            self._states.append(states_of(self._generators))
        # There is none if other operations are run this time, which whoever looks for their
        # results will say. Operations that may be random and are not need no turn.
        elif (states := self._states.popleft() if self._states else []) and holds_generators():
            put_back_states(self._generators, states)
        return result
