"""Count what layers store for backward: each piece of memory once, however many tensors use it.

Layers share memory: a ReLU stores its output, and the next linear layer stores the same memory as
its input. So a stage of the layers ``i`` to ``j - 1`` stores

    sum of (stored_bytes - shared_bytes) of its layers + shared_bytes of layer i

For this to hold wherever one cuts, memory that one layer stores and that passes other layers (as a
view or unchanged) to another one that stores it, counts as stored and shared in between:

                  ReLU    Flatten   Linear         The output of the ReLU, x bytes, is stored by the
        stored      x        x         x           ReLU and by the linear layer. If cut before or
        shared      0        x         x           after Flatten, both sides store it; else once.

The result is too large only for a stage between two such layers that stores none of it itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from syncpipe.data.trees import distinct
from syncpipe.runtime.weight_gradients import UNPACK

__all__ = ["LiveMemory", "StoredMemory", "record_saved", "size_of"]

_T = TypeVar("_T")


def _storages_of(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int, Any]]:
    """For each piece of memory a key, unique while it is alive, its bytes, and its owner."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            yield from _storages_of(part for part in parts if isinstance(part, Tensor))
            continue
        try:
            storage = tensor.untyped_storage()
            yield storage._cdata, storage.nbytes(), storage
        except (NotImplementedError, RuntimeError):  # a layout without storage, for example sparse
            yield id(tensor), tensor.numel() * tensor.element_size(), tensor


def size_of(tree: Any) -> int:
    """Bytes to send a tree to another device; a tensor that is in it twice is sent once."""
    size = 0
    for tensor in distinct(tree):
        if is_traceable_wrapper_subclass(tensor):
            size += sum(part for _, part, _ in _storages_of([tensor]))
        else:
            size += tensor.numel() * tensor.element_size()
    return size


def record_saved(call: Callable[[], _T]) -> tuple[_T, Callable[[], list[Tensor]]]:
    """Call a function; returns its result, and a function that lists what autograd stores of it.

    Tensors of freed graphs are not listed. PyTorch's ``saved_tensors_hooks`` does the same, but
    Ctrl-C in its ``__exit__`` would leave the hooks active.
    """
    seen: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        held = tensor.detach()  # else an output would keep its own graph alive
        seen.append(weakref.ref(held))
        return lambda: held

    hooks: Any = torch._C._autograd
    hooks._push_saved_tensors_default_hooks(pack, UNPACK)
    try:
        result = call()
    finally:
        hooks._pop_saved_tensors_default_hooks()
    return result, lambda: [tensor for held in seen if (tensor := held()) is not None]


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the results of all operators in its context while these are alive.

    Memory that an operator uses internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.most = 0  # now, and at most so far
        self._known: dict[int, tuple[Any, int]] = {}
        self._aside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count the memory of tensors as well."""
        for key, size, thing in _storages_of(tensors):
            if key not in self._known and key not in self._aside:
                self._known[key] = weakref.ref(thing, partial(self._forget, key)), size
                self.alive += size
                self.most = max(self.most, self.alive)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the memory of some tensors, in hindsight too."""
        for key, _, _ in _storages_of(tensors):
            self._aside.add(key)
            size = self._known.pop(key, (None, 0))[1]
            self.alive -= size
            self.most -= size

    def restart_with(self, tensors: Iterable[Tensor]) -> None:
        """Start again, with these tensors only."""
        self._known.clear()
        self.alive = self.most = 0
        self.watch(tensors)

    def _forget(self, key: int, gone: Any) -> None:
        known, size = self._known.get(key, (None, 0))
        if known is gone:
            del self._known[key]
            self.alive -= size


@dataclass(eq=False)
class _StoragePiece:
    """A piece of memory that passes from layer to layer, and the layers that store it."""

    bytes: int
    layers: list[int] = field(default_factory=list)


class StoredMemory:
    """What each layer of a chain stores, for one size of the micro-batch.

    Attributes:
        last: bytes that the last layer stores.
    """

    def __init__(self) -> None:
        self.last = self._layers = 0
        self._live: dict[int, _StoragePiece] = {}
        self._stored: list[_StoragePiece] = []

    def add(
        self,
        inputs: list[Tensor],
        copies: list[Tensor],
        saved: list[Tensor],
        passed_on: list[Tensor],
        own: Iterable[Tensor],
    ) -> int:
        """Count what the next layer stores; returns bytes of inputs that only earlier ones store.

        Args:
            inputs, copies: its intended inputs, and the copies that it got.
            saved: what autograd stores for it.
            passed_on: the input of the next layer, and pending skips.
            own: its parameters and buffers, whose memory does not count.
        """
        known = dict(self._live)
        pairs = zip(_storages_of(inputs), _storages_of(copies), strict=True)
        for (key, size, _), (copied, _, _) in pairs:
            known[copied] = known.setdefault(key, _StoragePiece(size))
        aside = {key for key, _, _ in _storages_of(own)}

        def memories(tensors: list[Tensor]) -> dict[int, _StoragePiece]:
            pieces = [(key, size) for key, size, _ in _storages_of(tensors) if key not in aside]
            return {key: known.setdefault(key, _StoragePiece(size)) for key, size in pieces}

        held = set(memories(saved).values())
        unused = sum(piece.bytes for piece in {*memories(inputs).values()} - held if piece.layers)
        self._stored += [piece for piece in held if not piece.layers]
        self.last = sum(piece.bytes for piece in held)
        for piece in held:
            piece.layers.append(self._layers)
        self._live = memories(passed_on)
        self._layers += 1
        return unused

    def by_layer(self) -> list[tuple[int, int]]:
        """For each layer the bytes that it stores, and the part that earlier layers store too."""
        stored, shared = [0] * self._layers, [0] * self._layers
        for piece in self._stored:
            first, last = piece.layers[0], piece.layers[-1]
            for layer in range(first, last + 1):
                stored[layer] += piece.bytes
                shared[layer] += piece.bytes * (layer > first)
        return list(zip(stored, shared, strict=True))
