"""Finds missing stream waits without any accelerator: a happens-before checker on CPU tensors.

Streams are made up: each has a vector clock, and every operator that a dispatch mode sees is
booked on the stream that is current, in the thread at hand, for the device of its tensors:

    read        must come after the last write                    (else: a race)
    write       must come after the last write and all reads      (else: a race)
    allocation  on a stream may get the memory of whatever was allocated there and has been freed
                since, so it must come after all uses of that, but for streams on which it was
                kept (``record_stream``)                          (else: memory reused too early)

What is modelled of PyTorch on an accelerator:

* The current stream belongs to a thread and a device; a new thread starts on default streams.
* A copy between devices runs on the current stream of the source, fenced on both sides against
  the current stream of the target; its result is allocated on the latter.
* The caching allocator, one pool for each stream, as above.
* Autograd: see ``happens_before_autograd.py``.

What is not: copies to and from the host, operators that write what their schema does not mention,
and tensors of which an operator uses several devices at once (but for copies).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict["Stream", int]


class Stream:
    """A made-up stream: what it has done and waited for, and what was allocated on it."""

    def __init__(self, name: str, device: int) -> None:
        self.name, self.device = name, device
        self.clock: Clock = {self: 0}
        self.blocks: list[Block] = []

    def __repr__(self) -> str:
        return f"{self.name}@{self.device}"

    def join(self, event: Clock) -> None:
        for stream, time in event.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def is_after(self, stream: Stream, time: int) -> bool:
        return self.clock.get(stream, 0) >= time


class Block:
    """The memory of one storage."""

    def __init__(self, tensor: Tensor, device: int, what: str) -> None:
        # The weak reference also keeps the storage's address from being used again.
        self.ref = StorageWeakRef(tensor.untyped_storage())
        self.device, self.what = device, what
        self.write: tuple[Stream, int, str] | None = None
        self.reads: dict[Stream, tuple[int, str]] = {}
        self.uses: Clock = {}
        self.kept: set[Stream] = set()


class World:
    """Devices with their streams, the memory, and the reports on its misuse."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        self.operators = 0
        self.left_out = ""  # what is not done: "wait" or "keep"
        self._lock = threading.RLock()
        self._local = threading.local()
        self._default: dict[int, Stream] = {}
        self._blocks: dict[int, Block] = {}

    # -- current devices and streams ---------------------------------------------------------

    @property
    def here(self) -> Any:
        """The state of the calling thread."""
        local = self._local
        if not hasattr(local, "streams"):
            local.streams, local.device, local.watching = {}, 0, False
            local.inside, local.meeting, local.caller = None, [], {}
            local.leaves, local.acting = [], False
        return local

    def default(self, device: int) -> Stream:
        with self._lock:
            return self._default.setdefault(device, Stream("default", device))

    def current(self, device: int) -> Stream:
        return self.here.streams.get(device) or self.default(device)

    @contextmanager
    def on(self, *streams: Stream) -> Iterator[None]:
        """Makes streams current for the calling thread, and the device of the last one."""
        here = self.here
        before = here.streams, here.device
        here.streams = {**here.streams, **{s.device: s for s in streams}}
        here.device = streams[-1].device if streams else here.device
        try:
            yield
        finally:
            here.streams, here.device = before

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Books the operators of the calling thread."""
        here = self.here
        if here.watching:
            yield
            return
        here.watching = True
        try:
            with _Mode(self):
                yield
        finally:
            here.watching = False

    # -- memory -----------------------------------------------------------------------------

    def adopt(self, tensors: Iterable[Tensor], device: int) -> None:
        """Puts tensors that were made unwatched on a device."""
        with self._lock:
            for tensor in tensors:
                self._blocks[address(tensor)] = Block(tensor, device, "adopted")

    def block_of(self, tensor: Tensor) -> Block | None:
        """The memory of a tensor, if it is known."""
        return self._blocks.get(address(tensor))

    def device_of(self, tensor: Tensor) -> int:
        block = self.block_of(tensor)
        return self.here.device if block is None else block.device

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        with self._lock:
            block = self._blocks.get(address(tensor))
            if block is not None:
                block.kept.add(stream)

    def book(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Books one operator on its stream."""
        reads, writes = _accesses(func, args, kwargs)
        known = {address(t) for t in [*reads, *writes]}
        new = [t for t in _tensors(outputs) if address(t) not in self._blocks]
        target = kwargs.get("device")
        what = str(func)
        with self._lock:
            self.operators += 1
            device = self.device_of([*reads, *writes][0]) if known else self.here.device
            stream = self.current(device)
            stream = self._engine_adds(stream, what)
            if func is torch.ops.aten._to_copy.default and target and target.index != device:
                there = self.current(target.index)
                stream.join(there.clock)
                self._access(stream, what, reads, writes)
                there.join(stream.clock)
                device = target.index
                self._allocate(there, what, new)
                self._access(there, what, [], new)
                return
            self._allocate(stream, what, new)
            self._access(stream, what, reads, [*writes, *new])

    def _engine_adds(self, stream: Stream, what: str) -> Stream:
        """The stream of an operator that autograd's engine may have issued itself."""
        return stream

    def _access(self, stream: Stream, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        stream.clock[stream] += 1
        now = stream.clock[stream]
        for tensor in reads:
            block = self._block(tensor, stream)
            self._check(stream, what, "read", block, block.write)
            block.reads[stream] = (now, what)
            block.uses[stream] = now
        for tensor in writes:
            block = self._block(tensor, stream)
            self._check(stream, what, "write", block, block.write)
            for other, (time, name) in block.reads.items():
                self._check(stream, what, "write", block, (other, time, name))
            block.write, block.reads = (stream, now, what), {}
            block.uses[stream] = now

    def _block(self, tensor: Tensor, stream: Stream) -> Block:
        key = address(tensor)
        if key not in self._blocks:
            self._blocks[key] = Block(tensor, stream.device, "unknown")
        return self._blocks[key]

    def _check(
        self, stream: Stream, what: str, how: str, block: Block, other: tuple[Any, int, str] | None
    ) -> None:
        if other is not None and not stream.is_after(other[0], other[1]):
            self.reports.append(
                f"race: {how} by {what} on {stream}, after {other[2]} on {other[0]}, "
                f"of memory made by {block.what}"
            )

    def _allocate(self, stream: Stream, what: str, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        alive = []
        for block in stream.blocks:
            if not block.ref.expired():
                alive.append(block)
                continue
            for other, time in block.uses.items():
                if other not in block.kept and not stream.is_after(other, time):
                    self.reports.append(
                        f"reuse: {what} on {stream} may get memory made by {block.what} that is "
                        f"in use on {other}, where it was not kept"
                    )
            self._blocks = {k: b for k, b in self._blocks.items() if b is not block}
        stream.blocks = alive
        for tensor in tensors:
            block = Block(tensor, stream.device, what)
            self._blocks[address(tensor)] = block
            stream.blocks.append(block)


class _Mode(TorchDispatchMode):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.world.book(func, args, kwargs or {}, outputs)
        return outputs


class Stamp(dict["Stream", int]):
    """An event that can tell its time."""

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Stamp) -> float:
        return float(sum(later.values()) - sum(self.values()))


class FakeStreams:
    """``syncpipe.runtime.streams.Streams`` on made-up streams of one device."""

    def __init__(self, world: World, device: int) -> None:
        self.world, self.device = world, device
        self.names = ["compute", "outbound", "inbound"]

    def current(self) -> Stream:
        return self.world.current(self.device)

    def new(self) -> Stream:
        return Stream(self.names.pop(0), self.device)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        with self.world.on(stream), self.world.watch():
            yield

    def record(self, stream: Stream) -> Clock:
        with self.world._lock:
            return dict(stream.clock)

    def stamp(self, stream: Stream) -> Stamp:
        with self.world._lock:
            return Stamp(stream.clock)

    def wait(self, stream: Stream, event: Clock) -> None:
        with self.world._lock:
            if self.world.left_out != "wait":
                stream.join(event)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        with self.world._lock:
            if self.world.left_out != "keep":
                self.world.keep(tensor, stream)


def address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]


def _accesses(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads and those that it writes; a view does neither."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    named = {argument.name: argument for argument in func._schema.arguments}
    pairs = [*zip(func._schema.arguments, args, strict=False)]
    for argument, value in pairs + [(named[key], value) for key, value in kwargs.items()]:
        if argument.alias_info is None:
            reads += _tensors(value)
        elif argument.alias_info.is_write:
            writes += _tensors(value)
    return reads, writes


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*module.parameters(), *module.buffers()]
