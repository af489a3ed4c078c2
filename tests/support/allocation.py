"""Bytes of tensors on the host, counted as they are made and let go."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from syncpipe.tree import tensors_in


class HostBytes(TorchDispatchMode):
    """While entered: the most bytes of tensors on the CPU that were alive at once.

    Attributes:
        now: bytes alive.
        most: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in([result]):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)
