"""What the layers of a profile cost for one size of micro-batch, as sums over any run of them.

A stage is a run ``[i, j)`` of layers. Times are in seconds, sizes in bytes, for one micro-batch.

Of the micro-batches in flight on a stage one is running, forward or backward. The others are what
they store, or their inputs where the stage recomputes or offloads. What the running one has more at
its fullest moment is transient:

    layers    i ... l-1         l            l+1 ...
              stored            at its peak  goes back first: nothing is left     max over l

where the peak of a layer has all that is alive for a moment: outputs, gradients of activations, the
gradient of a weight until it is added to that of the micro-batches before. Inputs that the stage
before has sent ahead are there as well, at most two; at stage 0 the rest of the mini-batch, which
is there from the start. Skips from stages to the left wait: these can send them as early as stage 0
may begin. Their gradients wait on the stage that stashed them, as do those of a weight that a later
stage has a copy of. When all is done the optimizer takes its step. Where the peaks are unknown
(:attr:`Chain.peaks` is empty) nothing transient counts, and nothing that arrived.

A stage that offloads sends what it stores to the host and gets it back. On the device are the
running micro-batch, the one that leaves or comes back meanwhile, and what the link has not taken
while a forward lasts (Wan et al. 2025, PipeOffload).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from syncpipe.balance.profile import Profile, interpolate, interpolate_all
from syncpipe.planner.machine import Machine
from syncpipe.schedules.player import Costs

__all__ = [
    "Chain", "Held", "Mode", "Run", "chunk_counts", "costs_of", "doubles", "ends_of", "sizes_of",
]  # fmt: skip

#: What a stage does with its activations until their backward.
Mode = Literal["store", "recompute", "offload"]

#: Of a layer's backward, where its halves were not measured: both products of a linear layer's
#: backward have as many multiplications.
_HALF = 0.5
#: So many inputs at most have arrived at a stage that has not begun with them.
_AHEAD = 2


class Run(NamedTuple):
    """What layers ``[i, j)`` have, each a number, or tensors for many runs at once.

    ``first``: whether ``i`` is 0. ``first_transient``: of the first micro-batch that goes back,
    when there are no gradients yet. ``popped``: bytes of skips from before ``i``; ``returned``: of
    gradients that come back from after ``j``, of skips and of weights. ``update``: bytes while the
    optimizer takes its step.
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


class Held(NamedTuple):
    """Bytes that a stage holds: all the time, ``arrived`` of them inputs that it has not begun
    with; more while one of its actions runs; for each micro-batch from its forward on; more from
    where its backward begins; between the halves of a backward, in place of both; in all while the
    optimizer takes its step; and more than ``transient`` while a weight half runs.
    """

    fixed: Any
    arrived: Any
    transient: Any
    each: Any
    once: Any
    halves: Any
    update: Any
    weight: Any = 0.0

    def most(self, q: Any) -> Any:
        """With so many micro-batches in flight."""
        found = self.fixed + self.transient + q * self.each + self.once
        return (
            torch.maximum(found, self.update)
            if isinstance(found, Tensor)
            else max(found, self.update)
        )


@dataclass(frozen=True)
class Chain:
    """Layers one after another, and skips beside them; a number for each layer.

    Attributes:
        forward: seconds.
        backward: seconds.
        inputs: bytes that enter; after those of the last layer what it gives, if that is known.
        stored: bytes that it stores for backward.
        shared: the part of these that the layer before it stores already.
        fixed: bytes that stay: parameters, gradients, the optimizer's state, buffers.
        skips: ``(layer that stashes, layer that pops, bytes)``.
        ties: weights that several layers have: ``(first layer, the others, bytes, trained bytes)``.
        trained: bytes of parameters that are trained.
        update: bytes that the optimizer's step takes besides.
        halves: bytes that its weight half needs.
        weight: seconds of its backward that gradients of parameters take.
        interpreter: seconds that its forward holds the interpreter's lock.
        peaks: bytes that are alive at most while it runs (``LayerProfile.peak_bytes``); empty where
            they are unknown.
        batch: bytes of the inputs of the mini-batch, which is on the first device; 0 if it is not.
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
    peaks: tuple[float, ...] = ()
    batch: float = 0.0
    ties: tuple[tuple[int, tuple[int, ...], float, float], ...] = ()
    trained: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    halves: tuple[float, ...] = ()
    chunks: int = 0

    @classmethod
    def of(
        cls, profile: Profile, samples: float, param_scale: float, batch_size: int = 0,
        update: float = 0.0,
    ) -> Chain:  # fmt: skip
        """The layers of a profile (:meth:`Profile.of`) for a micro-batch of so many samples, with
        so many bytes for each byte of a parameter that is trained, and for a moment more while it
        is updated; and the size of the mini-batch, if that is on the first device.
        """
        layers = profile.layers

        def numbers(what: str) -> tuple[float, ...]:
            return tuple(interpolate_all((getattr(layer, what) for layer in layers), samples))

        given, backward = profile.input_bytes, numbers("backward")
        shares = [_HALF if x.weight_share is None else x.weight_share for x in layers]
        trained = tuple([float(x.parameter_bytes - x.frozen_bytes) for x in layers])
        stored, outputs, halves = (
            numbers(f"{what}_bytes") for what in ("stored", "output", "halves")
        )
        if not any(layer.halves_bytes for layer in layers):  # unknown: all that could be
            halves = tuple(s + out for s, out in zip(stored, outputs, strict=True))
        tied = {k for home, others, *_ in profile.ties for k in (home, *others)}  # in no halves
        return cls(
            forward=numbers("forward"),
            backward=backward,
            inputs=(interpolate(given, samples) if given else 0.0, *outputs),
            stored=stored,
            shared=numbers("shared_bytes"),
            fixed=tuple(layer.memory(param_scale) for layer in layers),
            weight=tuple(
                b * x * (y > 0) for b, x, y in zip(backward, shares, trained, strict=True)
            ),
            interpreter=tuple(layer.interpreter for layer in layers),
            peaks=numbers("peak_bytes") if all(layer.peak_bytes for layer in layers) else (),
            batch=interpolate(given, batch_size) if given else 0.0,
            ties=profile.ties,
            trained=trained,
            update=tuple([update * size for size in trained]),
            halves=tuple(size * (k not in tied) for k, size in enumerate(halves)),
            chunks=math.ceil(batch_size / samples),
            skips=tuple(
                (skip.stash, skip.pop, interpolate(skip.bytes, samples)) for skip in profile.skips
            ),
        )

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def sums(self) -> dict[str, tuple[float, ...]]:
        """Of what all layers before each boundary have. Shared stored bytes are left out, for they
        count for the first layer of a stage only: they and inputs are there for each layer.
        """
        columns: dict[str, Sequence[float]] = {
            "forward": self.forward,
            "backward": self.backward,
            "fixed": self.fixed,
            "stored": [a - b for a, b in zip(self.stored, self.shared, strict=True)],
            **{
                what: getattr(self, what) or (0.0,) * len(self)
                for what in ("weight", "interpreter", "trained", "update", "halves")
            },
        }
        found = {what: tuple(accumulate(each, initial=0.0)) for what, each in columns.items()}
        both = zip(found["forward"], found["backward"], strict=True)
        found["time"] = tuple(f + b for f, b in both)
        return found | {"shared": self.shared, "inputs": self.inputs}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {what: doubles(each) for what, each in self.sums.items()}

    def _transient(
        self,
        begins: Sequence[int],
        ends: Sequence[int],
        *,
        first: bool = False,
        split: bool = False,
    ) -> Any:
        """For stages from each of these layers to each of these ends; if they are the ``first``
        that go back, or in halves.
        """
        if not self.peaks:
            return 0.0
        x, begin, at = self.tensors, torch.tensor(begins)[:, None], torch.tensor(ends)
        low = begins[0]
        layer = torch.arange(low, ends[-1])
        to, shared, trained = x["stored"], x["shared"], x["trained"]
        peaks = doubles(self.peaks[low : ends[-1]])
        if split:  # no gradients of weights
            bare = x["inputs"][layer] + x["inputs"][layer + 1] + doubles(self.stored)[layer]
            peaks = torch.maximum(peaks - trained[layer + 1] + trained[layer], bare.minimum(peaks))
        full = peaks + to[layer] - to[begin]
        full += (shared[begin] - shared[layer]) * (layer > begin)
        if first:
            full -= trained[layer + 1] - trained[begin]
        most = full.masked_fill(layer < begin, -torch.inf).cummax(1)[0]
        stored = to[at] - to[begin] + shared[begin]
        least = -stored if first else torch.zeros_like(stored)
        return torch.maximum(most[:, (at - 1 - low).clamp(min=0)] - stored, least)

    def _run(self, x: Mapping[str, Any], i: Any, j: Any, first: bool, transient: Any) -> Run:
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
        alone, inputs = transient[1], x["inputs"][i]
        return Run(
            first, f, b, fixed, inputs, stored, transient[0], alone, popped, returned, update
        )

    def runs(self, at: Sequence[int], first: bool) -> Run:
        """What the layers between each of these boundaries and each other one have, as tensors; if
        they are ``first``, from layer 0 on only.
        """
        begins = at[:1] if first else at[:-1]
        transient = [self._transient(begins, at, first=which) for which in (False, True)]
        i, j = torch.tensor(begins)[:, None], torch.tensor(at)
        return self._run(self.tensors, i, j, first, transient)

    @cached_property
    def _runs(self) -> dict[tuple[int, int], Run]:
        return {}

    def split_transient(self, i: int, j: int) -> float:
        """What is transient on ``[i, j)`` where backward comes in halves."""
        return float(self._transient([i], [j], split=True))

    def run(self, i: int, j: int) -> Run:
        """What the layers ``[i, j)`` have, as numbers."""
        if (i, j) not in self._runs:
            transient = [float(self._transient([i], [j], first=which)) for which in (False, True)]
            self._runs[i, j] = self._run(self.sums, i, j, i == 0, transient)
        return self._runs[i, j]

    def held(
        self, run: Run, q: Any, q0: Any, mode: Mode, taken: Any = 0.0, returned: Any = None
    ) -> Held:
        """What a stage of these layers takes at most, or many of them, with ``q`` micro-batches in
        flight on it and ``q0`` on stage 0. ``taken``: bytes that the link to the host takes while
        one of its forwards lasts. ``returned``: bytes of gradients that wait; by default as if
        they came from the last stage, which has one in flight.
        """
        stored, inputs, known = run.stored, run.inputs, bool(self.peaks)
        # Skips of those that the stage has not begun with; where it recomputes, of the others, too.
        each, once, waiting = stored, 0.0, _over(q0 - q) if known else q0
        if mode != "store":
            each, once, waiting = inputs, stored - known * inputs, q0
        if mode == "offload":
            more = _over(q - 2)
            once = once + (q - 1 - more) * stored + more * _over(stored - taken)
        transient, first = run.transient, run.first_transient - run.transient
        if known and self.chunks:  # all begun before the first goes back, there are no gradients
            fewer = first if self.chunks == 1 else _over(each + first) - each
            transient = transient + fewer * (q >= self.chunks)
        arrived = 0.0
        if known and run.first:
            arrived = _over(self.batch - q * inputs)
        elif known:
            arrived = (_over(q0 - q) - _over(q0 - q - _AHEAD)) * inputs
        returned = q // 2 * run.returned if returned is None else returned
        fixed = run.fixed + arrived + waiting * run.popped + returned
        return Held(fixed, arrived, transient, each, once, stored, run.update)

    def memory(self, i: int, j: int, q: int, q0: int, mode: Mode, taken: float = 0.0) -> float:
        """Bytes that the stage ``[i, j)`` takes at most."""
        return float(self.held(self.run(i, j), q, q0, mode, taken).most(q))


def _over(number: Any) -> Any:
    """The number, or numbers, where they are more than nothing."""
    return number.clamp(min=0) if isinstance(number, Tensor) else max(0.0, number)


def ends_of(balance: Sequence[int]) -> list[tuple[int, int]]:
    """For each stage its first layer and the layer after its last."""
    return list(pairwise(accumulate(balance, initial=0)))


def costs_of(chain: Chain, machine: Machine, balance: Sequence[int], split: bool = False) -> Costs:
    """What a player needs to know of a cut; stage ``s`` is on device ``s`` of the machine.

    A backward that is not split stands as its input half, so that the gradient goes on when it is
    over.
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


def doubles(numbers: Iterable[float]) -> Tensor:
    """Numbers as a tensor in double precision."""
    return torch.tensor([*numbers], dtype=torch.float64)


# -- numbers of micro-batches and of stages --------------------------------------------------------

# torch.chunk cuts a mini-batch into micro-batches of equal size, rounded up, and the last one is
# what remains. So not every number of them is possible: 10 samples make 5 micro-batches of 2 or 4
# of 3, 3, 3 and 1, but never 6.

#: More micro-batches are tried only on demand; the simulator plays each of them through.
_MOST = 1024
#: Between two numbers that divide the mini-batch there are others, if they are so far apart.
_GAP = 1.5


def sizes_of(batch_size: int, chunks: int) -> tuple[int, int]:
    """The samples in each micro-batch, and in the last one.

    Raises:
        ValueError: so many are not possible.
    """
    size = -(-batch_size // chunks) if chunks > 0 else 0
    number = -(-batch_size // size) if size else 0
    if not size or number != chunks:
        instead = f": torch.chunk makes {number} of {size}; give it chunks={number}" * bool(size)
        raise ValueError(
            f"chunks={chunks} does not divide batch_size={batch_size} into so many{instead}"
        )
    return size, batch_size - (chunks - 1) * size


def chunk_counts(batch_size: int, chunks: int | Iterable[int] | None = None) -> tuple[int, ...]:
    """The numbers of micro-batches to try, ascending, at most 1024; or those that are wanted.

    All that divide the mini-batch, and where these are far apart (a prime number has none) some
    between them, in which the last micro-batch is smaller. From 4 for each device on the bubble is
    negligible (Huang et al. 2019, GPipe, section 2.3). More are tried all the same: they save
    memory, and what is tried must not depend on memory, or a plan might be slower with more of it.

    Raises:
        ValueError: what the user wants is not possible.
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
    # Those far apart from them, where the last micro-batch is the least small.
    others = [m for m in numbers if batch_size % m and -(-batch_size // -(-batch_size // m)) == m]
    for m in sorted(others, key=lambda m: (m * -(-batch_size // m), m)):
        if all(not 1 / _GAP < m / other < _GAP for other in every):
            every.append(m)
    return tuple(sorted(every))
