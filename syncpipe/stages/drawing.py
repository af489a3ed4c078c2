"""Layers that draw random numbers, in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from syncpipe.runtime.random_numbers import (
    GeneratorLease,
    fingerprint,
    never_draws,
    run_seeded,
    same_fingerprints,
)

#: Of a recomputed cell: by layer the generators that it may draw from, and its fingerprint.
Drawn = dict[int, Any]
_OUTPUTS = -1  # the key of the cell's output, in place of a layer
_DIFFERS = (
    "{} gave another result when it was recomputed than in the forward, so gradients would be "
    "wrong. If a thread of yours draws random numbers meanwhile, give it a torch.Generator of its "
    "own. If the layer draws, but not in the first micro-batch, call again: the next call expects "
    "it. If the layer depends on other changing state (it counts its calls), let it ask "
    "syncpipe.is_recomputing(), or use checkpoint='never' (each micro-batch changes it in any case)"
)
_BACKWARD = 0x9E3779B9  # separates the seeds of backwards from those of layers


class Drawing:
    """The random numbers of a stage in one call.

    Each call learns anew which layers draw. Only layers that first drew in a later micro-batch are
    remembered: the next call observes them in all micro-batches, and forgets them if they do not
    draw again.

    Attributes:
        draws: for each layer a bit mask of the generators that it draws from.
        backward_draws: bit mask of the generators that backwards draw from; None before the first.
        trusted: whether earlier calls supplied ``draws`` (for a replica), so that layers that do
            not draw need not be observed.
    """

    def __init__(self, run: Any) -> None:
        self.run, self.stage = run, run.stage
        self.draws = [0] * len(self.stage.names)
        self.backward_draws: int | None = None
        self.trusted = False
        self._touches = False  # whether a forward read or set the state of a generator
        self._late = frozenset(self.stage.late_layers if run.grad else ())
        self._deterministic = list(map(never_draws, self.stage.partition._modules.values()))

    @property
    def may_draw(self) -> bool:
        return not all(self._deterministic)

    @property
    def around(self) -> list[Any]:
        """For each layer that may draw what calls it; None for others."""
        return [
            None if never else partial(self._layer, k)
            for k, never in enumerate(self._deterministic)
        ]

    def _layer(self, k: int, i: int, call: Any, value: Any, record: Any, recomputing: bool) -> Any:
        """Calls layer ``k``, which may draw, with random numbers of its own."""
        drawn: Drawn | None = None if record is None else record.drawn
        first, late = not recomputing and not self.run.forwards_done[0], k in self._late
        if not (first or late or self.draws[k] or drawn is not None):
            return call(value)
        stage, everything = self.stage, self.stage.generators.all
        # A trusted layer that holds the generators anyway is observed, too.
        known = self.trusted and not self.draws[k] & everything
        observe = not recomputing and (late or (first and not known))
        which, expected = everything if observe else self.draws[k], None
        if recomputing:
            unknown = everything, None  # the forward has not reached this layer
            which, expected = (0, None) if drawn is None else drawn.get(k, unknown)
        elif drawn is not None:
            drawn[k] = which, None  # for a recomputation by a backward inside the layer
        ends: dict[Any, list[Tensor]] = {}
        if which:
            cell = (self.run.seed, stage.first + k, i)
            value, seen = run_seeded(
                stage.generators, which, cell, call, value, observe=observe,
                module=stage.partition[k], mark=drawn is not None,
            )  # fmt: skip
            ends = seen.ends
            if observe:
                self.draws[k] = seen.draws if first else self.draws[k] | seen.draws
                self._note_touches(seen)
                if first:
                    stage.late_layers.discard(k)
                elif seen.draws:
                    stage.late_layers.add(k)
        else:
            value = call(value)
        if drawn is not None and not recomputing:
            drawn[k] = self.draws[k], (fingerprint(value), ends)
        elif expected is not None and not _is_same(expected, (fingerprint(value), ends)):
            stage.late_layers.add(k)
            stage.draws_by_mode.clear()  # trusted draws were wrong
            raise RuntimeError(_DIFFERS.format(stage.describe_layer(k)))
        return value

    def _note_touches(self, seen: GeneratorLease) -> None:
        if seen.touches:
            parent = self.run.parent.drawing  # all units run backward together
            parent._touches = True
            if parent.backward_draws is not None:
                parent.backward_draws = self.stage.generators.all

    def loss(
        self, i: int, function: Callable[[Any], Any], given: Any, draws: int | None
    ) -> tuple[Any, int]:
        """Calls the loss function, seeded as a layer after the last one of this stage.

        ``draws`` is a bit mask of the generators that it draws from; None: unknown, to be observed.
        Returns the function's result and the mask.
        """
        if draws == 0:
            return function(given), 0
        stage, observe = self.stage, draws is None
        which = stage.generators.all if draws is None else draws
        cell = (self.run.seed, stage.first + len(stage.names), i)
        result, seen = run_seeded(stage.generators, which, cell, function, given, observe=observe)
        if observe:
            self._note_touches(seen)
        return result, seen.draws if draws is None else draws

    def backward(self, run: Callable[..., Any], i: int, cell: Any, grads: list[Any]) -> Any:
        """Runs the backward of cell ``(i, j)``, seeded if it may draw."""
        stage, draws = self.stage, self.backward_draws
        first = draws is None and not stage.backward_is_deterministic
        if first:
            draws = stage.generators.all
        elif draws is None:
            draws = self.backward_draws = stage.generators.all if self._touches else 0
        if not draws:
            return run(i, cell, grads)
        number = (self.run.seed + _BACKWARD, stage.first, i)

        def seeded() -> Any:
            result, seen = run_seeded(
                stage.generators, draws, number, partial(run, i, cell), grads, observe=first
            )
            if first:
                self.backward_draws = stage.generators.all if self._touches else seen.draws
                stage.backward_draws = self.backward_draws
            return result

        return self.run.locked(seeded)  # locks of stages come before those of generators


def seeded(task: Any, r: int, inner: Any) -> Any:
    """Seeds the backward of the cells of a stage, if it may draw."""
    own = task.call.runs[r].drawing
    if not own.may_draw and own.stage.backward_is_deterministic and not task.last[r]:
        return inner  # no layer can draw in its backward; on the last stage the loss may
    return partial(own.backward, inner)


def comparison(run: Any, inner: Any) -> Any:
    """Compares recomputed skips, and outputs changed by hooks of the partition, with the forward's.

    Must be the outermost wrapper.
    """
    if not (run.stage.stashes or run.stage.hooked):
        return inner

    def outer(i: int, inputs: Any, record: Any, recomputing: bool) -> Any:
        outputs = inner(i, inputs, record, recomputing)
        found = [] if record is None else fingerprint(outputs)
        if record is not None and not recomputing:
            record.drawn[_OUTPUTS] = found
        elif record is not None and not same_fingerprints(record.drawn.get(_OUTPUTS, found), found):
            raise RuntimeError(_DIFFERS.format(run.stage.describe(i)))
        return outputs

    return outer


def _is_same(one: Any, other: Any) -> bool:
    """Whether two runs gave the same outputs and drew as much from generators that both held."""
    (values, ends), (others, other_ends) = one, other
    held = ends.keys() & other_ends.keys()  # the first cell of a call holds all generators
    return same_fingerprints(values, others) and all(
        same_fingerprints(ends[key], other_ends[key]) for key in held
    )
