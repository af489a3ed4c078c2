"""What the layers of a profile cost for one size of micro-batch, as sums over any run of them.

The planner asks for the sums of ten thousand stages, so they come from prefix sums. A stage is a
run ``[i, j)`` of layers. Times are in seconds, sizes in bytes, all for one micro-batch.

What a stage holds while ``q`` of its micro-batches are in flight and ``q0`` of stage 0's:

    fixed + (q - 1) * (recomputes ? into : stored) + running + arrived + q0 * waiting

``fixed`` is there all the time: parameters, gradients, the optimizer's state, buffers. Of the
micro-batches in flight one is running, forward or back, and the others are what they store, or
their inputs where the stage recomputes. ``running`` is what that one has at most::

    layers    i ... l-1         l            l+1 ...
              stored            at its peak  goes back first: nothing is left     max over l

where the peak of a layer has all that is alive for a moment: outputs, gradients of activations, the
gradient of a weight until it is added to that of the micro-batches before. ``arrived`` are inputs
that the stage before has sent ahead, at most two, as it has that many more in flight; at stage 0
the rest of the mini-batch, which is there from the start. ``waiting`` are skips from stages to the
left: these can send them as early as stage 0 may begin, so of those that a stage has not begun with
there are ``q0 - q``, and where it recomputes it keeps the others as well.

Where nobody knows the peaks (:attr:`Chain.peaks` is empty) what a layer has for a moment does not
count: it is ``fixed + (recomputes ? q * into + stored : q * stored) + q0 * waiting``.

The gradients that a step finds (none after ``zero_grad()`` as it is by default) are copied by
``train_batch``, to be put back if it fails: 1 more in ``param_scale``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from syncpipe.balance.profile import Profile, interpolate
from syncpipe.planner.costs.machine import Machine
from syncpipe.schedules.simulation import Costs

__all__ = ["Chain", "Held", "costs_of", "way"]

#: So many inputs at most have arrived at a stage that has not begun with them.
_AHEAD = 2


class Held(NamedTuple):
    """What a stage holds at most, in bytes; the sum is :meth:`Chain.memory`.

    Attributes:
        fixed: parameters, gradients, the optimizer's state, buffers.
        stored: activations stored for backward, or inputs where it recomputes, of all micro-batches
            in flight; of the running one all that it stores.
        moment: what is alive for a moment: outputs, gradients of activations, and the gradient of
            a weight until it is added to the one before.
        arrived: inputs that it has not begun with.
        waiting: skips from stages before.
    """

    fixed: float
    stored: float
    moment: float
    arrived: float
    waiting: float


@dataclass(frozen=True)
class Chain:
    """Layers one after another, and skips beside them.

    Attributes:
        forward: seconds, for each layer.
        backward: seconds, for each layer.
        inputs: bytes that enter each layer.
        stored: bytes that each layer keeps for backward.
        shared: the part of these that the layer before it keeps already.
        fixed: bytes that stay on the device of each layer.
        skips: ``(layer that stashes, layer that pops, bytes)``.
        interpreter: seconds that the forward of each layer holds the interpreter's lock.
        peaks: bytes that are alive at most while each layer runs (``LayerProfile.peak_bytes``);
            empty where nobody knows.
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
            return tuple(interpolate(getattr(layer, what), samples) for layer in layers)

        given = interpolate(profile.input_bytes, samples) if profile.input_bytes else 0.0
        return cls(
            forward=numbers("forward"),
            backward=numbers("backward"),
            inputs=(given, *numbers("output_bytes")[:-1]),
            stored=numbers("stored_bytes"),
            shared=tuple(
                interpolate(layer.shared_bytes, samples) if layer.shared_bytes else 0.0
                for layer in layers
            ),
            fixed=tuple(layer.memory(param_scale) for layer in layers),
            interpreter=tuple(layer.interpreter for layer in layers),
            peaks=numbers("peak_bytes") if all(layer.peak_bytes for layer in layers) else (),
            batch=interpolate(profile.input_bytes, batch_size) if profile.input_bytes else 0.0,
            skips=tuple(
                (skip.stash, skip.pop, interpolate(skip.bytes, samples)) for skip in profile.skips
            ),
        )

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def forward_to(self) -> tuple[float, ...]:
        """Forward of all layers before each border."""
        return _sums(self.forward)

    @cached_property
    def backward_to(self) -> tuple[float, ...]:
        return _sums(self.backward)

    @cached_property
    def time_to(self) -> tuple[float, ...]:
        """Forward and backward of all layers before each border."""
        return tuple(map(sum, zip(self.forward_to, self.backward_to, strict=True)))

    @cached_property
    def interpreter_to(self) -> tuple[float, ...]:
        return _sums(self.interpreter or (0.0,) * len(self))

    @cached_property
    def fixed_to(self) -> tuple[float, ...]:
        return _sums(self.fixed)

    @cached_property
    def stored_to(self) -> tuple[float, ...]:
        """Stored bytes without the shared ones, which count for the first layer of a stage only."""
        return _sums(a - b for a, b in zip(self.stored, self.shared, strict=True))

    @property
    def total(self) -> float:
        """Forward and backward of everything."""
        return self.time_to[-1]

    def stored_in(self, i: int, j: int) -> float:
        """What a stage keeps for the backward of one micro-batch."""
        return self.stored_to[j] - self.stored_to[i] + self.shared[i]

    def waiting(self, i: int) -> list[float] | None:
        """For each end ``j`` the bytes of skips into ``[i, j)`` from before; None if there is none.

        Skips come from where a stage to the left is, so those inside ``[i, j)`` do not count.
        """
        popped = [0.0] * (len(self) + 1)
        for stash, pop, size in self.skips:
            if stash < i <= pop:
                popped[pop + 1] += size
        return list(accumulate(popped)) if any(popped) else None

    def running(self, i: int) -> list[float] | None:
        """For each end ``j`` what one micro-batch has at most in ``[i, j)`` while it runs, beyond
        what it stores there; None if nobody knows.
        """
        if not self.peaks:
            return None
        if i not in self._running:
            stored, found, most = self.stored_to, [0.0] * (i + 1), 0.0
            base = stored[i] - self.shared[i]
            for k in range(i, len(self)):
                peak = self.peaks[k] - (self.shared[k] if k > i else 0.0)
                most = max(most, stored[k] - stored[i] + (self.shared[i] if k > i else 0.0) + peak)
                found.append(max(0.0, most - (stored[k + 1] - base)))
            self._running[i] = found
        return self._running[i]

    @cached_property
    def _running(self) -> dict[int, list[float]]:
        return {}

    def inputs_in(self, i: int, q: int) -> float:
        """Inputs that a stage from layer ``i`` keeps beside what one micro-batch stores."""
        return (q - bool(self.peaks)) * self.inputs[i]

    def arrived(self, i: int, q: int, q0: int) -> float:
        """Inputs that a stage from layer ``i`` may have, with which it has not begun."""
        if not self.peaks:
            return 0.0
        if not i:
            return max(0.0, self.batch - q * self.inputs[0])
        return max(0, min(_AHEAD, q0 - q)) * self.inputs[i]

    def ahead(self, q: int, q0: int) -> int:
        """How many of each skip wait for a stage that keeps what it stores."""
        return max(0, q0 - q) if self.peaks else q0

    def held(self, i: int, j: int, q: int, q0: int, recomputes: bool) -> Held:
        """What a stage takes at most.

        Args:
            i: its first layer.
            j: the layer after its last.
            q: micro-batches in flight on it.
            q0: micro-batches in flight on stage 0.
            recomputes: whether it does its forward again before its backward.
        """
        stored = self.stored_in(i, j)
        running = self.running(i)
        return Held(
            fixed=self.fixed_to[j] - self.fixed_to[i],
            stored=self.inputs_in(i, q) + stored if recomputes else q * stored,
            moment=running[j] if running else 0.0,
            arrived=self.arrived(i, q, q0),
            waiting=(q0 if recomputes else self.ahead(q, q0))
            * sum(size for stash, pop, size in self.skips if stash < i <= pop < j),
        )

    def memory(self, i: int, j: int, q: int, q0: int, recomputes: bool) -> float:
        """Bytes that a stage takes at most: the sum of :meth:`held`."""
        return sum(self.held(i, j, q, q0, recomputes))


def costs_of(chain: Chain, machine: Machine, balance: Sequence[int]) -> Costs:
    """What the simulator needs to know of a cut; stage ``s`` is on device ``s``.

    All of a backward stands as its input half, so that the gradient goes on when it is over.
    """
    stages = list(pairwise(accumulate(balance, initial=0)))
    forward, backward = chain.forward_to, chain.backward_to
    transfer = [way(machine, chain.inputs[i], s - 1, s) for s, (i, _) in enumerate(stages) if s]
    stage_of = [s for s, number in enumerate(balance) for _ in range(number)]
    skips: dict[tuple[int, int], float] = {}
    for stash, pop, size in chain.skips:
        a, b = stage_of[stash], stage_of[pop]
        if a != b:
            skips[a, b] = skips.get((a, b), 0.0) + way(machine, size, a, b)
    speed = machine.speed

    def on_device(sums: Sequence[float]) -> tuple[float, ...]:
        return tuple((sums[j] - sums[i]) / speed[s] for s, (i, j) in enumerate(stages))

    return Costs(
        forward=on_device(forward),
        backward_input=on_device(backward),
        backward_weight=(0.0,) * len(stages),
        transfer=tuple(transfer),
        skips=skips,
    )


def way(machine: Machine, size: float, a: int, b: int) -> float:
    """Seconds from device to device; what goes there comes back as a gradient, and the slower way
    of the two stands for both.
    """
    return max(machine.time(size, a, b), machine.time(size, b, a))


def _sums(numbers: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(numbers, initial=0.0))
