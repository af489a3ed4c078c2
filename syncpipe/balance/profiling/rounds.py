"""Runs layers for micro-batches of one size: once to see what they keep, then against a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.balance.profiling.interpreter import python_time
from syncpipe.balance.profiling.live import Live
from syncpipe.balance.profiling.stored import Keeping, Saved, blocks, size_of
from syncpipe.data import clones, map_tensors, tensors_in
from syncpipe.layers.unpack import Unpacked, call_note
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import go_back
from syncpipe.skip.namespace import SkipKey
from syncpipe.skip.store import use_store

__all__ = ["Progress", "Visit", "stopwatch"]

#: Marks a moment; and the seconds between two of these, read when both have happened.
Mark = Callable[[], Any]
Between = Callable[[Any, Any], float]


def stopwatch(device: torch.device) -> tuple[Mark, Between]:
    """How time is measured on a device: by its own events, or by the clock on the CPU."""
    if device.type == "cpu":
        return time.perf_counter, lambda start, end: float(end - start)
    try:
        torch.Event(device, enable_timing=True)
    except (NotImplementedError, RuntimeError, TypeError):  # a backend without such events

        def now() -> float:
            torch.accelerator.synchronize(device)
            return time.perf_counter()

        return now, lambda start, end: float(end - start)

    def mark() -> torch.Event:
        stream = torch.accelerator.current_stream(device)
        return stream.record_event(torch.Event(device, enable_timing=True))

    def between(start: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return mark, between


class Visit:
    """One layer and its input, for one size of the micro-batch: to be run as often as need be.

    Args:
        layer: a copy of the layer.
        inputs: the value from the layer before, and the skips that it pops.
        popped: their keys.
        device: where it runs.
        unpack: whether a tuple or a dict is spread over the arguments.

    Attributes:
        forward, backward: seconds that it took, for each round so far.
        peak: the most bytes that were alive at once; None where nobody has counted.
    """

    def __init__(
        self,
        layer: nn.Module,
        inputs: Any,
        popped: tuple[SkipKey, ...],
        device: torch.device,
        unpack: bool,
    ) -> None:
        self.layer, self.inputs, self.device = layer, inputs, device
        self._popped, self._unpack = popped, unpack
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.peak: int | None = None
        self._marks: list[Any] = []
        self._graph: tuple[list[Tensor], list[Tensor]] = ([], [])

    def forth(self, mark: Mark) -> None:
        """Runs the layer forward, once."""
        # The layer before has just written its input. So it is in the caches, unlike the weights.
        inputs, leaves = self.fresh()
        with _current(self.device):
            start = mark()
            output, store = self.call(inputs)
            self._marks = [start, mark()]
        self._graph = _graph((output, list(store.values()))), leaves

    def back(self, mark: Mark, *, weights: bool = True) -> None:
        """Runs it back, after :meth:`forth`; if it is told so, to its inputs alone."""
        (roots, leaves), self._graph = self._graph, ([], [])
        if not weights:
            own = set(map(id, self.layer.parameters()))
            leaves = [leaf for leaf in leaves if id(leaf) not in own]
        with _current(self.device):
            grads = list(map(torch.ones_like, roots))
            self._marks.append(mark())
            if roots and leaves:
                go_back(roots, grads, leaves)
            self._marks.append(mark())

    def read(self, between: Between) -> None:
        """Notes how long both took."""
        marks, self._marks = self._marks, []
        self.forward.append(between(marks[0], marks[1]))
        self.backward.append(between(marks[2], marks[3]))

    def python(self) -> float:
        """Seconds of Python in one forward of the layer."""
        inputs, _ = self.fresh()
        with _current(self.device):
            return python_time(lambda: self.call(inputs))

    def call(self, inputs: Any) -> tuple[Any, dict[SkipKey, Any]]:
        value, popped = inputs
        layer = self.layer
        call: Any = Unpacked(layer) if self._unpack else layer
        with use_store(dict(zip(self._popped, popped, strict=True))) as store:
            try:
                return call(value), store
            except TypeError as error:
                if note := call_note(error, layer, value, unpack=self._unpack):
                    annotate(error, note)
                raise

    def fresh(self) -> tuple[Any, list[Tensor]]:
        """Copies of the inputs, which may be written into; and where backward ends.

        It ends at what was copied, and at the parameters of the layer. Whatever else it gets hold
        of, such as the user's own parameters by a function that knows them, is not touched.
        """
        leaves = map_tensors(_leaves, self.inputs)
        ends = (*self.layer.parameters(), *tensors_in(leaves))
        return map_tensors(clones, leaves), [tensor for tensor in ends if tensor.requires_grad]


class Progress:
    """What goes from layer to layer for one size of the micro-batch.

    Args:
        size: in samples.
        value: the input of the first layer.
        layers: how many there are.
        unpack: whether tuples and dicts are spread over the arguments of the next layer.

    Attributes:
        value: the input of the next layer: leaves, which require a gradient as they do in training.
        skips: the skips on their way, the same.
        skip_bytes: the size of each skip so far.
        keeping: what the layers store.
    """

    def __init__(self, size: int, value: Any, layers: int, *, unpack: bool = False) -> None:
        self.size = size
        self._unpack = unpack
        self.value = value
        self.skips: dict[SkipKey, Any] = {}
        self.keeping = Keeping(layers)
        self.skip_bytes: dict[SkipKey, int] = {}

    def visit(
        self, layer: nn.Module, popped: Iterable[SkipKey], device: torch.device | None
    ) -> Visit:
        """Makes the inputs of the next layer ready on its device."""
        keys = tuple(popped)
        inputs = (self.value, [self.skips.pop(key, None) for key in keys])
        self.value = None
        if device is not None and any(t.device != device for t in tensors_in(inputs)):
            inputs = map_tensors(lambda tensors: [_leaf(t, device) for t in tensors], inputs)
        given = next((tensor.device for tensor in tensors_in(inputs)), torch.device("cpu"))
        return Visit(layer, inputs, keys, given if device is None else device, self._unpack)

    def observe(
        self, index: int, visit: Visit, stashed: Iterable[SkipKey], *, back: bool, count: bool
    ) -> None:
        """Runs a layer for the first time, on copies of its inputs, and hands its outputs on.

        Args:
            index: of the layer.
            visit: the layer and its inputs.
            stashed: the skips that go on to later layers.
            back: it will be run backward; if not, a backward that fails does not matter.
            count: count what is alive meanwhile.
        """
        layer = visit.layer
        inputs, leaves = visit.fresh()
        copies = tensors_in(inputs)
        saved, live = Saved(), Live() if count else None
        with _current(visit.device), live or nullcontext():
            if live is not None:
                live.watch(copies)
            output, store = saved.during(lambda: visit.call(inputs))
        # A layer that was lazy has its parameters only now.
        own = {key for t in (*layer.parameters(), *layer.buffers()) for key, _ in blocks(t)}
        originals = tensors_in(visit.inputs)
        for key in stashed:
            self.skips[key] = map_tensors(_leaves, store.get(key))
            self.skip_bytes[key] = size_of(store.get(key))
        going_on = (output, list(self.skips.values()))
        passing = self.keeping.add(index, originals, copies, saved.tensors(), going_on, own)
        self.value = map_tensors(_leaves, output)
        roots = _graph((output, list(store.values())))
        grads = list(map(torch.ones_like, roots))
        if live is None:
            if back and roots and leaves:
                go_back(roots, grads, leaves)
            return
        live.leave_aside(own)
        visit.peak = live.most - passing
        if not (roots and leaves):
            return
        for parameter in layer.parameters():
            if parameter.requires_grad:  # as it is from the second micro-batch on
                parameter.grad = torch.zeros_like(parameter)
                live.leave_aside(key for key, _ in blocks(parameter.grad))
        live.only((*saved.tensors(), *grads))
        del output, store, going_on
        try:
            with _current(visit.device), live:
                go_back(roots, grads, leaves)
        except Exception:
            if back:
                raise
        visit.peak = max(visit.peak, live.most)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a device is the current one, as in the pipe."""
    if device.type in ("cpu", "meta"):
        return nullcontext()
    return torch.accelerator.device_index(device.index)


def _leaf(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    leaf = tensor.detach() if device is None else tensor.detach().to(device)
    return leaf.requires_grad_(tensor.requires_grad)


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors without their graph; those that are one stay one."""
    made = {id(tensor): tensor for tensor in tensors}
    made = {key: _leaf(tensor) for key, tensor in made.items()}
    return [made[id(tensor)] for tensor in tensors]


def _graph(outputs: Any) -> list[Tensor]:
    """Where backward begins."""
    return list({id(t): t for t in tensors_in(outputs) if t.requires_grad}.values())
