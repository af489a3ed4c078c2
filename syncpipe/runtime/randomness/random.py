"""Random numbers that do not depend on which thread comes first.

Threads share generators: the CPU has one for the whole process, an accelerator one for each
device. So a layer that draws runs with the generator to itself (a lock), seeded from

    (one draw from the caller's generator per call, index of the layer, index of the micro-batch)

and the generator gets its old state back afterwards. Nothing else enters: not the balance, the
devices, the schedule or the checkpoint mode. A recomputation seeds the same way, so it draws what
was drawn before. Which layers draw is learned anew in each call from the first micro-batch, for
which all layers run that way; the others then run freely. Layers of PyTorch that are known not
to draw skip even that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from syncpipe.runtime.randomness.generators import LOCKS, Generators, NoDispatch, NoFunctions
from syncpipe.runtime.randomness.private_generator import PrivateGenerator, nobody_looks
from syncpipe.runtime.randomness.seen import Seen
from syncpipe.runtime.randomness.turns import in_turn, quiet

__all__ = ["cell_seed", "draw_again", "run_comparing_states", "run_seeded"]


def cell_seed(seed: int, layer: int, i: int) -> int:
    """A seed for one cell.

    The CPU's generator looks at the low 32 bits only, so these are kept apart for the cells of a
    call: a bijection (the finalizer of MurmurHash3) of ``seed + a different number each``. Every
    65,536 micro-batches the numbers begin again, elsewhere between those of layers: at multiples
    of the golden ratio, which are as far apart as can be.
    """
    again, i = divmod(i, 1 << 16)
    low = (seed + (i << 16) + layer + 40503 * again) & 0xFFFFFFFF
    low ^= low >> 16
    low = low * 0x85EBCA6B & 0xFFFFFFFF
    low ^= low >> 13
    low = low * 0xC2B2AE35 & 0xFFFFFFFF
    low ^= low >> 16
    return (seed >> 32 << 32 | low) & 0x7FFFFFFFFFFFFFFF


def run_seeded(
    generators: Generators,
    which: int,
    cell: tuple[int, int, int],
    layer: Callable[[Any], Any],
    value: Any,
    *,
    observe: bool,
    look: bool = False,
    private: bool = False,
) -> tuple[Any, Seen]:
    """Runs a layer that draws its own random numbers for one micro-batch.

    Ctrl-C may come between any two lines. So locks are held by ``with`` itself, and the states are
    put back by one call.

    Args:
        generators: those of the layer's device.
        which: bit mask of the generators that the layer is expected to draw from.
        cell: seed of the call, index of the layer, index of the micro-batch.
        layer: the layer.
        value: its input.
        observe: find out from which generators it draws.
        look: find out whether it uses their states, and puts Python code into the graph.
        private: other threads may draw at any time, so it gets a generator of its own.

    Returns:
        The layer's output, and what was seen.
    """
    picked = generators.pick(which)
    mine = [generator for _, generator in picked]
    seed, seen = cell_seed(*cell), Seen()
    if private and which == 1 and nobody_looks():
        seen.private = own = PrivateGenerator(torch.Generator().manual_seed(seed))
        if not look:
            output, seen.draws = own.run(layer, value), int(own.drew)
            return output, seen
        layer = partial(own.run, layer)

    def seeded() -> Any:
        with LOCKS.states:
            for generator in mine:
                generator.manual_seed(seed)
            start = [generator.get_state() for generator in mine] if observe else []
        output = seen.run(layer, value) if look else layer(value)
        if observe:
            seen.draws = generators.all if seen.touches else _changed(mine, start)
            if seen.private is not None:
                seen.draws |= seen.private.drew
        return output

    return in_turn(mine, [LOCKS[key] for key, _ in picked], seeded, seen), seen


def _changed(generators: list[torch.Generator], before: list[Tensor]) -> int:
    """A bit mask of the generators whose state is another one now."""
    pairs = zip(before, _states(generators), strict=True)
    return sum((not _same([a], [b])) << k for k, (a, b) in enumerate(pairs))


def _states(generators: list[torch.Generator]) -> list[Tensor]:
    with LOCKS.states, NoDispatch(), NoFunctions():
        return [generator.get_state() for generator in generators]


def _same(states: list[Any], others: list[Any]) -> bool:
    with NoDispatch(), NoFunctions():
        return all(torch.equal(a, b) for a, b in zip(states, others, strict=True))


#: The state of each generator before and after a layer.
_States = tuple[list[Tensor], list[Tensor]]


def run_comparing_states(
    generators: Generators, layer: Callable[[Any], Any], value: Any
) -> tuple[Any, _States | None]:
    """Runs a layer that was not seen to draw, and will be computed again.

    Returns:
        Its output; and states, if they changed, by the layer or by another thread. While another
        layer has the generators to itself nothing can be said.
    """
    turns = quiet()
    mine = [generator for _, generator in generators.pick(generators.all)]
    before = _states(mine)
    output = layer(value)
    after = _states(mine)
    if _same(before, after) or turns is None or turns != quiet():
        return output, None
    return output, (before, after)


def draw_again(
    generators: Generators, states: _States, layer: Callable[[Any], Any], value: Any, where: str
) -> Any:
    """Recomputes a layer from the states that were noted in its forward.

    Raises:
        RuntimeError: it draws, but something else than in the forward.
    """
    before, after = states
    mine = [generator for _, generator in generators.pick(generators.all)]

    def again() -> tuple[Any, list[Any]]:
        with LOCKS.states:
            for generator, state in zip(mine, before, strict=True):
                generator.set_state(state)
        if len(mine) == 1 and not torch._C._len_torch_dispatch_stack():
            own = PrivateGenerator(torch.Generator().set_state(before[0]))
            return own.run(layer, value), [own.state]
        return layer(value), _states(mine)

    output, now = in_turn(mine, [LOCKS[key] for key in generators.keys], again)
    if not _same(now, before) and not _same(now, after):
        raise RuntimeError(
            f"{where} draws random numbers, but did not for the first micro-batch of any call so "
            "far, and another thread drew at the same time: what it drew in the forward cannot be "
            "drawn again. It is known from the next call on; to have it known from the start, let "
            "it draw for every micro-batch, and give threads of your own a torch.Generator each"
        )
    return output
