"""The generators from which layers draw, and the locks by which threads take turns at them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from syncpipe.runtime.locks import forkable

__all__ = ["CPU", "LOCKS", "Generators", "NoDispatch", "NoFunctions", "is_random"]

_Key = tuple[str, int]
_RLock = Any  # threading.RLock is a function
CPU: _Key = ("cpu", 0)

# Entered together they shield our own bookkeeping from the modes that are meant for the layers.
# Both are PyTorch's own and used by ``with`` itself: Ctrl-C cannot come in between.
NoDispatch: Any = torch._C._DisableTorchDispatch
NoFunctions: Any = torch._C.DisableTorchFunction


class _Locks:
    """One lock for each generator of the process, and one for reading and setting any state.

    A generator has a mutex of its own, and ``get_state`` makes its result while it holds it. If
    the garbage collector comes then and lets go of tensors, it lets go of the GIL, too; another
    thread that calls a method of the generator would hold the GIL and wait for the mutex for ever
    (seen with torch 2.13). Whoever has ``states`` makes such a call, all others wait without the
    GIL. Layers that draw do not hold the GIL meanwhile.
    """

    def __init__(self) -> None:
        self.states: _RLock = forkable()
        self._guard = forkable()
        self._made: dict[_Key, _RLock] = {}

    def __getitem__(self, key: _Key) -> _RLock:
        with self._guard:
            return self._made.setdefault(key, forkable())


LOCKS = _Locks()


class Generators:
    """The generators from which the layers on one device can draw: the CPU's and the device's.

    Args:
        device: where the layers are.
    """

    def __init__(self, device: torch.device) -> None:
        self.keys: list[_Key] = [CPU]
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


@cache
def is_random(func: Any) -> bool:
    """Whether an operation may draw."""
    return torch.Tag.nondeterministic_seeded in func.tags


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
