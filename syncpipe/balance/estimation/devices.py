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
            (convolutions by default); 0: ``float32`` is computed as such.
        double: FLOP per second in ``float64``; 0 if unknown, and nothing in it is estimated.
        source: where the figures are from.
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
    double: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for what in ("half", "single", "bandwidth", "memory"):
            if not getattr(self, what) > 0:
                raise ValueError(f"{what}={getattr(self, what)!r} of {self.name}: must be above 0")
        for what in ("tf32", "launch", "double"):
            if not getattr(self, what) >= 0:
                raise ValueError(f"{what}={getattr(self, what)!r} of {self.name}: at least 0")

    def peak(self, dtype: torch.dtype, *, convolution: bool = False) -> float:
        """FLOP per second of matrix products of a type, under PyTorch's settings for TF32."""
        if dtype in (torch.float64, torch.complex128):
            if not self.double:
                raise ValueError(
                    f"how fast {self.name} computes in {dtype} is unknown: give its figures, "
                    "on=DeviceSpec(..., double=...), or a model in another type"
                )
            return self.double
        if dtype != torch.float32:
            return self.half
        if convolution:
            fast = torch.backends.cudnn.allow_tf32
        else:
            fast = torch.get_float32_matmul_precision() != "highest"
        return max(self.tf32, self.single) if fast else self.single


def _spec(
    name: str, half: float, single: float, bandwidth: float, memory: float, source: str
) -> DeviceSpec:
    """From TFLOP/s, GB/s and GB, as data sheets have them."""
    return DeviceSpec(
        name, half * 1e12, single * 1e12, bandwidth * 1e9, memory * 1e9, source=source
    )


#: By name: matrix products in 16 bits and in float32, memory bandwidth and memory. All are NVIDIA's
#: SXM modules, but the RTX 4090; where a sheet has only figures with sparsity, which are twice
#: those without, it is half of them. No estimate was compared with a measurement on any of them.
DEVICES = {
    spec.name: spec
    for spec in (
        #           16 bit   float32  GB/s  GB
        _spec("V100-16GB", 125.0, 15.7, 900, 16, "NVIDIA V100 data sheet, January 2020"),
        _spec("A100-40GB", 312.0, 19.5, 1555, 40, "NVIDIA A100 data sheet, June 2021"),
        _spec("A100-80GB", 312.0, 19.5, 2039, 80, "NVIDIA A100 data sheet, June 2021"),
        _spec("H100", 989.4, 66.9, 3350, 80, "NVIDIA H100 architecture white paper, 2023"),
        _spec("H200", 989.4, 66.9, 4800, 141, "NVIDIA H200 data sheet, 2024"),
        _spec("RTX4090", 165.2, 82.6, 1008, 24, "NVIDIA Ada architecture white paper, 2023"),
    )
}


def device_spec(on: str | DeviceSpec) -> DeviceSpec:
    """The figures of a device, by name; case, spaces and dashes do not matter.

    Raises:
        TypeError, ValueError: it is unknown.
    """
    if isinstance(on, DeviceSpec):
        return on
    if not isinstance(on, str):
        raise TypeError(f"on={on!r}: give the name of a device, such as 'H100', or a DeviceSpec")
    known = {_plain(name): spec for name, spec in DEVICES.items()}
    found = known.get(_plain(on))
    if found is None:
        raise ValueError(
            f"on={on!r} is unknown; there are {', '.join(DEVICES)}. For another one give its "
            "figures: on=syncpipe.balance.DeviceSpec(name, half=..., single=..., bandwidth=...)"
        )
    return found


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
