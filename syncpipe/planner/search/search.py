"""``search``: all numbers of micro-batches and of stages, both schedules; the best of what fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from syncpipe.balance.profile import Profile
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.cuts.network import even_cut
from syncpipe.planner.cuts.one_f_one_b import FAMILIES, Family, slots_of
from syncpipe.planner.search.candidate import SCHEDULES, Candidate, Terms, evaluate
from syncpipe.planner.search.polish import Draft, drafted, polished, refitted
from syncpipe.planner.search.shortage import Shortage, shortage
from syncpipe.planner.search.sizes import chunk_counts, stage_counts

__all__ = ["Candidate", "Shortage", "evaluate", "search", "shortage"]

#: Stage counts up to this are all looked into; of larger ones only those that may be the best.
_FEW_STAGES = 8
#: So many of the best candidates are polished, with so much work for each (polish.py).
_POLISHED = 8
_WORK = 300_000
_TIE = 1e-9
#: Other slots make a bound lower by this factor at most; if by more, that is missed.
_HOPE = 1.3


@dataclass(frozen=True, order=True)
class _Task:
    """One exact search: the least time it may find, and for what."""

    extra: bool  # more micro-batches than usual, or a single slot: where nothing fits otherwise
    lowest: float
    chunks: int
    stages: int
    schedule: str
    slots: tuple[int, ...]


def search(
    profile: Profile,
    machine: Machine,
    batch_size: int,
    *,
    param_scale: float,
    chunks: int | Iterable[int] | None = None,
    stages: int | Iterable[int] | None = None,
    schedules: Sequence[str] = SCHEDULES,
    slots: Sequence[Family] = FAMILIES,
) -> list[Candidate]:
    """The ways to run the layers as a pipeline that fit, the fastest first.

    For each number of stages and of micro-batches the cut is exact: for GPipe the one with the
    least step time, for 1F1B the one with the least bound. What cannot beat the best one with the
    same schedule and as many stages is left out; so is, beyond 8 stages, what cannot beat the
    best with the same schedule. The best few are then polished (:mod:`.polish`).

    One stage is one device that takes micro-batches one after another: gradient accumulation. It
    counts as 1F1B, with a single slot, where that may be used.

    Args:
        profile: what the layers cost.
        machine: the devices; stage ``s`` is on device ``s``.
        batch_size: samples in a mini-batch.
        param_scale: bytes for each byte of a parameter that is trained.
        chunks: the number of micro-batches, or those to choose from; by default what divides
            ``batch_size`` within reason (:func:`~syncpipe.planner.search.sizes.chunk_counts`).
        stages: the number of stages, or those to choose from; by default all up to the number of
            devices.
        schedules: to choose from, ``"gpipe"`` and ``"1f1b"``.
        slots: of 1F1B, to choose from, ``"overlap"`` and ``"textbook"``.

    Returns:
        The best for each schedule and number of stages, by simulated time; of equal ones that with
        fewer stages, then with less memory. Empty if nothing fits.

    Raises:
        ValueError: an argument does not fit.
    """
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: there are plans for 'gpipe' and for '1f1b'")
    terms = Terms(profile, machine, batch_size, param_scale)
    best: dict[tuple[str, int], Candidate] = {}
    drafts: dict[Draft, None] = {}
    fastest = dict.fromkeys(schedules, math.inf)
    fastest["1f1b"] = math.inf  # also what a single stage counts as
    slow: set[tuple[str, int]] = set()  # cannot be the best with usual micro-batches
    done: set[tuple[str, int, int]] = set()
    for task in _tasks(terms, chunks, stages, schedules, slots):
        key, known = (task.schedule, task.stages), best.get((task.schedule, task.stages))
        if task.extra and (known or key in slow):
            continue
        if known and task.lowest >= known.time * (1 - _TIE):
            continue
        if task.stages > _FEW_STAGES and task.lowest > fastest[task.schedule]:
            slow.add(key)
            continue
        if task.stages > _FEW_STAGES and (*key, task.chunks) in done:
            continue  # the slots are refitted anyway
        found = _drafts(terms, task, known.time * (1 - _TIE) if known else math.inf)
        drafts.update(dict.fromkeys(found))
        if found:
            done.add((*key, task.chunks))
            _keep(best, min(found, key=lambda draft: draft.time).candidate(terms))
            fastest[task.schedule] = min(fastest[task.schedule], best[key].time)
    for draft in sorted(drafts, key=lambda draft: draft.time)[:_POLISHED]:
        _keep(best, polished(terms, draft.candidate(terms), _WORK))
    return sorted(best.values(), key=_rank)


def _keep(best: dict[tuple[str, int], Candidate], found: Candidate) -> None:
    """The better one of its kind stays."""
    key = (found.schedule, len(found.balance))
    if key not in best or found.time < best[key].time:
        best[key] = found


def _drafts(terms: Terms, task: _Task, limit: float) -> list[Draft]:
    """The exact cut for a task, and under 1F1B what becomes of it with slots that suit it.

    Empty if nothing fits, or nothing is faster than the limit.
    """
    pipelined = task.schedule == "1f1b" and task.stages > 1
    # The bound is that of the task's slots; other slots may have a lower one.
    at_most = limit * _HOPE if pipelined else limit
    cut = terms.cuts(task.schedule, task.chunks, task.slots).minimise(at_most=at_most)
    if cut is None:
        return []
    draft = drafted(terms, task.schedule, cut.balance, task.chunks, task.slots)
    assert draft is not None  # it fits
    return [draft, refitted(terms, draft)] if pipelined else [draft]


def _tasks(
    terms: Terms,
    chunks: int | Iterable[int] | None,
    stages: int | Iterable[int] | None,
    schedules: Sequence[str],
    slots: Sequence[Family],
) -> list[_Task]:
    """All that could be searched for, the most promising first."""
    usual, extra = chunk_counts(terms.profile, len(terms.machine), terms.batch_size, chunks)
    counts = stage_counts(len(terms.profile.layers), len(terms.machine), stages)
    tasks = []
    for m in (*usual, *extra):
        chain = terms.chain(m)
        for n in counts:
            times = chain.time_to
            ends = accumulate(even_cut(times, n), initial=0)
            load = max(times[j] - times[i] for i, j in pairwise(ends))
            ways = _ways(n, m, schedules, slots)
            frugal = _ways(n, m, [s for s in schedules if s == "1f1b"], ["single"]) - ways
            for schedule, numbers in (*ways, *frugal):
                lowest = terms.cuts(schedule, m, numbers).lowest(load)
                # Rounded, so that what takes as long with fewer micro-batches comes first.
                rank = float(f"{lowest * (1 - _TIE):.9e}")
                last = m in extra or (schedule, numbers) in frugal
                tasks.append(_Task(last, rank, m, n, schedule, numbers))
    tasks.sort(key=lambda task: (task.extra, task.chunks if task.extra else 0, task))
    return tasks


def _ways(
    n: int, m: int, schedules: Sequence[str], slots: Sequence[Family]
) -> set[tuple[str, tuple[int, ...]]]:
    """Schedules, and for each stage the most micro-batches in flight."""
    if n == 1:
        return {("1f1b", (1,)) if "1f1b" in schedules else ("gpipe", (m,))}
    ways = {("1f1b", slots_of(family, n, m)) for family in slots if "1f1b" in schedules}
    return ways | {("gpipe", (m,) * n) for schedule in schedules if schedule == "gpipe"}


def _rank(candidate: Candidate) -> tuple[float, int, float, int]:
    time = float(f"{candidate.time:.8e}")
    return time, len(candidate.balance), max(candidate.memory), candidate.chunks
