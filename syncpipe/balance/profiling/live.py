"""Counts the bytes of tensors that are alive while a layer runs: the most at any time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Live"]


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every result of every operator in its context, and when its memory is let go of.

    What an operator takes and gives back inside of itself is not seen.

    Attributes:
        alive: bytes of what it knows of.
        most: the largest ``alive`` so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.most = 0
        self._known: dict[int, tuple[Any, int]] = {}
        self._aside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Counts the memory of tensors, each piece until it is let go of."""
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known and key not in self._aside:
                    self._known[key] = weakref.ref(storage, self._forget(key)), size
                    self.alive += size
                    self.most = max(self.most, self.alive)
            except (NotImplementedError, RuntimeError):  # a layout without storages
                continue

    def leave_aside(self, keys: Iterable[int]) -> None:
        """Does not count some pieces of memory, by their keys; nor has it until now."""
        for key in keys:
            self._aside.add(key)
            if key in self._known:
                size = self._known.pop(key)[1]
                self.alive -= size
                self.most -= size

    def only(self, tensors: Iterable[Tensor]) -> None:
        """Begins anew with these alone."""
        self._known.clear()
        self.alive = self.most = 0
        self.watch(tensors)

    def _forget(self, key: int) -> Callable[[Any], None]:
        def forget(gone: Any) -> None:
            known = self._known.get(key)
            if known is not None and known[0] is gone:
                del self._known[key]
                self.alive -= known[1]

        return forget
