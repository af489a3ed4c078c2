"""Runs one layer for micro-batches of one size: once to see what it keeps, then against a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.balance.interpreter import python_time
from syncpipe.balance.stored import Keeping, Saved, blocks, size_of
from syncpipe.layers.unpack import Unpacked, call_note
from syncpipe.runtime.errors import annotate
from syncpipe.skip.namespace import SkipKey
from syncpipe.skip.store import use_store
from syncpipe.tree import clones, map_tensors, tensors_in

__all__ = ["Progress", "stopwatch"]

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
        device: where the current layer runs.
        forward, backward: seconds that the current layer took, for each round so far.
    """

    def __init__(self, size: int, value: Any, layers: int, *, unpack: bool = False) -> None:
        self.size = size
        self._unpack = unpack
        self.value = value
        self.skips: dict[SkipKey, Any] = {}
        self.keeping = Keeping(layers)
        self.skip_bytes: dict[SkipKey, int] = {}
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.device = torch.device("cpu")
        self._inputs: Any = ()
        self._popped: tuple[SkipKey, ...] = ()
        self._mutates = False

    def give(self, popped: Iterable[SkipKey], device: torch.device | None) -> None:
        """Makes the inputs of the next layer ready on its device."""
        self._popped = tuple(popped)
        inputs = (self.value, [self.skips.pop(key, None) for key in self._popped])
        self.value = None
        if device is not None and any(t.device != device for t in tensors_in(inputs)):
            inputs = map_tensors(lambda tensors: [_leaf(t, device) for t in tensors], inputs)
        self._inputs = inputs
        given = next((tensor.device for tensor in tensors_in(inputs)), torch.device("cpu"))
        self.device = given if device is None else device
        self.forward, self.backward = [], []

    def observe(
        self, index: int, layer: nn.Module, stashed: Iterable[SkipKey], *, back: bool
    ) -> None:
        """Runs a layer for the first time, on copies of its inputs, and hands its outputs on.

        Args:
            index: of the layer.
            layer: its copy.
            stashed: the skips that go on to later layers.
            back: run backward as well, to warm up.
        """
        inputs = self._fresh(copied=True)
        copies = tensors_in(inputs)
        saved = Saved()
        with _current(self.device):
            output, store = saved.during(lambda: self._call(layer, inputs))
        # A layer that was lazy has its parameters only now.
        own = {key for t in (*layer.parameters(), *layer.buffers()) for key, _ in blocks(t)}
        self._mutates = any(tensor._version > 0 for tensor in copies)
        originals = tensors_in(self._inputs)
        for key in stashed:
            self.skips[key] = map_tensors(_leaves, store.get(key))
            self.skip_bytes[key] = size_of(store.get(key))
        going_on = (output, list(self.skips.values()))
        self.keeping.add(index, originals, copies, saved.tensors(), going_on, own)
        self.value = map_tensors(_leaves, output)
        roots, grads, leaves = _backward(layer, inputs, (output, list(store.values())))
        if back and roots and leaves:
            torch.autograd.backward(roots, grads, inputs=leaves)

    def round(self, layer: nn.Module, mark: Mark, between: Between) -> None:
        """Runs a layer forward and back, once, and measures both."""
        inputs = self._fresh(copied=self._mutates)
        with _current(self.device):
            first = mark()
            output, store = self._call(layer, inputs)
            second = mark()
            roots, grads, leaves = _backward(layer, inputs, (output, list(store.values())))
            third = mark()
            if roots and leaves:
                torch.autograd.backward(roots, grads, inputs=leaves)
            fourth = mark()
        self.backward.append(between(third, fourth) if roots and leaves else 0.0)
        self.forward.append(between(first, second))

    def python(self, layer: nn.Module) -> float:
        """Seconds of Python in one forward of a layer."""
        inputs = self._fresh(copied=self._mutates)
        with _current(self.device):
            return python_time(lambda: self._call(layer, inputs))

    def forget(self) -> None:
        """Lets go of the inputs of the layer."""
        self._inputs = ()

    def _call(self, layer: nn.Module, inputs: Any) -> tuple[Any, dict[SkipKey, Any]]:
        value, popped = inputs
        call: Any = Unpacked(layer) if self._unpack else layer
        with use_store(dict(zip(self._popped, popped, strict=True))) as store:
            try:
                return call(value), store
            except TypeError as error:
                if note := call_note(error, layer, value, unpack=self._unpack):
                    annotate(error, note)
                raise

    def _fresh(self, *, copied: bool) -> Any:
        """The inputs as leaves without gradients; or as copies of these, to be written into."""
        leaves = map_tensors(_leaves, self._inputs)
        return map_tensors(clones, leaves) if copied else leaves


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


def _backward(
    layer: nn.Module, inputs: Any, outputs: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Where backward begins, with which gradients, and where it ends.

    It ends at the copies. Whatever else a layer gets hold of, such as the user's own parameters by
    a function that knows them, is not touched.
    """
    roots = list({id(t): t for t in tensors_in(outputs) if t.requires_grad}.values())
    leaves = [t for t in (*layer.parameters(), *tensors_in(inputs)) if t.requires_grad]
    return roots, list(map(torch.ones_like, roots)), leaves
