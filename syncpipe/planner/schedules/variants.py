"""The best plan under each of the other schedules that is found in a moment.

What the search found for 1F1B and GPipe says how many devices and micro-batches are worth a look.
For these the layers are cut anew: first so that the devices have equal loads, then layers are moved
one by one as long as the step becomes shorter, played through. No cut is proved to be the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from syncpipe.planner.cuts.network import even_cut
from syncpipe.planner.schedules.layouts import AUTO, LAYOUTS, placement, placements
from syncpipe.planner.schedules.setting import Draft, Scheduled, Setting
from syncpipe.planner.search.candidate import Candidate, Terms
from syncpipe.planner.search.sizes import chunk_counts
from syncpipe.schedules.auto import auto
from syncpipe.schedules.build import SCHEDULES

__all__ = ["GLANCE", "THOROUGH", "Effort", "variants"]

_NOTICED = 1e-9


@dataclass(frozen=True)
class Effort:
    """How long to look.

    Attributes:
        play: so many actions are played for each schedule, more or less.
        rounds: stages on each device, at most, where they go round.
        wide: whether other numbers of devices and micro-batches than the plan's are tried.
        cells: micro-batches by devices, at most, where nobody asked for more: fewer micro-batches
            than the plan's are tried, if they are so many.
        made: micro-batches by stages that one is made for, at most.
    """

    play: int
    rounds: int
    wide: bool
    cells: int
    made: int


#: For a line on the page, and for a plan.
GLANCE = Effort(play=30_000, rounds=2, wide=False, cells=2048, made=512)
THOROUGH = Effort(play=300_000, rounds=4, wide=True, cells=4096, made=1 << 30)


def variants(
    terms: Terms,
    found: Sequence[Candidate],
    names: Iterable[str],
    effort: Effort,
    *,
    chunks: int | Iterable[int] | None = None,
    stages: int | None = None,
) -> list[Scheduled]:
    """For each schedule the fastest plan that fits, or what comes nearest to fitting.

    Args:
        terms: layers and devices.
        found: plans under 1F1B and GPipe, the fastest first; may be empty.
        names: of the schedules, of :data:`~syncpipe.planner.schedules.layouts.LAYOUTS`.
        effort: how long to look.
        chunks: the number of micro-batches, or those to choose from.
        stages: the number of stages.

    Returns:
        In the order of ``names``; without those that cannot be laid out on the devices.

    Raises:
        ValueError: ``chunks`` does not fit.
    """
    looks = _Looks(terms, found, effort, chunks, stages)
    return [candidate for name in names if (candidate := looks.best(name)) is not None]


class _Looks:
    """All that is tried for one plan."""

    def __init__(
        self,
        terms: Terms,
        found: Sequence[Candidate],
        effort: Effort,
        chunks: int | Iterable[int] | None,
        stages: int | None,
    ) -> None:
        self._terms, self._effort, self._stages = terms, effort, stages
        self._found = [c for c in found if len(c.balance) > 1]
        chunks = chunks if chunks is None or isinstance(chunks, int) else tuple(chunks)
        usual, extra = chunk_counts(terms.profile, len(terms.machine), terms.batch_size, chunks)
        self._counts, self._extra, self._asked = sorted(usual), extra, chunks is not None
        self._known: dict[str, Scheduled | None] = {}

    def best(self, name: str) -> Scheduled | None:
        """The best under a schedule; None if there is no way to lay it out."""
        if name not in self._known:
            self._known[name] = self._measured() if name == AUTO else self._named(name)
        return self._known[name]

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Devices and micro-batches to try."""
        most = len(self._terms.machine)
        if not self._effort.wide and self._found:
            p, m = _devices(self._found[0]), self._found[0].chunks
            yield p, m if self._asked else self._capped(p, m)
            return
        devices = dict.fromkeys([*map(_devices, self._found[:2]), most])
        if self._stages is not None:  # of which a device may have several
            devices = dict.fromkeys(p for p in range(most, 0, -1) if self._stages % p == 0)
        for p in devices:
            if p == 1 < most:
                continue
            near = self._counts if self._asked else [self._capped(p, m) for m in self._near()]
            yield from ((p, m) for m in sorted(set(near)))

    def _capped(self, p: int, m: int) -> int:
        """Not more micro-batches than there is time for."""
        tried = [
            count for count in (*self._counts, *self._extra) if count * p <= self._effort.cells
        ]
        return min(m, max(tried, default=m))

    def _near(self) -> Iterator[int]:
        """As many micro-batches as the plans found have, some fewer and more; else many."""
        if not self._found:
            yield from (*self._counts[-2:], *self._extra[:3])
        for candidate in self._found[:2]:
            yield candidate.chunks
            yield from [m for m in self._counts if m < candidate.chunks][-2:]
            yield from [m for m in self._counts if m > candidate.chunks][:1]

    def _settings(self, name: str) -> Iterator[Setting]:
        layers, most = len(self._terms.profile.layers), self._effort.rounds
        for p, m in self._sizes():
            for device_of in placements(name, p, layers, most=most, stages=self._stages):
                yield Setting(self._terms, name, SCHEDULES[name](m, device_of))

    def _named(self, name: str) -> Scheduled | None:
        """The best cut for the most promising settings."""
        tried, settings = [], list(enumerate(self._settings(name)))
        for starts, most in ((self._starts, 3 if self._effort.wide else 1), (self._extended, 1)):
            cuts = [(list(starts(setting)), k, setting) for k, setting in settings]
            drafts = [
                (min(map(setting.draft, some)), k, setting) for some, k, setting in cuts if some
            ]
            tried += sorted(drafts, key=lambda entry: entry[:2])[:most]
        work = self._effort.play // max(1, len(tried))
        polished = [(_polished(setting, draft, work), k, setting) for draft, k, setting in tried]
        if not polished:
            return None
        draft, _, setting = min(polished, key=lambda entry: entry[:2])
        return setting.candidate(draft)

    def _starts(self, setting: Setting) -> Iterator[tuple[int, ...]]:
        """Cuts to begin with: even loads of devices, and what the search found."""
        times = setting.chain.time_to
        yield _levelled(times, even_cut(times, setting.n), setting.device_of, setting.m)
        if setting.n == max(setting.device_of) + 1:
            yield from {c.balance for c in self._found if len(c.balance) == setting.n}
        held = [w + z for w, z in zip(setting.chain.fixed_to, setting.chain.stored_to, strict=True)]
        if held == sorted(held) and held[-1] > 0:
            yield even_cut(held, setting.n)

    def _extended(self, setting: Setting) -> Iterator[tuple[int, ...]]:
        """What the search found for as many devices, and a layer for each stage that is left: so
        what takes long to send crosses no more often than there.
        """
        layers, n = len(setting.terms.profile.layers), setting.n
        for balance in {c.balance for c in self._found}:
            if len(balance) == max(setting.device_of) + 1 < n:
                ends = [*accumulate(balance), *[layers] * (n - len(balance))]
                ends = [min(end, layers - n + k) for k, end in enumerate(ends, 1)]
                yield tuple(b - a for a, b in pairwise([0, *ends]))

    def _measured(self) -> Scheduled | None:
        """Made to measure: for the cuts of the search, and of the best named schedules."""
        effort = self._effort
        named = [self.best(name) for name in LAYOUTS if name != AUTO]
        fitting = [c for c in named if c is not None and c.fits(self._terms.machine)]
        starts: list[tuple[Candidate, bool]] = [(c, False) for c in self._found[:1]]
        starts += [(c, True) for c in sorted(fitting, key=_rank)[: 2 if effort.wide else 1]]
        settings = [(Setting(self._terms, AUTO, c.simulation.schedule), c, s) for c, s in starts]
        settings = [entry for entry in settings if self._stages in (None, entry[0].n)]
        if any(setting.m * setting.n > effort.made for setting, _, _ in settings):
            return None
        best: Scheduled | None = None
        for setting, start, split in settings:
            draft = setting.draft(start.balance)
            if draft.excess > 1:
                continue
            for made in (setting.candidate(draft), self._made(setting, draft, split)):
                if made and (best is None or made.time < best.time * (1 - _NOTICED)):
                    best = made
        return best

    def _made(self, setting: Setting, draft: Draft, split: bool) -> Scheduled | None:
        """A schedule for a cut that fits, if it does."""
        memory = setting.memory(draft, split=split)
        m, device_of = setting.m, setting.device_of
        counts = [m * again for again in draft.recomputes]
        try:
            schedule = auto(
                m,
                device_of,
                costs=setting.costs(draft.balance),
                rematerialized=counts,
                split=split,
                starts=[setting.schedule],
                **memory,
            )
        except ValueError:  # its account of memory is on the safe side
            return None
        own = Setting(self._terms, AUTO, schedule)
        candidate = own.candidate(draft)
        return candidate if candidate.fits(self._terms.machine) else None


def _devices(candidate: Candidate) -> int:
    """How many it uses."""
    return max(placement(candidate.simulation.schedule)) + 1


def _rank(candidate: Candidate) -> tuple[float, int]:
    return candidate.time, len(candidate.balance)


def _levelled(
    times: Sequence[float], balance: tuple[int, ...], device_of: Sequence[int], m: int
) -> tuple[int, ...]:
    """Moves layers as long as the busiest device, ``m`` times, and the longest stage have less."""

    def load(balance: Sequence[int]) -> float:
        busy, longest = [0.0] * (max(device_of) + 1), 0.0
        for d, (i, j) in zip(device_of, pairwise(accumulate(balance, initial=0)), strict=True):
            busy[d] += times[j] - times[i]
            longest = max(longest, times[j] - times[i])
        return m * max(busy) + len(busy) * longest

    least = load(balance)
    for _ in range(4):
        before = least
        for other in _neighbours(balance):
            if (value := load(other)) < least * (1 - _NOTICED):
                balance, least = other, value
                break
        if least == before:
            break
    return balance


def _polished(setting: Setting, draft: Draft, work: int) -> Draft:
    """A draft at least as good, for so many actions to play."""
    tries, improved = work // setting.work, True
    while improved and tries > 0:
        improved = False
        for balance in _neighbours(draft.balance):
            other, tries = setting.draft(balance), tries - 1
            if (other.excess, other.time) < (draft.excess, draft.time * (1 - _NOTICED)):
                draft, improved = other, True
            if tries <= 0:
                break
    return draft


def _neighbours(balance: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Cuts with a layer moved from one stage to another; borders between move along."""
    n = len(balance)
    for far in range(1, min(n, 4)):
        for s in range(n - far):
            for a, b in ((s, s + far), (s + far, s)):
                if balance[a] > 1:
                    other = list(balance)
                    other[a] -= 1
                    other[b] += 1
                    yield tuple(other)
