"""Measures what the layers of a model cost, on copies of them: :func:`profile`."""

from __future__ import annotations

import operator
import statistics
import sys
import time as clock
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.balance.rounds import Progress, stopwatch
from syncpipe.balance.sandbox import (
    Place,
    compiled,
    copy_of_tensor,
    described_layer,
    layer_to_run,
    place_of,
    sandboxed,
)
from syncpipe.balance.stored import size_of
from syncpipe.layers.building import on_meta
from syncpipe.layers.listing import Layers, as_sequential
from syncpipe.layers.unpack import unpacks
from syncpipe.microbatch import NoChunk, scatter
from syncpipe.runtime.errors import annotate
from syncpipe.skip import verify_skippables
from syncpipe.skip.namespace import SkipKey
from syncpipe.skip.walk import layer_skips
from syncpipe.tree import described, flatten, tensors_in, unflatten

__all__ = ["profile", "samples_in"]

#: Rounds of each layer: at least so many, however long they take, and at most so many.
LEAST, MOST = 3, 200
#: Once all has taken so many times the timeout, one round is enough.
PATIENCE = 5
#: Micro-batches are measured at so many sizes if nobody names them.
SIZES = 4


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
    """Measures how long each layer takes, forward and backward, and how much memory it needs.

    Each layer runs in train mode on its real input, what the layers before it made of the sample,
    skips included. It is a copy of the layer that runs, one layer after another: the model, its
    gradients and the random generators are afterwards as they were, come what may. (Hooks of the
    layers run as well. What a function, such as a hook, does to objects elsewhere stays done.)
    Specs are built one after another, likewise, and layers on ``meta`` get memory if ``device``
    is a real one.

    Time is that of the device on accelerators, and that of the clock on the CPU, for the number of
    intra-op threads that the calling thread has or for ``threads``; the median over the rounds.
    What a layer stores for backward is what autograd saves; see :mod:`syncpipe.balance.stored` for
    what layers share and how stages add up. Under autocast the casts of the parameters count.

    On ``meta``, or if the model was made under ``FakeTensorMode``, there are sizes only: all
    times are 0, and no memory is taken, however large the model.

    Args:
        module: the model, as for ``Pipe``; its layers may be on several devices.
        sample: a mini-batch, as one would give it to a pipe: a tensor, or any pytree with
            ``NoChunk`` where need be. It goes where the layers are.
        sizes: of the micro-batches to measure, in samples; each is a part of the sample. Default:
            the sample's own, a half, a quarter and an eighth of it, but no less than 2.
        timeout: seconds to measure for, in all. Slow layers are run 3 times nevertheless, or at
            the very least once, after once to warm up.
        device: where to measure; the copies of the layers go there one by one, so that the model
            may be larger than the device. ``"meta"`` measures sizes of a real model. Default:
            where each layer is; of a spec, where the sample is.
        threads: how many intra-op threads a CPU worker will have.
        time: False measures sizes only, which takes one forward of each layer.
        progress: show a progress bar (it needs tqdm); None: if tqdm is there, stderr is a terminal,
            and it takes longer than a second.

    Returns:
        The profile. ``device`` says where it was measured, ``"meta"`` or ``"fake cpu"`` for sizes.

    Raises:
        TypeError, ValueError: as ``Pipe`` does for the module; for arguments that make no sense;
            for a layer that cannot be copied.
        RuntimeError: a layer asks for values where there are sizes only.
        ImportError: ``progress=True`` without tqdm.

    An exception in a layer comes as itself, with a note that names the layer.
    """
    module = as_sequential(module)
    known = on_meta(module)
    verify_skippables(known)
    if not len(module):
        raise ValueError("module has no layers to measure")
    if not (isinstance(timeout, (int, float)) and timeout >= 0):
        raise ValueError(f"timeout={timeout!r}: give the seconds to measure for, 0 or more")
    if threads is not None and operator.index(threads) < 1:
        raise ValueError(f"threads={threads}: a layer needs at least one")
    samples = samples_in(sample)
    chosen = _sizes(samples, sizes)
    place = place_of(module, sample, device)
    bar = _bar(progress, len(module))
    deadline = clock.monotonic() + timeout

    def run() -> Profile:
        with place.mode:
            lanes = [
                Progress(
                    size, _cut(sample, samples, size, place), len(module), unpack=unpacks(module)
                )
                for size in chosen
            ]
            until = deadline if time else None
            return _Profiler(module, known, lanes, place, until, timeout, bar).run()

    try:
        return sandboxed(run, place.used, threads)
    finally:
        if bar is not None:
            bar.close()


def samples_in(sample: Any) -> int:
    """The length of the first tensor that is cut into micro-batches; 1 if there is none.

    Raises:
        ValueError: a tensor that cannot be cut, or one of length 0.
    """
    scatter(sample, 1)  # refuses what a pipe refuses
    cut = [leaf for leaf in flatten(sample)[0] if isinstance(leaf, Tensor)]
    samples = len(cut[0]) if cut else 1
    if samples == 0:
        raise ValueError("the sample has no samples in it: dimension 0 has length 0")
    return samples


def _sizes(samples: int, sizes: Iterable[int] | None) -> list[int]:
    """The sizes of micro-batches to measure, ascending."""
    if sizes is None:
        halves = [samples >> k for k in range(SIZES)]
        return sorted({size for size in halves if size >= 2} | {samples})
    if isinstance(sizes, int):
        raise TypeError(f"sizes={sizes}: give a list of sizes, [{sizes}]")
    chosen = sorted({operator.index(size) for size in sizes})
    if not chosen or not all(1 <= size <= samples for size in chosen):
        raise ValueError(
            f"sizes={chosen}: a micro-batch has at least 1 sample, and no more than the sample, "
            f"which has {samples}; give a larger sample for larger micro-batches"
        )
    return chosen


def _cut(sample: Any, samples: int, size: int, place: Place) -> Any:
    """The first part of the sample, in memory of its own: what is cut off does not count."""
    leaves, spec = flatten(sample)
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            length, rest = divmod(len(leaf) * size, samples)
            if rest:
                raise ValueError(
                    f"{size} of {samples} samples are no whole number of rows of {described(leaf)} "
                    "in the sample: give all its tensors one length in dimension 0, or name other "
                    "sizes"
                )
            made[id(leaf)] = _put(leaf, place)[:length].detach().clone()
            made[id(leaf)].requires_grad_(leaf.requires_grad)
        elif isinstance(leaf, NoChunk):
            made[id(leaf)] = copy_of_tensor(_put(leaf.tensor, place), None)
    return unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)


def _put(tensor: Tensor, place: Place) -> Tensor:
    """A tensor of the sample where it is measured."""
    if isinstance(place.mode, FakeTensorMode) and not isinstance(tensor, FakeTensor):
        tensor = place.mode.from_tensor(tensor)
    return tensor if place.device is None else tensor.to(place.device)


class _Profiler:
    """Takes the lanes from layer to layer."""

    def __init__(
        self,
        module: nn.Sequential,
        known: nn.Sequential,
        lanes: list[Progress],
        place: Place,
        deadline: float | None,
        timeout: float,
        bar: Any,
    ) -> None:
        self._layers = list(known._modules.items())
        self._given = list(module)  # the same, but for specs
        self._lanes = lanes
        self._place = place
        tensors = tensors_in(lanes[0].value)
        self._home = place.device or (tensors[0].device if tensors else torch.device("cpu"))
        self._deadline = None if place.fake else deadline
        self._timeout = timeout
        self._bar = bar
        self._counted: set[int] = set()  # parameters and buffers
        self._stashed_by: dict[SkipKey, int] = {}
        self._interpreter = 0.0

    def run(self) -> Profile:
        given = {lane.size: size_of(lane.value) for lane in self._lanes}
        measured: list[dict[str, Any]] = []
        skips: list[SkipProfile] = []
        for index, (name, layer) in enumerate(self._layers):
            assert layer is not None
            measured.append(self._measure(index, name, layer))
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
        return Profile(layers, tuple(skips), given, self._place.words)

    def _measure(self, index: int, name: str, layer: nn.Module) -> dict[str, Any]:
        exchanged = layer_skips(layer)
        self._stashed_by.update(dict.fromkeys(exchanged.stashed, index))
        made = layer_to_run(name, self._given[index], self._place, self._home)
        home = next((t.device for t in chain(made.parameters(), made.buffers())), None)
        home = self._place.device or home
        size = 0
        try:
            for lane in self._lanes:
                size = lane.size
                lane.give(exchanged.popped, home)
                lane.observe(index, made, exchanged.stashed, back=self._deadline is not None)
            if self._deadline is not None:
                self._rounds(index, made)
        except BaseException as error:
            self._explain(error, described_layer(name, layer), size)
            raise
        numbers = {"name": name, **self._own_bytes(layer, made)}
        numbers["output_bytes"] = {lane.size: size_of(lane.value) for lane in self._lanes}
        for what in ("forward", "backward"):
            times = {lane.size: getattr(lane, what) for lane in self._lanes}
            numbers[what] = {n: statistics.median(row) if row else 0.0 for n, row in times.items()}
        numbers["interpreter"] = self._interpreter
        for lane in self._lanes:
            lane.forget()
        return numbers

    def _rounds(self, index: int, layer: nn.Module) -> None:
        """Measures a layer for its share of the time that is left, its Python first."""
        assert self._deadline is not None
        mark, between = stopwatch(self._lanes[0].device)
        begin = clock.monotonic()
        until = begin + (self._deadline - begin) / (len(self._layers) - index)
        held: list[float] = []
        while len(held) < LEAST and clock.monotonic() < until and not compiled(layer):
            held.append(self._lanes[0].python(layer))
        self._interpreter = min(held, default=0.0)
        for done in range(MOST):
            now = clock.monotonic()
            late = now > self._deadline + PATIENCE * self._timeout
            if now > until and done >= (1 if late else LEAST):
                break
            for lane in self._lanes:
                lane.round(layer, mark, between)

    def _own_bytes(self, layer: nn.Module, made: nn.Module) -> dict[str, int]:
        """Bytes of parameters and buffers; what an earlier layer shares is counted there."""
        bytes = {"parameter_bytes": 0, "frozen_bytes": 0, "buffer_bytes": 0}
        originals = dict(chain(layer.named_parameters(), layer.named_buffers()))
        for kind, named in (
            ("parameter_bytes", made.named_parameters()),
            ("buffer_bytes", made.named_buffers()),
        ):
            for name, tensor in named:
                original = id(originals.get(name, tensor))
                if original in self._counted or is_lazy(tensor):
                    continue
                if name in originals:
                    self._counted.add(original)
                bytes[kind] += tensor.numel() * tensor.element_size()
                if kind == "parameter_bytes" and not tensor.requires_grad:
                    bytes["frozen_bytes"] += tensor.numel() * tensor.element_size()
        return bytes

    def _explain(self, error: BaseException, where: str, size: int) -> None:
        """Says where an exception came from.

        Raises:
            RuntimeError: instead of it, if the layer needs values and there are none.
        """
        fake = self._place.fake
        if fake and isinstance(error, Exception) and _needs_values(error):
            raise RuntimeError(
                f"{where} needs the values of its tensors, and {fake} tensors have only sizes "
                f"({type(error).__name__}: {error}): measure this model where it has values "
                "(device='cpu', or a GPU), a smaller one of the same kind if it is too large"
            ) from error
        sizes = [lane.size for lane in self._lanes]
        few = f"; sizes={sizes} were to be measured" if len(sizes) > 1 else ""
        annotate(error, f"in {where}, profiled with a micro-batch of {size} samples{few}")


def _needs_values(error: Exception) -> bool:
    """Whether an error says that a tensor has no values."""
    unsupported = ("DataDependentOutputException", "DynamicOutputShapeException")
    if isinstance(error, NotImplementedError) or type(error).__name__ in unsupported:
        return True
    return isinstance(error, RuntimeError) and "meta tensor" in str(error).lower()


def _bar(progress: bool | None, layers: int) -> Any:
    """A progress bar, or None where there is none to show."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return None
    try:
        from tqdm import tqdm
    except ImportError as error:
        if progress is None:
            return None
        raise ImportError(
            "progress=True shows a progress bar, which needs tqdm: pip install tqdm"
        ) from error
    delay = 1.0 if progress is None else 0.0
    return tqdm(total=layers, desc="profile", unit="layer", delay=delay, leave=False)
