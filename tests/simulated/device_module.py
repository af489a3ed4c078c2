"""What PyTorch expects of ``torch.sim``, the module of the simulated devices."""

from __future__ import annotations

import torch
from torch import Tensor

_Device = torch.device | str | int | None

default_generators: tuple[torch.Generator, ...] = tuple(
    torch.ops.sim.generator(k) for k in range(4)
)


def _index(device: _Device) -> int:
    if device is None or device == "sim":
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


class device:
    """A context in which another device is the current one."""

    def __init__(self, device: _Device) -> None:
        self._index = -1 if device is None else _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        if self._index >= 0:
            set_device(self._index)

    def __exit__(self, *exc_info: object) -> None:
        set_device(self._before)


def is_available() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """Without it PyTorch 2.11 never takes the devices for initialized, and waits for nothing."""


def device_count() -> int:
    return len(default_generators)


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state(device: _Device = None) -> Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: Tensor, device: _Device = None) -> None:
    default_generators[_index(device)].set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    free = int(torch.ops.sim.free_memory(_index(device)))
    return free, free + torch.accelerator.memory_reserved(_index(device))
