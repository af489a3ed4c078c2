"""How long operators take at least on a device, from what they compute and what they move.

Each operator takes as long as its arithmetic or as its memory traffic, whichever is longer (the
roofline model: Williams, Waterman and Patterson, 2009)::

    seconds = max(FLOP / (peak * efficiency), bytes / bandwidth, launch)

FLOP are those of ``torch.utils.flop_counter``; bytes are those of its inputs and its outputs, each
read or written once. An operator that makes a view takes no time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from syncpipe.balance.estimation.devices import DeviceSpec

__all__ = ["Roofline"]

_aten: Any = torch.ops.aten
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
