"""How many micro-batches and how many stages are worth a look.

``torch.chunk`` cuts a mini-batch into micro-batches of equal size, rounded up, and the last one is
what remains. So not every number of them is possible: 10 samples make 5 micro-batches of 2 or 4 of
3, 3, 3 and 1, but never 6.
"""

from __future__ import annotations

from collections.abc import Iterable

from syncpipe.balance.profile import Profile

__all__ = ["MOST", "chunk_counts", "possible", "sizes_of", "stage_counts"]

#: More micro-batches are tried only on demand; the simulator plays each of them through.
MOST = 1024
#: So many for each device are usual, where what a small micro-batch costs is unknown.
_UNKNOWN = 4
#: And where that was measured.
_MEASURED = 16
#: Between two numbers that divide the mini-batch there are others, if they are so far apart.
_GAP = 1.5


def possible(batch_size: int, chunks: int) -> int:
    """How many micro-batches ``torch.chunk`` makes of a mini-batch, if asked for ``chunks``."""
    return -(-batch_size // -(-batch_size // chunks))


def sizes_of(batch_size: int, chunks: int) -> tuple[int, int]:
    """The samples in each micro-batch, and in the last one.

    Raises:
        ValueError: so many are not possible.
    """
    size = -(-batch_size // chunks) if chunks > 0 else 0
    if not size or possible(batch_size, chunks) != chunks:
        instead = ""
        if size:
            number = possible(batch_size, chunks)
            instead = (
                f": as torch.chunk cuts it, they are {number} of {size}; give it chunks={number}"
            )
        raise ValueError(
            f"chunks={chunks} does not divide batch_size={batch_size} into so many{instead}"
        )
    return size, batch_size - (chunks - 1) * size


def chunk_counts(
    profile: Profile, devices: int, batch_size: int, chunks: int | Iterable[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of micro-batches to try; the same for any memory.

    All that divide the mini-batch, and where these are far apart (a prime number has none) some
    between them, in which the last micro-batch is smaller.

    From 4 for each device on the bubble is negligible (Huang et al. 2019, GPipe, section 2.3). More
    are tried all the same: they save memory, and what is tried must not depend on memory, or a plan
    might be slower with more of it. But a profile for one size of the micro-batch does not say what
    each of them costs beside its samples; by its numbers more are always better. So those beyond 4
    for each device (16, if several sizes were measured) are told apart.

    Args:
        profile: says how many sizes were measured.
        devices: how many there are.
        batch_size: samples in a mini-batch.
        chunks: what the user wants instead.

    Returns:
        Those that are usual, and those beyond: both ascending, at most 1024.

    Raises:
        ValueError: what the user wants is not possible.
    """
    if chunks is not None:
        wanted = (chunks,) if isinstance(chunks, int) else tuple(dict.fromkeys(chunks))
        for m in wanted:
            sizes_of(batch_size, m)
        if not wanted:
            raise ValueError("chunks is empty: give it a number, or leave it out")
        return wanted, ()
    every = _every(batch_size)
    most = devices * (_UNKNOWN if len(profile.sizes) == 1 else _MEASURED)
    return tuple(m for m in every if m <= most), tuple(m for m in every if m > most)


def _every(batch_size: int) -> list[int]:
    """Divisors, and between those far apart what makes the last micro-batch least small."""
    most = min(batch_size, MOST)
    divisors = [m for m in range(1, most + 1) if batch_size % m == 0]
    others = [m for m in range(1, most + 1) if possible(batch_size, m) == m and batch_size % m]
    every = divisors
    for m in sorted(others, key=lambda m: (m * -(-batch_size // m), m)):
        if all(not 1 / _GAP < m / other < _GAP for other in every):
            every.append(m)
    return sorted(every)


def stage_counts(
    layers: int, devices: int, stages: int | Iterable[int] | None = None
) -> tuple[int, ...]:
    """The numbers of stages to try: what the user wants, or all that are possible.

    Raises:
        ValueError: what the user wants is not possible.
    """
    most = min(layers, devices)
    if stages is None:
        return tuple(range(1, most + 1))
    wanted = (stages,) if isinstance(stages, int) else tuple(dict.fromkeys(stages))
    for n in wanted:
        if not 1 <= n <= most:
            raise ValueError(
                f"stages={n} is not possible with {devices} devices and {layers} layers: give it "
                f"1 to {most}"
            )
    if not wanted:
        raise ValueError("stages is empty: give it a number, or leave it out")
    return wanted
