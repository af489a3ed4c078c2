"""Estimate what layers cost on a device that is not available, from its data sheet.

Each operator takes as long as its arithmetic or its memory traffic, whichever is longer (the
roofline model: Williams, Waterman and Patterson, 2009)::

    seconds = max(FLOP / (peak * efficiency), bytes / bandwidth, launch)

FLOP are counted by ``torch.utils.flop_counter``; bytes are those of inputs and outputs, each read
or written once. An operator that returns a view takes no time.
"""

from __future__ import annotations

import math
import operator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["DEVICES", "AsOnGPU", "DeviceSpec", "Roofline"]

_aten: Any = torch.ops.aten
_cuda: Any = torch.backends.cuda
#: Operators that do nothing on the device, though their schemas do not show it.
_FREE = {_aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.lift_fresh,
         _aten.new_empty, _aten.new_empty_strided}  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)
#: FlashAttention's largest head; fused kernels need head sizes in multiples of ``_ROW``.
_FLASH_HEAD, _ROW = 256, 8


@dataclass(frozen=True)
class DeviceSpec:
    """Peak figures of a device, for dense matrices, without sparsity.

    Attributes:
        name: of the device.
        half: FLOP per second in ``float16`` and ``bfloat16``, accumulated in ``float32``.
        single: FLOP per second in ``float32``, or in TF32 if you compute in it.
        bandwidth: bytes per second to and from its memory.
        memory: bytes.
        launch: minimum seconds of an operation, some microseconds on any of these devices.
        double: FLOP per second in ``float64``; 0 if unknown: estimates in it are refused.
        source: of the figures.
    """

    name: str
    half: float
    single: float
    bandwidth: float
    memory: float = math.inf
    launch: float = 5e-6
    double: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for what in ("half", "single", "bandwidth", "memory", "launch", "double"):
            value, may_be_0 = getattr(self, what), what in ("launch", "double")
            if not (value > 0 or (may_be_0 and value == 0)):
                raise ValueError(f"{what}={value!r} of {self.name} must be positive")

    def peak(self, dtype: torch.dtype) -> float:
        """Return the peak of matrix products in a type, in FLOP per second."""
        if dtype not in (torch.float64, torch.complex128):
            return self.single if dtype == torch.float32 else self.half
        if not self.double:
            raise ValueError(
                f"the speed of {self.name} in {dtype} is unknown: give its figures, "
                "on=DeviceSpec(..., double=...), or a model in another type"
            )
        return self.double


#: By name. All are NVIDIA SXM modules except the RTX 4090. Where a data sheet has figures with
#: sparsity only, these are halved. No estimate was compared with a measurement on these devices.
DEVICES: dict[str, DeviceSpec] = {
    name: DeviceSpec(name, half * 1e12, single * 1e12, speed * 1e9, size * 1e9, source=source)
    for name, half, single, speed, size, source in (
        ("V100-16GB", 125.0, 15.7, 900, 16, "NVIDIA V100 data sheet, January 2020"),
        ("A100-40GB", 312.0, 19.5, 1555, 40, "NVIDIA A100 data sheet, June 2021"),
        ("A100-80GB", 312.0, 19.5, 2039, 80, "NVIDIA A100 data sheet, June 2021"),
        ("H100", 989.4, 66.9, 3350, 80, "NVIDIA H100 architecture white paper, 2023"),
        ("H200", 989.4, 66.9, 4800, 141, "NVIDIA H200 data sheet, 2024"),
        ("RTX4090", 165.2, 82.6, 1008, 24, "NVIDIA Ada architecture white paper, 2023"),
    )  # TFLOP/s of matrix products in 16 bits and in float32, GB/s and GB of memory
}


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the estimated seconds of all operators on a device, forward and backward.

    Unless ``exact``, operators without an estimate are left out.
    """

    def __init__(self, device: DeviceSpec, efficiency: float, *, exact: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._efficiency, self._exact = device, efficiency, exact
        self.seconds = 0.0
        self.watch = (lambda: self.seconds), operator.sub

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with nullcontext() if self._exact else suppress(Exception):
            self.seconds += self._seconds(func, args, kwargs or {}, result)
        return result

    def _seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        packet = func._overloadpacket
        aliases = [found.alias_info for found in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if view or packet in _FREE:
            return 0.0
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        moved = sum(map(_bytes, given + made))
        seconds = max(moved / self._device.bandwidth, self._device.launch)
        if (count := flop_registry.get(packet)) is not None:
            flops = count(*args, **kwargs, out_val=result)
            dtype = next((x.dtype for x in given if x.is_floating_point()), torch.float32)
            seconds = max(seconds, flops / (self._device.peak(dtype) * self._efficiency))
        return seconds


def _bytes(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor; expanded dimensions count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(n for n, stride in sizes if stride or not n) * tensor.element_size()


class AsOnGPU(TorchFunctionMode):
    """Lets ``meta`` store for backward what a GPU would.

    On ``meta`` attention decomposes into matrix products and stores ``T x T`` numbers per head,
    while GPUs have fused kernels that store their output and a number per row (FlashAttention, Dao
    et al. 2022). Dropout on a GPU stores one byte per number instead of four, RMSNorm no
    intermediate results. So this mode calls the fused operators, whose shapes ``meta`` knows.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:  # its Python body runs with the mode off
                return _undispatched(func)(*args, **kwargs)
        return _FUSED.get(func, func)(*args, **kwargs)


def _undispatched(function: Any) -> Any:
    """A function of ``torch.nn.functional`` that runs its body even under a mode."""
    names = {name: lambda *_: False for name in vars(F) if name.startswith("has_torch_function")}
    code, defaults = function.__code__, function.__defaults__
    made = FunctionType(code, {**function.__globals__, **names}, function.__name__, defaults)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    head, *others = (tensor.shape[-1] for tensor in (query, key, value))
    single = query.dtype == torch.float32
    more: dict[str, Any] = {"scale": scale}
    fused = query.is_meta and query.dim() == key.dim() == value.dim() == 4 and query.numel()
    flash = query.dtype in _HALF and head == others[1] <= _FLASH_HEAD and attn_mask is None
    if fused and flash and _cuda.flash_sdp_enabled():
        padded = [query, key, value]
        if head % _ROW:
            padded = [F.pad(tensor, (0, -head % _ROW)) for tensor in padded]
        more["scale"] = head**-0.5 if scale is None else scale
        found = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, **more)
        return found[0][..., :head]
    fits = not any(n % (4 if single else _ROW) for n in (head, *others))
    alike = query.shape[1] == key.shape[1] and (single or query.dtype in _HALF)
    if fused and fits and alike and _cuda.mem_efficient_sdp_enabled():
        if attn_mask is not None:  # as numbers, for each head
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        stores = any(tensor.requires_grad for tensor in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, stores, dropout_p, is_causal, **more
        )[0]
    more["enable_gqa"] = enable_gqa
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, **more
    )


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if input.is_meta and training and not inplace and 0 < p < 1:
        return torch.native_dropout(input, p, training)[0]
    return F.dropout(input, p, training, inplace)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if input.is_meta:  # the same traffic, and one stored number more per row
        return F.layer_norm(input, normalized_shape, weight)
    return F.rms_norm(input, normalized_shape, weight, eps)


_FUSED: dict[Any, Any] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
