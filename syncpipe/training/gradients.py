"""``.grad`` before a call: to put it back if the call fails, or to scale what the call added."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from syncpipe.runtime.streams import moved

__all__ = ["Gradients"]


class Gradients:
    """The gradients that tensors had before a call added to them.

    Where there were none (``zero_grad`` as it is by default) this costs nothing. Where there were,
    it holds a copy: adding in place and taking away again would not give the same bits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[Tensor, tuple[Tensor | None, Tensor | None]] = {}

    def register(self, tensors: Iterable[Tensor]) -> None:
        """Adds leaves, before they get any gradient from this call."""
        with self._lock:
            for tensor in tensors:
                if tensor.requires_grad and tensor not in self._before:
                    grad = tensor.grad
                    self._before[tensor] = (grad, None if grad is None else grad.detach().clone())

    def before(self, tensor: Tensor) -> Tensor | None:
        """The gradient that a leaf had, as a copy."""
        return self._before.get(tensor, (None, None))[1]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, into the very tensors that were there."""
        for tensor, (grad, copy) in self._before.items():
            if grad is not None and copy is not None:
                grad.copy_(copy)
            tensor.grad = grad

    @torch.no_grad()
    def scale(self, factor: float | Tensor) -> None:
        """Multiplies what was added by this call.

        Args:
            factor: a number, or a tensor without dimensions on any device.
        """
        factors: dict[torch.device, float | Tensor] = {}
        for tensor, (_, copy) in self._before.items():
            grad = tensor.grad
            if grad is None:
                continue
            if grad.device not in factors:
                factors[grad.device] = (
                    moved(factor, grad.device) if isinstance(factor, Tensor) else factor
                )
            if copy is None:
                grad.mul_(factors[grad.device])
            else:
                grad.sub_(copy).mul_(factors[grad.device]).add_(copy)
