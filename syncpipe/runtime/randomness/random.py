"""Random numbers that do not depend on which thread comes first.

Threads share generators: the CPU has one for the whole process, an accelerator one for each
device. So a layer that draws runs with the generator to itself (a lock), seeded from

    (one draw from the caller's generator per call, index of the layer, index of the micro-batch)

and the generator gets its old state back afterwards. Nothing else enters: not the balance, the
devices, the schedule or the checkpoint mode. A recomputation seeds the same way, so it draws what
was drawn before. Which layers draw is learned anew in each call from the first micro-batch, for
which all layers run that way; the others then run freely. Layers of PyTorch that are known not
to draw skip even that.

A thread of the user's that draws meanwhile takes no locks of ours, and a layer may draw for the
first time in a later micro-batch. Neither can be seen while it happens. But what counts is whether
a recomputation gives what the forward gave, and that is compared (:func:`fingerprint`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncpipe.data import tensors_in
from syncpipe.runtime.randomness.generators import CPU, LOCKS, Generators, NoDispatch, NoFunctions
from syncpipe.runtime.randomness.seen import Seen
from syncpipe.runtime.randomness.turns import in_turn

__all__ = ["cell_seed", "changed", "fingerprint", "run_seeded", "states_of"]


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
    mark: bool = False,
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
        observe: find out from which generators it draws, or whose states it uses.
        mark: note where those of accelerators stand in the end, which tells how much was drawn.

    Returns:
        The layer's output, and what was seen.
    """
    picked = generators.pick(which)
    mine = [generator for _, generator in picked]
    seed, seen = cell_seed(*cell), Seen()

    def seeded() -> Any:
        with LOCKS.states:
            for generator in mine:
                generator.manual_seed(seed)
            start = [generator.get_state() for generator in mine] if observe else []
        output = seen.run(layer, value) if observe else layer(value)
        if observe:
            seen.draws = generators.all if seen.touches else changed(mine, start)
        if mark:
            with LOCKS.states, NoDispatch(), NoFunctions():
                ends = {key: fingerprint(own.get_state()) for key, own in picked if key != CPU}
                seen.ends = ends
        return output

    return in_turn(mine, [LOCKS[key] for key, _ in picked], seeded, seen), seen


def states_of(generators: list[torch.Generator]) -> list[Tensor]:
    """The states of some generators."""
    with LOCKS.states, NoDispatch(), NoFunctions():
        return [generator.get_state() for generator in generators]


def changed(generators: list[torch.Generator], before: list[Tensor]) -> int:
    """A bit mask of the generators whose state is another one now."""
    with LOCKS.states, NoDispatch(), NoFunctions():
        pairs = zip(before, [generator.get_state() for generator in generators], strict=True)
        return sum((not torch.equal(a, b)) << k for k, (a, b) in enumerate(pairs))


def fingerprint(output: Any) -> list[list[int]]:
    """What tells the outputs of two runs of a layer apart, if these drew other numbers.

    Only on the CPU, where a layer that does the same gives the same to the last bit; elsewhere the
    states of generators have to do. Sums of every 61st word, so that it matters where one stands.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return []
    with NoDispatch(), NoFunctions():
        return [_sums(t) for t in tensors_in(output) if _is_plain(t)]


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _sums(tensor: Tensor) -> list[int]:
    words = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if words.numel() % 8 == 0 and words.data_ptr() % 8 == 0 and words.storage_offset() % 8 == 0:
        words = words.view(torch.int64)
    rows = words.numel() // 61
    sums = words[: 61 * rows].view(rows, 61).sum(0, dtype=torch.int64)
    found: list[int] = torch.cat([sums, words[61 * rows :].long()]).tolist()
    return found
