"""Copies of tensors on other devices, and what tells whether they still are copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncpipe.runtime.module_state import version_of
from syncpipe.runtime.streams import Lane

__all__ = ["Copy"]


@dataclass(frozen=True)
class Copy:
    """A copy of a tensor, and what tells whether it is still one.

    Attributes:
        tensor: the original.
        mark: its memory and its version, when the copy was made.
        copy: on another device.
        event: tells when it is there.
        version: its own, then.
        kept: whether it may serve another call. A gradient is a reason to change the original, and
            what is written into ``tensor.data`` then leaves no trace.
    """

    tensor: Tensor
    mark: tuple[Any, ...]
    copy: Tensor
    event: Any
    version: int
    kept: bool

    @classmethod
    def made(cls, tensor: Tensor, source: Lane, target: Lane, *, kept: bool) -> Copy:
        """A new one, for calls to come, too."""
        with torch.inference_mode(False), torch.no_grad():
            (copy,), event = source.send([tensor.detach()], target)
        return cls(tensor, _mark(tensor), copy, event, version_of(copy), kept)

    def serves(self, tensor: Tensor) -> bool:
        """Whether it is one of that tensor as it is now."""
        return self.kept and self.tensor is tensor and self.mark == _mark(tensor)


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), version_of(tensor), tensor.shape, tensor.dtype
