"""What the layers of a profile cost for one size of micro-batch, as sums over any run of them.

A stage is a run ``[i, j)`` of layers. Times are in seconds, sizes in bytes, for one micro-batch.

What a stage holds while ``q`` of its micro-batches are in flight and ``q0`` of stage 0's:

    fixed + in flight + transient + arrived + waiting

``fixed`` is there all the time: parameters, gradients, the optimizer's state, buffers. Of the
micro-batches in flight one is running, forward or backward; the others are what they store, or
their inputs where the stage recomputes or offloads. ``transient`` is what the running one has more
at its fullest moment:

    layers    i ... l-1         l            l+1 ...
              stored            at its peak  goes back first: nothing is left     max over l

where the peak of a layer has all that is alive for a moment: outputs, gradients of activations, the
gradient of a weight until it is added to that of the micro-batches before. ``arrived`` are inputs
that the stage before has sent ahead, at most two; at stage 0 the rest of the mini-batch, which is
there from the start. ``waiting`` are skips from stages to the left, which can send them as early as
stage 0 may begin: ``q0 - q`` of those that the stage has not begun with, and where it recomputes
those of the others as well. Where the peaks are unknown (:attr:`Chain.peaks` is empty) nothing
transient counts, and nothing that arrived.

A stage that offloads sends what it stores to the host and gets it back. On the device are the
running micro-batch, the one that leaves or comes back meanwhile, and what the link has not taken:
a forward makes ``stored`` bytes, and the link takes so many while it lasts (Wan et al. 2025,
PipeOffload).

The gradients that a step finds (none after ``zero_grad()`` as it is by default) are copied by
``train_batch``, to be put back if it fails: 1 more in ``param_scale``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from syncpipe.balance.profile import Profile, interpolate
from syncpipe.planner.machine import Machine
from syncpipe.schedules.player import Costs

__all__ = ["Chain", "Held", "Mode", "Run", "costs_of", "doubles", "ends_of"]

#: What a stage does with its activations until their backward.
Mode = Literal["store", "recompute", "offload"]

#: So many inputs at most have arrived at a stage that has not begun with them.
_AHEAD = 2


class Run(NamedTuple):
    """What layers ``[i, j)`` have, each a number, or tensors for many runs at once.

    Attributes:
        first: whether ``i`` is 0.
        forward: seconds.
        backward: seconds.
        fixed: bytes that stay.
        inputs: bytes that enter.
        stored: bytes that they store for the backward of one micro-batch.
        transient: bytes that one micro-batch has more while it runs.
        popped: bytes of skips from before ``i``.
    """

    first: bool
    forward: Any
    backward: Any
    fixed: Any
    inputs: Any
    stored: Any
    transient: Any
    popped: Any


class Held(NamedTuple):
    """What a stage holds at most, in bytes; the sum is :meth:`Chain.memory`.

    Attributes:
        fixed: parameters, gradients, the optimizer's state, buffers.
        stored: activations stored for backward of all micro-batches in flight, or inputs where it
            recomputes or offloads; of the running one all that it stores.
        transient: what is alive for a moment: outputs, gradients of activations, and the gradient
            of a weight until it is added to the one before.
        arrived: inputs that it has not begun with.
        waiting: skips from stages before.
    """

    fixed: Any
    stored: Any
    transient: Any
    arrived: Any
    waiting: Any


@dataclass(frozen=True)
class Chain:
    """Layers one after another, and skips beside them.

    Attributes:
        forward: seconds, for each layer.
        backward: seconds, for each layer.
        inputs: bytes that enter each layer.
        stored: bytes that each layer stores for backward.
        shared: the part of these that the layer before it stores already.
        fixed: bytes that stay on the device of each layer.
        skips: ``(layer that stashes, layer that pops, bytes)``.
        interpreter: seconds that the forward of each layer holds the interpreter's lock.
        peaks: bytes that are alive at most while each layer runs (``LayerProfile.peak_bytes``);
            empty where they are unknown.
        batch: bytes of the inputs of the mini-batch, which is on the first device; 0 if it is not.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    inputs: tuple[float, ...]
    stored: tuple[float, ...]
    shared: tuple[float, ...]
    fixed: tuple[float, ...]
    skips: tuple[tuple[int, int, float], ...] = ()
    interpreter: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()
    batch: float = 0.0

    @classmethod
    def of(cls, profile: Profile, samples: float, param_scale: float, batch_size: int = 0) -> Chain:
        """The layers of a profile for a micro-batch of so many samples.

        Args:
            profile: of a known number of samples (:meth:`Profile.of`).
            samples: in a micro-batch.
            param_scale: bytes for each byte of a parameter that is trained.
            batch_size: samples of the mini-batch, if that is on the first device.
        """
        layers = profile.layers

        def numbers(what: str) -> tuple[float, ...]:
            values = (getattr(layer, what) for layer in layers)
            return tuple(interpolate(value, samples) if value else 0.0 for value in values)

        given = profile.input_bytes
        return cls(
            forward=numbers("forward"),
            backward=numbers("backward"),
            inputs=(interpolate(given, samples) if given else 0.0, *numbers("output_bytes")[:-1]),
            stored=numbers("stored_bytes"),
            shared=numbers("shared_bytes"),
            fixed=tuple(layer.memory(param_scale) for layer in layers),
            interpreter=tuple(layer.interpreter for layer in layers),
            peaks=numbers("peak_bytes") if all(layer.peak_bytes for layer in layers) else (),
            batch=interpolate(given, batch_size) if given else 0.0,
            skips=tuple(
                (skip.stash, skip.pop, interpolate(skip.bytes, samples)) for skip in profile.skips
            ),
        )

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def sums(self) -> dict[str, tuple[float, ...]]:
        """Of what all layers before each boundary have. Shared stored bytes are left out, for they
        count for the first layer of a stage only.
        """
        own = [a - b for a, b in zip(self.stored, self.shared, strict=True)]
        python = self.interpreter or (0.0,) * len(self)
        columns = {"forward": self.forward, "backward": self.backward, "fixed": self.fixed}
        columns |= {"stored": own, "interpreter": python}  # type: ignore[dict-item]
        found = {what: tuple(accumulate(each, initial=0.0)) for what, each in columns.items()}
        both = zip(found["forward"], found["backward"], strict=True)
        return found | {"time": tuple(f + b for f, b in both)}

    @cached_property
    def _transient(self) -> Tensor:
        """What one micro-batch has at most in ``[i, j)`` while it runs, beyond what it stores
        there; for all ``i`` and ``j``, ``[L, L + 1]``.
        """
        count = len(self)
        if not self.peaks:
            return torch.zeros(count, count + 1, dtype=torch.float64)
        to, shared, peaks = map(doubles, (self.sums["stored"], self.shared, self.peaks))
        later = torch.ones(count, count).triu(1).bool()
        full = to[:-1] - to[:-1, None] + peaks + (shared[:, None] - shared) * later
        most = full.masked_fill(torch.ones(count, count).tril(-1).bool(), -torch.inf).cummax(1)[0]
        stored = to[1:] - to[:-1, None] + shared[:, None]
        return torch.nn.functional.pad((most - stored).clamp(min=0), (1, 0))

    @cached_property
    def _popped(self) -> Tensor:
        """Bytes of skips into ``[i, j)`` from before ``i``, for all ``i`` and ``j``; those that
        come from inside do not count.
        """
        found = torch.zeros(len(self), len(self) + 1, dtype=torch.float64)
        for stash, pop, size in self.skips:
            found[stash + 1 : pop + 1, pop + 1 :] += size
        return found

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        starts = {"shared": self.shared, "inputs": self.inputs}
        return {what: doubles(each) for what, each in (self.sums | starts).items()}

    @cached_property
    def _runs(self) -> dict[tuple[int, int], Run]:
        return {}

    def run(self, i: int, j: int) -> Run:
        """What the layers ``[i, j)`` have."""
        if (i, j) not in self._runs:
            f, b, w, z = (
                each[j] - each[i]
                for each in map(self.sums.__getitem__, ("forward", "backward", "fixed", "stored"))
            )
            once = (float(x[i, j]) for x in (self._transient, self._popped))
            self._runs[i, j] = Run(i == 0, f, b, w, self.inputs[i], z + self.shared[i], *once)
        return self._runs[i, j]

    def runs(self, i: slice, j: slice, first: bool) -> Run:
        """The same for all starts ``i`` and ends ``j``, as tensors."""
        x = self._tensors
        f, b, w, z = (
            x[what][j] - x[what][i, None] for what in ("forward", "backward", "fixed", "stored")
        )
        transient = self._transient[i, j] if self.peaks else 0.0
        popped = self._popped[i, j] if self.skips else 0.0
        stored = z + x["shared"][i, None]
        return Run(first, f, b, w, x["inputs"][i, None], stored, transient, popped)

    def account(self, run: Run, q: Any, q0: Any, mode: Mode, taken: Any = 0.0) -> Held:
        """What a stage of these layers takes at most, or many of them.

        Args:
            run: its layers.
            q: micro-batches in flight on it.
            q0: micro-batches in flight on stage 0.
            mode: what it does with activations.
            taken: bytes that the link to the host takes while one of its forwards lasts.
        """
        stored, inputs, known = run.stored, run.inputs, bool(self.peaks)
        each, once, skips = stored, 0.0, _over(q0 - q) if known else q0
        if mode != "store":
            each, once, skips = inputs, stored - known * inputs, q0
        if mode == "offload":
            more = _over(q - 2)
            once = once + (q - 1 - more) * stored + more * _over(stored - taken)
        arrived = 0.0
        if known and run.first:
            arrived = _over(self.batch - q * inputs)
        elif known:
            arrived = (_over(q0 - q) - _over(q0 - q - _AHEAD)) * inputs
        return Held(run.fixed, q * each + once, run.transient, arrived, skips * run.popped)

    def held(self, i: int, j: int, q: int, q0: int, mode: Mode, taken: float = 0.0) -> Held:
        """What the stage ``[i, j)`` takes at most."""
        return self.account(self.run(i, j), q, q0, mode, taken)

    def memory(self, i: int, j: int, q: int, q0: int, mode: Mode, taken: float = 0.0) -> float:
        """Bytes that a stage takes at most: the sum of :meth:`held`."""
        return float(sum(self.held(i, j, q, q0, mode, taken)))


def _over(number: Any) -> Any:
    """The number, or numbers, where they are more than nothing."""
    return number.clamp(min=0) if isinstance(number, Tensor) else max(0.0, number)


def ends_of(balance: Sequence[int]) -> list[tuple[int, int]]:
    """For each stage its first layer and the layer after its last."""
    return list(pairwise(accumulate(balance, initial=0)))


def costs_of(chain: Chain, machine: Machine, balance: Sequence[int]) -> Costs:
    """What a player needs to know of a cut; stage ``s`` is on device ``s`` of the machine.

    All of a backward stands as its input half, so that the gradient goes on when it is over.
    """
    stages = ends_of(balance)
    runs = [chain.run(i, j) for i, j in stages]
    skips: dict[tuple[int, int], float] = {}
    if chain.skips:
        stage_of = [s for s, number in enumerate(balance) for _ in range(number)]
        for stash, pop, size in chain.skips:
            a, b = stage_of[stash], stage_of[pop]
            if a != b:
                skips[a, b] = skips.get((a, b), 0.0) + machine.transfer(size, a, b)
    return Costs(
        forward=tuple(run.forward / v for run, v in zip(runs, machine.speed, strict=False)),
        backward_input=tuple(run.backward / v for run, v in zip(runs, machine.speed, strict=False)),
        backward_weight=(0.0,) * len(stages),
        transfer=tuple(
            machine.transfer(chain.inputs[i], s - 1, s) for s, (i, _) in enumerate(stages) if s
        ),
        skips=skips,
    )


def doubles(numbers: Iterable[float]) -> Tensor:
    """Numbers as a tensor in double precision."""
    return torch.tensor([*numbers], dtype=torch.float64)
