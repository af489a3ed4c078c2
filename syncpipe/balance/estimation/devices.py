"""What well-known accelerators can do at most, by their data sheets: :data:`DEVICES`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["DEVICES", "DeviceSpec", "device_spec"]


@dataclass(frozen=True)
class DeviceSpec:
    """What a device can do at most. Figures are for dense matrices, without sparsity.

    Attributes:
        name: of the device.
        half: FLOP per second in ``float16`` and ``bfloat16``, summed up in ``float32``.
        single: FLOP per second in ``float32``.
        bandwidth: bytes per second to and from its memory.
        memory: bytes.
        tf32: FLOP per second in TF32, which PyTorch takes for ``float32`` where it is allowed
            (convolutions by default); 0: the device does not have it.
        launch: seconds that an operation takes at least. A kernel of nothing takes some
            microseconds from one to the next, on any of these devices.
    """

    name: str
    half: float
    single: float
    bandwidth: float
    memory: float = math.inf
    tf32: float = 0.0
    launch: float = 5e-6

    def __post_init__(self) -> None:
        for what in ("half", "single", "bandwidth", "memory"):
            if not getattr(self, what) > 0:
                raise ValueError(f"{what}={getattr(self, what)!r} of {self.name}: must be above 0")
        for what in ("tf32", "launch"):
            if not getattr(self, what) >= 0:
                raise ValueError(f"{what}={getattr(self, what)!r} of {self.name}: at least 0")

    def peak(self, dtype: torch.dtype, *, convolution: bool = False) -> float:
        """FLOP per second of matrix products of a type, under PyTorch's settings for TF32."""
        if dtype == torch.float64:
            return self.single / 2
        if dtype != torch.float32:
            return self.half
        if convolution:
            fast = torch.backends.cudnn.allow_tf32
        else:
            fast = torch.get_float32_matmul_precision() != "highest"
        return max(self.tf32, self.single) if fast else self.single


def _spec(
    name: str, half: float, tf32: float, single: float, bandwidth: float, memory: float
) -> DeviceSpec:
    """From TFLOP/s, GB/s and GB, as data sheets have them."""
    return DeviceSpec(
        name,
        half=half * 1e12,
        single=single * 1e12,
        bandwidth=bandwidth * 1e9,
        memory=memory * 1e9,
        tf32=tf32 * 1e12,
    )


#: By name. From the data sheets and architecture papers of NVIDIA, and from AMD's sheet of the
#: MI300X; A100, H100, H200 and B200 are the SXM modules. Where a sheet has only figures with
#: sparsity, which are twice those without, it is half of them.
DEVICES = {
    spec.name: spec
    for spec in (
        #            16 bit    TF32  float32   GB/s    GB
        _spec("V100-16GB", 125.0, 0.0, 15.7, 900, 16),
        _spec("V100-32GB", 125.0, 0.0, 15.7, 900, 32),
        _spec("T4", 65.0, 0.0, 8.1, 320, 16),
        _spec("A10", 125.0, 62.5, 31.2, 600, 24),
        _spec("A100-40GB", 312.0, 156.0, 19.5, 1555, 40),
        _spec("A100-80GB", 312.0, 156.0, 19.5, 2039, 80),
        _spec("A6000", 154.8, 77.4, 38.7, 768, 48),
        _spec("L4", 121.0, 60.0, 30.3, 300, 24),
        _spec("L40S", 362.0, 183.0, 91.6, 864, 48),
        _spec("H100", 989.4, 494.7, 66.9, 3350, 80),
        _spec("H100-PCIe", 756.0, 378.0, 51.0, 2000, 80),
        _spec("H200", 989.4, 494.7, 66.9, 4800, 141),
        _spec("B200", 2250.0, 1125.0, 75.0, 7700, 180),
        _spec("RTX3090", 71.0, 35.6, 35.6, 936, 24),
        _spec("RTX4090", 165.2, 82.6, 82.6, 1008, 24),
        _spec("MI300X", 1307.4, 653.7, 163.4, 5300, 192),
    )
}


def device_spec(on: str | DeviceSpec) -> DeviceSpec:
    """The figures of a device, by name; case, spaces and dashes do not matter.

    Raises:
        TypeError, ValueError: nobody knows it.
    """
    if isinstance(on, DeviceSpec):
        return on
    if not isinstance(on, str):
        raise TypeError(f"on={on!r}: give the name of a device, such as 'H100', or a DeviceSpec")
    known = {_plain(name): spec for name, spec in DEVICES.items()}
    found = known.get(_plain(on))
    if found is None:
        raise ValueError(
            f"on={on!r} is not known; there are {', '.join(DEVICES)}. For another one give its "
            "figures: on=syncpipe.balance.DeviceSpec(name, half=..., single=..., bandwidth=...)"
        )
    return found


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
