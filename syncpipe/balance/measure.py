"""Measure or estimate what the layers of a model cost.

Training does not find the weights of a layer in the caches, but repeated runs of one layer would.
So layers are measured in rounds: all forward one after another, then all backward. Layers that
exceed the caches are split into windows, so a model may be larger than the device.

If several sizes of the micro-batch are measured, each size runs two rounds in a row and the second
counts, as successive micro-batches in training have one size. Another backward of the largest size,
to inputs alone, gives the weight half of zero-bubble schedules by difference. The fastest round
counts, as other load only makes times longer. Implausible times are measured again.
"""

from __future__ import annotations

import math
import operator
import os
import re
import statistics
import time as clock
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _push_mode

from syncpipe.balance.copies import copy_of_tensor, has_compiled, layer_label, runnable_copy
from syncpipe.balance.estimate import DEVICES, AsOnGPU, DeviceSpec, Roofline
from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.balance.stored import LiveMemory, StoredMemory, record_saved, size_of
from syncpipe.data.batch_classes import batch_kind, repeated_batch, samples_of
from syncpipe.data.batches import scatter, unwrapped
from syncpipe.data.trees import described, distinct, flatten, map_tensors, tensors_in, unflatten
from syncpipe.data.uncut import NoChunk
from syncpipe.layers.listing import Layers, as_sequential, on_meta
from syncpipe.layers.unpack import call_note, spread, unpacks
from syncpipe.layers.writes import may_write
from syncpipe.progress import progress_bar
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import go_back
from syncpipe.runtime.streams import AcceleratorStreams
from syncpipe.runtime.thread_state import restoring_thread
from syncpipe.runtime.weight_gradients import WeightGradients
from syncpipe.skip import verify_skippables
from syncpipe.skip.layout import inspect_layout
from syncpipe.skip.store import SkipKey, use_store
from syncpipe.state import restoring_settings
from syncpipe.storage import clones, renorming

__all__ = [
    "EFFICIENCY", "RESERVE", "estimated", "measure_memory", "profile", "resized", "samples_in",
    "stopwatch",
]  # fmt: skip

#: Number of sizes that are measured by default.
DEFAULT_SIZES = 4
#: The assumed part of a device's peak that matrix products reach.
EFFICIENCY = 0.5
#: Rounds of each window: minimum, but fewer after ``LATE_FACTOR`` timeouts, and maximum.
MIN_ROUNDS, MAX_ROUNDS, LATE_FACTOR = 3, 200, 5
#: Two rounds agree if the times of each layer differ at most by this factor or this many seconds;
#: up to this many more rounds are run until two agree.
AGREE, SLACK, EXTRA_ROUNDS = 1.2, 2e-5, 12
#: Largest plausible growth of a time with the size of the micro-batch, relative to proportional.
GROWTH = 4
#: A layer's time over the estimate for its operators, on a typical device, is at most this many
#: times the median of all layers.
MAX_RATE = 1000
CPU = DeviceSpec("a CPU", half=1e11, single=1e11, bandwidth=1e10, double=1e11)
GPU = DeviceSpec("a GPU", half=1e14, single=2e13, bandwidth=1e12, double=1e13)
#: Seconds that the mode takes to count an operator.
COUNTING = 1.5e-6
#: Bytes of layers that are measured together: several times the caches of processors and GPUs, and
#: at most an eighth of the free memory.
WINDOW = 256_000_000

#: The part of an accelerator's free memory that stays unused: for fragmentation of the caching
#: allocator, and for what libraries allocate at their first call.
RESERVE = 0.06

#: A function that takes a timestamp; the seconds between a later and an earlier one.
Watch = tuple[Callable[[], Any], Callable[[Any, Any], float]]


def profile(
    module: Layers,
    sample: Any,
    *,
    sizes: Iterable[int] | None = None,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
    threads: int | None = None,
    time: bool = True,
    progress: bool | None = None,
) -> Profile:
    """Measure how long each layer takes, forward and backward, and how much memory it needs.

    Copies of the layers run in train mode on their real inputs, skips included. The model, its
    gradients and the random generators stay as they are; side effects of hooks on other objects
    remain. Time is that of the device, memory what autograd saves. On ``meta`` only sizes are
    counted: all times are 0, and any model fits into memory.

    Args:
        module: the model, as for ``Pipe``; its layers may be on several devices.
        sample: a mini-batch, as the input of a pipe; it is moved to the layers' devices.
        sizes: micro-batch sizes to measure, in samples, each a part of the sample. Default: the
            sample's own, a half, a quarter and an eighth of it, but at least 2.
        timeout: total seconds to measure; slow layers are run one to three times anyway.
        device: where the copies go, one by one, so that the model may be larger than the device.
            Default: where each layer is, or the sample.
        threads: intra-op threads of a CPU worker; default: those of the calling thread.
        time: False measures sizes only, which takes one forward of each layer.
        progress: show a tqdm bar; default: in a terminal, if it takes over a second.

    Raises:
        TypeError, ValueError: as ``Pipe`` for the module; an argument is invalid; a layer cannot be
            copied.
        RuntimeError: a layer on ``meta`` needs the values of tensors.
    """
    if not (isinstance(timeout, (int, float)) and timeout >= 0):
        raise ValueError(f"timeout={timeout!r}: give the seconds to measure for, 0 or more")
    if threads is not None and operator.index(threads) < 1:
        raise ValueError(f"threads={threads}: must be at least 1")
    seconds = timeout if time else None
    return _Profiler(module, sample, sizes, seconds, device).run(progress, threads)


def estimated(
    module: Layers,
    sample: Any,
    *,
    on: str | DeviceSpec,
    efficiency: float = EFFICIENCY,
    sizes: Iterable[int] | None = None,
    progress: bool | None = None,
) -> Profile:
    """Estimate what :func:`profile` would measure on a device that is not available.

    The layers run on ``meta``. Stored memory is counted as a GPU would store it. The duration of
    each operator is estimated from the data sheet of the device: the longer of its arithmetic and
    its memory traffic::

        profile = estimated(model, torch.empty(16, 2048, device="meta", dtype=int), on="A100-80GB")
        plan = syncpipe.plan(profile, devices="8 x 80GB, 300GB/s", batch_size=256)

    For training in ``bfloat16`` pass a model in ``bfloat16``. The backward of a custom
    ``autograd.Function`` must work without values.

    Args:
        on: a name in ``syncpipe.balance.DEVICES``, or a :class:`~syncpipe.balance.DeviceSpec`.
        efficiency: the part of the peak that matrix products reach. Large models reach about a half
            in published training runs (Narayanan et al. 2021: 44 to 52 % on A100; Chowdhery et al.
            2022: 46 %). Memory traffic is assumed at its peak.
        module, sample, sizes, progress: as for :func:`profile`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`profile` on ``meta``; ``on`` is unknown, or
            ``efficiency`` is not in (0, 1].
    """
    spec = on if isinstance(on, DeviceSpec) else DEVICES.get(on)
    if spec is None:
        raise ValueError(
            f"on={on!r} is unknown; known are {', '.join(DEVICES)}. For another device give "
            "its figures: on=syncpipe.balance.DeviceSpec(name, half=..., single=..., bandwidth=...)"
        )
    if isinstance(efficiency, bool) or not 0 < efficiency <= 1:
        raise ValueError(f"efficiency={efficiency!r}: must be above 0 and at most 1")
    roofline = Roofline(spec, efficiency)
    found = _Profiler(module, sample, sizes, 0.0, "meta", roofline).run(progress)
    words = f"{spec.name}, {100 * efficiency:.3g} % of its peak"
    return replace(found, device=words, source="estimated")


def _profiling_devices(
    module: nn.Module, sample: Any, device: torch.device | str | int | None
) -> tuple[torch.device | None, torch.device, list[torch.device]]:
    """The device for all layers (None: where each is), of the sample, and all devices used."""
    given = tensors_in(unwrapped(sample)[0])
    tensors = [*module.parameters(), *module.buffers(), *given]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise ValueError(
            "fake tensors (FakeTensorMode) cannot be measured: create model and sample on meta, "
            "with torch.device('meta'):, to count sizes without memory"
        )
    target = torch.device("meta") if any(tensor.is_meta for tensor in tensors) else None
    if device is not None:
        try:
            target = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ValueError(f"device={device!r} cannot be used here: {error}") from error
    if any(tensor.is_meta for tensor in given) and target != torch.device("meta"):
        raise ValueError(
            f"device={device!r}, but the sample is on meta, without values: leave device out to "
            "measure sizes, or create the sample elsewhere to measure time"
        )
    default = target or next((tensor.device for tensor in given), torch.device("cpu"))
    used = [target] if target else [tensor.device for tensor in tensors]
    return target, default, list(dict.fromkeys(used))


def samples_in(sample: Any) -> int:
    """The length of the first tensor that is split into micro-batches; 1 without one."""
    scatter(sample, 1)  # rejects what a pipe rejects
    _, samples = unwrapped(sample)
    if samples == 0:
        raise ValueError("the sample is empty: its dimension 0 has length 0")
    return samples


def _checked_sizes(samples: int, sizes: Iterable[int] | None) -> list[int]:
    """The sizes of micro-batches to measure, ascending."""
    if sizes is None:
        halves = [samples >> k for k in range(DEFAULT_SIZES)]
        return sorted({size for size in halves if size >= 2} | {samples})
    if isinstance(sizes, int):
        raise TypeError(f"sizes={sizes}: give a list of sizes, [{sizes}]")
    chosen = sorted({operator.index(size) for size in sizes})
    if not chosen or not 1 <= chosen[0] <= chosen[-1] <= samples:
        raise ValueError(
            f"sizes={chosen}: must be from 1 to the {samples} of the sample; give a larger sample "
            "for larger micro-batches"
        )
    return chosen


def resized(sample: Any, size: int, device: torch.device | None = None) -> Any:
    """``size`` samples of another batch, repeated if need be, in newly allocated memory."""
    (leaves, spec), (_, samples) = flatten(sample, batches=True), unwrapped(sample)
    made: dict[int, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, NoChunk):
            made[id(leaf)] = NoChunk(copy_of_tensor(leaf.tensor, device))
        elif isinstance(leaf, Tensor) and leaf.dim():
            length, rest = divmod(len(leaf) * size, samples)
            if rest:
                raise ValueError(
                    f"{size} of {samples} samples are not a whole number of rows of "
                    f"{described(leaf)}: use tensors of one length, or other sizes"
                )
            rows = torch.arange(length, device=leaf.device) % max(1, len(leaf))
            part = leaf.detach()[rows].to(device or leaf.device)
            made[id(leaf)] = part.requires_grad_(leaf.requires_grad)
        elif batch_kind(leaf):
            own = repeated_batch(leaf, size * (samples_of(leaf) or 0) // samples)
            made[id(leaf)] = map_tensors(lambda ts: [copy_of_tensor(t, device) for t in ts], own)
    return unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)


# --- one layer, and one size of the micro-batch -------------------------------------------------


def stopwatch(device: torch.device) -> Watch:
    """A watch for a device: its own events, or the clock on the CPU."""
    if device.type in ("cpu", "meta"):
        return clock.perf_counter, operator.sub

    streams = AcceleratorStreams(device)

    def between(end: Any, start: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return (lambda: streams.stamp(streams.current())), between


def measure_memory(device: torch.device) -> float:
    """Bytes that can be allocated on a device now.

    On an accelerator free memory and the unused part of this process's caching allocator, less
    ``RESERVE``; on the CPU what the operating system reports as available.

    Raises:
        ValueError: it is unknown.
    """
    try:
        if device.type == "cpu":
            text = Path("/proc/meminfo").read_text()
            return 1024.0 * int(re.findall(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)[0])
        module = torch.get_device_module(device.type)
        free = module.mem_get_info(device)[0]
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return float((free + unused) * (1 - RESERVE))
    except (LookupError, AttributeError, OSError, RuntimeError) as error:
        raise ValueError(
            f"the free memory of {device} is unknown ({error}): give it, for example memory='16GB'"
        ) from error


@dataclass(eq=False)
class LayerRun:
    """One layer with its input of one size of the micro-batch, to be run repeatedly."""

    name: str  # for error messages, as size
    size: str
    layer: nn.Module
    inputs: tuple[Any, list[Any]]  # the output of the previous layer, and skips
    popped: list[SkipKey]
    device: torch.device
    unpack: bool
    watch: Watch
    forward: list[float] = field(default_factory=list)  # seconds of each round
    backward: list[float] = field(default_factory=list)
    to_inputs: list[float] = field(default_factory=list)  # backward without parameters
    likely: float = 0.0  # estimated seconds of forward and backward; 0 if unknown
    _marks: list[Any] = field(default_factory=list)
    _graph: tuple[list[Tensor], list[Tensor]] = ([], [])

    @property
    def roots(self) -> list[Tensor]:
        """The tensors from which backward starts."""
        return self._graph[0]

    def copied_inputs(self) -> tuple[Any, list[Tensor]]:
        """Copies of the inputs, which a layer may overwrite; and the leaves where backward ends.

        These are the copies and the layer's own parameters. Other parameters that a layer reaches,
        for example through a closure, are left alone.
        """
        leaves = map_tensors(_leaves, self.inputs)
        ends = (*self.layer.parameters(), *tensors_in(leaves))
        return map_tensors(clones, leaves), [tensor for tensor in ends if tensor.requires_grad]

    def call(self, inputs: Any) -> tuple[Any, dict[SkipKey, Any]]:
        """Run the layer; returns its output and the skips that it stashes."""
        value, popped = inputs
        call: Any = partial(spread, self.layer) if self.unpack else self.layer
        skips = dict(zip(self.popped, popped, strict=True))
        with self._on_device(), use_store(skips) as store:
            try:
                return call(value), store
            except TypeError as error:
                if note := call_note(error, self.layer, value, unpack=self.unpack):
                    annotate(error, note)
                raise

    def run_forward(self, given: Any = None) -> tuple[Any, dict[Any, Any]]:
        """Run the layer on ``given``, or on fresh copies; returns what :meth:`call` does."""
        # Its input has just been written, so it is in the caches, unlike the weights.
        inputs, leaves = given or self.copied_inputs()
        start = self.watch[0]()
        output, store = self.call(inputs)
        self._marks = [start, self.watch[0]()]
        made = distinct((output, list(store.values())))
        self._graph = [tensor for tensor in made if tensor.requires_grad], leaves
        return output, store

    def run_backward(self, *, weights: bool = True, go_back: Callable[..., None] = go_back) -> None:
        """Run backward after :meth:`run_forward`; without ``weights`` to the inputs alone."""
        (roots, leaves), self._graph = self._graph, ([], [])
        own = set() if weights else set(map(id, self.layer.parameters()))
        leaves = [leaf for leaf in leaves if id(leaf) not in own]
        with self._on_device():
            grads = list(map(torch.ones_like, roots))
            self._marks.append(self.watch[0]())
            if roots and leaves:
                go_back(roots, grads, leaves)
            self._marks.append(self.watch[0]())

    def record_times(self, *, weights: bool) -> None:
        start, middle, back, end = self._marks
        self.forward.append(self.watch[1](middle, start))
        (self.backward if weights else self.to_inputs).append(self.watch[1](end, back))

    def weight_share(self) -> float | None:
        """The part of backward that is for parameters; None if unknown."""
        if not any(parameter.requires_grad for parameter in self.layer.parameters()):
            return 0.0
        whole = min(self.backward)
        return min(1.0, max(0.0, 1 - min(self.to_inputs) / whole)) if whole else None

    def interpreter_seconds(self, until: float) -> float:
        """Seconds of Python in one forward of the layer: the minimum of some runs.

        Operators release CPython's lock while they work or launch kernels. The rest is Python,
        which one process runs one thread at a time, however many devices there are. It is CPU time,
        as a sleeping thread does not hold the lock. Autograd's engine mostly runs without the lock.
        """
        found: list[float] = []
        while len(found) < MIN_ROUNDS and not has_compiled(self.layer):
            found.append(restoring_thread(partial(self._python_seconds, self.copied_inputs()[0])))
            if clock.monotonic() > until:
                break
        return min(found, default=0.0)

    def _python_seconds(self, inputs: Any) -> float:
        operators = _Operators()
        _push_mode(operators)  # type: ignore[no-untyped-call]  # Ctrl-C may come in its __exit__
        start = clock.thread_time()
        self.call(inputs)
        return max(0.0, clock.thread_time() - start - operators.seconds)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the layer's device current, as in a pipe; add the layer to exceptions."""
        index = None if self.device.type == "cpu" else self.device.index
        try:
            with torch.accelerator.device_index(index):
                yield
        except BaseException as error:
            needs_values = isinstance(error, NotImplementedError) or (
                isinstance(error, RuntimeError) and "meta tensor" in str(error).lower()
            )
            if self.device.type == "meta" and needs_values:
                raise RuntimeError(
                    f"{self.name} needs the values of its tensors, and meta has only sizes "
                    f"({type(error).__name__}: {error}): measure this model, or a smaller one of "
                    "its kind, on a device with values (device='cpu', or a GPU)"
                ) from error
            annotate(error, f"in {self.name}, profiled with {self.size}")
            raise


#: For each layer of a window its runs, one for each size of the micro-batch.
_Window = list[list[LayerRun]]


class _Operators(TorchFunctionMode):
    """Measures the seconds inside operators, and those of counting them."""

    seconds = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = clock.thread_time()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds += clock.thread_time() - start + COUNTING


def _leaves(tensors: list[Tensor], device: torch.device | None = None) -> list[Tensor]:
    """The tensors without their graph; a tensor that occurs twice stays one."""
    made = {
        id(tensor): tensor.detach().to(device or tensor.device).requires_grad_(tensor.requires_grad)
        for tensor in tensors
    }
    return [made[id(tensor)] for tensor in tensors]


def _run_round(runs: tuple[LayerRun, ...], *, weights: bool = True, counts: bool = True) -> None:
    """Run layers forward, then backward; ``counts`` stores the times."""
    for run in runs:
        run.run_forward()
    for run in reversed(runs):
        run.run_backward(weights=weights)
    for run in runs if counts else ():
        run.record_times(weights=weights)


# --- all layers ---------------------------------------------------------------------------------


class _Profiler:
    """Takes micro-batches from layer to layer; with a roofline once, with estimated times."""

    def __init__(
        self,
        module: Layers,
        sample: Any,
        sizes: Iterable[int] | None,
        seconds: float | None,  # None: sizes only
        device: torch.device | str | int | None,
        roofline: Roofline | None = None,
    ) -> None:
        module = as_sequential(module)
        known = on_meta(module)
        verify_skippables(known)
        if not len(module):
            raise ValueError("module has no layers to measure")
        self._sample, self._roofline = sample, roofline
        self._sizes = _checked_sizes(samples_in(sample), sizes)
        self._device, self._default, self._devices = _profiling_devices(module, sample, device)
        # Not named_children(), which skips repeated layers.
        self._layers = [(k, layer) for k, layer in known._modules.items() if layer is not None]
        self._originals, self._unpack = list(module), unpacks(module)
        self._layout = inspect_layout([[layer] for _, layer in self._layers])
        meta = self._default.type == "meta" and roofline is None
        self._timed, self._seconds = seconds is not None and not meta, seconds or 0.0
        #: For each size the input of the next layer (leaves, which require a gradient as in
        #: training), pending skips, and what the layers store.
        self._inputs: dict[int, Any] = {}
        self._skips: dict[int, dict[SkipKey, Any]] = {size: {} for size in self._sizes}
        self._memory = {size: StoredMemory() for size in self._sizes}
        self._found_skips: list[SkipProfile] = []
        #: For each parameter and buffer: first layer, bytes, whether it is trained, other layers.
        self._owners: dict[int, tuple[int, int, bool, list[int]]] = {}
        #: For each layer at the largest size: plausible seconds, estimated ones, median of rounds.
        self._rounds: list[tuple[float, float, float]] = []
        self._rates: list[float] = []

    def run(self, progress: bool | None, threads: int | None = None) -> Profile:
        """Measure, and restore random states and settings."""

        def run() -> Profile:
            with AsOnGPU() if self._default.type == "meta" else nullcontext(), gpu or nullcontext():
                return self._run(bar)

        gpu, real = self._roofline, [device for device in self._devices if device.type != "meta"]
        with progress_bar("profile", "layer", len(self._layers), delay=1.0, shown=progress) as bar:
            found = restoring_settings(run, real, threads)
        names = [
            f"{x} ({torch.cuda.get_device_name(x)})" if x.type == "cuda" else str(x)
            for x in self._devices
        ]
        for kind in {x.type for x in self._devices} - {"meta"}:
            if torch.is_autocast_enabled(kind):
                names.append(f"in autocast to {torch.get_autocast_dtype(kind)}")
        return replace(found, device=", ".join(names) or "cpu")

    def _run(self, bar: Any) -> Profile:
        self._deadline = clock.monotonic() + self._seconds
        for size in self._sizes:
            self._inputs[size], _ = unwrapped(resized(self._sample, size, self._device))
        given = {size: size_of(value) for size, value in self._inputs.items()}
        found: list[dict[str, Any]] = []  # arguments of each LayerProfile
        window: _Window = []
        held, most = 0, float(WINDOW)
        with suppress(ValueError):
            most = min(most, measure_memory(self._default) / 8)
        for index in range(len(self._layers)):
            numbers, runs = self._observe_layer(index)
            found.append(numbers)
            window.append(runs)
            held += numbers["parameter_bytes"] + numbers["buffer_bytes"]
            held += sum(memory.last for memory in self._memory.values())
            if held >= most or index == len(self._layers) - 1:
                self._time_window(window, found[-len(window) :], len(self._layers) - index - 1)
                window, held = [], 0
            bar.update()
        for size, memory in self._memory.items():  # at the end, as layers share with earlier ones
            for numbers, (stored, shared) in zip(found, memory.by_layer(), strict=True):
                numbers.setdefault("stored_bytes", {})[size] = stored
                numbers.setdefault("shared_bytes", {})[size] = shared
        layers = tuple(LayerProfile(**numbers) for numbers in found)
        ties = (
            (owner, tuple(dict.fromkeys(others)), size, size * trained)
            for owner, size, trained, others in self._owners.values()
            if others
        )
        made = Profile(layers, tuple(self._found_skips), given, source="sizes", ties=tuple(ties))
        if not self._timed:
            return made
        most = MAX_RATE * _median_rate(self._rates)
        least = math.fsum(min(x, most * y) if y else x for x, y, _ in self._rounds)
        median = math.fsum(time for *_, time in self._rounds)
        spread = max(0.0, median / least - 1) if least else 0.0
        return replace(made, source="measured", spread=spread, load_average=os.getloadavg()[0])

    def _observe_layer(self, index: int) -> tuple[dict[str, Any], list[LayerRun]]:
        """Everything about a layer but its times; and its runs, for measuring these."""
        name, layer = self._layers[index]
        popped, stashed = self._layout.incoming[index], self._layout.outgoing[index]
        made = runnable_copy(name, self._originals[index], self._device, self._default)
        own = next((t.device for t in chain(made.parameters(), made.buffers())), None)
        note = f"; sizes={self._sizes} are measured" if len(self._sizes) > 1 else ""
        runs, peaks = [], list[dict[str, int] | None]()
        for size, value in self._inputs.items():
            inputs = (value, [self._skips[size].pop(key, None) for key in popped])
            given = [tensor.device for tensor in tensors_in(inputs)]
            device = self._device or own or next(iter(given), torch.device("cpu"))
            inputs = map_tensors(partial(_leaves, device=self._device or own), inputs)
            labels = layer_label(name, layer), f"a micro-batch of {size} samples{note}"
            watch = self._roofline.watch if self._roofline else stopwatch(device)
            runs.append(LayerRun(*labels, made, inputs, [*popped], device, self._unpack, watch))
            peaks.append(self._observe_run(size, runs[-1], stashed))
        for k, (key, stash) in enumerate(popped.items()):
            bytes = [size_of(run.inputs[1][k]) for run in runs]
            of = dict(zip(self._sizes, bytes, strict=True))
            self._found_skips.append(SkipProfile(key[1], stash, index, of))
        numbers: dict[str, Any] = {"name": name, **self._own_bytes(index, layer, made)}
        numbers["may_write"] = may_write(layer for _, layer in self._layers[index:])
        numbers["renorms"] = bool(renorming(layer))
        numbers["output_bytes"] = {size: size_of(value) for size, value in self._inputs.items()}
        for n, each in zip(self._sizes, peaks, strict=True):
            for what, value in each.items() if each and None not in peaks else ():
                numbers.setdefault(what, {})[n] = value
        return numbers, runs

    def _observe_run(
        self, size: int, run: LayerRun, stashed: Iterable[SkipKey]
    ) -> dict[str, int] | None:
        """Run a layer for the first time, and pass on its outputs.

        Returns bytes by the names of :class:`LayerProfile`, or None if torch.compile hides them.
        """
        layer = run.layer
        live: LiveMemory | None = None
        likely: Roofline | None = None
        if not has_compiled(layer):
            live = LiveMemory()
            if self._timed and self._roofline is None:
                likely = Roofline(CPU if run.device.type == "cpu" else GPU, 1.0, exact=False)
        inputs, leaves = run.copied_inputs()
        copies = tensors_in(inputs)
        with live or nullcontext(), likely or nullcontext():
            if live is not None:
                live.watch(copies)
            (output, store), saved = record_saved(lambda: run.run_forward((inputs, leaves)))
        own = [*layer.parameters(), *layer.buffers()]  # after lazy layers have got theirs
        skips = self._skips[size]
        skips.update((key, map_tensors(_leaves, store.get(key))) for key in stashed)
        passed_on = tensors_in((output, list(skips.values())))
        given = tensors_in(run.inputs)
        passing = self._memory[size].add(given, copies, saved(), passed_on, own)
        self._inputs[size] = map_tensors(_leaves, output)
        for parameter in layer.parameters():
            if parameter.requires_grad:  # as from the second micro-batch on
                parameter.grad = torch.zeros_like(parameter)
        forward = 0
        if live is not None:
            live.exclude(own)
            forward = live.most - passing
            live.exclude(p.grad for p in own if p.grad is not None)
            live.restart_with(saved())
        del output, store, passed_on
        split = live is not None and WeightGradients().splits(run.roots)
        with self._may_fail(), live or nullcontext(), likely or nullcontext():
            run.run_backward()
        run.likely = max(likely.seconds, GPU.launch) if likely else 0.0
        if live is None:
            return None
        most = live.most
        found = {"forward_peak_bytes": forward, "backward_peak_bytes": most}
        found |= {"input_peak_bytes": most, "halves_bytes": 0, "weight_peak_bytes": 0}
        with self._may_fail():
            found |= self._observe_halves(run, live) if split else {}
        return found

    def _may_fail(self) -> AbstractContextManager[None]:
        """Without timing, backward may fail."""
        return nullcontext() if self._timed else suppress(Exception)

    def _observe_halves(self, run: LayerRun, live: LiveMemory) -> dict[str, int]:
        """Run a layer once more, backward in two halves."""
        gradients, (_, saved) = WeightGradients(), record_saved(lambda: run.run_forward() and None)
        live.restart_with(saved())
        with live:
            run.run_backward(go_back=gradients.go_back)
            most, halves = live.most, live.alive
            live.most = halves
            gradients.accumulate()
        names = ("input_peak_bytes", "halves_bytes", "weight_peak_bytes")
        return dict(zip(names, (most, halves, live.most), strict=True))

    def _own_bytes(self, index: int, layer: nn.Module, made: nn.Module) -> dict[str, int]:
        """Bytes of parameters and buffers; those of an earlier layer count there."""
        bytes = {"parameter_bytes": 0, "frozen_bytes": 0, "buffer_bytes": 0}
        originals = dict(chain(layer.named_parameters(), layer.named_buffers()))
        parameters = dict(made.named_parameters())
        for name, tensor in chain(parameters.items(), made.named_buffers()):
            original = id(originals.get(name, tensor))
            if is_lazy(tensor):
                continue
            size = tensor.numel() * tensor.element_size()
            if name in originals:
                known = self._owners.setdefault(original, (index, size, tensor.requires_grad, []))
                if known[0] != index:
                    known[-1].append(index)
                    continue
            bytes["parameter_bytes" if name in parameters else "buffer_bytes"] += size
            if name in parameters and not tensor.requires_grad:
                bytes["frozen_bytes"] += size
        return bytes

    def _time_window(self, window: _Window, found: list[dict[str, Any]], later: int) -> None:
        """Measure the layers of a window in their share of the time, and store their times."""
        if self._timed:
            begin = clock.monotonic()
            share = (self._deadline - begin) / (len(window) + later)
            for k, runs in enumerate(window if self._roofline is None else ()):
                found[k]["interpreter"] = runs[0].interpreter_seconds(begin + share * (k + 1) / 4)
            self._run_rounds(window, begin + share * len(window))
            self._rates += _rates(window)
        for numbers, runs in zip(found, window, strict=True):
            plausible = median = 0.0
            for what in ("forward", "backward"):
                times = [getattr(run, what) for run in runs]
                found_least = [min(row, default=0.0) for row in reversed(times)]
                least = [*accumulate(found_least, min)][::-1]  # fewer samples are never slower
                numbers[what] = dict(zip(self._sizes, least, strict=True))
                if self._timed:  # fewer samples bound the time of more
                    grown = GROWTH * self._sizes[-1]
                    most = [grown / n * x + SLACK for n, x in numbers[what].items()]
                    plausible += min(least[-1], *most)
                    median += statistics.median(times[-1])
            if self._timed:
                self._rounds.append((plausible, runs[-1].likely, median))
                numbers["weight_share"] = runs[-1].weight_share()

    def _run_rounds(self, window: _Window, until: float) -> None:
        """Run rounds until the time is up and the times are plausible."""
        by_size = list(zip(*window, strict=True))
        for done in range(MAX_ROUNDS):
            now = clock.monotonic()
            late = now > self._deadline + LATE_FACTOR * self._seconds
            extra = done - MIN_ROUNDS
            enough = extra >= EXTRA_ROUNDS or (extra >= 0 and self._rounds_agree(window))
            if now > until and (enough or (late and done >= 1)):
                break
            for runs in by_size:
                # Successive micro-batches have one size; another one leaves other caches.
                if len(by_size) > 1 and not late:
                    _run_round(runs, counts=False)
                _run_round(runs)
            _run_round(by_size[-1], weights=False)

    def _rounds_agree(self, window: _Window) -> bool:
        """Whether a second round is close to each minimum, and times are plausible: they grow with
        the size, and no layer takes much longer than others for its work.
        """
        rates = _rates(window)
        if max(rates, default=0.0) > MAX_RATE * _median_rate([*self._rates, *rates]):
            return False
        for runs in window:
            for what in ("forward", "backward"):
                rows = [sorted(getattr(run, what))[:2] for run in runs]
                if any(row[-1] > max(AGREE * row[0], row[0] + SLACK) for row in rows):
                    return False
                for (few, (a, *_)), (many, (b, *_)) in pairwise(
                    zip(self._sizes, rows, strict=True)
                ):
                    if a > max(AGREE * b, b + SLACK) or b > GROWTH * many / few * a + SLACK:
                        return False
        return True


def _rates(window: _Window) -> list[float]:
    """Measured over estimated time of the layers, where it is known."""
    largest = [runs[-1] for runs in window if runs[-1].likely]
    return [(min(run.forward) + min(run.backward)) / run.likely for run in largest]


def _median_rate(rates: list[float]) -> float:
    """The median; infinite if unknown."""
    return (statistics.median(rates) if rates else 0.0) or math.inf
