"""Plans under other schedules than 1F1B: GPipe's, several stages on a device, backward in halves,
made to measure.

What the search found for 1F1B says how many devices and micro-batches are worth a look. For these
the layers are cut anew: first so that the devices have equal loads, then layers are moved one by
one as long as the step becomes shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

from syncpipe.balance.profile import in_bytes
from syncpipe.planner.draft import Draft, Form, Terms
from syncpipe.planner.search import even_cut, improved, search_orders, shortage
from syncpipe.planner.sizes import chunk_counts
from syncpipe.schedules import SCHEDULES, auto

__all__ = ["ANY", "AUTO", "GLANCE", "LAYOUTS", "TITLES", "check_schedule", "choose", "variants"]

#: Asks for the fastest plan, whatever its schedule; and for a schedule made to measure.
ANY, AUTO = "any", "auto"

_Shape = Literal["line", "rounds", "v"]
#: What schedules are called in the papers, and where they want their stages: one on each device,
#: several going round, or two, there and back.
LAYOUTS: dict[str, tuple[str, _Shape]] = {
    "gpipe": ("GPipe", "line"),
    "interleaved_1f1b": ("interleaved 1F1B", "rounds"),
    "looped_bfs": ("looped BFS", "rounds"),
    "zb_h1": ("ZB-H1", "line"),
    "zb_h2": ("ZB-H2", "line"),
    "interleaved_zero_bubble": ("interleaved zero bubble", "rounds"),
    "zbv": ("ZBV", "v"),
    "v_half": ("V-Half", "v"),
    "v_min": ("V-Min", "v"),
    "dualpipev": ("DualPipeV", "v"),
    AUTO: ("made to measure", "line"),
}
TITLES = {"1f1b": "1F1B"} | {name: title for name, (title, _) in LAYOUTS.items()}
_NAMES = ("1f1b", *LAYOUTS, ANY)


@dataclass(frozen=True)
class Effort:
    """How long to look.

    Attributes:
        play: so many actions are played for each schedule, more or less.
        rounds: stages on each device, at most, where they go round.
        wide: whether other numbers of devices and micro-batches than the plan's are tried.
        cells: micro-batches by devices, at most, where no more are asked for.
        made: micro-batches by stages that a schedule is made for, at most.
    """

    play: int
    rounds: int
    wide: bool
    cells: int
    made: int


#: For a line of a comparison, and for a plan.
GLANCE = Effort(play=30_000, rounds=2, wide=False, cells=2048, made=512)
THOROUGH = Effort(play=300_000, rounds=4, wide=True, cells=4096, made=1 << 30)


def check_schedule(schedule: Any) -> None:
    """Refuses what there are no plans for.

    Raises:
        TypeError: not a name.
        ValueError: an unknown name.
    """
    if schedule is not None and not isinstance(schedule, str):
        raise TypeError(f"schedule={schedule!r}: plans are made for names, {', '.join(_NAMES)}")
    if schedule is not None and schedule not in _NAMES:
        raise ValueError(f"schedule={schedule!r}: there are plans for {', '.join(_NAMES)}")


def choose(
    terms: Terms, schedule: str | None, *, chunks: int | Iterable[int] | None, stages: int | None
) -> tuple[tuple[int, ...], Draft]:
    """The order of the devices, and the plan.

    Args:
        terms: layers and devices.
        schedule: a name; None for 1F1B.
        chunks: the number of micro-batches, or those to choose from.
        stages: the number of stages.

    Raises:
        LookupError: nothing fits into memory; it says what would.
        ValueError: an argument does not fit.
    """
    usual = schedule in (None, "1f1b")
    order, found = search_orders(terms, chunks=chunks, stages=stages if usual else None)

    def nothing() -> LookupError:
        lack = shortage(terms, chunks=chunks, stages=stages if usual else None)
        text = f"no plan fits {len(terms.machine)} devices and batch_size={terms.batch_size}"
        return LookupError(lack.explained(terms) if lack else text)

    if usual:
        if not found:
            raise nothing()
        return order, found[0]
    assert schedule is not None
    terms = terms.on(terms.machine.ordered(order))
    names = LAYOUTS if schedule == ANY else [schedule]
    made = variants(terms, found, names, THOROUGH, chunks=chunks, stages=stages)
    if schedule == ANY:
        made += [draft for draft in found if stages in (None, len(draft.balance))]
    if not made and (schedule in (ANY, AUTO) and not found):
        raise nothing()
    if not made:
        raise ValueError(_no_layout(terms, schedule, stages))
    best = min(made, key=lambda draft: draft.rank)
    if best.excess > 1:
        raise nothing() if schedule == ANY else LookupError(_lacking(best, terms))
    return order, best


def _no_layout(terms: Terms, schedule: str, stages: int | None) -> str:
    devices, layers = len(terms.machine), len(terms.profile.layers)
    wanted = f" stages={stages} with" if stages is not None else ""
    shape = {
        "line": "a stage on each device",
        "rounds": "two stages or more on each device",
        "v": "two stages on each device",
    }[LAYOUTS[schedule][1]]
    return (
        f"schedule={schedule!r} is not possible for{wanted} {devices} devices and {layers} layers: "
        f"it needs {shape}, none of them empty"
    )


def _lacking(nearest: Draft, terms: Terms) -> str:
    """What the plan that comes nearest lacks."""
    limits = terms.machine.memory
    d = max(range(len(nearest.on_device)), key=lambda d: nearest.on_device[d] / limits[d])
    needs, has = nearest.on_device[d], limits[d]
    return (
        f"no plan under schedule={nearest.schedule!r} that was looked at fits into memory. Nearest "
        f"comes balance={list(nearest.balance)} with chunks={nearest.chunks}: "
        f"{terms.machine.name(d)} needs {in_bytes(needs, up=True)}, "
        f"{in_bytes(needs - has, up=True)} more than its {in_bytes(has)}. Leave out the schedule: "
        "1F1B takes the least, and a shortage is explained there"
    )


def variants(
    terms: Terms,
    found: Sequence[Draft],
    names: Iterable[str],
    effort: Effort = GLANCE,
    *,
    chunks: int | Iterable[int] | None = None,
    stages: int | None = None,
) -> list[Draft]:
    """For each schedule the fastest plan that fits, or what comes nearest to fitting.

    Args:
        terms: layers and devices.
        found: plans under 1F1B, the fastest first; may be empty.
        names: of the schedules, of :data:`LAYOUTS`.
        effort: how long to look.
        chunks: the number of micro-batches, or those to choose from.
        stages: the number of stages.

    Returns:
        In the order of ``names``; without those that cannot be laid out on the devices.

    Raises:
        ValueError: ``chunks`` does not fit.
    """
    looks = _Looks(terms, found, effort, chunks, stages)
    return [draft for name in names if (draft := looks.best(name)) is not None]


class _Looks:
    """All that is tried for one plan."""

    def __init__(
        self,
        terms: Terms,
        found: Sequence[Draft],
        effort: Effort,
        chunks: int | Iterable[int] | None,
        stages: int | None,
    ) -> None:
        self._terms, self._effort, self._stages = terms, effort, stages
        self._found = [draft for draft in found if len(draft.balance) > 1]
        chunks = chunks if chunks is None or isinstance(chunks, int) else tuple(chunks)
        usual, extra = chunk_counts(terms.profile, len(terms.machine), terms.batch_size, chunks)
        self._counts, self._extra, self._asked = sorted(usual), extra, chunks is not None
        self._known: dict[str, Draft | None] = {}

    def best(self, name: str) -> Draft | None:
        """The best under a schedule; None if there is no way to lay it out."""
        if name not in self._known:
            self._known[name] = self._measured() if name == AUTO else self._named(name)
        return self._known[name]

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Devices and micro-batches to try."""
        most = len(self._terms.machine)
        if not self._effort.wide and self._found:
            p, m = self._found[0].form.devices, self._found[0].chunks
            yield p, m if self._asked else self._capped(p, m)
            return
        devices = dict.fromkeys([*(draft.form.devices for draft in self._found[:2]), most])
        if self._stages is not None:  # of which a device may have several
            devices = dict.fromkeys(p for p in range(most, 0, -1) if self._stages % p == 0)
        for p in devices:
            if p > 1 or most == 1:
                near = self._counts if self._asked else [self._capped(p, m) for m in self._near()]
                yield from ((p, m) for m in sorted(set(near)))

    def _capped(self, p: int, m: int) -> int:
        """Not more micro-batches than there is time for."""
        tried = [k for k in (*self._counts, *self._extra) if k * p <= self._effort.cells]
        return min(m, max(tried, default=m))

    def _near(self) -> Iterator[int]:
        """As many micro-batches as the plans found have, some fewer and more; else many."""
        if not self._found:
            yield from (*self._counts[-2:], *self._extra[:3])
        for draft in self._found[:2]:
            yield draft.chunks
            yield from [m for m in self._counts if m < draft.chunks][-2:]
            yield from [m for m in self._counts if m > draft.chunks][:1]

    def _forms(self, name: str) -> Iterator[Form]:
        layers, shape = len(self._terms.profile.layers), LAYOUTS[name][1]
        for p, m in self._sizes():
            line = tuple(range(p))
            made = {
                "line": [line],
                "v": [line + line[::-1]],
                "rounds": [line * v for v in range(2, self._effort.rounds + 1)],
            }[shape]
            for device_of in made:
                if len(device_of) <= layers and self._stages in (None, len(device_of)):
                    yield Form.of(name, SCHEDULES[name](m, device_of))

    def _named(self, name: str) -> Draft | None:
        """The best cut for the most promising forms."""
        tried: list[Draft] = []
        forms = list(self._forms(name))
        for starts, most in ((self._starts, 3 if self._effort.wide else 1), (self._extended, 1)):
            drafts = []
            for form in forms:
                cuts = (self._terms.draft(form, balance) for balance in starts(form))
                some = [draft for draft in cuts if draft is not None]
                drafts += [min(some, key=lambda draft: draft.rank)] if some else []
            tried += sorted(drafts, key=lambda draft: draft.rank)[:most]
        work = self._effort.play // max(1, len(tried))
        better = (improved(self._terms, draft, work)[0] for draft in tried)
        return min(better, key=lambda draft: draft.rank, default=None)

    def _starts(self, form: Form) -> Iterator[tuple[int, ...]]:
        """Cuts to begin with: even loads of devices, and what the search found."""
        chain = self._terms.chain(form.m)
        yield _levelled(chain.time_to, even_cut(chain.time_to, form.n), form)
        if form.n == form.devices:
            yield from {draft.balance for draft in self._found if len(draft.balance) == form.n}
        held = [w + z for w, z in zip(chain.fixed_to, chain.stored_to, strict=True)]
        if held == sorted(held) and held[-1] > 0:
            yield even_cut(held, form.n)

    def _extended(self, form: Form) -> Iterator[tuple[int, ...]]:
        """What the search found for as many devices, and a layer for each stage that is left: so
        what takes long to send crosses no more often than there.
        """
        layers, n = len(self._terms.profile.layers), form.n
        for balance in {draft.balance for draft in self._found}:
            if len(balance) == form.devices < n:
                ends = [*accumulate(balance), *[layers] * (n - len(balance))]
                ends = [min(end, layers - n + k) for k, end in enumerate(ends, 1)]
                yield tuple(b - a for a, b in pairwise([0, *ends]))

    def _measured(self) -> Draft | None:
        """Made to measure: for the cuts of the search, and of the best named schedules."""
        named = [self.best(name) for name in LAYOUTS if name != AUTO]
        fitting = [draft for draft in named if draft is not None and draft.excess <= 1]
        few = 2 if self._effort.wide else 1
        starts = [*self._found[:1], *sorted(fitting, key=lambda draft: draft.rank)[:few]]
        starts = [draft for draft in starts if self._stages in (None, len(draft.balance))]
        if any(draft.chunks * draft.form.n > self._effort.made for draft in starts):
            return None
        made = [self._made(draft) for draft in starts]
        best = [draft for draft in made if draft is not None and draft.excess <= 1]
        return min(best, key=lambda draft: draft.rank, default=None)

    def _made(self, start: Draft) -> Draft | None:
        """A schedule for a cut that fits; that of the cut itself, if none is better."""
        terms, form = self._terms, start.form
        own = Form.of(AUTO, form.schedule)
        plain = terms.draft(own, start.balance, start.modes)
        stages = terms.footprints(form, start.balance, start.modes)
        base = [
            sum(stages[j].fixed for j in mine) + max(stages[j].transient for j in mine)
            for mine in form.stages_of
        ]
        limits = zip(terms.machine.memory, base, strict=False)
        try:
            schedule = auto(
                form.m,
                form.device_of,
                costs=terms.costs(own, start.balance),
                rematerialized=[form.m * (mode == "recompute") for mode in start.modes],
                activations=[s.held + s.again + s.halves for s in stages],
                inputs=[s.held for s in stages],
                memory=[max(0.0, limit - held) for limit, held in limits],
                split=form.split,
                starts=[form.schedule],
            )
        except ValueError:  # its account of memory is on the safe side
            return plain
        draft = terms.draft(Form.of(AUTO, schedule), start.balance, start.modes)
        some = [one for one in (plain, draft) if one is not None]
        return min(some, key=lambda draft: draft.rank, default=None)


def _levelled(times: Sequence[float], balance: tuple[int, ...], form: Form) -> tuple[int, ...]:
    """Moves layers as long as the busiest device, ``m`` times, and the longest stage have less."""

    def load(balance: Sequence[int]) -> float:
        busy, longest = [0.0] * form.devices, 0.0
        ends = pairwise(accumulate(balance, initial=0))
        for d, (i, j) in zip(form.device_of, ends, strict=True):
            busy[d] += times[j] - times[i]
            longest = max(longest, times[j] - times[i])
        return form.m * max(busy) + len(busy) * longest

    for _ in range(4):
        moves = (_moved(balance, a, b) for a, b in _pairs(form.n) if balance[a] > 1)
        better = next((cut for cut in moves if load(cut) < load(balance) * (1 - 1e-9)), None)
        if better is None:
            break
        balance = better
    return balance


def _pairs(n: int) -> Iterator[tuple[int, int]]:
    for far in range(1, min(n, 4)):
        for s in range(n - far):
            yield from ((s, s + far), (s + far, s))


def _moved(balance: Sequence[int], a: int, b: int) -> tuple[int, ...]:
    moved = list(balance)
    moved[a] -= 1
    moved[b] += 1
    return tuple(moved)
