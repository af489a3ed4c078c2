"""``search``: all numbers of micro-batches and of stages, both schedules; the best of what fits.

Best first. What is known of a task (a schedule, a number of stages, one of micro-batches) is a step
time that it cannot fall short of: at first from its largest stage, then from the exact search for
cuts, with as many slots as fit. The task with the least of them is next. When the best plan of a
schedule takes no longer than any task that is left could, the search is over.

What is found for a task depends on nothing but the task and the first devices: so a plan on fewer
devices is among those for more, and the numbers of micro-batches are the same for any memory.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from syncpipe.balance.profile import Profile
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.cuts.network import Cut, CutSearch, least_load
from syncpipe.planner.cuts.one_f_one_b import FAMILIES, slots_of
from syncpipe.planner.search.candidate import SCHEDULES, Candidate, Terms, evaluate
from syncpipe.planner.search.polish import Draft, drafted, fitted, polished, refitted
from syncpipe.planner.search.shortage import Shortage, shortage
from syncpipe.planner.search.sizes import chunk_counts, stage_counts

__all__ = ["Candidate", "Shortage", "evaluate", "search", "shortage"]

#: So many of the best drafts for each number of stages are polished, with so much work for all.
_POLISHED = 32
_WORK = 500_000
_TIE = 1e-9


@dataclass(frozen=True, order=True)
class _Task:
    """One exact search, and the least time that it may find."""

    lowest: float
    chunks: int
    stages: int
    schedule: str
    cut: Cut | None = None  # of the least bound, once that is known

    def cuts(self, terms: Terms) -> CutSearch:
        """The search for it: under 1F1B with any slots."""
        n, m = self.stages, self.chunks
        if n == 1 and self.schedule == "1f1b":
            return terms.cuts("1f1b", m, (1,))
        return terms.cuts(self.schedule, m, (m,) * n, free=self.schedule == "1f1b")


def search(
    profile: Profile,
    machine: Machine,
    batch_size: int,
    *,
    param_scale: float,
    chunks: int | Iterable[int] | None = None,
    stages: int | Iterable[int] | None = None,
    schedules: Sequence[str] = SCHEDULES,
) -> list[Candidate]:
    """The ways to run the layers as a pipeline that fit, the fastest first.

    For each number of stages and of micro-batches the cut is exact: for GPipe the one with the
    least step time, for 1F1B those with the least bound, for any slots and for those of each
    family. What cannot be the best one with the same schedule is left out. The best few are then
    polished (:mod:`.polish`).

    One stage is one device that takes micro-batches one after another: gradient accumulation. It
    counts as 1F1B, with a single slot, where that may be used.

    Args:
        profile: what the layers cost.
        machine: the devices; stage ``s`` is on device ``s``.
        batch_size: samples in a mini-batch.
        param_scale: bytes for each byte of a parameter that is trained.
        chunks: the number of micro-batches, or those to choose from; by default those of
            :func:`~syncpipe.planner.search.sizes.chunk_counts`.
        stages: the number of stages, or those to choose from; by default all up to the number of
            devices.
        schedules: to choose from, ``"gpipe"`` and ``"1f1b"``.

    Returns:
        The best for each schedule and number of stages that was not left out, by simulated time; of
        equal ones that with fewer stages, then with less memory. Empty if nothing fits.
        ``Candidate.least`` of each is what nothing among all that was to be chosen from falls short
        of, whatever its cut, slots, micro-batches and stages.

    Raises:
        ValueError: an argument does not fit.
    """
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: there are plans for 'gpipe' and for '1f1b'")
    terms = Terms(profile, machine, batch_size, param_scale)
    usual, extra = chunk_counts(terms.profile, len(machine), batch_size, chunks)
    counts = stage_counts(len(terms.profile.layers), len(machine), stages)
    return _Search(terms).run(_tasks(terms, (*usual, *extra), counts, schedules))


class _Search:
    """What was found so far."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._drafts: dict[tuple[str, int], dict[Draft, float]] = {}  # and what bounds them
        self._fastest = dict.fromkeys(SCHEDULES, math.inf)

    def run(self, tasks: list[_Task]) -> list[Candidate]:
        """The best of each kind in the end, the fastest first."""
        terms, least = self._terms, math.inf
        heapq.heapify(tasks)
        while tasks:
            task = heapq.heappop(tasks)
            if task.cut is None and not self._hopeless(task.schedule, task.lowest):
                cut = task.cuts(terms).minimise()
                if cut is not None:  # else nothing fits
                    known = max(task.lowest, _rounded(cut.value * terms.sound(task.chunks)))
                    heapq.heappush(tasks, replace(task, lowest=known, cut=cut))
                continue
            least = min(least, task.lowest)
            if not self._hopeless(task.schedule, task.lowest):
                for draft in _drafts(terms, task):
                    self._keep(draft, task.lowest)
        left = dict.fromkeys(self._drafts, _WORK)
        for draft, lowest in self._leading(_POLISHED):
            key = (draft.schedule, len(draft.balance))
            if left[key] > 0 and not self._hopeless(draft.schedule, lowest):
                found, left[key] = polished(terms, draft, left[key], lowest)
                self._keep(found, lowest)
        few = 4 if terms.profile.skips else 1
        best: dict[tuple[str, int], Candidate] = {}
        for draft, _ in self._leading(few):
            one, key = draft.candidate(terms), (draft.schedule, len(draft.balance))
            if key not in best or one.time < best[key].time:
                best[key] = one
        ranked = sorted(best.values(), key=_rank)
        return [replace(one, least=min(least, ranked[0].time)) for one in ranked]

    def _hopeless(self, schedule: str, lowest: float) -> bool:
        return lowest >= self._fastest[schedule] * (1 - _TIE)

    def _keep(self, draft: Draft, lowest: float) -> None:
        self._drafts.setdefault((draft.schedule, len(draft.balance)), {})[draft] = lowest
        if draft.time < self._fastest[draft.schedule]:
            # Drafts know of no skips.
            skips = self._terms.profile.skips
            time = draft.candidate(self._terms).time if skips else draft.time
            self._fastest[draft.schedule] = min(self._fastest[draft.schedule], time)

    def _leading(self, few: int) -> list[tuple[Draft, float]]:
        """The best few of each kind, the fastest first."""
        leading = [
            pair
            for found in self._drafts.values()
            for pair in sorted(found.items(), key=lambda pair: pair[0].time)[:few]
        ]
        return sorted(leading, key=lambda pair: pair[0].time)


def _drafts(terms: Terms, task: _Task) -> list[Draft]:
    """What becomes of the exact cuts for a task, under 1F1B with slots that suit them.

    Empty if nothing fits.
    """
    cut, m, n = task.cut, task.chunks, task.stages
    assert cut is not None
    if task.schedule == "gpipe" or n == 1:
        draft = drafted(terms, task.schedule, cut.balance, m, cut.slots)
        return [draft] if draft else []
    found: list[Draft] = []

    def enough() -> bool:
        return any(draft.time <= task.lowest * (1 + _TIE) for draft in found)

    for slots in fitted(terms, cut.balance, m, cut.recomputes, cut.slots):
        draft = drafted(terms, "1f1b", cut.balance, m, slots)
        if draft:
            found.append(draft)
    if found and not enough():
        found.append(refitted(terms, min(found, key=lambda draft: draft.time)))
    for family in (*FAMILIES, "single"):
        if enough() or (family == "single" and found):
            break
        exact = terms.cuts("1f1b", m, slots_of(family, n, m)).minimise()
        draft = drafted(terms, "1f1b", exact.balance, m, exact.slots) if exact else None
        if draft:
            found += [draft, refitted(terms, draft)]
    return list(dict.fromkeys(found))


def _tasks(
    terms: Terms, chunks: Sequence[int], stages: Sequence[int], schedules: Sequence[str]
) -> list[_Task]:
    """All that there is to search."""
    tasks = []
    for m in chunks:
        for n in stages:
            load = least_load(terms.chain(m).time_to, terms.machine.speed[:n])
            kinds = schedules if n > 1 else ["1f1b" if "1f1b" in schedules else "gpipe"]
            for schedule in dict.fromkeys(kinds):
                lowest = terms.cuts(schedule, m, (m,) * n).lowest(load) * terms.sound(m)
                python = terms.interpreter((len(terms.chain(m)),), m, schedule, (False,))
                tasks.append(_Task(_rounded(max(lowest, python)), m, n, schedule))
    return tasks


def _rounded(bound: float) -> float:
    """So that of what takes as long fewer micro-batches come first."""
    return float(f"{bound * (1 - _TIE):.9e}")


def _rank(candidate: Candidate) -> tuple[float, int, float, int]:
    time = float(f"{candidate.time:.8e}")
    return time, len(candidate.balance), max(candidate.memory), candidate.chunks
