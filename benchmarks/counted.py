"""Bytes of tensors on the host that are alive.

A dispatch mode sees every result of every operation, and counts each storage once until it dies.
Not counted: what a kernel takes and gives back inside of one operation, workspaces, and memory that
an allocator holds without using it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from syncpipe.balance.stored import LiveMemory

__all__ = ["HostBytes"]


class HostBytes(LiveMemory):
    """Counts the bytes that operations make on the host: ``alive``, and ``most``, may be set."""

    def watch(self, tensors: Iterable[Tensor]) -> None:
        super().watch(tensor for tensor in tensors if tensor.device.type == "cpu")
