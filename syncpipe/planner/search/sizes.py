"""How many micro-batches and how many stages are worth a look."""

from __future__ import annotations

from collections.abc import Iterable

from syncpipe.balance.profile import Profile

__all__ = ["MOST", "chunk_counts", "stage_counts"]

#: More micro-batches are tried only on demand; the simulator plays each of them through.
MOST = 1024
#: So many for each device, where nobody knows what a micro-batch costs however small it is.
_UNKNOWN = 4
#: And where that was measured.
_MEASURED = 16


def chunk_counts(
    profile: Profile, devices: int, batch_size: int, chunks: int | Iterable[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of micro-batches to try.

    A profile for one size of the micro-batch does not say what each micro-batch costs beside its
    samples, so by its numbers more of them would always be better. With one, there are at most 4
    for each device: from there on the bubble is negligible (Huang et al. 2019, GPipe, section
    2.3). A profile for several sizes knows the price; up to 16 for each device are tried.

    Args:
        profile: says how many sizes were measured.
        devices: how many there are.
        batch_size: what all of them divide.
        chunks: what the user wants instead.

    Returns:
        Those to try, and those, ascending, to turn to where memory is too small for these: at most
        1024.

    Raises:
        ValueError: what the user wants does not divide the mini-batch.
    """
    if chunks is not None:
        wanted = (chunks,) if isinstance(chunks, int) else tuple(dict.fromkeys(chunks))
        for m in wanted:
            if m < 1 or batch_size % m:
                raise ValueError(
                    f"chunks={m} does not divide batch_size={batch_size} into equal micro-batches"
                )
        if not wanted:
            raise ValueError("chunks is empty: give it a number, or leave it out")
        return wanted, ()
    every = [m for m in range(1, min(batch_size, MOST) + 1) if batch_size % m == 0]
    most = devices * (_UNKNOWN if len(profile.sizes) == 1 else _MEASURED)
    return tuple(m for m in every if m <= most), tuple(m for m in every if m > most)


def stage_counts(
    layers: int, devices: int, stages: int | Iterable[int] | None = None
) -> tuple[int, ...]:
    """The numbers of stages to try: what the user wants, or all that are possible.

    Beyond 16 devices not all: those up to 8, and from the largest down in steps of an eighth.

    Raises:
        ValueError: what the user wants is not possible.
    """
    most = min(layers, devices)
    if stages is None:
        if most <= 16:
            return tuple(range(1, most + 1))
        large = [most]
        while large[-1] > 9:
            large.append(large[-1] * 7 // 8)
        return (*range(1, 9), *(n for n in reversed(large) if n > 8))
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
