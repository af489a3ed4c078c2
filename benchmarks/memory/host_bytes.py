"""Bytes of tensors on the host, counted as they are made and let go."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["HostBytes"]


class HostBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make on the host, each until it dies.

    Attributes:
        alive: bytes that are alive.
        most: the largest number of these so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.most = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self.count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
        """Counts the memory of a tensor, once."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_: Any) -> None:
            del self._known[key]
            self.alive -= size

        self._known[key] = weakref.ref(storage, forget)
        self.alive += size
        self.most = max(self.most, self.alive)
