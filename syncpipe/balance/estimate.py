"""What layers would cost on a device that is not here, from its data sheet.

Each operator takes as long as its arithmetic or as its memory traffic, whichever is longer (the
roofline model: Williams, Waterman and Patterson, 2009)::

    seconds = max(FLOP / (peak * efficiency), bytes / bandwidth, launch)

FLOP are those of ``torch.utils.flop_counter``; bytes are those of its inputs and its outputs, each
read or written once. An operator that makes a view takes no time.
"""

from __future__ import annotations

import math
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

__all__ = ["DEVICES", "AsOnGPU", "DeviceSpec", "Roofline", "device_spec"]

_aten: Any = torch.ops.aten
_cuda: Any = torch.backends.cuda
#: Operators that neither compute nor move anything, though they do not say so.
_FREE = {
    _aten._unsafe_view,
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.lift_fresh,
    _aten.new_empty,
    _aten.new_empty_strided,
}
_CONVOLUTIONS = {_aten.convolution, _aten._convolution, _aten.convolution_backward}
_HALF = (torch.float16, torch.bfloat16)
#: The largest head of FlashAttention; its rows, and those of a mask, are padded to a multiple.
_FLASH_HEAD, _ROW, _MASK_ROW = 256, 8, 16


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
        """Return FLOP per second of products of a type, under PyTorch's settings for TF32."""
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

    def plain(name: str) -> str:
        return "".join(filter(str.isalnum, name.lower()))

    found = next((spec for name, spec in DEVICES.items() if plain(name) == plain(on)), None)
    if found is None:
        raise ValueError(
            f"on={on!r} is unknown; there are {', '.join(DEVICES)}. For another one give its "
            "figures: on=syncpipe.balance.DeviceSpec(name, half=..., single=..., bandwidth=...)"
        )
    return found


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what all operators would take on a device.

    Args:
        device: its figures.
        efficiency: the part of its peak that matrix products reach.

    Attributes:
        seconds: so far.
        flops: so far, of forward and backward.
    """

    def __init__(self, device: DeviceSpec, efficiency: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._efficiency = device, efficiency
        self.seconds = 0.0
        self.flops = 0.0

    def now(self) -> float:
        """The time, for a stopwatch."""
        return self.seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet not in _FREE and not _is_view(func):
            self._add(packet, args, kwargs, result)
        return result

    def _add(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        moved = sum(map(_bytes, given)) + sum(map(_bytes, made))
        seconds = max(moved / self._device.bandwidth, self._device.launch)
        count = flop_registry.get(packet)
        if count is not None:
            flops = count(*args, **kwargs, out_val=result)
            dtype = next((x.dtype for x in given if x.is_floating_point()), torch.float32)
            peak = self._device.peak(dtype, convolution=packet in _CONVOLUTIONS)
            seconds = max(seconds, flops / (peak * self._efficiency))
            self.flops += flops
        self.seconds += seconds


def _is_view(func: Any) -> bool:
    """Whether an operator returns what it was given, looked at otherwise."""
    aliases = [found.alias_info for found in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _bytes(tensor: Tensor) -> int:
    """Bytes behind a tensor; what it repeats counts once."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride or not size else 1
    return numbers * tensor.element_size()


class AsOnGPU(TorchFunctionMode):
    """Lets ``meta`` store for backward what an accelerator would.

    On ``meta`` attention takes the way of plain matrix products, and stores ``T x T`` numbers for
    each head. A GPU has fused kernels, which store their output and a number for each row
    (FlashAttention, Dao et al. 2022). Likewise its dropout stores a byte for each number and not
    four, and its RMSNorm no intermediate results. So in this mode these functions call the fused
    operators themselves, of which ``meta`` knows the shapes::

        query, key, value -> output, logsumexp       stored: all five, nothing of T x T
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # it is Python, and this mode is off inside of functions
                return _undispatched(func)(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _undispatched(function: Any) -> Any:
    """A function of ``torch.nn.functional`` whose body runs under a mode, as if there was none."""
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
    heads = [tensor.shape[-1] for tensor in (query, key, value)]
    fused = query.is_meta and query.dim() == key.dim() == value.dim() == 4 and query.numel()
    if (
        fused
        and attn_mask is None
        and query.dtype in _HALF
        and heads[0] == heads[2] <= _FLASH_HEAD
        and _cuda.flash_sdp_enabled()
    ):
        rest = -heads[0] % _ROW
        padded = [F.pad(tensor, (0, rest)) if rest else tensor for tensor in (query, key, value)]
        scale = heads[0] ** -0.5 if scale is None else scale
        found = _aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale
        )
        return found[0][..., : heads[0]]
    if (
        fused
        and query.shape[1] == key.shape[1]
        and query.dtype in (*_HALF, torch.float32)
        and not any(head % (4 if query.dtype == torch.float32 else _ROW) for head in heads)
        and _cuda.mem_efficient_sdp_enabled()
    ):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        stores = any(tensor.requires_grad for tensor in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, stores, dropout_p, is_causal, scale=scale
        )[0]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the fused kernel wants it: numbers, rows padded, one for each head."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    rest = -mask.shape[-1] % _MASK_ROW
    if rest:
        mask = F.pad(mask, (0, rest))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if input.is_meta and training and not inplace and 0 < p < 1:
        return torch.native_dropout(input, p, training)[0]
    return F.dropout(input, p, training, inplace)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if input.is_meta:  # reads, writes and stores as much, and another number for each row
        return F.layer_norm(input, normalized_shape, weight)
    return F.rms_norm(input, normalized_shape, weight, eps)
