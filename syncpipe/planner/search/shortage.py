"""``shortage``: what to say when nothing fits: which stage misses by how much, and what would help.

The least memory is taken with the smallest micro-batches, the fewest slots, and recomputation
where it helps; so only these are looked at. How near a placement comes is the largest share of its
limit that a stage takes: the least share for which all stages still fit is found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from syncpipe.balance.profile import Profile, in_bytes
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.cuts.network import even_cut
from syncpipe.planner.cuts.one_f_one_b import slots_of
from syncpipe.planner.search.candidate import SCHEDULES, Terms
from syncpipe.planner.search.sizes import MOST, chunk_counts, stage_counts

__all__ = ["Shortage", "shortage"]

_MOST_DEVICES = 64
_CLOSE = 1e-4  # how exactly the least share is found, relative


@dataclass(frozen=True)
class Shortage:
    """The placement that comes nearest to fitting, and what would make one fit.

    Attributes:
        balance: layers of each stage; stage ``s`` is on device ``s``.
        chunks: number of micro-batches.
        schedule: ``"gpipe"`` or ``"1f1b"``.
        slots: micro-batches in flight on each stage, at most.
        recomputes: for each stage whether it re-materializes.
        memory: bytes that each stage takes.
        limits: bytes that each device has.
        stage: the one that exceeds its limit by the largest factor.
        factor: by which all memories would have to grow.
        devices: the smallest number of devices like these that would do, up to 64; None if that
            is too few, or these are not alike.
        batch_size: a large one that fits on these devices, the largest of those that were tried;
            None if none does.
    """

    balance: tuple[int, ...]
    chunks: int
    schedule: str
    slots: tuple[int, ...]
    recomputes: tuple[bool, ...]
    memory: tuple[float, ...]
    limits: tuple[float, ...]
    stage: int
    factor: float
    devices: int | None
    batch_size: int | None

    @property
    def missing(self) -> float:
        """Bytes that the stage lacks."""
        return self.memory[self.stage] - self.limits[self.stage]

    @property
    def memory_per_device(self) -> float:
        """Bytes on the largest device that would do, if all grow by the factor."""
        return self.factor * max(self.limits)

    def __str__(self) -> str:
        s = self.stage
        return (
            f"balance={list(self.balance)} comes nearest, with chunks={self.chunks}: stage {s} "
            f"needs {in_bytes(self.memory[s])} of {in_bytes(self.limits[s])}"
        )


@dataclass(frozen=True)
class _Placement:
    """Cut, schedule, slots; and the largest share of its limit that a stage takes."""

    share: float
    balance: tuple[int, ...]
    chunks: int
    schedule: str
    slots: tuple[int, ...]


def shortage(
    profile: Profile,
    machine: Machine,
    batch_size: int,
    *,
    param_scale: float,
    chunks: int | Iterable[int] | None = None,
    stages: int | Iterable[int] | None = None,
    schedules: Sequence[str] = SCHEDULES,
) -> Shortage | None:
    """Explains why :func:`.search` finds nothing, with the same arguments.

    Returns:
        The placement that comes nearest; None if there is one that fits.

    Raises:
        ValueError: an argument does not fit.
    """
    terms = Terms(profile, machine, batch_size, param_scale)
    wanted = None if chunks is None or isinstance(chunks, int) else tuple(chunks)
    chunks = chunks if isinstance(chunks, int) else wanted
    usual, extra = chunk_counts(terms.profile, len(machine), batch_size, chunks)
    m = max(usual + extra)
    counts = stage_counts(len(terms.profile.layers), len(machine), stages)
    # More stages take less on each, but for what waits in flight.
    nearest: _Placement | None = None
    for n in sorted(counts, reverse=True)[:8]:
        most = nearest.share * (1 - _CLOSE) if nearest else math.inf
        found = _nearest(terms, n, m, schedules, most)
        nearest = found or nearest
    assert nearest is not None  # without a limit there is one
    if nearest.share <= 1:
        return None
    balance, slots = nearest.balance, nearest.slots
    tight = terms.on(_with_limits(machine, nearest.share))
    recomputes = tight.recomputing(balance, m, slots)
    memory = tuple(
        terms.chain(m).memory(i, j, slots[s], slots[0], recomputes[s])
        for s, (i, j) in enumerate(pairwise(accumulate(balance, initial=0)))
    )
    limits = machine.memory[: len(balance)]
    shares = [a / b for a, b in zip(memory, limits, strict=True)]
    return Shortage(
        balance=balance,
        chunks=m,
        schedule=nearest.schedule,
        slots=slots,
        recomputes=recomputes,
        memory=memory,
        limits=limits,
        stage=shares.index(max(shares)),
        factor=max(shares),
        devices=_enough_devices(terms, m, schedules) if stages is None else None,
        batch_size=_largest_batch(terms, counts, chunks, schedules),
    )


def _frugal(n: int, m: int, schedules: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """The schedule that takes the least memory, and its slots."""
    if "1f1b" in schedules:
        return "1f1b", slots_of("single", n, m)
    return "gpipe", (m,) * n


def _with_limits(machine: Machine, share: float) -> Machine:
    return machine.with_memory([share * limit for limit in machine.memory])


def _nearest(
    terms: Terms, n: int, m: int, schedules: Sequence[str], most: float
) -> _Placement | None:
    """The placement into ``n`` stages that takes the least share of memory, if less than most."""
    if most <= 0:  # nothing takes less than nothing
        return None
    schedule, slots = _frugal(n, m, schedules)
    chain, machine = terms.chain(m), terms.machine

    def placed(share: float) -> tuple[int, ...] | None:
        limited = terms.on(_with_limits(machine, share))
        return limited.cuts(schedule, m, slots).fits()

    held = [w + z for w, z in zip(chain.fixed_to, chain.stored_to, strict=True)]
    balance = even_cut(held, n) if held == sorted(held) else even_cut(chain.fixed_to, n)
    high = _share(terms, balance, m, slots)
    if most < math.inf:
        first = placed(most)
        if first is None:
            return None
        balance, high = first, min(most, _share(terms, first, m, slots))
    low = 0.0
    while high - low > _CLOSE * high:
        share = (low + high) / 2
        cut = placed(share)
        if cut is None:
            low = share
        else:
            balance, high = cut, min(share, _share(terms, cut, m, slots))
    return _Placement(high, balance, m, schedule, slots)


def _share(terms: Terms, balance: Sequence[int], m: int, slots: Sequence[int]) -> float:
    """The largest share of its limit that a stage takes, recomputing where that takes less."""
    chain, shares, i = terms.chain(m), [], 0
    for s, size in enumerate(balance):
        least = min(chain.memory(i, i + size, slots[s], slots[0], r) for r in (False, True))
        shares.append(least / terms.machine.memory[s])
        i += size
    return max(shares)


def _enough_devices(terms: Terms, m: int, schedules: Sequence[str]) -> int | None:
    """How many equal devices would do."""
    machine = terms.machine
    if not machine.uniform:
        return None
    for n in range(len(machine) + 1, min(_MOST_DEVICES, len(terms.profile.layers)) + 1):
        more = terms.on(Machine.even(n, machine.memory[0]))
        schedule, slots = _frugal(n, m, schedules)
        if more.cuts(schedule, m, slots).fits():
            return n
    return None


def _largest_batch(
    terms: Terms,
    counts: Sequence[int],
    chunks: int | Iterable[int] | None,
    schedules: Sequence[str],
) -> int | None:
    """The largest mini-batch that fits, a multiple of the number of micro-batches if that is given.

    Memory grows with the mini-batch; so bisection finds it.
    """
    wanted: Iterable[int | None]
    if chunks is None:  # micro-batches of one sample, or as many as may be
        wanted = (None,) if terms.batch_size <= MOST else (MOST, None)
    else:
        wanted = (chunks,) if isinstance(chunks, int) else chunks
    best: int | None = None
    for m in wanted:
        low, high = 0, terms.batch_size // m if m else min(terms.batch_size, MOST + 1)
        while high - low > 1:
            k = (low + high) // 2
            size, number = (k * m, m) if m else (k, k)
            smaller = Terms(terms.profile, terms.machine, size, terms.param_scale)
            ways = [(n, *_frugal(n, number, schedules)) for n in counts]
            if any(smaller.cuts(way, number, slots).fits() for _, way, slots in ways):
                low = k
            else:
                high = k
        if low:
            best = max(best or 0, low * (m or 1))
    return best
