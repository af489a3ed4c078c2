"""Layers that draw random numbers, in the cells of one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from syncpipe.layers.unpack import spread
from syncpipe.runtime.random_numbers import fingerprint, never_draws, run_seeded

#: Of a cell that is recomputed: for each layer the generators that it may draw from, and the
#: fingerprint of what it gave.
Drawn = dict[int, Any]
_BACKWARD = 0x9E3779B9  # sets what a backward draws apart from what its layers draw


class Drawing:
    """The random numbers of a stage in one call.

    Attributes:
        drew: for each layer a bit mask of the generators that it was seen to draw from.
        backward_draws: bit mask of the generators that its backward draws from; None until one ran.
    """

    def __init__(self, run: Any) -> None:
        self.run, self.stage = run, run.stage
        self.backward_draws: int | None = None
        self.drew = [0] * len(self.stage.names)
        self._quiet = list(map(never_draws, self.stage.partition._modules.values()))

    @property
    def cares(self) -> bool:
        """Whether any layer may draw."""
        return any(self.stage.draws) or not all(self._quiet)

    def layers(self, i: int, inputs: Any, record: Any, again: bool) -> Any:
        """As those of a ``StageRun``, but a layer that may draw is given its own numbers."""
        run, stage, value = self.run, self.stage, inputs[0]
        drawn = None if record is None else record.drawn
        first = not again and not run.through[0]
        care, unpack = first or drawn is not None, stage.partition.unpack
        k, layer = 0, None
        try:
            for k, layer in enumerate(run.running._modules.values()):
                call: Any = partial(spread, layer) if unpack else layer
                if stage.draws[k] or (care and not self._quiet[k]):
                    value = self._drawing(i, k, call, value, first, drawn, again)
                else:
                    value = call(value)
        except BaseException as error:
            run.explain(error, i, k, layer, value)
            raise
        return value, ()

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
            cell = (self.run.seed, stage.first + k, i)
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

    def loss(
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
        cell = (self.run.seed, stage.first + len(stage.names), i)
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
        cell = (self.run.seed + _BACKWARD, stage.first, i)

        def seeded() -> None:
            _, seen = run_seeded(
                stage.generators, draws, cell, lambda _: run(*args), None, observe=first
            )
            if first:
                stage.backward_draws |= seen.draws
                self.backward_draws = stage.backward_draws

        self.run.locked(seeded)  # the order of locks is: stage before random state
