"""Counts what layers keep for backward: every piece of memory once, however many see it.

Layers share memory. What a ReLU returned it keeps, and the linear layer after it keeps the same as
its input. So ``stored_bytes`` of layers cannot be added up; what a stage of the layers ``i`` to
``j - 1`` stores is

    sum of (stored_bytes - shared_bytes) of its layers + shared_bytes of layer i

To make that right wherever one cuts, memory that some layer has stored and that goes through others
(as a view, or as it is) to one that stores it again counts as stored and shared for those between,
too:

                  ReLU    Flatten   Linear         What the ReLU returned, x bytes, is kept by it
        stored      x        x         x           and by the linear layer. Cut before Flatten, or
        shared      0        x         x           behind it: both sides keep it. Not cut: x once.

The same for a skip that is stored before it is stashed and after it is popped. So only a stage that
lies all between two such layers, and stores nothing of it itself, is said to store too much.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from syncpipe.data import distinct, tensors_in

__all__ = ["Keeping", "Live", "Saved", "blocks", "size_of"]

_T = TypeVar("_T")


def blocks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """The pieces of memory behind a tensor: what tells each from others that live, and its bytes.

    Mostly it is one, the tensor's storage.
    """
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout is torch.sparse_coo:
        inner = [tensor._indices(), tensor._values()]
    else:
        try:
            storage = tensor.untyped_storage()
            yield int(storage._cdata), int(storage.nbytes())
        except (NotImplementedError, RuntimeError):  # a layout without storages
            yield id(tensor), tensor.numel() * tensor.element_size()
        return
    for part in inner:
        if isinstance(part, Tensor):
            yield from blocks(part)


def size_of(tree: Any) -> int:
    """Bytes that go to another device with a tree; a tensor that is in it twice goes once."""

    def size(tensor: Tensor) -> int:
        if tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor):
            return tensor.numel() * tensor.element_size()
        return sum(size for _, size in blocks(tensor))

    return sum(map(size, distinct(tree)))


class _Held:
    """What autograd holds instead of a tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Saved:
    """Sees what autograd stores for backward.

    ``torch.autograd.graph.saved_tensors_hooks`` does the same, but Ctrl-C may come in its
    ``__exit__``, and leave the hooks in force.
    """

    def __init__(self) -> None:
        self._seen: list[weakref.ref[_Held]] = []

    def during(self, call: Callable[[], _T]) -> _T:
        """Calls a function, and sees what is stored meanwhile."""
        hooks: Any = torch._C._autograd
        hooks._push_saved_tensors_default_hooks(self._pack, lambda held: held.tensor)
        try:
            return call()
        finally:
            hooks._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor.detach())  # else an output would keep its own graph, and itself
        self._seen.append(weakref.ref(held))
        return held

    def tensors(self) -> list[Tensor]:
        """What is stored now; what belonged to a graph that was dropped is not."""
        return [held.tensor for held in (seen() for seen in self._seen) if held is not None]


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the results of all operators in its context, until these are let go of.

    What an operator takes and gives back inside of itself is not seen.

    Attributes:
        alive: bytes now.
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
        """Counts the memory of tensors as well."""
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


@dataclass(eq=False, slots=True)
class _Memory:
    """A piece of memory that goes from layer to layer, in the chain or as a skip.

    Attributes:
        bytes: its size.
        stored: whether a layer so far stores it.
        passed: the layers through which it went since, which do not store it themselves.
    """

    bytes: int
    stored: bool = False
    passed: list[int] = field(default_factory=list)


class Keeping:
    """What each layer of a chain stores, for one size of the micro-batch.

    Attributes:
        stored: bytes, for each layer.
        shared: the part that layers before it store already, for each layer.
    """

    def __init__(self, layers: int) -> None:
        self.stored = [0] * layers
        self.shared = [0] * layers
        self._live: dict[int, _Memory] = {}

    def add(
        self,
        layer: int,
        inputs: list[Tensor],
        copies: list[Tensor],
        saved: list[Tensor],
        going_on: Any,
        own: set[int],
    ) -> int:
        """Counts what a layer stores, after the layers before it.

        Args:
            layer: its index.
            inputs: the tensors that it was meant to get.
            copies: those that it got instead.
            saved: what autograd stores for it.
            going_on: the value that goes to the next layer, and the skips on their way.
            own: the memory of its parameters and buffers, which is not counted.

        Returns:
            Bytes of its inputs that layers before it store, and it does not.
        """
        known = dict(self._live)
        for original, given in zip(inputs, copies, strict=True):
            for (key, size), (given_key, _) in zip(blocks(original), blocks(given), strict=True):
                known[given_key] = known.setdefault(key, _Memory(size))

        def memories(tensors: list[Tensor]) -> dict[int, _Memory]:
            pairs = [pair for tensor in tensors for pair in blocks(tensor) if pair[0] not in own]
            return {key: known.setdefault(key, _Memory(size)) for key, size in pairs}

        held = set(memories(saved).values())
        passing = set(memories(inputs).values()) - held
        unused = sum(memory.bytes for memory in passing if memory.stored)
        for memory in held:
            self.stored[layer] += memory.bytes
            if memory.stored:
                self.shared[layer] += memory.bytes
                for between in memory.passed:
                    self.stored[between] += memory.bytes
                    self.shared[between] += memory.bytes
            memory.stored = True
            memory.passed.clear()

        self._live = memories(tensors_in(going_on))
        for memory in set(self._live.values()) - held:
            if memory.stored:
                memory.passed.append(layer)
        return unused
