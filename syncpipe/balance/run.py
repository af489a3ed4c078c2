"""Takes micro-batches through copies of layers, one after another, and measures what these cost.

A layer that is run again and again finds its weights in the caches, where no training finds them.
So layers are measured as they are trained: forward one after another, and then back::

    forward  0 1 2 3 4 5 . . back . . 5 4 3 2 1 0      a round; each layer has its own times

Of several sizes of the micro-batch each has two rounds in turn, of which the second counts: in
training, micro-batches of one size follow each other. Then the largest goes back to inputs alone,
without the products for parameters: what is missing is the weight half of zero-bubble schedules.

Whatever else runs on the machine makes times longer and never shorter. So the least of the rounds
counts, and times that cannot be (a least that no other round comes near, more samples in less time)
are measured again. How much longer the median takes is the spread of the profile.

All layers need not be in memory for that. Once the others take more memory than caches have,
nothing is left of a layer when its turn comes again. So they are measured in windows of that size,
one window after another: a model may be larger than the device that measures it.
"""

from __future__ import annotations

import math
import os
import statistics
import time as clock
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _push_mode

from syncpipe.balance.copies import compiled, described_layer, layer_to_run
from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.balance.stored import Keeping, Live, Saved, blocks, size_of
from syncpipe.data import clones, distinct, map_tensors, tensors_in
from syncpipe.layers.unpack import Unpacked, call_note
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import go_back
from syncpipe.runtime.thread_state import settled
from syncpipe.skip.layout import layer_skips
from syncpipe.skip.store import SkipKey, use_store

__all__ = ["Lane", "Profiler", "Timing", "Watch"]

#: Rounds of each window: at least so many, however long they take, and at most so many.
LEAST, MOST = 3, 200
#: Once all has taken so many times the timeout, one round is enough.
PATIENCE = 5
#: Two rounds agree if the times of each layer differ by this factor at most, or by so many seconds;
#: so many more rounds are tried until they do.
AGREE, TINY, AGAIN = 1.2, 2e-5, 12
#: More samples take so many times longer than in proportion, at most.
OUT = 4
#: A run that takes so many seconds at most takes no time.
QUICK = 1e-3
#: Bytes of layers that are measured together: several times the caches of processors and GPUs,
#: and no more than an eighth of what is free on the device.
WINDOW = 256_000_000

#: Marks a moment; and the seconds between two of these, read when both have happened.
Watch = tuple[Callable[[], Any], Callable[[Any, Any], float]]


@dataclass(frozen=True)
class Timing:
    """How layers are timed.

    Attributes:
        deadline: when to be over, by the clock.
        timeout: seconds that were given for it.
        watch: reads the time in place of that of the device; one round is enough for it.
    """

    deadline: float = 0.0
    timeout: float = 0.0
    watch: Watch | None = None


def stopwatch(device: torch.device) -> Watch:
    """How time is measured on a device: by its own events, or by the clock on the CPU."""
    events = device.type != "cpu"
    if events:
        try:
            torch.Event(device, enable_timing=True)
        except (NotImplementedError, RuntimeError, TypeError):  # a backend without such events
            events = False

    def mark() -> Any:
        if events:
            stream = torch.accelerator.current_stream(device)
            return stream.record_event(torch.Event(device, enable_timing=True))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return clock.perf_counter()

    def between(start: Any, end: Any) -> float:
        if not events:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return mark, between


# --- one layer ------------------------------------------------------------------------------------


class Visit:
    """One layer and its input, for one size of the micro-batch: to be run as often as need be.

    Args:
        layer: a copy of the layer.
        inputs: the value from the layer before, and the skips that it pops.
        popped: their keys.
        device: where it runs.
        unpack: whether a tuple or a dict is spread over the arguments.
        watch: tells the time.

    Attributes:
        forward, backward: seconds that it took, for each round so far.
        to_inputs: the same of backward to the inputs alone.
        peak: the most bytes that were alive at once; None where it was not counted.
    """

    def __init__(
        self,
        layer: nn.Module,
        inputs: Any,
        popped: tuple[SkipKey, ...],
        device: torch.device,
        unpack: bool,
        watch: Watch,
    ) -> None:
        self.layer, self.inputs, self.device = layer, inputs, device
        self._popped, self._unpack = popped, unpack
        self._mark, self._between = watch
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.to_inputs: list[float] = []
        self.peak: int | None = None
        self._marks: list[Any] = []
        self._graph: tuple[list[Tensor], list[Tensor]] = ([], [])

    def forth(self) -> None:
        """Runs the layer forward, once."""
        # The layer before has just written its input. So it is in the caches, unlike the weights.
        inputs, leaves = self.fresh()
        with current(self.device):
            start = self._mark()
            output, store = self.call(inputs)
            self._marks = [start, self._mark()]
        self._graph = _roots((output, list(store.values()))), leaves

    def back(self, *, weights: bool) -> None:
        """Runs it back, after :meth:`forth`; if it is told so, to its inputs alone."""
        (roots, leaves), self._graph = self._graph, ([], [])
        if not weights:
            own = set(map(id, self.layer.parameters()))
            leaves = [leaf for leaf in leaves if id(leaf) not in own]
        with current(self.device):
            grads = list(map(torch.ones_like, roots))
            self._marks.append(self._mark())
            if roots and leaves:
                go_back(roots, grads, leaves)
            self._marks.append(self._mark())

    def read(self, *, weights: bool) -> None:
        """Notes how long both took."""
        marks, self._marks = self._marks, []
        self.forward.append(self._between(marks[0], marks[1]))
        times = self.backward if weights else self.to_inputs
        times.append(self._between(marks[2], marks[3]))

    def weight_share(self) -> float | None:
        """The part of backward that is for parameters; None where it is unknown.

        A pipe puts off the products of linear maps and convolutions only, so what other parameters
        take stays in its input half.
        """
        if not any(parameter.requires_grad for parameter in self.layer.parameters()):
            return 0.0
        whole = min(self.backward, default=0.0)
        return min(1.0, max(0.0, 1 - min(self.to_inputs) / whole)) if whole else None

    def python(self, until: float) -> float:
        """Seconds of Python in one forward of the layer, by the best of some runs.

        An operator lets go of CPython's lock while it works or launches kernels. What is left
        between operators is Python, of which one process does no two at a time, however many
        devices there are. It is CPU time of the thread: one that sleeps or waits holds no
        interpreter. Backward runs in autograd's engine, without the lock, but for that of a
        ``torch.autograd.Function`` in Python, which is not counted.

        Args:
            until: when to be over. It is measured once in any case, and as often as it should be
                if that takes no time, for the first run of something is far from the best.
        """
        found: list[float] = []
        while len(found) < LEAST and not compiled(self.layer):
            begin = clock.monotonic()
            inputs, _ = self.fresh()
            with current(self.device):
                seconds, calls = outside_operators(partial(self.call, inputs))
            found.append(max(0.0, seconds - calls * of_counting()))
            if clock.monotonic() > max(until, begin + QUICK):
                break
        return min(found, default=0.0)

    def call(self, inputs: Any) -> tuple[Any, dict[SkipKey, Any]]:
        """Runs the layer; returns its output and the skips that it stashes."""
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


class _Operators(TorchFunctionMode):
    """Counts the operators that are called, and the seconds inside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seconds = 0, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = clock.thread_time()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds += clock.thread_time() - start
            self.calls += 1


def outside_operators(call: Callable[[], Any]) -> tuple[float, int]:
    """Seconds that something takes outside of operators, and how many of these it calls."""
    operators = _Operators()

    def timed() -> float:
        _push_mode(operators)  # type: ignore[no-untyped-call]
        start = clock.thread_time()
        call()
        return clock.thread_time() - start

    return settled(timed) - operators.seconds, operators.calls


@lru_cache(maxsize=1)
def of_counting() -> float:
    """Seconds that it takes to count one operator: those of the quickest of some loops."""
    tensor, many = torch.empty(0), 100

    def loop() -> None:
        for _ in range(many):
            torch.relu(tensor)

    return max(0.0, min(outside_operators(loop)[0] for _ in range(20))) / many


# --- one size of the micro-batch ------------------------------------------------------------------


class Lane:
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
        self.size, self.value, self._unpack = size, value, unpack
        self.skips: dict[SkipKey, Any] = {}
        self.keeping = Keeping(layers)
        self.skip_bytes: dict[SkipKey, int] = {}

    def visit(
        self,
        layer: nn.Module,
        popped: Iterable[SkipKey],
        device: torch.device | None,
        watch: Watch | None,
    ) -> Visit:
        """Makes the inputs of the next layer ready on its device."""
        keys = tuple(popped)
        inputs = (self.value, [self.skips.pop(key, None) for key in keys])
        self.value = None
        if device is not None and any(t.device != device for t in tensors_in(inputs)):
            inputs = map_tensors(lambda tensors: [_leaf(t, device) for t in tensors], inputs)
        given = next((tensor.device for tensor in tensors_in(inputs)), torch.device("cpu"))
        home = given if device is None else device
        return Visit(layer, inputs, keys, home, self._unpack, watch or stopwatch(home))

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
        with current(visit.device), live or nullcontext():
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
        roots = _roots((output, list(store.values())))
        grads = list(map(torch.ones_like, roots))
        if live is not None:
            live.leave_aside(own)
            visit.peak = live.most - passing
        if not (roots and leaves and (back or live is not None)):
            return
        if live is not None:
            for parameter in layer.parameters():
                if parameter.requires_grad:  # as it is from the second micro-batch on
                    parameter.grad = torch.zeros_like(parameter)
                    live.leave_aside(key for key, _ in blocks(parameter.grad))
            live.only((*saved.tensors(), *grads))
        del output, store, going_on
        try:
            with current(visit.device), live or nullcontext():
                go_back(roots, grads, leaves)
        except Exception:
            if back:
                raise
        if live is not None:
            visit.peak = max(visit.peak or 0, live.most)


def current(device: torch.device) -> AbstractContextManager[Any]:
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


def _roots(outputs: Any) -> list[Tensor]:
    """Where backward begins."""
    return [tensor for tensor in distinct(outputs) if tensor.requires_grad]


# --- all layers -----------------------------------------------------------------------------------


class Profiler:
    """Takes the lanes from layer to layer.

    Args:
        module: the layers.
        known: the same, but for specs: what they build, on ``meta``.
        lanes: one for each size of the micro-batch, ascending.
        device: for all layers; None: each where it is.
        timing: how layers are timed; None: sizes only.
        bar: shows progress; None for none.
    """

    def __init__(
        self,
        module: nn.Sequential,
        known: nn.Sequential,
        lanes: list[Lane],
        device: torch.device | None,
        timing: Timing | None,
        bar: Any,
    ) -> None:
        self._layers = list(known._modules.items())
        self._given = list(module)  # the same, but for specs
        self._lanes, self._device, self._timing, self._bar = lanes, device, timing, bar
        tensors = tensors_in(lanes[0].value)
        self._home = device or (tensors[0].device if tensors else torch.device("cpu"))
        self._counted: set[int] = set()  # parameters and buffers
        self._stashed_by: dict[SkipKey, int] = {}
        #: Of all layers at the largest size, forward and backward.
        self._least: list[float] = []
        self._medians: list[float] = []

    def run(self) -> Profile:
        """Measures all layers."""
        given = {lane.size: size_of(lane.value) for lane in self._lanes}
        measured: list[dict[str, Any]] = []
        skips: list[SkipProfile] = []
        window: list[list[Visit]] = []
        held, most = 0, _window(self._home)
        for index, (name, layer) in enumerate(self._layers):
            assert layer is not None
            numbers, visits = self._observed(index, name, layer)
            measured.append(numbers)
            window.append(visits)
            held += sum(numbers[f"{what}_bytes"] for what in ("parameter", "buffer"))
            held += sum(lane.keeping.stored[index] for lane in self._lanes)
            if held >= most or index == len(self._layers) - 1:
                self._time(index + 1 - len(window), measured, window)
                window, held = [], 0
            for key in layer_skips(layer).popped:
                of = {lane.size: lane.skip_bytes[key] for lane in self._lanes}
                skips.append(SkipProfile(key[1], self._stashed_by[key], index, of))
            if self._bar is not None:
                self._bar.update()
        for index, numbers in enumerate(measured):
            # Only now: a later layer tells what those before it pass on.
            numbers["stored_bytes"] = {x.size: x.keeping.stored[index] for x in self._lanes}
            numbers["shared_bytes"] = {x.size: x.keeping.shared[index] for x in self._lanes}
        layers = tuple(LayerProfile(**numbers) for numbers in measured)
        if self._timing is None:
            return Profile(layers, tuple(skips), given, source="sizes")
        least = math.fsum(self._least)
        spread = max(0.0, math.fsum(self._medians) / least - 1) if least else 0.0
        return Profile(
            layers, tuple(skips), given, source="measured", spread=spread,
            load_average=os.getloadavg()[0],
        )  # fmt: skip

    def _observed(
        self, index: int, name: str, layer: nn.Module
    ) -> tuple[dict[str, Any], list[Visit]]:
        """What can be said of a layer but its times; and how to run it for these."""
        exchanged = layer_skips(layer)
        self._stashed_by.update(dict.fromkeys(exchanged.stashed, index))
        made = layer_to_run(name, self._given[index], self._device, self._home)
        home = next((t.device for t in chain(made.parameters(), made.buffers())), None)
        home = self._device or home
        watch = self._timing.watch if self._timing is not None else None
        visits: list[Visit] = []
        count = not compiled(made)
        for k, lane in enumerate(self._lanes):
            visits.append(lane.visit(made, exchanged.popped, home, watch))
            with self._explained(index, k):
                back = self._timing is not None
                lane.observe(index, visits[-1], exchanged.stashed, back=back, count=count)
        numbers: dict[str, Any] = {"name": name, **self._own_bytes(layer, made)}
        numbers["output_bytes"] = {lane.size: size_of(lane.value) for lane in self._lanes}
        if count:
            peaks = zip(self._lanes, visits, strict=True)
            numbers["peak_bytes"] = {lane.size: visit.peak for lane, visit in peaks}
        return numbers, visits

    def _time(self, first: int, measured: list[dict[str, Any]], window: list[list[Visit]]) -> None:
        """Measures the layers of a window, from the layer ``first`` on, and notes their times."""
        if self._timing is not None:
            self._rotate(self._timing, first, measured, window)
        for numbers, visits in zip(measured[first:], window, strict=True):
            for what in ("forward", "backward"):
                rows = zip(self._lanes, visits, strict=True)
                times = {lane.size: getattr(visit, what) for lane, visit in rows}
                numbers[what] = least_of(times)
                if largest := times[self._lanes[-1].size]:
                    self._least.append(min(largest))
                    self._medians.append(statistics.median(largest))
            if self._timing is not None:
                numbers["weight_share"] = visits[-1].weight_share()

    def _rotate(
        self,
        timing: Timing,
        first: int,
        measured: list[dict[str, Any]],
        window: list[list[Visit]],
    ) -> None:
        """Measures a window for its share of the time that is left, its Python first."""
        begin, behind = clock.monotonic(), len(self._layers) - first
        left = timing.deadline - begin
        for k, visits in enumerate(window if timing.watch is None else ()):
            until = begin + left * (k + 1) / behind / 4
            measured[first + k]["interpreter"] = visits[0].python(until)
        until = begin + left * len(window) / behind
        sizes = [lane.size for lane in self._lanes]
        for done in range(MOST):
            now = clock.monotonic()
            late = now > timing.deadline + PATIENCE * timing.timeout
            enough = done >= LEAST and (_agree(window, sizes) or done >= LEAST + AGAIN)
            if now > until and (enough or (late and done >= 1)):
                break
            for lane in range(len(self._lanes)):
                # Micro-batches of one size follow each other: one of another leaves other caches.
                if len(self._lanes) > 1 and not late:
                    self._round(first, window, lane, counts=False)
                self._round(first, window, lane)
            self._round(first, window, len(self._lanes) - 1, weights=False)

    def _round(
        self,
        first: int,
        window: list[list[Visit]],
        lane: int,
        *,
        weights: bool = True,
        counts: bool = True,
    ) -> None:
        """Runs the layers of a window forward, and then back; and notes how long that took."""
        for index, visits in enumerate(window, first):
            with self._explained(index, lane):
                visits[lane].forth()
        for index, visits in reversed(list(enumerate(window, first))):
            with self._explained(index, lane):
                visits[lane].back(weights=weights)
        for visits in window if counts else ():
            visits[lane].read(weights=weights)

    def _own_bytes(self, layer: nn.Module, made: nn.Module) -> dict[str, int]:
        """Bytes of parameters and buffers; what an earlier layer shares is counted there."""
        bytes = {"parameter_bytes": 0, "frozen_bytes": 0, "buffer_bytes": 0}
        originals = dict(chain(layer.named_parameters(), layer.named_buffers()))
        parameters = dict(made.named_parameters())
        for name, tensor in chain(parameters.items(), made.named_buffers()):
            original = id(originals.get(name, tensor))
            if original in self._counted or is_lazy(tensor):
                continue
            if name in originals:
                self._counted.add(original)
            size = tensor.numel() * tensor.element_size()
            bytes["parameter_bytes" if name in parameters else "buffer_bytes"] += size
            if name in parameters and not tensor.requires_grad:
                bytes["frozen_bytes"] += size
        return bytes

    @contextmanager
    def _explained(self, index: int, lane: int) -> Iterator[None]:
        """Says where an exception came from.

        Raises:
            RuntimeError: instead of it, if the layer needs values and there are none.
        """
        try:
            yield
        except BaseException as error:
            name, layer = self._layers[index]
            assert layer is not None
            where = described_layer(name, layer)
            if self._device is not None and self._device.type == "meta" and _needs_values(error):
                raise RuntimeError(
                    f"{where} needs the values of its tensors, and meta tensors have only sizes "
                    f"({type(error).__name__}: {error}): measure this model where it has values "
                    "(device='cpu', or a GPU), a smaller one of the same kind if it is too large"
                ) from error
            sizes = [lane.size for lane in self._lanes]
            few = f"; sizes={sizes} were to be measured" if len(sizes) > 1 else ""
            size = f"a micro-batch of {sizes[lane]} samples"
            annotate(error, f"in {where}, profiled with {size}{few}")
            raise


def least_of(times: dict[int, list[float]]) -> dict[int, float]:
    """For each size the least time, and no more than for a larger one."""
    found = {size: min(row, default=0.0) for size, row in times.items()}
    for small, large in reversed(list(pairwise(sorted(found)))):
        found[small] = min(found[small], found[large])
    return found


def _agree(window: list[list[Visit]], sizes: list[int]) -> bool:
    """Whether the least times can be believed: another round comes near, fewer samples take no
    longer, and more samples not out of all proportion.
    """
    for visits in window:
        for what in ("forward", "backward"):
            rows = [sorted(getattr(visit, what))[:2] for visit in visits]
            if any(row[-1] > max(AGREE * row[0], row[0] + TINY) for row in rows):
                return False
            for (a, few), (b, many) in pairwise(zip((row[0] for row in rows), sizes, strict=True)):
                if a > max(AGREE * b, b + TINY) or b > OUT * many / few * a + TINY:
                    return False
    return True


def _needs_values(error: BaseException) -> bool:
    """Whether an error says that a tensor has no values."""
    if isinstance(error, NotImplementedError):
        return True
    return isinstance(error, RuntimeError) and "meta tensor" in str(error).lower()


def _window(device: torch.device) -> float:
    """Bytes of layers that are measured together on a device."""
    if device.type in ("cpu", "meta"):
        return WINDOW
    with suppress(AttributeError, RuntimeError):
        free: int = torch.get_device_module(device.type).mem_get_info(device)[0]
        return min(WINDOW, free / 8)
    return WINDOW
