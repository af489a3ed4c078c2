"""Takes micro-batches through the layers, and measures these in a rotation.

A layer that is run again and again finds its weights in the caches, where no training finds them.
So layers are measured as they are trained: forward one after another, and then back::

    forward  0 1 2 3 4 5 . . back . . 5 4 3 2 1 0      a round; each layer has its own times

Of several sizes of the micro-batch each has two rounds in turn, of which the second counts: in
training, micro-batches of one size follow each other.

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
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.balance.profiling.halves import weight_share
from syncpipe.balance.profiling.rounds import Between, Mark, Progress, Visit, stopwatch
from syncpipe.balance.profiling.sandbox import Place, compiled, described_layer, layer_to_run
from syncpipe.balance.profiling.stored import size_of
from syncpipe.data import tensors_in
from syncpipe.runtime.errors import annotate
from syncpipe.skip.namespace import SkipKey
from syncpipe.skip.walk import layer_skips

__all__ = ["Profiler", "Timing"]

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
#: Bytes of layers that are measured together: several times the caches of processors and GPUs.
WINDOW = 256_000_000


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
    watch: tuple[Mark, Between] | None = None


class Profiler:
    """Takes the lanes from layer to layer.

    Args:
        module: the layers.
        known: the same, but for specs: what they build, on ``meta``.
        lanes: one for each size of the micro-batch.
        place: where.
        timing: how layers are timed; None: sizes only.
        bar: shows progress; None for none.
    """

    def __init__(
        self,
        module: nn.Sequential,
        known: nn.Sequential,
        lanes: list[Progress],
        place: Place,
        timing: Timing | None,
        bar: Any,
    ) -> None:
        self._layers = list(known._modules.items())
        self._given = list(module)  # the same, but for specs
        self._lanes = lanes
        self._place = place
        tensors = tensors_in(lanes[0].value)
        self._home = place.device or (tensors[0].device if tensors else torch.device("cpu"))
        self._timing = timing
        self._bar = bar
        self._counted: set[int] = set()  # parameters and buffers
        self._stashed_by: dict[SkipKey, int] = {}
        #: Of all layers at the largest size, forward and backward.
        self._least: list[float] = []
        self._medians: list[float] = []

    def run(self) -> Profile:
        given = {lane.size: size_of(lane.value) for lane in self._lanes}
        measured: list[dict[str, Any]] = []
        skips: list[SkipProfile] = []
        window: list[list[Visit]] = []
        held = 0
        for index, (name, layer) in enumerate(self._layers):
            assert layer is not None
            numbers, visits = self._observed(index, name, layer)
            measured.append(numbers)
            window.append(visits)
            held += sum(numbers[f"{what}_bytes"] for what in ("parameter", "buffer"))
            held += sum(lane.keeping.stored[index] for lane in self._lanes)
            if held >= WINDOW or index == len(self._layers) - 1:
                self._time(index, measured, window)
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
        source = "measured" if self._timing is not None else "sizes"
        least = math.fsum(self._least)
        spread = math.fsum(self._medians) / least - 1 if least else 0.0
        load = os.getloadavg()[0] if source == "measured" else 0.0
        return Profile(
            layers, tuple(skips), given, self._place.words, source=source, spread=max(0.0, spread),
            load_average=load,
        )  # fmt: skip

    def _observed(
        self, index: int, name: str, layer: nn.Module
    ) -> tuple[dict[str, Any], list[Visit]]:
        """What can be said of a layer but its times; and how to run it for these."""
        exchanged = layer_skips(layer)
        self._stashed_by.update(dict.fromkeys(exchanged.stashed, index))
        made = layer_to_run(name, self._given[index], self._place, self._home)
        home = next((t.device for t in chain(made.parameters(), made.buffers())), None)
        home = self._place.device or home
        visits: list[Visit] = []
        count = not compiled(made)
        try:
            for lane in self._lanes:
                visits.append(lane.visit(made, exchanged.popped, home))
                back = self._timing is not None
                lane.observe(index, visits[-1], exchanged.stashed, back=back, count=count)
        except BaseException as error:
            self._explain(error, index, len(visits) - 1)
            raise
        numbers: dict[str, Any] = {"name": name, **self._own_bytes(layer, made)}
        numbers["output_bytes"] = {lane.size: size_of(lane.value) for lane in self._lanes}
        if count:
            peaks = zip(self._lanes, visits, strict=True)
            numbers["peak_bytes"] = {lane.size: visit.peak for lane, visit in peaks}
        return numbers, visits

    def _time(self, last: int, measured: list[dict[str, Any]], window: list[list[Visit]]) -> None:
        """Measures the layers of a window, up to the layer ``last``, and notes their times."""
        first = last + 1 - len(window)
        if self._timing is not None:
            if self._timing.watch is None:
                self._rotate(self._timing, first, measured, window)
            else:
                for lane in range(len(self._lanes)):
                    self._round(first, window, lane, [self._timing.watch] * len(window))
                for numbers, visits in zip(measured[first:], window, strict=True):
                    once = weight_share(visits[-1], *self._timing.watch, lambda done: done < 1)
                    numbers["weight_share"] = once
        for numbers, visits in zip(measured[first:], window, strict=True):
            for what in ("forward", "backward"):
                rows = zip(self._lanes, visits, strict=True)
                times = {lane.size: getattr(visit, what) for lane, visit in rows}
                numbers[what] = _least_of(times)
                if largest := times[self._lanes[-1].size]:
                    self._least.append(min(largest))
                    self._medians.append(statistics.median(largest))

    def _rotate(
        self,
        timing: Timing,
        first: int,
        measured: list[dict[str, Any]],
        window: list[list[Visit]],
    ) -> None:
        """Measures a window for its share of the time that is left, its Python and halves first."""
        begin, behind = clock.monotonic(), len(self._layers) - first
        left = timing.deadline - begin
        for k, visits in enumerate(window):
            until = begin + left * (k + 1) / behind / 2

            def more(done: int, until: float = until) -> bool:
                return done < LEAST and clock.monotonic() < until

            measured[first + k]["interpreter"] = _python(visits[0], until)
            largest = visits[-1]
            share = weight_share(largest, *stopwatch(largest.device), more)
            measured[first + k]["weight_share"] = share
        until = begin + left * len(window) / behind
        watches = [stopwatch(visits[0].device) for visits in window]
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
                    self._round(first, window, lane, watches, counts=False)
                self._round(first, window, lane, watches)

    def _round(
        self,
        first: int,
        window: list[list[Visit]],
        lane: int,
        watches: list[tuple[Mark, Between]],
        counts: bool = True,
    ) -> None:
        """Runs the layers of a window forward, and then back; and notes how long that took."""
        k = 0
        try:
            for k, visits in enumerate(window):
                visits[lane].forth(watches[k][0])
            for k, visits in reversed(list(enumerate(window))):
                visits[lane].back(watches[k][0])
        except BaseException as error:
            self._explain(error, first + k, lane)
            raise
        for visits, (_, between) in zip(window, watches, strict=True) if counts else ():
            visits[lane].read(between)

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

    def _explain(self, error: BaseException, index: int, lane: int) -> None:
        """Says where an exception came from.

        Raises:
            RuntimeError: instead of it, if the layer needs values and there are none.
        """
        name, layer = self._layers[index]
        assert layer is not None
        where, fake = described_layer(name, layer), self._place.fake
        if fake and isinstance(error, Exception) and _needs_values(error):
            raise RuntimeError(
                f"{where} needs the values of its tensors, and {fake} tensors have only sizes "
                f"({type(error).__name__}: {error}): measure this model where it has values "
                "(device='cpu', or a GPU), a smaller one of the same kind if it is too large"
            ) from error
        sizes = [lane.size for lane in self._lanes]
        size = sizes[max(0, lane)]
        few = f"; sizes={sizes} were to be measured" if len(sizes) > 1 else ""
        annotate(error, f"in {where}, profiled with a micro-batch of {size} samples{few}")


def _least_of(times: dict[int, list[float]]) -> dict[int, float]:
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


def _python(visit: Visit, until: float) -> float:
    """Seconds of Python in a layer, by the best of some runs.

    It is measured once in any case, as nobody would be told that it was not; and as often as it
    should be if that takes no time, for the first run of something is far from the best.
    """
    found: list[float] = []
    while len(found) < LEAST and not compiled(visit.layer):
        begin = clock.monotonic()
        found.append(visit.python())
        if clock.monotonic() > max(until, begin + QUICK):
            break
    return min(found, default=0.0)


def _needs_values(error: Exception) -> bool:
    """Whether an error says that a tensor has no values."""
    unsupported = ("DataDependentOutputException", "DynamicOutputShapeException")
    if isinstance(error, NotImplementedError) or type(error).__name__ in unsupported:
        return True
    return isinstance(error, RuntimeError) and "meta tensor" in str(error).lower()
