"""Activations that wait for backward in the memory of the host.

A stage on an accelerator that offloads runs its forwards under saved-tensor hooks. What autograd
would store is copied to the host, on a stream of its own, and comes back on another one, a few
tensors ahead of the node of the graph that asks for it:

    compute   | cell 0 |e cell 1 |   ...   | backward of 0 |w        e: event, w: waits for it
    out                |w copy |
    back                             |w copy  | copy |e

What goes is storages: views of one share one copy, and what comes back has the strides and the
alignment that it had, so kernels do what they would have done. Parameters and buffers, what is
small, and what is no plain tensor stay on the device.

The host runs ahead of the device. So memory must not be free when a copy is done, which the host
would learn late, but when the compute stream is past it: that stream takes and gives it, and waits
for copies to the host when more than a few are under way. Nodes of the graph own what was packed,
that owns its copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from syncpipe.data import described, storage_of
from syncpipe.runtime.recomputation import version_of
from syncpipe.runtime.streams import DeviceStreams

#: What is smaller (in bytes) stays: a copy takes longer to start than to run.
SMALL = 1 << 18
#: So many copies to the host may be under way, and so many back before they are asked for.
AHEAD = 4

_graph_stays = torch._C._autograd._get_current_graph_task_keep_graph  # as for retain_graph=True


class Offload:
    """The activations of one stage on the host, in one call.

    Args:
        streams: those of the stage.
        out, back: streams for copies to the host, and back.
        own: the parameters and buffers of the stage.
    """

    def __init__(self, streams: DeviceStreams, out: Any, back: Any, own: Iterable[Tensor]) -> None:
        self.device, self.backend = streams.device, streams.backend
        self.compute, self.out, self.back = streams.compute, out, back
        self._own = {storage_of(tensor) for tensor in own}
        self._leaving: deque[tuple[Any, Tensor]] = deque()  # to the host, and still here
        self._copies: dict[int, list[weakref.ref[_Copy]]] = {}  # for each micro-batch, in order
        self._following: dict[int, int] = {}
        self._known: dict[tuple[int, int], weakref.ref[_Copy]] = {}  # by storage and version

    def goes_back(self, order: Sequence[int]) -> None:
        """Says in which order micro-batches go back."""
        self._following = dict(pairwise(order))

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a micro-batch, whose activations go to the host."""

        def offloading(i: int, *args: Any) -> Any:
            disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
            if disabled is not None:  # by torch.func.grad, for one
                raise RuntimeError(
                    f"checkpoint='offload' cannot be used here ({disabled}): use 'never'"
                )
            copies = self._copies.setdefault(i, [])
            try:  # by hand, as in a re-materialized forward
                torch._C._autograd._push_saved_tensors_default_hooks(
                    lambda tensor: self._pack(tensor, i, copies), _unpack
                )
                return run(i, *args)
            finally:
                torch._C._autograd._pop_saved_tensors_default_hooks()

        return offloading

    def _pack(
        self, tensor: Tensor, i: int, copies: list[weakref.ref[_Copy]]
    ) -> Callable[[], Tensor]:
        """What gives the tensor back."""
        plain = (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device == self.device
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        )
        if (
            not plain
            or self.backend.current() != self.compute  # a layer has streams of its own
            or tensor.untyped_storage().nbytes() < SMALL
            or storage_of(tensor) in self._own
        ):
            # Not the tensor itself: stored by the node that made it, the two would never die.
            kept = tensor if tensor.grad_fn is None else tensor.detach()
            return partial(_checked, kept, version_of(tensor), kept)
        key = (storage_of(tensor), version_of(tensor))
        known = self._known.get(key)
        copy = None if known is None else known()
        if copy is None:
            copy = _Copy(self, tensor, i, len(copies))
            copies.append(weakref.ref(copy))
            self._known[key] = weakref.ref(copy)
        # Without memory, but it counts the versions of what it is an alias of.
        probe = tensor.detach()
        probe.data = tensor.new_empty(0)
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()

        def fetched() -> Tensor:
            _checked(probe, key[1], f"{probe.dtype}{list(layout[1])}")
            memory = copy.here()
            with torch.no_grad():
                return probe.new_empty(0).set_(memory.untyped_storage(), *layout)

        return fetched

    def leave(self, copied: Any, memory: Tensor) -> None:
        """Keeps memory until the compute stream has waited for its copy to be done."""
        self._leaving.append((copied, memory))
        self.let_go(AHEAD)

    def let_go(self, most: int = 0) -> None:
        """Waits for copies to the host, until so many are under way, and frees what they read."""
        while len(self._leaving) > most:
            copied, memory = self._leaving.popleft()
            self.backend.wait(self.compute, copied)
            del memory  # not before

    def coming(self, i: int, k: int) -> None:
        """Starts the copies that will be asked for next, before number ``k`` of a micro-batch."""
        left = AHEAD
        while True:
            copies = self._copies.get(i, [])
            for reference in reversed(copies[:k]):
                copy = reference()
                if copy is not None:
                    copy.fetch()
                    left -= 1
                    if not left:
                        return
            if i not in self._following:
                return
            i = self._following[i]
            k = len(self._copies.get(i, []))


class _Copy:
    """A storage, on the host."""

    def __init__(self, offload: Offload, tensor: Tensor, i: int, k: int) -> None:
        self._offload, self._i, self._k = offload, i, k
        self._memory: Tensor | None = None  # its bytes on the device, when they were asked for
        self._there: Any = None
        storage = tensor.untyped_storage()
        # Weakly; and no other storage has its address meanwhile.
        self._source = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        backend, out = offload.backend, offload.out
        memory = _bytes_of(storage, offload.device)
        self._host = _on_host(len(memory))
        backend.wait(out, backend.record(offload.compute))
        with backend.use(out):
            self._host.copy_(memory, non_blocking=True)
        offload.leave(backend.record(out), memory)

    def fetch(self) -> None:
        """Starts to bring it back, unless that was done."""
        if self._memory is not None:
            return
        offload = self._offload
        storage = torch.UntypedStorage._new_with_weak_ptr(self._source.cdata)
        if storage is not None:  # it was never gone
            self._memory = _bytes_of(storage, offload.device)
            return
        backend, back = offload.backend, offload.back
        memory = torch.empty_like(self._host, device=offload.device)
        # It has waited for the copy to the host, and for all who had this memory before.
        backend.wait(back, backend.record(offload.compute))
        with backend.use(back):
            memory.copy_(self._host, non_blocking=True)
        self._there = backend.record(back)
        self._memory = memory

    def here(self) -> Tensor:
        """Its bytes on the device, for the stream at hand; others are then on their way."""
        self.fetch()
        memory, there = self._memory, self._there
        assert memory is not None
        offload = self._offload
        if there is not None:
            offload.backend.wait(offload.compute, there)
            self._there = None
        offload.coming(self._i, self._k)
        if _graph_stays():
            self._memory = None
        return memory

    def __del__(self) -> None:
        if self._there is not None:  # nobody asked for it: its memory must not be used before
            self._offload.backend.wait(self._offload.compute, self._there)


def _unpack(packed: Callable[[], Tensor]) -> Tensor:
    return packed()


def _checked(probe: Tensor, version: int, tensor: Any) -> Any:
    """The tensor (or its name), which autograd leaves to whoever sets hooks to look after."""
    now = version_of(probe)
    if now != version:
        what = described(tensor) if isinstance(tensor, Tensor) else tensor
        raise RuntimeError(
            f"a tensor ({what}) that is needed for backward was modified in place since the "
            f"forward (version {version} became {now}): let the layer work on a copy, and call "
            "backward before the optimizer's step"
        )
    return tensor


def _bytes_of(storage: Any, device: torch.device) -> Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _on_host(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # a backend without pinned memory
        return torch.empty(size, dtype=torch.uint8, device="cpu")
