"""Random numbers that do not depend on which thread comes first.

Threads share generators: the CPU has one for the whole process, an accelerator one for each
device. So a layer that draws runs with the generator to itself (a lock), seeded from

    (one draw from the caller's generator per call, index of the layer, index of the micro-batch)

and the generator gets its old state back afterwards. Nothing else enters: not the balance, the
devices, the schedule or the checkpoint mode. A recomputation seeds the same way, so it draws what
was drawn before. Which layers draw is learned anew in each call from the first micro-batch, for
which all layers run that way; the others then run freely. Layers of PyTorch that are known not
to draw skip even that.

A layer that draws may itself hold a pipe. That one runs on the layer's own thread, which has the
locks already (they are reentrant).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "LOCKS",
    "Generators",
    "Undisturbed",
    "draw_seed",
    "never_draws",
    "run_seeded",
    "undisturbed_draws",
]

_Key = tuple[str, int]
_RLock = Any  # threading.RLock is a function
_CPU: _Key = ("cpu", 0)


class _Locks:
    """One lock for each generator of the process, and one for reading and setting any state.

    A generator has a mutex of its own, and ``get_state`` makes its result while it holds it. If
    the garbage collector comes then and lets go of tensors, it lets go of the GIL, too; another
    thread that calls a method of the generator would hold the GIL and wait for the mutex for ever
    (seen with torch 2.13). Whoever has ``states`` makes such a call, all others wait without the
    GIL. Layers that draw do not hold the GIL meanwhile.
    """

    def __init__(self) -> None:
        self.states: _RLock = threading.RLock()
        self._guard = threading.Lock()
        self._made: dict[_Key, _RLock] = {}

    def __getitem__(self, key: _Key) -> _RLock:
        with self._guard:
            return self._made.setdefault(key, threading.RLock())

    def renew(self) -> None:
        """In a forked child: the threads that held locks do not exist here."""
        self.__init__()  # type: ignore[misc]


class _Turns:
    """Who has generators to himself, so that others can tell whether anybody had."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._last = 0
        self.inside: set[int] = set()

    def begin(self) -> int:
        """Begins a turn, which is ``inside`` until somebody takes its number out."""
        number = next(self._numbers)
        self.inside.add(number)  # first: a number that is known is inside, or over
        self._last = number
        return number

    def quiet(self) -> int | None:
        """The number of the last turn; None while there is one."""
        return None if self.inside else self._last

    def renew(self) -> None:
        """In a forked child."""
        self.__init__()  # type: ignore[misc]


LOCKS = _Locks()
_turns = _Turns()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LOCKS.renew)
    os.register_at_fork(after_in_child=_turns.renew)


# Entered together they shield our own bookkeeping from the modes that are meant for the layers.
# Both are PyTorch's own and used by ``with`` itself: Ctrl-C cannot come in between.
_NoDispatch: Any = torch._C._DisableTorchDispatch
_NoFunctions: Any = torch._C.DisableTorchFunction


def draw_seed() -> int:
    """Draws the seed of a call from the caller's CPU generator, and nothing more."""
    with LOCKS[_CPU], LOCKS.states, _NoDispatch(), _NoFunctions():
        _turns.inside.discard(_turns.begin())  # nobody sees the state before this turn is over
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


@contextmanager
def undisturbed_draws() -> Iterator[None]:
    """A context in which the calling thread draws from the CPU's generator as the caller would.

    Layers that draw at the same time wait, and do not take back what was drawn in here.
    """
    with LOCKS[_CPU]:
        turn = _turns.begin()
        try:
            yield
        finally:
            _turns.inside.discard(turn)


def _mix(seed: int, layer: int, i: int) -> int:
    """A seed for one cell.

    The CPU's generator looks at the low 32 bits only, so these are kept apart for any two cells
    of a call: a bijection (the finalizer of MurmurHash3) of ``seed + a different number each``.
    """
    low = (seed + (i << 16) + layer) & 0xFFFFFFFF
    low ^= low >> 16
    low = low * 0x85EBCA6B & 0xFFFFFFFF
    low ^= low >> 13
    low = low * 0xC2B2AE35 & 0xFFFFFFFF
    low ^= low >> 16
    return (seed >> 32 << 32 | low) & 0x7FFFFFFFFFFFFFFF


class Generators:
    """The generators from which the layers on one device can draw: the CPU's and the device's.

    Args:
        device: where the layers are.
    """

    def __init__(self, device: torch.device) -> None:
        self.keys: list[_Key] = [_CPU]
        self._generators: list[torch.Generator] = [torch.default_generator]
        if device.type not in ("cpu", "meta"):
            generator = _device_generator(device)
            if generator is not None:
                self.keys.append((device.type, device.index))
                self._generators.append(generator)
        self.all = (1 << len(self.keys)) - 1

    def pick(self, which: int) -> list[tuple[_Key, torch.Generator]]:
        """The generators in a bit mask; in the one order in which their locks are taken."""
        pairs = list(zip(self.keys, self._generators, strict=True))
        return [pair for k, pair in enumerate(pairs) if which >> k & 1]


def _device_generator(device: torch.device) -> torch.Generator | None:
    module: Any = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators is not None:
        if not len(generators) and hasattr(module, "init"):
            module.init()
            generators = module.default_generators
        generator: torch.Generator = generators[device.index]
        return generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return None


def run_seeded(
    generators: Generators,
    which: int,
    cell: tuple[int, int, int],
    layer: Callable[[Any], Any],
    value: Any,
    *,
    observe: bool,
) -> tuple[Any, int]:
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

    Returns:
        The layer's output, and with ``observe`` the bit mask of the generators it drew from.
    """
    picked = generators.pick(which)
    seed, drew = _mix(*cell), 0
    locks = [LOCKS[key] for key, _ in picked]
    with locks[0], locks[-1]:  # reentrant: twice the same one where there is only one
        turn = _turns.begin()
        try:
            with LOCKS.states:
                before = [generator.get_state() for _, generator in picked]
            undo = map(torch.Generator.set_state, [generator for _, generator in picked], before)
            try:
                with LOCKS.states:
                    for _, generator in picked:
                        generator.manual_seed(seed)
                    start = [generator.get_state() for _, generator in picked] if observe else []
                output = layer(value)
                if observe:
                    drew = _changed([generator for _, generator in picked], start)
            finally:
                try:
                    with LOCKS.states:
                        deque(undo, maxlen=0)
                finally:  # has nothing left to do, unless Ctrl-C came right before it
                    deque(undo, maxlen=0)
        finally:
            _turns.inside.discard(turn)
    return output, drew


def _changed(generators: list[torch.Generator], before: list[Tensor]) -> int:
    """A bit mask of the generators whose state is another one now."""
    with LOCKS.states, _NoDispatch(), _NoFunctions():
        now = [generator.get_state() for generator in generators]
        pairs = zip(before, now, strict=True)
        return sum((not torch.equal(a, b)) << k for k, (a, b) in enumerate(pairs))


class Undisturbed:
    """A context for the recomputation of a layer that was not seen to draw: it must not.

    What it drew in the forward came from nobody knows where, so it cannot be drawn again. Only a
    change that nobody else can have made counts: none is seen while another layer draws.

    Args:
        generators: those of the layer's device.
        where: the layer in words.

    Raises:
        RuntimeError: at the exit, when the layer drew.
    """

    __slots__ = ("_before", "_generators", "_turns", "_where", "drew")

    def __init__(self, generators: Generators, where: str) -> None:
        self._generators = [generator for _, generator in generators.pick(generators.all)]
        self._where = where
        self.drew = 0

    def __enter__(self) -> Undisturbed:
        self._turns = _turns.quiet()
        with LOCKS.states, _NoDispatch(), _NoFunctions():
            self._before = [generator.get_state() for generator in self._generators]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drew = _changed(self._generators, self._before)
        if self._turns is None or self._turns != _turns.quiet():
            self.drew = 0  # others drew meanwhile, nothing can be said
        if self.drew and kind is None:
            raise RuntimeError(
                f"{self._where} draws random numbers, but did not for the first micro-batch of any "
                "call so far: what it drew in the forward cannot be drawn again. It is known from "
                "the next call on; to have it known from the start, let it draw for every "
                "micro-batch"
            )


_QUIET: frozenset[type] = frozenset(
    {
        nn.Linear, nn.Bilinear, nn.Identity, nn.Flatten, nn.Unflatten, nn.Embedding,
        nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm,
        nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
        nn.LocalResponseNorm, nn.RMSNorm, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU,
        nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh,
        nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Softmax, nn.LogSoftmax,
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
        nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
        nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Upsample, nn.PixelShuffle,
        nn.PixelUnshuffle, nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d,
        nn.ReplicationPad2d, nn.Sequential,
    }
)  # fmt: skip


def never_draws(module: nn.Module) -> bool:
    """Whether a layer is made of PyTorch's own modules that never draw, without any hook."""
    return (
        type(module) in _QUIET
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in module.__dict__
        and all(never_draws(child) for child in module.children())
    )
