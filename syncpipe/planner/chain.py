"""The times and memory of any stage, from the profile of its layers, for one micro-batch size.

A stage is a range ``[i, j)`` of layers. Times are in seconds, sizes in bytes, for one micro-batch.

Of the micro-batches in flight on a stage, one runs. Each of the others occupies its stored
activations, or its inputs if the stage recomputes or offloads. Transient memory is what the running
micro-batch needs beyond its stored activations, at the peak of an action:

    layers              i ... l-1      l              l+1 ...
    forward             stored         at its peak                               max over l
    backward            stored         at its peak    nothing is left            max over l
    its input half      stored         at its peak    what weight halves need    max over l
    its weight half     what it needs  at its peak                               max over l

The peak of a layer includes outputs, gradients of activations, and the gradient of a weight until
it is added to the sum over micro-batches. Further memory of a stage:

- inputs that arrived early, at most two; at stage 0 the mini-batch
- skips from earlier stages, which can arrive as early as stage 0 can begin
- gradients of skips that the stage stashed, and of weights that later stages have copies of
- the optimizer's step, after all micro-batches

Without peaks (:attr:`Chain.peaks` is empty) transient memory and early inputs count as 0.

If a stage offloads, its device holds the running micro-batch, the one in transfer, and the bytes
that the link cannot take during one forward (Wan et al. 2025, PipeOffload).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import add, sub
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from syncpipe.balance.profile import Profile, interpolate
from syncpipe.planner.machine import Machine
from syncpipe.schedules.player import Costs
from syncpipe.schedules.schedule import Kind

__all__ = [
    "Chain", "LayerRange", "Mode", "Spans", "StageMemory", "chunk_counts", "costs_of", "doubles",
    "ends_of", "sizes_of", "within",
]  # fmt: skip

#: Runs of layers, ``(start, stop)``, each of which is recomputed from its input.
Spans = tuple[tuple[int, int], ...]
#: How a stage keeps its activations until their backward. With spans it stores the other layers.
Mode = Literal["store", "recompute", "offload"] | Spans

#: Weight half as a share of a backward whose halves were not measured, as in a linear layer, whose
#: two products have equally many multiplications.
_HALF = 0.5
_AHEAD = 2  # the most inputs that wait at a stage
_KINDS = ("forward", "backward", "input", "weight")  # of actions, with peaks of their own


class LayerRange(NamedTuple):
    """Times and sizes of layers ``[i, j)``: numbers, or tensors for many ranges at once.

    ``first``: whether ``i`` is 0. ``first_transient``: transient bytes until the first backward is
    done, less those of gradients of parameters. ``popped``: bytes of skips from before ``i``.
    ``returned``: bytes of gradients, of skips and weights, from after ``j``. ``update``: bytes
    during the optimizer's step. ``loss``: bytes that the loss function stores. ``copied``: bytes of
    inputs of which the stage makes copies, if they are kept. ``renorms``: whether it is never
    recomputed.
    """

    first: bool
    forward: Any
    backward: Any
    fixed: Any
    inputs: Any
    stored: Any
    transient: Any
    first_transient: Any
    popped: Any
    returned: Any
    update: Any
    loss: Any
    copied: Any
    renorms: Any


class Transients(NamedTuple):
    """Bytes beyond what a stage stores, at the peak of each kind of action.

    ``first``: of the first backward, when no gradients of parameters exist yet. ``input`` and
    ``weight``: of the halves of a split backward, for ``weight`` beyond what the half needs.
    """

    forward: float
    backward: float
    first: float
    input: float
    weight: float


class StageMemory(NamedTuple):
    """The memory of a stage in bytes, numbers or tensors.

    Attributes:
        fixed: at all times, or at most.
        arrived: the part of ``fixed`` that is early inputs.
        transient: in addition, while one of its actions runs.
        each: for each micro-batch, from its forward on.
        once: in addition, from the beginning of a backward on.
        halves: between the halves of a backward, in place of ``each`` and ``once``.
        update: in total during the optimizer's step.
        varying: the part of ``fixed`` that is not there at all times: gradients and messages.
        gradients: bytes of the gradients that the first backward makes.
        copied: bytes of inputs of which a forward makes copies.
        messages: what waits until its action begins: by what kind of action and which stage it is
            sent, and its bytes.
        during: ``transient`` by kind of action.
    """

    fixed: Any
    arrived: Any
    transient: Any
    each: Any
    once: Any
    update: Any
    halves: float = 0.0
    varying: float = 0.0
    gradients: float = 0.0
    copied: float = 0.0
    messages: tuple[tuple[Kind, int, float], ...] = ()
    during: Transients = Transients(0.0, 0.0, 0.0, 0.0, 0.0)

    def peak(self, q: Any) -> Any:
        """The peak with ``q`` micro-batches in flight."""
        found = self.fixed + self.transient + q * self.each + self.once
        largest = torch.maximum if isinstance(found, Tensor) else max
        return largest(found, self.update)

    def levels(self, kind: Kind, before: float, begun: bool) -> tuple[float, float]:
        """The peak during an action, and the bytes after it, given those before.

        ``begun``: whether a backward has made the gradients, which ``before`` then includes.
        """
        stored, during = self.each + self.once, self.during
        if kind == "forward":
            return before + stored + during.forward + self.copied, before + self.each
        made = self.gradients * (not begun)
        if kind == "backward_weight":
            return before + made + during.weight, before + made - self.halves
        whole = kind == "backward"
        transient = during.input if not whole else during.backward if begun else during.first
        # A stage that recomputes first runs forward again.
        most = max(transient, during.forward if self.once else 0.0)
        after = before - self.each + (made if whole else self.halves)
        return before + self.once + most, after


@dataclass(frozen=True)
class Chain:
    """The layers of a model in order: one number per layer, and the skips and ties between them.

    Attributes:
        forward: seconds.
        backward: seconds.
        inputs: input bytes, followed by the output bytes of the last layer if known.
        stored: bytes stored for backward.
        shared: the part of ``stored`` that the layer before stores, too.
        fixed: bytes of parameters, gradients, the optimizer's state and buffers.
        skips: ``(layer that stashes, layer that pops, bytes)``.
        ties: weights of several layers: ``(first layer, other layers, bytes, trained bytes)``.
        trained: bytes of trained parameters.
        update: bytes of the optimizer's step, besides its state.
        halves: bytes that the weight half of backward needs.
        weight: seconds of the weight half of backward.
        interpreter: seconds of forward that hold the interpreter's lock.
        peaks: peak bytes while the layer runs, by kind of action; empty if unknown.
        copied: bytes of inputs that a stage which begins here copies if others need them.
        renorms: 1 for a layer that is never recomputed.
        batch: bytes of the mini-batch on the first device; 0 if it is elsewhere.
        chunks: the number of micro-batches; 0 if unknown.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    inputs: tuple[float, ...]
    stored: tuple[float, ...]
    shared: tuple[float, ...]
    fixed: tuple[float, ...]
    skips: tuple[tuple[int, int, float], ...] = ()
    weight: tuple[float, ...] = ()
    interpreter: tuple[float, ...] = ()
    peaks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    batch: float = 0.0
    ties: tuple[tuple[int, tuple[int, ...], float, float], ...] = ()
    trained: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    halves: tuple[float, ...] = ()
    copied: tuple[float, ...] = ()
    renorms: tuple[float, ...] = ()
    chunks: int = 0

    @classmethod
    def of(
        cls, profile: Profile, samples: float, param_scale: float, batch_size: int = 0,
        update: float = 0.0,
    ) -> Chain:  # fmt: skip
        """The layers of a profile (:meth:`Profile.of`) for micro-batches of ``samples`` samples.

        ``param_scale``: bytes per byte of a trained parameter; ``update``: the same for the
        optimizer's step alone. ``batch_size``: samples of the mini-batch if it is on the first
        device, else 0.
        """
        layers = profile.layers

        def numbers(what: str) -> list[float]:
            return [interpolate(getattr(layer, what), samples) for layer in layers]

        backward = numbers("backward")
        shares = [_HALF if x.weight_share is None else x.weight_share for x in layers]
        trained = tuple([float(x.parameter_bytes - x.frozen_bytes) for x in layers])
        stored, outputs, halves = (
            numbers(f"{what}_bytes") for what in ("stored", "output", "halves")
        )
        inputs = (interpolate(profile.input_bytes, samples), *outputs)
        peaks = {kind: numbers(f"{kind}_peak_bytes") for kind in _KINDS}
        if all(layer.backward_peak_bytes for layer in layers):
            # The backward of layers with tied weights is not split.
            for k in {k for home, others, *_ in profile.ties for k in (home, *others)}:
                peaks["input"][k], peaks["weight"][k], halves[k] = peaks["backward"][k], 0.0, 0.0
            # The loss function stores as much as the output, until it goes back.
            stored[-1] += outputs[-1]
            for kind in ("backward", "input"):
                peaks[kind][-1] = max(peaks[kind][-1], stored[-1] + outputs[-1])
        else:  # unknown; of the halves an upper bound
            peaks, halves = {}, [*map(add, stored, outputs)]
        chain = cls(
            forward=tuple(numbers("forward")),
            backward=tuple(backward),
            inputs=inputs,
            stored=tuple(stored),
            shared=tuple(numbers("shared_bytes")),
            fixed=tuple(layer.memory(param_scale) for layer in layers),
            weight=tuple(
                b * x * (y > 0) for b, x, y in zip(backward, shares, trained, strict=True)
            ),
            interpreter=tuple(layer.interpreter for layer in layers),
            peaks=peaks,
            ties=profile.ties,
            trained=trained,
            update=tuple([update * size for size in trained]),
            halves=tuple(halves),
            copied=tuple([size * x.may_write for x, size in zip(layers, inputs, strict=False)]),
            renorms=tuple([float(layer.renorms) for layer in layers]),
            skips=tuple(
                (skip.stash, skip.pop, interpolate(skip.bytes, samples)) for skip in profile.skips
            ),
        )
        return chain.in_batch(profile, samples, batch_size)

    def in_batch(self, profile: Profile, samples: float, batch_size: int) -> Chain:
        """The same layers in a mini-batch of ``batch_size`` samples, of which a micro-batch has
        ``samples``.
        """
        batch = interpolate(profile.input_bytes, batch_size)
        return replace(self, batch=batch, chunks=math.ceil(batch_size / samples))

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def sums(self) -> dict[str, tuple[float, ...]]:
        """Sums over all layers before each boundary; ``shared`` and ``inputs`` are per layer.

        ``stored`` leaves out shared bytes, which count for the first layer of a stage only.
        """
        columns: dict[str, Sequence[float]] = {
            "forward": self.forward,
            "backward": self.backward,
            "fixed": self.fixed,
            "stored": [a - b for a, b in zip(self.stored, self.shared, strict=True)],
            **{
                what: getattr(self, what) or (0.0,) * len(self)
                for what in ("weight", "interpreter", "trained", "update", "halves", "renorms")
            },
        }
        found = {what: tuple(accumulate(each, initial=0.0)) for what, each in columns.items()}
        both = zip(found["forward"], found["backward"], strict=True)
        found["time"] = tuple(f + b for f, b in both)
        copied = self.copied or (0.0,) * len(self)
        return found | {"shared": self.shared, "inputs": self.inputs, "copied": copied}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {what: doubles(each) for what, each in self.sums.items()}

    def _peaks(
        self, begin: Tensor, end: Tensor, kind: str, *, bare: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The peak bytes of ranges in actions of a kind, and the bytes that they store; if ``bare``
        without the gradients of parameters that are made meanwhile.

        ``begin`` is a column in ascending order, ``end`` has a row for each of its numbers.
        """
        x, low, high = self.tensors, int(begin[0]), int(end.max())
        layer = torch.arange(low, high)
        to, shared, trained, halves = x["stored"], x["shared"], x["trained"], x["halves"]
        full = doubles(self.peaks[kind][low:high]) + to[layer] - to[begin]
        full = full + (shared[begin] - shared[layer]) * (layer > begin)
        # The gradient that a stage receives is there until its backward ends.
        received = doubles([*self.inputs[: len(self)], 0.0])[end] * (kind != "forward")
        if kind == "input":  # what weight halves of the layers behind need, of which a layer may
            behind = layer[1:]  # store a part
            full += halves[end] - halves[layer + 1]
            full[:, :-1] -= shared[behind].minimum(halves[behind + 1] - halves[behind])
            received *= halves[end] == halves[end - 1]  # else they need it, too
        if bare:
            full -= trained[layer + 1] - trained[begin]
        most, last = full.masked_fill(layer < begin, -torch.inf).cummax(1)[0], end - 1 - low
        others = most.gather(1, (last - 1).clamp(min=0)) + received
        peak = full.gather(1, last)
        peak = torch.where(end - 1 > begin, peak.maximum(others), peak)
        return peak, to[end] - to[begin] + shared[begin]

    def _transient(self, begin: Tensor, end: Tensor) -> tuple[Any, Any]:
        """Transient bytes of ranges, and those until the first backward is done."""
        if not self.peaks:
            return 0.0, 0.0
        forward, stored = self._peaks(begin, end, "forward")
        backward, first = (
            self._peaks(begin, end, "backward", bare=bare)[0] for bare in (False, True)
        )
        trained = self.tensors["trained"][end] - self.tensors["trained"][begin]
        first = first.maximum(forward - trained).clamp(min=0)
        return forward.maximum(backward) - stored, first - stored

    @cached_property
    def _during(self) -> dict[tuple[int, int], Transients]:
        return {}

    def during(self, i: int, j: int) -> Transients:
        """The transient bytes of ``[i, j)`` by kind of action."""
        if not self.peaks:
            return Transients(0.0, 0.0, 0.0, 0.0, 0.0)
        if (i, j) not in self._during:
            at, end = torch.tensor([[[i]], [[j]]])
            kinds = [("forward", False), ("backward", False), ("backward", True), ("input", False)]
            peaks = (self._peaks(at, end, kind, bare=bare) for kind, bare in kinds)
            forward, backward, first, half = (float(peak - stored) for peak, stored in peaks)
            weight = max(map(sub, self.peaks["weight"][i:j], self.halves[i:j]))
            self._during[i, j] = Transients(forward, backward, first, half, weight)
        return self._during[i, j]

    def _run(
        self, x: Mapping[str, Any], i: Any, j: Any, first: bool, transient: tuple[Any, Any]
    ) -> LayerRange:
        f, b, fixed, stored, update = (
            x[what][j] - x[what][i] for what in ("forward", "backward", "fixed", "stored", "update")
        )
        skips, popped, returned = self.skips, 0.0, 0.0
        for stash, pop, size in skips:
            popped = popped + size * ((stash < i) & (i <= pop) & (pop < j))
            returned = returned + size * ((i <= stash) & (stash < j) & (j <= pop))
        update = update + fixed + self.batch * first
        for owner, others, size, trained in self.ties:
            inside = [(i <= k) & (k < j) for k in others]
            copied = (owner < i) & (sum(inside) > 0)
            returned = returned + trained * ((i <= owner) & (owner < j)) * (
                len(others) - sum(inside)
            )
            fixed = fixed + (size + 2 * trained) * copied  # one gradient is on its way
        stored = stored + x["shared"][i]
        inputs, copied = x["inputs"][i], x["copied"][i]
        loss = (j == len(self)) * self.inputs[-1] * bool(self.peaks)
        renorms = x["renorms"][j] > x["renorms"][i]
        return LayerRange(
            first, f, b, fixed, inputs, stored, *transient, popped, returned, update, loss, copied,
            renorms,
        )  # fmt: skip

    def runs(self, at: Sequence[int], first: bool, width: int = 0) -> LayerRange:
        """The ranges from each of these boundaries to the next ``width``, or to all, as tensors;
        with ``first``, only from layer 0 on.
        """
        ends = torch.tensor(at)[within(len(at) - 1, width or len(at) - 1)]
        i, j = torch.tensor(at)[:-1, None], ends
        if first:
            i, j = i[:1], j[:1]
        return self._run(self.tensors, i, j, first, self._transient(i, j))

    @cached_property
    def _runs(self) -> dict[tuple[int, int], LayerRange]:
        return {}

    def run(self, i: int, j: int) -> LayerRange:
        """The range ``[i, j)``, as numbers."""
        if (i, j) not in self._runs:
            at = torch.tensor([[[i]], [[j]]])
            transient, alone = map(float, self._transient(*at))
            self._runs[i, j] = self._run(self.sums, i, j, i == 0, (transient, alone))
        return self._runs[i, j]

    def needs(
        self, run: LayerRange, q: Any, q0: Any, mode: Mode, taken: Any = 0.0,
        returned: Any = None, early: Any = None,
    ) -> StageMemory:  # fmt: skip
        """The memory of a stage, or of many, with ``q`` micro-batches in flight on it and ``q0`` on
        stage 0. ``taken``: bytes that the link to the host takes during one forward. ``returned``:
        bytes of gradients that wait; by default those from the last stage, which has one
        micro-batch in flight. ``early``: inputs that wait; by default all that stage 0 is ahead, at
        most two.
        """
        stored, inputs, known = run.stored, run.inputs, bool(self.peaks)
        # A stage that stores holds skips of micro-batches that it has not begun, others hold all.
        each, once, waiting = stored, 0.0, _positive(q0 - q) if known else q0
        if mode != "store":
            each = inputs + run.loss
            each = each + (stored - each) * (run.renorms if mode == "recompute" else 0)
            once, waiting = stored - known * each, q0
        if mode == "offload":
            more = _positive(q - 2)
            once = once + (q - 1 - more) * stored + more * _positive(stored - taken)
        transient, first = run.transient, run.first_transient - run.transient
        if known and self.chunks and (isinstance(q, Tensor) or q >= self.chunks):
            # The first backward follows all forwards: no gradients yet.
            fewer = first if self.chunks == 1 else _positive(each + first) - each
            transient = transient + fewer * (q >= self.chunks)
        batch = arrived = 0.0
        if known and run.first:
            # Micro-batches are parts of the mini-batch.
            given = (
                inputs if mode != "store" else 0.0 if run.copied else min(self.stored[0], inputs)
            )
            batch, each = self.batch, each - given * bool(self.batch)
        elif known:
            ahead = q0 - q if early is None else early
            arrived = (_positive(ahead) - _positive(ahead - _AHEAD)) * inputs
        returned = q // 2 * run.returned if returned is None else returned
        fixed = run.fixed + batch + arrived + waiting * run.popped + returned
        return StageMemory(fixed, arrived, transient, each, once, run.update)

    def held(self, i: int, j: int, after_stored: bool, recomputed: bool) -> tuple[float, float]:
        """Bytes of layers ``[i, j)`` from forward to backward of a micro-batch, and the most during
        their backward. ``after_stored``: whether layer ``i - 1`` is in the stage and is stored.
        """
        run = self.run(i, j)
        there = self.shared[i] * after_stored
        kept = run.inputs - min(there, run.inputs) if recomputed else run.stored - there
        peak = run.stored - there + run.transient
        return kept, max(kept, peak) if self.peaks or not recomputed else kept + peak

    def by_layer(self, i: int, j: int, spans: Spans) -> tuple[float, float]:
        """As :meth:`held`, for a stage ``[i, j)`` that recomputes ``spans``."""
        kept = peak = 0.0
        starts, at, stored = dict(spans), i, False
        while at < j:
            to = starts.get(at, at + 1)
            each, most = self.held(at, to, stored, at in starts)
            kept, peak, at, stored = kept + each, max(peak, kept + most), to, at not in starts
        return kept, peak

    def memory(self, i: int, j: int, q: int, q0: int, mode: Mode, taken: float = 0.0) -> float:
        """Peak bytes of the stage ``[i, j)``."""
        return float(self.needs(self.run(i, j), q, q0, mode, taken).peak(q))


def _positive(number: Any) -> Any:
    """The number, or numbers, and 0 in place of negative ones."""
    return number.clamp(min=0) if isinstance(number, Tensor) else max(0.0, number)


def ends_of(balance: Sequence[int]) -> list[tuple[int, int]]:
    """For each stage its first layer and the layer after its last."""
    return list(pairwise(accumulate(balance, initial=0)))


def costs_of(chain: Chain, machine: Machine, balance: Sequence[int], split: bool = False) -> Costs:
    """The costs of a cut for the player; stage ``s`` is on device ``s`` of the machine.

    An entire backward counts as its input half, so the gradient is sent at its end.
    """
    stages = list(zip(ends_of(balance), machine.speed, strict=False))

    def seconds(what: str) -> tuple[float, ...]:
        sums = chain.sums[what]
        return tuple((sums[j] - sums[i]) / v for (i, j), v in stages)

    skips: dict[tuple[int, int], float] = {}
    stage_of = [s for s, number in enumerate(balance) for _ in range(number)] * bool(chain.skips)
    for stash, pop, size in chain.skips:
        a, b = stage_of[stash], stage_of[pop]
        if a != b:
            skips[a, b] = skips.get((a, b), 0.0) + machine.transfer(size, a, b)
    sent = [machine.transfer(chain.inputs[i], s - 1, s) for s, ((i, _), _) in enumerate(stages)]
    backward, weight = seconds("backward"), (0.0,) * len(stages)
    if split:
        weight = tuple(map(min, seconds("weight"), backward))
        backward = tuple(a - b for a, b in zip(backward, weight, strict=True))
    return Costs(
        forward=seconds("forward"),
        backward_input=backward,
        backward_weight=weight,
        transfer=tuple(sent[1:]),
        skips=skips,
    )


@lru_cache(maxsize=16)
def within(count: int, width: int) -> Tensor:
    """For each of ``count`` boundaries the next ``width``, at most the one at the end."""
    return (torch.arange(count)[:, None] + torch.arange(1, width + 1)).clamp(max=count)


def doubles(numbers: Iterable[float]) -> Tensor:
    """The numbers as a tensor of dtype float64."""
    return torch.tensor([*numbers], dtype=torch.float64)


# -- numbers of micro-batches and of stages --------------------------------------------------------

# torch.chunk makes micro-batches of equal size, rounded up, and a smaller last one. So some numbers
# of them are impossible: 10 samples make 5 micro-batches of 2, or 4 of 3, 3, 3 and 1, but never 6.

_MOST = 1024  # micro-batches that are tried unless the caller asks for more
_GAP = 1.5  # the least ratio between a divisor of the mini-batch and another number that is tried


def sizes_of(batch_size: int, chunks: int) -> tuple[int, int]:
    """The samples in each micro-batch, and in the last one.

    Raises:
        ValueError: ``torch.chunk`` does not make this number of micro-batches.
    """
    size = -(-batch_size // chunks) if chunks > 0 else 0
    number = -(-batch_size // size) if size else 0
    if not size or number != chunks:
        instead = f": torch.chunk makes {number} of {size}; give it chunks={number}" * bool(size)
        raise ValueError(
            f"chunks={chunks} micro-batches of batch_size={batch_size} are impossible{instead}"
        )
    return size, batch_size - (chunks - 1) * size


def chunk_counts(batch_size: int, chunks: int | Iterable[int] | None = None) -> tuple[int, ...]:
    """The numbers of micro-batches to try, ascending, at most 1024; or those in ``chunks``.

    All divisors of the mini-batch and, in large gaps between divisors, numbers whose last
    micro-batch is smaller. From 4 for each device on the bubble is negligible (Huang et al. 2019,
    GPipe, section 2.3), but more save memory. The numbers do not depend on the memory limits:
    otherwise a plan could be slower with more memory.

    Raises:
        ValueError: ``chunks`` is empty or has an impossible number.
    """
    if chunks is not None:
        wanted = (chunks,) if isinstance(chunks, int) else tuple(sorted({*chunks}))
        if not wanted:
            raise ValueError("chunks is empty: give it a number, or leave it out")
        for m in wanted:
            sizes_of(batch_size, m)
        return wanted
    numbers = range(1, min(batch_size, _MOST) + 1)
    every = [m for m in numbers if batch_size % m == 0]
    # In gaps, first the numbers whose last micro-batch is the fullest.
    others = [m for m in numbers if batch_size % m and -(-batch_size // -(-batch_size // m)) == m]
    for m in sorted(others, key=lambda m: (m * -(-batch_size // m), m)):
        if all(not 1 / _GAP < m / other < _GAP for other in every):
            every.append(m)
    return tuple(sorted(every))
