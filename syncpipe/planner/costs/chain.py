"""What the layers of a profile cost for one size of micro-batch, as sums over any run of them.

The planner asks for the sums of ten thousand stages, so they come from prefix sums. A stage is a
run ``[i, j)`` of layers. Times are in seconds, sizes in bytes, all for one micro-batch.

What a stage holds while ``q`` of its micro-batches are in flight and ``q0`` of stage 0's:

    fixed + (recomputes ? q * into + stored : q * stored) + q0 * waiting

``fixed`` is there all the time: parameters, gradients, the optimizer's state, buffers. A stage that
recomputes keeps its inputs, and for one micro-batch at a time all the rest. ``waiting`` are skips
from stages to the left: these can send them as early as stage 0 may begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from syncpipe.balance.profile import Profile, interpolate
from syncpipe.planner.costs.machine import Machine
from syncpipe.schedules.simulation import Costs

__all__ = ["Chain", "costs_of", "way"]


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
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    inputs: tuple[float, ...]
    stored: tuple[float, ...]
    shared: tuple[float, ...]
    fixed: tuple[float, ...]
    skips: tuple[tuple[int, int, float], ...] = ()
    interpreter: tuple[float, ...] = ()

    @classmethod
    def of(cls, profile: Profile, samples: float, param_scale: float) -> Chain:
        """The layers of a profile for a micro-batch of so many samples.

        Args:
            profile: of a known number of samples (:meth:`Profile.of`).
            samples: in a micro-batch.
            param_scale: bytes for each byte of a parameter that is trained.
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

    def memory(self, i: int, j: int, q: int, q0: int, recomputes: bool) -> float:
        """Bytes that a stage takes at most.

        Args:
            i: its first layer.
            j: the layer after its last.
            q: micro-batches in flight on it.
            q0: micro-batches in flight on stage 0.
            recomputes: whether it does its forward again before its backward.
        """
        stored = self.stored_in(i, j)
        kept = q * self.inputs[i] + stored if recomputes else q * stored
        waiting = sum(size for stash, pop, size in self.skips if stash < i <= pop < j)
        return self.fixed_to[j] - self.fixed_to[i] + kept + q0 * waiting


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
