"""Offload: activations wait for backward in host memory.

An offloading stage runs its forwards under saved-tensor hooks. Each saved tensor is copied to the
host on the stream ``out``, and back on the stream ``back``, a few tensors before its node needs it:

    compute   | cell 0 |e cell 1 |   ...   | backward of 0 |w        e: event, w: waits for it
    out                |w copy |
    back                             |w copy  | copy |e

Whole storages are copied, so views share one copy, and a restored tensor has its original strides
and alignment, so that kernels compute as they would have. Parameters, buffers, small tensors, and
tensors that are not plain and strided stay on the device.

The host runs ahead of the device and learns late that a copy is done. So the compute stream owns
all device memory here: it allocates and frees it, and waits for copies to the host when more than a
few are in flight. Graph nodes own the packed tensors, and these own their copies.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from syncpipe.data.trees import described
from syncpipe.runtime.engine import Run
from syncpipe.runtime.recomputation import version_of
from syncpipe.runtime.weight_gradients import UNPACK
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.schedule import Kind
from syncpipe.schedules.steps import Steps
from syncpipe.stages.part import Part
from syncpipe.storage import storage_of

SMALL = 1 << 18  #: bytes; smaller tensors stay: starting a copy takes longer than the copy
AHEAD = 4  #: copies in flight to the host, and copies back that are started early

_graph_stays = torch._C._autograd._get_current_graph_task_keep_graph  # as for retain_graph=True


def offload(call: Any) -> None:
    for r, streams in enumerate(call.streams_of):
        if streams.backend is not None and call.modes[r] == "offload":
            call.parts.append(Offload(call, r))


class Offload(Part):
    """The offloaded activations of one stage in one call."""

    def __init__(self, call: Any, r: int) -> None:
        self._r, self._m, streams = r, call.m, call.streams_of[r]
        worker: Worker = call.pipeline.workers[call.pipeline.worker_of[r]]
        self.device, self.backend = streams.device, streams.backend
        self.compute, (self.out, self.back) = streams.compute, worker.host_streams()
        partition = call.pipeline.stages[r].partition
        own = chain(partition.parameters(), partition.buffers())
        self._own = {storage_of(tensor) for tensor in own}
        self._leaving: deque[tuple[Any, Tensor]] = deque()  # in flight to the host: event, memory
        self._copies: dict[int, list[weakref.ref[_Copy]]] = {}  # by micro-batch, in order
        self._following: dict[int, int] = {}
        self._known: dict[tuple[int, int], weakref.ref[_Copy]] = {}  # by storage and version

    def begin(self, steps: Steps) -> None:
        self._following = dict(pairwise(steps.backwards(self._r) or range(self._m)[::-1]))

    def around(self, kind: Kind, r: int, run: Run) -> Run:
        if kind != "forward" or r != self._r:
            return run

        def offloading(i: int, messages: list[Any]) -> Sequence[Any]:
            disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
            if disabled is not None:  # for example by torch.func.grad
                raise RuntimeError(
                    f"checkpoint='offload' cannot be used here ({disabled}): use 'never'"
                )
            pack = partial(self._pack, i, self._copies.setdefault(i, []))
            with torch.autograd.graph.saved_tensors_hooks(pack, UNPACK):
                return run(i, messages)

        return offloading

    def end(self) -> None:
        self.release_sources()

    def _pack(
        self, i: int, copies: list[weakref.ref[_Copy]], tensor: Tensor
    ) -> Callable[[], Tensor]:
        """Packs a saved tensor; returns the function that unpacks it."""
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
            # Detached: a node that stores its own output would form a cycle with it.
            kept = tensor if tensor.grad_fn is None else tensor.detach()
            return partial(_checked, kept, version_of(tensor), kept)
        key = (storage_of(tensor), version_of(tensor))
        known = self._known.get(key)
        copy = None if known is None else known()
        if copy is None:
            copy = _Copy(self, tensor, i, len(copies))
            copies.append(weakref.ref(copy))
            self._known[key] = weakref.ref(copy)
        # An empty alias that shares the tensor's version counter.
        probe = tensor.detach()
        probe.data = tensor.new_empty(0)
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()

        def fetched() -> Tensor:
            _checked(probe, key[1], f"{probe.dtype}{list(layout[1])}")
            memory = copy.on_device()
            with torch.no_grad():
                return probe.new_empty(0).set_(memory.untyped_storage(), *layout)

        return fetched

    def hold_source(self, copied: Any, memory: Tensor) -> None:
        """Keeps memory until the compute stream has waited for its copy (event ``copied``)."""
        self._leaving.append((copied, memory))
        self.release_sources(AHEAD)

    def release_sources(self, most: int = 0) -> None:
        """Waits until at most ``most`` copies to the host are in flight; frees their sources."""
        while len(self._leaving) > most:
            copied, memory = self._leaving.popleft()
            self.backend.wait(self.compute, copied)
            del memory  # only after the wait

    def prefetch(self, i: int, k: int) -> None:
        """Starts the copies back that backward needs next, before copy ``k`` of a micro-batch."""
        for copy in islice(self._next_copies(i, k), AHEAD):
            copy.fetch()

    def _next_copies(self, i: int, k: int) -> Iterator[_Copy]:
        own: Sequence[weakref.ref[_Copy]] = self._copies.get(i, [])[:k]
        while True:
            yield from filter(None, (reference() for reference in reversed(own)))
            if i not in self._following:
                return
            i = self._following[i]
            own = self._copies.get(i, [])


class _Copy:
    """The copy of a storage on the host."""

    def __init__(self, offload: Offload, tensor: Tensor, i: int, k: int) -> None:
        self._offload, self._i, self._k = offload, i, k
        self._memory: Tensor | None = None  # its bytes, back on the device
        self._ready: Any = None  # the event of the copy back
        storage = tensor.untyped_storage()
        # A weak reference, which also reserves the storage's address.
        self._source = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        backend, out = offload.backend, offload.out
        memory = _bytes_of(storage, offload.device)
        self._host = _on_host(len(memory))
        backend.wait(out, backend.record(offload.compute))
        with backend.use(out):
            self._host.copy_(memory, non_blocking=True)
        offload.hold_source(backend.record(out), memory)

    def fetch(self) -> None:
        """Starts the copy back to the device, once."""
        if self._memory is not None:
            return
        offload = self._offload
        storage = torch.UntypedStorage._new_with_weak_ptr(self._source.cdata)
        if storage is not None:  # still alive on the device
            self._memory = _bytes_of(storage, offload.device)
            return
        backend, back = offload.backend, offload.back
        memory = torch.empty_like(self._host, device=offload.device)
        # The compute stream has waited for the copy to the host, and for earlier users of `memory`.
        backend.wait(back, backend.record(offload.compute))
        with backend.use(back):
            memory.copy_(self._host, non_blocking=True)
        self._ready = backend.record(back)
        self._memory = memory

    def on_device(self) -> Tensor:
        """The bytes on the device, ready for the compute stream; also starts the next copies."""
        self.fetch()
        memory, ready = self._memory, self._ready
        assert memory is not None
        offload = self._offload
        if ready is not None:
            offload.backend.wait(offload.compute, ready)
            self._ready = None
        offload.prefetch(self._i, self._k)
        if _graph_stays():
            self._memory = None
        return memory

    def __del__(self) -> None:
        if self._ready is not None:  # unused: its memory must not be reused before the copy ends
            self._offload.backend.wait(self._offload.compute, self._ready)


def _checked(probe: Tensor, version: int, tensor: Any) -> Any:
    """Checks that a packed tensor was not modified in place, as autograd does not; returns it."""
    now = version_of(probe)
    if now != version:
        what = described(tensor) if isinstance(tensor, Tensor) else tensor
        raise RuntimeError(
            f"a tensor ({what}) that backward needs was modified in place since the forward "
            f"(version {version} became {now}): let the layer work on a copy, and call backward "
            "before optimizer.step()"
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
