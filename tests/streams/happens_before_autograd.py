"""Autograd's engine on made-up streams: what it does on an accelerator, acted out on the CPU.

Modelled, as PyTorch's notes on "stream semantics of backward passes" and the engine have it:

* A node runs on the stream that was current, on the device of its outputs, when forward made it.
  Every other device is on its default stream there (the engine has a thread for each device).
* Gradients that meet are added on the consumer's stream, which waits for both of them.
* Between nodes of *one* device the consumer's stream waits for the producer's, and what it is given
  is kept for it. The root waits for the caller; after backward the caller waits for the leaves.

Not modelled:

* Waits of the engine between different devices: they would hide ours.
* The interleaving of several backward threads. Nodes run one after another here, in the order of
  the CPU's engine.
* Addition in place. The engine adds into a gradient that nobody else refers to; while a dispatch
  mode looks on it was seen to make a new tensor. So a write into a gradient that is still being
  copied to another device would go unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from syncpipe.training.cell import ANCHOR as _ANCHOR
from tests.streams.happens_before import Clock, Stream, World, address


class AutogradWorld(World):
    """A world in which backward can be run."""

    def tag(self, tensors: Iterable[Tensor], stream: Stream | None = None) -> None:
        """Notes the stream of the nodes that made ``tensors``, as far as they are new."""
        for tensor in tensors:
            todo = [tensor.grad_fn]
            mine = stream or self.current(self.device_of(tensor))
            while todo:
                node = todo.pop()
                if node is None or "stream" in node.metadata or _is_anchor(node):
                    continue
                # No reference to the node itself: its hooks are its own.
                meta = node.metadata
                meta["stream"], meta["arrived"] = mine, {}
                following = node.next_functions
                todo += [fn for fn, _ in following]
                edges = [(None if fn is None else fn.metadata, nr) for fn, nr in following]
                node.register_prehook(_Before(self, meta))
                node.register_hook(_After(self, meta, edges))

    def backward(self, output: Tensor, grad: Tensor | None = None) -> None:
        """``output.backward(grad)`` as the engine would run it on an accelerator."""
        self.tag([output])
        with self.going_back():
            output.backward(grad)

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """The context of a backward whose nodes are tagged."""
        here = self.here
        before = here.streams, here.device
        here.caller = {k: self.current(k) for k in list(self._default) + list(here.streams)}
        here.leaves, here.acting = [], True
        try:
            with self.watch():
                yield
        finally:
            here.streams, here.device = before
            here.inside, here.meeting, here.acting = None, [], False
        with self._lock:
            for leaf in here.leaves:
                self.current(leaf.device).join(leaf.clock)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Around a backward inside of a node of another one, on one thread."""
        here = self.here
        before = dict(here.__dict__)
        try:
            yield
        finally:
            here.__dict__.update(before)

    def _engine_adds(self, stream: Stream, what: str) -> Stream:
        """Gradients that meet, which no node adds but the engine, on the consumer's stream."""
        if not self.here.meeting or self.here.inside is not None or "add" not in what:
            return stream
        meta, nr, producer, grad = self.here.meeting.pop(0)
        consumer: Stream = meta["stream"]
        event, other, first = meta["arrived"][nr]
        for stream, clock, tensor in ((other, event, first()), (producer, producer.clock, grad())):
            if stream.device == consumer.device and stream is not consumer:
                consumer.join(clock)
                if tensor is not None:
                    tensor.kept.add(consumer)
        meta["arrived"][nr] = (_after_next(consumer), consumer, lambda: None)
        return consumer


class _Before:
    """A node is about to run: the engine switches to its stream."""

    def __init__(self, world: AutogradWorld, meta: dict[str, Any]) -> None:
        self.world, self.meta = world, meta

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        world, here, stream = self.world, self.world.here, self.meta["stream"]
        here.inside, here.meeting = stream, []
        here.streams, here.device = {stream.device: stream}, stream.device
        arrived = self.meta["arrived"]
        if not arrived:  # the root
            stream.join(here.caller[stream.device].clock if stream.device in here.caller else {})
        for nr, (event, producer, _) in arrived.items():
            if producer.device == stream.device and producer is not stream:
                stream.join(event)
                if grads[nr] is not None:
                    world.keep(grads[nr], stream)
        arrived.clear()


class _After:
    """A node has run: the engine passes its gradients on."""

    def __init__(
        self, world: AutogradWorld, meta: dict[str, Any], edges: list[tuple[Any, int]]
    ) -> None:
        self.world, self.meta, self.edges = world, meta, edges

    def __call__(self, grads: Any, _: Any) -> None:
        world, here, stream = self.world, self.world.here, self.meta["stream"]
        here.inside = None
        if not self.edges:
            here.leaves.append(stream)
        for grad, (meta, nr) in zip(grads, self.edges, strict=False):
            if grad is None or meta is None:
                continue
            block = world._blocks.get(address(grad))
            if nr in meta["arrived"]:
                here.meeting.append((meta, nr, stream, lambda block=block: block))
            else:
                meta["arrived"][nr] = (dict(stream.clock), stream, lambda block=block: block)


def _is_anchor(node: Any) -> bool:
    """The leaf that every border begins at: its gradient is None, and it is on no device."""
    return getattr(node, "variable", None) is _ANCHOR


def _after_next(stream: Stream) -> Clock:
    """The event that comes after the next operator of a stream."""
    return {**stream.clock, stream: stream.clock[stream] + 1}
